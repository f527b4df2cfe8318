"""What content a layer reads, and where it lives at inference.

A *core* is the content that a buffer or a table holds: a value without the weight that the plan keeps outside. A
*residency* says where it is kept. Layers whose values are the same core share one buffer or one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from valuepath.shape import Fold, Shape
from valuepath.wiring import Embed, Fixed, Gate, LayerWiring, Learn, Own, Shared, Source, Table, Tap, Term, Wiring, WiringError


@dataclass(frozen=True, slots=True)
class Projected:
    """Layer ``layer``'s raw value projection V_n."""

    layer: int


@dataclass(frozen=True, slots=True)
class Embedded:
    """x0 W_V of layer ``layer``."""

    layer: int


@dataclass(frozen=True, slots=True)
class Rows:
    """The table of layer ``layer``, or the one shared table (``None``), as it is."""

    layer: int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """Layer ``layer``'s finished mix."""

    layer: int


Core = Projected | Embedded | Rows | Finished


@dataclass(frozen=True, slots=True)
class FirstInput:
    """The normalised attention input of layer 0, which is a function of the token id: d channels."""


@dataclass(frozen=True, slots=True)
class NormedEmbedding:
    """x0: d channels."""


Content = Core | FirstInput | NormedEmbedding
"""What is held for a token id: a value, or the input of a value projection that is applied after attention."""


@dataclass(frozen=True, slots=True)
class Store:
    """This layer writes a buffer of its own."""


@dataclass(frozen=True, slots=True)
class Alias:
    """The content is in layer ``layer``'s buffer."""

    layer: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """The content is a row per token id: ids are kept, ``core`` names the table."""

    core: Core


Residency = Store | Alias | Tokens


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that one layer hands to later ones.

    kind ``tap``: raw projection; ``shared``: finished stream without its outside weight; ``scale``: that weight.
    """

    kind: Literal["tap", "shared", "scale"]
    stream: str
    layer: int

    @property
    def key(self) -> str:
        return item_key(self.kind, self.stream, self.layer)


def item_key(kind: str, stream: str, layer: int) -> str:
    """The name under which a tensor is handed from layer to layer."""
    return f"{kind}.{stream}.{layer}"


# ------------------------------------------------------------------------------------------------------- resolving
@dataclass(frozen=True)
class Reads:
    """Which core a layer's value and which finished key it reads, and the layers whose weights stay outside."""

    v_core: Core
    v_scale: tuple[int, ...]
    k_core: int
    k_scale: tuple[int, ...]


def resolve(wiring: Wiring, shape: Shape) -> list[Reads]:
    """What each layer reads. Layers read earlier ones only, so one walk forward is enough."""
    found: list[Reads] = []
    for n in range(wiring.num_layers):
        found.append(Reads(*_value(wiring, n, found), *_key(wiring, shape, n, found)))
    return found


def _outside(term: Term, n: int) -> tuple[int, ...]:
    return () if term.weight == Fixed(1.0) else (n,)


def _value(wiring: Wiring, n: int, earlier: list[Reads]) -> tuple[Core, tuple[int, ...]]:
    term = wiring.layers[n].v.lone
    if term is None:
        return Finished(n), ()
    scale = _outside(term, n)
    match term.source:
        case Own():
            return Projected(n), scale
        case Tap(layer):
            return Projected(layer), scale
        case Embed():
            return Embedded(n), scale
        case Table(shared):
            return Rows(None if shared else n), scale
        case Shared(layer):
            return earlier[layer].v_core, scale + earlier[layer].v_scale
    raise AssertionError(f"v[{n}] reads {term.source}")


def _key(wiring: Wiring, shape: Shape, n: int, earlier: list[Reads]) -> tuple[int, tuple[int, ...]]:
    term = wiring.layers[n].k.lone
    match term:
        case Term(Shared(layer)):
            return earlier[layer].k_core, _outside(term, n) + earlier[layer].k_scale
        # a raw key of a plain layer is finished in the same way here, unless each layer's key norm has its own gain
        case Term(Tap(layer), Fixed(1.0)) if shape.qk_norm != "gain" and wiring.layers[layer].k.is_plain:
            return layer, ()
    return n, ()


def token_layers(wiring: Wiring, resolved: list[Reads], fold: Fold) -> set[int]:
    """The layers whose values are rebuilt from token ids."""
    first_is_embedding = wiring.layers[0].x.is_plain
    by_token: list[bool] = []
    """For each layer, whether its finished value is a function of the token id; layers read earlier ones only."""
    has_first: list[bool] = []
    """For each layer, whether its finished value is, or is made of, the value of layer 0."""

    def source_by_token(n: int, source: Source) -> bool:
        match source:
            case Own():
                return n == 0 and first_is_embedding
            case Tap(layer):
                return layer == 0 and first_is_embedding
            case Shared(layer):
                return by_token[layer]
        return True  # a table, or x0 W_V

    def source_has_first(n: int, source: Source) -> bool:
        match source:
            case Tap(layer):
                return layer == 0
            case Shared(layer):
                return has_first[layer]
            case Own() | Embed():
                return n == 0
        return False  # a table of its own

    for n, layer in enumerate(wiring.layers):
        gated = any(isinstance(term.weight, Gate) for term in layer.v)
        by_token.append(
            layer.v.renorm != "tensor" and not gated and all(source_by_token(n, term.source) for term in layer.v)
        )
        has_first.append(any(source_has_first(n, term.source) for term in layer.v) or (n == 0 and layer.v.lone is None))
    determined = {n for n, yes in enumerate(by_token) if yes}
    tables = {n for n in determined if isinstance(resolved[n].v_core, Rows)}
    if fold == "none":
        return tables
    if fold == "all":
        return determined
    later = {n for n in determined if n >= 1}
    first = {0} & determined if any(has_first[n] for n in later) else set()
    return tables | later | first


def ingredients(wiring: Wiring, resolved: list[Reads], core: Core) -> tuple[Content, ...] | None:
    """What a token-determined core is an affine function of: rows that can be summed with attention weights *before* the
    projection, ``sum_u a_u W x_u = W sum_u a_u x_u``. None if it is not one (a rescaled mix)."""
    match core:
        case Rows():
            return (core,)
        case Embedded():
            return (NormedEmbedding(),)
        case Projected():
            return (FirstInput(),)
        case Finished(n):
            mix = wiring.layers[n].v
            if mix.renorm is not None:
                return None
            found: list[Content] = []
            for term in mix:
                match term.source:
                    case Shared(layer):
                        inner = ingredients(wiring, resolved, resolved[layer].v_core)
                        if inner is None:
                            return None
                        found += inner
                    case Table(shared):
                        found.append(Rows(None if shared else n))
                    case Embed():
                        found.append(NormedEmbedding())
                    case Own() | Tap():
                        found.append(FirstInput())
            return tuple(dict.fromkeys(found))
    raise AssertionError(core)


def fuses_embed(wiring: Wiring, n: int) -> bool:
    """``a V_n + b x0 W_V = (a h + b x0) W_V`` if the weights are scalars and nobody needs V_n by itself."""
    mix = wiring.layers[n].v
    if not (mix.has(Own) and mix.has(Embed)) or mix.renorm is not None or wiring.layers[n].out.has(Own):
        return False
    for term in mix:
        if isinstance(term.source, Own | Embed) and (
            isinstance(term.weight, Gate) or (isinstance(term.weight, Learn) and term.weight.per != "layer")
        ):
            return False
    return not any(
        isinstance(term.source, Tap) and term.source.layer == n
        for later in wiring.layers
        for s in ("v", "out")
        for term in later.mix(s)
    )


def reads_input(layer: LayerWiring) -> bool:
    """Whether a projection or a gate reads the normalised attention input; else that norm would be trained by nothing."""
    return any(layer.mix(s).has(Own) for s in ("q", "k", "v")) or any(
        isinstance(term.weight, Gate) for s in ("q", "k", "v", "out") for term in layer.mix(s)
    )


def received_items(wiring: Wiring, resolved: list[Reads]) -> list[tuple[Item, ...]]:
    """The items each layer receives from earlier ones (the last entry: what the final norm's site receives)."""
    found: list[list[Item]] = [[] for _ in range(wiring.num_layers + 1)]
    for stream, n, mix in wiring.mixes():
        of = "v" if stream == "out" else stream
        for term in mix:
            if isinstance(term.source, Tap):
                found[n].append(Item("tap", of, term.source.layer))
            elif isinstance(term.source, Shared):
                found[n] += _shared_items(of, term.source.layer, resolved)
    for n, layer in enumerate(wiring.layers):
        for i in layer.kv:
            found[n] += _shared_items("k", i, resolved) + _shared_items("v", i, resolved)
    return [tuple(dict.fromkeys(items)) for items in found]


def _shared_items(stream: str, layer: int, resolved: list[Reads]) -> list[Item]:
    scale = {"k": resolved[layer].k_scale, "v": resolved[layer].v_scale}.get(stream, ())
    return [Item("shared", stream, layer)] + ([Item("scale", stream, layer)] if scale else [])


def check_sizes(wiring: Wiring, shape: Shape) -> None:
    for stream, n, mix in wiring.mixes():
        for term in mix:
            if isinstance(term.weight, Gate) and term.weight.channels > shape.hidden_size:
                raise WiringError(
                    f"the gate reads {term.weight.channels} channels, but the attention input has {shape.hidden_size}",
                    stream=stream,
                    layer=n,
                )
            if stream == "a" and isinstance(term.source, Tap | Shared):
                other = term.source.layer
                if shape.windows[other] != shape.windows[n]:
                    here, there = _window(shape.windows[n]), _window(shape.windows[other])
                    raise WiringError(
                        f"layer {n} attends to {here} and layer {other} to {there}: "
                        "attention matrices of unequal windows cannot be mixed",
                        stream=stream,
                        layer=n,
                    )
                if wiring.layers[other].kv:
                    raise WiringError(
                        f"layer {other} attends over concatenated keys: its attention matrix has another width",
                        stream=stream,
                        layer=n,
                    )


def _window(window: int | None) -> str:
    return "all positions" if window is None else f"{window} positions"

"""From a wiring and the model's sizes to everything that follows: a pure function, no torch.

For each layer the plan says which projections, tables and coefficients exist, which streams have to be handed on to later
layers, and where each key and value lives at inference:

* ``Tokens``: every source is determined by the token id alone; the cache keeps ids, the values come from a table;
* ``Alias``: another layer's buffer holds the same content; it is read there, through this layer's own window;
* ``Store``: the finished mix is stored. Mixing is position-wise, so this is never more than an ordinary Transformer.

A lone source keeps its weight outside, on the attention output (``A (g V) = g (A V)``; for keys on the query), so what a
buffer or a table holds is the unweighted content, here called a *core*, and one buffer serves all layers that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from valuepath.wiring import (
    OWN,
    Budget,
    Embed,
    Final,
    Fixed,
    Gate,
    Learn,
    Mix,
    Own,
    Shared,
    Source,
    Table,
    Tap,
    Term,
    Wiring,
    WiringError,
)

Fold = Literal["auto", "none", "all"]
Mlp = Literal["swiglu", "relu2"]
QkNorm = Literal["gain", "plain"]
Role = Literal["embedding", "head", "matrix", "gate", "table", "coefficient", "norm", "bias"]


@dataclass(frozen=True)
class Shape:
    """The sizes and parts of a model that a plan depends on.

    ``windows[n]`` is how many positions layer n attends to, its own included; ``None`` is all of them.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    mlp: Mlp = "swiglu"
    norm_gain: bool = True
    qk_norm: QkNorm | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


# ------------------------------------------------------------------------------------------------- where content lives
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


@dataclass(frozen=True)
class Parameter:
    """A stored parameter: its name in the checkpoint, its shape, what it is, how often one token is multiplied by it, and
    the number that a coefficient starts at."""

    name: str
    shape: tuple[int, ...]
    role: Role
    products: int = 0
    start: float = 0.0

    @property
    def size(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total


@dataclass(frozen=True)
class LayerPlan:
    """What exists in layer ``layer`` and where its keys and values live."""

    layer: int
    window: int | None
    projections: tuple[str, ...]
    """Which of q, k, v this layer projects itself."""
    value_products: int
    """How often the value projection is applied to a token: 2 if both V_n and x0 W_V are needed by themselves."""
    fuses_embed: bool
    """Whether ``a V_n + b x0 W_V`` is computed as ``(a h + b x0) W_V``."""
    v_core: Core
    v_scale: tuple[int, ...]
    """Layers whose weight multiplies the value outside, the reader's own included."""
    k_core: int
    """The layer whose finished key is read."""
    k_scale: tuple[int, ...]
    k: Residency
    v: Residency
    receives: tuple[Item, ...]
    provides: tuple[Item, ...]


@dataclass(frozen=True)
class Plan:
    """All that follows from a wiring for a model of a given shape; build it with ``make_plan``."""

    wiring: Wiring
    shape: Shape
    fold: Fold
    layers: tuple[LayerPlan, ...]

    # ---------------------------------------------------------------------------------------------- what it needs
    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def needs_attention_matrix(self) -> bool:
        """Whether an equation mixes softmaxed attention, which fused backends never form."""
        return any(not layer.a.is_plain for layer in self.wiring.layers)

    @property
    def needs_ids(self) -> bool:
        """Whether a value comes from a table of token ids (in training too)."""
        return any(layer.v.has(Table) for layer in self.wiring.layers)

    @property
    def needs_embed(self) -> bool:
        return any(layer.v.has(Embed) for layer in self.wiring.layers)

    @property
    def shared_table(self) -> bool:
        return any(isinstance(t.source, Table) and t.source.shared for layer in self.wiring.layers for t in layer.v)

    @cached_property
    def budgets(self) -> dict[int, float]:
        """group -> total"""
        found = {}
        for _, _, mix in self.wiring.mixes():
            for term in mix:
                if isinstance(term.weight, Budget):
                    found[term.weight.group] = term.weight.total
        return found

    @property
    def generation_refusal(self) -> str | None:
        """Why no text may be generated, or None."""
        for n, layer in enumerate(self.wiring.layers):
            if layer.v.renorm == "tensor":
                return (
                    f"v[{n}] is rescaled by the norm of the whole tensor (axis=tensor), which includes tokens that come "
                    "later: there is no cache that gives the same result. Use axis=token or axis=head to generate"
                )
        return None

    @property
    def folds(self) -> bool:
        """Whether the cache keeps token ids."""
        return any(isinstance(layer.v, Tokens) for layer in self.layers)

    # --------------------------------------------------------------------------------------------------- buffers
    def readers(self, layer: LayerPlan) -> list[LayerPlan]:
        """The layers whose keys and values this layer attends over: its own, then those of ``concat``."""
        return [layer, *(self.layers[i] for i in self.wiring.layers[layer.layer].kv)]

    def _longest(self, windows: list[int | None]) -> int | None:
        return None if None in windows else max(w for w in windows if w is not None)

    @cached_property
    def key_windows(self) -> dict[int, int | None]:
        """Key buffer (its owner) -> the longest window of any reader."""
        windows: dict[int, list[int | None]] = {}
        for reader in self.layers:
            for read in self.readers(reader):
                windows.setdefault(read.k_core, []).append(reader.window)
        return {owner: self._longest(found) for owner, found in windows.items()}

    @cached_property
    def value_windows(self) -> dict[int, int | None]:
        """Value buffer (its owner) -> the longest window of any reader. Layers that keep ids have none."""
        windows: dict[int, list[int | None]] = {}
        for reader in self.layers:
            for read in self.readers(reader):
                if not isinstance(read.v, Tokens):
                    owner = read.v.layer if isinstance(read.v, Alias) else read.layer
                    windows.setdefault(owner, []).append(reader.window)
        return {owner: self._longest(found) for owner, found in windows.items()}

    @cached_property
    def id_window(self) -> int | None:
        """The longest window of any layer that reads values by token id; only meaningful if ``folds``."""
        found: list[int | None] = []
        for reader in self.layers:
            if any(isinstance(read.v, Tokens) for read in self.readers(reader)):
                found.append(reader.window)
        return self._longest(found) if found else None

    @cached_property
    def tables(self) -> tuple[Core, ...]:
        """The distinct |V|-row tables that ``Tokens`` layers read, in order of first use."""
        return tuple(dict.fromkeys(layer.v.core for layer in self.layers if isinstance(layer.v, Tokens)))

    # ------------------------------------------------------------------------------------------------- parameters
    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every stored parameter of the causal language model, by its name in the checkpoint."""
        return tuple(_parameters(self))

    def mix_name(self, stream: str, n: int) -> str:
        """The module that holds the coefficients of a mix."""
        if stream == "x":
            return "model.mix_x" if n == self.num_layers else f"model.layers.{n}.mix_x"
        return f"model.layers.{n}.self_attn.mix_{stream}"


def make_plan(wiring: Wiring, shape: Shape, fold: Fold = "auto") -> Plan:
    """The plan of ``wiring`` for a model of ``shape``.

    Args:
        fold: ``auto`` keeps ids wherever a layer after the first is token-determined, and for layer 0 where such a layer
            reads it; ``all`` also for layer 0 of any model; ``none`` only where a lone trained table is read, which needs
            no folding: the published layout.

    Raises:
        WiringError: for what depends on sizes: gate channels, attention mixing across unequal windows.
        ValueError: for an unknown ``fold`` or another number of layers.
    """
    if fold not in ("auto", "none", "all"):
        raise ValueError(f"fold={fold!r}: expected 'auto', 'none' or 'all'")
    if wiring.num_layers != shape.num_layers:
        raise ValueError(f"the wiring has {wiring.num_layers} layers, the shape {shape.num_layers}")
    _check_sizes(wiring, shape)
    resolved = [_Reads(wiring, shape, n) for n in range(shape.num_layers)]
    tokens = _token_layers(wiring, resolved, fold)
    owners: dict[Core, int] = {}
    layers = []
    reads = _reads(wiring, resolved)
    for n, read in enumerate(resolved):
        v: Residency
        if n in tokens:
            v = Tokens(read.v_core)
        elif read.v_core in owners:
            v = Alias(owners[read.v_core])
        else:
            owners[read.v_core] = n
            v = Store()
        wired = wiring.layers[n]
        fuses = _fuses_embed(wiring, n)
        layers.append(
            LayerPlan(
                layer=n,
                window=shape.windows[n],
                projections=tuple(
                    s for s in ("q", "k", "v") if wired.mix(s).has(Own, Embed)
                ),
                value_products=1 if fuses else sum(wired.v.has(kind) for kind in (Own, Embed)),
                fuses_embed=fuses,
                v_core=read.v_core,
                v_scale=read.v_scale,
                k_core=read.k_core,
                k_scale=read.k_scale,
                k=Store() if read.k_core == n else Alias(read.k_core),
                v=v,
                receives=reads[n],
                provides=tuple(
                    dict.fromkeys(
                        item for later in reads[n + 1 :] for item in later if item.layer == n and item.stream != "x"
                    )
                ),
            )
        )
    return Plan(wiring, shape, fold, tuple(layers))


# ------------------------------------------------------------------------------------------------------- resolving
class _Reads:
    """Which core layer n's key and value come from, and which weights stay outside."""

    def __init__(self, wiring: Wiring, shape: Shape, n: int) -> None:
        self.v_core, self.v_scale = _value(wiring, n)
        self.k_core, self.k_scale = _key(wiring, shape, n)


def _outside(term: Term, n: int) -> tuple[int, ...]:
    return () if term.weight == Fixed(1.0) else (n,)


def _value(wiring: Wiring, n: int) -> tuple[Core, tuple[int, ...]]:
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
            core, inner = _value(wiring, layer)
            return core, scale + inner
    raise AssertionError(f"v[{n}] reads {term.source}")


def _key(wiring: Wiring, shape: Shape, n: int) -> tuple[int, tuple[int, ...]]:
    mix = wiring.layers[n].k
    term = mix.lone
    if term is not None and isinstance(term.source, Shared):
        core, inner = _key(wiring, shape, term.source.layer)
        return core, _outside(term, n) + inner
    # a raw key of a plain layer is finished in the same way here, unless each layer's key norm has its own gain
    if term is not None and term == Term(Tap(getattr(term.source, "layer", 0))) and shape.qk_norm != "gain":
        assert isinstance(term.source, Tap)
        if wiring.layers[term.source.layer].k.is_plain:
            return term.source.layer, ()
    return n, ()


def _token_layers(wiring: Wiring, resolved: list[_Reads], fold: Fold) -> set[int]:
    first_is_embedding = wiring.layers[0].x.is_plain

    def source_by_token(n: int, source: Source) -> bool:
        match source:
            case Own():
                return n == 0 and first_is_embedding
            case Tap(layer):
                return layer == 0 and first_is_embedding
            case Shared(layer):
                return core_by_token(resolved[layer].v_core)
        return True  # a table, or x0 W_V

    def core_by_token(core: Core) -> bool:
        match core:
            case Projected(layer):
                return layer == 0 and first_is_embedding
            case Finished(layer):
                mix = wiring.layers[layer].v
                return mix.renorm != "tensor" and all(
                    source_by_token(layer, term.source) and not isinstance(term.weight, Gate) for term in mix
                )
        return True

    def reads_first(core: Core) -> bool:
        match core:
            case Projected(layer):
                return layer == 0
            case Finished(layer):
                return layer == 0 or any(
                    (isinstance(term.source, Tap) and term.source.layer == 0)
                    or (isinstance(term.source, Shared) and reads_first(resolved[term.source.layer].v_core))
                    for term in wiring.layers[layer].v
                )
        return False

    determined = {n for n, read in enumerate(resolved) if core_by_token(read.v_core)}
    tables = {n for n in determined if isinstance(resolved[n].v_core, Rows)}
    if fold == "none":
        return tables
    if fold == "all":
        return determined
    later = {n for n in determined if n >= 1}
    first = {0} & determined if any(reads_first(resolved[n].v_core) for n in later) else set()
    return tables | later | first


def _fuses_embed(wiring: Wiring, n: int) -> bool:
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
        isinstance(term.source, Tap) and term.source.layer == n for later in wiring.layers for s in ("v", "out") for term in later.mix(s)
    )


def _reads(wiring: Wiring, resolved: list[_Reads]) -> list[tuple[Item, ...]]:
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


def _shared_items(stream: str, layer: int, resolved: list[_Reads]) -> list[Item]:
    scale = {"k": resolved[layer].k_scale, "v": resolved[layer].v_scale}.get(stream, ())
    return [Item("shared", stream, layer)] + ([Item("scale", stream, layer)] if scale else [])


def _check_sizes(wiring: Wiring, shape: Shape) -> None:
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
                    raise WiringError(
                        f"layer {n} attends to {_window(shape.windows[n])} and layer {other} to {_window(shape.windows[other])}: "
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


# ------------------------------------------------------------------------------------------------------ parameters
def source_label(source: Source) -> str:
    """The name of a source in a parameter's name."""
    match source:
        case Tap(layer):
            return f"tap_{layer}"
        case Shared(layer):
            return f"shared_{layer}"
        case Table(True):
            return "table_shared"
        case Own() | Table() | Embed() | Final():
            return type(source).__name__.lower()
    raise AssertionError(source)


def stream_heads(shape: Shape, stream: str) -> int:
    """How many heads a stream has; the residual stream has none."""
    return {"q": shape.num_heads, "a": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads, "out": shape.num_kv_heads}[stream]


def coefficient_shape(shape: Shape, stream: str, per: str) -> tuple[int, ...]:
    """() per layer, (heads, 1) per head, (heads, head width) or (width,) per channel."""
    if per == "layer":
        return ()
    if stream in ("x", "skip_attn", "skip_mlp"):
        return (shape.hidden_size,)
    heads = stream_heads(shape, stream)
    return (heads, 1) if per == "head" else (heads, shape.head_dim)


def _parameters(plan: Plan):  # type: ignore[no-untyped-def]
    shape, d = plan.shape, plan.shape.hidden_size
    widths = {"q": shape.num_heads * shape.head_dim, "k": shape.kv_width, "v": shape.kv_width}
    yield Parameter("model.embed_tokens.weight", (shape.vocab_size, d), "embedding", products=1 if shape.tied else 0)
    if plan.shared_table:
        yield Parameter("model.v_table.weight", (shape.vocab_size, shape.kv_width), "table")
    for group in sorted(plan.budgets):
        yield Parameter(f"model.budgets.{group}.scale", (), "coefficient", start=plan.budgets[group])
        yield Parameter(f"model.budgets.{group}.logits", (plan.num_layers,), "coefficient")
    for layer in plan.layers:
        n, wired = layer.layer, plan.wiring.layers[layer.layer]
        at = f"model.layers.{n}"
        yield from _mix_parameters(plan, "x", n, wired.x)
        for name in ("skip_attn", "skip_mlp"):
            weight = getattr(wired, name)
            if isinstance(weight, Learn):
                yield Parameter(f"{at}.{name}", coefficient_shape(shape, name, weight.per), "coefficient", start=weight.init)
        if shape.norm_gain:
            yield Parameter(f"{at}.input_layernorm.weight", (d,), "norm")
            yield Parameter(f"{at}.post_attention_layernorm.weight", (d,), "norm")
        for s in layer.projections:
            products = layer.value_products if s == "v" else 1
            yield Parameter(f"{at}.self_attn.{s}_proj.weight", (widths[s], d), "matrix", products)
            if shape.attention_bias:
                yield Parameter(f"{at}.self_attn.{s}_proj.bias", (widths[s],), "bias")
        yield Parameter(f"{at}.self_attn.o_proj.weight", (d, widths["q"]), "matrix", 1)
        if shape.output_bias:
            yield Parameter(f"{at}.self_attn.o_proj.bias", (d,), "bias")
        if shape.qk_norm == "gain":
            for s in ("q", "k"):
                if not wired.mix(s).has(Shared):  # a finished query or key is never normed again
                    yield Parameter(f"{at}.self_attn.{s}_norm.weight", (shape.head_dim,), "norm")
        if any(isinstance(t.source, Table) and not t.source.shared for t in wired.v):
            yield Parameter(f"{at}.self_attn.v_table.weight", (shape.vocab_size, shape.kv_width), "table")
        for s in ("q", "k", "v", "a", "out"):
            yield from _mix_parameters(plan, s, n, wired.mix(s))
        for name in ("gate_proj", "up_proj") if shape.mlp == "swiglu" else ("up_proj",):
            yield Parameter(f"{at}.mlp.{name}.weight", (shape.intermediate_size, d), "matrix", 1)
            if shape.mlp_bias:
                yield Parameter(f"{at}.mlp.{name}.bias", (shape.intermediate_size,), "bias")
        yield Parameter(f"{at}.mlp.down_proj.weight", (d, shape.intermediate_size), "matrix", 1)
        if shape.mlp_bias:
            yield Parameter(f"{at}.mlp.down_proj.bias", (d,), "bias")
    yield from _mix_parameters(plan, "x", plan.num_layers, plan.wiring.final_x)
    if shape.norm_gain:
        yield Parameter("model.norm.weight", (d,), "norm")
    if not shape.tied:
        yield Parameter("lm_head.weight", (shape.vocab_size, d), "head", 1)


def _mix_parameters(plan: Plan, stream: str, n: int, mix: Mix):  # type: ignore[no-untyped-def]
    if mix == OWN:
        return
    for term in mix:
        label, at = source_label(term.source), plan.mix_name(stream, n)
        if isinstance(term.weight, Learn):
            extents = coefficient_shape(plan.shape, stream, term.weight.per)
            yield Parameter(f"{at}.coefficients.{label}", extents, "coefficient", start=term.weight.init)
        elif isinstance(term.weight, Gate):
            yield Parameter(
                f"{at}.gates.{label}.weight", (stream_heads(plan.shape, stream), term.weight.channels), "gate", 1
            )

"""Where each stream of each layer takes its content from, as plain data.

A *wiring* says, for every layer n and every stream, which sources are added up and with which weights::

    v_n = sum_j weight_j * source_j

Streams: ``x`` (residual stream entering block n; site N feeds the final norm), ``q``, ``k``, ``v`` (attention inputs),
``a`` (softmaxed attention), ``out`` (added after attention, at the query's own position), ``kv`` (further layers whose
finished keys and values are concatenated behind the layer's own), ``skip_attn`` and ``skip_mlp`` (factor on the skip
connection around attention and MLP).

This module knows nothing of text (see ``equations``), of storage (see ``plan``) or of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Axis = Literal["token", "head", "tensor"]
Per = Literal["layer", "head", "channel"]
TableInit = Literal["projected", "uniform"]

STREAMS = ("x", "q", "k", "v", "a", "out", "kv", "skip_attn", "skip_mlp")
"""Every word that may stand on the left of an equation."""


# ---------------------------------------------------------------------------------------------------------- errors
def source_lines(text: str) -> list[str]:
    """The lines of a text as Python counts them; ``str.splitlines`` also splits at characters that a comment may hold."""
    return re.split(r"\r\n|\r|\n", text)


class WiringError(ValueError):
    """An equation or a wiring that cannot be built.

    Attributes:
        reason: what is wrong, what was expected and what to do, without the excerpt.
        stream, layer: where it is wrong, if the error belongs to one place of a wiring.
        text, line, column: the equation and the position in it (both counted from 1), if it came from text.
    """

    def __init__(
        self,
        reason: str,
        *,
        stream: str | None = None,
        layer: int | None = None,
        text: str | None = None,
        line: int = 1,
        column: int = 1,
    ) -> None:
        self.reason, self.stream, self.layer = reason, stream, layer
        self.text, self.line, self.column = text, line, column
        super().__init__(self._message())

    def _message(self) -> str:
        where = "" if self.stream is None or self.layer is None else f"{self.stream}[{self.layer}]: "
        if self.text is None:
            return where + self.reason
        lines = source_lines(self.text)
        shown = lines[min(self.line, len(lines)) - 1]
        start = max(0, self.column - 60)  # keep the caret visible in a terminal of 80 columns
        row = shown[start : start + 75].replace("\t", " ")  # a tab would move the text off the caret
        excerpt = ("..." if start else "") + row
        caret = " " * (self.column - 1 - start + (3 if start else 0)) + "^"
        place = f"line {self.line}, column {self.column}: " if len(lines) > 1 else f"column {self.column}: "
        return f"{place}{where}{self.reason}\n  {excerpt}\n  {caret}"


# --------------------------------------------------------------------------------------------------------- weights
@dataclass(frozen=True, slots=True)
class Fixed:
    """A number that is not trained."""

    value: float = 1.0


@dataclass(frozen=True, slots=True)
class Learn:
    """A trained coefficient that starts at ``init``: one per layer, per head of the stream, or per channel."""

    init: float = 1.0
    per: Per = "layer"


@dataclass(frozen=True, slots=True)
class Budget:
    """``scale * softmax(logits)[n]`` over all N layers; ``scale`` is one learned scalar that starts at ``total`` and
    the logits start at 0. Weights of one ``group`` share scale and logits."""

    total: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class Gate:
    """``range * sigmoid(w . h[:channels])`` per head of the stream; h is the normalised attention input."""

    range: float
    channels: int


Weight = Fixed | Learn | Budget | Gate


# --------------------------------------------------------------------------------------------------------- sources
@dataclass(frozen=True, slots=True)
class Own:
    """This layer's own projection of its input (x: the state that arrives; a: this layer's softmax; out: V_n)."""


@dataclass(frozen=True, slots=True)
class Tap:
    """Layer ``layer``'s raw projection, before mixing, norm and RoPE (x: the state that arrived at that site)."""

    layer: int


@dataclass(frozen=True, slots=True)
class Shared:
    """Layer ``layer``'s finished stream, after mixing, norm and RoPE; it is never normed or rotated again."""

    layer: int


@dataclass(frozen=True, slots=True)
class Table:
    """A learned row per token id: one table for this layer, or one for all layers that say ``table(shared)``.

    ``init="projected"`` starts the rows at x0 W_V of the initial weights; ``"uniform"`` in +-sqrt(3/d)."""

    shared: bool = False
    init: TableInit = "projected"


@dataclass(frozen=True, slots=True)
class Embed:
    """x0 W_V: the normalised embedding through this layer's own value projection."""


@dataclass(frozen=True, slots=True)
class Final:
    """In ``out`` only: this layer's mixed value V'_n."""


Source = Own | Tap | Shared | Table | Embed | Final

SOURCES: dict[str, tuple[type, ...]] = {
    "x": (Own, Tap),
    "q": (Own, Tap, Shared),
    "k": (Own, Tap, Shared),
    "v": (Own, Tap, Shared, Table, Embed),
    "a": (Own, Tap, Shared),
    "out": (Own, Tap, Final),
}
"""Which sources each stream may read. The sources of ``out`` are those of the stream v."""


@dataclass(frozen=True, slots=True)
class Term:
    source: Source
    weight: Weight = Fixed()


@dataclass(frozen=True, slots=True)
class Mix:
    """A weighted sum of sources, optionally rescaled to the norm of ``own`` along ``renorm``."""

    terms: tuple[Term, ...] = (Term(Own()),)
    renorm: Axis | None = None

    def __iter__(self) -> Iterator[Term]:
        return iter(self.terms)

    @property
    def is_plain(self) -> bool:
        """Exactly ``1*own``."""
        return self == OWN

    @property
    def lone(self) -> Term | None:
        """The only term, if there is just one and its weight can be applied after attention: ``A (g V) = g (A V)``.

        That holds for numbers, learned coefficients and budgets, not for a gate (it varies with the key's position)."""
        if len(self.terms) == 1 and self.renorm is None and not isinstance(self.terms[0].weight, Gate):
            return self.terms[0]
        return None

    def has(self, *kinds: type) -> bool:
        return any(isinstance(term.source, kinds) for term in self.terms)


OWN = Mix()
NOTHING = Mix(terms=())


@dataclass(frozen=True, slots=True)
class LayerWiring:
    """The streams of one layer. Defaults are an ordinary Transformer layer."""

    x: Mix = OWN
    q: Mix = OWN
    k: Mix = OWN
    v: Mix = OWN
    a: Mix = OWN
    out: Mix = NOTHING
    kv: tuple[int, ...] = ()
    skip_attn: Weight = Fixed()
    skip_mlp: Weight = Fixed()

    def mix(self, stream: str) -> Mix:
        value = getattr(self, stream)
        assert isinstance(value, Mix), f"{stream} is not a sum of sources"
        return value


@dataclass(frozen=True)
class Wiring:
    """All layers, and the state that feeds the final norm (site N of stream x). Checked when built.

    Raises:
        WiringError: if a layer reads what does not exist or may not be combined; see ``check``.
    """

    layers: tuple[LayerWiring, ...]
    final_x: Mix = field(default=OWN)

    def __post_init__(self) -> None:
        check(self)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def x_site(self, n: int) -> Mix:
        """The mix of stream x at site n; site N feeds the final norm."""
        return self.final_x if n == self.num_layers else self.layers[n].x

    def mixes(self) -> Iterator[tuple[str, int, Mix]]:
        """Every (stream, layer, mix), stream x over its N + 1 sites."""
        for n, layer in enumerate(self.layers):
            for stream in SOURCES:
                yield stream, n, layer.mix(stream)
        yield "x", self.num_layers, self.final_x


# ---------------------------------------------------------------------------------------------------------- checks
def check(wiring: Wiring) -> None:
    """Refuse what no model could compute. Needs no sizes; ``plan`` checks what depends on them.

    Raises:
        WiringError: with the stream, the layer, the reason and what to write instead.
    """
    if not wiring.layers:
        raise WiringError("a model needs at least one layer")
    for stream, n, mix in wiring.mixes():
        _check_mix(wiring, stream, n, mix)
    _check_reached(wiring)
    budgets: dict[int, float] = {}
    for stream, n, mix in wiring.mixes():
        for term in mix:
            if (
                isinstance(term.weight, Budget)
                and budgets.setdefault(term.weight.group, term.weight.total) != term.weight.total
            ):
                raise WiringError(
                    "a budget is one total that all layers of a statement share, but this one changes from layer to layer; "
                    "write a number or N",
                    stream=stream,
                    layer=n,
                )
    starts: set[str] = set()
    for n, layer in enumerate(wiring.layers):
        starts |= {term.source.init for term in layer.v if isinstance(term.source, Table) and term.source.shared}
        if len(starts) > 1:
            raise WiringError(
                "the shared table is one table and starts in one way; give init once or the same", stream="v", layer=n
            )
    for n, layer in enumerate(wiring.layers):
        for i in layer.kv:
            _check_earlier(wiring, "kv", n, i, "shared")
        if len(set(layer.kv)) < len(layer.kv):
            raise WiringError("concat names a layer twice; name each layer once", stream="kv", layer=n)
        if layer.kv and not layer.a.is_plain:
            raise WiringError("attention over concatenated keys has another width: it cannot be mixed", stream="a", layer=n)
        for stream in ("skip_attn", "skip_mlp"):
            weight = getattr(layer, stream)
            if not isinstance(weight, Fixed | Learn) or (isinstance(weight, Learn) and weight.per == "head"):
                raise WiringError(
                    "a skip is a number, learn(init) or learn(init, per=channel); it has no heads", stream=stream, layer=n
                )
            _check_weight_value(stream, n, weight, zero_allowed=True)


def _check_reached(wiring: Wiring) -> None:
    """Every block's output must be read, and every layer's own attention used: nothing may be trained by nothing."""
    sites = [wiring.x_site(n) for n in range(wiring.num_layers + 1)]
    tapped = {term.source.layer for site in sites for term in site if isinstance(term.source, Tap)}  # always at later sites
    for n, site in enumerate(sites):
        if not site.has(Own) and n not in tapped:
            what = f"the output of layer {n - 1}" if n else "the embedding"
            raise WiringError(f"nothing reads {what}; add own, or read tap({n}) at a later site", stream="x", layer=n)
    for n, layer in enumerate(wiring.layers):
        if not layer.a.has(Own):
            raise WiringError(
                "without own this layer's queries and keys would be trained by nothing; add own", stream="a", layer=n
            )


def _check_earlier(wiring: Wiring, stream: str, n: int, i: int, word: str) -> None:
    last = wiring.num_layers - 1
    if not isinstance(i, int) or isinstance(i, bool):
        raise WiringError(f"{word}(...) takes a whole layer number, not {i!r}", stream=stream, layer=n)
    if i < 0 or i > last:
        raise WiringError(f"{word}({i}): there is no layer {i}; layers are counted from 0 to {last}", stream=stream, layer=n)
    if i >= n:
        kind = "itself" if i == n else "a later layer"
        cycle = ", which would be a cycle" if word == "shared" else ""
        fix = f"read a layer before {n}" if n else "start the equation at layer 1"
        raise WiringError(f"{word}({i}) makes layer {n} read {kind}{cycle}; {fix}", stream=stream, layer=n)


def _check_weight_value(stream: str, n: int, weight: Weight, *, zero_allowed: bool = False) -> None:
    numbers = {"Fixed": ("value",), "Learn": ("init",), "Budget": ("total",), "Gate": ("range",)}[type(weight).__name__]
    for name in numbers:
        value = getattr(weight, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise WiringError(f"a weight must be a finite number, not {value!r}", stream=stream, layer=n)
        if value == 0 and not isinstance(weight, Learn) and not zero_allowed:
            raise WiringError("a weight of 0 reads nothing; leave the term out", stream=stream, layer=n)
    if isinstance(weight, Learn) and weight.per not in ("layer", "head", "channel"):
        raise WiringError(f"per={weight.per!r}: expected layer, head or channel", stream=stream, layer=n)
    if isinstance(weight, Gate) and (not isinstance(weight.channels, int) or weight.channels < 1):
        raise WiringError("gate(range, channels) needs a whole number of channels of at least 1", stream=stream, layer=n)


def _check_mix(wiring: Wiring, stream: str, n: int, mix: Mix) -> None:
    def refuse(reason: str) -> WiringError:
        return WiringError(reason, stream=stream, layer=n)

    if not mix.terms and stream != "out":
        raise refuse("nothing is read here; write at least one source")
    if mix.renorm is not None and stream != "v":
        raise refuse("renorm rescales values; use it on v")
    if mix.renorm is not None and not mix.has(Own):
        raise refuse("renorm(..., to=own) needs own in its sum: there is no other norm to rescale to")
    if mix.renorm not in (None, "token", "head", "tensor"):
        raise refuse(f"axis={mix.renorm!r}: expected token, head or tensor")
    sources = [term.source for term in mix]
    if len(set(sources)) < len(sources):
        raise refuse("a source stands twice in one sum; write it once with the weights added")
    tables = [s for s in sources if isinstance(s, Table)]
    if len({t.shared for t in tables}) < len(tables):
        raise refuse("one layer has one table of its own; write it once")
    for term in mix:
        _check_term(wiring, stream, n, term, refuse)
    if stream in ("q", "k") and mix.has(Shared) and mix.has(Own, Tap):
        raise refuse(
            f"shared({next(s.layer for s in sources if isinstance(s, Shared))}) is already normed and rotated and "
            f"cannot be added to a raw projection; use tap(...) for the raw {stream} of that layer"
        )


def _check_term(wiring: Wiring, stream: str, n: int, term: Term, refuse) -> None:  # type: ignore[no-untyped-def]
    source, weight = term.source, term.weight
    if not isinstance(source, SOURCES[stream]):
        raise refuse(f"{type(source).__name__.lower()} cannot be read by stream {stream}")
    _check_weight_value(stream, n, weight)
    if stream in ("x", "a") and isinstance(weight, Gate):
        raise refuse(f"a gate reads the attention input, which stream {stream} does not have; use it on q, k, v or out")
    if stream == "x" and isinstance(weight, Learn) and weight.per == "head":
        raise refuse("the residual stream has no heads; use per=layer or per=channel")
    if stream == "a" and isinstance(weight, Learn) and weight.per == "channel":
        raise refuse("attention weights have no channels; use per=layer or per=head")
    if isinstance(weight, Budget) and n >= wiring.num_layers:
        raise refuse("a budget is shared out over the layers; the final norm's input is none")
    of = "v" if stream == "out" else stream
    if isinstance(source, Tap | Shared):
        _check_earlier(wiring, stream, n, source.layer, "tap" if isinstance(source, Tap) else "shared")
    if isinstance(source, Tap) and of != "x" and of != "a" and not wiring.layers[source.layer].mix(of).has(Own):
        raise refuse(
            f"tap({source.layer}) reads the raw {of} of layer {source.layer}, which has no projection of its own; "
            f"read shared({source.layer}) or a layer whose {of} contains own"
            if stream != "out"
            else f"tap(v, {source.layer}): layer {source.layer} has no value projection of its own"
        )
    if isinstance(source, Own) and stream == "out" and not wiring.layers[n].v.has(Own):
        raise refuse("own(v) reads this layer's raw value, but its v has no own: there is no such projection; use final(v)")

"""What a plan costs: parameters, optimiser state, FLOPs and cache bytes, all read off the plan. No torch, nothing measured.

These are different quantities and none is derived from another: stored parameters (tables included), parameters that take
part in matrix products, optimiser state, FLOPs a token, and cache bytes. The cache has two columns that are never added up
silently: what *grows* with the sequences (keys, values, token ids) and the |V|-row tables that all sequences *share*.
A share of something is a ``Percent``, which carries its numerator, its denominator and the denominator's name.

Shapes and units: N layers, d width, h query heads, g key/value heads, e head width, |V| vocabulary, T positions of one
sequence, B sequences. A buffer with window W holds ``B min(T, W) g e`` elements. Bytes are logical: what the content needs,
without allocation blocks and temporaries.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Literal

from valuepath.plan import (
    Alias,
    Core,
    Embedded,
    Finished,
    Parameter,
    Plan,
    Projected,
    Residency,
    Rows,
    Store,
    Tokens,
    make_plan,
)
from valuepath.wiring import LayerWiring, Wiring

ID_BYTES = 4
"""Bytes of one token id in the cache."""

KV, V_ALONE = "kv", "v"
Part = Literal["kv", "v"]


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Percent:
    """``numerator`` as a percentage of ``denominator``, which is called ``of``. Both have the same unit."""

    numerator: int
    denominator: int
    of: str

    @property
    def value(self) -> float:
        return 100.0 * self.numerator / self.denominator

    @property
    def complement(self) -> Percent:
        """What is left: saved instead of kept, and the other way round."""
        return Percent(self.denominator - self.numerator, self.denominator, self.of)

    def __str__(self) -> str:
        return f"{self.value:.2f} % of {self.of}"


# ------------------------------------------------------------------------------------------------------ references
def reference_plan(plan: Plan, num_kv_heads: int | None = None) -> Plan:
    """The ordinary Transformer of the same shape, optionally with another number of key/value heads.

    ``num_kv_heads=plan.shape.num_heads`` is full multi-head attention, which grouped-query figures are often held against.
    """
    shape = plan.shape if num_kv_heads is None else replace(plan.shape, num_kv_heads=num_kv_heads)
    return make_plan(Wiring((LayerWiring(),) * plan.num_layers), shape, fold="none")


# ------------------------------------------------------------------------------------------------------ parameters
@dataclass(frozen=True)
class ParameterCounts:
    """Elements of stored parameters.

    Attributes:
        total: everything in the checkpoint, tables included.
        by_role: the same by ``Parameter.role``; only roles that occur.
        in_products: elements that take part in a matrix product at least once a token.
        multiplied: the same, each as often as a token is multiplied by it. One product costs 6 FLOPs in training.
    """

    total: int
    by_role: dict[str, int]
    in_products: int
    multiplied: int

    @property
    def tables(self) -> int:
        """Elements of trained |V|-row value tables. The input embedding is not one of them."""
        return self.by_role.get("table", 0)


def parameter_counts(plan: Plan) -> ParameterCounts:
    """Elements of the plan's parameters, see ``ParameterCounts``."""
    roles: Counter[str] = Counter()
    for parameter in plan.parameters:
        roles[parameter.role] += parameter.size
    return ParameterCounts(
        total=roles.total(),
        by_role=dict(roles),
        in_products=sum(p.size for p in plan.parameters if p.products),
        multiplied=sum(p.size * p.products for p in plan.parameters),
    )


def uses_muon(parameter: Parameter) -> bool:
    """Whether the Muon optimiser takes this parameter: the hidden 2-D matrices. Embedding, head, tables, gates and all that is
    not 2-D stay with AdamW."""
    return parameter.role == "matrix" and len(parameter.shape) == 2


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """Elements and bytes that an optimiser keeps beside the parameters and their gradients."""

    name: str
    elements: int
    bytes: int


def optimizer_states(plan: Plan, bytes_per_element: int = 4) -> tuple[OptimizerState, ...]:
    """AdamW on everything (two moments each), and Muon on the hidden matrices (one momentum each) with AdamW on the rest.

    Args:
        bytes_per_element: of one element of state; 4 is float32.
    """
    _positive("bytes_per_element", bytes_per_element)
    adamw = sum(2 * p.size for p in plan.parameters)
    muon = sum(p.size if uses_muon(p) else 2 * p.size for p in plan.parameters)
    return (
        OptimizerState("AdamW", adamw, adamw * bytes_per_element),
        OptimizerState("Muon on matrices, AdamW on the rest", muon, muon * bytes_per_element),
    )


# ----------------------------------------------------------------------------------------------------------- FLOPs
@dataclass(frozen=True, slots=True)
class Flops:
    """Floating point operations for one token of a sequence of ``context`` tokens.

    Training is ``6 * multiplied`` for the matrix products plus ``12 h e min(T, W)`` a layer for attention; a forward pass is
    a third of it. No causal halving; tables, embeddings, norms and scalars cost none; the head counts.
    """

    context: int
    matrix_training: int
    attention_training: int

    @property
    def training(self) -> int:
        return self.matrix_training + self.attention_training

    @property
    def forward(self) -> int:
        return self.training // 3


def attended(plan: Plan, layer: int, context: int) -> int:
    """How many keys a query of ``layer`` is compared with: ``min(T, W)``, once more for each layer that ``concat`` adds."""
    return _held(plan.layers[layer].window, context) * (1 + len(plan.wiring.layers[layer].kv))


def flops_per_token(plan: Plan, context: int) -> Flops:
    """FLOPs a token at a context, see ``Flops``."""
    _positive("context", context)
    width = plan.shape.num_heads * plan.shape.head_dim
    return Flops(
        context=context,
        matrix_training=6 * parameter_counts(plan).multiplied,
        attention_training=sum(12 * width * attended(plan, n, context) for n in range(plan.num_layers)),
    )


# ----------------------------------------------------------------------------------------------------------- cache
def _held(window: int | None, context: int) -> int:
    return context if window is None else min(context, window)


def core_name(core: Core) -> str:
    """What a buffer or a table holds, in words."""
    match core:
        case Projected(layer):
            return f"V_{layer}"
        case Embedded(layer):
            return f"x0 W_V of layer {layer}"
        case Rows(None):
            return "shared table"
        case Rows(layer):
            return f"table of layer {layer}"
        case Finished(layer):
            return f"finished value of layer {layer}"
    raise AssertionError(core)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one layer's key or value lives in the cache.

    Attributes:
        residency: Store, Alias or Tokens, as the plan says.
        positions: how many positions of each sequence the layer's own buffer holds; 0 if it has none.
        elements, bytes: of that buffer, over all sequences.
    """

    residency: Residency
    positions: int
    elements: int
    bytes: int

    @property
    def kind(self) -> Literal["store", "alias", "tokens"]:
        match self.residency:
            case Store():
                return "store"
            case Alias():
                return "alias"
        return "tokens"


@dataclass(frozen=True, slots=True)
class LayerCache:
    layer: int
    window: int | None
    k: Place
    v: Place


@dataclass(frozen=True, slots=True)
class SharedTable:
    """A |V|-row table that all sequences read by token id.

    ``trained`` tables are parameters already (counted there too); the others are folded from weights for inference.
    """

    core: Core
    readers: tuple[int, ...]
    rows: int
    elements: int
    bytes: int
    trained: bool

    @property
    def name(self) -> str:
        return core_name(self.core)


@dataclass(frozen=True)
class CacheCounts:
    """The cache of ``batch`` sequences of ``context`` tokens each; see ``cache_counts``."""

    context: int
    batch: int
    bytes_per_element: int
    layers: tuple[LayerCache, ...]
    ids: int
    """Token ids kept, over all sequences; 0 if no layer reads values by id."""
    tables: tuple[SharedTable, ...]
    row_bytes: int
    """Bytes that are resident for each distinct token if tables need not be: a row of each table, or what stands in for it."""
    vocab_size: int

    # grows with the sequences
    @cached_property
    def key_elements(self) -> int:
        return sum(layer.k.elements for layer in self.layers)

    @cached_property
    def value_elements(self) -> int:
        return sum(layer.v.elements for layer in self.layers)

    @property
    def key_bytes(self) -> int:
        return self.key_elements * self.bytes_per_element

    @property
    def value_bytes(self) -> int:
        return self.value_elements * self.bytes_per_element

    @property
    def id_bytes(self) -> int:
        return self.ids * ID_BYTES

    @property
    def growing_bytes(self) -> int:
        """Keys, values and ids of all sequences."""
        return self.key_bytes + self.value_bytes + self.id_bytes

    # shared by all sequences
    @property
    def shared_elements(self) -> int:
        return sum(table.elements for table in self.tables)

    @property
    def shared_bytes(self) -> int:
        """All tables, whole: |V| rows each."""
        return sum(table.bytes for table in self.tables)

    @property
    def shared_trained_bytes(self) -> int:
        """The part of ``shared_bytes`` that is counted among the parameters too."""
        return sum(table.bytes for table in self.tables if table.trained)

    def rows_in_use_bytes(self, distinct: int) -> int:
        """What is resident if only the rows of ``distinct`` different tokens are.

        Raises:
            ValueError: if there cannot be that many different tokens.
        """
        _positive("distinct", distinct)
        if self.row_bytes and distinct > self.vocab_size:
            raise ValueError(f"distinct={distinct:,}: the vocabulary has only {self.vocab_size:,} tokens")
        return self.row_bytes * distinct

    def held_bytes(self, part: Part = "kv", *, ids: bool = True, tables: bool = False, distinct: int | None = None) -> int:
        """Bytes of a part of the cache.

        Args:
            part: ``kv`` everything, ``v`` values and what replaces them (ids, tables).
            ids: count token ids; published formulas leave them out.
            tables: add the shared tables: whole, or with ``distinct`` rows each.
        """
        held = self.value_bytes + (self.id_bytes if ids else 0) + (self.key_bytes if part == KV else 0)
        if tables:
            held += self.shared_bytes if distinct is None else self.rows_in_use_bytes(distinct)
        return held


def cache_counts(plan: Plan, context: int, batch: int = 1, bytes_per_element: int = 2) -> CacheCounts:
    """Elements and bytes of the cache after ``context`` tokens of each of ``batch`` sequences.

    A buffer keeps the longest window of any of its readers (``plan.key_windows``, ``plan.value_windows``,
    ``plan.id_window``), ``min(T, window)`` positions. Tables have the precision of the cache.

    Raises:
        ValueError: for a size below 1.
    """
    for name, value in (("context", context), ("batch", batch), ("bytes_per_element", bytes_per_element)):
        _positive(name, value)
    width = plan.shape.kv_width

    def place(residency: Residency, windows: dict[int, int | None], n: int) -> Place:
        positions = _held(windows[n], context) if isinstance(residency, Store) else 0
        elements = batch * positions * width
        return Place(residency, positions, elements, elements * bytes_per_element)

    layers = tuple(
        LayerCache(n, layer.window, place(layer.k, plan.key_windows, n), place(layer.v, plan.value_windows, n))
        for n, layer in enumerate(plan.layers)
    )
    elements = plan.shape.vocab_size * width
    return CacheCounts(
        context=context,
        batch=batch,
        bytes_per_element=bytes_per_element,
        layers=layers,
        ids=batch * _held(plan.id_window, context) if plan.folds else 0,
        tables=tuple(
            SharedTable(
                core=core,
                readers=tuple(layer.layer for layer in plan.layers if layer.v == Tokens(core)),
                rows=plan.shape.vocab_size,
                elements=elements,
                bytes=elements * bytes_per_element,
                trained=isinstance(core, Rows),
            )
            for core in plan.tables
        ),
        row_bytes=sum(plan.row_widths.values()) * bytes_per_element,
        vocab_size=plan.shape.vocab_size,
    )


# ----------------------------------------------------------------------------------------------------- comparisons
@dataclass(frozen=True)
class Comparison:
    """A plan's cache against a reference's at the same context, batch and precision."""

    cache: CacheCounts
    reference: CacheCounts
    reference_kv_heads: int

    @property
    def reference_name(self) -> str:
        heads = self.reference_kv_heads
        return f"Transformer with {heads} key/value head{'s' if heads > 1 else ''}"

    def kept(self, part: Part = "kv", *, ids: bool = True, tables: bool = False, distinct: int | None = None) -> Percent:
        """What this cache holds, of the reference's whole K+V cache (``kv``) or of its V cache alone (``v``).

        For the other arguments see ``CacheCounts.held_bytes``."""
        whole = "K+V cache" if part == KV else "V cache alone"
        held = self.cache.held_bytes(part, ids=ids, tables=tables, distinct=distinct)
        return Percent(held, self.reference.held_bytes(part), f"the {whole} of the {self.reference_name}")

    def saved(self, part: Part = "kv", *, ids: bool = True, tables: bool = False, distinct: int | None = None) -> Percent:
        """The rest; below 0 where this cache holds more than the reference."""
        return self.kept(part, ids=ids, tables=tables, distinct=distinct).complement


def compare_cache(
    plan: Plan, context: int, batch: int = 1, bytes_per_element: int = 2, num_kv_heads: int | None = None
) -> Comparison:
    """The cache of ``plan`` beside the ordinary Transformer's of the same shape (or with ``num_kv_heads``)."""
    reference = reference_plan(plan, num_kv_heads)
    return Comparison(
        cache_counts(plan, context, batch, bytes_per_element),
        cache_counts(reference, context, batch, bytes_per_element),
        reference.shape.num_kv_heads,
    )


# ------------------------------------------------------------------------------------------------------ break-even
@dataclass(frozen=True)
class BreakEven:
    """How many tokens in flight, over all sequences, pay for the shared tables: growing bytes saved = table bytes.

    Attributes:
        context: tokens of each sequence.
        shared_bytes: what has to be paid for: whole tables, or the rows in use.
        saved_per_sequence: growing bytes that one sequence of ``context`` tokens saves against the reference.
        ids: whether the ids were counted as growing (the published formula ignores them).
        distinct: rows of each table that are resident; None is all |V|.
    """

    context: int
    shared_bytes: int
    saved_per_sequence: int
    ids: bool
    distinct: int | None

    @property
    def exact(self) -> Fraction | None:
        """Tokens in flight, exactly; None if no number of sequences pays for the tables."""
        if self.shared_bytes == 0:
            return Fraction(0)
        if self.saved_per_sequence <= 0:
            return None
        return Fraction(self.shared_bytes * self.context, self.saved_per_sequence)

    @property
    def tokens(self) -> int | None:
        """The smallest whole number of tokens in flight that pays for the tables."""
        return None if self.exact is None else ceil(self.exact)

    @property
    def sequences(self) -> float | None:
        """The same in sequences of ``context`` tokens."""
        return None if self.exact is None else float(self.exact / self.context)


def break_even(
    plan: Plan, context: int, bytes_per_element: int = 2, *, ids: bool = True, distinct: int | None = None
) -> BreakEven:
    """Break-even with sequences of ``context`` tokens against the ordinary Transformer of the same shape.

    Without sliding windows the answer does not depend on ``context``: layers that read a table of their own break even at
    |V| tokens if ids are ignored. With windows a longer sequence saves less a token.

    Args:
        distinct: only so many rows of each table are resident.
    """
    both = compare_cache(plan, context, 1, bytes_per_element)
    return BreakEven(
        context=context,
        shared_bytes=both.cache.shared_bytes if distinct is None else both.cache.rows_in_use_bytes(distinct),
        saved_per_sequence=both.reference.growing_bytes - both.cache.held_bytes(ids=ids),
        ids=ids,
        distinct=distinct,
    )


def break_even_context(plan: Plan, batch: int = 1, bytes_per_element: int = 2, *, ids: bool = True) -> int | None:
    """The shortest context at which ``batch`` sequences pay for the whole tables, or None if they never do.

    The saving is piecewise linear in the context with corners at the windows, so it is solved piece by piece.
    """
    reference = reference_plan(plan)

    def gain(context: int) -> int:
        cache = cache_counts(plan, context, batch, bytes_per_element)
        return cache_counts(reference, context, batch, bytes_per_element).growing_bytes - cache.held_bytes(ids=ids, tables=True)

    corners = sorted({1, *(w for w in plan.shape.windows if w is not None)})
    for start, end in zip(corners, [*corners[1:], None], strict=True):
        at = gain(start)
        if at >= 0:
            return start
        rise = gain(start + 1) - at  # constant within the piece
        if rise > 0:
            found = start + ceil(Fraction(-at, rise))
            if end is None or found <= end:
                return found
    return None

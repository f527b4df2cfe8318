"""What a model is and what it costs, for people (text at 80 columns) and for programs (JSON). Nothing here is measured.

``describe`` gathers what ``counts`` reads off a plan, ``as_json`` and ``render`` show the same figures.

Keys of the JSON object, all always present:

* ``name``, ``paper``, ``location``, ``summary``: of the preset, null for an equation of one's own; ``equation``.
* ``model``: ``num_layers``, ``hidden_size``, ``intermediate_size``, ``num_heads``, ``num_kv_heads``, ``head_dim``,
  ``vocab_size``, ``windows`` (per layer; null: all positions), ``mlp``, ``norm_gain``, ``qk_norm``, ``tied``, ``style``,
  ``fold``.
* ``plan``: ``layers``; ``final_norm_reads`` (stream x at site N); ``needs_attention_matrix``, ``needs_ids``;
  ``generation_refusal`` (null, or why there is no cache).
* ``plan.layers``: ``layer``, ``window``, ``projections``, ``reads`` (stream -> text, only what differs from an ordinary
  Transformer), and for ``k`` and ``v`` each: ``kind`` (store, alias, tokens), ``layer`` (of the buffer; null for tokens),
  ``table`` (its name, or null), and of the layer's own buffer over all sequences ``positions``, ``elements``, ``bytes`` (0
  without one).
* ``parameters``: ``total``, ``by_role``, ``tables``, ``in_products``, ``multiplied`` (all elements), ``optimizer`` (``name``,
  ``elements``, ``bytes``, ``bytes_per_element``).
* ``flops_per_token``: ``context``, ``training``, ``forward``, ``training_matrices``, ``training_attention``.
* ``transformer``: ``parameters`` and ``flops_per_token`` of the ordinary Transformer of the same shape.
* ``cache`` (null if generation is refused): ``context``, ``batch``, ``dtype``, ``bytes_per_element``; ``growing`` with
  ``keys``, ``values``, ``ids`` (each ``elements``, ``bytes``) and ``bytes``; ``shared`` with ``tables`` (``name``, ``readers``,
  ``rows``, ``elements``, ``bytes``, ``trained``), ``bytes``, ``trained_bytes``, ``distinct``, ``rows_in_use_bytes``; and
  ``references`` (``name``, ``num_kv_heads``, bytes of ``keys`` and ``values``, ``bytes``).
* ``percentages`` (null if refused): ``quantity``, ``part`` (kv, v), ``of``, ``numerator_bytes``, ``denominator_bytes``,
  ``kept_percent``, ``saved_percent``.
* ``break_even`` (null if refused, empty without tables): ``tables`` (whole, rows in use), ``ids`` (counted, ignored),
  ``context``, ``shared_bytes``, ``saved_bytes_per_sequence``, ``tokens``, ``sequences`` (the last two null if never).
* ``break_even_context``: tokens of each of the ``batch`` sequences from which whole tables pay, ids counted (null if never,
  or without tables).
* ``computed``: true. All figures are computed, none is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from valuepath import counts
from valuepath.counts import BreakEven, Comparison, Flops, OptimizerState, ParameterCounts, Percent, Place
from valuepath.equations import nearest
from valuepath.plan import Alias, Plan, Tokens
from valuepath.wiring import NOTHING, OWN, Budget, Fixed, Gate, Learn, Mix, Shared, Source, Table, Tap, Term, Weight

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}
"""Bytes of one cached key, value or table element."""

LONG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


@dataclass(frozen=True)
class About:
    """Where an equation comes from; all None for one's own."""

    name: str | None = None
    paper: str | None = None
    location: str | None = None
    summary: str | None = None
    style: str | None = None


@dataclass(frozen=True)
class Saving:
    """One line of the percentages: a quantity as kept of the K+V cache and of the V cache alone."""

    quantity: str
    kv: Percent
    v: Percent


@dataclass(frozen=True)
class Description:
    """Everything that is shown, already computed. ``caches`` is empty if there is no cache that gives the same result."""

    about: About
    equation: str
    plan: Plan
    context: int
    batch: int
    dtype: str
    distinct: int | None
    parameters: tuple[ParameterCounts, ParameterCounts]
    optimizers: tuple[tuple[OptimizerState, ...], tuple[OptimizerState, ...]]
    flops: tuple[Flops, Flops]
    caches: tuple[Comparison, ...]
    break_evens: tuple[BreakEven, ...]
    break_even_context: int | None

    @property
    def bytes_per_element(self) -> int:
        return DTYPES[self.dtype]

    def savings(self, both: Comparison) -> list[Saving]:
        """The percentages against one reference: growing bytes, with whole tables, with the rows in use."""
        found = [Saving("growing", both.kept("kv"), both.kept("v"))]
        if both.cache.tables:
            whole = [both.kept(part, tables=True) for part in ("kv", "v")]
            found.append(Saving("growing + whole tables", *whole))
        if both.cache.row_bytes and self.distinct is not None:
            rows = [both.kept(part, tables=True, distinct=self.distinct) for part in ("kv", "v")]
            found.append(Saving("growing + rows in use", *rows))
        return found


def describe(
    plan: Plan,
    equation: str,
    *,
    context: int,
    batch: int = 1,
    dtype: str = "bf16",
    distinct: int | None = None,
    about: About = About(),
) -> Description:
    """Compute everything that ``as_json`` and ``render`` show.

    Args:
        plan, equation: a model's plan and the text it comes from.
        context, batch: T tokens in each of B sequences.
        dtype: of keys, values and tables: one of ``DTYPES``.
        distinct: U, how many different tokens the sequences contain, for tables of which only these rows are resident.
        about: where the equation comes from.

    Raises:
        ValueError: for a size below 1, an unknown dtype, or more distinct tokens than there can be.
    """
    dtype = LONG_DTYPES.get(dtype, dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected {', '.join(DTYPES)}{nearest(dtype, [*DTYPES, *LONG_DTYPES])}")
    size = DTYPES[dtype]
    flops = counts.flops_per_token(plan, context)
    heads = [None] if plan.shape.num_kv_heads == plan.shape.num_heads else [None, plan.shape.num_heads]
    caches = [counts.compare_cache(plan, context, batch, size, kv_heads) for kv_heads in heads]
    if distinct is not None:
        caches[0].cache.rows_in_use_bytes(distinct)  # refuses more than the vocabulary
        most = min(plan.shape.vocab_size, context * batch)
        if distinct > most:
            raise ValueError(
                f"distinct={distinct:,}: {batch:,} x {context:,} tokens of a vocabulary of {plan.shape.vocab_size:,} contain "
                f"at most {most:,} different ones"
            )
    reference = counts.reference_plan(plan)
    refused = plan.generation_refusal is not None
    evens = [
        counts.break_even(plan, context, size, ids=ids, distinct=rows)
        for rows in ([None] if distinct is None else [None, distinct])
        for ids in (True, False)
    ]
    return Description(
        about=about,
        equation=equation,
        plan=plan,
        context=context,
        batch=batch,
        dtype=dtype,
        distinct=distinct,
        parameters=(counts.parameter_counts(plan), counts.parameter_counts(reference)),
        optimizers=(counts.optimizer_states(plan), counts.optimizer_states(reference)),
        flops=(flops, counts.flops_per_token(reference, context)),
        caches=() if refused else tuple(caches),
        break_evens=() if refused or not plan.tables else tuple(evens),
        break_even_context=None if refused or not plan.tables else counts.break_even_context(plan, batch, size),
    )


# ------------------------------------------------------------------------------------------------- wiring as text
def _weight_text(weight: Weight) -> str:
    match weight:
        case Fixed(value):
            return "" if value == 1 else f"{value:g}*"
        case Learn(init, "layer"):
            return f"learn({init:g})*"
        case Learn(init, per):
            return f"learn({init:g}, per={per})*"
        case Budget(total):
            return f"budget({total:g})*"
        case Gate(scale, channels):
            return f"gate({scale:g}, {channels})*"
    raise AssertionError(weight)


def source_text(source: Source, stream: str) -> str:
    """A source as an equation for this stream writes it."""
    match source:
        case Tap(layer):
            return f"tap(v, {layer})" if stream == "out" else f"tap({layer})"
        case Shared(layer):
            return f"shared({layer})"
        case Table(shared, init):
            options = (["shared"] if shared else []) + (["init=uniform"] if init == "uniform" else [])
            return f"table({', '.join(options)})" if options else "table"
    name = type(source).__name__.lower()
    return f"{name}(v)" if stream == "out" else name


def _run_text(terms: tuple[Term, ...], start: int, n: int) -> tuple[str, int] | None:
    """Three or more taps in a row with one weight, as ``tap(0..n-1)``, and where the run ends."""
    end = start
    while (
        end < len(terms)
        and isinstance(source := terms[end].source, Tap)
        and isinstance(first := terms[start].source, Tap)
        and source.layer == first.layer + end - start
        and terms[end].weight == terms[start].weight
    ):
        end += 1
    if end - start < 3:
        return None
    first, last = terms[start].source, terms[end - 1].source
    assert isinstance(first, Tap)
    assert isinstance(last, Tap)
    upto = "n-1" if last.layer == n - 1 else str(last.layer)
    return f"{_weight_text(terms[start].weight)}tap({first.layer}..{upto})", end


def mix_text(mix: Mix, stream: str, n: int) -> str:
    """A mix of layer (or site) ``n`` in the grammar of equations; long runs of taps are shortened to ``tap(0..n-1)``."""
    parts: list[str] = []
    at = 0
    while at < len(mix.terms):
        run = _run_text(mix.terms, at, n) if stream != "out" else None
        if run is None:
            term = mix.terms[at]
            run = _weight_text(term.weight) + source_text(term.source, stream), at + 1
        text, at = run
        parts.append(text if not parts else f"- {text[1:]}" if text.startswith("-") else f"+ {text}")
    text = " ".join(parts)
    return text if mix.renorm is None else f"renorm({text}, to=own, axis={mix.renorm})"


def reads_text(plan: Plan, n: int) -> dict[str, str]:
    """stream -> text for every stream of layer ``n`` that differs from an ordinary Transformer.

    n = N is the final norm, which has an input (stream x) only."""
    if n == plan.num_layers:
        return {} if plan.wiring.final_x == OWN else {"x": mix_text(plan.wiring.final_x, "x", n)}
    wired = plan.wiring.layers[n]
    found = {}
    for stream in ("x", "q", "k", "v", "a", "out"):
        mix = wired.mix(stream)
        if mix != (NOTHING if stream == "out" else OWN):
            found[stream] = mix_text(mix, stream, n)
    if wired.kv:
        found["kv"] = f"concat(own, {', '.join(f'shared({i})' for i in wired.kv)})"
    for stream in ("skip_attn", "skip_mlp"):
        weight = getattr(wired, stream)
        if weight != Fixed(1.0):
            found[stream] = f"{weight.value:g}" if isinstance(weight, Fixed) else _weight_text(weight).rstrip("*")
    return found


# ------------------------------------------------------------------------------------------------------------ JSON
def as_json(description: Description) -> dict[str, Any]:
    """A dictionary for ``json.dumps``; its keys are listed at the head of this module."""
    plan, shape, about = description.plan, description.plan.shape, description.about
    everything = counts.cache_counts(plan, description.context, description.batch, description.bytes_per_element)
    return {
        "name": about.name,
        "paper": about.paper,
        "location": about.location,
        "summary": about.summary,
        "equation": description.equation,
        "model": {
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_heads": shape.num_heads,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "windows": list(shape.windows),
            "mlp": shape.mlp,
            "norm_gain": shape.norm_gain,
            "qk_norm": shape.qk_norm,
            "tied": shape.tied,
            "style": about.style,
            "fold": plan.fold,
        },
        "plan": {
            "layers": [
                {
                    "layer": n,
                    "window": layer.window,
                    "projections": list(layer.projections),
                    "reads": reads_text(plan, n),
                    "k": _place_json(everything.layers[n].k, n),
                    "v": _place_json(everything.layers[n].v, n),
                }
                for n, layer in enumerate(plan.layers)
            ],
            "final_norm_reads": reads_text(plan, plan.num_layers),
            "needs_attention_matrix": plan.needs_attention_matrix,
            "needs_ids": plan.needs_ids,
            "generation_refusal": plan.generation_refusal,
        },
        "parameters": _parameters_json(description.parameters[0], description.optimizers[0]),
        "flops_per_token": _flops_json(description.flops[0]),
        "transformer": {
            "parameters": _parameters_json(description.parameters[1], description.optimizers[1]),
            "flops_per_token": _flops_json(description.flops[1]),
        },
        "cache": _cache_json(description) if description.caches else None,
        "percentages": [
            {
                "quantity": saving.quantity,
                "part": part,
                "of": kept.of,
                "numerator_bytes": kept.numerator,
                "denominator_bytes": kept.denominator,
                "kept_percent": kept.value,
                "saved_percent": kept.complement.value,
            }
            for both in description.caches
            for saving in description.savings(both)
            for part, kept in (("kv", saving.kv), ("v", saving.v))
        ]
        if description.caches
        else None,
        "break_even": [
            {
                "tables": "whole" if even.distinct is None else "rows in use",
                "ids": "counted" if even.ids else "ignored",
                "context": even.context,
                "shared_bytes": even.shared_bytes,
                "saved_bytes_per_sequence": even.saved_per_sequence,
                "tokens": even.tokens,
                "sequences": even.sequences,
            }
            for even in description.break_evens
        ]
        if description.caches
        else None,
        "break_even_context": description.break_even_context,
        "computed": True,
    }


def _place_json(place: Place, n: int) -> dict[str, Any]:
    where = place.residency
    return {
        "kind": place.kind,
        "layer": None if isinstance(where, Tokens) else where.layer if isinstance(where, Alias) else n,
        "table": counts.core_name(where.core) if isinstance(where, Tokens) else None,
        "positions": place.positions,
        "elements": place.elements,
        "bytes": place.bytes,
    }


def _parameters_json(found: ParameterCounts, optimizers: tuple[OptimizerState, ...]) -> dict[str, Any]:
    return {
        "total": found.total,
        "by_role": found.by_role,
        "tables": found.tables,
        "in_products": found.in_products,
        "multiplied": found.multiplied,
        "optimizer": [
            {"name": o.name, "elements": o.elements, "bytes": o.bytes, "bytes_per_element": o.bytes // o.elements}
            for o in optimizers
        ],
    }


def _flops_json(flops: Flops) -> dict[str, Any]:
    return {
        "context": flops.context,
        "training": flops.training,
        "forward": flops.forward,
        "training_matrices": flops.matrix_training,
        "training_attention": flops.attention_training,
    }


def _cache_json(description: Description) -> dict[str, Any]:
    cache = description.caches[0].cache
    return {
        "context": cache.context,
        "batch": cache.batch,
        "dtype": description.dtype,
        "bytes_per_element": cache.bytes_per_element,
        "growing": {
            "keys": {"elements": cache.key_elements, "bytes": cache.key_bytes},
            "values": {"elements": cache.value_elements, "bytes": cache.value_bytes},
            "ids": {"elements": cache.ids, "bytes": cache.id_bytes},
            "bytes": cache.growing_bytes,
        },
        "shared": {
            "tables": [
                {
                    "name": t.name,
                    "readers": list(t.readers),
                    "rows": t.rows,
                    "elements": t.elements,
                    "bytes": t.bytes,
                    "trained": t.trained,
                }
                for t in cache.tables
            ],
            "bytes": cache.shared_bytes,
            "trained_bytes": cache.shared_trained_bytes,
            "distinct": description.distinct,
            "rows_in_use_bytes": None if description.distinct is None else cache.rows_in_use_bytes(description.distinct),
        },
        "references": [
            {
                "name": both.reference_name,
                "num_kv_heads": both.reference_kv_heads,
                "keys": both.reference.key_bytes,
                "values": both.reference.value_bytes,
                "bytes": both.reference.growing_bytes,
            }
            for both in description.caches
        ],
    }

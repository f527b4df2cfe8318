"""Every parameter that a plan asks for, by its name in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from valuepath.shape import Shape
from valuepath.wiring import OWN, Embed, Final, Gate, Learn, Mix, Own, Shared, Source, Table, Tap

if TYPE_CHECKING:
    from valuepath.plan import Plan

Role = Literal["embedding", "head", "matrix", "gate", "table", "coefficient", "norm", "bias"]


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
    return {
        "q": shape.num_heads,
        "a": shape.num_heads,
        "k": shape.num_kv_heads,
        "v": shape.num_kv_heads,
        "out": shape.num_kv_heads,
    }[stream]


def coefficient_shape(shape: Shape, stream: str, per: str) -> tuple[int, ...]:
    """() per layer, (heads, 1) per head, (heads, head width) or (width,) per channel."""
    if per == "layer":
        return ()
    if stream in ("x", "skip_attn", "skip_mlp"):
        return (shape.hidden_size,)
    heads = stream_heads(shape, stream)
    return (heads, 1) if per == "head" else (heads, shape.head_dim)


def plan_parameters(plan: Plan) -> Iterator[Parameter]:
    """Every stored parameter of the causal language model."""
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
            if layer.reads_input:
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


def _mix_parameters(plan: Plan, stream: str, n: int, mix: Mix) -> Iterator[Parameter]:
    if mix == OWN:
        return
    for term in mix:
        label, at = source_label(term.source), plan.mix_name(stream, n)
        if isinstance(term.weight, Learn):
            extents = coefficient_shape(plan.shape, stream, term.weight.per)
            yield Parameter(f"{at}.coefficients.{label}", extents, "coefficient", start=term.weight.init)
        elif isinstance(term.weight, Gate):
            yield Parameter(f"{at}.gates.{label}.weight", (stream_heads(plan.shape, stream), term.weight.channels), "gate", 1)

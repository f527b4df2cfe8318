"""Small plans for tests: every size is another prime (times the head structure)."""

from __future__ import annotations

from dataclasses import replace

from valuepath.equations import parse
from valuepath.plan import Plan, Shape, make_plan


def shape(num_layers: int, windows: tuple[int | None, ...] | None = None, **changes: object) -> Shape:
    """d=11, f=13, h=6, g=3, e=5, |V|=17."""
    base = Shape(
        hidden_size=11, intermediate_size=13, num_heads=6, num_kv_heads=3, head_dim=5, vocab_size=17,
        windows=windows or (None,) * num_layers,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def plan(
    text: str, num_layers: int, fold: str = "auto", windows: tuple[int | None, ...] | None = None, **changes: object
) -> Plan:
    return make_plan(parse(text, num_layers), shape(num_layers, windows, **changes), fold)  # type: ignore[arg-type]

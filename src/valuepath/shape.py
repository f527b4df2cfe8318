"""The sizes and parts of a model that a plan depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fold = Literal["auto", "none", "all", "factored"]
Mlp = Literal["swiglu", "relu2"]
QkNorm = Literal["gain", "plain"]


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

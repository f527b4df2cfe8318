"""The position-wise feed-forward block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from valuepath.plan import Shape


class Mlp(nn.Module):
    """``swiglu``: down(silu(gate h) * up h).  ``relu2``: down(relu(up h)^2)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, width, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj = nn.Linear(d, width, bias=bias) if shape.mlp == "swiglu" else None
        self.up_proj = nn.Linear(d, width, bias=bias)
        self.down_proj = nn.Linear(width, d, bias=bias)

    def forward(self, h: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.relu(self.up_proj(h)).square())
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))

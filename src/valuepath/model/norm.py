"""RMSNorm, with and without a learned gain."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and square roots: at least float32, and never below the input's, so that float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps)`` over the last axis, in the dtype of x."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(nn.Module):
    """``g * x / sqrt(mean(x^2) + eps)`` over the last axis; without ``gain``, g = 1 and nothing is stored."""

    def __init__(self, width: int, eps: float, gain: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        normed = rms_norm(x, self.eps)
        return normed if self.weight is None else self.weight * normed

"""Weighted sums of sources: the module that owns exactly the coefficients and gates which a mix asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from valuepath.model.norm import compute_dtype
from valuepath.parameters import coefficient_shape, source_label, stream_heads
from valuepath.shape import Shape
from valuepath.wiring import Axis, Budget, Fixed, Gate, Learn, Mix, Term, Weight

Factor = Tensor | float
"""A weight as it multiplies a stream: a number, or a tensor that broadcasts over it."""


def times(factor: Factor | None, x: Tensor) -> Tensor:
    """``factor * x`` in the dtype of x; None and 1 cost nothing."""
    if factor is None or (isinstance(factor, float) and factor == 1.0):
        return x
    return (factor * x).to(x.dtype)


def multiply(a: Factor | None, b: Factor | None) -> Factor | None:
    """The product of two outside weights, either of which may be absent."""
    if a is None or b is None:
        return b if a is None else a
    return a * b


class BudgetWeights(nn.Module):
    """``scale * softmax(logits)``: one coefficient per layer, (N,)."""

    def __init__(self, total: float, num_layers: int) -> None:
        super().__init__()
        self.total = total
        self.scale = nn.Parameter(torch.tensor(float(total)))
        self.logits = nn.Parameter(torch.zeros(num_layers))

    def forward(self) -> Tensor:
        dtype = compute_dtype(self.logits.dtype)
        return (self.scale * self.logits.to(dtype).softmax(0)).to(self.logits.dtype)


class Mixer(nn.Module):
    """``sum_j weight_j * source_j`` for one stream of one layer.

    Streams q, k, v, out are (B, T, heads, e), a is (B, h, T, S), x is (B, T, d). Weights are per layer (), per head
    (heads, 1) or per channel (heads, e) or (d,); gates are ``range * sigmoid(w . h[:channels])``, (B, T, heads, 1).
    """

    def __init__(self, mix: Mix, stream: str, layer: int, shape: Shape) -> None:
        super().__init__()
        self.mix, self.stream, self.layer = mix, stream, layer
        self.coefficients = nn.ParameterDict()
        self.gates = nn.ModuleDict()
        for term in mix:
            label, weight = source_label(term.source), term.weight
            if isinstance(weight, Learn):
                extents = coefficient_shape(shape, stream, weight.per)
                self.coefficients[label] = nn.Parameter(torch.full(extents, weight.init))
            elif isinstance(weight, Gate):
                self.gates[label] = nn.Linear(weight.channels, stream_heads(shape, stream), bias=False)

    def weight(self, term: Term, budgets: Mapping[int, Tensor], h: Tensor | None = None) -> Factor:
        """The weight of one term.

        Args:
            budgets: budget group -> (N,) coefficients.
            h: normalised attention input (B, T, d), which gates read.
        """
        label = source_label(term.source)
        match term.weight:
            case Fixed(value):
                return float(value)
            case Learn(_, per):
                coefficient = self.coefficients[label]
                return coefficient[..., None] if self.stream == "a" and per == "head" else coefficient
            case Budget(_, group):
                return budgets[group][self.layer]
            case Gate(extent, channels):
                assert h is not None
                return extent * torch.sigmoid(self.gates[label](h[..., :channels]))[..., None]
        raise AssertionError(term.weight)

    def forward(self, sources: list[Tensor], budgets: Mapping[int, Tensor], h: Tensor | None = None) -> Tensor:
        """The sum over ``sources``, one per term and in its order."""
        total = times(self.weight(self.mix.terms[0], budgets, h), sources[0])
        for term, source in zip(self.mix.terms[1:], sources[1:], strict=True):
            total = total + times(self.weight(term, budgets, h), source)
        return total


def rescale(x: Tensor, to: Tensor, axis: Axis, eps: float = 1e-24) -> Tensor:
    """``x * |to| / |x|`` for values (B, T, heads, e).

    axis ``token``: norm over all heads of a token; ``head``: per head; ``tensor``: over everything but the batch, which
    reads later tokens.
    """
    dims = {"token": (-2, -1), "head": (-1,), "tensor": (-3, -2, -1)}[axis]
    dtype = compute_dtype(x.dtype)
    wide = x.to(dtype)
    # the floor lies under the root, whose gradient at 0 is infinite
    norm = wide.square().sum(dims, keepdim=True).clamp_min(eps).sqrt()
    target = to.to(dtype).square().sum(dims, keepdim=True).clamp_min(eps).sqrt()
    return (wide * (target / norm)).to(x.dtype)


def skip_factor(weight: Weight, learned: Tensor | None) -> Factor:
    """The factor on a skip connection."""
    if learned is not None:
        return learned
    assert isinstance(weight, Fixed)
    return float(weight.value)

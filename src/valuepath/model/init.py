"""Initial weights. Each depends only on the seed and the parameter's name, so that variants start paired.

The one table of initialisations, by the role that the plan gives a parameter:

============  ==========================================================================================
embedding     normal, std ``initializer_range``
head          normal, std ``initializer_range``
matrix        normal, std ``initializer_range``
bias          0
norm          1
coefficient   the number in the equation: ``learn(init)``; a budget's scale starts at its total, its logits at 0
gate          uniform in [0, 0.02]: small positive, so that the gate starts near half its range
table         ``projected``: x0 W_V of the initial weights, in float32, whether or not the layer has that W_V;
              ``uniform``: in +-sqrt(3/d)
============  ==========================================================================================
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from valuepath.model.norm import rms_norm
from valuepath.plan import Parameter, Plan
from valuepath.wiring import Table


def generator_for(seed: int, name: str) -> torch.Generator:
    """A generator that depends on the seed and the parameter's name only."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


def _empty(shape: tuple[int, ...]) -> Tensor:
    """Whatever dtype and device are the default while a model is built: a start must not depend on them."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


class Initializer:
    """Initial values by parameter name, in float32 on the CPU."""

    def __init__(self, plan: Plan, std: float, eps: float, seed: int) -> None:
        self.plan, self.std, self.eps, self.seed = plan, std, eps, seed
        self.parameters = {parameter.name: parameter for parameter in plan.parameters}
        self.by_role: dict[str, Callable[[Parameter], Tensor]] = {
            "embedding": self._normal,
            "head": self._normal,
            "matrix": self._normal,
            "bias": lambda p: _empty(p.shape).fill_(0.0),
            "norm": lambda p: _empty(p.shape).fill_(1.0),
            "coefficient": lambda p: _empty(p.shape).fill_(p.start),
            "gate": lambda p: self._uniform(p, 0.0, 0.02),
            "table": self._table,
        }

    def __call__(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        return self.by_role[parameter.role](parameter)

    def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return _empty(shape).normal_(0.0, self.std, generator=generator_for(self.seed, name))

    def _normal(self, parameter: Parameter) -> Tensor:
        return self._draw(parameter.name, parameter.shape)

    def _uniform(self, parameter: Parameter, low: float, high: float) -> Tensor:
        return _empty(parameter.shape).uniform_(low, high, generator=generator_for(self.seed, parameter.name))

    def _table(self, parameter: Parameter) -> Tensor:
        layer, table = self._owner(parameter.name)
        d = self.plan.shape.hidden_size
        if table.init == "uniform":
            bound = math.sqrt(3 / d)
            return self._uniform(parameter, -bound, bound)
        embedding = self._draw("model.embed_tokens.weight", (self.plan.shape.vocab_size, d))
        projection = self._draw(f"model.layers.{layer}.self_attn.v_proj.weight", (self.plan.shape.kv_width, d))
        return rms_norm(embedding, self.eps) @ projection.T

    def _owner(self, name: str) -> tuple[int, Table]:
        """The layer that a table belongs to (the first one that reads a shared table), and its term."""
        for n, layer in enumerate(self.plan.wiring.layers):
            for term in layer.v:
                if isinstance(term.source, Table):
                    own = "model.v_table.weight" if term.source.shared else f"model.layers.{n}.self_attn.v_table.weight"
                    if own == name:
                        return n, term.source
        raise KeyError(name)

"""The learned numbers of an equation, read off a trained model and followed through its layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from valuepath.describe import source_text
from valuepath.model.modeling import ValuePathForCausalLM
from valuepath.parameters import source_label
from valuepath.wiring import NOTHING, OWN, Budget, Learn


def learned(model: ValuePathForCausalLM) -> list[dict[str, Any]]:
    """``[{"label": "v: tap(0)", "layers": [...], "start": [...], "values": [...]}]`` in the order of the equation.

    A weight per head or per channel is given by its mean; a budget's share by the coefficient that it comes to; layer N is the
    final norm's input. Gates depend on the hidden state and are left out.
    """
    found: dict[str, tuple[list[int], list[float], list[float]]] = {}
    for label, layer, start, value in _each(model):
        layers, starts, values = found.setdefault(label, ([], [], []))
        layers.append(layer)
        starts.append(start)
        values.append(value.detach().double().mean().item())
    return [
        {"label": label, "layers": layers, "start": starts, "values": values}
        for label, (layers, starts, values) in found.items()
    ]


def _each(model: ValuePathForCausalLM) -> Iterator[tuple[str, int, float, Tensor]]:
    plan = model.model.plan
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        budgets = model.model.budget_weights()
    mixes = []
    for n, wired in enumerate(plan.wiring.layers):
        mixes += [("x", n, wired.x), *((stream, n, wired.mix(stream)) for stream in ("q", "k", "v", "a", "out"))]
        for name in ("skip_attn", "skip_mlp"):
            weight = getattr(wired, name)
            if isinstance(weight, Learn):
                yield name, n, weight.init, parameters[f"model.layers.{n}.{name}"]
    mixes.append(("x", plan.num_layers, plan.wiring.final_x))
    for stream, n, mix in mixes:
        if mix in (OWN, NOTHING):
            continue
        for term in mix:
            label = f"{stream}: {source_text(term.source, stream)}"
            match term.weight:
                case Learn(start, _):
                    name = f"{plan.mix_name(stream, n)}.coefficients.{source_label(term.source)}"
                    yield label, n, start, parameters[name]
                case Budget(total, group):
                    yield label, n, total / plan.num_layers, budgets[group][n]

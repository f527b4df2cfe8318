"""``torch.compile`` takes the whole model as one graph: every preset is traced, some are compiled to the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.metrics
from torch import Tensor

import valuepath as vp
from models import small_model, tokens

LAYERS = {"hidden_from_h2": 3, "hidden_from_h3": 4}
"""The fewest layers that a preset takes, where they are more than two."""
COMPILED = {"resformer_learnable": 2, "bov": 1, "v1_cross_layer_attention": 2}
"""Presets that are compiled to machine code, and their layers: a few small ones, as the C++ compiler takes its time."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Every test compiles by itself, and in this process: starting others costs more than they save here."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield


def model_for(name: str, **fields: Any) -> vp.ValuePathForCausalLM:
    return small_model(variant=name, num_key_value_heads=2, **{"num_hidden_layers": LAYERS.get(name, 2), **fields})


def step(model: Any, call: Any, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradient of the loss by parameter."""
    model.zero_grad()
    out = call(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def same(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], tolerance: float) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=tolerance)
    for name, gradient in expected[1].items():
        bound = tolerance * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", vp.variants())
def test_every_preset_is_one_graph_with_the_same_logits_and_gradients(name):
    model, ids = model_for(name), tokens(2, 7)
    same(step(model, torch.compile(model, fullgraph=True, backend="eager"), ids), step(model, model, ids), 1e-12)


@pytest.mark.parametrize("fields", [
    {"style": "nanochat", "max_position_embeddings": 24},
    {"sliding_window": 3},
    {"qk_norm": "gain", "attention_bias": True, "tie_word_embeddings": True},
    {"wiring": "q[1] = learn(1, per=head)*own; v[1] = learn(1, per=channel)*shared(0) + gate(2, 5)*table(shared);"
               "out[1] = tap(v, 0)"},
], ids=["nanochat", "window", "biases_and_qk_gain", "wiring"])  # fmt: skip
def test_other_parts_of_the_model_are_traced_too(fields):
    model, ids = small_model(num_hidden_layers=2, num_key_value_heads=2, **fields), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        found = compiled(ids, attention_mask=mask, use_cache=False).logits
        expected = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-12)


def test_one_graph_serves_every_length():
    model = model_for("resformer_learnable")
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for length in (7, 11, 19):
            ids = tokens(2, length)
            found = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=0, atol=1e-12)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", COMPILED)
@torch.no_grad()
def test_compiled_code_gives_the_same_logits(name):
    model, ids = model_for(name, num_hidden_layers=COMPILED[name], dtype=torch.float32), tokens(2, 7)
    expected = model(ids, use_cache=False).logits
    kernels = torch._inductor.metrics.generated_kernel_count
    found = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits
    assert torch._inductor.metrics.generated_kernel_count > kernels
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_compiled_training_step_gives_the_same_gradients():
    model, ids = model_for("v_plus_table_gated", num_hidden_layers=1, dtype=torch.float32), tokens(2, 7)
    compiled = torch.compile(model, fullgraph=True)
    expected = step(model, model, ids)
    same(step(model, compiled, ids), expected, 1e-5)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    # the compiled graph reads the new weights
    before = float(torch.nn.functional.cross_entropy(expected[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    after = step(model, compiled, ids)
    assert float(torch.nn.functional.cross_entropy(after[0][:, :-1].flatten(0, 1), ids[:, 1:].flatten())) < before
    same(after, step(model, model, ids), 1e-5)

"""Gradients: every parameter has one, a value that several layers read is trained by each of them, checkpointing changes none.

A gradient that is dropped on the way leaves the loss as it is and trains another model, so it is compared path by path.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import valuepath as vp
from models import VOCABULARY, left_padding, small_model, tokens
from valuepath.compat import CACHE_NAME

PRESETS = [*vp.variants()]
GQA: dict[str, Any] = {"num_key_value_heads": 2}
NANOCHAT: dict[str, Any] = {"style": "nanochat", "max_position_embeddings": 24}
EQUATION = (
    "v[1] = learn(0.25)*own + learn(-1.5, per=head)*tap(0); v[2] = learn(3, per=channel)*shared(1) + budget(6)*tap(0);"
    "v[3] = renorm(own + gate(2, 5)*table(shared) + learn(0.3)*embed, to=own, axis=head);"
    "q[2] = learn(0.5, per=head)*own + 0.5*tap(1); k[1] = learn(0.75, per=channel)*own; k[3] = learn(0.9, per=head)*shared(2);"
    "out[3] = learn(0.125)*final(v) + gate(1, 7)*tap(v, 0); x[2:5] = learn(2, per=channel)*own + learn(0.1)*tap(1);"
    "skip_attn[2] = learn(0.5); skip_mlp[3] = learn(1.25, per=channel); skip_mlp[1] = 0.7; skip_attn[1] = 0;"
    "kv[3] = concat(own, shared(1))"
)
"""What no preset does: every kind of weight on many streams, mixed with each other."""
CASES = [*PRESETS, EQUATION]
NAMES = [*PRESETS, "equation"]
EVERYTHING: dict[str, Any] = {"attention_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": "gain", **GQA}


def model_for(name: str, layers: int = 4, **fields: Any) -> vp.ValuePathForCausalLM:
    if name == "attention_residual" and fields.get("style") == "nanochat":
        fields["window_pattern"] = "L"  # attention matrices can only be mixed under equal windows
    what = {"variant": name} if name in PRESETS else {"wiring": name}
    return small_model(num_hidden_layers=layers, **what, **fields).train()


def backward(model: Any, ids: Tensor, seed: int = 3, **given: Any) -> dict[str, Tensor]:
    """The gradient of a random functional of the logits, by parameter."""
    model.zero_grad()
    logits = model(ids, **{"use_cache": False, **given}).logits
    probe = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(seed))
    (logits * probe).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in found.values()), [n for n, g in found.items() if g is None]
    return {name: gradient.clone() for name, gradient in found.items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = float(expected[name].abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")


# ------------------------------------------------------------------------------------------------------ every parameter
@pytest.mark.parametrize("fields", [GQA, NANOCHAT, EVERYTHING], ids=["llama_gqa", "nanochat", "biases_and_qk_gain"])
@pytest.mark.parametrize("name", CASES, ids=NAMES)
def test_every_parameter_is_trained(name, fields):
    model, ids = model_for(name, **fields), tokens(2, 13)
    seen = torch.zeros(VOCABULARY, dtype=torch.bool)
    seen[ids] = True
    roles = {parameter.name: parameter.role for parameter in model.config.plan().parameters}
    for parameter, gradient in backward(model, ids).items():
        assert torch.isfinite(gradient).all(), parameter
        if roles[parameter] in ("table", "embedding"):
            # a row per token: exactly those of the tokens that occur
            assert torch.equal((gradient != 0).any(1), seen), parameter
        elif ".mlp." in parameter and model.config.mlp == "relu2":
            assert (gradient != 0).any(), parameter  # a hidden unit may be off for every token
        else:
            assert (gradient != 0).all(), parameter


@pytest.mark.parametrize("fields", [GQA, NANOCHAT], ids=["llama_gqa", "nanochat"])
@pytest.mark.parametrize("name", CASES, ids=NAMES)
def test_gradients_are_slopes(name, fields):
    """``(f(p + s r) - f(p - s r)) / 2 s = r . grad f``. A cast to float32 anywhere would leave noise of 1e-7 / s = 0.1."""
    model, ids = model_for(name, **fields), tokens(2, 7)
    generator = torch.Generator().manual_seed(9)
    gradients = backward(model, ids)
    direction = {n: torch.randn(g.shape, dtype=g.dtype, generator=generator) / g.numel() ** 0.5 for n, g in gradients.items()}
    slope = sum(float((gradients[n] * r).sum()) for n, r in direction.items())
    probe = torch.randn(2, 7, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found, step = [], 1e-6
    with torch.no_grad():
        for move in (step, -2 * step):  # to +s, then to -s
            for parameter_name, parameter in model.named_parameters():
                parameter.add_(direction[parameter_name], alpha=move)
            found.append(float((model(ids, use_cache=False).logits * probe).sum()))
    assert abs(slope) > 1e-2
    assert (found[0] - found[1]) / (2 * step) == pytest.approx(slope, rel=1e-5)


# ------------------------------------------------------------------------------------------------- the first layer's W_V
READERS: dict[str, tuple[dict[str, Any], set[int]]] = {
    # options, and the layers after the first that read the value of layer 0, of 6
    **{
        name: ({}, {1, 2, 3, 4, 5})
        for name in (
            "resformer_identity", "resformer_constant", "resformer_learnable", "resformer_plus", "resformer_dense",
            "resformer_identity_rescaled", "svformer", "neutreno", "v1_identity_mapping", "v1_cross_layer_attention",
        )
    },
    **{name: ({}, {4, 5}) for name in ("resformer_sparse", "v1_last_third", "v_plus_v1")},
    "v1_every2": ({}, {1, 3, 5}),
    "cla2": ({}, {1}),
    "hidden_from_h1": ({"source": 0}, {1, 2, 3, 4, 5}),
}  # fmt: skip


def received(model: Any, n: int) -> list[int]:
    """Which of the tensors that block n receives are values of layer 0."""
    return [at for at, key in enumerate(model.model.layers[n].receives) if key in ("tap.v.0", "shared.v.0")]


def test_the_readers_are_those_of_the_equations():
    for name in PRESETS:
        options, readers = READERS.get(name, ({}, set()))
        model = model_for(name, 6, variant_options=options)
        assert {n for n in range(6) if received(model, n)} == readers, name


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("fields", [GQA, NANOCHAT], ids=["llama_gqa", "nanochat"])
def test_the_first_value_projection_is_trained_by_every_layer_that_reads_it(name, fields):
    """``dL/dW = sum over readers of h^T dL/dV_0(reader)``: with each reader's V_0 replaced by a leaf of its own."""
    options, readers = READERS[name]
    model, ids = model_for(name, 6, variant_options=options, **fields), tokens(2, 13)
    weight = "model.layers.0.self_attn.v_proj.weight"
    whole = backward(model, ids)[weight]

    leaves: dict[int, Tensor] = {}
    inputs: list[Tensor] = []

    def detach(block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        args_, n = [*args], block.self_attn.layer_idx
        for at in received(model, n):
            leaves[n] = args_[3 + at] = args_[3 + at].detach().requires_grad_()
        return tuple(args_)

    hooks = [block.register_forward_pre_hook(detach) for block in model.model.layers[1:]]
    hooks.append(
        model.model.layers[0].self_attn.v_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    )
    by_layer_0 = backward(model, ids)[weight]
    for hook in hooks:
        hook.remove()

    assert leaves.keys() == readers
    assert len(inputs) == 1
    parts = {n: torch.einsum("btf,btd->fd", leaf.grad.flatten(2), inputs[0]) for n, leaf in leaves.items()}
    scale = whole.abs().max()
    for n, part in parts.items():
        assert part.abs().max() > 1e-4 * scale, f"layer {n} does not train W_V of layer 0"
    assert by_layer_0.abs().max() > 1e-4 * scale
    torch.testing.assert_close(by_layer_0 + sum(parts.values()), whole, rtol=0, atol=1e-10 * float(scale))


# ------------------------------------------------------------------------------------------------------- checkpointing
def checkpointing(model: Any, reentrant: bool = False) -> None:
    """transformers 5.24 renamed the method and its argument."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
@pytest.mark.parametrize("name", CASES, ids=NAMES)
def test_gradient_checkpointing_changes_no_gradient(name, reentrant):
    model, ids = model_for(name, **GQA), tokens(3, 13)
    mask, positions = left_padding(3, 13)
    given = {"attention_mask": mask, "position_ids": positions}
    expected = backward(model, ids, **given)
    passes: list[int] = []
    for n, block in enumerate(model.model.layers):
        block.input_layernorm.register_forward_hook(lambda *_, n=n: passes.append(n))
    checkpointing(model, reentrant)
    # the default use_cache=True is ignored: a pass that runs twice must not fill a cache
    found = backward(model, ids, use_cache=None, **given)
    assert sorted(passes) == sorted(2 * [*range(4)])  # each block ran again in the backward pass
    same(found, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradient_checkpointing_repeats_the_dropout_of_the_first_pass(attention):
    model, ids = model_for("resformer_learnable", attention_dropout=0.3, attn_implementation=attention), tokens(2, 13)
    torch.manual_seed(5)
    expected = backward(model, ids)
    torch.manual_seed(6)
    other = backward(model, ids)
    weight = "model.layers.0.self_attn.v_proj.weight"
    assert (other[weight] - expected[weight]).abs().max() > 1e-6
    checkpointing(model)
    torch.manual_seed(5)
    same(backward(model, ids), expected)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_cache_is_not_filled_by_passes_that_run_twice():
    model, ids = model_for("svformer"), tokens(2, 5)
    checkpointing(model)
    assert model(ids, use_cache=True).get(CACHE_NAME) is None
    with pytest.raises(ValueError, match="cannot be filled under gradient checkpointing"):
        model(ids, **{CACHE_NAME: model.make_cache()})
    with torch.no_grad():
        assert model(ids)[CACHE_NAME].get_seq_length() == 5
    assert model.eval()(ids)[CACHE_NAME].get_seq_length() == 5


@pytest.mark.parametrize("name", ["transformer", "svformer", "bov", "resformer_dense", "v_plus_table_gated"])
def test_training_with_the_default_cache_gives_the_same_gradients(name):
    model, ids = model_for(name, **GQA), tokens(2, 13)
    same(backward(model, ids, use_cache=True), backward(model, ids))

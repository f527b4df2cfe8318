"""``variant="transformer"`` is transformers' own Llama, Mistral, Qwen2 and Qwen3, weight for weight.

Every parameter of a small model of theirs is drawn at random (norm gains and biases too, so that nothing is neutral) and copied
over by name. Their RMSNorm and RoPE cast down to float32; for the comparison in float64 both are patched not to, and nothing
else is, so that 1e-10 holds for everything around them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from valuepath import ValuePathConfig, ValuePathForCausalLM
from valuepath.compat import CACHE_NAME

B, T, VOCAB, LAYERS, WINDOW = 3, 23, 101, 4, 7
PADDING = (0, 5, 9)  # on the left of each row

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
COMMON = {"vocab_size": VOCAB, "num_hidden_layers": LAYERS, "intermediate_size": 67, "max_position_embeddings": 128, **HEADS}

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # their class, their fields, our fields that have another name or another default
    "llama": ("Llama", {"hidden_size": 60, "rms_norm_eps": 1e-5}, {}),
    "llama_tied_wide_heads": ("Llama", {"hidden_size": 42, "head_dim": 14, "tie_word_embeddings": True}, {}),
    "llama_biases": (
        "Llama",
        {"hidden_size": 42, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
        {"output_bias": True},
    ),
    "llama_without_gqa": ("Llama", {"hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 3}, {}),
    "llama_one_kv_head": ("Llama", {"hidden_size": 60, "num_key_value_heads": 1}, {}),
    "mistral_sliding": ("Mistral", {"hidden_size": 37, "head_dim": 10, "sliding_window": WINDOW}, {}),
    "mistral_sliding_tied": (
        "Mistral",
        {"hidden_size": 60, "sliding_window": WINDOW, "tie_word_embeddings": True},
        {},
    ),
    "qwen2_biases": ("Qwen2", {"hidden_size": 60}, {"attention_bias": True}),
    "qwen2_sliding_layers": (
        "Qwen2",
        {"hidden_size": 60, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
        {"attention_bias": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2},
    ),
    "qwen2_tied": ("Qwen2", {"hidden_size": 60, "tie_word_embeddings": True}, {"attention_bias": True}),
    "qwen3_head_norm": ("Qwen3", {"hidden_size": 37, "head_dim": 14}, {"qk_norm": "gain"}),
    "qwen3_head_norm_tied_biases": (
        "Qwen3",
        {"hidden_size": 37, "head_dim": 10, "tie_word_embeddings": True, "attention_bias": True},
        {"qk_norm": "gain", "output_bias": True},
    ),
}
THEIRS_ALONE = {"use_sliding_window", "max_window_layers"}
MODELINGS = {"Llama": modeling_llama, "Mistral": modeling_mistral, "Qwen2": modeling_qwen2, "Qwen3": modeling_qwen3}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Every parameter away from its neutral start, logits of order 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(noise * 0.4 + (1.0 if "norm" in name else 0.0))
            else:
                parameter.copy_(noise * 1.2 * parameter.shape[1] ** -0.5)


def pair(family: str, attention: str = "sdpa", **extra: Any) -> tuple[Any, ValuePathForCausalLM]:
    """Their model with random weights, and ours with the same."""
    name, fields, ours = FAMILIES[family]
    fields = {**COMMON, **fields, **extra}
    their_config = getattr(transformers, f"{name}Config")(**fields, attn_implementation=attention)
    theirs = getattr(transformers, f"{name}ForCausalLM")(their_config).eval()
    randomise(theirs)
    fields = {key: value for key, value in fields.items() if key not in THEIRS_ALONE} | ours
    fields.setdefault("rms_norm_eps", their_config.rms_norm_eps)
    our = ValuePathForCausalLM(ValuePathConfig(variant="transformer", **fields, attn_implementation=attention)).eval()
    our.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, our


@pytest.fixture
def uncast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their RMSNorm and rotary tables in the dtype of the model, by the same formulas."""

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling

    for name, modeling in MODELINGS.items():
        monkeypatch.setattr(getattr(modeling, f"{name}RMSNorm"), "forward", norm)
        monkeypatch.setattr(getattr(modeling, f"{name}RotaryEmbedding"), "forward", rotary)


def inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids (B, T), and a mask with padding on the left."""
    ids = torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(B, T, dtype=torch.long)
    for row, count in enumerate(PADDING):
        mask[row, :count] = 0
    return ids, mask


def in_chunks(model: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None, **first: Any) -> Tensor:
    """Logits of all positions from one cached pass after the other; ``first`` goes to the first pass."""
    found, cache, start = [], None, 0
    for size in sizes:
        end = start + size
        given = {CACHE_NAME: cache, **({} if mask is None else {"attention_mask": mask[:, :end]})}
        out = model(ids[:, start:end], use_cache=True, **{**given, **(first if start == 0 else {})})
        found.append(out.logits)
        cache, start = out[CACHE_NAME], end
    assert start == ids.shape[1]
    assert cache.get_seq_length() == start
    return torch.cat(found, 1)


def one_by_one(prefill: int) -> list[int]:
    return [prefill] + [1] * (T - prefill)


CHUNKS = {"prefill_then_one_by_one": one_by_one(11), "in_chunks": [1, 5, 2, 8, 1, 6]}


def close(found: Tensor, expected: Tensor, tolerance: float, mask: Tensor | None = None) -> None:
    assert found.dtype == expected.dtype
    assert torch.isfinite(found).all()
    assert expected.std() > 0.1  # the tolerance is absolute: it must not be met by small numbers
    if mask is not None:
        found, expected = found[mask.bool()], expected[mask.bool()]
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# ------------------------------------------------------------------------------------------------------------- models
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_float32_logits_and_every_hidden_state_are_theirs(family):
    theirs, ours = pair(family)
    ids, mask = inputs()
    for given in ({}, {"attention_mask": mask}, {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}):
        expected = theirs(ids, output_hidden_states=True, **given)
        found = ours(ids, output_hidden_states=True, **given)
        real = given.get("attention_mask")
        close(found.logits, expected.logits, 1e-5, real)
        assert len(found.hidden_states) == len(expected.hidden_states) == LAYERS + 1
        for state, expected_state in zip(found.hidden_states, expected.hidden_states, strict=True):
            close(state, expected_state, 1e-5, real)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
@torch.no_grad()
def test_float32_logits_of_cached_passes_are_theirs(family, sizes):
    theirs, ours = pair(family)
    ids, mask = inputs()
    close(in_chunks(ours, ids, sizes), in_chunks(theirs, ids, sizes), 1e-5)
    close(in_chunks(ours, ids, sizes, mask), in_chunks(theirs, ids, sizes, mask), 1e-5, mask)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_float64_logits_are_theirs_to_1e_10(family, uncast):
    theirs, ours = (model.double() for model in pair(family))
    ids, mask = inputs()
    for given in ({}, {"attention_mask": mask}):
        expected, real = theirs(ids, **given).logits, given.get("attention_mask")
        close(ours(ids, **given).logits, expected, 1e-10, real)
        for sizes in CHUNKS.values():
            close(in_chunks(ours, ids, sizes, real), expected, 1e-10, real)
    assert theirs(ids).logits.dtype == torch.float64


@pytest.mark.parametrize("family", ["llama_biases", "mistral_sliding", "qwen2_sliding_layers", "qwen3_head_norm_tied_biases"])
def test_float64_loss_and_the_gradient_of_every_parameter_are_theirs(family, uncast):
    theirs, ours = (model.double().train() for model in pair(family))
    ids, mask = inputs()
    labels = ids.masked_fill(mask == 0, -100)
    for given in ({}, {"num_items_in_batch": 17}):
        expected = theirs(ids, attention_mask=mask, labels=labels, **given).loss
        found = ours(ids, attention_mask=mask, labels=labels, **given).loss
        # their loss is taken in float32
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-6, atol=0)
    probe = torch.randn(B, T, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * mask[..., None]
    for model in (theirs, ours):
        model.zero_grad()
        (model(ids, attention_mask=mask, use_cache=False).logits * probe).sum().backward()
    expected_gradients = dict(theirs.named_parameters())
    assert dict(ours.named_parameters()).keys() == expected_gradients.keys()
    for name, parameter in ours.named_parameters():
        expected_gradient = expected_gradients[name].grad
        assert expected_gradient.abs().max() > 1e-3, name
        torch.testing.assert_close(parameter.grad, expected_gradient, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen2_sliding_layers", "qwen3_head_norm"])
@torch.no_grad()
def test_eager_attention_gives_their_logits_and_attention_weights(family):
    theirs, ours = pair(family, attention="eager")
    ids, mask = inputs()
    expected = theirs(ids, attention_mask=mask, output_attentions=True)
    found = ours(ids, attention_mask=mask, output_attentions=True)
    close(found.logits, expected.logits, 1e-5, mask)
    assert len(found.attentions) == len(expected.attentions) == LAYERS
    for weights, expected_weights in zip(found.attentions, expected.attentions, strict=True):
        rows = mask.bool()
        torch.testing.assert_close(weights.transpose(1, 2)[rows], expected_weights.transpose(1, 2)[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "qwen2_sliding_layers", "qwen3_head_norm"])
@torch.no_grad()
def test_their_own_cache_can_be_handed_in(family, uncast):
    theirs, ours = (model.double() for model in pair(family))
    ids, mask = inputs()
    for cache in (DynamicCache(), DynamicCache(config=ours.config)):
        found = in_chunks(ours, ids, CHUNKS["in_chunks"], mask, **{CACHE_NAME: cache})
        close(found, theirs(ids, attention_mask=mask).logits, 1e-10, mask)


# ---------------------------------------------------------------------------------------------------------------- RoPE
ORIGINAL = 11  # positions of the original training, less than half of T
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.3],
        "long_factor": [1.2, 1.9, 3.1, 4.3, 7.9], "original_max_position_embeddings": ORIGINAL,
    },
}  # fmt: skip
# the dynamic type starts at max_position_embeddings, the others at the original length that they name
TRAINED = {"dynamic": ORIGINAL, "llama3": 8 * ORIGINAL, "yarn": 4 * ORIGINAL, "longrope": 4 * ORIGINAL}


def scaled_pair(scaling: str) -> tuple[Any, ValuePathForCausalLM]:
    return pair("llama", rope_parameters=dict(SCALINGS[scaling]), max_position_embeddings=TRAINED.get(scaling, 64))


@pytest.mark.parametrize("scaling", SCALINGS)
@torch.no_grad()
def test_scaled_rope_gives_their_logits_within_and_beyond_the_original_length(scaling):
    theirs, ours = scaled_pair(scaling)
    ids, _ = inputs()
    # growing, shrinking back and growing again: the dynamic types keep state
    for length in (ORIGINAL - 2, T - 4, ORIGINAL - 1, T, ORIGINAL + 1):
        close(ours(ids[:, :length]).logits, theirs(ids[:, :length]).logits, 1e-5)


@pytest.mark.parametrize("scaling", SCALINGS)
@torch.no_grad()
def test_scaled_rope_gives_their_logits_in_cached_passes_that_cross_the_original_length(scaling):
    theirs, ours = scaled_pair(scaling)
    ids, mask = inputs()
    for sizes in (CHUNKS["prefill_then_one_by_one"], CHUNKS["in_chunks"]):
        close(in_chunks(ours, ids, sizes, mask), in_chunks(theirs, ids, sizes, mask), 1e-5, mask)


@torch.no_grad()
def test_every_scaling_changes_the_logits():
    ids, _ = inputs()
    plain = scaled_pair("default")[1](ids).logits
    for scaling in SCALINGS.keys() - {"default"}:
        assert (scaled_pair(scaling)[1](ids).logits - plain).abs().max() > 0.1, scaling

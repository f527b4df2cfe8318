"""Every preset trains and generates in low precision and under autocast, and float64 is float64 throughout."""

from __future__ import annotations

import pytest
import torch

import valuepath as vp
from models import small_config, small_model, tokens
from valuepath.variants import variants


@pytest.mark.parametrize("style", ["llama", "nanochat"])
@pytest.mark.parametrize("name", variants())
def test_low_precision(name: str, style: str) -> None:
    if name == "attention_residual" and style == "nanochat":
        pytest.skip("attention matrices of unequal windows cannot be mixed: refused by the plan")
    config = small_config(variant=name, style=style)
    ids = tokens(2, 12)

    def train_and_generate(model: vp.ValuePathForCausalLM) -> None:
        model.zero_grad()
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        assert loss.dtype == torch.float32
        assert loss.isfinite()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        if config.plan().generation_refusal is None:
            text = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
            assert text.shape == (2, 16)

    model = vp.ValuePathForCausalLM(config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train_and_generate(model)
    for dtype in (torch.bfloat16, torch.float16):
        train_and_generate(model.to(dtype))


NEAR = ["resformer_identity", "svformer", "bov", "v_plus_x0wv", "resformer_identity_rescaled", "denseformer"]


@pytest.mark.parametrize("name", NEAR)
def test_bfloat16_stays_near_float32(name: str) -> None:
    """The same weights in both: logits differ by what bfloat16's 8 bits explain, a few per cent of their size."""
    wide = small_model(torch.bfloat16, variant=name, qk_norm="plain")
    ids = tokens(2, 12)
    with torch.no_grad():
        low = wide(ids, use_cache=False).logits.float()
        high = wide.float()(ids, use_cache=False).logits
    error = (low - high).norm() / high.norm()
    assert 0 < error < 0.05


@pytest.mark.parametrize("style", ["llama", "nanochat"])
def test_float64_is_never_cast_down(style: str) -> None:
    """Logits answer to a change in the fourteenth digit of one weight, which any float32 in between would swallow."""
    model = small_model(torch.float64, variant="resformer_learnable", style=style)
    ids = tokens(1, 12)
    with torch.no_grad():
        before = model(ids, labels=ids)
        model.model.embed_tokens.weight.mul_(1 + 1e-13)
        after = model(ids, labels=ids)
    changes = (after.logits - before.logits).abs()
    assert changes.max() > 0
    assert changes.max() < 1e-8 * before.logits.abs().max()
    assert after.loss.dtype == torch.float64

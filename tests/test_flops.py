"""Counted FLOPs against what torch executes, forward and backward, for every preset with full attention."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import valuepath as vp
from models import small_config, tokens
from valuepath.counts import flops_per_token
from valuepath.variants import variants

T, BATCH = 67, 2


def executed(model: vp.ValuePathForCausalLM) -> tuple[int, int]:
    """(forward, backward) floating-point operations of matrix products as torch counts them.

    The fused CPU attention is invisible to the counter, so attention runs as plain matrix products.
    """
    ids = tokens(BATCH, T)
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = model(ids, use_cache=False).logits.sum()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("name", variants())
def test_flops_agree_with_what_torch_executes(name: str, kv_heads: int) -> None:
    config = small_config(variant=name, num_key_value_heads=kv_heads, max_position_embeddings=T)
    counted = flops_per_token(config.plan(), T)
    forward, backward = executed(vp.ValuePathForCausalLM(config))
    assert forward == pytest.approx(counted.forward * T * BATCH, rel=0.01)
    assert backward == pytest.approx((counted.training - counted.forward) * T * BATCH, rel=0.01)
    assert counted.training == 3 * counted.forward


@pytest.mark.parametrize("style", ["llama", "nanochat"])
def test_flops_of_both_styles(style: str) -> None:
    config = small_config(style=style, window_pattern=None if style == "llama" else "L", tie_word_embeddings=True)
    forward, backward = executed(vp.ValuePathForCausalLM(config))
    counted = flops_per_token(config.plan(), T)
    assert forward + backward == pytest.approx(counted.training * T * BATCH, rel=0.01)

"""Small models with nothing left at a neutral start, and passes through a cache in pieces: what several tests share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import valuepath as vp
from valuepath.compat import CACHE_NAME

LAYERS = 6
VOCABULARY = 53


def randomise(model: torch.nn.Module, seed: int = 0, std: float = 0.3) -> None:
    """Every parameter random: matrices around 0, scalars and vectors around 0.7, so that no part is switched off."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + (0.7 if parameter.ndim <= 1 else 0.0))


def small_config(**fields: Any) -> vp.ValuePathConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 42,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 6,
        "head_dim": 10,
        "intermediate_size": 31,
        "pad_token_id": 0,
    }
    return vp.ValuePathConfig(**{**sizes, **fields})


def small_model(dtype: torch.dtype = torch.float64, seed: int = 0, **fields: Any) -> vp.ValuePathForCausalLM:
    """A randomised model in eval mode."""
    model = vp.ValuePathForCausalLM(small_config(**fields)).to(dtype).eval()
    randomise(model, seed)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """(attention_mask, position_ids) with 0, 3, 6, ... padding tokens on the left."""
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(batch):
        mask[row, : min(3 * row, length - 1)] = 0
    return mask, (mask.cumsum(1) - 1).clamp(min=0)


def in_pieces(
    model: Any, ids: Tensor, sizes: Iterable[int], mask: Tensor, positions: Tensor, cache: Any = None, start: int = 0
) -> tuple[Tensor, Any]:
    """Logits of ``ids`` (B, T) run through the cache in pieces of the given sizes, and the cache."""
    logits, at = [], 0
    for size in sizes:
        out = model(
            ids[:, at : at + size],
            attention_mask=mask[:, : start + at + size],
            position_ids=positions[:, at : at + size],
            use_cache=True,
            **{CACHE_NAME: cache},
        )
        cache = out[CACHE_NAME]
        logits.append(out.logits)
        at += size
    assert at == ids.shape[1]
    return torch.cat(logits, 1), cache

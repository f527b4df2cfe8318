"""Greedy text at length: every way to read values by token, and every place of a table, writes the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import valuepath as vp
from models import small_config, small_model
from valuepath.compat import CACHE_NAME
from valuepath.infer.choose import chooser

PRESETS = [name for name in vp.variants() if small_config(variant=name).plan().folds]
WAYS = ["gather", "pooled", "kernel"]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", PRESETS)
def test_greedy_text_is_the_same_with_and_without_each_mechanism(name: str, batch: int, tmp_path: Path, corpus: Any) -> None:
    """512 tokens after a prompt of 4,096 of real text, float32: values stored in full, then each way and place."""
    fields: dict[str, Any] = {"vocab_size": 311, "num_hidden_layers": 3, "head_dim": 16, "num_key_value_heads": 2}
    model = small_model(torch.float32, variant=name, **fields)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.1)
        model.model.embed_tokens.weight.mul_(0.3)  # else the last token's embedding alone decides, and the text circles
    model.save_pretrained(tmp_path)
    text = torch.as_tensor(corpus.domains["mail"].train.read(0, 3 * 4096))
    ids = torch.stack([text[4096 * b : 4096 * (b + 1)] for b in range(batch)])
    mask = torch.ones_like(ids)
    for b in range(1, batch):
        mask[b, : 701 * b] = 0

    whole = torch.cat([mask, torch.ones(batch, 512, dtype=torch.long)], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)

    def generated(made: Any, cache: Any = None, way: str = "kernel") -> list[list[int]]:
        with chooser.only(way), torch.no_grad():
            cache = made.make_cache() if cache is None else cache
            found, new = [], ids
            for size in (1024, 2048, 1024, *[1] * 511):  # the prompt in pieces, then token by token
                end = cache.get_seq_length() + size
                logits = made(
                    new[:, :size],
                    attention_mask=whole[:, :end] if batch > 1 else None,
                    position_ids=positions[:, end - size : end],
                    logits_to_keep=1,
                    use_cache=True,
                    **{CACHE_NAME: cache},
                ).logits
                chosen = logits[:, -1].argmax(-1, keepdim=True)
                new = new[:, size:] if size < new.shape[1] else chosen
                if end >= 4096:
                    found.append(chosen)
        return torch.cat(found, 1).tolist()

    expected = generated(model, DynamicCache())  # every layer's finished value, stored
    assert len(expected[0]) == 512 and len({token for row in expected for token in row}) > 10
    for way in WAYS:
        assert generated(model, way=way) == expected, way
    assert generated(model, model.make_cache("factored")) == expected
    elsewhere = vp.ValuePathForCausalLM.from_pretrained(tmp_path, table_device="mmap").eval()
    assert generated(elsewhere) == expected

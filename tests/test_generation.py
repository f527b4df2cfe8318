"""Generation through transformers: every way of decoding gives the same tokens with the cache as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import valuepath as vp
from models import small_model, tokens
from valuepath.compat import CACHE_NAME

NEW = 12
NAMES = [
    "transformer",
    "resformer_learnable",
    "resformer_plus",
    "svformer",
    "bov",
    "shared_table",
    "x0wv_last_third",
    "v_plus_table_gated",
    "cla2",
    "neutreno",
    "denseformer",
    "v1_cross_layer_attention",
    "attention_residual",
]
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"sliding_window": 5},
    "pattern": {"window_pattern": "SL", "sliding_window": 4},
}


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of unequal length, padded on the left."""
    ids = tokens(2, 9, seed=7)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids, mask


def make(name: str, windows: str) -> Any:
    if name == "attention_residual" and windows == "pattern":
        pytest.skip("attention matrices of unequal windows cannot be mixed: refused by the plan")
    return small_model(variant=name, num_key_value_heads=2, **WINDOWS[windows])


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, seed: int = 0, **options: Any) -> torch.Tensor:
    torch.manual_seed(seed)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **{"do_sample": False, **options})


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_sampling_beams_and_chunked_prefill(name: str, windows: str) -> None:
    model = make(name, windows)
    ids, mask = prompt()
    for options in (
        {},
        {"do_sample": True, "top_k": 20},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
    ):
        plain = generate(model, ids, mask, use_cache=False, **options)
        assert torch.equal(generate(model, ids, mask, **options), plain), options
        assert len(torch.unique(plain[:, 9:])) > 3  # not one token over and over
    assert torch.equal(generate(model, ids, mask, prefill_chunk_size=4), generate(model, ids, mask, use_cache=False))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("name", NAMES)
def test_prompt_lookup_and_assisted_decoding(name: str, windows: str) -> None:
    model = make(name, windows)
    ids = tokens(1, 9, seed=3)
    plain = generate(model, ids, use_cache=False)
    assert torch.equal(generate(model, ids, prompt_lookup_num_tokens=3), plain)
    assistants = {
        "itself, so that every draft is accepted": model,
        "another, so that most are not": small_model(variant="svformer", num_hidden_layers=2, seed=5, **WINDOWS[windows]),
    }
    for assistant in assistants.values():
        assert torch.equal(generate(model, ids, assistant_model=assistant), plain)
    repetitive = ids[:, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]]
    assert torch.equal(generate(model, repetitive, prompt_lookup_num_tokens=4), generate(model, repetitive, use_cache=False))


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_continues_on_its_cache(name: str) -> None:
    model = make(name, "sliding")
    ids, mask = prompt()
    cache = model.make_cache()
    first = generate(model, ids, mask, **{CACHE_NAME: cache})
    assert cache.get_seq_length() == 9 + NEW - 1
    mask = torch.cat([mask, torch.ones(2, NEW, dtype=torch.long)], 1)
    second = generate(model, first, mask, **{CACHE_NAME: cache})
    assert torch.equal(second, generate(model, first, mask, use_cache=False))


@pytest.mark.parametrize("name", ["transformer", "svformer", "bov", "cla2", "neutreno", "v1_last_third"])
def test_a_dynamic_cache_is_honoured(name: str) -> None:
    """It stores the finished key and value of every layer, whatever the plan would have shared."""
    for windows in ("full", "sliding"):
        model = make(name, windows)
        ids = tokens(1, 9, seed=3)
        for cache in (DynamicCache(), DynamicCache(config=model.config)):
            assert torch.equal(generate(model, ids, **{CACHE_NAME: cache}), generate(model, ids, use_cache=False))
            assert cache.get_seq_length() == 9 + NEW - 1 and len(cache.layers) == 6


def test_other_caches_are_refused_by_name_and_when_passed_in() -> None:
    model = make("svformer", "full")
    ids = tokens(1, 9)
    for name in ("static", "quantized", "offloaded", "offloaded_static"):
        with pytest.raises(ValueError, match=f"cache_implementation='{name}'"):
            generate(model, ids, cache_implementation=name)
    for cache in (StaticCache(config=model.config, max_cache_len=30), object()):
        with pytest.raises(ValueError, match="make_cache"):
            model(ids, **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="another model"):
        generate(model, ids, **{CACHE_NAME: make("bov", "full").make_cache()})
    with pytest.raises(ValueError, match="keys of several layers"):
        generate(make("v1_cross_layer_attention", "full"), ids, **{CACHE_NAME: DynamicCache()})
    several = small_model(layer_windows=[3, 5, None, 3, 5, None], sliding_window=5)
    with pytest.raises(ValueError, match="one sliding window"):
        generate(several, ids, **{CACHE_NAME: DynamicCache(config=several.config)})
    assert torch.equal(generate(several, ids), generate(several, ids, use_cache=False))
    assert torch.equal(generate(model, ids, cache_implementation="dynamic"), generate(model, ids))


def test_generation_from_embeddings() -> None:
    ids = tokens(2, 9)
    for name in ("transformer", "svformer", "x0wv_last_third"):
        model = make(name, "full")
        embeds = model.get_input_embeddings()(ids)
        made = model.generate(inputs_embeds=embeds, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        assert torch.equal(made, generate(model, ids, use_cache=False)[:, 9:])
    with pytest.raises(ValueError, match="pass input_ids"):
        model = make("bov", "full")
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), max_new_tokens=2)


def test_the_cache_comes_back_with_the_text() -> None:
    model = make("svformer", "full")
    out = model.generate(tokens(1, 9), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out[CACHE_NAME], vp.ValuePathCache)
    assert out[CACHE_NAME].nbytes().logical == (9 + NEW - 1) * (6 * 2 * 10 * 8 + 4)

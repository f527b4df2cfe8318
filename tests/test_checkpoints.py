"""Saving and loading through transformers, checkpoints that lack something, and a vocabulary that changes its size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import valuepath as vp
from models import VOCABULARY, randomise, small_config, small_model, tokens
from valuepath.compat import CACHE_NAME

MODELS: dict[str, dict[str, Any]] = {
    "transformer": {},
    "resformer_sparse_with_options": {"variant": "resformer_sparse", "variant_options": {"layers": [2, 4], "first": 5.0}},
    "resformer_plus": {"variant": "resformer_plus", "num_key_value_heads": 2},
    "denseformer_nanochat": {"variant": "denseformer", "style": "nanochat"},
    "bov_tied_windows": {"variant": "bov", "tie_word_embeddings": True, "layer_windows": [4, None, 4, None, 4, None]},
    "shared_table_nanochat": {"variant": "shared_table", "style": "nanochat", "window_pattern": "SL", "sliding_window": 5},
    "gated_table": {"variant": "v_plus_table_gated", "fold": "none"},
    "attention_residual": {"variant": "attention_residual", "qk_norm": "gain", "attention_bias": True},
    "wiring": {"wiring": "v[1:] = learn(0.5, per=head)*own + 0.5*tap(0); skip_attn[2] = learn(0.5); x[6] = own + 0.1*tap(0)"},
    "scaled_rope": {"variant": "svformer", "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
}


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def load(folder: Path, **fields: Any) -> Any:
    """The model in ``folder``, each parameter in memory of its own: where a file is mapped to decides how sums are rounded."""
    model = AutoModelForCausalLM.from_pretrained(folder, **fields)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


# ------------------------------------------------------------------------------------------------------ save and load
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_a_saved_model_comes_back_bit_equal(fields, tmp_path):
    model, ids = small_model(dtype=torch.float32, **fields), tokens(2, 13)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is vp.ValuePathConfig
    assert config.plan() == model.config.plan()
    assert config.equation() == model.config.equation()
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = load(tmp_path)
    assert type(loaded) is vp.ValuePathForCausalLM
    assert not loaded.training
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    again = vp.ValuePathForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert again.config._attn_implementation == "eager"
    torch.testing.assert_close(logits(again, ids), logits(model, ids), rtol=0, atol=1e-4)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is vp.ValuePathModel
    assert base.state_dict().keys() == model.model.state_dict().keys()
    assert all(torch.equal(value, base.state_dict()[name]) for name, value in model.model.state_dict().items())


def test_tied_embeddings_are_stored_once_and_stay_tied(tmp_path):
    model = small_model(dtype=torch.float32, variant="bov", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_checkpoint_has_the_plans_parameters_and_nothing_else(tmp_path):
    model = small_model(dtype=torch.float32, variant="resformer_plus")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in stored.items()} == {
        parameter.name: parameter.shape for parameter in model.config.plan().parameters
    }


def test_the_config_file_says_what_was_written_and_can_be_edited(tmp_path):
    small_config(variant="bov", style="nanochat", variant_options={"layers": "last/3"}).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    assert stored["model_type"] == "valuepath"
    assert stored["variant"] == "bov"
    assert stored["variant_options"] == {"layers": "last/3"}
    stored["variant_options"] = {"layers": "::-2"}
    path.write_text(json.dumps(stored))
    expected = small_config(variant="bov", variant_options={"layers": "::-2"})
    assert AutoConfig.from_pretrained(tmp_path).plan().tables == expected.plan().tables


def test_fields_may_be_given_while_loading(tmp_path):
    model, ids = small_model(dtype=torch.float32, variant="svformer"), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, fold="none")
    assert loaded.config.fold == "none"
    assert not loaded.make_cache().plan.folds
    assert model.make_cache().plan.folds
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_checkpoint_may_be_loaded_in_another_dtype(dtype, tmp_path):
    model = small_model(dtype=torch.float32, variant="bov", max_position_embeddings=4096)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for (name, found), expected in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected.to(dtype)), name
    positions = torch.tensor([[0, 777, 4095]])
    for found, expected in zip(
        loaded.model.rotary_emb(torch.zeros(1), positions), model.model.rotary_emb(torch.zeros(1), positions), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rope", [
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 11},
    {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 11,
     "short_factor": [1.0, 1.1, 1.3, 1.7, 2.3], "long_factor": [1.2, 1.9, 3.1, 4.3, 7.9]},
], ids=lambda rope: rope["rope_type"])  # fmt: skip
def test_rope_scaling_survives_a_checkpoint(rope, tmp_path):
    length = 11 if rope["rope_type"] == "dynamic" else 44
    model, ids = small_model(dtype=torch.float32, rope_parameters=rope, max_position_embeddings=length), tokens(2, 19)
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.model.rotary_emb.attention_scaling == model.model.rotary_emb.attention_scaling
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert torch.equal(logits(loaded, ids[:, :7]), logits(model, ids[:, :7]))


# ---------------------------------------------------------------------------------------------- incomplete checkpoints
def without(folder: Path, *dropped: str) -> None:
    """Remove parameters from the checkpoint in ``folder``."""
    stored = load_file(folder / "model.safetensors")
    assert set(dropped) <= stored.keys()
    kept = {name: value for name, value in stored.items() if name not in dropped}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    "fields, dropped",
    [
        ({"variant": "resformer_learnable"}, ["model.layers.3.self_attn.mix_v.coefficients.own"]),
        ({"variant": "bov"}, ["model.layers.5.self_attn.v_table.weight", "lm_head.weight"]),
        ({"variant": "shared_table", "style": "nanochat"}, ["model.v_table.weight"]),
        ({"variant": "resformer_plus"}, ["model.budgets.0.scale", "model.layers.0.self_attn.v_proj.weight"]),
        ({"variant": "v_plus_table_gated"}, ["model.layers.1.self_attn.mix_v.gates.table.weight"]),
        ({"attention_bias": True, "qk_norm": "gain"},
         ["model.layers.2.self_attn.k_proj.bias", "model.layers.2.self_attn.k_norm.weight"]),
        ({"wiring": "skip_attn[2] = learn(0.5); x[6] = own + learn(0.25)*tap(0)"},
         ["model.layers.2.skip_attn", "model.mix_x.coefficients.tap_0"]),
    ],
    ids=["coefficient", "table_and_head", "shared_table", "budget_and_projection", "gate", "bias_and_gain", "skip_and_site"],
)  # fmt: skip
def test_what_a_checkpoint_lacks_starts_as_in_a_new_model_and_nothing_else_does(fields, dropped, tmp_path):
    model = small_model(dtype=torch.float32, init_seed=7, **fields)
    new = dict(vp.ValuePathForCausalLM(small_config(init_seed=7, **fields)).named_parameters())
    model.save_pretrained(tmp_path)
    without(tmp_path, *dropped)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == set(dropped)
    saved = dict(model.named_parameters())
    for name, value in loaded.named_parameters():
        assert torch.equal(value, new[name] if name in dropped else saved[name]), name
        assert not torch.equal(new[name], saved[name])


def test_a_plain_checkpoint_is_the_start_of_another_variant(tmp_path):
    model = small_model(dtype=torch.float32, init_seed=7)
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, variant="bov", output_loading_info=True)
    tables = {f"model.layers.{n}.self_attn.v_table.weight" for n in (4, 5)}
    scales = {f"model.layers.{n}.self_attn.mix_v.coefficients.table" for n in (4, 5)}
    assert set(report["missing_keys"]) == tables | scales
    assert set(report["unexpected_keys"]) == {f"model.layers.{n}.self_attn.v_proj.weight" for n in (4, 5)}
    assert loaded.config.variant == "bov"
    saved = dict(model.named_parameters())
    for name, value in loaded.named_parameters():
        if name not in tables | scales:
            assert torch.equal(value, saved[name])
    assert all(dict(loaded.named_parameters())[name] == 1 for name in scales)


# ---------------------------------------------------------------------------------------------------------- vocabulary
RESIZED = {
    "transformer": {},
    "tied": {"tie_word_embeddings": True},
    "svformer": {"variant": "svformer"},
    "bov": {"variant": "bov"},
    "shared_table_tied": {"variant": "shared_table", "tie_word_embeddings": True},
    "gated": {"variant": "v_plus_table_gated"},
}


@pytest.mark.parametrize("mean", [True, False], ids=["mean", "initial"])
@pytest.mark.parametrize("fields", RESIZED.values(), ids=RESIZED)
def test_a_larger_vocabulary_leaves_old_tokens_alone_and_grows_every_table(fields, mean, tmp_path):
    model, ids = small_model(init_seed=7, **fields), tokens(2, 13)
    before = logits(model, ids)
    with torch.no_grad():  # whatever is folded for the old vocabulary must not be read again
        model(ids[:, :1], **{CACHE_NAME: model(ids)[CACHE_NAME]})
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    embedding = model.resize_token_embeddings(VOCABULARY + 6, mean_resizing=mean)
    assert embedding is model.get_input_embeddings()
    assert model.config.vocab_size == VOCABULARY + 6
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        parameter.name: parameter.shape for parameter in model.config.plan().parameters
    }
    assert model.model.plan == model.config.plan()
    new = dict(vp.ValuePathForCausalLM(model.config).named_parameters())
    for name, value in model.named_parameters():
        if not name.endswith(("embed_tokens.weight", "lm_head.weight", "v_table.weight")):
            assert torch.equal(value, saved[name]), name
            continue
        assert torch.equal(value[:VOCABULARY], saved[name]), name
        if mean:  # drawn so close around it that no difference is to be seen
            expected = saved[name].mean(0).expand(6, -1)
            torch.testing.assert_close(value[VOCABULARY:], expected, rtol=0, atol=1e-3)
        else:
            assert torch.equal(value[VOCABULARY:], new[name][VOCABULARY:].double()), name
    torch.testing.assert_close(logits(model, ids)[..., :VOCABULARY], before, rtol=0, atol=1e-12)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == model.config.tie_word_embeddings

    # the new tokens work, through the cache too
    ids[:, 3:9] = torch.arange(VOCABULARY, VOCABULARY + 6)
    whole = logits(model, ids)
    with torch.no_grad():
        first = model(ids[:, :7])
        then = model(ids[:, 7:], **{CACHE_NAME: first[CACHE_NAME]})
    torch.testing.assert_close(torch.cat([first.logits, then.logits], 1), whole, rtol=0, atol=1e-10)
    assert whole.shape == (2, 13, VOCABULARY + 6)
    model.train()(ids, labels=ids, use_cache=False).loss.backward()
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path, dtype=torch.float64), ids), whole)


@pytest.mark.parametrize("fields", RESIZED.values(), ids=RESIZED)
def test_a_smaller_vocabulary_drops_the_last_rows(fields):
    model, ids = small_model(**fields), tokens(2, 13) % 41
    before = logits(model, ids)
    model.resize_token_embeddings(41)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        parameter.name: parameter.shape for parameter in model.config.plan().parameters
    }
    torch.testing.assert_close(logits(model, ids), before[..., :41], rtol=0, atol=1e-12)
    with torch.no_grad():
        out = model(ids)
        torch.testing.assert_close(out.logits, before[..., :41], rtol=0, atol=1e-10)
        more = model(ids[:, :1], **{CACHE_NAME: out[CACHE_NAME]}).logits
    whole = logits(model, torch.cat([ids, ids[:, :1]], 1))
    torch.testing.assert_close(more, whole[:, -1:], rtol=0, atol=1e-10)


def test_resizing_to_the_same_or_to_a_multiple():
    model = small_model(variant="bov")
    tables = [model.model.layers[n].self_attn.v_table for n in (4, 5)]
    weights = [table.weight for table in tables]
    model.resize_token_embeddings()
    model.resize_token_embeddings(VOCABULARY)
    assert [table.weight for table in tables] == weights
    model.resize_token_embeddings(pad_to_multiple_of=32)
    assert model.config.vocab_size == 64
    assert all(table.weight.shape[0] == table.num_embeddings == 64 for table in tables)
    base = vp.ValuePathModel(small_config(variant="bov"))
    randomise(base)
    base.resize_token_embeddings(VOCABULARY + 1, mean_resizing=False)
    assert base.layers[5].self_attn.v_table.weight.shape == (VOCABULARY + 1, 60)
    assert base(tokens(1, 3) + 1).last_hidden_state.isfinite().all()

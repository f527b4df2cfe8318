"""The configuration: what a style fills in, which windows follow, how it is stored, and one clear error for every bad input."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers import AutoConfig

import valuepath as vp
from models import small_config


def config(**fields: Any) -> vp.ValuePathConfig:
    return vp.ValuePathConfig(**fields)


# ------------------------------------------------------------------------------------------------------------- filling
def test_a_style_fills_in_what_is_not_given():
    llama, nanochat = config(), config(style="nanochat")
    assert (llama.mlp, llama.norm_gain, llama.qk_norm, llama.qk_norm_scale) == ("swiglu", True, "none", 1.0)
    assert (llama.logit_softcap, llama.normalize_embedding, llama.sliding_window) == (0.0, False, None)
    assert llama.intermediate_size == 512 * 7 // 2
    assert (nanochat.mlp, nanochat.norm_gain, nanochat.qk_norm, nanochat.qk_norm_scale) == ("relu2", False, "plain", 1.2)
    assert (nanochat.logit_softcap, nanochat.normalize_embedding, nanochat.sliding_window) == (15.0, True, 2048 // 4)
    assert nanochat.intermediate_size == 4 * 512
    mixed = config(style="nanochat", mlp="swiglu", norm_gain=True, logit_softcap=0, qk_norm="none", window_pattern="L")
    assert (mixed.mlp, mixed.norm_gain, mixed.qk_norm, mixed.qk_norm_scale) == ("swiglu", True, "none", 1.0)
    assert (mixed.logit_softcap, mixed.normalize_embedding) == (0, True)
    assert mixed.intermediate_size == 512 * 7 // 2
    assert mixed.sliding_window is None


def test_sizes_that_follow_from_others():
    plain = config(hidden_size=96, num_attention_heads=6)
    assert (plain.head_dim, plain.num_key_value_heads) == (16, 6)
    assert config(hidden_size=97, num_attention_heads=6, head_dim=10).head_dim == 10


S, L = 7, None


@pytest.mark.parametrize(
    "fields, windows",
    [
        ({}, [L] * 6),
        ({"sliding_window": 7}, [S] * 6),
        ({"sliding_window": 7, "window_pattern": "SSSL"}, [S, S, S, L, S, L]),
        ({"sliding_window": 7, "window_pattern": "S"}, [S, S, S, S, S, L]),
        ({"max_position_embeddings": 28, "window_pattern": "SL"}, [S, L, S, L, S, L]),
        ({"style": "nanochat", "max_position_embeddings": 28}, [S, S, S, L, S, L]),
        ({"style": "nanochat", "sliding_window": 7}, [S, S, S, L, S, L]),
        ({"window_pattern": "L", "sliding_window": 7}, [L] * 6),
        ({"sliding_window": 7, "layer_types": ["full_attention", "sliding_attention"] * 3}, [L, S] * 3),
        ({"layer_windows": [3, None, 5, 7, None, 2]}, [3, None, 5, 7, None, 2]),
        ({"layer_windows": [7, None] * 3, "window_pattern": "SSSL", "layer_types": ["full_attention"] * 6}, [7, None] * 3),
    ],
)
def test_windows_follow_from_the_most_specific_field(fields, windows):
    found = config(num_hidden_layers=6, **fields)
    assert found.layer_windows == windows == [*found.shape().windows]
    assert found.layer_types == ["full_attention" if window is None else "sliding_attention" for window in windows]
    assert found.sliding_window == max((window for window in windows if window), default=None)
    again = vp.ValuePathConfig.from_dict(found.to_dict())
    assert again.layer_windows == windows
    assert again.to_dict() == found.to_dict()


# ------------------------------------------------------------------------------------------------------------- storing
@pytest.mark.parametrize("name", vp.variants())
def test_every_preset_survives_its_json(name, tmp_path):
    found = config(variant=name, num_hidden_layers=6, num_key_value_heads=2, init_seed=5)
    found.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is vp.ValuePathConfig
    assert again.plan() == found.plan()
    assert {**again.to_dict(), "_name_or_path": None} == {**found.to_dict(), "_name_or_path": None}


def test_options_and_equations_survive_their_json(tmp_path):
    for fields in (
        {"variant": "resformer_sparse", "variant_options": {"layers": [2, 4], "first": 5.0}},
        {"wiring": "v[1:] = learn(0.5)*own + budget(N)*tap(0)"},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, "eos_token_id": [1, 2]},
    ):
        found = config(num_hidden_layers=6, **fields)
        found.save_pretrained(tmp_path)
        again = AutoConfig.from_pretrained(tmp_path)
        assert again.plan() == found.plan()
        assert all(getattr(again, name) == getattr(found, name) for name in fields)


def test_fields_given_while_loading_are_checked_like_others(tmp_path):
    config(variant="svformer", num_hidden_layers=6).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, variant="bov").plan() == config(variant="bov", num_hidden_layers=6).plan()
    assert AutoConfig.from_pretrained(tmp_path, layer_windows=[3] * 6).sliding_window == 3
    shorter = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=4, layer_windows=None, layer_types=None)
    assert shorter.plan().num_layers == 4
    for fields, message in (
        ({"num_hidden_layers": 4}, "layer_windows has 6 entries for 4 layers"),
        ({"sliding_window": 3}, "sliding_window=3, but layer_windows has only None; change layer_windows too, or give"),
        ({"style": "nanochat"}, "style='nanochat': the stored config has all that its style 'llama' filled in; change those"),
        ({"fold": "al"}, "fold='al': expected auto, none, all, factored. Did you mean 'all'?"),
        ({"variant": "bovv"}, "Did you mean 'bov'?"),
    ):
        with pytest.raises(ValueError) as wrong:
            AutoConfig.from_pretrained(tmp_path, **fields)
        assert message in str(wrong.value)


def test_a_hand_written_file_with_a_wrong_field_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "valuepath", "num_layer": 6}))
    with pytest.raises(ValueError, match="unknown field 'num_layer' of ValuePathConfig"):
        AutoConfig.from_pretrained(tmp_path)
    stored = {"model_type": "valuepath", "num_hidden_layers": 6, "variant": "bov", "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(stored))
    assert AutoConfig.from_pretrained(tmp_path).plan().num_layers == 6


# -------------------------------------------------------------------------------------------------------------- errors
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_sise": 96}, "unknown field 'hidden_sise' of ValuePathConfig. Did you mean 'hidden_size'?"),
    ({"n_layers": 6}, "unknown field 'n_layers' of ValuePathConfig. Did you mean 'num_hidden_layers'?"),
    ({"zzz": 6}, "unknown field 'zzz' of ValuePathConfig"),
    (
        {"variant": "bov", "wiring": "v[1] = tap(0)"},
        "variant='bov' and wiring='v[1] = tap(0)' are both given; give the preset or the equation",
    ),
    ({"variant_options": {"layers": [1]}, "wiring": "v[1] = tap(0)"}, "are both given; give the preset or the equation"),
    ({"variant": "bovv"}, "unknown variant 'bovv'. Did you mean 'bov'?"),
    ({"variant": "bov", "variant_options": {"layer": [1]}}, "variant 'bov' has no option 'layer'. Did you mean 'layers'?"),
    ({"variant": "svformer", "variant_options": {"layers": [0]}}, "start the equation at layer 1"),
    ({"variant": "hidden_from_h3", "num_hidden_layers": 2}, "needs at least 4 layers"),
    ({"wiring": "v[1] = tapp(0)"}, "unknown word 'tapp'"),
    ({"wiring": "v[9] = tap(0)"}, "9"),
    (
        {"variant": "v_plus_table_gated", "hidden_size": 8, "head_dim": 2},
        "the gate reads 12 channels, but the attention input has 8",
    ),
    (
        {"variant": "attention_residual", "style": "nanochat"},
        "layer 0 to 512 positions: attention matrices of unequal windows cannot be mixed",
    ),
    ({"style": "lama"}, "style='lama': expected llama or nanochat. Did you mean 'llama'?"),
    ({"mlp": "swigloo"}, "mlp='swigloo': expected swiglu, relu2. Did you mean 'swiglu'?"),
    ({"qk_norm": "gains"}, "qk_norm='gains': expected none, plain, gain. Did you mean 'gain'?"),
    ({"fold": "autp"}, "fold='autp': expected auto, none, all, factored. Did you mean 'auto'?"),
    ({"head_dim": 7}, "head_dim=7 is odd; RoPE rotates pairs of channels"),
    ({"hidden_size": 50}, "hidden_size=50 is not a multiple of num_attention_heads=8; give head_dim"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=8"),
    *(
        ({name: value}, f"{name}={value}: expected a whole number of at least 1")
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
                     "num_key_value_heads", "head_dim", "intermediate_size")
        for value in (0, -3)
    ),
    ({"logit_softcap": -3.0}, "logit_softcap=-3.0: expected a positive cap, or 0 for none"),
    ({"logit_softcap": float("nan")}, "logit_softcap=nan: expected a positive cap, or 0 for none"),
    ({"logit_softcap": float("inf")}, "logit_softcap=inf: expected a positive cap, or 0 for none"),
    ({"qk_norm_scale": 1.2}, "qk_norm_scale=1.2 with qk_norm='none': expected a positive factor after a norm, and 1 without"),
    ({"qk_norm": "plain", "qk_norm_scale": 0.0}, "qk_norm_scale=0.0 with qk_norm='plain': expected a positive factor"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06: expected a number of at least 0"),
    ({"initializer_range": -0.02}, "initializer_range=-0.02: expected a number of at least 0"),
    ({"attention_dropout": 1.5}, "attention_dropout=1.5: expected a probability from 0 to 1"),
    ({"attention_dropout": -0.1}, "attention_dropout=-0.1: expected a probability from 0 to 1"),
    ({"layer_windows": [3]}, "layer_windows has 1 entries for 8 layers; give one (or None) per layer"),
    ({"layer_windows": [3] * 7 + [0]}, "layer 7 has window 0: expected a whole number of at least 1, or None"),
    ({"layer_windows": [3] * 8, "sliding_window": 4}, "sliding_window=4, but layer_windows has [3]; change layer_windows too"),
    ({"window_pattern": "SXL"}, "window_pattern='SXL': expected letters S (short) and L (long), e.g. SSSL"),
    ({"window_pattern": ""}, "window_pattern='': expected letters S (short) and L (long), e.g. SSSL"),
    ({"sliding_window": 0}, "layer 0 has window 0: expected a whole number of at least 1, or None"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 8 layers"),
    (
        {"layer_types": ["full_attention"] * 7 + ["chunked_attention"]},
        "layer_types: 'chunked_attention' is not covered; expected full_attention or sliding_attention",
    ),
    ({"layer_types": ["sliding_attention"] * 8}, "layer_types names sliding_attention, but sliding_window is not given"),
    (
        {"rope_parameters": {"rope_type": "linea", "rope_theta": 1e4}},
        "rope_parameters: rope_type='linea': expected default, linear, dynamic, yarn, longrope, llama3. Did you mean 'linear'?",
    ),
    ({"rope_parameters": {"rope_theta": -5.0}}, "rope_parameters: rope_theta=-5.0: expected a positive number"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor: only full RoPE (1.0) is covered",
    ),
]  # fmt: skip


@pytest.mark.parametrize("fields, message", WRONG, ids=[str(fields)[:70] for fields, _ in WRONG])
def test_bad_input_gives_one_clear_error(fields, message):
    with pytest.raises(ValueError) as wrong:
        config(**fields)
    assert message in str(wrong.value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("variant", 5), ("variant_options", [1]), ("wiring", 5), ("style", None), ("mlp", 5), ("fold", None),
        ("hidden_size", "512"), ("hidden_size", 512.0), ("num_hidden_layers", True), ("layer_windows", 5),
        ("layer_windows", [3] * 7 + ["a"]), ("window_pattern", 5), ("layer_types", 5), ("sliding_window", 3.5),
        ("rope_parameters", 5), ("rms_norm_eps", "a"), ("logit_softcap", "a"), ("norm_gain", "yes"), ("attention_bias", "yes"),
        ("tie_word_embeddings", 3), ("init_seed", 1.5), ("use_cache", 3), ("pad_token_id", "a"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_with_its_field(name, value):
    """As by every config of transformers, when it is made and when it is changed."""
    with pytest.raises(StrictDataclassFieldValidationError) as wrong:
        config(**{name: value})
    assert f"Validation error for field '{name}'" in str(wrong.value)
    assert "expected" in str(wrong.value)
    made = config()
    with pytest.raises(StrictDataclassFieldValidationError):
        setattr(made, name, value)


def test_what_transformers_puts_into_a_config_is_taken():
    found = small_config(attn_implementation="eager", torch_dtype="bfloat16", rope_theta=500.0, output_attentions=True)
    assert found._attn_implementation == "eager"
    assert found.rope_parameters == {"rope_type": "default", "rope_theta": 500.0}
    old_name = small_config(rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=700.0)
    assert old_name.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0}


def test_a_missing_factor_of_a_rope_type_is_named():
    with pytest.raises(StrictDataclassClassValidationError, match=r"Missing required keys.*'linear'.*'factor'"):
        vp.ValuePathConfig(rope_parameters={"rope_type": "linear"})

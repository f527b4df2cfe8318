"""The model as a transformers model: its parameters, what a token may see, padding, attention backends, inputs and loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

import valuepath as vp
from models import LAYERS, VOCABULARY, left_padding, small_config, small_model, tokens
from valuepath.compat import CACHE_NAME

DEPTH = 4
"""Layers of the models that every preset is tried on: the fewest that all of them fit into."""
PRESETS = [*vp.variants()]
ATTENTION_MIXING = {"attention_residual"}
READS_TABLE = {
    "bov", "shared_table", "table_fixed_scale", "table_all", "v_plus_table", "v_plus_table_gated",
}  # fmt: skip
STYLES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_gqa": {"num_key_value_heads": 2},
    "llama_tied_biases_qk_gain": {
        "tie_word_embeddings": True, "attention_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": "gain",
        "num_key_value_heads": 3,
    },
    "nanochat": {"style": "nanochat", "max_position_embeddings": 24},
}  # fmt: skip
WINDOWED: dict[str, Any] = {"num_key_value_heads": 2, "sliding_window": 5}
"""GQA, and a window that is shorter than the sequences here, in every layer."""


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def depth_model(name: str, style: dict[str, Any], **fields: Any) -> vp.ValuePathForCausalLM:
    """A randomised model of every layer kind; attention matrices can only be mixed under equal windows."""
    windows = {"window_pattern": "L"} if name in ATTENTION_MIXING and style.get("style") == "nanochat" else {}
    return small_model(variant=name, num_hidden_layers=DEPTH, **style, **windows, **fields)


def logits(model: Any, ids: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, **given).logits


# --------------------------------------------------------------------------------------------------------- parameters
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", PRESETS)
def test_the_model_holds_exactly_the_parameters_of_its_plan(name, style):
    model = depth_model(name, STYLES[style])
    config = model.config
    planned = {parameter.name: parameter.shape for parameter in config.plan().parameters}
    assert {found: tuple(p.shape) for found, p in model.named_parameters()} == planned
    assert len(config.plan().parameters) == len(planned)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert model.state_dict().keys() == planned.keys() | tied
    base = {found for found, _ in vp.ValuePathModel(config).named_parameters()}
    assert base == {found.removeprefix("model.") for found in planned if found != "lm_head.weight"}


@pytest.mark.parametrize(
    "name, stream, layers",
    [
        ("transformer", "v", {0, 1, 2, 3, 4, 5}),
        ("resformer_learnable", "v", {0, 1, 2, 3, 4, 5}),
        ("svformer", "v", {0}),
        ("svformer", "k", {0, 1, 2, 3, 4, 5}),
        ("cla2", "v", {0, 2, 4}),
        ("cla2", "k", {0, 2, 4}),
        ("cla2", "q", {0, 1, 2, 3, 4, 5}),
        ("bov", "v", {0, 1, 2, 3}),
        ("shared_table", "v", {0, 1, 2, 3}),
        ("v1_last_third", "v", {0, 1, 2, 3}),
        ("v1_every2", "v", {0, 2, 4}),
        ("x0wv_last_third", "v", {0, 1, 2, 3, 4, 5}),
        ("table_all", "v", set()),
        ("v_plus_table_gated", "v", {0, 1, 2, 3, 4, 5}),
    ],
)
def test_a_projection_that_no_equation_reads_does_not_exist(name, stream, layers):
    model = vp.ValuePathForCausalLM(small_config(variant=name))
    found = {n for n in range(LAYERS) if f"model.layers.{n}.self_attn.{stream}_proj.weight" in dict(model.named_parameters())}
    assert found == layers


# ---------------------------------------------------------------------------------------------------------- causality
@pytest.mark.parametrize("fields", [{"num_key_value_heads": 2}, STYLES["nanochat"]], ids=["llama_gqa", "nanochat"])
@pytest.mark.parametrize("name", PRESETS)
def test_later_tokens_never_change_earlier_logits(name, fields):
    model, ids = depth_model(name, fields), tokens(2, 17)
    before = logits(model, ids)
    for first_changed in (1, 9, 16):
        changed = ids.clone()
        changed[:, first_changed:] = (changed[:, first_changed:] + 7) % VOCABULARY
        after = logits(model, changed)
        close(after[:, :first_changed], before[:, :first_changed], 1e-12)
        assert (after[:, first_changed:] - before[:, first_changed:]).abs().amin(dim=(0, 2)).max() > 1e-6


def test_only_the_norm_of_the_whole_tensor_reads_later_tokens():
    for axis, leak in (("token", False), ("head", False), ("tensor", True)):
        model = small_model(variant="resformer_identity_rescaled", variant_options={"axis": axis})
        ids = tokens(2, 17)
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 7) % VOCABULARY
        assert ((logits(model, ids) - logits(model, changed))[:, :-1].abs().max() > 1e-6) == leak


@pytest.mark.parametrize("name", ["transformer", "svformer", "bov", "v1_cross_layer_attention", "attention_residual"])
def test_a_window_hides_what_is_further_back(name):
    # through N layers of window W a token sees at most N (W - 1) positions back
    model = small_model(variant=name, num_hidden_layers=2, sliding_window=4)
    ids = tokens(1, 17)
    changed = ids.clone()
    changed[:, 3] = (changed[:, 3] + 7) % VOCABULARY
    difference = (logits(model, ids) - logits(model, changed)).abs().amax(dim=(0, 2))
    assert difference[:3].max() == 0
    assert difference[3:10].min() > 1e-9
    assert difference[10:].max() < 1e-12


# ------------------------------------------------------------------------------------------------- padding and batches
@pytest.mark.parametrize("fields", [WINDOWED, STYLES["nanochat"]], ids=["llama_gqa_windowed", "nanochat"])
@pytest.mark.parametrize("name", PRESETS)
def test_padding_and_neighbours_in_the_batch_change_nothing(name, fields):
    model = depth_model(name, fields)
    length = 17
    ids = tokens(4, length)
    rows = [length, length - 3, length - 6, 2]  # real tokens of each row
    alone = [logits(model, ids[row : row + 1, :count])[0] for row, count in enumerate(rows)]
    right, left = torch.zeros_like(ids), torch.zeros_like(ids)
    right_mask, left_mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, count in enumerate(rows):
        right[row, :count] = left[row, length - count :] = ids[row, :count]
        right_mask[row, :count] = left_mask[row, length - count :] = 1
    positions = (left_mask.cumsum(1) - 1).clamp(min=0)
    at_right = logits(model, right, attention_mask=right_mask)
    at_left = logits(model, left, attention_mask=left_mask, position_ids=positions)
    counted_from_the_padding = logits(model, left, attention_mask=left_mask)
    for row, count in enumerate(rows):
        close(at_right[row, :count], alone[row])
        close(at_left[row, length - count :], alone[row])
        close(counted_from_the_padding[row, length - count :], alone[row])
    assert torch.isfinite(at_left).all()
    assert torch.isfinite(at_right).all()
    together = logits(model, ids)
    for row in range(4):
        close(together[row], logits(model, ids[row : row + 1])[0])


# -------------------------------------------------------------------------------------------------- attention backends
@pytest.mark.parametrize("name", PRESETS)
def test_eager_attention_equals_sdpa(name):
    ids, (mask, positions) = tokens(3, 13), left_padding(3, 13)
    eager = depth_model(name, WINDOWED, attn_implementation="eager")
    default = depth_model(name, WINDOWED)
    assert eager.config._attn_implementation == "eager"
    assert default.config._attn_implementation == ("eager" if name in ATTENTION_MIXING else "sdpa")
    for given in ({}, {"attention_mask": mask, "position_ids": positions}):
        real = given.get("attention_mask", torch.ones_like(mask)).bool()
        close(logits(eager, ids, **given)[real], logits(default, ids, **given)[real])


@pytest.mark.parametrize("name", ["transformer", "bov", "v1_cross_layer_attention"])
def test_a_registered_attention_function_is_used(name):
    seen = []

    def by_hand(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        seen.append(module.layer_idx)
        groups = query.shape[1] // key.shape[1]
        found = torch.zeros_like(query)
        for head in range(query.shape[1]):
            scores = query[:, head] @ key[:, head // groups].mT * scaling
            assert attention_mask.dtype == torch.bool
            weights = scores.masked_fill(~attention_mask[:, 0], -math.inf).softmax(-1)
            found[:, head] = weights @ value[:, head // groups]
        return found.transpose(1, 2), None

    AttentionInterface.register("valuepath_by_hand", by_hand)
    # a mask function of their interface that never leaves the mask out
    AttentionMaskInterface.register("valuepath_by_hand", lambda **given: sdpa_mask(**{**given, "allow_is_causal_skip": False}))
    ids = tokens(2, 13)
    expected = logits(small_model(variant=name, **WINDOWED), ids)
    model = small_model(variant=name, attn_implementation="valuepath_by_hand", **WINDOWED)
    close(logits(model, ids), expected)
    assert seen == list(range(LAYERS))
    switched = small_model(variant=name, **WINDOWED)
    switched.set_attn_implementation("valuepath_by_hand")
    close(logits(switched, ids), expected)
    assert len(seen) == 2 * LAYERS
    switched.set_attn_implementation("sdpa")
    close(logits(switched, ids), expected)
    assert len(seen) == 2 * LAYERS


def test_mixing_attention_refuses_backends_that_never_form_the_matrix():
    reason = r"attn_implementation='sdpa' never forms the attention matrix.*use attn_implementation='eager' or leave it out"
    with pytest.raises(ValueError, match=reason):
        vp.ValuePathForCausalLM(small_config(variant="attention_residual", attn_implementation="sdpa"))
    model = small_model(variant="attention_residual")
    assert model.config._attn_implementation == model.model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match=reason):
        model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("eager")
    assert {name for name in PRESETS if small_config(variant=name).plan().needs_attention_matrix} == ATTENTION_MIXING


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_backends_that_are_not_covered_are_refused(attention):
    with pytest.raises((ValueError, ImportError), match=r"(?i)flash|flex"):
        vp.ValuePathForCausalLM(small_config(attn_implementation=attention))


@pytest.mark.parametrize("name", PRESETS)
def test_eager_attention_hands_out_its_weights(name):
    model = depth_model(name, WINDOWED, attn_implementation="eager")
    ids = tokens(2, 13)
    out = model(ids, output_attentions=True, use_cache=False)
    assert len(out.attentions) == DEPTH
    offset = torch.arange(13)[:, None] - torch.arange(13)
    visible = (offset >= 0) & (offset < WINDOWED["sliding_window"])
    for n, weights in enumerate(out.attentions):
        parts = 2 if name == "v1_cross_layer_attention" and n else 1
        assert weights.shape == (2, 6, 13, 13 * parts)
        close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert (weights[..., visible.repeat(1, parts)] > 0).all()
        assert (weights[..., ~visible.repeat(1, parts)] == 0).all()
    close(out.logits, model(ids, use_cache=False).logits)
    assert model(ids, use_cache=False).attentions is None


def test_sdpa_has_no_weights_to_hand_out():
    model = small_model(variant="svformer")
    with pytest.raises(ValueError, match="'sdpa' never forms the attention matrix; use attn_implementation='eager'"):
        model(tokens(1, 5), output_attentions=True)


def test_mixed_attention_weights_are_the_mean_of_the_first_and_the_own():
    ids = tokens(2, 13)
    mixed = small_model(variant="attention_residual", num_hidden_layers=2)
    plain = small_model(variant="transformer", num_hidden_layers=2, attn_implementation="eager")
    # layer 1 is given the same input in both, so that its own softmax is the same
    for model in (mixed, plain):
        model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    first, own = plain(ids, output_attentions=True).attentions
    found = mixed(ids, output_attentions=True).attentions
    close(found[0], first)
    close(found[1], 0.5 * first + 0.5 * own)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("style", ["llama", "nanochat"])
def test_hidden_states_start_at_the_embedding_and_end_before_the_head(name, style):
    model = depth_model(name, STYLES[style])
    ids = tokens(2, 13)
    out = model(ids, output_hidden_states=True, use_cache=False)
    assert len(out.hidden_states) == DEPTH + 1
    embedding = model.model.embed_tokens(ids)
    if style == "nanochat":
        embedding = embedding / (embedding.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close(out.hidden_states[0], embedding)
    raw = out.hidden_states[-1] @ model.lm_head.weight.T
    close(out.logits, 15 * torch.tanh(raw / 15) if style == "nanochat" else raw)
    assert all(not torch.equal(a, b) for a, b in zip(out.hidden_states[:-1], out.hidden_states[1:], strict=True))
    assert model(ids, use_cache=False).hidden_states is None


# ------------------------------------------------------------------------------------------------- inputs and outputs
@pytest.mark.parametrize("name", PRESETS)
def test_embeddings_may_stand_for_ids_unless_a_table_needs_them(name):
    model, ids = depth_model(name, {}), tokens(2, 11)
    embeds = model.model.embed_tokens(ids)
    if name in READS_TABLE:
        for use_cache in (False, True):
            with pytest.raises(ValueError, match="table row per token id, so that inputs_embeds is not enough; pass input_ids"):
                model(inputs_embeds=embeds, use_cache=use_cache)
    else:
        assert torch.equal(model(inputs_embeds=embeds, use_cache=False).logits, model(ids, use_cache=False).logits)
        close(model(inputs_embeds=embeds, use_cache=True).logits, model(ids, use_cache=False).logits)


def test_exactly_one_input_is_taken():
    model, ids = small_model(), tokens(2, 5)
    for given in ({}, {"input_ids": ids, "inputs_embeds": model.model.embed_tokens(ids)}):
        with pytest.raises(ValueError, match="give exactly one of input_ids and inputs_embeds"):
            model(**given)


def test_two_caches_under_two_names_are_one_too_many():
    model, ids = small_model(), tokens(2, 5)
    with pytest.raises(ValueError, match="past_key_values and cache are two names of one argument"):
        model(ids, past_key_values=model.make_cache(), cache=model.make_cache())


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_the_cache_has_both_of_its_names(name):
    model, ids = small_model(variant="svformer"), tokens(2, 9)
    out = model(ids[:, :5], use_cache=True)
    close(model(ids[:, 5:], **{name: out[CACHE_NAME]}).logits, logits(model, ids)[:, 5:])


def test_use_cache_is_an_argument_or_a_field_of_the_config():
    ids = tokens(2, 5)
    assert small_model()(ids)[CACHE_NAME].get_seq_length() == 5
    assert small_model()(ids, use_cache=False).get(CACHE_NAME) is None
    assert small_model(use_cache=False)(ids).get(CACHE_NAME) is None
    assert small_model(use_cache=False)(ids, use_cache=True)[CACHE_NAME].get_seq_length() == 5


@pytest.mark.parametrize("name", ["bov", "denseformer"])
def test_logits_to_keep_takes_a_number_or_positions(name):
    model, ids = small_model(variant=name, **STYLES["nanochat"]), tokens(2, 11)
    whole = logits(model, ids)
    assert torch.equal(logits(model, ids, logits_to_keep=0), whole)
    close(logits(model, ids, logits_to_keep=1), whole[:, -1:], 1e-12)
    close(logits(model, ids, logits_to_keep=4), whole[:, -4:], 1e-12)
    close(logits(model, ids, logits_to_keep=torch.tensor([0, 7, 3])), whole[:, [0, 7, 3]], 1e-12)


def test_a_tuple_is_returned_on_request():
    model, ids = small_model(variant="bov"), tokens(2, 7)
    as_tuple = model(ids, labels=ids, return_dict=False, use_cache=False, output_hidden_states=True)
    out = model(ids, labels=ids, use_cache=False, output_hidden_states=True)
    assert isinstance(out, CausalLMOutputWithPast)
    assert torch.equal(as_tuple[0], out.loss)
    assert torch.equal(as_tuple[1], out.logits)
    assert len(as_tuple[2]) == LAYERS + 1


def test_logits_are_capped_smoothly():
    capped, ids = small_model(logit_softcap=1.7), tokens(2, 7)
    free = small_model(logit_softcap=0.0)
    raw = logits(free, ids)
    assert raw.abs().max() > 2 * 1.7
    close(logits(capped, ids), 1.7 * torch.tanh(raw / 1.7))


# --------------------------------------------------------------------------------------------------------------- loss
def loss_by_hand(scores: Tensor, labels: Tensor) -> tuple[float, int]:
    """Sum of the negative log-likelihoods of the next tokens, and how many there are."""
    total, count = 0.0, 0
    for row, row_labels in zip(scores, labels, strict=True):
        for t in range(len(row_labels) - 1):
            if row_labels[t + 1] != -100:
                total += float(torch.logsumexp(row[t], -1) - row[t, row_labels[t + 1]])
                count += 1
    return total, count


@pytest.mark.parametrize("style", ["llama", "nanochat"])
def test_the_loss_is_the_mean_cross_entropy_of_the_next_token(style):
    model, ids = small_model(variant="resformer_learnable", **STYLES[style]), tokens(3, 11)
    labels = ids.clone()
    labels[0, :4] = labels[1, 7:] = labels[2, 5] = -100
    scores = logits(model, ids)
    total, count = loss_by_hand(scores, labels)
    assert 0 < count < 3 * 10
    expected = torch.tensor(total / count, dtype=torch.float64)
    close(model(ids, labels=labels).loss, expected)
    close(F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100), expected)
    # what the trainer asks for under gradient accumulation
    for items in (count, 97, torch.tensor(97)):
        close(model(ids, labels=labels, num_items_in_batch=items).loss, torch.tensor(total / int(items), dtype=torch.float64))
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    close(model(ids, shift_labels=shifted).loss, expected)
    assert model(ids).loss is None


def test_the_loss_is_taken_in_float32_at_least():
    model, ids = small_model(dtype=torch.bfloat16), tokens(2, 11)
    out = model(ids, labels=ids)
    assert out.logits.dtype == torch.bfloat16
    assert out.loss.dtype == torch.float32
    wide = out.logits.float()
    close(out.loss, F.cross_entropy(wide[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), 1e-6)
    assert small_model()(ids, labels=ids).loss.dtype == torch.float64


# ------------------------------------------------------------------------------------------------------------- dtypes
@pytest.mark.parametrize(
    "name, style", [(name, "llama_gqa") for name in PRESETS] + [(name, "nanochat") for name in ("bov", "resformer_learnable")]
)
def test_bfloat16_and_autocast_give_the_logits_of_float32_to_their_precision(name, style):
    model, ids = depth_model(name, STYLES[style], dtype=torch.float32), tokens(2, 13)
    expected = logits(model, ids)
    bound = 8 * torch.finfo(torch.bfloat16).eps  # a few roundings a layer; a stream in the wrong place costs 1

    def distance(found: Tensor) -> float:
        return float((found.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(ids, labels=ids, use_cache=False)
    assert 0 < distance(out.logits.detach()) < bound
    out.loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    found = logits(model.to(torch.bfloat16), ids)
    assert found.dtype == (torch.float32 if style == "nanochat" else torch.bfloat16)  # the soft-cap is taken in float32
    assert 0 < distance(found) < bound


@pytest.mark.parametrize("rope", [None, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}], ids=["plain", "scaled"])
def test_casting_the_model_does_not_round_its_rotation_angles(rope):
    model = small_model(dtype=torch.float32, rope_parameters=rope, max_position_embeddings=4096)
    positions = torch.tensor([[0, 1, 777, 4095]])
    expected = model.model.rotary_emb(torch.zeros(1), positions)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model = model.to(dtype)
        for table, expected_table in zip(model.model.rotary_emb(torch.zeros(1, dtype=dtype), positions), expected, strict=True):
            assert torch.equal(table, expected_table)
    wide = model.to(torch.float64).model.rotary_emb(torch.zeros(1, dtype=torch.float64), positions)
    assert wide[0].dtype == torch.float64

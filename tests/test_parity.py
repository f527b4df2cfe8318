"""The model against ``naive``: every preset, forward and backward, in float64 with every parameter randomised.

``naive`` is a straight-line implementation of the papers' equations that shares no code with the library. Each parameter's
gradient is compared too: a value that is shared but whose gradient is dropped gives the same logits and trains another
model. Dimensions are distinct primes where the model allows it, so that no two of them can be confused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import valuepath as vp
from naive import PAPERS, naive_logits

LOGITS = 1e-10
"""Largest difference of two logits."""
GRADIENT = 1e-9
"""Largest difference of two gradients of a parameter, relative to its largest gradient."""

HEADS = {"MHA": (3, 3), "GQA": (6, 2), "MQA": (5, 1)}
"""Query heads, key/value heads."""
SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 29,
    "intermediate_size": 31,
    "num_hidden_layers": 7,
    "head_dim": 10,
    "max_position_embeddings": 23,
}
B, T = 2, 13


@dataclass(frozen=True)
class Case:
    """A preset with options, as a sentence."""

    variant: str
    says: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.variant}: {self.says}"


CASES = [
    Case("transformer", "own value"),
    Case("resformer_identity", "half first value, half own"),
    Case("resformer_identity", "one source in the middle", {"source": 2}),
    Case("resformer_identity", "one receiving layer", {"layers": [5]}),
    Case("resformer_identity", "one source, one receiver, other weight", {"source": 1, "layers": [4], "weight": 0.7}),
    Case("resformer_constant", "2 V_0 + V_n"),
    Case("resformer_constant", "other numbers, source and layers", {"first": -0.3, "own": 1.7, "source": 1, "layers": [3, 6]}),
    Case("resformer_learnable", "two scalars a layer"),
    Case("resformer_learnable", "one scalar a head", {"per": "head"}),
    Case("resformer_learnable", "one scalar a channel, from layer 1", {"per": "channel", "source": 1, "layers": "3:"}),
    Case("resformer_plus", "softmax budget over all layers"),
    Case("resformer_plus", "own coefficient a head, some layers", {"per": "head", "layers": [2, 3, 6]}),
    Case("resformer_sparse", "5 V_0 + V_n on the last third"),
    Case("resformer_sparse", "V_0 alone on named layers", {"layers": [3, 5, 6], "first": 1.0, "own": 0.0}),
    Case("resformer_sparse", "from a later source", {"layers": [4, 6], "source": 2, "first": 0.5, "own": 0.5}),
    Case("resformer_dense", "raw history"),
    Case("resformer_dense", "mixed history", {"history": "mixed"}),
    Case("resformer_dense", "mixed history, some layers", {"history": "mixed", "layers": [2, 4, 5]}),
    Case("resformer_identity_rescaled", "norm of a token"),
    Case("resformer_identity_rescaled", "norm of a head", {"axis": "head"}),
    Case("resformer_identity_rescaled", "norm of the matrix", {"axis": "tensor"}),
    Case("resformer_identity_rescaled", "other numbers and layers", {"first": 0.9, "own": 0.2, "layers": "2:"}),
    Case("neutreno", "0.4 (V_0 - V_n) after attention"),
    Case("neutreno", "other weight and layers", {"weight": -1.3, "layers": [2, 5]}),
    Case("neutreno", "with identity", {"combine": "resformer_identity"}),
    Case("neutreno", "with constant", {"combine": "resformer_constant"}),
    Case("neutreno", "with learnable", {"combine": "resformer_learnable"}),
    Case("neutreno", "with plus", {"combine": "resformer_plus"}),
    Case("neutreno", "with sparse", {"combine": "resformer_sparse"}),
    Case("neutreno", "with dense", {"combine": "resformer_dense"}),
    Case("denseformer", "average after every block"),
    Case("denseformer", "every second block", {"period": 2}),
    Case("denseformer", "every third earlier state", {"dilation": 3}),
    Case("denseformer", "dilation and period", {"dilation": 2, "period": 3}),
    Case("svformer", "V_0 everywhere"),
    Case("svformer", "V_0 on some layers", {"layers": [2, 3, 5]}),
    Case("cla2", "keys and values of the layer before"),
    Case("cla2", "keys of the layer before", {"share": "k"}),
    Case("cla2", "values of the layer before", {"share": "v"}),
    Case("query_residual", "half first query, half own"),
    Case("query_residual", "other numbers and layers", {"first": 0.9, "own": -0.4, "layers": [1, 4]}),
    Case("key_residual", "half first key, half own"),
    Case("key_residual", "other numbers and layers", {"first": 0.9, "own": -0.4, "layers": [1, 4]}),
    Case("attention_residual", "half first attention matrix, half own"),
    Case("attention_residual", "other numbers and layers", {"first": 0.9, "own": -0.4, "layers": [1, 4]}),
    Case("v1_identity_mapping", "V_0 beside attention"),
    Case("v1_identity_mapping", "other numbers and layers", {"first": 0.9, "own": -0.4, "layers": [1, 4]}),
    Case("v1_cross_layer_attention", "attention over layer 0 too"),
    Case("v1_cross_layer_attention", "attention over layer 2 too", {"source": 2, "layers": [3, 6]}),
    Case("hidden_skip", "a X_0 + b x_n"),
    Case("hidden_skip", "a and b a channel, some layers", {"per": "channel", "layers": [2, 5]}),
    *(Case(f"hidden_from_h{k}", "no value source") for k in (1, 2, 3)),
    *(Case(f"hidden_from_h{k}", f"value of layer {i}", {"source": i}) for k, i in ((1, 1), (2, 1), (2, 2), (3, 2))),
    *(Case(f"hidden_from_h{k}", "no MLP skip either", {"mlp_skip": False}) for k in (1, 2, 3)),
    *(
        Case(
            f"hidden_from_h{k}",
            "all options",
            {"source": 1, "layers": [3, 5], "first": 0.9, "own": -0.4, "mlp_skip": False},
        )
        for k in (1, 2, 3)
    ),
    Case("bov", "a table row in the last third"),
    Case("bov", "on alternate layers", {"layers": "::-2"}),
    Case("bov", "a scale a channel", {"per": "channel"}),
    Case("shared_table", "one table"),
    Case("table_fixed_scale", "no scale"),
    Case("table_all", "in every layer"),
    *(
        case
        for name in ("v_last_third", "v1_last_third", "v1_every2", "x0wv_last_third", "x0wv_every2")
        for case in (Case(name, "learned scale"), Case(name, "a scale a channel", {"per": "channel"}))
    ),
    *(
        case
        for name in (
            *("v_last_third", "v1_last_third", "v1_every2", "x0wv_last_third", "x0wv_every2"),
            *("bov", "shared_table", "table_all"),
        )
        for case in (
            Case(name, "fixed scale on named layers", {"layers": [2, 5], "learned": False, "scale": -1.3}),
            Case(name, "a scale a head", {"per": "head"}),
        )
    ),
    Case("table_fixed_scale", "all options", {"layers": [2, 5], "learned": True, "scale": 2.0, "per": "head"}),
    Case("v_plus_table", "no gate, no scale"),
    Case("v_plus_table", "fixed scale on named layers", {"layers": [0, 3], "scale": -1.3}),
    Case("v_plus_table", "learned scale a head", {"learned": True, "per": "head"}),
    Case("v_plus_table_gated", "gate of 12 channels"),
    Case("v_plus_table_gated", "other range, channels and layers", {"range": 1.9, "channels": 5, "layers": [0, 2]}),
    *(
        case
        for name, other in (("v_plus_v1", "first"), ("v_plus_x0wv", "embed"))
        for case in (
            Case(name, "two scalars a layer"),
            Case(name, "two scalars a head", {"per": "head"}),
            Case(name, "half and half", {"learned": False}),
            Case(name, "other numbers and layers", {"learned": False, "own": -0.4, other: 0.9, "layers": [2, 5]}),
        )
    ),
]

# Options that only say where a trained parameter starts: after randomising they change nothing.
STARTS = {
    ("resformer_learnable", "first"), ("resformer_learnable", "own"), ("resformer_plus", "own"), ("resformer_plus", "total"),
    ("resformer_dense", "own"), ("resformer_dense", "past"), ("denseformer", "own"), ("denseformer", "past"),
    ("hidden_skip", "first"), ("hidden_skip", "own"),
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the parts
def build(case: Case, heads: str, **parts: Any) -> vp.ValuePathForCausalLM:
    """The model in float64 with every parameter away from any neutral value."""
    query_heads, kv_heads = HEADS[heads]
    config = vp.ValuePathConfig(
        variant=case.variant,
        variant_options=case.options,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        init_seed=3,
        **(SIZES | parts),
    )
    model = vp.ValuePathForCausalLM(config).double().train()
    randomise(model)
    return model


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if "coefficients" in name or name.endswith((".scale", "norm.weight", "layernorm.weight")):
                parameter.copy_(noise.sign() * (0.5 + 0.4 * noise.abs()))  # either sign, never near 0
            elif parameter.dim() == 2 and "proj" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise)


def some_ids() -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (B, T), generator=torch.Generator().manual_seed(11))


def naive_of(
    case: Case, model: vp.ValuePathForCausalLM, state: dict[str, Tensor], ids: Tensor, padding: Tensor | None
) -> Tensor:
    """``naive`` with the model's rotary tables; positions are counted from each row's first real token."""
    left = torch.zeros(len(ids), dtype=torch.long) if padding is None else padding
    positions = (torch.arange(ids.shape[1]) - left[:, None]).clamp(min=0)
    cos, sin = model.model.rotary_emb(torch.zeros((), dtype=torch.float64), positions)
    return naive_logits(case.variant, case.options, model.config, state, ids, cos, sin, padding)


def compare(case: Case, model: vp.ValuePathForCausalLM, padding: Tensor | None = None) -> None:
    """Logits, then the gradient of every parameter for a random linear functional of the logits."""
    ids = some_ids()
    mask = None if padding is None else (torch.arange(T) >= padding[:, None]).long()
    real = torch.ones(B, T, 1, dtype=torch.bool) if mask is None else mask.bool()[..., None]

    found = model(ids, attention_mask=mask, use_cache=False).logits
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = naive_of(case, model, leaves, ids, padding)

    assert found.dtype == expected.dtype == torch.float64
    spread = expected[real.expand_as(expected)].std()
    assert spread > 1e-2, "the logits are all alike: nothing would be compared"
    difference = ((found - expected) * real).abs().max().item()
    assert difference < LOGITS, f"{case}: logits differ by {difference:.1e}"

    functional = torch.randn(found.shape, generator=torch.Generator().manual_seed(13), dtype=torch.float64) * real
    (found * functional).sum().backward()
    gradients = torch.autograd.grad((expected * functional).sum(), list(leaves.values()))
    wrong = {}
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        scale = gradient.abs().max().item()
        assert scale > 0, f"{case}: naive does not depend on {name}"
        assert parameter.grad is not None, f"{case}: {name} gets no gradient"
        error = (parameter.grad - gradient).abs().max().item() / scale
        if not error < GRADIENT:
            wrong[name] = error
    assert not wrong, f"{case}: relative differences of gradients {wrong}"


# --------------------------------------------------------------------------------------------------------- the tests
def defaults() -> list[Case]:
    """Each preset once, as it is without options."""
    return [next(case for case in CASES if case.variant == name) for name in PAPERS]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("case", defaults(), ids=str)
def test_logits_and_every_gradient_equal_the_paper_s_equation(case, heads):
    assert not case.options
    compare(case, build(case, heads))


@pytest.mark.parametrize("case", [case for case in CASES if case.options], ids=str)
def test_with_options_too(case):
    compare(case, build(case, "GQA"))


# Attention matrices of unequal windows cannot be mixed: where windows differ, only the layers that see as far as layer 0.
WINDOWS = [5, 3, 5, None, 7, 5, 2]
NANOCHAT = {"style": "nanochat", "max_position_embeddings": 20}  # SSSL of 5 positions


def with_windows(case: Case, windows: list[int | None]) -> Case:
    if case.variant != "attention_residual":
        return case
    alike = [n for n in range(1, len(windows)) if windows[n] == windows[0]]
    return Case(case.variant, case.says, {"layers": alike})


@pytest.mark.parametrize("case", defaults(), ids=str)
def test_in_nanochat_style_with_short_and_long_windows(case):
    case = with_windows(case, [5, 5, 5, None, 5, 5, None])
    compare(case, build(case, "GQA", **NANOCHAT))


@pytest.mark.parametrize("case", defaults(), ids=str)
def test_with_left_padding_uneven_windows_all_biases_gained_qk_norm_and_tied_embeddings(case):
    case = with_windows(case, WINDOWS)
    parts = {
        "layer_windows": WINDOWS,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": "gain",
        "tie_word_embeddings": True,
    }
    compare(case, build(case, "GQA", **parts), padding=torch.tensor([0, 4]))


@pytest.mark.parametrize("case", defaults(), ids=str)
def test_with_left_padding_in_every_row_and_one_key_value_head(case):
    compare(case, build(case, "MQA"), padding=torch.tensor([3, 6]))


PARTS = {
    "normalised embedding": {"normalize_embedding": True},
    "softcap": {"logit_softcap": 3.0},
    "relu2": {"mlp": "relu2"},
    "no norm gain": {"norm_gain": False},
    "plain qk norm": {"qk_norm": "plain"},
    "plain qk norm and scale": {"qk_norm": "plain", "qk_norm_scale": 1.2},
    "gained qk norm and scale": {"qk_norm": "gain", "qk_norm_scale": 0.7},
    "attention bias": {"attention_bias": True},
    "output bias": {"output_bias": True},
    "MLP bias": {"mlp_bias": True},
    "tied embeddings": {"tie_word_embeddings": True},
    "sliding window": {"sliding_window": 4},
    "SSSL": {"window_pattern": "SSSL", "sliding_window": 4},
    "one layer type each": {
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 5],
        "sliding_window": 3,
    },
    "large epsilon": {"rms_norm_eps": 0.1},
    "other rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "eager attention": {"attn_implementation": "eager"},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("variant", ["transformer", "bov", "v_plus_x0wv"])
def test_each_part_by_itself(variant, part):
    case = Case(variant, part)
    compare(case, build(case, "GQA", **PARTS[part]))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize(
    "case",
    [case for case in defaults() if case.variant in (
        "resformer_plus", "resformer_dense", "neutreno", "denseformer", "svformer", "cla2", "shared_table",
        "query_residual", "attention_residual", "v1_identity_mapping", "v1_cross_layer_attention", "v_plus_x0wv",
    )],
    ids=str,
)  # fmt: skip
def test_gradient_checkpointing_drops_no_gradient(case, reentrant):
    model = build(case, "GQA")
    # renamed in transformers 5.24, where the old name warns
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    runs: list[int] = []
    for n, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, n=n: runs.append(n))
    compare(case, model)
    assert sorted(runs) == sorted([*range(7)] * 2), "each block should be computed once more in the backward pass"


# ------------------------------------------------------------------------------------------- the references themselves
def test_naive_knows_every_preset_and_every_option_of_it():
    assert set(PAPERS) == set(vp.variants()) == {case.variant for case in CASES}
    tried = {(case.variant, option) for case in CASES for option in case.options}
    exist = {(name, option) for name, preset in vp.variants().items() for option in preset.options if option != "init"}
    assert exist - tried == STARTS


def test_windows_and_parts_of_the_styles():
    def of(**parts: Any) -> vp.ValuePathConfig:
        return vp.ValuePathConfig(num_attention_heads=6, num_key_value_heads=2, **(SIZES | parts))

    assert of().layer_windows == [None] * 7
    assert of(sliding_window=4).layer_windows == [4] * 7
    assert of(sliding_window=4, window_pattern="SSSL").layer_windows == [4, 4, 4, None, 4, 4, None]
    assert of(**NANOCHAT).layer_windows == [5, 5, 5, None, 5, 5, None]
    assert of(**PARTS["one layer type each"]).layer_windows == [3, None, 3, 3, 3, 3, 3]
    names = ("mlp", "norm_gain", "qk_norm", "qk_norm_scale", "logit_softcap", "normalize_embedding")
    assert [getattr(of(), name) for name in names] == ["swiglu", True, "none", 1.0, 0.0, False]
    assert [getattr(of(**NANOCHAT), name) for name in names] == ["relu2", False, "plain", 1.2, 15.0, True]


def test_rotary_factors_are_those_of_the_closed_form():
    model = build(CASES[0], "MHA", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    cos, sin = model.model.rotary_emb(torch.zeros((), dtype=torch.float64), torch.arange(T)[None])
    assert cos.shape == sin.shape == (1, T, 10)
    for t in range(T):
        for i in range(10):
            angle = t * 77.0 ** (-2 * (i % 5) / 10)
            assert cos[0, t, i].item() == pytest.approx(math.cos(angle), abs=1e-5)  # frequencies are float32
            assert sin[0, t, i].item() == pytest.approx(math.sin(angle), abs=1e-5)


LLAMA_FAMILY = {"Llama": {}, "Mistral": {}, "Qwen2": {"attention_bias": True}, "Qwen3": {"qk_norm": "gain"}}


@pytest.mark.parametrize("family", LLAMA_FAMILY)
def test_naive_transformer_equals_transformers_own(family, monkeypatch):
    """In float64, after taking out the detour through float32 in their norms. Their rotary factors are used."""
    module = getattr(transformers.models, family.lower())
    module = getattr(module, f"modeling_{family.lower()}")

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    monkeypatch.setattr(getattr(module, f"{family}RMSNorm"), "forward", norm)
    sizes = SIZES | {"hidden_size": 42}  # theirs must be a multiple of the number of heads
    extra = {"layer_types": ["full_attention"] * 7} if family.startswith("Qwen") else {}
    theirs = getattr(transformers, f"{family}Config")(
        num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-6, attn_implementation="sdpa", **sizes, **extra
    )
    if family == "Mistral":
        theirs.sliding_window = 4
    model = getattr(transformers, f"{family}ForCausalLM")(theirs).double().eval()
    randomise(model)
    window = {"sliding_window": 4} if family == "Mistral" else {}
    ours = vp.ValuePathConfig(
        num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-6, **sizes, **LLAMA_FAMILY[family], **window
    )
    ids = some_ids()
    state = dict(model.state_dict())
    cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(T)[None])
    expected = model(ids).logits
    found = naive_logits("transformer", {}, ours, state, ids, cos, sin)
    assert expected.std() > 0.1
    assert (found - expected).abs().max().item() < LOGITS


# ------------------------------------------------------------------------------------------------- the worked example
def test_the_worked_example_of_the_notes_gives_10_3():
    """Attention weights 0.2 and 0.8, first values 1 and 3, own values 10 and 20, halves: 0.2 * 5.5 + 0.8 * 11.5 = 10.3.

    Two tokens whose normalised embeddings are (2, 0, 0, 0) and (0, 2, 0, 0); layer 0 adds nothing to the residual stream, so
    layer 1 reads the same two vectors. The value projections map them to 1, 3 and 10, 20. The query of the second token
    scores 0 with the first key and ln 4 with its own. W_o writes the result into the third channel, and the logits are the
    third channel and the second one, which holds 2, over one common norm.
    """
    config = vp.ValuePathConfig(
        variant="resformer_identity",
        vocab_size=2,
        hidden_size=4,
        intermediate_size=3,
        num_hidden_layers=2,
        num_attention_heads=1,
        head_dim=2,
        rms_norm_eps=0.0,
    )
    model = vp.ValuePathForCausalLM(config).double()
    weights: dict[str, list[list[float]]] = {
        "model.embed_tokens": [[2, 0, 0, 0], [0, 2, 0, 0]],
        "model.layers.0.self_attn.v_proj": [[0.5, 1.5, 0, 0], [0, 0, 0, 0]],
        "model.layers.1.self_attn.v_proj": [[5, 10, 0, 0], [0, 0, 0, 0]],
        "model.layers.1.self_attn.q_proj": [[0, 0.5, 0, 0], [0, 0, 0, 0]],
        "model.layers.1.self_attn.k_proj": [[0, math.log(4) * math.sqrt(2) / 2, 0, 0], [0, 0, 0, 0]],
        "model.layers.1.self_attn.o_proj": [[0, 0], [0, 0], [1, 0], [0, 0]],
        "lm_head": [[0, 0, 1, 0], [0, 1, 0, 0]],
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for name, rows in weights.items():
            model.get_parameter(f"{name}.weight").copy_(torch.tensor(rows, dtype=torch.float64))
    logits = model(torch.tensor([[0, 1]])).logits[0, 1]
    assert (logits[0] / logits[1] * 2).item() == pytest.approx(10.3, abs=1e-12)

"""Initial weights: paired across variants, decided by the seed and the name alone, and what each equation starts from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import valuepath as vp
from models import LAYERS, VOCABULARY, small_config, tokens

PRESETS = [*vp.variants()]
STD = 0.02
D = 42


def start(seed: int | None = 7, **fields: Any) -> vp.ValuePathForCausalLM:
    return vp.ValuePathForCausalLM(small_config(init_seed=seed, **fields)).eval()


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def table_start(model: vp.ValuePathForCausalLM, name: str) -> str | None:
    """``projected`` or ``uniform`` for a table, None for another parameter."""
    return ("uniform" if "init=uniform" in model.config.equation() else "projected") if "table.weight" in name else None


# ------------------------------------------------------------------------------------------------------------- pairing
@pytest.mark.parametrize("seeded", ["init_seed", "manual_seed"])
@pytest.mark.parametrize("style", ["llama", "nanochat"])
def test_what_variants_share_starts_bit_equal(style, seeded):
    """All pairs: each parameter is compared with the first variant that has it."""
    first: dict[tuple[str, str | None], Tensor] = {}
    shared: dict[str, int] = dict.fromkeys(PRESETS, 0)
    for name in PRESETS:
        windows = {"window_pattern": "L"} if name == "attention_residual" else {}
        if seeded == "manual_seed":
            torch.manual_seed(11)
            torch.randn(len(name))  # what else was drawn before does not matter
        model = start(7 if seeded == "init_seed" else None, variant=name, style=style, **windows)
        roles = {parameter.name: parameter.role for parameter in model.config.plan().parameters}
        for parameter, value in weights(model).items():
            if roles[parameter] == "coefficient":
                continue  # the number in the equation, which is the variant's own
            key = (parameter, table_start(model, parameter))
            if key in first:
                assert torch.equal(value, first[key]), f"{name}: {parameter}"
                shared[name] += 1
            first.setdefault(key, value)
    # every variant has at least its queries, projections and MLPs in common with the plain Transformer, which comes first
    assert shared.pop(PRESETS[0]) == 0
    assert min(shared.values()) >= 2 + 4 * LAYERS


@pytest.mark.parametrize(
    "one, other",
    [("resformer_learnable", "svformer"), ("bov", "v_plus_table"), ("resformer_plus", "denseformer"), ("cla2", "table_all")],
)
def test_pairs_of_variants_start_bit_equal(one, other):
    a, b = weights(start(variant=one)), weights(start(variant=other))
    matrices = {name for name in a.keys() & b.keys() if a[name].ndim == 2}
    assert len(matrices) > 4 * LAYERS
    assert all(torch.equal(a[name], b[name]) for name in matrices)


def test_a_deeper_model_starts_with_the_same_layers():
    shallow, deep = weights(start(num_hidden_layers=3)), weights(start(num_hidden_layers=5))
    assert len(shallow.keys() & deep.keys()) == len(shallow)
    assert all(torch.equal(deep[name], value) for name, value in shallow.items())


def test_the_base_model_alone_starts_like_the_whole():
    whole = weights(start(variant="bov"))
    for name, value in weights(vp.ValuePathModel(small_config(variant="bov", init_seed=7))).items():
        assert torch.equal(value, whole[f"model.{name}"])


def test_other_seeds_give_other_weights():
    seven, eight = weights(start(7, variant="v_plus_table_gated")), weights(start(8, variant="v_plus_table_gated"))
    torch.manual_seed(7)
    by_torch = weights(start(None, variant="v_plus_table_gated"))
    torch.manual_seed(8)
    by_torch_8 = weights(start(None, variant="v_plus_table_gated"))
    for name, value in seven.items():
        if value.ndim == 2:
            assert (value != eight[name]).float().mean() > 0.99, name
            assert torch.equal(value, by_torch[name]), name
            assert (value != by_torch_8[name]).float().mean() > 0.99, name
    # the names decide: no two matrices are the same draw
    flat = [value.flatten()[:50] for value in seven.values() if value.ndim == 2 and value.numel() >= 50]
    assert len({tuple(f.tolist()) for f in flat}) == len(flat)


def test_building_a_model_leaves_the_random_state_alone_where_a_seed_is_given():
    torch.manual_seed(3)
    expected = torch.randn(5)
    torch.manual_seed(3)
    a = weights(start(7))
    torch.manual_seed(4)
    assert all(torch.equal(value, a[name]) for name, value in weights(start(7)).items())
    torch.manual_seed(3)
    assert torch.equal(torch.randn(5), expected)


# ------------------------------------------------------------------------------------------------------ distributions
def test_matrices_are_normal_with_the_given_width():
    for std in (STD, 0.3):
        model = start(hidden_size=120, initializer_range=std, attention_bias=True, qk_norm="gain")
        for name, value in weights(model).items():
            if value.ndim == 2:
                # four standard errors of a mean and of a standard deviation
                assert abs(float(value.mean())) < 4 * std / value.numel() ** 0.5, name
                assert abs(float(value.std()) / std - 1) < 4 / (2 * value.numel()) ** 0.5, name
            else:
                assert torch.equal(value, torch.zeros_like(value) if name.endswith("bias") else torch.ones_like(value)), name


def test_learned_coefficients_start_at_their_numbers():
    equation = (
        "v[1] = learn(0.25)*own + learn(-1.5, per=head)*tap(0); v[2] = learn(3, per=channel)*own + budget(6)*tap(0);"
        "k[1] = learn(0.75)*own; out[3] = learn(0.125)*tap(v, 0); x[4] = learn(2, per=channel)*own + learn(0)*tap(0);"
        "skip_attn[2] = learn(0.5); skip_mlp[3] = learn(1.25, per=channel); a[5] = learn(0.9, per=head)*own"
    )
    found = weights(start(wiring=equation, num_key_value_heads=2))
    expected = {
        "layers.1.self_attn.mix_v.coefficients.own": torch.tensor(0.25),
        "layers.1.self_attn.mix_v.coefficients.tap_0": torch.full((2, 1), -1.5),
        "layers.2.self_attn.mix_v.coefficients.own": torch.full((2, 10), 3.0),
        "budgets.0.scale": torch.tensor(6.0),
        "budgets.0.logits": torch.zeros(LAYERS),
        "layers.1.self_attn.mix_k.coefficients.own": torch.tensor(0.75),
        "layers.3.self_attn.mix_out.coefficients.tap_0": torch.tensor(0.125),
        "layers.4.mix_x.coefficients.own": torch.full((D,), 2.0),
        "layers.4.mix_x.coefficients.tap_0": torch.tensor(0.0),
        "layers.2.skip_attn": torch.tensor(0.5),
        "layers.3.skip_mlp": torch.full((D,), 1.25),
        "layers.5.self_attn.mix_a.coefficients.own": torch.full((6, 1), 0.9),
    }
    for name, value in expected.items():
        assert torch.equal(found[f"model.{name}"], value), name
    coefficients = {name for name in found if any(word in name for word in ("mix_", "budgets", "skip"))}
    assert coefficients == {f"model.{name}" for name in expected}


def test_the_presets_coefficients_start_as_published():
    learnable = weights(start(variant="resformer_learnable"))
    dense = weights(start(variant="resformer_dense"))
    plus = weights(start(variant="resformer_plus"))
    for n in range(1, LAYERS):
        at = f"model.layers.{n}.self_attn.mix_v.coefficients"
        assert learnable[f"{at}.own"] == learnable[f"{at}.tap_0"] == 0.5
        assert dense[f"{at}.own"] == 1
        assert all(dense[f"{at}.tap_{i}"] == 0 for i in range(n))
        assert plus[f"{at}.own"] == 0.5
    assert plus["model.budgets.0.scale"] == LAYERS
    shares = start(variant="resformer_plus").model.budget_weights()[0]
    torch.testing.assert_close(shares, torch.ones(LAYERS))  # so that every layer starts with 1 of V_0


@pytest.mark.parametrize("name", ["resformer_dense", "denseformer"])
def test_dense_variants_start_as_a_plain_transformer(name):
    ids = tokens(2, 13)
    with torch.no_grad():
        torch.testing.assert_close(start(variant=name)(ids).logits, start()(ids).logits, rtol=0, atol=1e-6)


# -------------------------------------------------------------------------------------------------------------- tables
def x0(model: vp.ValuePathForCausalLM) -> Tensor:
    embedding = model.model.embed_tokens.weight.detach()
    return embedding / (embedding.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()


@pytest.mark.parametrize("style", ["llama", "nanochat"])
def test_a_projected_table_starts_where_the_projection_it_replaces_starts(style):
    """So that the first logits are those of the layer's own ``x0 W_V``."""
    ids = tokens(3, 17)
    table = start(variant="bov", style=style, num_key_value_heads=2)
    projected = start(variant="x0wv_last_third", style=style, num_key_value_heads=2)
    plain = start(variant="transformer", style=style, num_key_value_heads=2)
    with torch.no_grad():
        found, expected, other = (model(ids, use_cache=False).logits for model in (table, projected, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - other).abs().max() > 1e-4
    for n in (4, 5):
        rows = table.model.layers[n].self_attn.v_table.weight
        w_v = plain.model.layers[n].self_attn.v_proj.weight
        torch.testing.assert_close(rows, x0(plain) @ w_v.T, rtol=0, atol=1e-6)


def test_a_shared_table_starts_from_the_first_layer_that_reads_it():
    shared, plain = start(variant="shared_table"), start(variant="transformer")
    rows = shared.model.v_table.weight
    torch.testing.assert_close(rows, x0(plain) @ plain.model.layers[4].self_attn.v_proj.weight.T, rtol=0, atol=1e-6)
    own = start(variant="bov").model.layers
    assert torch.equal(rows, own[4].self_attn.v_table.weight)
    assert (rows - own[5].self_attn.v_table.weight).abs().max() > 0.1
    later = start(variant="shared_table", variant_options={"layers": [2, 5]}).model.v_table.weight
    torch.testing.assert_close(later, x0(plain) @ plain.model.layers[2].self_attn.v_proj.weight.T, rtol=0, atol=1e-6)


def test_a_uniform_table_fills_its_bounds():
    model, bound = start(variant="v_plus_table_gated"), math.sqrt(3 / D)
    for n in (1, 3, 5):
        rows = model.model.layers[n].self_attn.v_table.weight.detach()
        assert rows.shape == (VOCABULARY, 60)
        assert rows.abs().max() <= bound
        assert rows.max() > 0.99 * bound
        assert rows.min() < -0.99 * bound
        assert float(rows.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)  # that of a uniform distribution: sqrt(1/d)
    with_option = start(variant="bov", variant_options={"init": "uniform"}).model.layers[5].self_attn.v_table.weight
    assert torch.equal(with_option, model.model.layers[5].self_attn.v_table.weight)


@pytest.mark.parametrize("style", ["llama", "nanochat"])
def test_a_gate_starts_near_half_its_range(style):
    model = start(variant="v_plus_table_gated", num_key_value_heads=2, style=style)
    gates: list[Tensor] = []
    for n in (1, 3, 5):
        weight = model.model.layers[n].self_attn.mix_v.gates["table"].weight
        assert weight.shape == (2, 12)
        assert (weight > 0).all()
        assert (weight <= 0.02).all()
        model.model.layers[n].self_attn.mix_v.gates["table"].register_forward_hook(lambda *a: gates.append(3 * a[2].sigmoid()))
    with torch.no_grad():
        model(tokens(3, 17))
    found = torch.cat([gate.flatten() for gate in gates])
    assert found.numel() == 3 * 3 * 17 * 2
    # w . h has a standard deviation of about 0.02 sqrt(12 / 3) = 0.04, and the sigmoid a slope of 1/4
    assert float(found.mean()) == pytest.approx(1.5, abs=0.02)
    assert float((found - 1.5).abs().max()) < 3 / 4 * 5 * 0.04


# -------------------------------------------------------------------------------------------------------------- dtypes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["transformer", "v_plus_table_gated", "resformer_plus", "shared_table"])
def test_the_start_in_another_dtype_is_that_of_float32_rounded(name, dtype):
    model = AutoModelForCausalLM.from_config(small_config(variant=name, init_seed=7), dtype=dtype)
    expected = weights(start(variant=name))
    for parameter, value in weights(model).items():
        assert value.dtype == dtype
        assert torch.equal(value, expected[parameter].to(dtype)), parameter
    if dtype != torch.float16:
        out = model(tokens(2, 9), labels=tokens(2, 9))
        assert out.logits.dtype == dtype
        assert torch.isfinite(out.loss)


def test_the_start_does_not_depend_on_the_default_dtype_or_device():
    expected = weights(start(variant="bov"))
    torch.set_default_dtype(torch.float64)
    try:
        assert all(torch.equal(value, expected[name].double()) for name, value in weights(start(variant="bov")).items())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert all(parameter.is_meta for parameter in start(variant="bov").parameters())

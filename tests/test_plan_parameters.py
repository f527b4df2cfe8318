"""Which parameters a plan has: names, shapes, roles, starts; expectations written by hand."""

from __future__ import annotations

import pytest

from plans import plan
from valuepath.plan import Parameter, Plan


def named(made: Plan, part: str = "") -> dict[str, Parameter]:
    found = {parameter.name: parameter for parameter in made.parameters if part in parameter.name}
    assert len(found) == sum(part in parameter.name for parameter in made.parameters), "two parameters of one name"
    return found


def shapes(made: Plan, part: str = "") -> dict[str, tuple[int, ...]]:
    return {name: parameter.shape for name, parameter in named(made, part).items()}


def test_every_parameter_of_an_ordinary_model_of_one_layer():
    layer = "model.layers.0"
    assert shapes(plan("", 1)) == {
        "model.embed_tokens.weight": (17, 11),
        f"{layer}.input_layernorm.weight": (11,),
        f"{layer}.post_attention_layernorm.weight": (11,),
        f"{layer}.self_attn.q_proj.weight": (30, 11),
        f"{layer}.self_attn.k_proj.weight": (15, 11),
        f"{layer}.self_attn.v_proj.weight": (15, 11),
        f"{layer}.self_attn.o_proj.weight": (11, 30),
        f"{layer}.mlp.gate_proj.weight": (13, 11),
        f"{layer}.mlp.up_proj.weight": (13, 11),
        f"{layer}.mlp.down_proj.weight": (11, 13),
        "model.norm.weight": (11,),
        "lm_head.weight": (17, 11),
    }


def test_every_parameter_of_the_other_style():
    layer = "model.layers.0"
    made = plan(
        "", 1, mlp="relu2", norm_gain=False, qk_norm="gain", tied=True, attention_bias=True, output_bias=True, mlp_bias=True
    )  # fmt: skip
    assert shapes(made) == {
        "model.embed_tokens.weight": (17, 11),
        f"{layer}.self_attn.q_proj.weight": (30, 11),
        f"{layer}.self_attn.q_proj.bias": (30,),
        f"{layer}.self_attn.k_proj.weight": (15, 11),
        f"{layer}.self_attn.k_proj.bias": (15,),
        f"{layer}.self_attn.v_proj.weight": (15, 11),
        f"{layer}.self_attn.v_proj.bias": (15,),
        f"{layer}.self_attn.q_norm.weight": (5,),
        f"{layer}.self_attn.k_norm.weight": (5,),
        f"{layer}.self_attn.o_proj.weight": (11, 30),
        f"{layer}.self_attn.o_proj.bias": (11,),
        f"{layer}.mlp.up_proj.weight": (13, 11),
        f"{layer}.mlp.up_proj.bias": (13,),
        f"{layer}.mlp.down_proj.weight": (11, 13),
        f"{layer}.mlp.down_proj.bias": (11,),
    }
    assert named(made)["model.embed_tokens.weight"].products == 1  # the head


PROJECTIONS = {
    "first value only": ("v[1:] = tap(0)", ["qkv", "qk", "qk"]),
    "tables": ("v = table", ["qk", "qk", "qk"]),
    "projected embedding": ("v[1:] = embed", ["qkv", "qkv", "qkv"]),
    "keys and values shared": ("kv[1:] = shared(0)", ["qkv", "q", "q"]),
    "nothing of its own": ("kv[2] = shared(0); q[2] = tap(0)", ["qkv", "qkv", ""]),
    "own in a sum": ("v[1:] = own + table; k[2] = own + tap(0)", ["qkv", "qkv", "qkv"]),
    "concatenated": ("kv[1:] = concat(own, shared(0))", ["qkv", "qkv", "qkv"]),
}


@pytest.mark.parametrize(("text", "expected"), PROJECTIONS.values(), ids=PROJECTIONS)
def test_a_projection_exists_where_something_reads_it(text, expected):
    made = plan(text, 3, attention_bias=True)
    assert ["".join(layer.projections) for layer in made.layers] == expected
    for n, streams in enumerate(expected):
        for stream in "qkv":
            for part in ("weight", "bias"):
                assert (f"model.layers.{n}.self_attn.{stream}_proj.{part}" in named(made)) == (stream in streams)
        assert f"model.layers.{n}.self_attn.o_proj.weight" in named(made)


def test_a_key_norm_exists_where_a_raw_key_is_finished():
    made = plan("k[1] = shared(0); k[2] = tap(0); q[1] = tap(0); q[2] = shared(0)", 3, qk_norm="gain")
    assert list(named(made, "_norm.weight")) == [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.2.self_attn.k_norm.weight",
    ]
    assert named(plan("", 2, qk_norm="plain"), "_norm") == {}


def test_tables_and_the_shared_table():
    made = plan("v[1] = table + table(shared); v[2] = learn(1)*table(shared); v[3] = own + 0.5*table", 4)
    assert shapes(made, "v_table") == {
        "model.v_table.weight": (17, 15),
        "model.layers.1.self_attn.v_table.weight": (17, 15),
        "model.layers.3.self_attn.v_table.weight": (17, 15),
    }
    assert {parameter.role for parameter in named(made, "v_table").values()} == {"table"}
    assert made.shared_table
    assert made.needs_ids
    assert not plan("v = table", 2).shared_table
    assert not plan("v[1:] = tap(0) + embed", 2).needs_ids
    assert plan("v[1:] = tap(0) + embed", 2).needs_embed
    assert not plan("v[1:] = table", 2).needs_embed


def test_coefficients_gates_and_budgets_have_names_shapes_and_starts():
    made = plan(
        "x[1:] = learn(1)*own + learn(0.25, per=channel)*tap(0)\n"
        "q[1] = learn(0.5)*own + learn(0.25, per=head)*tap(0)\n"
        "k[1] = learn(0.5, per=channel)*own + gate(2, 7)*tap(0)\n"
        "v[1] = learn(0.5)*own + learn(0.1, per=head)*tap(0) + learn(0.2, per=channel)*table"
        " + 2*embed + gate(3, 7)*table(shared) - budget(N)*shared(0)\n"
        "a[1] = learn(1)*own + learn(0, per=head)*shared(0)\n"
        "out[1] = learn(0.4)*tap(v, 0) - learn(0.4, per=head)*final(v) + gate(1, 3)*own(v) \n"
        "skip_attn[1] = learn(1); skip_mlp[1] = learn(0.75, per=channel); skip_mlp[0] = 0.5",
        2,
    )
    at = "model.layers.1"
    attention = f"{at}.self_attn"
    assert shapes(made, ".coefficients.") == {
        f"{at}.mix_x.coefficients.own": (),
        f"{at}.mix_x.coefficients.tap_0": (11,),
        f"{attention}.mix_q.coefficients.own": (),
        f"{attention}.mix_q.coefficients.tap_0": (6, 1),
        f"{attention}.mix_k.coefficients.own": (3, 5),
        f"{attention}.mix_v.coefficients.own": (),
        f"{attention}.mix_v.coefficients.tap_0": (3, 1),
        f"{attention}.mix_v.coefficients.table": (3, 5),
        f"{attention}.mix_a.coefficients.own": (),
        f"{attention}.mix_a.coefficients.shared_0": (6, 1),
        f"{attention}.mix_out.coefficients.tap_0": (),
        f"{attention}.mix_out.coefficients.final": (3, 1),
        "model.mix_x.coefficients.own": (),
        "model.mix_x.coefficients.tap_0": (11,),
    }
    assert shapes(made, ".gates.") == {
        f"{attention}.mix_k.gates.tap_0.weight": (3, 7),
        f"{attention}.mix_v.gates.table_shared.weight": (3, 7),
        f"{attention}.mix_out.gates.own.weight": (3, 3),
    }
    assert shapes(made, "skip_") == {f"{at}.skip_attn": (), f"{at}.skip_mlp": (11,)}
    assert shapes(made, "budgets") == {"model.budgets.0.scale": (), "model.budgets.0.logits": (2,)}
    starts = {name: parameter.start for name, parameter in named(made).items() if parameter.role == "coefficient"}
    assert starts[f"{at}.mix_x.coefficients.tap_0"] == 0.25
    assert starts[f"{attention}.mix_out.coefficients.final"] == -0.4
    assert starts[f"{at}.skip_mlp"] == 0.75
    assert (starts["model.budgets.0.scale"], starts["model.budgets.0.logits"]) == (-2.0, 0.0)
    assert {parameter.role for parameter in named(made, ".gates.").values()} == {"gate"}
    assert all(parameter.products == 1 for parameter in named(made, ".gates.").values())


def test_fixed_numbers_are_no_parameters():
    assert shapes(plan("v[1:] = 0.5*own + 0.5*tap(0); skip_attn = 0.5", 3)) == shapes(plan("", 3))


def test_one_budget_is_one_scale_and_one_logit_a_layer():
    made = plan("v[1:] = own + budget(N)*tap(0); k[1:] = budget(2)*own + budget(3)*tap(0)", 5)
    assert sorted(made.budgets.values()) == [2.0, 3.0, 5.0]
    assert len(named(made, "budgets")) == 6
    assert {shape for name, shape in shapes(made, "logits").items()} == {(5,)}


def test_roles_and_products_of_an_ordinary_layer():
    made = plan("", 1)
    roles = {name.split(".")[-2]: (parameter.role, parameter.products) for name, parameter in named(made).items()}
    assert roles == {
        "embed_tokens": ("embedding", 0), "input_layernorm": ("norm", 0),
        "post_attention_layernorm": ("norm", 0), "norm": ("norm", 0),
        "q_proj": ("matrix", 1), "k_proj": ("matrix", 1), "v_proj": ("matrix", 1), "o_proj": ("matrix", 1),
        "gate_proj": ("matrix", 1), "up_proj": ("matrix", 1), "down_proj": ("matrix", 1), "lm_head": ("head", 1),
    }  # fmt: skip


EMBED = {
    # equation for 3 layers: layer 1's products of W_V, and whether the two inputs are added first
    "only V": ("v[1] = own", 1, False),
    "only x0 W_V": ("v[1] = embed", 1, False),
    "both with scalars": ("v[1] = 0.5*own + learn(0.5)*embed", 1, True),
    "both and another source": ("v[1] = own + embed + tap(0)", 1, True),
    "both with a budget": ("v[1] = budget(2)*own + embed", 1, True),
    "a coefficient a head is after the projection": ("v[1] = learn(1, per=head)*own + embed", 2, False),
    "a coefficient a channel too": ("v[1] = own + learn(1, per=channel)*embed", 2, False),
    "a gate too": ("v[1] = own + gate(1, 7)*embed", 2, False),
    "a coefficient a head on something else": ("v[1] = own + embed + learn(1, per=head)*tap(0)", 1, True),
    "another layer reads V": ("v[1] = own + embed; v[2] = own + tap(1)", 2, False),
    "another layer reads V after attention": ("v[1] = own + embed; out[2] = tap(v, 1)", 2, False),
    "the layer itself reads V after attention": ("v[1] = own + embed; out[1] = own(v)", 2, False),
    "another layer reads the mix": ("v[1] = own + embed; v[2] = own + shared(1)", 1, True),
    "another layer reads the raw key": ("v[1] = own + embed; k[2] = own + tap(1)", 1, True),
    "rescaled to V": ("v[1] = renorm(own + embed)", 2, False),
    "no value projection": ("v[1] = table", 0, False),
}


@pytest.mark.parametrize(("text", "products", "fuses"), EMBED.values(), ids=EMBED)
def test_both_inputs_of_one_projection_are_added_first_where_that_is_the_same(text, products, fuses):
    layer = plan(text, 3).layers[1]
    assert (layer.value_products, layer.fuses_embed) == (products, fuses)
    found = named(plan(text, 3)).get("model.layers.1.self_attn.v_proj.weight")
    assert (found.products if found else 0) == products

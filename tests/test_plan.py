"""The plan: where keys and values live, who reads whose buffer, which parameters exist; expectations written by hand.

That it holds for any wiring is tested in ``test_plan_properties``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from valuepath.equations import parse
from valuepath.plan import (
    Alias,
    Embedded,
    Finished,
    Item,
    Parameter,
    Plan,
    Projected,
    Residency,
    Rows,
    Shape,
    Store,
    Tokens,
    make_plan,
)
from valuepath.wiring import WiringError

S = Store()
V0 = Tokens(Projected(0))


def shape(num_layers: int, windows: tuple[int | None, ...] | None = None, **changes: object) -> Shape:
    """Every size is another prime (times the head structure): d=11, f=13, h=6, g=3, e=5, |V|=17."""
    base = Shape(
        hidden_size=11, intermediate_size=13, num_heads=6, num_kv_heads=3, head_dim=5, vocab_size=17,
        windows=windows or (None,) * num_layers,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def plan(text: str, num_layers: int, fold: str = "auto", windows: tuple[int | None, ...] | None = None, **changes: object) -> Plan:
    return make_plan(parse(text, num_layers), shape(num_layers, windows, **changes), fold)  # type: ignore[arg-type]


def values(made: Plan) -> list[Residency]:
    return [layer.v for layer in made.layers]


def keys(made: Plan) -> list[Residency]:
    return [layer.k for layer in made.layers]


# ------------------------------------------------------------------------------------------------ where values live
VALUES: dict[str, tuple[str, dict[str, list[Residency]]]] = {
    # equation for 4 layers -> fold -> residency of the values
    "ordinary": ("", {"auto": [S, S, S, S], "none": [S, S, S, S], "all": [V0, S, S, S]}),
    "first value mixed in": ("v[1:] = 0.5*own + 0.5*tap(0)", {"auto": [S, S, S, S], "none": [S, S, S, S], "all": [V0, S, S, S]}),
    "first value only": ("v[1:] = tap(0)", {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4}),
    "first value only, weighted": (
        "v[1] = 2*tap(0); v[2] = learn(1, per=channel)*tap(0); v[3] = budget(2)*tap(0)",
        {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4},
    ),
    "first value, shared as it is": (
        "v[1:] = shared(0)",
        {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4},
    ),
    "first value in the last layers": ("v[2:] = tap(0)", {"auto": [V0, S, V0, V0], "none": [S, S, Alias(0), Alias(0)], "all": [V0, S, V0, V0]}),
    "second value only": (
        "v[2:] = tap(1)",
        {"auto": [S, S, Alias(1), Alias(1)], "none": [S, S, Alias(1), Alias(1)], "all": [V0, S, Alias(1), Alias(1)]},
    ),
    "tables": (
        "v[2:] = learn(1)*table",
        {fold: [first, S, Tokens(Rows(2)), Tokens(Rows(3))] for fold, first in (("auto", S), ("none", S), ("all", V0))},
    ),
    "one shared table": (
        "v[2:] = learn(1)*table(shared)",
        {fold: [first, S, Tokens(Rows(None)), Tokens(Rows(None))] for fold, first in (("auto", S), ("none", S), ("all", V0))},
    ),
    "tables everywhere": ("v = table", {fold: [Tokens(Rows(n)) for n in range(4)] for fold in ("auto", "none", "all")}),
    "a table read by another layer": (
        "v[1] = 2*table; v[2] = 3*shared(1); v[3] = shared(2)",
        {fold: [first, *[Tokens(Rows(1))] * 3] for fold, first in (("auto", S), ("none", S), ("all", V0))},
    ),
    "own projection of the embedding": (
        "v[2:] = embed",
        {"auto": [S, S, Tokens(Embedded(2)), Tokens(Embedded(3))], "none": [S, S, S, S], "all": [V0, S, Tokens(Embedded(2)), Tokens(Embedded(3))]},
    ),
    "projection of the embedding read by another layer": (
        "v[1] = embed; v[2:] = 0.5*shared(1)",
        {
            "auto": [S, *[Tokens(Embedded(1))] * 3],
            "none": [S, S, Alias(1), Alias(1)],
            "all": [V0, *[Tokens(Embedded(1))] * 3],
        },
    ),
    "layer 0's projection of the embedding read by another layer": (
        "v[0] = embed; v[1:3] = shared(0)",
        {
            "auto": [*[Tokens(Embedded(0))] * 3, S],
            "none": [S, Alias(0), Alias(0), S],
            "all": [*[Tokens(Embedded(0))] * 3, S],
        },
    ),
    "layer 0's projection of the embedding in a sum of another": (
        "v[0] = embed; v[1] = shared(0) + table",
        {
            "auto": [Tokens(Embedded(0)), Tokens(Finished(1)), S, S],
            "none": [S, S, S, S],
            "all": [Tokens(Embedded(0)), Tokens(Finished(1)), S, S],
        },
    ),
    "layer 0 determined, later layers too, none reads it": (
        "v[2] = embed",
        {"auto": [S, S, Tokens(Embedded(2)), S], "none": [S, S, S, S], "all": [V0, S, Tokens(Embedded(2)), S]},
    ),
    "sum of what the token determines": (
        "v[2:] = 0.5*tap(0) + learn(1)*table + embed",
        {"auto": [V0, S, Tokens(Finished(2)), Tokens(Finished(3))], "none": [S, S, S, S], "all": [V0, S, Tokens(Finished(2)), Tokens(Finished(3))]},
    ),
    "such a sum read by other layers": (
        "v[1] = tap(0) + table; v[2] = 2*shared(1); v[3] = shared(2) - tap(0)",
        {
            "auto": [V0, Tokens(Finished(1)), Tokens(Finished(1)), Tokens(Finished(3))],
            "none": [S, S, Alias(1), S],
            "all": [V0, Tokens(Finished(1)), Tokens(Finished(1)), Tokens(Finished(3))],
        },
    ),
    "such a sum in layer 0": (
        "v[0] = own + table; v[1:] = shared(0)",
        {"auto": [Tokens(Finished(0))] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [Tokens(Finished(0))] * 4},
    ),
    "the raw first value where layer 0 mixes": (
        "v[0] = own + table; v[1:3] = tap(0)",
        {
            "auto": [Tokens(Finished(0)), V0, V0, S],
            "none": [S, S, Alias(1), S],  # layer 0 stores its mix: the raw value is stored by its first reader
            "all": [Tokens(Finished(0)), V0, V0, S],
        },
    ),
    "a gate reads the hidden state": (
        "v[2] = gate(3, 7)*table; v[3] = table + gate(3, 7)*tap(0)",
        {"auto": [S, S, S, S], "none": [S, S, S, S], "all": [V0, S, S, S]},
    ),
    "a gated layer read by another": (
        "v[1] = gate(3, 7)*table; v[2] = shared(1); v[3] = shared(1) + table",
        {"auto": [S, S, Alias(1), S], "none": [S, S, Alias(1), S], "all": [V0, S, Alias(1), S]},
    ),
    "table added to the projection": ("v[2:] = own + table", {"auto": [S] * 4, "none": [S] * 4, "all": [V0, S, S, S]}),
    "a chain of shared": (
        "v[1] = own + 0.5*tap(0); v[2] = 2*shared(1); v[3] = learn(1, per=head)*shared(2)",
        {"auto": [S, S, Alias(1), Alias(1)], "none": [S, S, Alias(1), Alias(1)], "all": [V0, S, Alias(1), Alias(1)]},
    ),
    "raw and finished of one layer differ": (
        "v[1] = own + 0.5*tap(0); v[2] = tap(1); v[3] = shared(1)",
        {"auto": [S, S, S, Alias(1)], "none": [S, S, S, Alias(1)], "all": [V0, S, S, Alias(1)]},
    ),
    "two readers of one raw value": (
        "v[1] = own + 0.5*tap(0); v[2] = 3*tap(1); v[3] = learn(1)*tap(1)",
        {"auto": [S, S, S, Alias(2)], "none": [S, S, S, Alias(2)], "all": [V0, S, S, Alias(2)]},
    ),
    "a raw value with an outside weight in its own layer": (
        "v[1] = learn(2)*own; v[2] = tap(1); v[3] = shared(1)",
        {"auto": [S, S, Alias(1), Alias(1)], "none": [S, S, Alias(1), Alias(1)], "all": [V0, S, Alias(1), Alias(1)]},
    ),
    "rescaled in layer 0": (
        "v[0] = renorm(own + table); v[1:] = shared(0)",
        {"auto": [Tokens(Finished(0))] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [Tokens(Finished(0))] * 4},
    ),
    "rescaled over the whole tensor": (
        "v[0] = renorm(own + table, axis=tensor); v[1:] = shared(0)",
        {fold: [S, Alias(0), Alias(0), Alias(0)] for fold in ("auto", "none", "all")},
    ),
    "rescaled later": ("v[1:] = renorm(0.5*own + 0.5*tap(0), axis=head)", {"auto": [S] * 4, "none": [S] * 4, "all": [V0, S, S, S]}),
    "the state before layer 0 is changed": (
        "x[0] = 2*own; v[1:] = tap(0)",
        {fold: [S, Alias(0), Alias(0), Alias(0)] for fold in ("auto", "none", "all")},
    ),
    "the state before layer 0 is changed, but x0 is not": (
        "x[0] = learn(1)*own; v[1:] = embed",
        {"auto": [S, *[Tokens(Embedded(n)) for n in (1, 2, 3)]], "none": [S] * 4, "all": [S, *[Tokens(Embedded(n)) for n in (1, 2, 3)]]},
    ),
    "the state before later layers is changed": (
        "x[1:] = own + tap(0); v[1:] = tap(0)",
        {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4},
    ),
    "what is added after attention changes nothing": (
        "out[1:] = 0.4*tap(v, 0) - 0.4*own(v)",
        {"auto": [S] * 4, "none": [S] * 4, "all": [V0, S, S, S]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "fold", "expected"),
    [(text, fold, expected) for text, cases in VALUES.values() for fold, expected in cases.items()],
    ids=[f"{name}, fold {fold}" for name, (_, cases) in VALUES.items() for fold in cases],
)
def test_where_values_live(text, fold, expected):
    assert values(plan(text, 4, fold)) == expected


def test_folding_names_each_table_once_in_order():
    made = plan("v[1] = tap(0); v[2] = table; v[3] = learn(1)*shared(2); v[4] = table(shared); v[5] = embed; v[6] = tap(0)", 7)
    assert made.tables == (Projected(0), Rows(2), Rows(None), Embedded(5))
    assert made.folds
    assert not plan("", 3).folds
    assert plan("", 3).tables == ()


def test_a_lone_source_keeps_its_weights_outside_and_a_chain_collects_them():
    made = plan("v[0] = own; v[1] = 2*tap(0); v[2] = shared(1); v[3] = learn(1)*shared(2); v[4] = own + tap(0); v[5] = -shared(4)", 6)
    assert [layer.v_core for layer in made.layers] == [Projected(0)] * 4 + [Finished(4)] * 2
    assert [layer.v_scale for layer in made.layers] == [(), (1,), (1,), (3, 1), (), (5,)]


def test_a_tap_leaves_out_the_weight_that_its_layer_puts_on_it():
    made = plan("v[1] = 2*own; v[2] = 3*tap(1); v[3] = 3*shared(1)", 4)
    assert [layer.v_core for layer in made.layers] == [Projected(0), Projected(1), Projected(1), Projected(1)]
    assert [layer.v_scale for layer in made.layers] == [(), (1,), (2,), (3, 1)]


def test_a_learned_weight_of_1_is_still_a_weight():
    assert [layer.v_scale for layer in plan("v[1] = 1*tap(0); v[2] = learn(1)*tap(0)", 3).layers] == [(), (), (2,)]


# --------------------------------------------------------------------------------------------------- where keys live
KEYS: dict[str, tuple[str, str | None, list[Residency], list[tuple[int, ...]]]] = {
    # equation for 4 layers, qk_norm, residency, layers whose weight multiplies outside
    "ordinary": ("", None, [S, S, S, S], [()] * 4),
    "of the layer before": ("k[1::2] = shared(n-1)", None, [S, Alias(0), S, Alias(2)], [()] * 4),
    "of the layer before, normed with gain": ("k[1::2] = shared(n-1)", "gain", [S, Alias(0), S, Alias(2)], [()] * 4),
    "a chain": ("k[1:] = shared(n-1)", None, [S, Alias(0), Alias(0), Alias(0)], [()] * 4),
    "a chain of weights": ("k[1] = 2*shared(0); k[2] = shared(1); k[3] = learn(1)*shared(2)", None, [S, Alias(0), Alias(0), Alias(0)], [(), (1,), (1,), (3, 1)]),
    "a raw key is finished the same way": ("k[1:] = tap(0)", None, [S, Alias(0), Alias(0), Alias(0)], [()] * 4),
    "so it is under a norm without gain": ("k[1:] = tap(0)", "plain", [S, Alias(0), Alias(0), Alias(0)], [()] * 4),
    "each layer's gain makes another key of it": ("k[1:] = tap(0)", "gain", [S, S, S, S], [()] * 4),
    "a finished key under such a norm can be read": ("k[1] = tap(0); k[2:] = shared(1)", "gain", [S, S, Alias(1), Alias(1)], [()] * 4),
    "a weight before the norm makes another key": ("k[1:] = 2*tap(0)", None, [S, S, S, S], [()] * 4),
    "a mix": ("k[1:] = 0.5*own + 0.5*tap(0)", None, [S, S, S, S], [()] * 4),
    "a mix read by others": ("k[1] = own + tap(0); k[2:] = 2*shared(1)", None, [S, S, Alias(1), Alias(1)], [(), (), (2,), (3,)]),
    "the raw key of a layer that mixes": ("k[1] = own + tap(0); k[2:] = tap(1)", None, [S, S, S, S], [()] * 4),
    "a sum of finished keys": ("k[2] = shared(0) + shared(1)", None, [S, S, S, S], [()] * 4),
    "a gate varies with the position": ("k[1:] = gate(1, 7)*shared(0)", None, [S, S, S, S], [()] * 4),
}  # fmt: skip


@pytest.mark.parametrize(("text", "qk_norm", "expected", "scales"), KEYS.values(), ids=KEYS)
def test_where_keys_live(text, qk_norm, expected, scales):
    made = plan(text, 4, qk_norm=qk_norm)
    assert keys(made) == expected
    assert [layer.k_core for layer in made.layers] == [at.layer if isinstance(at, Alias) else n for n, at in enumerate(expected)]
    assert [layer.k_scale for layer in made.layers] == scales


def test_keys_are_never_folded():
    assert keys(plan("k[1:] = tap(0); v = table", 3, "all")) == [S, Alias(0), Alias(0)]


# -------------------------------------------------------------------------------------------- windows and who reads what
def test_a_buffer_keeps_the_longest_window_of_its_readers():
    made = plan("kv[1] = shared(0); v[3] = tap(2)", 4, "none", windows=(3, 7, 5, None))
    assert made.key_windows == {0: 7, 2: 5, 3: None}
    assert made.value_windows == {0: 7, 2: None}
    assert [layer.window for layer in made.layers] == [3, 7, 5, None]


def test_a_short_reader_does_not_shorten_a_buffer():
    made = plan("kv[1:] = shared(0)", 3, "none", windows=(None, 3, 5))
    assert made.key_windows == made.value_windows == {0: None}


def test_ids_are_kept_for_the_longest_window_of_a_layer_that_reads_them():
    made = plan("v[1] = tap(0); v[2] = table", 4, windows=(3, 7, 5, None))
    assert made.id_window == 7
    assert made.value_windows == {3: None}
    assert plan("v[3] = table", 4, windows=(3, 7, 5, None)).id_window is None
    assert plan("", 2, windows=(3, 5)).id_window is None
    assert plan("", 2, "all", windows=(3, 5)).id_window == 3


def test_concatenated_buffers_are_kept_for_the_reader_too():
    made = plan("kv[2:] = concat(own, shared(0))", 4, "none", windows=(3, 5, 7, 2))
    assert made.key_windows == made.value_windows == {0: 7, 1: 5, 2: 7, 3: 2}
    assert [[read.layer for read in made.readers(layer)] for layer in made.layers] == [[0], [1], [2, 0], [3, 0]]
    assert keys(made) == values(made) == [S] * 4


def test_concatenation_reads_through_an_alias_to_the_buffer():
    made = plan("kv[1] = shared(0); kv[2] = concat(own, shared(1))", 3, "none", windows=(3, 5, 11))
    assert keys(made) == values(made) == [S, Alias(0), S]
    assert made.key_windows == made.value_windows == {0: 11, 2: 11}


def test_concatenation_with_a_layer_that_keeps_ids():
    made = plan("v[1] = table; kv[2] = concat(own, shared(1))", 3, windows=(3, 5, 11))
    assert values(made) == [S, Tokens(Rows(1)), S]
    assert made.key_windows == {0: 3, 1: 11, 2: 11}
    assert made.value_windows == {0: 3, 2: 11}
    assert made.id_window == 11


# ---------------------------------------------------------------------------------------- what layers hand to each other
def items(*found: str) -> set[Item]:
    parts = [name.split() for name in found]
    return {Item(kind, stream, int(layer)) for kind, stream, layer in parts}  # type: ignore[arg-type]


HANDED = {
    # equation for 4 layers -> what each layer receives
    "nothing": ("v[2:] = table", [set()] * 4),
    "raw values": ("v[1:] = own + tap(0)", [set(), items("tap v 0"), items("tap v 0"), items("tap v 0")]),
    "raw values of all": (
        "v[1:] = own + sum(tap(i) for i in range(n))",
        [set(), items("tap v 0"), items("tap v 0", "tap v 1"), items("tap v 0", "tap v 1", "tap v 2")],
    ),
    "finished keys and values": ("kv[1::2] = shared(n-1)", [set(), items("shared k 0", "shared v 0"), set(), items("shared k 2", "shared v 2")]),
    "finished values with the weight outside": (
        "v[1] = 2*own; v[2] = shared(1); v[3] = own + shared(2)",
        [set(), set(), items("shared v 1", "scale v 1"), items("shared v 2", "scale v 2")],
    ),
    "finished keys with the weight outside": (
        "k[1] = 2*shared(0); k[2] = shared(1)",
        [set(), items("shared k 0"), items("shared k 1", "scale k 1"), set()],
    ),
    "a mix has its weights inside": ("v[1] = 2*own + tap(0); v[2] = 2*shared(1)", [set(), items("tap v 0"), items("shared v 1"), set()]),
    "concatenated": (
        "v[1] = 2*own; kv[2] = concat(own, shared(1), shared(0))",
        [set(), set(), items("shared k 1", "shared v 1", "scale v 1", "shared k 0", "shared v 0"), set()],
    ),
    "queries and attention": (
        "q[1] = shared(0); q[2] = own + tap(0); a[3] = own + tap(1) + shared(2)",
        [set(), items("shared q 0"), items("tap q 0"), items("tap a 1", "shared a 2")],
    ),
    "states": ("x[2] = own + tap(0)", [set(), set(), items("tap x 0"), set()]),
    "after attention": ("out[2:] = tap(v, 1)", [set(), set(), items("tap v 1"), items("tap v 1")]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HANDED.values(), ids=HANDED)
def test_what_a_layer_receives_is_what_earlier_ones_provide(text, expected):
    made = plan(text, 4)
    assert [set(layer.receives) for layer in made.layers] == expected
    for layer in made.layers:
        assert len(set(layer.receives)) == len(layer.receives)
        wanted = {item for received in expected for item in received if item.layer == layer.layer and item.stream != "x"}
        assert set(layer.provides) == wanted


# -------------------------------------------------------------------------------------------------------- parameters
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
        "v[1] = learn(0.5)*own + learn(0.1, per=head)*tap(0) + learn(0.2, per=channel)*table + 2*embed + gate(3, 7)*table(shared)"
        " - budget(N)*shared(0)\n"
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
        "embed_tokens": ("embedding", 0), "input_layernorm": ("norm", 0), "post_attention_layernorm": ("norm", 0), "norm": ("norm", 0),
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


# --------------------------------------------------------------------------------------------- what a plan refuses
def test_attention_of_unequal_windows_cannot_be_mixed():
    with pytest.raises(WiringError) as caught:
        plan("a[1:] = 0.5*own + 0.5*tap(0)", 3, windows=(5, 5, None))
    assert (caught.value.stream, caught.value.layer) == ("a", 2)
    assert "layer 2 attends to all positions and layer 0 to 5 positions" in str(caught.value)
    with pytest.raises(WiringError, match="unequal windows"):
        plan("a[2] = shared(1)", 3, windows=(None, 3, 5))
    made = plan("a[2] = 0.5*own + 0.5*tap(0)", 3, windows=(5, None, 5))
    assert made.needs_attention_matrix
    assert not plan("v[1:] = tap(0)", 3).needs_attention_matrix


def test_attention_over_concatenated_keys_cannot_be_mixed_into_another_layer():
    with pytest.raises(WiringError, match="concatenated keys") as caught:
        plan("kv[1] = concat(own, shared(0)); a[2] = own + tap(1)", 3)
    assert (caught.value.stream, caught.value.layer) == ("a", 2)


def test_a_gate_reads_no_more_channels_than_there_are():
    plan("v[1:] = own + gate(3, 11)*table", 3)
    for text in ("v[1:] = own + gate(3, 12)*table", "out[1] = gate(3, 12)*tap(v, 0)", "q[1] = gate(3, 12)*own"):
        with pytest.raises(WiringError) as caught:
            plan(text, 3)
        assert "12 channels, but the attention input has 11" in str(caught.value)
        assert caught.value.layer == 1


def test_another_number_of_layers_or_an_unknown_fold_is_refused():
    with pytest.raises(ValueError, match="the wiring has 3 layers, the shape 4"):
        make_plan(parse("", 3), shape(4))
    with pytest.raises(ValueError, match="fold='some': expected 'auto', 'none' or 'all'"):
        plan("", 3, "some")


def test_no_text_is_generated_where_the_norm_includes_later_tokens():
    refusal = plan("v[2:] = renorm(own + tap(0), axis=tensor)", 4).generation_refusal
    assert refusal is not None
    assert "v[2]" in refusal
    assert "axis=token or axis=head" in refusal
    for axis in ("token", "head"):
        assert plan(f"v[2:] = renorm(own + tap(0), axis={axis})", 4).generation_refusal is None
    assert plan("", 4).generation_refusal is None


def test_plans_of_equal_wirings_and_shapes_are_equal():
    text = "v[1:] = learn(1)*own + gate(3, 5)*table"
    assert plan(text, 3).layers == plan(text, 3).layers
    assert hash(shape(3)) == hash(shape(3))

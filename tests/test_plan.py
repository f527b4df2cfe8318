"""The plan: where keys and values live, and who reads whose buffer; expectations written by hand.

Which parameters exist is tested in ``test_plan_parameters``, that all of it holds for any wiring in ``test_plan_properties``.
"""

from __future__ import annotations

import pytest

from plans import plan, shape
from valuepath.equations import parse
from valuepath.plan import (
    Alias,
    Embedded,
    Finished,
    FirstInput,
    Item,
    NormedEmbedding,
    Plan,
    Projected,
    Residency,
    Rows,
    Store,
    Tokens,
    make_plan,
)
from valuepath.wiring import WiringError

S = Store()
V0 = Tokens(Projected(0))


def values(made: Plan) -> list[Residency]:
    return [layer.v for layer in made.layers]


def keys(made: Plan) -> list[Residency]:
    return [layer.k for layer in made.layers]


# ------------------------------------------------------------------------------------------------ where values live
VALUES: dict[str, tuple[str, dict[str, list[Residency]]]] = {
    # equation for 4 layers -> fold -> residency of the values
    "ordinary": ("", {"auto": [S, S, S, S], "none": [S, S, S, S], "all": [V0, S, S, S]}),
    "first value mixed in": (
        "v[1:] = 0.5*own + 0.5*tap(0)",
        {"auto": [S, S, S, S], "none": [S, S, S, S], "all": [V0, S, S, S]},
    ),
    "first value only": ("v[1:] = tap(0)", {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4}),
    "first value only, weighted": (
        "v[1] = 2*tap(0); v[2] = learn(1, per=channel)*tap(0); v[3] = budget(2)*tap(0)",
        {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4},
    ),
    "first value, shared as it is": (
        "v[1:] = shared(0)",
        {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4},
    ),
    "first value in the last layers": (
        "v[2:] = tap(0)",
        {"auto": [V0, S, V0, V0], "none": [S, S, Alias(0), Alias(0)], "all": [V0, S, V0, V0]},
    ),
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
        {
            "auto": [S, S, Tokens(Embedded(2)), Tokens(Embedded(3))],
            "none": [S, S, S, S],
            "all": [V0, S, Tokens(Embedded(2)), Tokens(Embedded(3))],
        },
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
        {
            "auto": [V0, S, Tokens(Finished(2)), Tokens(Finished(3))],
            "none": [S, S, S, S],
            "all": [V0, S, Tokens(Finished(2)), Tokens(Finished(3))],
        },
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
    "rescaled later": (
        "v[1:] = renorm(0.5*own + 0.5*tap(0), axis=head)",
        {"auto": [S] * 4, "none": [S] * 4, "all": [V0, S, S, S]},
    ),
    "the state before layer 0 is changed": (
        "x[0] = 2*own; v[1:] = tap(0)",
        {fold: [S, Alias(0), Alias(0), Alias(0)] for fold in ("auto", "none", "all")},
    ),
    "the state before layer 0 is changed, but x0 is not": (
        "x[0] = learn(1)*own; v[1:] = embed",
        {
            "auto": [S, *[Tokens(Embedded(n)) for n in (1, 2, 3)]],
            "none": [S] * 4,
            "all": [S, *[Tokens(Embedded(n)) for n in (1, 2, 3)]],
        },
    ),
    "the state before later layers is changed": (
        "x[1:] = own + tap(0); v[1:] = tap(0)",
        {"auto": [V0] * 4, "none": [S, Alias(0), Alias(0), Alias(0)], "all": [V0] * 4},
    ),
    "what is added after attention changes nothing": (
        "out[1:] = 0.4*tap(v, 0) - 0.4*own(v)",
        {"auto": [S] * 4, "none": [S] * 4, "all": [V0, S, S, S]},
    ),
}


@pytest.mark.parametrize(
    ("text", "fold", "expected"),
    [(text, fold, expected) for text, cases in VALUES.values() for fold, expected in cases.items()],
    ids=[f"{name}, fold {fold}" for name, (_, cases) in VALUES.items() for fold in cases],
)
def test_where_values_live(text, fold, expected):
    assert values(plan(text, 4, fold)) == expected


@pytest.mark.parametrize("text", [text for text, _ in VALUES.values()], ids=VALUES)
def test_factored_values_live_where_folded_ones_do(text):
    folded, factored = plan(text, 4, "auto"), plan(text, 4, "factored")
    assert values(factored) == values(folded)
    assert factored.tables == tuple(core for core in folded.tables if isinstance(core, Rows))
    assert folded.contents == {core: (core,) for core in folded.tables}


def test_what_is_summed_before_the_projection():
    text = "v[1] = tap(0); v[2] = table; v[3] = 2*shared(1) + embed; v[4] = learn(1)*shared(3) + table(shared); v[5] = embed"
    made = plan(text + "; v[6] = 0.5*tap(0) + shared(4)", 7, "factored")
    first, x0 = FirstInput(), NormedEmbedding()
    assert made.contents == {
        Projected(0): (first,),
        Rows(2): (Rows(2),),
        Finished(3): (first, x0),
        Finished(4): (first, x0, Rows(None)),
        Embedded(5): (x0,),
        Finished(6): (first, x0, Rows(None)),
    }
    assert made.row_widths == {first: 11, Rows(2): 15, x0: 11, Rows(None): 15}
    rescaled = plan("v[0] = renorm(own + table); v[1:] = shared(0)", 3, "factored")
    assert rescaled.contents == {Finished(0): (Finished(0),)}  # no weighted sum: its values are held


def test_folding_names_each_table_once_in_order():
    made = plan("v[1] = tap(0); v[2] = table; v[3] = learn(1)*shared(2); v[4] = table(shared); v[5] = embed; v[6] = tap(0)", 7)
    assert made.tables == (Projected(0), Rows(2), Rows(None), Embedded(5))
    assert made.folds
    assert not plan("", 3).folds
    assert plan("", 3).tables == ()


def test_a_lone_source_keeps_its_weights_outside_and_a_chain_collects_them():
    made = plan(
        "v[0] = own; v[1] = 2*tap(0); v[2] = shared(1); v[3] = learn(1)*shared(2); v[4] = own + tap(0); v[5] = -shared(4)", 6
    )
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
    "a chain of weights": (
        "k[1] = 2*shared(0); k[2] = shared(1); k[3] = learn(1)*shared(2)",
        None,
        [S, Alias(0), Alias(0), Alias(0)],
        [(), (1,), (1,), (3, 1)],
    ),
    "a raw key is finished the same way": ("k[1:] = tap(0)", None, [S, Alias(0), Alias(0), Alias(0)], [()] * 4),
    "so it is under a norm without gain": ("k[1:] = tap(0)", "plain", [S, Alias(0), Alias(0), Alias(0)], [()] * 4),
    "each layer's gain makes another key of it": ("k[1:] = tap(0)", "gain", [S, S, S, S], [()] * 4),
    "a finished key under such a norm can be read": (
        "k[1] = tap(0); k[2:] = shared(1)",
        "gain",
        [S, S, Alias(1), Alias(1)],
        [()] * 4,
    ),
    "a weight before the norm makes another key": ("k[1:] = 2*tap(0)", None, [S, S, S, S], [()] * 4),
    "a mix": ("k[1:] = 0.5*own + 0.5*tap(0)", None, [S, S, S, S], [()] * 4),
    "a mix read by others": (
        "k[1] = own + tap(0); k[2:] = 2*shared(1)",
        None,
        [S, S, Alias(1), Alias(1)],
        [(), (), (2,), (3,)],
    ),
    "the raw key of a layer that mixes": ("k[1] = own + tap(0); k[2:] = tap(1)", None, [S, S, S, S], [()] * 4),
    "a sum of finished keys": ("k[2] = shared(0) + shared(1)", None, [S, S, S, S], [()] * 4),
    "a gate varies with the position": ("k[1:] = gate(1, 7)*shared(0)", None, [S, S, S, S], [()] * 4),
}


@pytest.mark.parametrize(("text", "qk_norm", "expected", "scales"), KEYS.values(), ids=KEYS)
def test_where_keys_live(text, qk_norm, expected, scales):
    made = plan(text, 4, qk_norm=qk_norm)
    assert keys(made) == expected
    assert [layer.k_core for layer in made.layers] == [
        at.layer if isinstance(at, Alias) else n for n, at in enumerate(expected)
    ]
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
    "finished keys and values": (
        "kv[1::2] = shared(n-1)",
        [set(), items("shared k 0", "shared v 0"), set(), items("shared k 2", "shared v 2")],
    ),
    "finished values with the weight outside": (
        "v[1] = 2*own; v[2] = shared(1); v[3] = own + shared(2)",
        [set(), set(), items("shared v 1", "scale v 1"), items("shared v 2", "scale v 2")],
    ),
    "finished keys with the weight outside": (
        "k[1] = 2*shared(0); k[2] = shared(1)",
        [set(), items("shared k 0"), items("shared k 1", "scale k 1"), set()],
    ),
    "a mix has its weights inside": (
        "v[1] = 2*own + tap(0); v[2] = 2*shared(1)",
        [set(), items("tap v 0"), items("shared v 1"), set()],
    ),
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
}


@pytest.mark.parametrize(("text", "expected"), HANDED.values(), ids=HANDED)
def test_what_a_layer_receives_is_what_earlier_ones_provide(text, expected):
    made = plan(text, 4)
    assert [set(layer.receives) for layer in made.layers] == expected
    for layer in made.layers:
        assert len(set(layer.receives)) == len(layer.receives)
        wanted = {item for received in expected for item in received if item.layer == layer.layer and item.stream != "x"}
        assert set(layer.provides) == wanted


# --------------------------------------------------------------------------------------------- what a plan refuses
def test_attention_of_unequal_windows_cannot_be_mixed():
    with pytest.raises(WiringError) as caught:
        plan("a[1:] = 0.5*own + 0.5*tap(0)", 3, windows=(5, 5, None))
    assert (caught.value.stream, caught.value.layer) == ("a", 2)
    assert "layer 2 attends to all positions and layer 0 to 5 positions" in str(caught.value)
    with pytest.raises(WiringError, match="unequal windows"):
        plan("a[2] = own + shared(1)", 3, windows=(None, 3, 5))
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
    with pytest.raises(ValueError, match="fold='some': expected 'auto', 'none', 'all', 'factored'"):
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

"""Presets: each is the wiring that its paper describes, written here by hand with the data classes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from valuepath.equations import parse
from valuepath.plan import Shape, make_plan
from valuepath.variants import Preset, VariantError, preset, variants
from valuepath.wiring import (
    NOTHING,
    OWN,
    Budget,
    Embed,
    Final,
    Fixed,
    Gate,
    LayerWiring,
    Learn,
    Mix,
    Own,
    Shared,
    Source,
    Table,
    Tap,
    Term,
    Weight,
    Wiring,
    WiringError,
)

# fmt: off
NAMES = [
    "transformer", "resformer_identity", "resformer_constant", "resformer_learnable", "resformer_plus", "resformer_sparse",
    "resformer_dense", "resformer_identity_rescaled", "neutreno", "denseformer", "svformer", "v1_last_third", "cla2",
    "x0wv_last_third", "bov", "v_plus_x0wv", "v_plus_v1", "v_last_third", "v1_every2", "x0wv_every2", "v_plus_table",
    "v_plus_table_gated", "shared_table", "table_fixed_scale", "table_all", "query_residual", "key_residual",
    "attention_residual", "v1_identity_mapping", "v1_cross_layer_attention", "hidden_skip", "hidden_from_h1",
    "hidden_from_h2", "hidden_from_h3",
]
# fmt: on
DEPTHS = (2, 3, 5, 6, 8, 24)
FEWEST = {"hidden_from_h2": 3, "hidden_from_h3": 4}
"""Layers that a preset needs, if more than 2: one has to keep its skip."""


def wired(name: str, num_layers: int, **options: Any) -> Wiring:
    return parse(preset(name).equation(num_layers, **options), num_layers)


def mix(*terms: tuple[float | Weight, Source], renorm: Any = None) -> Mix:
    """A sum of (weight, source); a bare number is a fixed weight."""
    made = (Term(source, Fixed(weight) if isinstance(weight, int | float) else weight) for weight, source in terms)
    return Mix(tuple(made), renorm)


def values(num_layers: int, layers: list[int], value: Callable[[int], Mix] | Mix) -> Wiring:
    """An ordinary Transformer but for the values of ``layers``."""
    read = value if callable(value) else lambda n: value
    return Wiring(tuple(LayerWiring(v=read(n)) if n in layers else LayerWiring() for n in range(num_layers)))


def later(num_layers: int, layer: Callable[[int], LayerWiring] | LayerWiring) -> Wiring:
    """Layer 0 of an ordinary Transformer, then the given ones."""
    make = layer if callable(layer) else lambda n: layer
    return Wiring((LayerWiring(), *(make(n) for n in range(1, num_layers))))


HALF = mix((0.5, Own()), (0.5, Tap(0)))
LEARNED_HALF = mix((Learn(0.5), Own()), (Learn(0.5), Tap(0)))


# --------------------------------------------------------------------------------------------------------- all presets
def test_there_is_a_preset_for_every_name_and_no_other():
    assert sorted(variants()) == sorted(NAMES)
    assert all(name == one.name for name, one in variants().items())


@pytest.mark.parametrize("num_layers", DEPTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_preset_is_a_model_at_every_depth_or_says_how_many_layers_it_needs(name: str, num_layers: int):
    fewest = FEWEST.get(name, 2)
    if num_layers < fewest:
        with pytest.raises(VariantError, match=f"'{name}': needs at least {fewest} layers"):
            preset(name).equation(num_layers)
        return
    wiring = wired(name, num_layers)
    assert wiring.num_layers == num_layers
    assert (wiring == Wiring((LayerWiring(),) * num_layers)) == (name == "transformer")
    shape = Shape(26, 34, 4, 2, 6, 31, (None,) * num_layers)
    assert make_plan(wiring, shape).num_layers == num_layers


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_names_its_paper_and_explains_its_options(name: str):
    one = preset(name)
    assert "arXiv " in one.paper
    assert one.location
    assert one.summary
    assert one.meanings.keys() == one.options.keys()
    for text in (one.paper, one.location, one.summary, *one.meanings.values()):
        assert "\n" not in text
    assert json.loads(json.dumps(dict(one.options))) == dict(one.options)  # a config is stored as JSON


@pytest.mark.parametrize("name", NAMES)
def test_defaults_said_aloud_change_nothing(name: str):
    assert preset(name).equation(6, **preset(name).options) == preset(name).equation(6)


OTHER_VALUES: dict[str, list[Any]] = {
    "layers": [[2, 4]],
    "source": [1],
    "learned": [True, False],
    "per": ["channel"],
    "init": ["uniform", "projected"],
    "axis": ["head"],
    "history": ["mixed"],
    "share": ["k"],
    "combine": ["resformer_constant"],
    "mlp_skip": [False],
    "period": [2],
    "dilation": [3],
    "channels": [7],
}
"""Another value of each option; every option that is not named here is a number."""


@pytest.mark.parametrize("name, option", [(name, option) for name in NAMES for option in preset(name).options])
def test_every_option_changes_the_wiring(name: str, option: str):
    one, beside = preset(name), {}
    if option in ("layers", "first", "own") and "mlp_skip" in one.options:
        beside = {"source": 1}  # without a source, nothing is received
    if option == "per" and not one.options.get("learned", True):
        beside = {"learned": True}
    before = wired(name, 6, **beside)
    for value in OTHER_VALUES.get(option, [0.75]):
        if value != one.options[option]:
            assert wired(name, 6, **{**beside, option: value}) != before


def test_the_mapping_and_its_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        variants()["bov"] = preset("transformer")  # type: ignore[index]
    with pytest.raises(TypeError):
        preset("bov").options["scale"] = 2.0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("bov").name = "other"  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------- wirings written by hand
def test_transformer():
    assert wired("transformer", 3) == Wiring((LayerWiring(), LayerWiring(), LayerWiring()))


def test_resformer_identity_mixes_half_and_half_on_every_layer_after_the_first():
    assert wired("resformer_identity", 5) == values(5, [1, 2, 3, 4], HALF)


def test_resformer_identity_with_one_source_and_one_receiving_layer():
    assert wired("resformer_identity", 5, source=2) == values(5, [3, 4], mix((0.5, Own()), (0.5, Tap(2))))
    assert wired("resformer_identity", 8, layers=[6]) == values(8, [6], HALF)
    assert wired("resformer_identity", 8, layers=6) == values(8, [6], HALF)


def test_resformer_constant():
    assert wired("resformer_constant", 5) == values(5, [1, 2, 3, 4], mix((1, Own()), (2, Tap(0))))


def test_resformer_learnable():
    assert wired("resformer_learnable", 5) == values(5, [1, 2, 3, 4], LEARNED_HALF)
    per_head = mix((Learn(1.0, "head"), Own()), (Learn(0.0, "head"), Tap(0)))
    assert wired("resformer_learnable", 5, first=0, own=1, per="head") == values(5, [1, 2, 3, 4], per_head)


def test_resformer_plus_shares_one_budget_of_all_layers():
    assert wired("resformer_plus", 5) == values(5, [1, 2, 3, 4], mix((Learn(0.5), Own()), (Budget(5.0), Tap(0))))
    assert wired("resformer_plus", 5, total=3.0) == values(5, [1, 2, 3, 4], mix((Learn(0.5), Own()), (Budget(3.0), Tap(0))))


def test_resformer_sparse_is_on_the_deep_layers():
    assert wired("resformer_sparse", 8, layers=[5, 6, 7], first=5.0) == values(8, [5, 6, 7], mix((1, Own()), (5, Tap(0))))
    assert wired("resformer_sparse", 8) == wired("resformer_sparse", 8, layers=[5, 6, 7], first=5.0)
    assert wired("resformer_sparse", 8, layers=[1, 2], first=1, own=0) == values(8, [1, 2], mix((1, Tap(0))))


@pytest.mark.parametrize("history, source", [("raw", Tap), ("mixed", Shared)])
def test_resformer_dense_reads_every_earlier_layer(history: str, source: type):
    def dense(n: int) -> Mix:
        return mix((Learn(1.0), Own()), *((Learn(0.0), source(i)) for i in range(n)))

    assert wired("resformer_dense", 4, history=history) == values(4, [1, 2, 3], dense)


@pytest.mark.parametrize("axis", ["token", "head", "tensor"])
def test_resformer_identity_rescaled(axis: str):
    expected = mix((0.5, Own()), (0.5, Tap(0)), renorm=axis)
    assert wired("resformer_identity_rescaled", 5, axis=axis) == values(5, [1, 2, 3, 4], expected)


def test_neutreno_adds_the_difference_after_attention():
    assert wired("neutreno", 4) == later(4, LayerWiring(out=mix((0.4, Tap(0)), (-0.4, Own()))))


def test_neutreno_combined_subtracts_the_mixed_value():
    expected = later(4, LayerWiring(v=HALF, out=mix((0.2, Tap(0)), (-0.2, Final()))))
    assert wired("neutreno", 4, combine="resformer_identity") == expected
    expected = later(4, LayerWiring(v=LEARNED_HALF, out=mix((0.3, Tap(0)), (-0.3, Final()))))
    assert wired("neutreno", 4, combine="resformer_learnable", weight=0.3) == expected


def averaged(num_layers: int, sites: dict[int, list[int]]) -> Wiring:
    """Site n of the residual stream is a learned average of itself and the states listed for it."""
    mixes = {n: mix((Learn(1.0), Own()), *((Learn(0.0), Tap(i)) for i in earlier)) for n, earlier in sites.items()}
    layers = tuple(LayerWiring(x=mixes.get(n, OWN)) for n in range(num_layers))
    return Wiring(layers, mixes.get(num_layers, OWN))


def test_denseformer_averages_after_every_block_and_before_the_final_norm():
    assert wired("denseformer", 3) == averaged(3, {1: [0], 2: [0, 1], 3: [0, 1, 2]})


def test_denseformer_with_dilation_and_period():
    assert wired("denseformer", 5, dilation=2) == averaged(5, {1: [], 2: [0], 3: [1], 4: [0, 2], 5: [1, 3]})
    assert wired("denseformer", 5, period=2) == averaged(5, {2: [0, 1], 4: [0, 1, 2, 3]})
    assert wired("denseformer", 6, dilation=4, period=3) == averaged(6, {3: [], 6: [2]})


@pytest.mark.parametrize("num_layers, dilation, period", [(7, 1, 1), (7, 2, 3), (8, 3, 2), (12, 4, 5), (24, 4, 5)])
def test_denseformer_has_as_many_coefficients_as_the_authors_code(num_layers: int, dilation: int, period: int):
    """There, the average after block i has (i + 1 + dilation) // dilation coefficients, for (i + 1) % period == 0."""
    wiring = wired("denseformer", num_layers, dilation=dilation, period=period)
    found = [len(wiring.x_site(n).terms) if wiring.x_site(n) != OWN else 0 for n in range(1, num_layers + 1)]
    assert found == [(i + 1 + dilation) // dilation if (i + 1) % period == 0 else 0 for i in range(num_layers)]


def test_svformer():
    assert wired("svformer", 4) == values(4, [1, 2, 3], mix((1, Tap(0))))


@pytest.mark.parametrize("num_layers, odd", [(2, [1]), (5, [1, 3]), (6, [1, 3, 5])])
def test_cla2_shares_finished_keys_and_values_by_pairs(num_layers: int, odd: list[int]):
    def pair(n: int, share: str) -> LayerWiring:
        before = mix((1, Shared(n - 1)))
        return LayerWiring(**dict.fromkeys(share, before)) if n in odd else LayerWiring()

    for share in ("kv", "k", "v"):
        assert wired("cla2", num_layers, share=share) == later(num_layers, lambda n, share=share: pair(n, share))


@pytest.mark.parametrize("name, stream", [("query_residual", "q"), ("key_residual", "k"), ("attention_residual", "a")])
def test_residuals_in_other_places_than_the_value(name: str, stream: str):
    assert wired(name, 4) == later(4, LayerWiring(**{stream: HALF}))
    assert wired(name, 4, layers=[2], first=0.25, own=0.75).layers[2] == LayerWiring(
        **{stream: mix((0.75, Own()), (0.25, Tap(0)))}
    )


def test_v1_identity_mapping_adds_the_first_value_beside_attention():
    assert wired("v1_identity_mapping", 3) == later(3, LayerWiring(v=mix((0.5, Own())), out=mix((0.5, Tap(0)))))


def test_v1_cross_layer_attention_concatenates_the_first_layers_keys_and_values():
    assert wired("v1_cross_layer_attention", 3) == later(3, LayerWiring(kv=(0,)))
    assert wired("v1_cross_layer_attention", 4, source=1).layers == (
        LayerWiring(),
        LayerWiring(),
        LayerWiring(kv=(1,)),
        LayerWiring(kv=(1,)),
    )


def test_hidden_skip_leaves_the_final_norms_input_alone():
    assert wired("hidden_skip", 4) == later(4, LayerWiring(x=LEARNED_HALF))
    assert wired("hidden_skip", 4).final_x == OWN
    only_last = Wiring((*(LayerWiring(),) * 3, LayerWiring(x=LEARNED_HALF)))
    assert wired("hidden_skip", 4, layers=[-1]) == only_last  # -1 is the last layer, not the final norm's site
    init_0_1 = mix((Learn(1.0), Own()), (Learn(0.0), Tap(0)))
    assert wired("hidden_skip", 4, layers="2::2", first=0.0, own=1.0).layers[2].x == init_0_1


@pytest.mark.parametrize("k", [1, 2, 3])
def test_hidden_from_hk_cuts_the_skip_around_attention_in_the_first_k_layers(k: int):
    cut = Wiring((*(LayerWiring(skip_attn=Fixed(0.0)),) * k, *(LayerWiring(),) * (5 - k)))
    assert wired(f"hidden_from_h{k}", 5) == cut
    both = Wiring((*(LayerWiring(skip_attn=Fixed(0.0), skip_mlp=Fixed(0.0)),) * k, *(LayerWiring(),) * (5 - k)))
    assert wired(f"hidden_from_h{k}", 5, mlp_skip=False) == both


def test_hidden_from_h2_with_a_value_source_that_the_layers_after_it_receive():
    received = mix((0.5, Own()), (0.5, Tap(1)))
    assert wired("hidden_from_h2", 4, source=1) == Wiring(
        (
            LayerWiring(skip_attn=Fixed(0.0)),
            LayerWiring(skip_attn=Fixed(0.0)),
            LayerWiring(v=received),
            LayerWiring(v=received),
        )
    )


LAST_THIRD = [(2, [1]), (3, [2]), (5, [3, 4]), (8, [5, 6, 7]), (12, [8, 9, 10, 11]), (24, list(range(16, 24)))]


@pytest.mark.parametrize("num_layers, layers", LAST_THIRD)
@pytest.mark.parametrize(
    "name, expected",
    [
        ("v_last_third", mix((Learn(1.0), Own()))),
        ("v1_last_third", mix((Learn(1.0), Tap(0)))),
        ("x0wv_last_third", mix((Learn(1.0), Embed()))),
        ("bov", mix((Learn(1.0), Table()))),
        ("shared_table", mix((Learn(1.0), Table(shared=True)))),
        ("table_fixed_scale", mix((1, Table()))),
        ("v_plus_x0wv", mix((Learn(1.0), Own()), (Learn(0.0), Embed()))),
        ("v_plus_v1", mix((Learn(1.0), Own()), (Learn(0.0), Tap(0)))),
        ("v_plus_table", mix((1, Own()), (1, Table()))),
    ],
)
def test_presets_of_the_last_third(name: str, expected: Mix, num_layers: int, layers: list[int]):
    assert wired(name, num_layers) == values(num_layers, layers, expected)


@pytest.mark.parametrize("num_layers, layers", [(2, [1]), (3, [2]), (5, [2, 4]), (6, [1, 3, 5]), (12, [1, 3, 5, 7, 9, 11])])
def test_every_second_layer_ends_with_the_last_and_spares_a_source_at_layer_0(num_layers: int, layers: list[int]):
    assert wired("v1_every2", num_layers) == values(num_layers, layers, mix((Learn(1.0), Tap(0))))
    with_first = layers if num_layers % 2 == 0 else [0, *layers]
    assert wired("x0wv_every2", num_layers) == values(num_layers, with_first, mix((Learn(1.0), Embed())))
    gated = mix((1, Own()), (Gate(3.0, 12), Table(init="uniform")))
    assert wired("v_plus_table_gated", num_layers) == values(num_layers, with_first, gated)
    assert wired("bov", num_layers, layers="::-2") == values(num_layers, with_first, mix((Learn(1.0), Table())))


def test_table_in_every_layer():
    assert wired("table_all", 3) == values(3, [0, 1, 2], mix((Learn(1.0), Table())))


def test_the_scale_of_a_lone_source_is_learned_or_fixed():
    assert wired("v1_last_third", 3, learned=False) == values(3, [2], mix((1, Tap(0))))
    assert wired("x0wv_last_third", 3, learned=False, scale=1.5) == values(3, [2], mix((1.5, Embed())))
    assert wired("bov", 3, scale=-2, per="channel") == values(3, [2], mix((Learn(-2.0, "channel"), Table())))
    assert wired("bov", 3, init="uniform") == values(3, [2], mix((Learn(1.0), Table(init="uniform"))))
    uniform = Table(shared=True, init="uniform")
    assert wired("shared_table", 3, init="uniform", learned=False) == values(3, [2], mix((1, uniform)))
    assert wired("v_plus_table", 3, learned=True, scale=0.5) == values(3, [2], mix((1, Own()), (Learn(0.5), Table())))


@pytest.mark.parametrize("name, option, source", [("v_plus_v1", "first", Tap(0)), ("v_plus_x0wv", "embed", Embed())])
def test_two_values_side_by_side_start_at_1_and_0_or_stay_at_half(name: str, option: str, source: Source):
    assert wired(name, 3, learned=False) == values(3, [2], mix((0.5, Own()), (0.5, source)))
    assert wired(name, 3, learned=False, own=1, **{option: 2}) == values(3, [2], mix((1, Own()), (2, source)))
    assert wired(name, 3, own=0.5, **{option: 0.25}) == values(3, [2], mix((Learn(0.5), Own()), (Learn(0.25), source)))


def test_the_gate_reads_as_many_channels_as_asked_for():
    narrow = Shape(10, 34, 5, 5, 2, 31, (None,) * 3)
    with pytest.raises(WiringError, match="the gate reads 12 channels, but the attention input has 10"):
        make_plan(wired("v_plus_table_gated", 3), narrow)
    wiring = wired("v_plus_table_gated", 3, channels=7, range=2.0, init="projected")
    assert wiring.layers[2].v == mix((1, Own()), (Gate(2.0, 7), Table()))
    assert make_plan(wiring, narrow).num_layers == 3


def test_only_out_and_skips_are_touched_by_presets_that_leave_values_alone():
    for name in ("neutreno", "denseformer", "hidden_skip", "hidden_from_h1", "v1_cross_layer_attention", "query_residual"):
        assert all(layer.v == OWN for layer in wired(name, 5).layers)
    for name in ("bov", "svformer", "resformer_dense", "v_plus_table_gated"):
        assert all(layer == LayerWiring(v=layer.v) for layer in wired(name, 5).layers)
        assert all(layer.out == NOTHING for layer in wired(name, 5).layers)


# ------------------------------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    "layers, meant",
    [
        ([5, 6, 7], [5, 6, 7]),
        ((1, 3), [1, 3]),
        (4, [4]),
        ([-1], [7]),
        ("1:", [1, 2, 3, 4, 5, 6, 7]),
        (" 6: ", [6, 7]),
        ("::-2", [1, 3, 5, 7]),
        ("last/2", [4, 5, 6, 7]),
        ("last/3", [5, 6, 7]),
        ("N//2", [4]),
        ("2, 4", [2, 4]),
    ],
)
def test_layers_are_numbers_or_text(layers: Any, meant: list[int]):
    assert wired("resformer_constant", 8, layers=layers) == values(8, meant, mix((1, Own()), (2, Tap(0))))


@pytest.mark.parametrize(
    "layers, reason",
    [
        ([], "expected a list of layer numbers such as [5, 6, 7], or text such as '1:', 'last/3' or '::-2'"),
        ([1.5], "expected a list of layer numbers"),
        ([True], "expected a list of layer numbers"),
        (True, "expected a list of layer numbers"),
        ({"1": 2}, "expected a list of layer numbers"),
        ("first", "expected a list of layer numbers"),
        ("1:] = own; q[1:", "expected a list of layer numbers"),
        ("1:\nq", "expected a list of layer numbers"),
        ("", "expected a list of layer numbers"),
        ([9], "layer 9 is out of range; there are layers 0 to 7"),
        ([-9], "layer -9 is out of range; there are layers 0 to 7"),
        ([3, 3], "a layer stands twice in this list"),
        ("8:", "no layer is meant by these layers; the model has layers 0 to 7"),
        ("::0", "a slice cannot step by 0"),
        ("last/0", "last/0: expected a whole number of at least 1"),
        ("last", "last/3 stands alone"),
        ("1:::2", "invalid syntax"),
        ("1 2", "invalid syntax"),
    ],
)
def test_layers_that_mean_nothing_are_refused_by_name(layers: Any, reason: str):
    with pytest.raises(VariantError) as wrong:
        preset("resformer_sparse").equation(8, layers=layers)
    assert str(wrong.value).startswith(f"variant 'resformer_sparse', option layers={layers!r}: ")
    assert reason in str(wrong.value)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("bov", {"layer": "1:"}, "has no option 'layer'. Did you mean 'layers'? Its options: layers='last/3', scale=1.0"),
        ("bov", {"zzz": 1}, "has no option 'zzz'. Its options: layers='last/3', scale=1.0, learned=True, per='layer'"),
        ("transformer", {"layers": "1:"}, "variant 'transformer' has no option 'layers'. It has no options"),
        ("bov", {"per": "heads"}, "option per='heads': expected layer, head or channel. Did you mean 'head'?"),
        ("bov", {"init": 3}, "option init=3: expected projected or uniform"),
        ("bov", {"scale": "2"}, "option scale='2': expected a finite number"),
        ("bov", {"scale": True}, "option scale=True: expected a finite number"),
        ("bov", {"scale": float("nan")}, "option scale=nan: expected a finite number"),
        ("bov", {"learned": 1}, "option learned=1: expected true or false"),
        ("bov", {"learned": False, "scale": 0}, "a coefficient of 0 leaves its source out, and nothing else is read"),
        ("resformer_constant", {"first": 0, "own": 0}, "a coefficient of 0 leaves its source out, and nothing else is read"),
        ("resformer_identity", {"source": -1}, "option source=-1: expected a whole number of at least 0"),
        ("resformer_identity", {"source": 1.0}, "option source=1.0: expected a whole number of at least 0"),
        ("resformer_identity", {"source": 7}, "source=7: no layer comes after it in a model of 8; give a layer from 0 to 6"),
        ("resformer_identity_rescaled", {"axis": "tokens"}, "expected token, head or tensor. Did you mean 'token'?"),
        ("resformer_dense", {"history": "row"}, "expected raw or mixed. Did you mean 'raw'?"),
        ("neutreno", {"combine": "resformer_identify"}, "Did you mean 'resformer_identity'?"),
        ("denseformer", {"period": 9}, "period=9: a model of 8 layers would average nothing; give 1 to 8"),
        ("denseformer", {"dilation": 0}, "option dilation=0: expected a whole number of at least 1"),
        ("cla2", {"share": "vk"}, "option share='vk': expected kv, k or v"),
        ("v1_identity_mapping", {"own": 0}, "a coefficient of 0 leaves attention or the first value out"),
        ("v_plus_table_gated", {"range": 0}, "range=0 keeps the gate shut"),
        ("v_plus_table_gated", {"channels": 0}, "option channels=0: expected a whole number of at least 1"),
        ("hidden_from_h1", {"layers": [3]}, "layers are those that receive a value; say which one with source"),
        ("hidden_from_h1", {"source": 7}, "source=7: no layer comes after it"),
        ("hidden_skip", {"per": "head"}, "option per='head': expected layer or channel"),
    ],
)
def test_a_wrong_option_gives_one_error_that_names_it(name: str, options: dict[str, Any], message: str):
    with pytest.raises(VariantError) as wrong:
        preset(name).equation(8, **options)
    assert str(wrong.value).startswith(f"variant {name!r}")
    assert message in str(wrong.value)


@pytest.mark.parametrize("num_layers", [0, -3, 2.0, True, "8", None])
def test_the_number_of_layers_is_checked(num_layers: Any):
    with pytest.raises(VariantError, match="the number of layers must be a whole number of at least 1"):
        preset("bov").equation(num_layers)


def test_one_layer_is_enough_only_where_nothing_earlier_is_read():
    assert wired("transformer", 1) == Wiring((LayerWiring(),))
    assert wired("table_all", 1) == values(1, [0], mix((Learn(1.0), Table())))
    with pytest.raises(VariantError, match="the model has layer 0 only"):
        preset("svformer").equation(1)
    with pytest.raises(VariantError, match="no layer comes after it in a model of 1; use at least 2 layers"):
        preset("resformer_identity").equation(1)


def test_what_only_the_grammar_refuses_is_a_wiring_error_with_its_reason():
    with pytest.raises(WiringError, match="makes layer 0 read itself; start the equation at layer 1"):
        wired("svformer", 4, layers=":")
    with pytest.raises(WiringError, match="makes layer 1 read a later layer"):
        wired("resformer_identity", 4, source=2, layers=[1])
    with pytest.raises(WiringError, match="a weight of 0 reads nothing"):
        wired("resformer_plus", 4, total=0)


@pytest.mark.parametrize(
    "name, message",
    [
        ("bof", "unknown variant 'bof'. Did you mean 'bov'? There are: transformer, resformer_identity,"),
        ("ResFormer_Identity", "Did you mean 'resformer_identity'?"),
        ("zzz", "unknown variant 'zzz'. There are: transformer,"),
        ("gqa8", "row is variant='transformer', variant_options={} and num_key_value_heads = num_attention_heads // 8. There"),
        ("v1_last_third_fixed", "row is variant='v1_last_third', variant_options={'learned': False}. There are"),
        (3, "a variant is named by text such as 'bov', not 3"),
        (None, "a variant is named by text such as 'bov', not None"),
    ],
)
def test_an_unknown_variant_is_answered_with_the_nearest(name: Any, message: str):
    with pytest.raises(VariantError) as wrong:
        preset(name)
    assert message in str(wrong.value)


def test_a_preset_can_be_copied_with_other_words():
    one = dataclasses.replace(preset("bov"), summary="shorter")
    assert isinstance(one, Preset)
    assert one.equation(12) == "v[last/3] = learn(1)*table"


def test_numbers_are_written_out_exactly():
    for value in (1e-5, 0.1, 1 / 3, 12345678.9, 1e20, -2.5e-7):
        assert wired("bov", 3, scale=value).layers[2].v == mix((Learn(value), Table()))
        assert wired("bov", 3, scale=value, learned=False).layers[2].v == mix((value, Table()))

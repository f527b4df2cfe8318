"""Published facts: every row of a result table that is a model variant is reached by a preset, or says why not.

What a row says about its model (which layers, which coefficients, which source) is read here from the row alone and compared
with the wiring of the preset and options that claim to reach it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from valuepath import published
from valuepath.equations import parse
from valuepath.plan import Plan, Shape, make_plan
from valuepath.variants import NOT_COVERED, PublishedRow, preset, variants
from valuepath.wiring import (
    NOTHING,
    OWN,
    Budget,
    Embed,
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
    Wiring,
)

Row = dict[str, Any]
FILES = {name: published.load(name) for name in published.names()}
ROWS: dict[str, list[tuple[Row, Row]]] = {}
"""reference -> (row, its table) for each row of that name; rows that differ in their task alone share it."""
for _file, _table, _row in published.rows():
    ROWS.setdefault(f"{_file}/{_table}/{_row['variant']}", []).append((_row, FILES[_file]["tables"][_table]))

CLAIMED: dict[str, tuple[str, PublishedRow]] = {}
"""reference -> (preset, the row as the preset declares it)"""
for _name, _preset in variants().items():
    for _reached in _preset.published:
        assert _reached.reference not in CLAIMED, f"{_reached} is reached twice"
        CLAIMED[_reached.reference] = (_name, _reached)


def depth(reference: str, table: Row) -> int:
    """The number of layers in this row: the table's, or that of the model that fits it, or 8."""
    setting, models = table["setting"], FILES[reference.split("/")[0]]["models"]
    model = setting.get("model") or setting.get("model_likely")
    return setting.get("layers") or (models[model]["layers"] if model else None) or 8


def wiring_of(reference: str) -> Wiring:
    name, row = CLAIMED[reference]
    layers = depth(reference, ROWS[reference][0][1])
    return parse(preset(name).equation(layers, **row.options), layers)


# ---------------------------------------------------------------------------------------------------------- both ways
def test_every_published_variant_is_reached_or_not_covered_with_a_reason():
    assert set(ROWS) - set(CLAIMED) == set(NOT_COVERED)
    assert all(len(reason) > 40 for reason in NOT_COVERED.values())


def test_every_row_that_a_preset_declares_exists():
    assert set(CLAIMED) <= set(ROWS)
    assert not set(CLAIMED) & set(NOT_COVERED)


def test_all_result_tables_and_no_settings_are_gone_through():
    tables = [table for content in FILES.values() for table in content["tables"].values()]
    listed = [row for table in tables if table["kind"] == "result" for row in table["rows"]]
    assert len(listed) == sum(len(found) for found in ROWS.values())
    assert {table["kind"] for table in tables} == {"result", "settings"}
    assert len(ROWS) > 120


def test_every_variant_that_a_paper_defines_has_a_preset_or_is_one_with_options():
    last_words = {reference.split("/")[-1] for reference in CLAIMED}
    for content in FILES.values():
        for variant in content["definitions"]:
            assert variant in variants() or variant in last_words or variant == "gqa4"  # gqa4 stands in combinations only


# ----------------------------------------------------------------------------------------- what a row says of its model
SPARSE_WORDS = re.compile(r"(\d+)-(\d+)")


def layers_of(word: str, num_layers: int) -> list[int]:
    """Layers as the tables write them ('6-8' and '2..8' count from 1), from 0 here."""
    if word == "none":
        return []
    if word == "all":
        return list(range(num_layers))
    if word == "every_2":
        return list(range(num_layers))[::-1][::2][::-1]  # every second one, the last included
    if word.startswith("last_"):
        return list(range(num_layers))[-int(word.removeprefix("last_")) :]
    if ".." in word:
        first, last = word.split("..")
        return list(range(int(first) - 1, int(last)))
    found = SPARSE_WORDS.fullmatch(word)
    assert found, word
    return list(range(int(found[1]) - 1, int(found[2])))


def coefficient(kind: str, value: float) -> Fixed | Learn:
    return Learn(float(value)) if kind == "learnable" else Fixed(float(value))


def mix_of(*terms: tuple[Any, Source]) -> Mix:
    return Mix(tuple(Term(source, weight) for weight, source in terms if weight not in (Fixed(0.0), None)))


def touched(wiring: Wiring, stream: str = "v") -> list[int]:
    return [n for n, layer in enumerate(wiring.layers) if getattr(layer, stream) not in (OWN, NOTHING)]


def only(wiring: Wiring, *streams: str) -> bool:
    """Whether nothing but these streams differs from an ordinary Transformer."""
    plain = LayerWiring()
    names = [s for s in ("x", "q", "k", "v", "a", "out", "kv", "skip_attn", "skip_mlp") if s not in streams]
    return all(getattr(layer, s) == getattr(plain, s) for layer in wiring.layers for s in names) and (
        wiring.final_x == OWN or "x" in streams
    )


def check_first_value(reference: str, row: Row, wiring: Wiring) -> None:
    """A row of the first paper with weights v1 of the first layer's value and vn of the own one."""
    says, layers = row["coefficients"], layers_of(row["layers"], wiring.num_layers)
    layers = [n for n in layers if n > 0]
    own = coefficient(says["kind"], 1.0 if says["vn"] is None else says["vn"])  # null: not stated; 1 as in Table 3
    first = Budget(float(wiring.num_layers)) if says.get("lambda_scale") == "N" else coefficient(says["kind"], says["v1"])
    expected = mix_of((own, Own()), (first, Tap(0)))
    if row.get("rescale"):
        expected = Mix(expected.terms, "token")
    assert touched(wiring) == layers
    assert all(wiring.layers[n].v == expected for n in layers)
    assert only(wiring, "v")


SOURCES: dict[str, Callable[[], list[tuple[str, Source]]]] = {
    "V": lambda: [("v", Own())],
    "V1": lambda: [("v1", Tap(0))],
    "x0WV": lambda: [("x0wv", Embed())],
    "V + V1": lambda: [("v", Own()), ("v1", Tap(0))],
    "V + x0WV": lambda: [("v", Own()), ("x0wv", Embed())],
}

SOURCE_OF_FAMILY = {"v1_all": "V1", "v1_last_third": "V1", "x0wv_last_third": "x0WV"}
"""The value source that Table 1 gives for these families; later tables leave it out."""


def value_source(row: Row) -> str | None:
    """What the attended values of a row's layers are made of, if it is one of ``SOURCES``."""
    source = row.get("value_source", SOURCE_OF_FAMILY.get(row["family"]))
    return source if source in SOURCES and "layers" in row and row["layers"] != "none" else None


def check_source(reference: str, row: Row, wiring: Wiring) -> None:
    """A row of the second paper with a value source, target layers and a kind of coefficient."""
    says, layers = row["coefficients"], layers_of(row["layers"], wiring.num_layers)
    sources = SOURCES[value_source(row) or ""]()
    if value_source(row) == "V1":
        layers = [n for n in layers if n > 0]  # layer 0 is the source
    assert touched(wiring) == layers
    assert only(wiring, "v")
    for n in layers:
        terms = wiring.layers[n].v.terms
        assert [term.source for term in terms] == [source for _, source in sources]
        if says["kind"] == "fixed":
            assert [term.weight for term in terms] == [Fixed(float(says[name])) for name, _ in sources]
        else:
            assert all(isinstance(term.weight, Learn) and term.weight.per == "layer" for term in terms)


def check_by_family(reference: str, row: Row, wiring: Wiring) -> bool:
    """What a row's family and coefficients say, for rows without v1/vn or a value source. False: the row says nothing."""
    says, family = row.get("coefficients") or {}, row["family"]
    if "shared" in row:
        streams = [s for s in "kv" if s.upper() in row["shared"]] if row["shared"] != "none" else []
        for s in "kv":
            expected = layers_of(row["layers"], wiring.num_layers) if s in streams else []
            assert touched(wiring, s) == expected
            assert all(wiring.layers[n].mix(s) == mix_of((Fixed(1.0), Shared(n - 1))) for n in expected)
        assert only(wiring, *streams)
    elif "position" in row and row["position"] != "value":
        stream = {"none": "v", "query": "q", "key": "k", "attention matrix": "a"}[row["position"]]
        layers = [] if row["position"] == "none" else list(range(1, wiring.num_layers))
        assert touched(wiring, stream) == layers
        for n in layers:
            weights = mix_of((Fixed(says["current"]), Own()), (Fixed(says["first"]), Tap(0)))
            assert wiring.layers[n].mix(stream) == weights
        assert only(wiring, stream)
    elif "hidden_residual_start" in row:
        k, source = int(row["hidden_residual_start"][1:]), row["value_source"]
        assert [n for n, layer in enumerate(wiring.layers) if layer.skip_attn == Fixed(0.0)] == list(range(k))
        tap = None if source == "none" else int(source[1:]) - 1
        receivers = [] if tap is None else list(range(tap + 1, wiring.num_layers))
        assert touched(wiring) == receivers
        assert all(wiring.layers[n].v == mix_of((Fixed(0.5), Own()), (Fixed(0.5), Tap(tap))) for n in receivers)
        assert only(wiring, "v", "skip_attn")
    elif family == "hidden_skip":
        expected = mix_of((Learn(float(says["current"])), Own()), (Learn(float(says["h0"])), Tap(0)))
        assert [wiring.x_site(n) for n in range(wiring.num_layers + 1)] == [OWN, *[expected] * (wiring.num_layers - 1), OWN]
        assert only(wiring, "x")
    elif family == "neutreno":
        layers = layers_of(row["layers"], wiring.num_layers)
        assert touched(wiring, "out") == layers
        expected = mix_of((Fixed(says["lambda"]), Tap(0)), (Fixed(-says["lambda"]), Own()))
        assert all(wiring.layers[n].out == expected for n in layers)
        assert only(wiring, "out")
    elif family == "denseformer":
        for n in range(1, wiring.num_layers + 1):
            past = [(Learn(float(says["history"])), Tap(i)) for i in range(n)]
            assert wiring.x_site(n) == mix_of((Learn(float(says["current"])), Own()), *past)
        assert only(wiring, "x")
    elif family == "resformer_dense":
        layers = layers_of(row["layers"], wiring.num_layers)
        assert touched(wiring) == layers
        for n in layers:
            own, *past = wiring.layers[n].v.terms
            assert own == Term(Own(), Learn(float(says["current"])))
            assert [term.source for term in past] == [Tap(i) for i in range(n)]
            assert all(isinstance(term.weight, Learn) for term in past)
    elif family in ("bov", "v_plus_table_gated") and "layers" in row:
        layers = layers_of(row["layers"], wiring.num_layers)
        assert touched(wiring) == layers
        for n in layers:
            sources = [type(term.source) for term in wiring.layers[n].v]
            weights = [type(term.weight) for term in wiring.layers[n].v]
            gated = says["kind"] == "gated"
            assert (sources, weights) == (([Own, Table], [Fixed, Gate]) if gated else ([Table], [Learn]))
        assert only(wiring, "v")
    elif family == "transformer" and (row.get("layers") == "none" or says.get("kind") == "none"):
        assert wiring == Wiring((LayerWiring(),) * wiring.num_layers)
    elif re.fullmatch(r"(cla2_|svformer_)?gqa\d", family):
        assert CLAIMED[reference][1].queries_per_kv_head == int(family[-1])
    else:
        return False
    return True


@pytest.mark.parametrize("reference", sorted(CLAIMED))
def test_the_preset_and_options_are_what_the_row_says(reference: str):
    wiring = wiring_of(reference)
    for row, _ in ROWS[reference]:
        says = row.get("coefficients") or {}
        if value_source(row):
            check_source(reference, row, wiring)
        elif "v1" in says and "vn" in says and "layers" in row:
            check_first_value(reference, row, wiring)
        elif "v1" in says and "vn" in says:  # no layers given: every one after the first
            check_first_value(reference, row | {"layers": f"2..{wiring.num_layers}"}, wiring)
        elif not check_by_family(reference, row, wiring):
            # neither layers nor coefficients: the preset of the family's name as it is by default
            assert "layers" not in row
            assert not set(says) - {"kind"}
            assert CLAIMED[reference][0] == {"v1_all": "svformer"}.get(row["family"], row["family"])
            assert not CLAIMED[reference][1].options
        if "gqa" not in row["family"]:
            assert CLAIMED[reference][1].queries_per_kv_head == 1


def test_a_variant_that_two_tables_name_is_the_same_model_in_both():
    """Rows without layers or coefficients are reached by the same preset and options as those that have them."""
    by_name: dict[str, set[str]] = {}
    for reference, (name, row) in CLAIMED.items():
        file, _, variant = reference.split("/")
        by_name.setdefault(f"{file}/{variant}", set()).add(f"{name} {sorted(row.options.items())} {row.queries_per_kv_head}")
    assert {variant: ways for variant, ways in by_name.items() if len(ways) > 1} == {}


# ------------------------------------------------------------------------------------------------------------ the data
def test_the_papers_are_those_that_the_presets_name():
    assert published.names() == ("bov", "resformer")
    for content in FILES.values():
        paper = content["paper"]
        assert any(one.paper == f"{paper['title']} (arXiv {paper['arxiv']})" for one in variants().values())


def test_every_result_table_says_what_it_measures():
    for content in FILES.values():
        for key, table in content["tables"].items():
            assert {"title", "location", "kind", "metric", "unit", "direction", "setting", "rows"} <= set(table), key
            if table["kind"] != "result":
                continue
            assert table["direction"] in ("lower", "higher"), key
            assert isinstance(table["decimals"], int), key
            variants_here = {row["variant"] for row in table["rows"]}
            assert table["baseline"] is None or table["baseline"] in variants_here, key
            training = table["setting"].get("training")
            assert training is None or training in content["training"], key
            rows = [(row["variant"], row.get("task")) for row in table["rows"]]
            assert len(set(rows)) == len(rows), key


def test_printed_values_have_no_more_decimals_than_their_table():
    for name, table, row in published.rows():
        decimals = row.get("decimals", FILES[name]["tables"][table]["decimals"])
        if row["value"] is not None:
            assert round(row["value"], decimals) == row["value"], (table, row)


def test_printed_differences_are_those_of_the_printed_values():
    """Where a row has a difference to the table's baseline and both values are given."""
    compared = 0
    for content in FILES.values():
        for key, table in content["tables"].items():
            values = {(row["variant"], row.get("task")): row["value"] for row in table["rows"]}
            for row in table["rows"]:
                base = values.get((table.get("baseline"), row.get("task")))
                if row.get("delta") is not None and row["value"] is not None and base is not None:
                    compared += 1
                    assert row["delta"] == pytest.approx(row["value"] - base, abs=1e-9), (key, row)
    assert compared > 70


def test_figures_known_by_heart():
    resformer, bov = FILES["resformer"], FILES["bov"]
    table3 = {row["variant"]: row["value"] for row in resformer["tables"]["table3_variants_82m"]["rows"]}
    assert table3["transformer"] == 2.739
    assert table3["resformer_plus"] == 2.681
    assert min(table3, key=lambda variant: table3[variant]) == "resformer_plus"
    assert resformer["training"]["main"]["lr_peak"] == 6e-4
    assert bov["training"]["common"]["bov_table_lr"] == 0.15
    assert {r["variant"]: r["value"] for r in bov["tables"]["table2_bpb_100b"]["rows"]} == {"transformer": 0.671, "bov": 0.663}


def test_loading_gives_a_copy_and_refuses_unknown_names():
    published.load("bov")["tables"].clear()
    assert published.load("bov")["tables"]
    with pytest.raises(ValueError, match=r"'resfomer'; there are: bov, resformer\. Did you mean 'resformer'\?"):
        published.load("resfomer")
    with pytest.raises(ValueError, match="there are: bov, resformer"):
        published.load("../secrets")


# ------------------------------------------------------------------------------------------------- published parameters
def parameters(plan: Plan) -> int:
    return sum(parameter.size for parameter in plan.parameters)


@pytest.mark.parametrize(
    "model, printed, expected",
    [("m82m", 82, 81_901_056), ("m180m", 180, 179_874_048), ("m468m", 468, 467_921_920)],
)
def test_the_shapes_of_table_14_have_their_parameters(model: str, printed: int, expected: int):
    content = FILES["resformer"]
    sizes, vocab = content["models"][model], content["models"]["common"]["vocab_size"]
    d, ffn, layers, heads = sizes["hidden"], sizes["ffn"], sizes["layers"], sizes["heads"]
    shape = Shape(d, ffn, heads, heads, d // heads, vocab, (None,) * layers)
    plan = make_plan(parse(preset("transformer").equation(layers), layers), shape)
    assert parameters(plan) == expected
    assert round(expected / 1e6) == printed
    # embedding and head, then q, k, v, o, three MLP matrices and two norms a layer, and the last norm
    assert expected == 2 * vocab * d + layers * (4 * d * d + 3 * d * ffn + 2 * d) + d


@pytest.fixture
def shape_780m() -> Shape:
    """24 layers of 1536, squared-ReLU MLP of 4d, norms without gain, windows SSSL with the last layer long."""
    sizes = FILES["bov"]["models"]["m780m"]
    d, layers, short = sizes["d_model"], sizes["layers"], sizes["sequence_length"] // 4
    windows = tuple(None if sizes["window_pattern"][n % 4] == "L" or n == layers - 1 else short for n in range(layers))
    heads, kv_heads, width, vocab = (sizes[key] for key in ("heads", "kv_heads", "head_dim", "vocab_size"))
    return Shape(d, 4 * d, heads, kv_heads, width, vocab, windows, mlp="relu2", norm_gain=False)


def test_what_the_tables_of_the_780m_model_add(shape_780m: Shape):
    claims = FILES["bov"]["claims"]
    plain = make_plan(parse(preset("transformer").equation(24), 24), shape_780m)
    bov = make_plan(parse(preset("bov").equation(24), 24), shape_780m)
    tables = sum(parameter.size for parameter in bov.parameters if parameter.role == "table")
    scales = [parameter for parameter in bov.parameters if parameter.role == "coefficient"]
    matrices = [sum(parameter.size for parameter in plan.parameters if parameter.role == "matrix") for plan in (plain, bov)]
    assert tables == 402_653_184 == claims["table_elements_780m"]["value"]
    assert tables * 2 / 2**20 == 768 == claims["table_bytes_bf16_780m"]["value"]
    assert matrices[0] - matrices[1] == 18_874_368 == claims["removed_projection_elements_780m"]["value"]
    assert len(scales) == sum(parameter.size for parameter in scales) == 8
    assert parameters(bov) - parameters(plain) == 383_778_816 + 8
    assert claims["net_parameters_added_780m"]["exact"] == 383_778_816
    assert round(parameters(plain) / 1e6, 1) == 780.1


def test_which_layers_of_the_two_models_get_a_table(shape_780m: Shape):
    models = FILES["bov"]["models"]
    deep = parse(preset("bov").equation(24), 24)
    assert touched(deep) == models["m780m"]["target_layers_zero_based"]["value"]
    assert touched(parse(preset("bov").equation(12), 12)) == models["m135m"]["target_layers_zero_based"]
    named = [parameter.name for parameter in make_plan(deep, shape_780m).parameters if parameter.role == "table"]
    assert named == [f"model.layers.{n}.self_attn.v_table.weight" for n in range(16, 24)]


def test_gqa_rows_divide_the_key_value_heads(shape_780m: Shape):
    """Table 8 labels its rows nearly one half and nearly one eighth of a Transformer's cache."""
    heads, layers = 8, 8
    claims = FILES["resformer"]["claims"]
    stored = {}
    for reference in ("resformer/table8_left_2048/svformer", "resformer/table8_right_64000/svformer_gqa4"):
        name, row = CLAIMED[reference]
        kv_heads = heads // row.queries_per_kv_head
        shape = Shape(512, 1792, heads, kv_heads, 64, 50277, (None,) * layers)
        plan = make_plan(parse(preset(name).equation(layers, **row.options), layers), shape, fold="none")
        buffers = len(plan.key_windows) + len(plan.value_windows)
        stored[reference.split("/")[-1]] = 100 * buffers * shape.kv_width / (2 * layers * heads * 64)
    assert stored["svformer"] == claims["kv_cache_fraction_8_layers"]["value"] == 56.25
    assert round(stored["svformer_gqa4"], 2) == claims["kv_cache_fraction_8_layers_gqa4"]["value"] == 14.06

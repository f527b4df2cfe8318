"""The command line: what it prints, against ``counts`` and against figures worked out here by hand."""

from __future__ import annotations

import ast
import json
import re
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from valuepath import counts, describe, plot
from valuepath.cli import app
from valuepath.config import ValuePathConfig
from valuepath.equations import parse
from valuepath.plan import Shape, make_plan
from valuepath.render import ranges, size
from valuepath.settings import yaml_value
from valuepath.variants import variants

LARGE = ["--layers", "24", "--hidden", "1536", "--heads", "12", "--vocab", "32768"]
SMALL = ["--layers", "6", "--hidden", "60", "--heads", "6", "--vocab", "101", "--context", "37"]


def run(*arguments: str, columns: int = 80):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"})


def text_of(*arguments: str, columns: int = 80) -> str:
    result = run("describe", *arguments, columns=columns)
    assert result.exit_code == 0, result.output
    return result.stdout


def json_of(*arguments: str) -> dict:
    result = run("describe", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


# -------------------------------------------------------------------------------------------------------- variants
def test_variants_lists_every_preset_with_its_equation_and_paper():
    result = run("variants")
    assert result.exit_code == 0
    flat = " ".join(result.stdout.split())
    for name, preset in variants().items():
        assert re.search(rf"^{name}$", result.stdout.replace(" \n", "\n"), re.MULTILINE), name
        assert " ".join(preset.equation(8).split()) in flat
        assert " ".join(preset.paper.split()) in flat
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_variants_as_json_writes_equations_for_the_given_layers():
    found = json.loads(run("variants", "--layers", "2", "--json").stdout)
    assert [entry["name"] for entry in found] == list(variants())
    for entry in found:
        if entry["equation"] is None:
            assert "needs at least" in entry["unavailable"]
        else:
            assert entry["equation"] == variants()[entry["name"]].equation(2)
    assert any(entry["equation"] is None for entry in found)  # not all fit into two layers


# ------------------------------------------------------------------------------------------------- describe as text
def test_describe_prints_the_published_pair_of_flops_and_the_tables():
    text = text_of("bov", *LARGE, "--context", "2048", "--style", "nanochat", "--distinct", "600")
    assert line_of(text, "training").split()[1:3] == ["4,661,968,896", "4,775,215,104"]
    assert "(-2.37 %)" in line_of(text, "training")
    assert line_of(text, "stored").split()[3] == "+383,778,824"
    assert line_of(text, "8 tables ").split()[-2:] == ["MiB", "-"]
    assert "768 MiB" in line_of(text, "8 tables ")
    assert "trained: already counted among the parameters" in " ".join(text.split())
    assert line_of(text, "16-18").split()[:4] == ["16-18", "512", "q", "k"]
    assert line_of(text, "16-23").rstrip().endswith("v = learn(1)*table")
    assert "with 600 rows in use" in text
    assert "600 rows in use" in line_of(text, "600 rows in use")
    assert text.strip().endswith("All figures are computed from the equation and the sizes; none is measured.")


def test_describe_prints_growing_and_shared_bytes_in_separate_columns():
    text = text_of("svformer", "--layers", "8", "--hidden", "512", "--heads", "8", "--vocab", "32768", "--context", "32768")
    heading = line_of(text, "grows with sequences")
    assert heading.index("grows") < heading.index("shared") < heading.index("Transformer")
    # keys of 8 layers: 8 * 32768 * 512 * 2 bytes = 256 MiB; table: 32768 * 512 * 2 = 32 MiB
    assert re.split(r"\s{2,}", line_of(text, "total").strip()) == ["total", "256.1 MiB", "32 MiB", "512 MiB"]
    assert re.split(r"\s{2,}", line_of(text, "values").strip()) == ["values", "-", "-", "256 MiB"]
    assert re.split(r"\s{2,}", line_of(text, "growing + whole").strip())[1:3] == ["56.27 %", "43.73 %"]
    paid = -(-32768 * 512 * 2 // (8 * 512 * 2 - 4))  # rounded up: a token saves eight values of 512 in two bytes, less one id
    assert re.split(r"\s{2,}", line_of(text, "whole tables").strip()) == ["whole tables", "32 MiB", f"{paid:,}", "4,096"]
    assert line_of(text, "1-7").split() == ["1-7", "all", "q", "k", "stored", "32", "MiB", "ids", "->", "V_0", "-"]


def test_grouped_queries_are_held_against_both_references():
    text = text_of(
        "svformer", "--layers", "8", "--hidden", "512", "--heads", "8", "--kv-heads", "2", "--fold", "none", "--context", "2048"
    )
    assert "of the Transformer with 2 key/value heads" in text
    assert "of the Transformer with 8 key/value heads" in text
    shares = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip().startswith("growing")]
    assert shares == [
        ["growing", "56.25 %", "43.75 %", "12.50 %", "87.50 %"],
        ["growing", "14.06 %", "85.94 %", "3.12 %", "96.88 %"],
    ]
    assert "No table is shared" in text


HUGE = ["--layers", "80", "--hidden", "8192", "--heads", "64", "--kv-heads", "8", "--vocab", "128256", "--batch", "128"]
WIDE = [
    ["transformer", *LARGE, "--context", "65536"],
    ["bov", *LARGE, "--context", "65536", "--batch", "64", "--distinct", "20000"],
    ["resformer_dense", "--layers", "12"],
    ["denseformer", "--layers", "12"],
    ["resformer_identity_rescaled", "--option", "axis=tensor"],
    ["v1_cross_layer_attention"],
    ["attention_residual"],
    ["v[1:3] = learn(-0.25, per=channel)*own - gate(3, 7)*tap(0) + 0.125*table; k[2] = shared(0); skip_mlp[1] = 0.5"],
    ["cla2", *HUGE],
]


@pytest.mark.parametrize("arguments", WIDE, ids=lambda a: a[0][:24])
def test_describe_fits_80_columns(arguments):
    text = text_of(*arguments)
    assert max(map(len, text.splitlines())) <= 80
    # nothing may have been cut or folded away: every number that JSON gives for the parameters is there in full
    assert f"{json_of(*arguments)['parameters']['total']:,}" in text
    assert "..." not in text
    assert "…" not in text


def test_every_preset_can_be_described_in_text_and_json():
    for name in variants():
        text = text_of(name, *SMALL)
        found = json_of(name, *SMALL)
        assert found["name"] == name
        assert found["equation"] == variants()[name].equation(6)
        assert f"{found['flops_per_token']['training']:,}" in text


def test_equal_layers_are_merged_and_long_sums_shortened():
    text = text_of("resformer_dense", "--layers", "12")
    assert line_of(text, "3-11").split(maxsplit=1)[1].strip() == "v = learn(1)*own + learn(0)*tap(0..n-1)"
    assert line_of(text, "0-11").split()[:5] == ["0-11", "all", "q", "k", "v"]
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


def test_a_plan_without_a_cache_says_why_instead_of_showing_one():
    arguments = ("v[1:] = renorm(0.5*own + 0.5*tap(0), to=own, axis=tensor)", *SMALL)
    text, found = text_of(*arguments), json_of(*arguments)
    assert "Generation is refused" in text
    assert "tokens that come later" in " ".join(text.split())
    assert found["plan"]["generation_refusal"]
    assert found["cache"] is found["percentages"] is found["break_even"] is None


def test_what_differs_is_written_in_the_grammar_that_it_was_read_from():
    """Every line of that section, put back together, is an equation with the same wiring."""
    for text in (
        "v[2:] = learn(0.25, per=head)*own - 0.5*tap(0) + table(shared, init=uniform); q[1] = -own + tap(0)",
        "out[3] = 0.4*tap(v, 0) - 0.4*own(v) + learn(2)*final(v); kv[2] = concat(own, shared(0), shared(1))",
        "v[1:] = renorm(own + gate(3, 7)*tap(0), to=own, axis=head); skip_attn[1] = learn(0.5, per=channel); skip_mlp[4] = 0",
        "a[3] = 0.5*own + 0.5*shared(2); k[4] = 2*shared(1); x[6] = own - learn(0)*tap(3); v[5] = budget(5)*embed + own",
    ):
        model = Shape(60, 53, 6, 3, 10, 101, (None,) * 6)
        plan = make_plan(parse(text, 6), model)
        written = [f"{s}[{n}] = {right}" for n in range(7) for s, right in describe.reads_text(plan, n).items()]
        if "budget" in text:  # one budget per statement: a single layer has it here
            assert written.count("v[5] = budget(5)*embed + own") == 1
        assert parse("\n".join(written), 6) == parse(text, 6)


# ------------------------------------------------------------------------------------------------- describe as JSON
KEYS = {
    "": {"name", "paper", "location", "summary", "equation", "model", "plan", "parameters", "flops_per_token",
         "transformer", "cache", "percentages", "break_even", "break_even_context", "computed"},
    "model": {"num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
              "windows", "mlp", "norm_gain", "qk_norm", "tied", "style", "fold"},
    "plan": {"layers", "final_norm_reads", "needs_attention_matrix", "needs_ids", "generation_refusal"},
    "plan.layers": {"layer", "window", "projections", "reads", "k", "v"},
    "plan.layers.k": {"kind", "layer", "table", "positions", "elements", "bytes"},
    "plan.layers.v": {"kind", "layer", "table", "positions", "elements", "bytes"},
    "parameters": {"total", "by_role", "tables", "in_products", "multiplied", "optimizer"},
    "parameters.optimizer": {"name", "elements", "bytes", "bytes_per_element"},
    "transformer": {"parameters", "flops_per_token"},
    "flops_per_token": {"context", "training", "forward", "training_matrices", "training_attention"},
    "cache": {"context", "batch", "dtype", "bytes_per_element", "growing", "shared", "references"},
    "cache.growing": {"keys", "values", "ids", "bytes"},
    "cache.growing.keys": {"elements", "bytes"},
    "cache.shared": {"tables", "bytes", "trained_bytes", "distinct", "rows_in_use_bytes"},
    "cache.shared.tables": {"name", "readers", "rows", "elements", "bytes", "trained"},
    "cache.references": {"name", "num_kv_heads", "keys", "values", "bytes"},
    "percentages": {"quantity", "part", "of", "numerator_bytes", "denominator_bytes", "kept_percent", "saved_percent"},
    "break_even": {"tables", "ids", "context", "shared_bytes", "saved_bytes_per_sequence", "tokens", "sequences"},
}  # fmt: skip


def test_the_keys_of_the_json_are_stable_and_documented():
    found = json_of("bov", *SMALL, "--distinct", "13")
    for path, keys in KEYS.items():
        value = found
        for step in path.split(".") if path else []:
            value = value[step]
            value = value[0] if isinstance(value, list) else value
        assert set(value) == keys, path
        for key in keys:
            assert key in (describe.__doc__ or ""), f"{path}.{key} is not documented"


def test_the_figures_of_the_json_are_those_of_counts():
    arguments = ["--style", "nanochat", "--batch", "3", "--distinct", "13", "--dtype", "float32", "--kv-heads", "3"]
    found = json_of("bov", *SMALL, *arguments)
    config = ValuePathConfig(
        variant="bov", style="nanochat", num_hidden_layers=6, hidden_size=60, num_attention_heads=6, num_key_value_heads=3,
        vocab_size=101, max_position_embeddings=37,
    )  # fmt: skip
    plan = config.plan()
    cache = counts.cache_counts(plan, 37, 3, 4)
    assert found["model"]["windows"] == [9, 9, 9, None, 9, None]
    assert found["cache"]["dtype"] == "fp32"
    assert found["cache"]["bytes_per_element"] == 4
    assert found["cache"]["growing"]["bytes"] == cache.growing_bytes
    # by hand: keys of all six layers, values of the first four (three key/value heads of 10), ids for the last two
    keys, values = 3 * (4 * 9 + 2 * 37) * 30 * 4, 3 * (3 * 9 + 37) * 30 * 4
    assert cache.growing_bytes == keys + values + 3 * 37 * 4
    assert found["cache"]["shared"]["bytes"] == 2 * 101 * 30 * 4 == found["cache"]["shared"]["trained_bytes"]
    assert found["cache"]["shared"]["rows_in_use_bytes"] == 2 * 13 * 30 * 4
    assert [r["num_kv_heads"] for r in found["cache"]["references"]] == [3, 6]
    assert sum(layer["k"]["bytes"] + layer["v"]["bytes"] for layer in found["plan"]["layers"]) == keys + values
    assert [layer["v"]["kind"] for layer in found["plan"]["layers"]] == ["store"] * 4 + ["tokens"] * 2
    assert found["plan"]["layers"][5]["v"]["table"] == "table of layer 5"
    assert found["parameters"]["total"] == counts.parameter_counts(plan).total
    assert found["flops_per_token"]["training"] == counts.flops_per_token(plan, 37).training
    assert found["transformer"]["parameters"]["total"] == counts.parameter_counts(counts.reference_plan(plan)).total
    for entry in found["percentages"]:
        assert entry["kept_percent"] == pytest.approx(100 * entry["numerator_bytes"] / entry["denominator_bytes"])
        assert entry["kept_percent"] + entry["saved_percent"] == pytest.approx(100)
        assert ("V cache alone" if entry["part"] == "v" else "K+V cache") in entry["of"]
    assert len(found["percentages"]) == 3 * 2 * 2  # quantities, parts, references
    whole = found["break_even"][0]
    assert whole["tokens"] == counts.break_even(plan, 37, 4).tokens
    assert whole["ids"] == "counted"


def test_options_of_a_preset_are_read_as_yaml():
    found = json_of("resformer_sparse", "--layers", "8", "--option", "layers=[5, 6, 7]", "--option", "first=5.0")
    assert found["equation"] == variants()["resformer_sparse"].equation(8, layers=[5, 6, 7], first=5.0)
    sliced = json_of("svformer", "--layers", "8", "--option", "layers=2:5")
    assert [layer["reads"] for layer in sliced["plan"]["layers"]] == [{}, {}, *[{"v": "tap(0)"}] * 3, {}, {}, {}]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1:5", "1:5"), ("1:", "1:"), ("::-2", "::-2"), ("last/3", "last/3"), ("[5, 6]", [5, 6]), ("2", 2), ("2.5", 2.5),
     ("1e-3", 0.001), ("true", True), ("null", None), ("", None), ("head", "head"), ("'1:'", "1:"), ("{a: 1}", {"a": 1})],
)  # fmt: skip
def test_option_values(text, value):
    found = yaml_value(text)
    assert found == value
    assert type(found) is type(value)


def test_context_sizes_the_model_and_only_given_sizes_are_passed_on():
    default = json_of("transformer")
    config = ValuePathConfig()
    assert default["cache"]["context"] == config.max_position_embeddings
    assert default["model"]["vocab_size"] == config.vocab_size
    assert default["model"]["num_layers"] == config.num_hidden_layers
    patterned = json_of("transformer", "--window-pattern", "SL", "--sliding-window", "7", "--layers", "5", "--context", "50")
    assert patterned["model"]["windows"] == [7, None, 7, None, None]


# ---------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["svformr"], "svformer"),
        (["v[1:] = tapp(0)"], "tap"),
        (["v[1:] = 0.5*own + 0.5*tap(9)", "--layers", "4"], "there is no layer 9"),
        (["tap(0)"], "an equation has a '='"),
        (["bov", "--option", "layer=[1]"], "layers"),
        (["bov", "--option", "layers"], "expected key=value"),
        (["bov", "--option", "layers=[1,"], "not YAML"),
        (["v[1:] = tap(0)", "--option", "layers=[1]"], "belongs to a preset"),
        (["bov", "--style", "lama"], "llama"),
        (["bov", "--dtype", "bf61"], "bf16"),
        (["bov", "--fold", "some"], "fold"),
        (["bov", "--hidden", "510"], "510"),
        (["bov", "--kv-heads", "3"], "num_key_value_heads=3"),
        (["bov", "--context", "0"], "max_position_embeddings"),
        (["bov", "--batch", "0"], "batch must be"),
        (["bov", "--window-pattern", "SX"], "window_pattern"),
        (["bov", "--context", "10", "--distinct", "11"], "at most 10 different"),
        (["bov", "--context", "1000", "--vocab", "100", "--distinct", "101"], "only 100 tokens"),
        (["transformer", "--distinct", "40000", "--context", "65536"], "at most 32,000 different"),
        (["bov", "--plot", "cache.gif"], ".png, .svg, .pdf"),
        (["bov", "--plot", "nowhere/cache.png"], "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_clear_message_and_exit_code_2(arguments, expected):
    result = run("describe", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert expected in result.stderr
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr


def test_an_equation_error_keeps_its_caret_under_the_column():
    lines = run("describe", "v[1:] = 0.5*own + 0.5*tapp(0)").stderr.splitlines()
    assert lines[1].index("tapp") == lines[2].index("^")


def test_brackets_in_messages_are_not_markup():
    result = run("describe", "v[bold] = own")
    assert result.exit_code == 2
    assert "v[bold] = own" in result.stderr


# ------------------------------------------------------------------------------------------------------------ plots
@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_plot_is_written_whole(tmp_path: Path, suffix):
    file = tmp_path / f"cache{suffix}"
    result = run("describe", "bov", *SMALL, "--plot", str(file))
    assert result.exit_code == 0
    assert str(file) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [file.name]  # no partial file is left
    data = file.read_bytes()
    if suffix == ".png":
        width, height = struct.unpack(">II", data[16:24])
        assert data.startswith(b"\x89PNG")
        assert data.rstrip().endswith(b"IEND\xaeB`\x82")
        assert width > 1000
        assert height > 500
    elif suffix == ".svg":
        assert ElementTree.fromstring(data).tag.endswith("svg")
        assert data.count(b"<path") > 20
    else:
        assert data.startswith(b"%PDF")
        assert data.rstrip().endswith(b"%%EOF")
    again = tmp_path / f"again{suffix}"
    run("describe", "bov", *SMALL, "--plot", str(again))
    assert again.read_bytes() == data


def test_a_failing_plot_leaves_the_old_file_alone(tmp_path: Path, monkeypatch):
    from matplotlib.figure import Figure

    file = tmp_path / "cache.png"
    file.write_bytes(b"old")

    def full_disk(self, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full_disk)
    result = run("describe", "bov", *SMALL, "--plot", str(file))
    assert result.exit_code == 2
    assert "No space left" in result.stderr
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def _described(text: str, vocab: int, **changes) -> describe.Description:
    model = Shape(768, 3072, 6, 6, 128, vocab, (None,) * 12, mlp="relu2")
    plan = make_plan(parse(text, 12), model)
    return describe.describe(plan, text, **({"context": 2048} | changes))


@pytest.mark.parametrize("vocab", [32_768, 151_936])
def test_the_plotted_curve_is_the_published_one_apart_from_the_ids(vocab):
    contexts = [vocab // 2, vocab, 256 * 1024, 1024 * 1024]
    found = plot.curves(_described("v[last/3] = learn(1)*table", vocab), contexts)
    ids = 100 * 4 / (2 * 12 * 768 * 2)  # per cent of the K+V cache
    for context, saved, growing in zip(contexts, found.saved_with_tables, found.saved_growing, strict=True):
        assert saved == pytest.approx(100 * (1 - vocab / context) / 6 - ids, rel=1e-12, abs=1e-9)
        assert growing == pytest.approx(100 / 6 - ids, rel=1e-12)
    assert found.with_tables[0] - found.growing[0] == 4 * vocab * 768 * 2
    assert found.reference == tuple(2 * 12 * 768 * 2 * context for context in contexts)
    assert found.with_rows is None


def test_the_rows_in_use_are_never_more_than_the_tokens():
    found = plot.curves(_described("v[1:] = tap(0)", 32_768, distinct=500, batch=3), [100, 1000])
    assert found.with_rows is not None
    assert [a - b for a, b in zip(found.with_rows, found.growing, strict=True)] == [300 * 768 * 2, 500 * 768 * 2]


def test_the_figure_marks_the_break_even_and_shows_all_lines():
    figure = plot.draw(_described("v[last/3] = learn(1)*table", 32_768, distinct=500))
    left, right = figure.axes
    assert [len(axes.get_legend().get_texts()) for axes in (left, right)] == [4, 3]
    even = counts.break_even_context(_described("v[last/3] = learn(1)*table", 32_768).plan)
    for axes in (left, right):
        assert any(f"{even:,}" in text.get_text() for text in axes.texts)
        assert axes.get_xlabel().startswith("context")
        assert axes.get_xlim()[1] > even
    assert "% saved" in right.get_ylabel()
    assert "iB" in left.get_ylabel()


def test_no_plot_without_a_cache(tmp_path: Path):
    file = tmp_path / "cache.png"
    result = run("describe", "v[1:] = renorm(own + tap(0), to=own, axis=tensor)", *SMALL, "--plot", str(file))
    assert result.exit_code == 2
    assert "no cache to plot" in result.stderr
    assert not file.exists()


# ----------------------------------------------------------------------------------------------------- small parts
@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (768 * 2**20, "768 MiB"), (1023 * 2**20, "1023 MiB"),
     (9 * 2**30, "9 GiB"), (5 * 2**50, "5 PiB"), (-2048, "-2 KiB")],
)  # fmt: skip
def test_sizes_in_words(count, text):
    assert size(count) == text


def test_the_command_imports_nothing_heavy_before_it_runs():
    """``valuepath --help`` must not wait for torch: only light modules are imported at the top of ``cli``."""
    for path in (Path(describe.__file__).parent / "cli").glob("*.py"):
        tree = ast.parse(path.read_text())
        top = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        top |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
        own = {name for name in top if name.startswith("valuepath") and not name.startswith("valuepath.cli")}
        heavy = {"torch", "transformers", "matplotlib", "datasets", "pandas", "scipy", "plotly"}
        assert not own and not {name.split(".")[0] for name in top} & heavy, path

"""Settings from YAML: every error names file, line and key; values arrive as they were meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from valuepath.settings import as_yaml, parse_yaml, read_yaml, yaml_value
from valuepath.train.settings import RunSettings

RUN = """\
model:
  hidden_size: 64
data:
  path: text
  length: 128
optimiser:
  lr: 1e-3
budget: {tokens: 4e5}
"""


def error_of(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse_yaml(text, "run.yaml").check(RunSettings)
    return str(caught.value)


def test_a_run_is_read_with_numbers_in_any_notation():
    run = RunSettings.of(parse_yaml(RUN, "run.yaml"))
    assert run.optimiser.lr == 0.001 and run.budget.tokens == 400_000
    assert run.model == {"hidden_size": 64} and run.data.length == 128 and run.seed == 0


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("  lr: 1e-3", "  lrr: 1e-3", ["run.yaml, line 7", "optimiser.lrr", "unknown key", "Did you mean 'lr'?"]),
        ("optimiser:", "optimizer:", ["run.yaml, line 6", "optimizer", "Did you mean 'optimiser'?"]),
        ("  length: 128", "  length: 0", ["run.yaml, line 5", "data.length", "greater than 0", "not 0"]),
        ("  length: 128", "  length: many", ["run.yaml, line 5", "data.length", "not 'many'"]),
        ("  path: text\n", "", ["run.yaml, line 3", "data.path", "is missing", "valuepath data prepare"]),
        ("budget: {tokens: 4e5}\n", "", ["run.yaml", "budget", "is missing", "budget: {tokens: 400000}"]),
        ("{tokens: 4e5}", "{tokens: 4e5, steps: 3}", ["run.yaml, line 8", "budget", "exactly one of tokens, steps and flops"]),
        ("{tokens: 4e5}", "{tokens: .nan}", ["run.yaml, line 8", "budget.tokens", "finite"]),
        ("  hidden_size: 64", "  hiden_size: 64", ["run.yaml", "model", "unknown key 'hiden_size'", "'hidden_size'"]),
        ("  hidden_size: 64", "  init_seed: 64", ["model", "init_seed", "set seed instead"]),
        ("  length: 128", "  length: 100", ["batch.tokens=2048", "data.length=100", "expected e.g. 2000"]),
        ("  lr: 1e-3", "  roles: {tabel: {lr: 1}}", ["line 7", "optimiser.roles", "unknown role 'tabel'", "'table'"]),
        ("  lr: 1e-3", "  roles: {table: {lr: 1, lr_scale: 2}}", ["line 7", "optimiser.roles.table", "keep one"]),
        ("  hidden_size: 64", "  hidden_size: 64\n  hidden_size: 65", ["run.yaml, line 3", "'hidden_size'", "given twice"]),
        ("  hidden_size: 64", "  hidden_size: [64", ["run.yaml, line", "not YAML"]),
    ],
)
def test_whatever_is_wrong_is_said_with_its_place(old: str, new: str, parts: list[str]):
    message = error_of(RUN.replace(old, new))
    assert all(part in message for part in parts), message
    assert "\n" not in message and "pydantic" not in message


@pytest.mark.parametrize("text", ["[1, 2]", "word", "3"])
def test_something_that_is_no_mapping_is_refused(text: str):
    assert "expected keys and values" in error_of(text)


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere.yaml: cannot be read"):
        read_yaml(tmp_path / "nowhere.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"seed: \xff\xfe")
    with pytest.raises(ValueError, match=r"binary.yaml: byte 6 is not UTF-8"):
        read_yaml(tmp_path / "binary.yaml")


def test_python_objects_are_not_made():
    with pytest.raises(ValueError, match="not YAML"):
        parse_yaml("seed: !!python/object/apply:os.getcwd []", "run.yaml")


def test_overrides_win_and_errors_name_them():
    document = parse_yaml(RUN, "run.yaml").with_overrides({"optimiser.lr": 0.5, "compute.threads": 3})
    run = RunSettings.of(document)
    assert run.optimiser.lr == 0.5 and run.compute.threads == 3
    with pytest.raises(ValueError, match=r"--set optimiser.lr=-1: optimiser.lr: .*greater than 0"):
        RunSettings.of(document.with_overrides({"optimiser.lr": -1}))
    with pytest.raises(ValueError, match=r"--set optimiser.lr.x=1: optimiser.lr is 0.5, which has no keys"):
        document.with_overrides({"optimiser.lr.x": 1})
    with pytest.raises(ValueError, match="no dotted key"):
        document.with_overrides({"optimiser..lr": 1})


_scalars = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)


_keys = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


def _nested(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3)


@given(st.recursive(_scalars, _nested, max_leaves=12))
def test_what_is_written_reads_back(value):
    assert parse_yaml(as_yaml({"key": value}), "x.yaml").data == {"key": value}


def test_a_slice_is_no_number_in_base_60():
    text = "a: 1:5\nb: [1:5, 2]\nc: '1:5'\nd: {e: 12:30:45}\n"
    assert parse_yaml(text, "x.yaml").data == {"a": "1:5", "b": ["1:5", 2], "c": "1:5", "d": {"e": "12:30:45"}}
    assert yaml_value("1:5") == "1:5" and yaml_value("[1e-3, 2]") == [0.001, 2] and yaml_value("1:") == "1:"


def test_our_reading_is_that_of_a_yaml_library_but_for_exponents():
    text = "a: 1\nb: [1.5, yes, null, 'x', 010]\nc: {d: word, e: '1e-3', f: 2024-01-01x}\n"
    assert parse_yaml(text, "x.yaml").data == yaml.safe_load(text)

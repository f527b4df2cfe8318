"""``valuepath data``: what is printed, at 80 columns, and how bad input ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_texts import AWKWARD, plain, write_jsonl
from valuepath.cli import app
from valuepath.data.corpus import Corpus


def run(*arguments: str):
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env=environment)


def failure(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    texts = [*plain(60), *AWKWARD, "", "  "]
    kinds = [("essays", "[bold]a & b[/]")[n % 2] for n in range(len(texts))]
    return write_jsonl(tmp_path / "rows.jsonl", texts, kind=kinds)


def test_the_table_says_what_the_folder_holds(tmp_path, rows):
    options = ["--domain-column", "kind", "--tokenizer", "train:320", "--block", "32"]
    weights = ["--weight", "essays=2", "--weight", "[bold]a & b[/]=0.5"]
    result = run("prepare", rows, "--out", tmp_path / "out", *options, *weights)
    assert result.exit_code == 0, result.output
    assert run("show", tmp_path / "out").stdout == result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    stored = [json.loads(line) for line in rows.read_bytes().split(b"\n") if line]
    corpus = Corpus.load(tmp_path / "out")
    for name, weight in (("essays", "2"), ("[bold]a & b[/]", "0.5")):
        (line,) = [line for line in lines if line.startswith(f"{name} ") and line.rstrip().endswith(weight)]
        texts = [row["text"] for row in stored if row["kind"] == name and row["text"].strip()]
        cells = re.split(r"  +", line.removeprefix(name).strip())
        assert int(cells[0]) + int(cells[3]) == len(texts)
        size = sum(len(text.encode()) for text in texts)
        meta = corpus.domains[name].meta
        assert meta.train.bytes + meta.validation.bytes == size
        assert float(cells[5]) == pytest.approx(meta.validation.bytes / meta.validation.tokens, abs=0.005)
        assert any(line.startswith(f"{name}: 1 left out, empty (first:") for line in lines)
    assert "320 ids; rows of 32 tokens" in result.stdout and corpus.fingerprint in result.stdout


def test_what_is_not_exact_or_not_as_asked_is_said(tmp_path):
    long = [" ".join(plain(5, seed=n)) for n in range(4)]
    file = write_jsonl(tmp_path / "long.jsonl", [*long, "x" * 100_000])
    arguments = ["--tokenizer", "train:280", "--block", "16", "--max-holdout-bytes", "100", "--max-bytes", "20000"]
    result = run("prepare", file, "--out", tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.output
    flat = " ".join(result.stdout.split())
    assert re.search(r"long: its documents are long: 1,\d{3} B held out where 100 B were asked for", flat)
    assert "long: reading ended at --max-bytes" in flat


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--text-column", "body"], "no column 'body'"),
        (["--weight", "rows"], "NAME=NUMBER"),
        (["--weight", "rows=heavy"], "'heavy' is no number"),
        (["--weight", "rows=1", "--weight", "rows=2"], "given twice"),
        (["--weight", "row=1"], "Did you mean 'rows'?"),
        (["--holdout", "0.9"], "--holdout"),
        (["--tokenizer", "train:100"], "at least 257"),
        (["--tokenizer", "train:100000"], "supports"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, rows, arguments, expected):
    assert expected in failure("prepare", rows, "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_second_time_needs_overwrite(tmp_path, rows):
    usual = ["prepare", rows, "--out", tmp_path / "out", "--tokenizer", "train:300", "--block", "32"]
    assert run(*usual).exit_code == 0
    before = Corpus.load(tmp_path / "out").fingerprint
    assert "--overwrite" in failure(*usual)
    assert run(*usual, "--overwrite").exit_code == 0
    assert Corpus.load(tmp_path / "out").fingerprint == before


def test_showing_what_is_no_prepared_folder_says_so(tmp_path):
    assert "no prepared text" in failure("show", tmp_path)
    assert "there is no such folder" in failure("show", tmp_path / "absent")

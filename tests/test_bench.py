"""``valuepath bench decode``: the cells, what is skipped, the sums of results, the file, the tables and the plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from valuepath.bench import decode, kernel, show, whole
from valuepath.bench.text import TextIds
from valuepath.bench.timing import alternating
from valuepath.cli import app
from valuepath.counts import cache_counts

SIZES = ["--heads", "2", "--head-dim", "6,8", "--layers", "3", "--hidden", "16", "--rounds", "2"]
TINY = ["--context", "24,40", "--batch", "1,3", *SIZES]


def run(*arguments: Any) -> Any:
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["bench", "decode", *map(str, arguments)], env=environment)


def test_every_cell_is_measured_written_printed_and_drawn(text_folder: Path, tmp_path: Path) -> None:
    out, plot = tmp_path / "decode.json", tmp_path / "decode.png"
    result = run(*TINY, "--data", text_folder, "--out", out, "--plot", plot, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = json.loads(out.read_text())
    assert found["machine"]["threads"] == 1 and found["text"] == {"source": str(text_folder), "vocab_size": 311}
    assert len(found["kernel"]) == 2 * 2 * 2 * 2 and len(found["whole"]) == 2 * 2 * 2
    for cell in found["kernel"]:
        assert set(cell["ms"]) >= {"stored, fused", "gathered, fused", "pooled, PyTorch", "keys alone, q k^T"}
        assert all(ms > 0 for ms in cell["ms"].values())
        assert cell["stored_ms"] == min(ms for name, ms in cell["ms"].items() if name.startswith("stored"))
        assert cell["pooled_over_stored"] == pytest.approx(cell["pooled_ms"] / cell["stored_ms"])
        assert cell["largest_difference"] < (1e-5 if cell["dtype"] == "fp32" else 0.05)
        assert 1 < cell["distinct_by_sequence"] <= cell["distinct"] <= cell["batch"] * cell["context"]
    for cell in found["whole"]:
        made = whole.WholeCell(decode.DTYPES[cell["dtype"]], cell["batch"], cell["context"], 3, 16, 2)
        for one in whole.CONTESTANTS:
            measured = cell["contestants"][one.name]
            plan = made.config(one, 311).plan()
            counted = cache_counts(plan, cell["context"], cell["batch"], made.dtype.itemsize)
            assert measured["growing_bytes"] == counted.growing_bytes
            assert measured["table_bytes"] == counted.shared_bytes
            assert measured["tokens_per_second"] == pytest.approx(cell["batch"] * 1e3 / measured["ms_per_step"])
        assert cell["contestants"]["transformer"]["speed_over_transformer"] == 1
    assert found["summary"] is None  # no context of 16,384
    for word in ("svformer, folded", "bov, gathering", "keys alone", "no evidence about a GPU"):
        assert word in " ".join(result.stdout.split())
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and plot.stat().st_size > 20_000


def test_one_level_alone_and_the_plot_of_kernels(text_folder: Path, tmp_path: Path) -> None:
    plot = tmp_path / "kernel.svg"
    result = run(*TINY, "--data", text_folder, "--level", "kernel", "--dtype", "fp32", "--batch", "1", "--plot", plot)
    assert result.exit_code == 0, result.output
    assert "Whole model" not in result.stdout and "Attention of one layer" in result.stdout
    assert plot.read_text().count("head dim") >= 2
    result = run(*TINY, "--data", text_folder, "--level", "model", "--dtype", "fp32", "--batch", "1")
    assert "Whole model" in result.stdout and "Attention of one layer" not in result.stdout


def test_cells_that_do_not_fit_are_skipped_with_the_reason(text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "memory", lambda device: 2**19)
    result = run(*SIZES, "--context", "24,4096", "--data", text_folder, "--dtype", "fp32", "--batch", "1")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "skipped: needs" in text and "more than 40% of 0.0 GiB" in text
    monkeypatch.undo()
    result = run(*SIZES, "--context", "24,900000", "--data", text_folder, "--dtype", "fp32", "--batch", "1")
    assert result.exit_code == 0, result.output
    assert "not enough for 1 pieces of 900,000" in " ".join(result.stdout.split())


def test_the_memory_of_a_cell_is_what_it_allocates() -> None:
    cell = kernel.KernelCell(torch.bfloat16, 64, 16, 65536, 12)
    one = 16 * 65536 * 12 * 64 * 2
    assert cell.bytes_needed(32768) == 3 * one + 2 * 32768 * 12 * 64 * 2  # keys, values, gathered values; a table and its rows
    model = whole.WholeCell(torch.float32, 1, 32768, 8, 768, 12)
    position = 32768 * 768 * 4
    # transformer, shared value stored, folded, and one cache of bov for both of its ways
    assert model.bytes_needed(32768) > (16 + 9 + 8 + 13) * position
    assert model.bytes_needed(32768) < (16 + 9 + 8 + 13) * position * 1.13 + 4 * 700 * 2**20


def test_sequences_come_from_different_texts_and_never_twice_from_one_place() -> None:
    text = TextIds("two texts", 100, (np.arange(40), np.arange(50, 90)))
    assert text.batch(4, 15)[:, 0].tolist() == [0, 50, 15, 65]
    with pytest.raises(ValueError, match=r"two texts has 80 tokens: not enough for 3 pieces of 30"):
        text.batch(3, 30)
    uneven = TextIds("uneven", 100, (np.arange(10), np.arange(50, 90)))
    assert uneven.batch(3, 10)[:, 0].tolist() == [0, 50, 60]  # the short text is used up


def test_medians_are_of_turns_after_the_warm_up_and_every_order_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("valuepath.bench.timing.time.perf_counter", lambda: now[0])
    took = {"a": iter([9, 9, 1, 2, 30, 4, 5]), "b": iter([9, 9, 10, 20, 30, 40, 50])}
    order: list[str] = []

    def work(name: str) -> None:
        order.append(name)
        now[0] += next(took[name])

    found = alternating({name: lambda name=name: work(name) for name in took}, 5, 2, torch.device("cpu"))
    assert found == {"a": 4000.0, "b": 30000.0}
    turns = [order[i : i + 2] for i in range(0, len(order), 2)]
    assert all(sorted(turn) == ["a", "b"] for turn in turns) and ["a", "b"] in turns and ["b", "a"] in turns


def test_the_summary_is_over_long_contexts() -> None:
    cells = [
        {"context": 16384, "pooled_over_stored": 0.5, "pooled_over_gathered": 0.1, "pooled_over_keys": 1.0},
        {"context": 65536, "pooled_over_stored": 0.72, "pooled_over_gathered": 0.1, "pooled_over_keys": 1.21},
        {"context": 16384, "skipped": "too large"},
        {"context": 512, "pooled_over_stored": 9.0, "pooled_over_gathered": 9.0, "pooled_over_keys": 9.0},
    ]
    found = decode.summary(cells)
    assert found is not None
    assert found["pooled_over_stored"] == {"geometric_mean": pytest.approx(math.sqrt(0.36)), "largest": 0.72, "cells": 2}
    assert found["pooled_over_keys"]["geometric_mean"] == pytest.approx(1.1)
    assert decode.summary(cells[2:]) is None


def test_wrong_settings_are_one_message(text_folder: Path, tmp_path: Path) -> None:
    for options, expected in (
        (["--context", "512,x"], "--context '512,x': expected whole numbers separated by commas"),
        (["--batch", "0"], "batches: expected whole numbers of at least 1"),
        (["--dtype", "fp32,int8"], "expected fp32, bf16, fp16; got int8"),
        (["--level", "layer"], "expected kernel, model or both; got 'layer'"),
        (["--hidden", "100", "--heads", "3"], "hidden=100 is no even multiple of heads=3"),
        (["--device", "nothing"], "device 'nothing'"),
        (["--rounds", "0"], "rounds: expected a whole number of at least 1"),
        (["--plot", str(tmp_path / "x.gif")], "expected .png, .svg, .pdf"),
        (["--out", str(tmp_path)], "is a folder; name a file"),
        (["--data", str(tmp_path / "none")], "none"),
    ):
        result = run("--data", text_folder, *options)
        assert result.exit_code == 2 and result.stderr.startswith("error: "), (options, result.output)
        assert expected in " ".join(result.stderr.split()), options
    with pytest.raises(ValueError, match="every cell was skipped"):
        show.plot({"whole": [{"skipped": "x"}], "kernel": []}, tmp_path / "x.png")


def test_the_keys_alone_read_no_value() -> None:
    query, keys = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 11, 8)
    with torch.no_grad():
        for _ in range(9):  # whichever way is tried
            out, weights = whole.keys_alone(None, query, keys, torch.full_like(keys, torch.nan), None, 0.3)
            assert out.shape == (2, 1, 3, 8) and (out == 0).all() and weights is None

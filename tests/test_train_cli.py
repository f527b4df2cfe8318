"""``valuepath train``: what a person sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from valuepath.cli import app

RUN = """\
model: {{hidden_size: 20, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 23, variant: svformer}}
data: {{path: {text}, length: 17}}
batch: {{tokens: 102}}
budget: {{steps: 9}}
evaluation: {{times: 3}}
compute: {{device: cpu}}
"""


def run(*arguments: str):
    return CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture
def settings(tmp_path: Path, text_folder: Path) -> str:
    (tmp_path / "run.yaml").write_text(RUN.format(text=text_folder))
    return str(tmp_path / "run.yaml")


def test_one_run_ends_with_its_losses_by_domain_and_its_model(settings: str, tmp_path: Path):
    result = run(settings, "--out", str(tmp_path / "out"), "--set", "optimiser.lr=3e-3", "--set", "seed=4")
    assert result.exit_code == 0, result.output
    stored = json.loads((tmp_path / "out" / "result.json").read_text())
    assert stored["settings"]["optimiser"]["lr"] == 0.003 and stored["settings"]["seed"] == 4
    final = stored["points"][-1]
    for name in ("mail", "json"):
        row = next(line for line in result.stdout.splitlines() if line.startswith(name))
        assert row.split()[1:] == [f"{final['loss']['domains'][name]:.4f}", f"{final['bpb']['domains'][name]:.4f}"]
    assert f"{final['loss']['token_weighted']:.4f}" in result.stdout and "mean over domains" in result.stdout
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()
    again = run(settings, "--out", str(tmp_path / "out"), "--set", "optimiser.lr=3e-3", "--set", "seed=4")
    assert again.exit_code == 0 and "finished before" in again.stderr and again.stdout == result.stdout


def test_tensorboard_has_what_the_records_have(settings: str, tmp_path: Path):
    assert run(settings, "--out", str(tmp_path / "out")).exit_code == 0
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    for tag, pick in (
        ("eval/loss/mail", lambda r: r["loss"]["domains"]["mail"]),
        ("eval/bpb/mean", lambda r: r["bpb"]["mean"]),
        ("eval/loss/token_weighted", lambda r: r["loss"]["token_weighted"]),
    ):
        found = {each.step: each.value for each in events.Scalars(tag)}
        assert found == pytest.approx({r["step"]: pick(r) for r in records if "bpb" in r}, rel=1e-6)
        assert sorted(found) == [3, 6, 9]
    assert {e.step: e.value for e in events.Scalars("train/loss")} == pytest.approx(
        {r["step"]: r["train_loss"] for r in records if "train_loss" in r}, rel=1e-6
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--set", "model.hiden_size=4"], ["unknown key 'hiden_size'", "'hidden_size'"]),
        (["--set", "model.variant=transformer", "--set", "model.wiring=v[1:] = 0.5*owm"],
         ["run.yaml, line 1", "model", "'own'"]),
        (["--set", "optimiser.lr"], ["--set 'optimiser.lr'", "expected key=value"]),
        (["--set", "data.path=/nowhere"], ["/nowhere"]),
        (["--set", "optimiser={lr: 1e12, clip: 0, warmup: 0}"], ["step", "there is no checkpoint yet", "lower optimiser.lr"]),
    ],
)
def test_whatever_is_wrong_is_one_message(settings: str, tmp_path: Path, arguments: list[str], parts: list[str]):
    result = run(settings, "--out", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 2
    flat = " ".join(result.stderr.split())
    assert flat.startswith("error:") and all(part in flat for part in parts), result.stderr
    assert "Traceback" not in result.output


def test_other_settings_in_the_same_folder_are_refused(settings: str, tmp_path: Path):
    assert run(settings, "--out", str(tmp_path / "out")).exit_code == 0
    result = run(settings, "--out", str(tmp_path / "out"), "--set", "seed=1")
    assert result.exit_code == 2 and "other settings" in " ".join(result.stderr.split())

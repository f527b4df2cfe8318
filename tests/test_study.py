"""Studies, as real processes: killed at random, run twice at once, interrupted, reported."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from texts import once
from valuepath.cli import app
from valuepath.data.corpus import Corpus
from valuepath.settings import parse_yaml
from valuepath.study.recipe import StudyPlan, expand
from valuepath.study.results import StudyResults
from valuepath.study.store import StudyFolder, stored

RECIPE = """\
name: small
base:
  model: {{hidden_size: 20, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 23}}
  data: {{path: {text}, length: 17}}
  batch: {{tokens: 102}}
  optimiser: {{lr: 0.01}}
  budget: {{steps: 24}}
  evaluation: {{times: 3}}
  checkpoint_every: 3
  log_every: 1
  compute: {{device: cpu}}
variants:
  - transformer
  - {{name: the same, wiring: "v[:] = 1*own"}}
  - resformer_learnable
seeds: [0, 3]
report: {{context: 512}}
"""


def recipe(text_folder: Path) -> str:
    return RECIPE.format(text=text_folder)


def planned(text: str) -> StudyPlan:
    return expand(parse_yaml(text, "recipe.yaml"), Corpus.load)


def start(folder: Path, *arguments: str, **options) -> subprocess.Popen[str]:
    """``valuepath study run`` on the recipe beside the folder, as a process of its own."""
    command = [sys.executable, "-m", "valuepath.cli", "study", "run", str(folder.parent / "recipe.yaml"), "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONPATH": os.pathsep.join(sys.path)}
    # what is started in the background of a shell inherits that Ctrl-C is ignored, and would hand it on
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **options,
    )  # fmt: skip


def outcome(folder: Path) -> dict:
    """``results.json`` without what is measured, and every run's result and model."""
    found = json.loads((folder / "results.json").read_text())
    assert found.pop("measured")["machine"]["torch"]
    runs = {path.parent.name: path.read_bytes() for path in folder.glob("runs/*/result.json")}
    models = {path.parents[1].name: path.read_bytes() for path in folder.glob("runs/*/model/model.safetensors")}
    metrics = {path.parent.name: path.read_bytes() for path in folder.glob("runs/*/metrics.jsonl")}
    assert len(runs) == len(models) == len(metrics) == 6
    return {"results": found, "runs": runs, "models": models, "metrics": metrics}


@pytest.fixture(scope="session")
def finished(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small study, run without any disturbance by two workers."""
    home, lock = once(tmp_path_factory, "study")
    with lock:
        if not (home / "out" / "report.html").exists():
            home.mkdir(exist_ok=True)
            (home / "recipe.yaml").write_text(recipe(text_folder))
            process = start(home / "out", "--workers", "2")
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            (home / "stdout.txt").write_text(out)
            (home / "stderr.txt").write_text(err)
    return home / "out"


# ------------------------------------------------------------------------------------------------------------ answers
def test_an_undisturbed_study_answers_on_every_kind_of_paper(finished: Path):
    said = (finished.parent / "stdout.txt").read_text()
    assert max(map(len, said.splitlines()[:-1])) <= 80
    assert said.rstrip().splitlines()[-1] == f"open {finished / 'report.html'}"
    assert "6/6" in (finished.parent / "stderr.txt").read_text()
    for name in ("results.json", "results.csv", "results-by-seed.csv", "results.md", "report.html"):
        assert (finished / name).stat().st_size > 500
    results = StudyResults.model_validate_json((finished / "results.json").read_text())
    assert results.finished == results.planned == 6 and results.seeds == [0, 3]
    for run_id in (run for variant in results.groups[0].variants for run in variant.run_ids.values()):
        run = finished / "runs" / run_id
        assert (run / "model" / "tokenizer.json").exists() and list((run / "tensorboard").glob("events.*"))
        assert not list(run.glob("checkpoint-*"))


def test_the_same_model_written_as_an_equation_differs_by_exactly_nothing(finished: Path):
    results = StudyResults.model_validate_json((finished / "results.json").read_text())
    transformer, same, other = results.groups[0].variants
    assert set(transformer.run_ids.values()).isdisjoint(same.run_ids.values())
    for scores in (same.loss, same.bpb):
        for score in (scores.mean, scores.token_weighted, *scores.domains.values()):
            difference = score.difference
            assert difference is not None
            assert (difference.mean, difference.low, difference.high, difference.verdict) == (0.0, 0.0, 0.0, "equal")
            assert difference.per_seed == {0: 0.0, 3: 0.0}
    assert same.curve.loss == transformer.curve.loss
    assert other.loss.mean.difference is not None and other.loss.mean.difference.verdict != "equal"
    assert [each.label for each in other.coefficients] == ["v: own", "v: tap(0)"]
    assert other.coefficients[0].layers == [1, 2] and other.coefficients[0].start == [0.5, 0.5]


def test_results_are_the_means_of_what_the_runs_recorded(finished: Path):
    results = StudyResults.model_validate_json((finished / "results.json").read_text())
    variant = results.groups[0].variants[2]
    finals = []
    for seed, run_id in variant.run_ids.items():
        lines = (finished / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
        last = [record for record in map(json.loads, lines) if "bpb" in record][-1]
        assert last["step"] == 24 and last["tokens"] == 24 * 102 == variant.tokens
        assert variant.loss.mean.per_seed[seed] == last["loss"]["mean"]
        assert last["loss"]["mean"] == pytest.approx(sum(last["loss"]["domains"].values()) / 2, rel=1e-15)
        finals.append(last["bpb"]["domains"]["mail"])
    assert variant.bpb.domains["mail"].mean == pytest.approx(sum(finals) / 2, rel=1e-15)


def test_a_report_can_be_made_again_and_says_the_same(finished: Path):
    before = (finished / "report.html").read_text()
    result = CliRunner().invoke(app, ["study", "report", str(finished)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert (finished / "report.html").read_text() == before


def test_status_names_every_run(finished: Path):
    result = CliRunner().invoke(app, ["study", "status", str(finished), "--json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["state"] for row in rows] == ["finished"] * 6 and {row["seed"] for row in rows} == {0, 3}
    text = CliRunner().invoke(app, ["study", "status", str(finished)], env={"COLUMNS": "80"}).stdout
    assert "6 of 6 runs finished" in text and max(map(len, text.splitlines())) <= 80


# -------------------------------------------------------------------------------------------------------------- kills
def test_a_study_killed_at_twelve_random_points_ends_with_the_same_bits(finished: Path, text_folder: Path, tmp_path: Path):
    folder = StudyFolder(tmp_path / "out")
    folder.save(stored(planned(recipe(text_folder))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("forked_study.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder.path), "4", "12"],
        capture_output=True, text=True, env=environment, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    at = [int(found) for found in re.findall(r"killed with (\d+) records", done.stdout)]
    assert len(at) == 12 and len(set(at)) > 5, at  # spread over the study, not all at its beginning
    for killed in tmp_path.glob("out*"):
        result = CliRunner().invoke(app, ["study", "report", str(killed)])
        assert result.exit_code == 0, result.output
        assert outcome(killed) == outcome(finished)


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    """Until it holds; fails if the process ends before, or hangs."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for five minutes"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_study_ended_from_outside_takes_its_workers_along_and_goes_on(
    finished: Path, text_folder: Path, tmp_path: Path, how: signal.Signals
):
    (tmp_path / "recipe.yaml").write_text(recipe(text_folder))
    out = tmp_path / "out"
    process = start(out, "--workers", "1", start_new_session=True)
    wait_for(lambda: list(out.glob("runs/*/checkpoint-*/complete")), process)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # Ctrl-C reaches every process of the terminal
    else:
        process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if how == signal.SIGINT else -how), err
    if how == signal.SIGINT:
        assert "the same command goes on from the last checkpoints" in " ".join(err.split())
        assert "Traceback" not in err
    study = StudyFolder(out)
    deadline = time.monotonic() + 30  # the worker ends when it sees the closed pipe
    runs = list(study.load().distinct)
    while any(study.being_trained(run) for run in runs):
        assert time.monotonic() < deadline, "a worker outlived its study"
        time.sleep(0.1)
    assert len(list(out.glob("runs/*/result.json"))) < 6
    again = start(out, "--workers", "2")
    said, err = again.communicate(timeout=300)
    assert again.returncode == 0, said + err
    assert outcome(out) == outcome(finished)


def test_two_invocations_share_the_runs_and_none_is_trained_twice(finished: Path, text_folder: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(recipe(text_folder))
    both = [start(tmp_path / "out", "--workers", "1") for _ in range(2)]
    trained = []
    for process in both:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        trained += re.findall(r"^\d/6 (.*): finished", err, flags=re.MULTILINE)
    assert len(trained) == len(set(trained)) == 6
    assert outcome(tmp_path / "out") == outcome(finished)


def test_a_worker_that_dies_is_replaced_and_its_run_given_up_after_the_second_time(text_folder: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(recipe(text_folder).replace("[0, 3]", "[0]").replace("steps: 24", "steps: 4"))
    # a worker that takes the first run up is killed, as the system does when memory runs out
    plan = planned((tmp_path / "recipe.yaml").read_text())
    victim = next(iter(plan.distinct))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'valuepath.study.worker' in ' '.join(sys.orig_argv):\n"
        "    import valuepath.train.run as run\n"
        "    whole = run.train\n"
        f"    run.train = lambda r, *a: os.kill(os.getpid(), 9) if r.id == {victim!r} else whole(r, *a)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "valuepath.cli", "study", "run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(site), *sys.path])},
    )  # fmt: skip
    said, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in err and "status -9" in " ".join(err.split())
    assert "transformer, seed 0: failed: a worker ended with status -9" in " ".join(said.split())
    study = StudyFolder(tmp_path / "out")
    states = {each: study.status(run).state for each, run in study.load().distinct.items()}
    assert states.pop(victim) == "error" and set(states.values()) == {"finished"}
    again = start(tmp_path / "out")
    said, err = again.communicate(timeout=300)
    assert again.returncode == 0, said + err


def test_a_run_that_diverges_is_reported_and_the_others_go_on(text_folder: Path, tmp_path: Path):
    wild = "  - {name: wild, variant: bov, set: {optimiser.lr: 1e12, optimiser.clip: 0, optimiser.warmup: 0}}"
    text = recipe(text_folder).replace("[0, 3]", "[0]").replace("steps: 24", "steps: 6")
    text = text.replace("  - resformer_learnable", wild)
    (tmp_path / "recipe.yaml").write_text(text)
    process = start(tmp_path / "out")
    said, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    flat = " ".join(said.split())
    assert "wild, seed 0: failed at step" in flat and "lower optimiser.lr (now 1e+12)" in flat
    assert "Only wild has optimiser.lr = 1000000000000.0" in flat
    rows = CliRunner().invoke(app, ["study", "status", str(tmp_path / "out"), "--json"]).stdout.splitlines()
    assert [json.loads(row)["state"] for row in rows] == ["finished", "finished", "diverged"]


# ------------------------------------------------------------------------------------------------------------ recipes
def test_the_dry_run_counts_and_estimates_and_trains_nothing(text_folder: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(recipe(text_folder))
    arguments = ["study", "run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out"), "--dry-run", "--workers", "2"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    plan = planned(recipe(text_folder))
    flops = sum(each.run.training_flops for each in plan.distinct.values())
    assert f"0 of 6 runs finished; {flops:.3g} training FLOPs in all" in result.stdout
    assert all(run in result.stdout for run in plan.distinct)
    assert re.search(r"about \d+ s with 2 workers", result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert not (tmp_path / "out").exists()


def test_axes_are_points_at_which_all_variants_are_compared(text_folder: Path):
    axes = (
        "axes:\n  optimiser.lr: [0.01, 0.02]\n  data.length: [17, 34]\n  model.num_key_value_heads: [1, 2]\n"
        "seeds: [0]\n"
    )
    plan = planned(recipe(text_folder).replace("seeds: [0, 3]\n", axes))
    assert len(plan.points) == 8 and len(plan.distinct) == 24
    for each in plan.runs:
        point = plan.points[each.group]
        assert each.run.settings.optimiser.lr == point["optimiser.lr"]
        assert each.run.sequences_per_step * point["data.length"] == 102  # as many tokens a step at any length
        assert each.run.config.num_key_value_heads == point["model.num_key_value_heads"]
    assert len({each.run.batches_id for each in plan.runs}) == 2  # one for each length


def test_options_of_a_preset_can_be_an_axis_of_its_own(text_folder: Path):
    line = "  - {variant: resformer_constant, axes: {model.variant_options.first: [1.0, 2.0]}}"
    plan = planned(recipe(text_folder).replace("  - resformer_learnable", line))
    assert plan.variants == ("transformer", "the same", "resformer_constant first=1.0", "resformer_constant first=2.0")
    assert [each.run.config.variant_options for each in plan.runs[2:4]] == [{"first": 1.0}, {"first": 2.0}]


def test_equal_settings_are_trained_once(text_folder: Path):
    line = "  - {name: again, variant: transformer}"
    plan = planned(recipe(text_folder).replace("  - resformer_learnable", line))
    assert len(plan.runs) == 6 and len(plan.distinct) == 4


@pytest.mark.parametrize(
    ("old", "new", "parts"),
    [
        ("  - transformer", "  - transfomer", ["recipe.yaml, line 13", "transformer"]),
        ("v[:] = 1*own", "v[:] = 1*owm", ["recipe.yaml, line 14", "the same", "column 10", "'own'"]),
        ("variants:", "variant:", ["recipe.yaml, line 12", "variant: unknown key", "'variants'"]),
        ("seeds: [0, 3]", "seeds: [0, 0]", ["recipe.yaml, line 16", "seeds", "twice"]),
        ("seeds: [0, 3]", "seeds: 0", ["recipe.yaml, line 16", "at least 1"]),
        ("seeds: [0, 3]", "seeds: [0, 3]\nbaseline: svformer", ["line 17", "no variant is called 'svformer'"]),
        ("seeds: [0, 3]", "seeds: [0]\naxes: {optimiser.lr: []}", ["line 17", "axes", "has no values"]),
        ("seeds: [0, 3]", "seeds: [0]\naxes: {optimiser.rate: [1, 2]}", ["line 17", "optimiser.rate: unknown key"]),
        ("seeds: [0, 3]", "seeds: [0]\naxes: {optimizer.lr: [1, 2]}", ["line 17", "optimizer: unknown key"]),
        ("seeds: [0, 3]", "seeds: [0]\naxes: {optimiser.lr: 1}", ["line 17", "expected a list of values", "not 1"]),
        ("seeds: [0, 3]", "seeds: [0]\naxes: {seed: [1, 2]}", ["line 17", "seed is no axis"]),
        ("  optimiser: {lr", "  optimizer: {lr", ["recipe.yaml, line 6", "optimizer", "'optimiser'"]),
        ("  - resformer_learnable", "  - transformer", ["line 13", "two variants are called 'transformer'"]),
        ("  - resformer_learnable", "  - {variant: bov, set: {model: {hidden_size: 32}}}",
         ["line 15", "model is a whole section"]),
        ("  - resformer_learnable", "  - {variant: bov, set: {model.variant: svformer}}", ["line 15", "give it as variant"]),
        ("  - resformer_learnable", "  - {variant: bov, set: {optimiser.lr: 1}, axes: {optimiser.lr: [1, 2]}}",
         ["line 15", "optimiser.lr and optimiser.lr set the same thing"]),
        ("  - resformer_learnable", "  - {variant: bov, set: {optimiser.lr: 1}}\naxes: {optimiser.lr: [1, 2]}",
         ["line 15", "bov and the recipe's axes", "keep one"]),
        ("seeds: [0, 3]", "seeds: [0]\naxes: {optimiser: [{lr: 1}]}", ["line 17", "optimiser is a whole section"]),
        ("length: 17", "length: 17, weights: {mial: 1, json: 1}", ["line 4", "weights mial", "'mail'"]),
        ("lr: 0.01", "lr: 0.01, betas: [0.9, 1]", ["line 6", "optimiser.betas[1]", "less than 1"]),
        ("device: cpu", "device: cuda", ["no CUDA device"]),
        ("  - resformer_learnable", "  - {variant: bov, set: {data.length: 34}}",
         ["line 15", "data.length", "model and optimiser"]),
        ("  - resformer_learnable", "  - {variant: bov, wiring: x}", ["line 15", "exactly one of variant"]),
        ("  - resformer_learnable", "  - {variant: bov, options: {frist: 1}}", ["line 15", "bov", "frist"]),
        ("hidden_size: 20", "hidden_size: 20, variant: bov", ["base.model.variant", "variants"]),
        ("path: ", "path: /nowhere", ["line 4", "data.path", "/nowhere"]),
        ("length: 17", "length: 18", ["data.length=18", "multiple"]),
        ("report: {context: 512}", "report: {context: -1}", ["line 17", "report.context", "greater than 0"]),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_one_clear_error(text_folder: Path, old: str, new: str, parts: list[str]):
    text = recipe(text_folder)
    assert old in text
    with pytest.raises(ValueError) as caught:
        planned(text.replace(old, new, 1))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_folder_that_is_used_for_something_else_is_not_taken(text_folder: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(recipe(text_folder))
    before = sorted(path.name for path in text_folder.iterdir())
    result = CliRunner().invoke(app, ["study", "run", str(tmp_path / "recipe.yaml"), "--out", str(text_folder)])
    assert result.exit_code == 2 and "is not empty and holds no study" in " ".join(result.stderr.split())
    assert sorted(path.name for path in text_folder.iterdir()) == before


def test_a_recipe_and_a_run_are_told_apart(text_folder: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(recipe(text_folder))
    result = CliRunner().invoke(app, ["train", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2 and "use `valuepath study run`" in " ".join(result.stderr.split())
    with pytest.raises(ValueError, match="use `valuepath train`"):
        planned("data: {path: x}\nbudget: {steps: 3}\n")


def test_words_between_colons_stay_words(text_folder: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(recipe(text_folder) + "baseline: ':rocket:'\n")
    result = CliRunner().invoke(app, ["study", "run", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "out")])
    assert ":rocket:" in result.stderr


def test_a_folder_without_a_study_is_refused(tmp_path: Path):
    for verb in ("status", "report"):
        result = CliRunner().invoke(app, ["study", verb, str(tmp_path)])
        assert result.exit_code == 2 and "no study here" in result.stderr

"""Training: against a loop written out by hand, across interruptions, and between variants."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import valuepath as vp
from valuepath.counts import flops_per_token
from valuepath.data.corpus import Corpus
from valuepath.data.order import TrainingOrder
from valuepath.settings import Document
from valuepath.train.folder import RunFolder
from valuepath.train.optimiser import groups
from valuepath.train.result import Diverged
from valuepath.train.run import train
from valuepath.train.settings import Run, RunSettings
from valuepath.train.trainer import Sequences

SMALL: dict[str, Any] = {
    "model": {"hidden_size": 20, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 23},
    "data": {"path": "unused", "length": 17},
    "batch": {"tokens": 17 * 6},
    "optimiser": {"lr": 0.01, "warmup": 3},
    "budget": {"steps": 13},
    "evaluation": {"times": 3, "sequences": 7},
    "checkpoint_every": 4,
    "log_every": 2,
    "compute": {"device": "cpu"},
    "seed": 5,
}


def small(corpus: Corpus, **changes: Any) -> Run:
    document = Document(SMALL, "test")
    for path, value in changes.items():
        document = document.with_value(path.replace("__", "."), value, "test")
    return RunSettings.of(document).resolve(corpus.vocab_size, corpus.fingerprint, corpus.eos)


def training_losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["train_loss"] for r in RunFolder(folder).metrics() if "train_loss" in r}


# ----------------------------------------------------------------------------------------------- against plain loops
@pytest.mark.parametrize("variant", ["transformer", "resformer_plus", "bov"])
def test_a_run_is_the_loop_written_out_by_hand(corpus: Corpus, tmp_path: Path, variant: str):
    run = small(corpus, model__variant=variant, optimiser__roles={"table": {"lr": 0.03, "betas": [0.8, 0.9]}})
    train(run, corpus, tmp_path / "run")

    model = vp.ValuePathForCausalLM(run.config).train()
    roles = {parameter.name: parameter.role for parameter in run.plan.parameters}
    named = dict(model.named_parameters())
    decayed = {"matrix", "embedding", "head", "table"}
    optimisers = [
        torch.optim.AdamW(
            [parameter],
            lr=0.03 if roles[name] == "table" else 0.01,
            betas=(0.8, 0.9) if roles[name] == "table" else (0.9, 0.95),
            weight_decay=0.1 if roles[name] in decayed else 0.0,
        )
        for name, parameter in named.items()
    ]
    rates = [o.param_groups[0]["lr"] for o in optimisers]
    domain, start = TrainingOrder(corpus, 17, 5).take(13 * 6)
    streams = [each.train for each in corpus.domains.values()]
    losses = []
    for step in range(13):
        if step < 3:
            factor = step / 3
        else:
            factor = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / 10)) / 2
        for optimiser, rate in zip(optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = rate * factor
        total = 0.0
        for row in range(6 * step, 6 * step + 6):  # one sequence at a time
            tokens = torch.from_numpy(streams[domain[row]].read(int(start[row]), int(start[row]) + 18))
            logits = model(input_ids=tokens[None, :-1]).logits[0]
            loss = F.cross_entropy(logits, tokens[1:]) / 6
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
        model.zero_grad()

    recorded = training_losses(tmp_path / "run")
    assert sorted(recorded) == [2, 4, 6, 8, 9, 10, 12, 13]
    before = 0
    for step, loss in recorded.items():
        assert loss == pytest.approx(sum(losses[before:step]) / (step - before), rel=2e-4)
        before = step
    for name, tensor in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
        torch.testing.assert_close(tensor, named[name].detach(), rtol=5e-3, atol=5e-4)


def test_accumulated_gradients_are_those_of_the_whole_step(corpus: Corpus, tmp_path: Path):
    whole = train(small(corpus), corpus, tmp_path / "whole")
    parts = train(small(corpus, batch__sequences=2), corpus, tmp_path / "parts")
    assert whole.id != parts.id and whole.batches_id == parts.batches_id
    assert parts.final.loss.mean == pytest.approx(whole.final.loss.mean, rel=1e-4)
    a, b = training_losses(tmp_path / "whole"), training_losses(tmp_path / "parts")
    assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant", "warmup": 2}, lambda s: min(1, s / 2)),
        ({"schedule": "linear", "warmup": 0, "decay": 0.5, "final_lr": 0.2}, lambda s: 1 - 0.8 * max(0, s - 10) / 10),
        ({"schedule": "cosine", "warmup": 0.1, "final_lr": 0},
         lambda s: s / 2 if s < 2 else (1 + math.cos(math.pi * (s - 2) / 18)) / 2),
    ],
)  # fmt: skip
def test_the_learning_rate_follows_its_schedule(corpus: Corpus, tmp_path: Path, options, expected):
    run = small(corpus, budget__steps=20, log_every=1, optimiser={"lr": 0.01, **options})
    train(run, corpus, tmp_path / "run")
    rates = {r["step"]: r["learning_rate"] for r in RunFolder(tmp_path / "run").metrics() if "learning_rate" in r}
    assert rates == pytest.approx({step: 0.01 * expected(step - 1) for step in range(1, 21)}, abs=1e-9)


def test_every_parameter_is_in_one_group_with_its_role_s_options(corpus: Corpus):
    roles = {"table": {"lr_scale": 10}, "coefficient": {"lr": 0.5, "weight_decay": 0.02}, "gate": {"betas": [0.5, 0.6]}}
    run = small(corpus, model__variant="v_plus_table_gated", optimiser__roles=roles)
    model = vp.ValuePathForCausalLM(run.config)
    made = {group["role"]: group for group in groups(model, run.plan, run.settings.optimiser)}
    held = [parameter for group in made.values() for parameter in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    assert made["table"]["lr"] == 0.1 and made["table"]["weight_decay"] == 0.1
    assert made["gate"]["betas"] == (0.5, 0.6) and made["gate"]["weight_decay"] == 0.0
    assert made["norm"]["weight_decay"] == 0.0 and made["matrix"]["lr"] == 0.01
    assert all(p.ndim == 2 for p in made["matrix"]["params"]) and all(p.ndim < 2 for p in made["norm"]["params"])


# ------------------------------------------------------------------------------------------------------------ pairing
VARIANTS = ["transformer", "resformer_learnable", "svformer", "bov", "cla2", "denseformer"]


def test_variants_see_the_same_batches_and_start_from_the_same_shared_weights(corpus: Corpus, tmp_path: Path, monkeypatch):
    seen: dict[str, list[torch.Tensor]] = {}
    starts: dict[str, dict[str, torch.Tensor]] = {}
    forward = vp.ValuePathForCausalLM.forward

    def watched(self, *args, **kwargs):
        if self.training:
            name = self.config.variant
            starts.setdefault(name, {key: p.detach().clone() for key, p in self.named_parameters()})
            seen.setdefault(name, []).append(torch.stack([kwargs["input_ids"], kwargs["shift_labels"]]).clone())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(vp.ValuePathForCausalLM, "forward", watched)
    ids = {train(small(corpus, model__variant=v), corpus, tmp_path / v).batches_id for v in VARIANTS}
    assert len(ids) == 1
    reference, start = seen["transformer"], starts["transformer"]
    assert len(reference) == 13
    for variant in VARIANTS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(reference, seen[variant], strict=True))
        shared = start.keys() & starts[variant].keys()
        assert len(shared) > 30
        assert all(torch.equal(start[name], starts[variant][name]) for name in shared), variant
    train(small(corpus, seed=6), corpus, tmp_path / "other seed")
    assert not torch.equal(seen["transformer"][0], seen["transformer"][13])


def test_a_longer_run_begins_with_the_shorter_one_s_batches(corpus: Corpus):
    order = TrainingOrder(corpus, 17, 5)
    short, long = Sequences(order, 30), Sequences(order, 3000)
    assert all(torch.equal(short[s]["input_ids"], long[s]["input_ids"]) for s in range(30))
    assert torch.equal(long[2999]["input_ids"][1:], long[2999]["shift_labels"][:-1])


# ------------------------------------------------------------------------------------------------------ interruptions
def everything(folder: Path) -> dict[str, bytes]:
    """What a run leaves, but for times."""
    return {name: (folder / name).read_bytes() for name in ("result.json", "metrics.jsonl", "model/model.safetensors", "id")}


@pytest.mark.parametrize("stops", [[1], [4], [6, 7], [9, 10, 12], [13]], ids=str)
def test_an_interrupted_run_ends_with_the_same_bits(corpus: Corpus, tmp_path: Path, stops: list[int]):
    run = small(corpus, model__variant="resformer_learnable", model__attention_dropout=0.1)
    train(run, corpus, tmp_path / "whole")
    for stop in stops:
        def watch(step: int, stop: int = stop) -> None:
            if step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(run, corpus, tmp_path / "parts", watch)
        assert not (tmp_path / "parts" / "result.json").exists()
    train(run, corpus, tmp_path / "parts")
    assert everything(tmp_path / "parts") == everything(tmp_path / "whole")
    assert not list((tmp_path / "parts").glob("checkpoint-*"))


def test_a_checkpoint_that_was_not_finished_is_not_used(corpus: Corpus, tmp_path: Path):
    run = small(corpus)

    def watch(step: int) -> None:
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, corpus, tmp_path / "run", watch)
    folder = RunFolder(tmp_path / "run")
    assert [step for step, _ in folder.checkpoints()] == [8]
    torn = tmp_path / "run" / "checkpoint-10"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    with folder.metrics_file.open("a") as out:
        out.write('{"step": 10, "train_lo')
    result = train(run, corpus, tmp_path / "run")
    assert result == train(run, corpus, tmp_path / "whole")


def test_a_finished_run_is_not_trained_again(corpus: Corpus, tmp_path: Path):
    run = small(corpus)
    first = train(run, corpus, tmp_path / "run")

    def never(step: int) -> None:
        raise AssertionError("trained again")

    assert train(run, corpus, tmp_path / "run", never) == first


# --------------------------------------------------------------------------------------------------------- divergence
def test_divergence_stops_the_run_with_its_step_and_its_last_good_checkpoint(corpus: Corpus, tmp_path: Path):
    run = small(corpus, log_every=1)
    made: list[vp.ValuePathForCausalLM] = []
    build = vp.ValuePathForCausalLM.__init__

    def watch(step: int) -> None:
        if step == 6:  # the seventh forward pass sees it
            with torch.no_grad():
                made[0].lm_head.weight[3, 4] = math.nan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vp.ValuePathForCausalLM, "__init__", lambda self, *a, **k: (build(self, *a, **k), made.append(self))[0])
        with pytest.raises(Diverged, match="step 7: the training loss is NaN"):
            train(run, corpus, tmp_path / "run", watch)
    failure = RunFolder(tmp_path / "run").failure()
    assert failure is not None
    assert (failure.kind, failure.step, failure.checkpoint) == ("diverged", 7, "checkpoint-4")
    assert "optimiser.lr (now 0.01)" in failure.hint
    assert all(p.isfinite().all() for p in load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors").values())


def test_a_rate_far_too_high_diverges(corpus: Corpus, tmp_path: Path):
    run = small(corpus, optimiser={"lr": 1e12, "clip": 0, "warmup": 0, "schedule": "constant"})
    with pytest.raises(Diverged):
        train(run, corpus, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "failure.json").read_text())["kind"] == "diverged"


# ------------------------------------------------------------------------------------------------------------ settings
def test_the_name_of_a_run_follows_every_setting_but_where_the_text_lies(corpus: Corpus):
    base = small(corpus)
    same = small(corpus, data__path="elsewhere")
    assert same.id == base.id
    changes = [
        {"compute__threads": 2}, {"seed": 6}, {"optimiser__lr": 0.02}, {"model__variant": "bov"}, {"evaluation__times": 2},
        {"model__wiring": "v[:] = 1*own"}, {"budget__steps": 14}, {"data__weights": {"mail": 1, "json": 2}},
    ]  # fmt: skip
    names = {small(corpus, **change).id for change in changes}
    assert len(names | {base.id}) == len(changes) + 1


@given(steps=st.integers(1, 500), times=st.integers(1, 40), every=st.integers(1, 60) | st.none(), log=st.integers(1, 60))
def test_evaluations_are_even_and_checkpoints_fall_on_records(steps, times, every, log):
    points = {"evaluation": {"times": times}, "log_every": log, "checkpoint_every": every}
    settings = {**SMALL, "budget": {"steps": steps}, **points}
    run = RunSettings.of(Document(settings, "test")).resolve(311, "x")
    at = sorted(run.evaluation_steps)
    assert at[-1] == steps and len(at) == min(times, steps)
    gaps = {b - a for a, b in zip([0, *at], at, strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert run.steps in run.checkpoint_steps <= run.log_steps and run.evaluation_steps <= run.log_steps


def test_budgets_in_tokens_and_flops_are_whole_steps(corpus: Corpus):
    run = small(corpus, budget={"tokens": 1000})
    assert run.steps == 10 and run.tokens == 1020
    each = flops_per_token(run.plan, 17).training
    assert small(corpus, budget={"flops": each * 102 * 7}).steps == 7
    assert small(corpus, budget={"flops": each * 102 * 7 + 1}).steps == 8
    assert run.training_flops == 1020 * each


def test_other_text_than_planned_is_refused(corpus: Corpus, tmp_path: Path):
    run = RunSettings.of(Document(SMALL, "test")).resolve(corpus.vocab_size, "another", corpus.eos)
    with pytest.raises(ValueError, match="fingerprint"):
        train(run, corpus, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "part"),
    [({"model__vocab_size": 300}, "smaller than the 311 tokens"), ({"model__max_position_embeddings": 16}, "smaller than"),
     ({"model__hidden_size": 21}, "model: hidden_size=21"), ({"model__variant": "bof"}, "model: "),
     ({"model__hidden_size": "wide"}, "model: "), ({"model__wiring": "v[1:] = owm"}, "model: column 9")],
)  # fmt: skip
def test_models_that_cannot_be_built_are_one_clear_error(corpus: Corpus, change, part):
    with pytest.raises(ValueError) as caught:
        small(corpus, **change)
    assert part in str(caught.value), str(caught.value)


def test_a_folder_of_other_settings_is_not_touched(corpus: Corpus, tmp_path: Path):
    first = train(small(corpus), corpus, tmp_path / "run")
    before = everything(tmp_path / "run")
    with pytest.raises(ValueError, match=f"holds a run with other settings \\({first.id}"):
        train(small(corpus, seed=6), corpus, tmp_path / "run")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("not a run")
    with pytest.raises(ValueError, match="holds no run"):
        train(small(corpus), corpus, tmp_path / "notes")
    assert everything(tmp_path / "run") == before


def test_wrong_weights_are_said_before_the_folder_is_taken(corpus: Corpus, tmp_path: Path):
    with pytest.raises(ValueError, match="'mail'"):
        train(small(corpus, data__weights={"mial": 1, "json": 1}), corpus, tmp_path / "run")
    train(small(corpus), corpus, tmp_path / "run")


def test_a_trained_model_is_as_it_was_configured(corpus: Corpus, tmp_path: Path):
    run = small(corpus)
    train(run, corpus, tmp_path / "run")
    model = vp.ValuePathForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert run.config.use_cache and model.config.use_cache
    assert model.config.eos_token_id == corpus.eos == model.generation_config.eos_token_id
    assert model.config.equation() == run.config.equation()


@pytest.mark.parametrize("variant", ["denseformer", "resformer_plus", "resformer_dense", "neutreno"])
def test_learned_numbers_are_followed_through_the_layers_in_order(corpus: Corpus, variant: str):
    from valuepath.train.coefficients import learned

    model = vp.ValuePathForCausalLM(small(corpus, model__variant=variant).config)
    stored = {name: p for name, p in model.named_parameters() if "coefficients" in name}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    found = learned(model)
    assert all(each["layers"] == sorted(each["layers"]) for each in found)
    values = sorted(value for each in found for value in each["values"])
    if variant == "resformer_plus":
        shares = next(each for each in found if each["label"] == "v: tap(0)")
        budget = model.model.budgets["0"]
        expected = (budget.scale * torch.softmax(budget.logits, 0)).tolist()
        assert shares["values"] == pytest.approx(expected[1:]) and shares["start"] == [1.0] * 4
    else:
        assert values == pytest.approx(sorted(p.item() for p in stored.values()))
    assert bool(found) == (variant != "neutreno")


def test_two_precisions_can_follow_each_other_in_one_process(corpus: Corpus, tmp_path: Path):
    exact = train(small(corpus), corpus, tmp_path / "a")
    rough = train(small(corpus, compute__precision="bf16"), corpus, tmp_path / "b")
    again = train(small(corpus, evaluation__sequences=7), corpus, tmp_path / "c")
    assert rough.final.loss.mean != exact.final.loss.mean
    assert rough.final.loss.mean == pytest.approx(exact.final.loss.mean, rel=0.02)
    assert again == exact

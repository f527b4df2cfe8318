"""Train one run from its settings into its folder, from wherever an earlier attempt stopped."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.state import AcceleratorState, GradientState
from transformers.utils import logging

from valuepath import files
from valuepath.counts import parameter_counts
from valuepath.data.order import TrainingOrder
from valuepath.machine import machine
from valuepath.model.modeling import ValuePathForCausalLM
from valuepath.settings import as_yaml
from valuepath.train.coefficients import learned
from valuepath.train.folder import RunFolder
from valuepath.train.result import Diverged, Learned, Point, RunFailure, RunResult
from valuepath.train.settings import Optimiser, Run
from valuepath.train.trainer import RunTrainer, Watch

if TYPE_CHECKING:
    from valuepath.data.corpus import Corpus


def train(run: Run, corpus: Corpus, path: Path, watch: Watch | None = None, progress: bool = False) -> RunResult:
    """Train, evaluate, save. A finished run's result is returned as it is; an interrupted one goes on from its last checkpoint,
    with the same result bit for bit.

    Args:
        run: from ``RunSettings.resolve``.
        corpus: the text whose fingerprint the run was resolved with.
        path: the run's folder; see ``valuepath.train.folder``.
        watch: told the number of finished optimiser steps after each.
        progress: show a progress bar.

    Raises:
        ValueError: for another text than the one in the settings.
        Diverged: when a loss, gradient or weight is NaN or infinite; ``failure.json`` says what to try.
    """
    if corpus.fingerprint != run.fingerprint:
        raise ValueError(
            f"{run.settings.data.path}: the text has fingerprint {corpus.fingerprint}, the run was planned with "
            f"{run.fingerprint}; prepare it again with the same sources and settings, or plan the run anew"
        )
    folder = RunFolder(path)
    folder.check(run.id)
    if (done := folder.result()) is not None:
        folder.tidy()
        return done
    # whatever is wrong with these settings is said before the folder is theirs
    order = TrainingOrder(corpus, run.settings.data.length, run.settings.seed, run.settings.data.weights)
    files.write_text(folder.id_file, run.id + "\n")
    checkpoint = folder.prepare()
    files.write_json(folder.machine_file, machine())
    files.write_text(path / "settings.yaml", as_yaml(run.settings.model_dump(mode="json")))
    logging.set_verbosity_error()
    if not progress:
        logging.disable_progress_bar()
    torch.set_num_threads(run.settings.compute.threads)
    # one process trains several runs: what accelerate keeps for the whole process belongs to the run before
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(run.settings.seed)
    try:
        if checkpoint is not None and checkpoint[0] == run.steps:
            model = ValuePathForCausalLM.from_pretrained(checkpoint[1])
        else:
            model = ValuePathForCausalLM(copy.deepcopy(run.config))
            first = 0 if checkpoint is None else checkpoint[0]
            trainer = RunTrainer(run, corpus, order, model, folder, watch, progress, first)
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint[1]))
            del trainer
        model.config.use_cache = run.config.use_cache  # Trainer turns it off
        with files.new_folder(folder.model) as building:
            model.save_pretrained(building)
            corpus.tokenizer().save_pretrained(building)
        result = _result(run, order, model, folder)
    except Diverged as wrong:
        last = folder.last_checkpoint()
        folder.fail(
            RunFailure(
                kind="diverged",
                step=wrong.step,
                reason=wrong.what,
                checkpoint=None if last is None else last[1].name,
                hint=_hint(run.settings.optimiser),
            )
        )
        raise
    finally:
        gc.collect()  # Trainer and its callbacks form cycles that hold the model and its optimiser
    folder.finish(result)
    return result


def _hint(optimiser: Optimiser) -> str:
    clip = f"lower optimiser.clip (now {optimiser.clip:g})" if optimiser.clip else "clip gradients (optimiser.clip is 0: off)"
    return f"lower optimiser.lr (now {optimiser.lr:g}), lengthen optimiser.warmup (now {optimiser.warmup:g}) or {clip}"


def _result(run: Run, order: TrainingOrder, model: ValuePathForCausalLM, folder: RunFolder) -> RunResult:
    points = [Point.model_validate(record) for record in folder.metrics() if "bpb" in record]
    return RunResult(
        id=run.id,
        settings=run.described(),
        equation=run.config.equation(),
        batches_id=run.batches_id,
        parameters=parameter_counts(run.plan).total,
        steps=run.steps,
        tokens=run.tokens,
        training_flops=run.training_flops,
        epochs=order.epochs(run.steps * run.sequences_per_step),
        points=points,
        coefficients=[Learned.model_validate(each) for each in learned(model)],
    )

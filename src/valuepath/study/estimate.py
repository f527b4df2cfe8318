"""How long a study will take: a few steps of each kind of run are timed, the rest is multiplication."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from valuepath.data.corpus import Corpus
from valuepath.model.modeling import ValuePathForCausalLM
from valuepath.study.recipe import StudyPlan
from valuepath.train.optimiser import adamw
from valuepath.train.settings import Run

STEPS = 3
"""Timed after one that is not."""


@dataclass(frozen=True)
class Estimate:
    """
    Attributes:
        seconds: of one worker for all runs that are left.
        measured: what was timed, in words.
    """

    seconds: float
    measured: str


def estimate(plan: StudyPlan, left: set[str]) -> Estimate:
    """The time for the runs with these ids, by timing one seed of each variant at each point of the axes."""
    corpora: dict[str, Corpus] = {}
    costs: dict[tuple[int, str], float] = {}
    total = 0.0
    for run_id, planned in plan.distinct.items():
        if run_id not in left:
            continue
        kind = planned.group, planned.variant
        if kind not in costs:
            path = planned.run.settings.data.path
            if path not in corpora:
                corpora[path] = Corpus.load(Path(path))
            costs[kind] = run_seconds(planned.run, corpora[path])
        total += costs[kind]
    return Estimate(total, f"{STEPS} optimiser steps were timed for each of {len(costs)} kinds of run, one at a time")


def run_seconds(run: Run, corpus: Corpus) -> float:
    """The training and evaluation time of one run, from a few optimiser steps on random tokens."""
    settings = run.settings
    torch.set_num_threads(settings.compute.threads)
    device = torch.device(settings.compute.device)
    model = ValuePathForCausalLM(run.config).train()
    model.to(device.type)
    optimiser = adamw(model, run.plan, settings.optimiser)
    at_once = settings.batch.sequences or run.sequences_per_step
    passes = run.sequences_per_step // at_once
    ids = torch.randint(0, corpus.vocab_size, (at_once, settings.data.length + 1), device=device)
    steps = []
    for _ in range(STEPS + 1):
        began = time.perf_counter()
        for _ in range(passes):
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.compute.precision == "bf16"):
                loss = model(input_ids=ids[:, :-1], shift_labels=ids[:, 1:]).loss
            loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        steps.append(time.perf_counter() - began)
    step = statistics.median(steps[1:])
    held_out = sum(len(domain.validation) for domain in corpus.domains.values())
    # a forward pass is a third of a step
    return step * run.steps + len(run.evaluation_steps) * held_out / settings.batch.tokens * step / 3

"""transformers' ``Trainer`` with our batches, our parameter groups, our held-out losses and a guard against divergence."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback

from valuepath.evaluate.loss import held_out_nats, summary
from valuepath.model.modeling import ValuePathForCausalLM
from valuepath.train.folder import RunFolder
from valuepath.train.optimiser import adamw, schedule
from valuepath.train.result import Diverged
from valuepath.train.settings import Run

if TYPE_CHECKING:
    from valuepath.data.corpus import Corpus
    from valuepath.data.order import TrainingOrder

Watch = Callable[[int], None]
"""Called with the number of finished optimiser steps."""


class Sequences(Dataset[dict[str, Tensor]]):
    """The training sequences of a run, in the order in which they are trained: item s is the s-th.

    Each is T inputs and the T tokens that follow them, so that every token of a sequence is a prediction.
    """

    def __init__(self, order: TrainingOrder, count: int) -> None:
        self.order = order
        self.domain, self.start = order.take(count)

    def __len__(self) -> int:
        return len(self.domain)

    def __getitem__(self, s: int) -> dict[str, Tensor]:
        tokens = torch.from_numpy(self.order.read(int(self.domain[s]), int(self.start[s])))
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:]}


def collate(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def arguments(run: Run, folder: RunFolder, progress: bool) -> TrainingArguments:
    """What ``Trainer`` is told. When to log, evaluate and save is said by ``Schedule``."""
    settings = run.settings
    at_once = settings.batch.sequences or run.sequences_per_step
    made = TrainingArguments(
        output_dir=str(folder.path),
        max_steps=run.steps,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=run.sequences_per_step // at_once,
        learning_rate=settings.optimiser.lr,
        max_grad_norm=settings.optimiser.clip,
        **schedule(settings.optimiser, run.steps),
        train_sampling_strategy="sequential",
        seed=settings.seed,
        use_cpu=settings.compute.device == "cpu",
        bf16=settings.compute.precision == "bf16",
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=not progress,
        dataloader_pin_memory=settings.compute.device != "cpu",
        remove_unused_columns=False,
        log_level="error",
    )
    # a run is one process on one device: Trainer would split the batch over all GPUs that it sees, and multiply it
    made._n_gpu = min(made.n_gpu, 1)
    return made


class RunTrainer(Trainer):
    """One run.

    Args:
        watch: told after every optimiser step.
        progress: show ``Trainer``'s own progress bar.
    """

    def __init__(
        self,
        run: Run,
        corpus: Corpus,
        order: TrainingOrder,
        model: ValuePathForCausalLM,
        folder: RunFolder,
        watch: Watch | None = None,
        progress: bool = False,
        first_step: int = 0,
    ) -> None:
        self.run, self.corpus, self.folder = run, corpus, folder
        self.losses: list[Tensor] = []
        super().__init__(
            model=model,
            args=arguments(run, folder, progress),
            train_dataset=Sequences(order, run.steps * run.sequences_per_step),
            data_collator=collate,
            callbacks=[
                Schedule(run),
                Records(run, folder, self.losses),
                TensorBoardCallback(SummaryWriter(str(folder.tensorboard), purge_step=first_step + 1)),
                *([_Watched(watch)] if watch is not None else []),
            ],
        )

        self.remove_callback(PrinterCallback)  # the records are in metrics.jsonl

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            chosen = self.model if model is None else model
            assert chosen is not None
            self.optimizer = adamw(chosen, self.run.plan, self.run.settings.optimiser)
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The held-out losses of every domain, recorded; replaces ``Trainer``'s, which knows one loss a batch."""
        settings, step = self.run.settings, self.state.global_step
        assert self.model is not None
        nats = held_out_nats(
            self.model,
            self.corpus,
            settings.data.length,
            settings.evaluation.sequences,
            self.accelerator.autocast,
        )
        found = summary(nats)
        if not math.isfinite(found["loss"]["mean"]):
            raise Diverged(step, f"the held-out loss is {found['loss']['mean']}")
        tokens = step * settings.batch.tokens
        flops = tokens * self.run.flops.training
        self.folder.append(self.folder.metrics_file, {"step": step, "tokens": tokens, "flops": flops, **found})
        flat = {
            f"eval_{metric}/{name}": value
            for metric, parts in found.items()
            for name, value in {"mean": parts["mean"], "token_weighted": parts["token_weighted"], **parts["domains"]}.items()
        }
        self.log(dict(flat))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, flat)
        return flat


class Schedule(TrainerCallback):
    """When to log, evaluate and save: at the run's own steps."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        control.should_log = step in self.run.log_steps
        control.should_evaluate = step in self.run.evaluation_steps
        control.should_save = step in self.run.checkpoint_steps
        return control


class Records(TrainerCallback):
    """Training loss and times as they come; a checkpoint called good once everything up to it is on the disk.

    Args:
        losses: of the forward passes since the last record; emptied here.
    """

    def __init__(self, run: Run, folder: RunFolder, losses: list[Tensor]) -> None:
        self.run, self.folder, self.losses = run, folder, losses
        self.seconds: list[float] = []
        self.began = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._wait(args)
        self.began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._wait(args)
        self.seconds.append(time.perf_counter() - self.began)

    def _wait(self, args: TrainingArguments) -> None:
        """Until what was started on a GPU has happened: times are of work, not of its launch."""
        if args.device.type == "cuda":
            torch.cuda.synchronize(args.device)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "learning_rate" not in logs:
            return  # of an evaluation, or the closing summary
        step = state.global_step
        passes = len(self.losses) // max(1, len(self.seconds))
        finite = torch.stack(self.losses).isfinite().tolist()
        self.losses.clear()
        if not all(finite):
            at = step - len(self.seconds) + 1 + finite.index(False) // max(1, passes)
            raise Diverged(at, "the training loss is NaN or infinite")
        norm = logs.get("grad_norm")
        if norm is not None and not math.isfinite(norm):
            raise Diverged(step, f"the gradient's norm is {norm}")
        self.folder.append(
            self.folder.metrics_file,
            {
                "step": step,
                "tokens": step * self.run.settings.batch.tokens,
                "train_loss": logs["loss"],
                "learning_rate": logs["learning_rate"],
                **({} if norm is None else {"grad_norm": norm}),
            },
        )
        self.folder.append(self.folder.timing_file, {"step": step, "seconds": statistics.median(self.seconds)})
        self.seconds.clear()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for name, parameter in kwargs["model"].named_parameters():
            if not parameter.isfinite().all():
                raise Diverged(state.global_step, f"{name} has NaN or infinite entries")
        self.folder.complete(state.global_step)


class _Watched(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.watch(state.global_step)

"""``valuepath bench decode``: cells of kernels and of whole models, measured, summed up, and written to JSON.

Keys of the JSON object: ``machine``; ``settings``; ``text`` (``source``, ``vocab_size``); ``kernel`` and ``whole`` (lists of
cells: ``dtype``, ``batch``, ``context``, for kernels ``head_dim`` and ``heads``, and either ``skipped``, a reason, or what was
measured: see ``valuepath.bench.kernel.measure`` and ``valuepath.bench.whole.measure``); ``summary`` (for kernels, over cells
of at least 16,384 tokens: geometric mean and largest of each ratio; null without such cells).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import psutil
import torch

from valuepath.bench import kernel, whole
from valuepath.bench.text import TextIds
from valuepath.machine import machine

Level = Literal["kernel", "model", "both"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LONG = 16384
"""Tokens from which a context counts in the summary."""
SHARE = 0.4
"""Cells that need more than this share of the memory are skipped."""


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    level: Level = "both"
    contexts: tuple[int, ...] = (512, 2048, 8192, 16384, 32768, 65536)
    batches: tuple[int, ...] = (1, 4, 16)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    heads: int = 12
    head_dims: tuple[int, ...] = (64, 128)
    layers: int = 8
    hidden: int = 768
    rounds: int = 15
    device: str = "cpu"
    threads: int = 0

    def check(self) -> None:
        """
        Raises:
            ValueError: for a size below 1, an unknown precision, level or device, and a width that the heads do not divide.
        """
        for name in ("contexts", "batches", "head_dims"):
            sizes = getattr(self, name)
            if not sizes or any(size < 1 for size in sizes):
                raise ValueError(f"{name.replace('_', '-')}: expected whole numbers of at least 1, got {list(sizes)}")
        for name in ("heads", "layers", "hidden", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {getattr(self, name)}")
        unknown = [name for name in self.dtypes if name not in DTYPES]
        if unknown or not self.dtypes:
            raise ValueError(f"dtypes: expected {', '.join(DTYPES)}; got {', '.join(unknown) or 'none'}")
        if self.level not in ("kernel", "model", "both"):
            raise ValueError(f"level: expected kernel, model or both; got {self.level!r}")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise ValueError(f"hidden={self.hidden} is no even multiple of heads={self.heads}")
        try:
            torch.empty(1, device=self.device)
        except (RuntimeError, AssertionError) as wrong:
            raise ValueError(f"device {self.device!r}: {str(wrong).splitlines()[0]}") from None


def memory(device: torch.device) -> int:
    """Bytes of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def run(settings: Settings, text: TextIds, tell: Callable[[str], None]) -> dict[str, Any]:
    """Measure every cell; see the module for the result's keys."""
    settings.check()
    device = torch.device(settings.device)
    allowed = int(SHARE * memory(device))
    before = torch.get_num_threads()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    result: dict[str, Any] = {
        "machine": machine() | {"threads": torch.get_num_threads(), "memory_bytes": memory(device)},
        "settings": asdict(settings),
        "text": {"source": text.source, "vocab_size": text.vocab_size},
        "kernel": [],
        "whole": [],
        "summary": None,
    }
    if device.type == "cuda":
        result["machine"]["device"] = torch.cuda.get_device_name(device)

    def cell(kind: str, labels: dict[str, Any], needed: int, tokens: int, measure: Callable[[], dict[str, Any]]) -> None:
        gc.collect()  # models hold themselves in cycles: the last cell's must be gone before the next one's are made
        tell(f"{kind}: " + ", ".join(f"{key} {value}" for key, value in labels.items()))
        reason = None
        if needed > allowed:
            reason = f"needs {needed / 2**30:.1f} GiB, more than {SHARE:.0%} of {memory(device) / 2**30:.1f} GiB"
        else:
            try:
                text.batch(labels["batch"], tokens)
            except ValueError as wrong:
                reason = str(wrong)
        result[kind].append(labels | ({"skipped": reason} if reason else measure()))

    try:
        for dtype, batch, context in product(settings.dtypes, settings.batches, settings.contexts):
            labels = {"dtype": dtype, "batch": batch, "context": context}
            if settings.level != "model":
                for head_dim in settings.head_dims:
                    one = kernel.KernelCell(DTYPES[dtype], head_dim, batch, context, settings.heads)
                    cell(
                        "kernel",
                        labels | {"head_dim": head_dim, "heads": settings.heads},
                        one.bytes_needed(text.vocab_size),
                        context,
                        lambda one=one: kernel.measure(one, text, settings.rounds, device),  # type: ignore[misc]
                    )
            if settings.level != "kernel":
                model = whole.WholeCell(DTYPES[dtype], batch, context, settings.layers, settings.hidden, settings.heads)
                cell(
                    "whole",
                    labels,
                    model.bytes_needed(text.vocab_size),
                    context + whole.steps_taken(settings.rounds),
                    lambda one=model: whole.measure(one, text, settings.rounds, device),  # type: ignore[misc]
                )
    finally:
        torch.set_num_threads(before)
    result["summary"] = summary(result["kernel"])
    return result


def summary(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]] | None:
    """Geometric mean and largest of the kernels' ratios over long contexts."""
    long = [cell for cell in cells if cell["context"] >= LONG and "skipped" not in cell]
    if not long:
        return None
    found = {}
    for name in ("pooled_over_stored", "pooled_over_gathered", "pooled_over_keys"):
        ratios = [cell[name] for cell in long]
        found[name] = {
            "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
            "largest": max(ratios),
            "cells": len(ratios),
        }
    return found

"""Measures the core on this machine and writes one JSON file.

    python benchmarks/core.py --out benchmarks/results/core.json

* parity: the largest difference between cached and uncached logits over all presets, head counts and windows, with random
  weights and ragged left padding, relative to the largest logit;
* bytes: logical bytes against the plan's figure, and allocated over logical bytes without windows;
* flops: operations that torch executes over those that the plan counts (matrix products, forward and backward);
* time: a decode step and a forward pass beside transformers' Llama of the same size, alternating, medians and ratios.

A small CPU run is no evidence about the speed of a large model or of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import valuepath as vp
from valuepath.compat import CACHE_NAME
from valuepath.counts import cache_counts, flops_per_token

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 42,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "head_dim": 10,
    "intermediate_size": 31,
}
LENGTH = 13
PIECES = {"whole": [13], "chunked": [4, 6, 3], "one by one": [1] * 13}
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"sliding_window": 5},
    "SSSL": {"window_pattern": "SSSL", "sliding_window": 4},
}


def randomised(config: vp.ValuePathConfig, dtype: torch.dtype) -> vp.ValuePathForCausalLM:
    model = vp.ValuePathForCausalLM(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (0.7 if parameter.ndim <= 1 else 0.0))
    return model


def configs() -> list[tuple[str, vp.ValuePathConfig]]:
    """Every preset with every head count and window that its equation allows."""
    found = []
    for name in vp.variants():
        for heads, kv in (("MHA", 6), ("GQA", 2), ("MQA", 1)):
            for window, fields in WINDOWS.items():
                try:
                    config = vp.ValuePathConfig(variant=name, num_key_value_heads=kv, **SIZES, **fields)
                except vp.WiringError:
                    continue  # attention matrices of unequal windows
                if config.plan().generation_refusal is None:
                    found.append((f"{name}, {heads}, {window}", config))
    return found


@torch.no_grad()
def parity(dtype: torch.dtype) -> dict[str, Any]:
    ids = torch.randint(1, 53, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :3], mask[2, :6] = 0, 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    worst, at, cases = 0.0, "", 0
    for label, config in configs():
        model = randomised(config, dtype)
        full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
        for how, sizes in PIECES.items():
            cache, start, logits = None, 0, []
            for size in sizes:
                end = start + size
                out = model(
                    ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    use_cache=True,
                    **{CACHE_NAME: cache},
                )
                cache, start = out[CACHE_NAME], end
                logits.append(out.logits)
            difference = (torch.cat(logits, 1)[mask.bool()] - full).abs().max() / full.abs().max()
            cases += 1
            if difference.item() > worst:
                worst, at = difference.item(), f"{label}, {how}"
    return {"cases": cases, "largest_relative_difference": worst, "at": at}


@torch.no_grad()
def bytes_held(length: int = 700, batch: int = 2) -> dict[str, Any]:
    ratios, wrong = [], []
    ids = torch.randint(1, 53, (batch, length))
    for label, config in configs():
        cache = vp.ValuePathForCausalLM(config)(ids, use_cache=True)[CACHE_NAME]
        counted = cache_counts(config.plan(), context=length, batch=batch, bytes_per_element=4).growing_bytes
        measured = cache.nbytes()
        if not any(cache.is_sliding):  # a short window is all block
            ratios.append(measured.allocated / measured.logical)
        if counted != measured.logical:
            wrong.append(label)
    return {
        "context": length,
        "batch": batch,
        "cases": len(configs()),
        "unlike_the_plan": wrong,
        "allocated_over_logical_without_windows": max(ratios),
    }


def flops(length: int = 67, batch: int = 2) -> dict[str, float]:
    """Executed over counted, per preset, with full attention."""
    ratios = {}
    for name in vp.variants():
        config = vp.ValuePathConfig(variant=name, **SIZES)
        model = vp.ValuePathForCausalLM(config)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(torch.randint(0, 53, (batch, length)), use_cache=False).logits.sum().backward()
        ratios[name] = counter.get_total_flops() / (flops_per_token(config.plan(), length).training * length * batch)
    return ratios


def alternating(work: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each piece of work, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 2):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if number >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


@torch.no_grad()
def timing(rounds: int, context: int = 512) -> dict[str, Any]:
    sizes = {
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 1792,
        "max_position_embeddings": 4096,
    }
    models: dict[str, Any] = {"transformers' Llama": LlamaForCausalLM(LlamaConfig(**sizes)).eval()}
    for name in ("transformer", "resformer_learnable", "svformer", "bov"):
        models[name] = vp.ValuePathForCausalLM(vp.ValuePathConfig(variant=name, **sizes)).eval()
    ids = torch.randint(0, 8192, (1, context))
    caches = {name: model(ids, use_cache=True)[CACHE_NAME] for name, model in models.items()}

    def step(name: str) -> Callable[[], Any]:
        return lambda: models[name](ids[:, :1], use_cache=True, **{CACHE_NAME: caches[name]})

    def whole(name: str) -> Callable[[], Any]:
        return lambda: models[name](ids, use_cache=False)

    steps = alternating({name: step(name) for name in models}, rounds)
    passes = alternating({name: whole(name) for name in models}, max(rounds // 8, 5))
    base = "transformers' Llama"
    return {
        "sizes": sizes,
        "context": context,
        "rounds": rounds,
        "decode_step_ms": steps,
        "decode_step_ratio": {name: ms / steps[base] for name, ms in steps.items()},
        "forward_ms": passes,
        "forward_ratio": {name: ms / passes[base] for name, ms in passes.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=200, help="decode steps per model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    result = {
        "machine": {
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": options.threads,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "timing": timing(options.rounds),
        "parity_float64": parity(torch.float64),
        "parity_float32": parity(torch.float32),
        "bytes": bytes_held(),
        "flops_executed_over_counted": flops(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=options.out.parent, delete=False) as file:
        json.dump(result, file, indent=1)
        file.write("\n")
    os.replace(file.name, options.out)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

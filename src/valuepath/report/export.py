"""The answer as CSV and as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from valuepath.report import words
from valuepath.study.results import Group, Score, StudyResults, VariantResult


def _metrics(variant: VariantResult) -> Iterator[tuple[str, str, Score]]:
    for metric, scores in (("loss", variant.loss), ("bpb", variant.bpb)):
        yield metric, "mean", scores.mean
        yield metric, "token_weighted", scores.token_weighted
        for domain, score in scores.domains.items():
            yield metric, f"domain:{domain}", score


def rows(results: StudyResults) -> list[dict[str, Any]]:
    """One row a group and variant. Columns: the axes, ``variant``, ``baseline``, ``seeds`` (finished), ``equation``; for loss
    and bpb their mean over seeds and ``_difference``, ``_low``, ``_high``, ``_pairs``, ``_verdict``; the costs."""
    found = []
    for g, group in enumerate(results.groups):
        for variant in group.variants:
            row: dict[str, Any] = {
                **group.point,
                "variant": variant.name,
                "baseline": variant.baseline,
                "seeds": len(variant.seeds),
                "equation": variant.equation,
            }
            for metric, scores in (("loss", variant.loss), ("bpb", variant.bpb)):
                difference = scores.mean.difference
                row[metric] = scores.mean.mean
                row[f"{metric}_token_weighted"] = scores.token_weighted.mean
                row[f"{metric}_difference"] = None if difference is None else difference.mean
                row[f"{metric}_low"] = None if difference is None else difference.low
                row[f"{metric}_high"] = None if difference is None else difference.high
                row[f"{metric}_pairs"] = 0 if difference is None else len(difference.per_seed)
                row[f"{metric}_verdict"] = None if difference is None else difference.verdict
            row |= {
                "parameters": variant.parameters,
                "tokens": variant.tokens,
                "training_flops": variant.training_flops,
                "cache_context": variant.cache.context,
                "cache_dtype": variant.cache.dtype,
                "cache_growing_bytes_per_token": variant.cache.growing_bytes_per_token,
                "cache_shared_bytes": variant.cache.shared_bytes,
                "step_seconds": results.measured.step_seconds[g].get(variant.name),
            }
            found.append(row)
    return found


SEED_COLUMNS = ("variant", "metric", "of", "seed", "value", "difference")


def seed_rows(results: StudyResults) -> list[dict[str, Any]]:
    """One row a group, variant, metric, part of the text and seed: ``value`` and the paired ``difference``."""
    return [
        {
            **group.point,
            "variant": variant.name,
            "metric": metric,
            "of": part,
            "seed": seed,
            "value": value,
            "difference": None if score.difference is None else score.difference.per_seed.get(seed),
        }
        for group in results.groups
        for variant in group.variants
        for metric, part, score in _metrics(variant)
        for seed, value in score.per_seed.items()
    ]


def csv(records: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """As CSV; floats keep every bit. ``columns`` stand there also if there is no record."""
    import pandas as pd

    return str(pd.DataFrame(list(records), columns=None if records else list(columns)).to_csv(index=False))


# --------------------------------------------------------------------------------------------------------- Markdown
def _cell(text: object) -> str:
    """Markdown's own signs and line breaks as plain text."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", " ".join(str(text).split()))


def _table(header: Sequence[str], body: Sequence[Sequence[str]], left: int = 1) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join([" :-- "] * left + [" --: "] * (len(header) - left)) + "|"]
    lines += ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in body]
    return "\n".join(lines)


def markdown(results: StudyResults) -> str:
    """A page to paste into notes."""
    parts = [f"# {_cell(results.name)}", _cell(words.heading(results)) + "."]
    for g, group in enumerate(results.groups):
        if group.point:
            parts.append(f"## {_cell(words.point(group))}")
        parts += [
            _losses(group),
            "\n".join(f"* {_cell(sentence)}" for sentence in [*words.answer(results, group), *words.unfinished(group)]),
            _domains(group),
            _costs(results, g),
        ]
    below = (words.chance(results) or "", words.held_out(results), *results.notes)
    parts += [*(_cell(text) for text in below), words.CAVEAT]
    machine = ", ".join(f"{name} {value}" for name, value in results.measured.machine.items())
    texts = ", ".join(f"{text.fingerprint} (vocabulary {text.vocab_size:,})" for text in results.data)
    parts.append(f"Text {texts}; machine: {_cell(machine)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _losses(group: Group) -> str:
    body = []
    for variant in group.variants:
        difference = variant.loss.mean.difference
        body.append(
            (
                variant.name,
                words.loss(variant.loss.mean.mean),
                words.loss(variant.loss.token_weighted.mean),
                words.loss(variant.bpb.mean.mean),
                "" if difference is None else words.signed(difference.mean),
                words.interval(difference),
                str(len(variant.seeds) if difference is None else len(difference.per_seed)),
                words.verdict(variant),
            )
        )
    return _table(("variant", "loss", "token-weighted", "BPB", "difference", "95 % interval", "n", ""), body)


def _domains(group: Group) -> str:
    names = words.domains(group)
    if len(names) < 2:
        return ""
    body = []
    for variant in group.variants:
        scores = [variant.loss.domains.get(name) for name in names]
        body.append((variant.name, *(words.loss(None if score is None else score.mean) for score in scores)))
    return _table(("loss by domain", *map(_cell, names)), body)


def _costs(results: StudyResults, g: int) -> str:
    body = [
        (
            variant.name,
            f"{variant.parameters:,}",
            f"{variant.tokens:,}",
            f"{variant.training_flops:.3g}",
            f"{variant.cache.growing_bytes_per_token:,.0f}",
            words.shared(variant),
            words.seconds(results.measured.step_seconds[g].get(variant.name)),
        )
        for variant in results.groups[g].variants
    ]
    cache = words.cache_heading(results)
    return _table(
        ("variant", "parameters", "tokens", "training FLOPs", f"cache bytes a token ({cache})", "shared tables", "step"), body
    )

"""Numbers and findings as text, the same in the terminal, in Markdown and on the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from valuepath.render import size
from valuepath.study.results import Difference, Group, StudyResults, VariantResult

CAVEAT = (
    "These are the losses of the models and the budget named here. A small run, on a CPU above all, is no evidence about a "
    "large model: order and size of the differences change with width, depth, data and training length."
)



def loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def signed(value: float) -> str:
    """Four decimals, two digits where these would be 0; with a real minus sign, and no sign on 0."""
    text = f"{value:+.4f}" if abs(value) >= 5e-5 else f"{value:+.1e}"
    return text.replace("-", "−") if value else "0"


def interval(difference: Difference | None) -> str:
    """``[−0.0312, −0.0112]``; nothing where there is none."""
    if difference is None or difference.low is None or difference.high is None:
        return ""
    return f"[{signed(difference.low)}, {signed(difference.high)}]"


def verdict(variant: VariantResult, metric: Literal["loss", "bpb"] = "loss") -> str:
    """One word for the difference."""
    difference = getattr(variant, metric).mean.difference
    if variant.baseline:
        return "baseline"
    if difference is None:
        return "no pair"
    if difference.verdict == "undecided":
        return "undecided" if len(difference.per_seed) > 1 else "one seed"
    return str(difference.verdict)


def count(value: float) -> str:
    """``1.23M``: three digits and a letter for thousands, millions, and so on."""
    for letter in ("", "k", "M", "G"):
        if float(f"{value:.3g}") < 1000:
            return f"{value:.3g}{letter}"
        value /= 1000
    return f"{value:.3g}T"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 10 else f"{value:.1f} s"


def shared(variant: VariantResult) -> str:
    return size(variant.cache.shared_bytes) if variant.cache.shared_bytes else "–"


def point(group: Group) -> str:
    """``optimiser.lr = 0.001, data.length = 128``; nothing without axes."""
    return ", ".join(f"{path} = {value}" for path, value in group.point.items())


def _names(variants: list[VariantResult]) -> str:
    return ", ".join(variant.name for variant in variants)


def _same_runs(variant: VariantResult, baseline: VariantResult) -> bool:
    return variant.run_ids == baseline.run_ids


def answer(results: StudyResults, group: Group) -> Iterator[str]:
    """What this group supports, in sentences."""
    baseline = next(variant for variant in group.variants if variant.baseline)
    by: dict[str, list[VariantResult]] = {}
    for variant in group.variants:
        if not variant.baseline:
            by.setdefault("same" if _same_runs(variant, baseline) else verdict(variant), []).append(variant)
    if better := by.get("lower"):
        yield f"Lower loss than {results.baseline}, with the whole 95 % interval below 0: {_names(better)}."
    if worse := by.get("higher"):
        yield f"Higher loss than {results.baseline}, with the whole 95 % interval above 0: {_names(worse)}."
    if equal := by.get("equal"):
        yield f"Exactly the loss of {results.baseline}, seed by seed: {_names(equal)}."
    if same := by.get("same"):
        yield f"The settings of {results.baseline}, so the same runs and not others: {_names(same)}."
    for variant in by.get("undecided", ()):
        difference = variant.loss.mean.difference
        assert difference is not None
        yield (
            f"The {len(difference.per_seed)} seeds do not support a conclusion about {variant.name}: the interval "
            f"{interval(difference)} includes 0."
        )
    if single := by.get("one seed"):
        yield (
            f"One seed supports no conclusion about {_names(single)}: without a second there is no interval. "
            "Add seeds to the recipe and run it again; finished runs are kept."
        )
    if missing := by.get("no pair"):
        yield f"No seed is finished for both {results.baseline} and {_names(missing)}: nothing to compare."
    for variant in group.variants:
        difference = variant.loss.mean.difference
        if difference is not None and len(difference.per_seed) < len(results.seeds):
            seeds = ", ".join(map(str, difference.per_seed))
            yield (
                f"{variant.name} is compared on seed {seeds} only: others failed or are not finished, which can itself favour "
                "it. Its mean loss and the baseline's may be over other seeds than the difference."
            )


def chance(results: StudyResults) -> str | None:
    """A warning where several intervals are read at once."""
    shown = sum(
        interval(variant.loss.mean.difference) != "" and verdict(variant) != "equal"
        for group in results.groups
        for variant in group.variants
    )
    if shown < 2:
        return None
    return (
        f"About one in twenty 95 % intervals misses the truth by chance; the {shown} of the loss shown here are not corrected "
        "for that."
    )


def domains(group: Group) -> list[str]:
    """Of the held-out text, in its order."""
    return next((list(variant.loss.domains) for variant in group.variants if variant.loss.domains), [])


def unfinished(group: Group) -> Iterator[str]:
    """Runs without a result."""
    for variant in group.variants:
        if variant.missing:
            yield f"{variant.name}: not finished yet with seed {', '.join(map(str, variant.missing))}."
        for failure in variant.failures:
            at = "" if failure.step is None else f" at step {failure.step:,}"
            yield f"{variant.name}, seed {failure.seed}: failed{at}: {failure.reason}. What to try: {failure.hint}."


def heading(results: StudyResults) -> str:
    seeds = len(results.seeds)
    return (
        f"{results.name}: {results.finished} of {results.planned} runs finished, {seeds} seed{'s' if seeds > 1 else ''}, "
        f"{results.budget} a run"
    )


def held_out(results: StudyResults) -> str:
    """What the losses are of."""
    one = results.data[0] if len(results.data) == 1 else None
    parts = [f"{name} {count(each.tokens)} tokens" for name, each in (one.held_out.items() if one is not None else ())]
    text = f" Held-out text: {', '.join(parts)}." if parts else ""
    return (
        "Loss: nats a token of held-out text, mean over domains, then over seeds. BPB: bits a UTF-8 byte. Difference: loss "
        f"minus {results.baseline}'s with the same seed, mean and 95 % interval (Student's t).{text}"
    )


STEP = "Step: measured; other runs may have shared the machine."


def cache_heading(results: StudyResults) -> str:
    """What the cache column assumes."""
    cache = results.groups[0].variants[0].cache
    return f"{cache.context:,} tokens of context, {cache.dtype}"

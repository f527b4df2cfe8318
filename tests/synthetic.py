"""Random but valid study results, for tests of what is made from them."""

from __future__ import annotations

import numpy as np

from valuepath.study.results import (
    Cache,
    Coefficients,
    Curve,
    Failure,
    Group,
    HeldOut,
    Measured,
    Scores,
    StudyResults,
    Text,
    VariantResult,
)
from valuepath.study.statistics import score

DOMAINS = ("books", "code")


def scores(rng: np.random.Generator, seeds: list[int], shift: float, baseline: Scores | None, noise: float) -> Scores:
    def one(reference):
        values = {
            seed: 3.0 + seed / 10 + shift + rng.normal(0, noise)
            if reference is None or seed not in reference.per_seed
            else reference.per_seed[seed] + shift + rng.normal(0, noise)
            for seed in seeds
        }
        return score(values, None if reference is None else reference.per_seed)

    return Scores(
        mean=one(None if baseline is None else baseline.mean),
        token_weighted=one(None if baseline is None else baseline.token_weighted),
        domains={name: one(None if baseline is None else baseline.domains[name]) for name in DOMAINS},
    )


def study(
    names: tuple[str, ...] = ("transformer", "svformer", "bov"),
    seeds: int = 3,
    points: tuple[dict, ...] = ({},),
    shifts: tuple[float, ...] = (0.0, -0.2, 0.0),
    noise: float = 0.01,
    failures: dict[str, list[int]] | None = None,
    missing: dict[str, list[int]] | None = None,
    learned: int = 2,
    seed: int = 0,
) -> StudyResults:
    """The first name is the baseline."""
    rng = np.random.default_rng(seed)
    failures, missing = failures or {}, missing or {}
    groups, steps = [], []
    for point in points:
        variants: list[VariantResult] = []
        for n, name in enumerate(names):
            absent = {*failures.get(name, ()), *missing.get(name, ())}
            present = [s for s in range(seeds) if s not in absent]
            base = variants[0] if variants else None
            shift = shifts[n % len(shifts)]
            tokens = [1000 * (i + 1) for i in range(5)]
            variants.append(
                VariantResult(
                    name=name,
                    equation=f"v[1:] = {n + 1}*own",
                    baseline=n == 0,
                    seeds=present,
                    missing=list(missing.get(name, ())),
                    failures=[
                        Failure(seed=s, step=17, reason="the training loss is NaN or infinite", hint="lower optimiser.lr")
                        for s in failures.get(name, ())
                    ],
                    run_ids={s: f"{n:06x}{s:06x}" for s in range(seeds)},
                    loss=scores(rng, present, shift, base and base.loss, noise),
                    bpb=scores(rng, present, shift / 2, base and base.bpb, noise),
                    parameters=123_456 + n,
                    training_flops=1.5e12 + n,
                    tokens=tokens[-1],
                    cache=Cache(context=4096, dtype="bf16", growing_bytes_per_token=1536.0 - n, shared_bytes=n * 4096),
                    curve=Curve(
                        tokens=tokens if present else [],
                        flops=[3.0e8 * t for t in tokens] if present else [],
                        loss={s: [5 - i / 3 + s / 100 + shift for i in range(5)] for s in present},
                    ),
                    coefficients=[
                        Coefficients(
                            label=f"v: tap({k})",
                            layers=[1, 2, 3],
                            start=[0.5, 0.5, 0.5],
                            values={s: list(rng.normal(0.5, 0.1, 3)) for s in present},
                        )
                        for k in range(learned if n and present else 0)
                    ],
                )
            )
        groups.append(Group(point=point, variants=variants))
        steps.append({name: 0.13 + n / 100 for n, name in enumerate(names)})
    finished = sum(len(v.seeds) for g in groups for v in g.variants)
    return StudyResults(
        name="synthetic",
        baseline=names[0],
        seeds=list(range(seeds)),
        budget="5,000 tokens",
        data=[
            Text(
                fingerprint="0123456789ab",
                vocab_size=1024,
                held_out={name: HeldOut(tokens=5000 + n, bytes=20_000 + n) for n, name in enumerate(DOMAINS)},
            )
        ],
        planned=len(names) * seeds * len(points),
        finished=finished,
        notes=["Trained on: cpu."],
        groups=groups,
        measured=Measured(machine={"processor": "some processor", "cores": 2}, step_seconds=steps),
    )

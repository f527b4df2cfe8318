"""What one run is: model, data, batch, optimiser, budget, seed. One YAML file; every key has a meaning and is checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from huggingface_hub.errors import StrictDataclassError
from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from valuepath.config import ValuePathConfig
from valuepath.counts import Flops, flops_per_token
from valuepath.equations import nearest
from valuepath.parameters import Role
from valuepath.plan import Plan
from valuepath.settings import Document, Settings

PROTOCOL = 1
"""Raised whenever the same settings would train something else, so that older results are not taken for new ones."""

_CONFIG_FIELDS = [name for name in ValuePathConfig.__annotations__ if name != "init_seed" and not name.startswith("_")]


Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Beta, Beta]


class Data(Settings):
    """The prepared text."""

    path: str = Field(description="the folder that `valuepath data prepare` made")
    length: PositiveInt = Field(default=256, description="tokens of a sequence")
    weights: dict[str, PositiveFloat] | None = Field(
        default=None, description="how often each domain is drawn, in any unit; by default as prepared, else by its size"
    )


class Batch(Settings):
    """How many tokens an optimiser step sees. ``sequences`` at a time go through the model; gradients are accumulated."""

    tokens: PositiveInt = Field(default=2048, description="tokens of an optimiser step")
    sequences: PositiveInt | None = Field(default=None, description="sequences of one forward pass; by default the whole step")


class RoleOptions(Settings):
    """What differs for one role of parameters."""

    lr: PositiveFloat | None = None
    lr_scale: PositiveFloat | None = Field(default=None, description="times optimiser.lr, instead of a rate of its own")
    betas: Betas | None = None
    weight_decay: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.lr is not None and self.lr_scale is not None:
            raise ValueError("lr and lr_scale are both given; keep one")
        return self


class Optimiser(Settings):
    """AdamW in groups by the role that the plan gives a parameter.

    Weight decay holds for matrices, embedding, head and tables; norms, biases, coefficients and gates have none unless
    ``roles`` asks for it. The rate rises linearly over ``warmup``, then follows ``schedule`` down to ``final_lr`` times itself:
    ``cosine`` over all steps, ``linear`` over the last ``decay`` part of them, or ``constant``.
    """

    lr: PositiveFloat = 1e-3
    betas: Betas = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 for no clipping")
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(default=0.02, ge=0, description="below 1 a part of all steps, from 1 on a number of steps")
    decay: float = Field(default=1.0, gt=0, le=1, description="linear only: the part of all steps that it goes down in")
    final_lr: float = Field(default=0.1, ge=0, le=1, description="what is left of the rate at the end")
    roles: dict[Role, RoleOptions] = Field(default_factory=dict)

    @field_validator("roles", mode="before")
    @classmethod
    def _known_roles(cls, value: Any) -> Any:
        known = list(Role.__args__)  # type: ignore[attr-defined]
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                raise ValueError(f"unknown role {name!r}{nearest(str(name), known)}; expected one of {', '.join(known)}")
        return value

    def warmup_steps(self, steps: int) -> int:
        return min(steps, round(self.warmup * steps) if self.warmup < 1 else round(self.warmup))


class Budget(Settings):
    """When a run ends: exactly one of tokens, steps and training FLOPs. Whole optimiser steps, rounded up."""

    tokens: PositiveFloat | None = None
    steps: PositiveInt | None = None
    flops: PositiveFloat | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(value is not None for value in (self.tokens, self.steps, self.flops)) != 1:
            raise ValueError("expected exactly one of tokens, steps and flops")
        return self

    def words(self) -> str:
        """For people: ``400,000 tokens``."""
        if self.tokens is not None:
            return f"{self.tokens:,.0f} tokens"
        return f"{self.steps:,} steps" if self.steps is not None else f"{self.flops:.3g} training FLOPs"


class Evaluation(Settings):
    """Held-out loss is taken ``times`` times, evenly spread, the last at the end; every time on the whole held-out text."""

    times: PositiveInt = 8
    sequences: PositiveInt = Field(default=16, description="sequences of one forward pass; 256 tokens each are 4,096 tokens")


class Compute(Settings):
    """Where and how: all of it can change the last bits of a result, so all of it belongs to a run's name."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: PositiveInt = Field(default=1, description="CPU threads of a run")
    precision: Literal["fp32", "bf16"] = "fp32"

    def resolved(self) -> Compute:
        """``auto`` replaced by what this machine has.

        Raises:
            ValueError: for a device that is not there.
        """
        import torch

        available = torch.cuda.is_available()
        if self.device == "cuda" and not available:
            raise ValueError("compute.device=cuda: no CUDA device is available here; use cpu or auto")
        return self.model_copy(update={"device": "cuda" if available else "cpu"}) if self.device == "auto" else self


class RunSettings(Settings):
    """One run.

    ``model`` takes every field of ``ValuePathConfig``; the vocabulary comes from the data, and the longest position from
    ``data.length`` unless it is given.
    """

    model: dict[str, Any] = Field(default_factory=dict)
    data: Data = Field(description="expected at least `data: {path: FOLDER}`")
    batch: Batch = Batch()
    optimiser: Optimiser = Optimiser()
    budget: Budget = Field(description="expected e.g. `budget: {tokens: 400000}`")
    evaluation: Evaluation = Evaluation()
    checkpoint_every: PositiveInt | None = Field(default=None, description="optimiser steps; by default with every evaluation")
    log_every: PositiveInt = Field(default=10, description="optimiser steps between two records of the training loss")
    compute: Compute = Compute()
    seed: int = Field(default=0, ge=0, lt=2**32)

    @field_validator("model")
    @classmethod
    def _known_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name == "init_seed":
                raise ValueError("init_seed follows the run's seed, so that variants stay paired; set seed instead")
            if name not in _CONFIG_FIELDS:
                raise ValueError(f"unknown key {name!r}{nearest(str(name), _CONFIG_FIELDS)}")
        return value

    @model_validator(mode="after")
    def _whole_sequences(self) -> Self:
        if self.batch.tokens % self.data.length:
            raise ValueError(
                f"batch.tokens={self.batch.tokens} is not a multiple of data.length={self.data.length}; "
                f"expected e.g. {max(1, round(self.batch.tokens / self.data.length)) * self.data.length}"
            )
        per_step = self.batch.tokens // self.data.length
        at_once = self.batch.sequences
        if at_once is not None and (at_once > per_step or per_step % at_once):
            raise ValueError(
                f"batch.sequences={at_once} does not divide the {per_step} sequences of a step "
                f"(batch.tokens / data.length)"
            )
        return self

    @classmethod
    def of(cls, document: Document) -> RunSettings:
        """From a document; errors name file, line and key."""
        if "variants" in document.data:
            raise ValueError(f"{document.name}: is the recipe of a study, not of one run; use `valuepath study run`")
        return document.check(cls)

    def resolve(self, vocab_size: int, fingerprint: str, eos: int | None = None) -> Run:
        """With what the data decides.

        Raises:
            ValueError: for a model that cannot be built, with the key.
        """
        fields = dict(self.model)
        for name in ("vocab_size", "max_position_embeddings"):
            if name in fields and not isinstance(fields[name], int):
                raise ValueError(f"model.{name}={fields[name]!r}: expected a whole number")
        if fields.setdefault("vocab_size", vocab_size) < vocab_size:
            raise ValueError(
                f"model.vocab_size={fields['vocab_size']} is smaller than the {vocab_size} tokens of {self.data.path}"
            )
        if fields.setdefault("max_position_embeddings", self.data.length) < self.data.length:
            raise ValueError(
                f"model.max_position_embeddings={fields['max_position_embeddings']} is smaller than "
                f"data.length={self.data.length}"
            )
        if eos is not None:
            fields.setdefault("eos_token_id", eos)
            fields.setdefault("bos_token_id", eos)
        try:
            config = ValuePathConfig(**fields, init_seed=self.seed)
        except StrictDataclassError as wrong:
            raise ValueError("model: " + " ".join(str(wrong).split())) from None
        except (ValueError, TypeError) as wrong:
            raise ValueError(f"model: {wrong}") from None
        settings = self.model_copy(update={"compute": self.compute.resolved()})
        return Run(settings, config, fingerprint)


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings with the model that they amount to, and what follows: steps, FLOPs, name.

    Attributes:
        config: the model's.
        fingerprint: of the prepared text.
    """

    settings: RunSettings
    config: ValuePathConfig
    fingerprint: str

    @cached_property
    def plan(self) -> Plan:
        return self.config.plan()

    @cached_property
    def flops(self) -> Flops:
        """Of one token of this run's sequences."""
        return flops_per_token(self.plan, self.settings.data.length)

    @cached_property
    def steps(self) -> int:
        """Optimiser steps."""
        budget, per_step = self.settings.budget, self.settings.batch.tokens
        if budget.steps is not None:
            return budget.steps
        tokens = budget.tokens if budget.tokens is not None else budget.flops / self.flops.training  # type: ignore[operator]
        return max(1, math.ceil(tokens / per_step))

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return self.steps * self.settings.batch.tokens

    @property
    def training_flops(self) -> int:
        return self.tokens * self.flops.training

    @property
    def sequences_per_step(self) -> int:
        return self.settings.batch.tokens // self.settings.data.length

    @cached_property
    def evaluation_steps(self) -> frozenset[int]:
        """Evenly spread, the last one included."""
        times = min(self.settings.evaluation.times, self.steps)
        return frozenset(round(self.steps * (n + 1) / times) for n in range(times))

    @cached_property
    def checkpoint_steps(self) -> frozenset[int]:
        every = self.settings.checkpoint_every
        if every is None:
            return self.evaluation_steps
        return frozenset(range(every, self.steps, every)) | {self.steps}

    @cached_property
    def log_steps(self) -> frozenset[int]:
        """A checkpoint always falls on one, so that no half-filled average of the training loss is lost in it."""
        every = frozenset(range(self.settings.log_every, self.steps, self.settings.log_every))
        return every | self.checkpoint_steps | self.evaluation_steps

    def described(self) -> dict[str, Any]:
        """All that a result depends on, as plain data: the settings, with the text by its fingerprint, not by its place."""
        settings = self.settings.model_dump(mode="json")
        settings["data"]["path"] = self.fingerprint
        return {"protocol": PROTOCOL, **settings}

    @cached_property
    def id(self) -> str:
        """The run's name: a hash of ``described()``, 12 hexadecimal digits."""
        text = json.dumps(self.described(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @cached_property
    def batches_id(self) -> str:
        """The same for two runs exactly if step by step they see the same tokens (the shorter one a part of the longer)."""
        data = self.settings.data
        text = json.dumps(
            [self.fingerprint, data.length, data.weights, self.settings.batch.tokens, self.settings.seed], sort_keys=True
        )
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

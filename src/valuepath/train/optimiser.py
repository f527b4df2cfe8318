"""AdamW's parameter groups, by the role that the plan gives each parameter."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW

from valuepath.parameters import Role
from valuepath.plan import Plan
from valuepath.train.settings import Optimiser

DECAYED: frozenset[Role] = frozenset(("matrix", "embedding", "head", "table"))
"""Roles with weight decay unless the settings say otherwise."""


def groups(model: nn.Module, plan: Plan, settings: Optimiser) -> list[dict[str, Any]]:
    """One group a role, in the order of ``Role``; a parameter's place does not depend on which others exist."""
    by_name = dict(model.named_parameters())
    members: dict[Role, list[nn.Parameter]] = {}
    for parameter in plan.parameters:
        members.setdefault(parameter.role, []).append(by_name[parameter.name])
    made = []
    for role in sorted(members):
        own = settings.roles.get(role)
        lr, betas, decay = settings.lr, settings.betas, settings.weight_decay if role in DECAYED else 0.0
        if own is not None:
            lr = own.lr if own.lr is not None else lr * (own.lr_scale or 1.0)
            betas = own.betas or betas
            decay = decay if own.weight_decay is None else own.weight_decay
        made.append({"params": members[role], "lr": lr, "betas": betas, "weight_decay": decay, "role": role})
    return made


def adamw(model: nn.Module, plan: Plan, settings: Optimiser) -> AdamW:
    """The optimiser of one run."""
    return AdamW(groups(model, plan, settings), lr=settings.lr, betas=settings.betas, eps=settings.eps)


def schedule(settings: Optimiser, steps: int) -> dict[str, Any]:
    """The learning rate's course as transformers' ``TrainingArguments`` name it."""
    warmup = settings.warmup_steps(steps)
    options: dict[str, float | str]
    match settings.schedule:
        case "constant":
            kind, options = "constant_with_warmup", {}
        case "cosine":
            kind, options = "cosine_with_min_lr", {"min_lr_rate": settings.final_lr}
        case "linear":
            down = min(round(settings.decay * steps), steps - warmup)
            kind = "warmup_stable_decay"
            options = {"num_decay_steps": down, "decay_type": "linear", "min_lr_ratio": settings.final_lr}
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options, "warmup_steps": warmup}

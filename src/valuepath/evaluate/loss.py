"""Held-out loss and bits per byte, exact: every token of the held-out text is predicted once, nothing is left out.

A domain's stream is ``EOS doc EOS doc EOS``; windows of T inputs overlap by the one token that the next window starts from, so
that each token but the very first (an EOS) is predicted exactly once::

    loss = nats of all predicted tokens / their number                 (nats a token)
    BPB  = nats of the tokens that are text / (ln 2 * UTF-8 bytes of the held-out documents)

The closing EOS of a document has no bytes: it counts in the loss and not in BPB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from valuepath.data.corpus import Corpus, TokenStream

IGNORED = -100


@dataclass(frozen=True)
class Nats:
    """What predicting one text cost.

    Attributes:
        total: nats of all predicted tokens, EOS included.
        text: nats of those that are text.
        tokens: number of predicted tokens, EOS included.
        bytes: UTF-8 bytes of the text.
    """

    total: float
    text: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.total / self.tokens

    @property
    def bpb(self) -> float:
        """Bits a byte."""
        return self.text / (math.log(2) * self.bytes)

    def __add__(self, other: Nats) -> Nats:
        return Nats(
            self.total + other.total, self.text + other.text, self.tokens + other.tokens, self.bytes + other.bytes
        )


def windows(stream: TokenStream, length: int, sequences: int, eos: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs (B, T) and next tokens (B, T), -100 behind the end, B at most ``sequences``."""
    span = length * sequences
    for start in range(0, len(stream) - 1, span):
        tokens = stream.read(start, min(start + span + 1, len(stream)))
        rows = math.ceil((len(tokens) - 1) / length)
        inputs = np.full(rows * length, eos, dtype=np.int64)
        targets = np.full(rows * length, IGNORED, dtype=np.int64)
        inputs[: len(tokens) - 1] = tokens[:-1]
        targets[: len(tokens) - 1] = tokens[1:]
        yield torch.from_numpy(inputs.reshape(rows, length)), torch.from_numpy(targets.reshape(rows, length))


@torch.no_grad()
def held_out_nats(
    model: nn.Module,
    corpus: Corpus,
    length: int,
    sequences: int = 16,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Nats]:
    """Domain -> what predicting all of its held-out text costs.

    Args:
        model: a causal language model; it is put into eval mode and left there.
        length: T, tokens of a window: the context starts anew in each.
        sequences: windows of one forward pass.
        autocast: makes the context that sets the precision of a forward pass; sums are in float64.
    """
    model.eval()
    device = next(model.parameters()).device
    found = {}
    for name, domain in corpus.domains.items():
        total, text, tokens = 0.0, 0.0, 0
        for inputs, targets in windows(domain.validation, length, sequences, corpus.eos):
            inputs, targets = inputs.to(device), targets.to(device)
            with autocast():
                logits = model(input_ids=inputs, use_cache=False).logits
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            nats = F.cross_entropy(wide, targets.flatten(), ignore_index=IGNORED, reduction="none").double()
            total += nats.sum().item()
            text += nats[targets.flatten() != corpus.eos].sum().item()  # 0 where ignored
            tokens += int((targets != IGNORED).sum())
        found[name] = Nats(total, text, tokens, domain.validation_bytes)
    return found


def summary(nats: Mapping[str, Nats]) -> dict[str, dict[str, Any]]:
    """``{"loss": {"mean", "token_weighted", "domains": {...}}, "bpb": ...}``.

    ``mean`` is the unweighted mean over domains; ``token_weighted`` treats all held-out text as one.
    """
    parts = list(nats.values())
    whole = sum(parts[1:], parts[0])
    return {
        metric: {
            "mean": math.fsum(getattr(part, metric) for part in parts) / len(parts),
            "token_weighted": getattr(whole, metric),
            "domains": {name: getattr(part, metric) for name, part in nats.items()},
        }
        for metric in ("loss", "bpb")
    }

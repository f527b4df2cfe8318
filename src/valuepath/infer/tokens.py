"""The distinct tokens of the running sequences: each gets a *slot*, the row in which its value is held."""

from __future__ import annotations

import torch
from torch import Tensor

from valuepath.infer.buffer import plain_tensors


class DistinctTokens:
    """A growing set of token ids, numbered in order of first appearance.

    ``slots`` looks new ids up in a map of |V| entries and adds those that it does not know, so that a step costs what its
    own tokens cost, however long the history is. All sequences of a batch share the set.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self.count = 0
        self._slot_of: Tensor | None = None
        self._ids: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """(U,) token ids by slot."""
        assert self._ids is not None
        return self._ids[: self.count]

    @plain_tensors
    def slots(self, ids: Tensor) -> Tensor:
        """(B, T) int32: the slot of each id, (B, T), which lie in the vocabulary. Unknown ids are added."""
        if self._slot_of is None or self._slot_of.device != ids.device:
            self._move(ids.device)
        assert self._slot_of is not None
        found = self._slot_of[ids]
        unknown = found < 0
        if bool(unknown.any()):
            self._add(torch.unique(ids[unknown]))
            found = self._slot_of[ids]
        return found

    def _move(self, device: torch.device) -> None:
        ids = self._ids
        self._slot_of = torch.full((self.vocab_size,), -1, dtype=torch.int32, device=device)
        self._ids = torch.empty(0, dtype=torch.long, device=device)
        count, self.count = self.count, 0
        if ids is not None and count:
            self._add(ids[:count].to(device))

    def _add(self, new: Tensor) -> None:
        assert self._slot_of is not None and self._ids is not None
        end = self.count + len(new)
        if end > len(self._ids):
            grown = new.new_empty(min(max(end, 2 * len(self._ids), 64), max(self.vocab_size, end)))
            grown[: self.count] = self._ids[: self.count]
            self._ids = grown
        self._ids[self.count : end] = new
        self._slot_of[new] = torch.arange(self.count, end, dtype=torch.int32, device=new.device)
        self.count = end

    @plain_tensors
    def keep(self, used: Tensor) -> tuple[Tensor, Tensor]:
        """Drop every slot that is not in ``used`` (any shape). Returns (kept, renumbered): the old slots in their new order,
        and for each old slot its new one."""
        mark = torch.zeros(self.count, dtype=torch.bool, device=used.device)
        mark[used.flatten().long()] = True
        kept = mark.nonzero()[:, 0]
        renumbered = (mark.cumsum(0, dtype=torch.int32) - 1).to(torch.int32)
        ids = self.ids[kept]
        self.reset()
        self._move(ids.device)
        self._add(ids)
        return kept, renumbered

    def nbytes(self) -> int:
        """Bytes of the map and of the ids."""
        return sum(t.untyped_storage().nbytes() for t in (self._slot_of, self._ids) if t is not None)

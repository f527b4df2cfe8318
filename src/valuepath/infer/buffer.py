"""A growing tensor along time: grows in blocks, drops what no reader can see, and can be rolled back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

BLOCK = 128
"""Positions by which a buffer grows at least."""


P = ParamSpec("P")
R = TypeVar("R")


def plain_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Run without gradients and outside of inference mode: what is made there may be written to in any mode later."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return wrapped


def _capacity(length: int) -> int:
    """The next multiple of BLOCK, with an eighth to spare, so that copies are rare and at most 1/8 + 1 block is unused."""
    return -(-(length + length // 8) // BLOCK) * BLOCK


class Buffer:
    """Content of positions, (B, H, T, e), of which only the last ``window`` are kept (all, if None).

    One forward pass writes new positions with ``write`` and reads with ``read``; only ``commit`` moves the end, so that a
    pass that fails leaves the buffer as it was. ``length`` counts positions since the start, dropped ones included.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.length = 0
        self.keep_all = False
        self._clear()

    def _clear(self) -> None:
        self.data: Tensor | None = None
        self.first = 0
        """Position of data[:, :, 0]."""
        self._live: tuple[Tensor, int] | None = None
        """What reads see during a pass: the content and the position it starts at."""
        self._end = 0

    # ------------------------------------------------------------------------------------------------- one pass
    def write(self, new: Tensor) -> None:
        """Put ``new`` (B, H, T, e) behind the committed positions."""
        count = new.shape[2]
        start = self._needed_from(self.length)
        end = self.length + count
        if self._must_not_write(new):
            self._live = (torch.cat([self._slice(start, self.length), new], 2) if self.length > start else new, start)
        elif self.length == start and count >= self._room():
            # nothing to keep: the pass reads its own tensor, and commit copies the part that later passes need
            self._live = (new, self.length)
        elif self.window is not None and not self.keep_all and count > BLOCK:
            self._live = (torch.cat([self._slice(start, self.length), new], 2), start)
        else:
            self._reserve(start, end, new)
            assert self.data is not None
            self.data[:, :, self.length - self.first : end - self.first] = new
            self._live = (self.data, self.first)
        self._end = end

    def read(self, window: int | None) -> Tensor:
        """What a query after the committed positions sees: the new positions and up to ``window - 1`` before them."""
        if self._live is None:
            live, first, end = self._require(), self.first, self.length
        else:
            (live, first), end = self._live, self._end
        start = 0 if window is None else max(0, self.length - window + 1)
        return live[:, :, start - first : end - first]

    def commit(self) -> None:
        """Take the written positions over."""
        if self._live is None:
            return
        live, first = self._live
        self._live = None
        self.length = self._end
        start = self._kept_from()
        if live is not self.data:
            if live.requires_grad:
                self.data, self.first = live[:, :, start - first :], start
            else:
                kept = live[:, :, start - first :]
                extents = [*kept.shape]
                extents[2] = max(-(-extents[2] // BLOCK) * BLOCK, 1)
                self.data, self.first = kept.new_empty(extents), start
                self.data[:, :, : kept.shape[2]] = kept

    def rollback(self) -> None:
        """Forget what an unfinished pass wrote."""
        self._live = None

    # ---------------------------------------------------------------------------------------------------- sizes
    def _must_not_write(self, new: Tensor) -> bool:
        """Whether writing in place would break the graph of an earlier pass, or a tensor made in inference mode."""
        if torch.is_grad_enabled():  # whatever reads the buffer may keep it for the backward pass
            return True
        return self.data is not None and (
            self.data.requires_grad or (self.data.is_inference() and not torch.is_inference_mode_enabled())
        )

    def _needed_from(self, length: int) -> int:
        """The first position to keep for a query at ``length``."""
        if self.window is None or self.keep_all:
            return self.first
        return max(self.first, length - self.window + 1)

    def _kept_from(self) -> int:
        if self.window is None or self.keep_all:
            return self.first
        return max(self.first, self.length - self.window)

    @property
    def kept(self) -> int:
        """Positions kept."""
        return self.length - self._kept_from() if self.data is not None else 0

    @property
    def content(self) -> Tensor:
        """The positions kept, (B, H, kept, e)."""
        return self._slice(self._kept_from(), self.length)

    def _require(self) -> Tensor:
        if self.data is None:
            raise RuntimeError("the cache buffer is empty")
        return self.data

    def _slice(self, start: int, end: int) -> Tensor:
        return self._require()[:, :, start - self.first : end - self.first]

    def _room(self) -> int:
        return 0 if self.data is None else self.data.shape[2] - (self.length - self.first)

    def _reserve(self, start: int, end: int, like: Tensor) -> None:
        """Make room up to position ``end`` and keep what starts at ``start``."""
        if self.data is not None and end - self.first <= self.data.shape[2]:
            return
        kept = end - start
        extents = [*like.shape]
        extents[2] = self._extent(kept)
        grown = like.new_empty(extents)
        if self.length > start:
            grown[:, :, : self.length - start] = self._slice(start, self.length)
        self.data, self.first = grown, start

    def _extent(self, kept: int) -> int:
        """Positions to allocate. A full window has one block to spare, so that it is shifted once in BLOCK steps."""
        if self.window is None or self.keep_all:
            return _capacity(kept)
        return self.window + BLOCK if self.length >= self.window else min(_capacity(kept), self.window + BLOCK)

    def nbytes(self) -> tuple[int, int]:
        """(logical, allocated): bytes of the positions kept, and of the storage."""
        if self.data is None:
            return 0, 0
        per_position = self.data.element_size() * self.data[:, :, :1].numel() if self.data.shape[2] else 0
        return self.kept * per_position, self.data.untyped_storage().nbytes()

    # ------------------------------------------------------------------------------------------------ cache verbs
    def check_crop(self, count: int) -> None:
        """
        Raises:
            RuntimeError: if removing ``count`` positions would make dropped ones visible again.
        """
        needed = 0 if self.window is None else max(0, self.length - count - self.window + 1)
        if self.data is not None and count and needed < self._kept_from():
            raise RuntimeError(
                f"cannot remove {count} positions: the window of {self.window} has already dropped position {needed}, which "
                "would be visible again. Call activate_past_recording() before the steps that may be undone"
            )

    def crop(self, count: int) -> None:
        """Remove the last ``count`` positions, and what a recording window kept beyond its size."""
        self.check_crop(count)
        length = self.length - count
        self.length = length
        if self.data is not None and self.window is not None:
            start = max(self.first, length - self.window, 0)
            if self.keep_all and start - self.first > BLOCK:  # not at every step: a shrink copies the window
                self.data, self.first = self._slice(start, length).clone(), start
        if self.data is not None and self.data.shape[2] > 1.25 * self.kept + BLOCK:
            kept, start = self.kept, self._kept_from()
            extents = [*self.data.shape]
            extents[2] = max(_capacity(kept), 1)
            shrunk = self.data.new_empty(extents)
            if kept:
                shrunk[:, :, :kept] = self._slice(start, length)
            self.data, self.first = shrunk, start

    def apply(self, change) -> None:  # type: ignore[no-untyped-def]
        """Replace the content by ``change(content)``, which acts on the batch axis."""
        if self.data is not None:
            self.data = change(self.data)

    def reset(self) -> None:
        """Forget everything and free the storage."""
        self.length = 0
        self._clear()

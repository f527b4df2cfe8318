"""What is held on the compute device for each distinct token: rows fetched from a table, wherever it lives, or computed."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import Tensor

from valuepath.infer.buffer import Buffer, plain_tensors
from valuepath.plan import Content

if TYPE_CHECKING:
    from valuepath.infer.folding import TokenValues
    from valuepath.infer.tokens import DistinctTokens

_reader = ThreadPoolExecutor(1, "valuepath-rows")
"""Reads rows of tables that are not on the compute device while earlier layers are computed."""


class ResidentRows:
    """For each content (heads, U, width): one row per distinct token, in the order of their slots.

    A table's rows are copied once, when their token first appears; with every pass only the rows of new tokens are added.

    Args:
        values: the model's token-determined values.
        tables: the contents that are read from |V|-row tables; others are computed.
    """

    def __init__(self, values: TokenValues, tables: tuple[Content, ...]) -> None:
        self.values, self.tables = values, tables
        self._held: dict[Content, tuple[Any, Buffer]] = {}
        self._coming: dict[Content, Future[None]] = {}

    def fetch(self, contents: list[Content], tokens: DistinctTokens) -> None:
        """Start fetching what is missing. Tables on another device or on disk are read in the background."""
        for content in contents:
            self.wait(content)
            state = self.values.state(content)
            held = self._held.get(content)
            if held is None or held[0] != state:  # a weight behind the rows has changed
                held = self._held[content] = (state, Buffer(None))
            if held[1].length == tokens.count:
                continue
            ids = tokens.ids[held[1].length :]
            if self.values.is_elsewhere(content):
                self._coming[content] = _reader.submit(self._append, content, held[1], ids)
            else:
                self._append(content, held[1], ids)

    @plain_tensors
    def _append(self, content: Content, buffer: Buffer, ids: Tensor) -> None:
        rows = self.values.rows(content, ids, from_table=content in self.tables)
        buffer.write(rows.transpose(0, 1)[None])
        buffer.commit()

    def wait(self, content: Content) -> None:
        """Until what was started for ``content`` is there."""
        coming = self._coming.pop(content, None)
        if coming is not None:
            coming.result()

    def get(self, content: Content) -> Tensor:
        """(heads, U, width)."""
        self.wait(content)
        return self._held[content][1].read(None)[0]

    @plain_tensors
    def keep(self, kept: Tensor) -> None:
        """Keep the rows of the slots ``kept``, in that order."""
        for content, (state, buffer) in [*self._held.items()]:
            self.wait(content)
            shrunk = Buffer(None)
            there = kept[kept < buffer.length]
            if len(there) == len(kept):  # else fetched anew: rows were not there for every slot yet
                shrunk.write(buffer.read(None).index_select(2, there))
                shrunk.commit()
            self._held[content] = (state, shrunk)

    def reset(self) -> None:
        """Forget every row."""
        for content in [*self._coming]:
            self.wait(content)
        self._held.clear()

    def nbytes(self) -> int:
        """Bytes of the storage."""
        for content in [*self._coming]:
            self.wait(content)
        return sum(buffer.nbytes()[1] for _, buffer in self._held.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidentRows:
        made = type(self)(self.values, self.tables)
        for content in [*self._coming]:
            self.wait(content)
        made._held = {content: (state, copy.deepcopy(buffer, memo)) for content, (state, buffer) in self._held.items()}
        return made

"""The cache that an equation really needs, in the shape of a transformers ``Cache``.

The plan says for each layer whether its keys and values are stored, read from another layer's buffer, or read by token. There
is one buffer per stored content and one for the tokens, each as long as the longest window of its readers, and a row for each
distinct token.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from valuepath.infer.buffer import Buffer, plain_tensors
from valuepath.infer.pooled import Product
from valuepath.infer.rows import ResidentRows
from valuepath.infer.tokens import DistinctTokens
from valuepath.plan import Alias, Content, Core, FirstInput, NormedEmbedding, Plan, Store, Tokens

if TYPE_CHECKING:
    from valuepath.infer.folding import TokenValues


COMPACT = 1024
"""Distinct tokens below which nothing is looked for to forget."""


class CacheBytes(NamedTuple):
    """Bytes of a cache.

    logical: positions that are kept, times their size: keys, values and ids (4 bytes each). It grows with the sequences.
    allocated: the storage behind them.
    shared: the |V|-row tables that all sequences read, trained ones included; they belong to the model, wherever they are.
    rows: what is resident for each distinct token of the running sequences, with the map from token id to slot. It grows with
        the number of distinct tokens, not with the length.
    """

    logical: int
    allocated: int
    shared: int
    rows: int


@dataclass(frozen=True)
class TokenRead:
    """Values that a layer attends over, by distinct token: position s of sequence b has the value of slot ``slots[b, s]``.

    Attributes:
        core: whose values.
        slots: (B, S) int32.
    """

    cache: ValuePathCache
    core: Core
    slots: Tensor

    @property
    def distinct(self) -> int:
        """U, the number of slots."""
        return self.cache.tokens.count

    @property
    def dtype(self) -> torch.dtype:
        """Of what the cache holds."""
        return self.cache.values.model.embed_tokens.weight.dtype

    @property
    def is_summed_first(self) -> bool:
        """Whether the cache holds what values are projected from, so that weights can be summed over that."""
        return self.cache.plan.contents[self.core] != (self.core,)

    def rows(self) -> Tensor:
        """(g, U, e): the value of each distinct token; computed for this call if only what it is projected from is held."""
        cache = self.cache
        if self.is_summed_first:
            return cache.values.rows(self.core, cache.tokens.ids, from_table=False).transpose(0, 1)
        return cache.rows.get(self.core)

    def gather(self) -> Tensor:
        """The value of every position, (B, g, S, e)."""
        return self.rows()[:, self.slots.long()].transpose(0, 1)

    def product(self, sums: Tensor, rows: Tensor | None, multiply: Product) -> Tensor:
        """Attention output (B, Q, h, e) from the weights summed per distinct token, (B, g, R, U) with R = Q h / g.

        Args:
            rows: as ``rows()``, or None to sum what the cache holds and project after that.
        """
        cache, h = self.cache, self.cache.plan.shape.num_heads
        B, g, R, U = sums.shape
        Q = R * g // h
        if rows is not None:
            return _by_query(multiply(sums, rows), Q)
        heads = torch.arange(h, device=sums.device)
        reads = heads * g // h
        found: dict[Content, Tensor] = {}
        dtype = self.dtype
        for content in cache.plan.contents[self.core]:
            held = cache.rows.get(content)
            if held.shape[0] == 1 and isinstance(content, FirstInput | NormedEmbedding):  # the same for every head
                found[content] = _by_query(multiply(sums.reshape(B, 1, g * R, U), held).reshape(B, g, R, -1), Q).to(dtype)
            else:  # a table in a sum: each query head has summed its own key/value head of it
                own = _by_query(multiply(sums, held), Q).to(dtype)
                found[content] = own.new_zeros(B, Q, h, g, own.shape[-1])
                found[content][:, :, heads, reads] = own
        return cache.values.of_sums(self.core, found)[:, :, heads, reads]  # of (B, Q, h, g, e) each query head's own


def _by_query(x: Tensor, Q: int) -> Tensor:
    """(B, g, h / g Q, w) as (B, Q, h, w)."""
    B, g, R, width = x.shape
    return x.reshape(B, g * R // Q, Q, width).transpose(1, 2)


class ValuePathCache(Cache):
    """Keys, values and token ids of one batch, laid out by a plan.

    Made by ``model.make_cache()``, by ``model.generate`` and by a plain ``model(ids)``. Growing, cropping, reordering,
    repeating, selecting and resetting work as transformers' generation expects. A forward pass that fails half-way leaves
    the cache as it was.

    Args:
        plan: ``config.plan()``; its ``fold`` decides what is rebuilt from ids.
        values: the model's token-determined values, ``model.token_values``.
    """

    def __init__(self, plan: Plan, values: TokenValues) -> None:
        super().__init__(layers=[_LayerView(self, n) for n in range(plan.num_layers)])
        self.plan, self.values = plan, values
        self.keys = {n: Buffer(plan.key_windows[n]) for n in plan.key_windows}
        self.stored_values = {n: Buffer(plan.value_windows[n]) for n in plan.value_windows}
        self.slots = Buffer(plan.id_window) if plan.folds else None
        self.tokens = DistinctTokens(plan.shape.vocab_size)
        self.rows = ResidentRows(values, plan.tables)
        self._by_rows: set[Core] = set()
        """Token cores whose rows are there in this pass."""
        self._compact_at = COMPACT
        self._length = 0
        self._new = 0
        self._recording = False
        self._batch = -1

    def __deepcopy__(self, memo: dict[int, Any]) -> ValuePathCache:
        """A copy of the content that reads the same model: copying a prompt's cache must not copy the weights."""
        memo[id(self.values)], memo[id(self.plan)] = self.values, self.plan
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        content = {name: value for name, value in self.__dict__.items() if name != "layers"}
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in content.items()})
        made.layers = [_LayerView(made, n) for n in range(self.plan.num_layers)]
        return made

    # --------------------------------------------------------------------------------------------- one forward pass
    def begin(self, ids: Tensor | None, batch: int, new: int) -> None:
        """Open a forward pass over ``new`` positions.

        Raises:
            ValueError: without ``ids`` where values are rebuilt from them, or for another batch size.
        """
        for buffer in self._buffers():
            buffer.rollback()
        if self._length and batch != self._batch:
            raise ValueError(
                f"the cache holds {self._batch} sequences, the input {batch}; use batch_repeat_interleave or "
                "batch_select_indices on the cache, or start with a new one"
            )
        if self.slots is not None:
            if ids is None:
                raise ValueError(
                    "this cache keeps token ids and rebuilds values from them, but inputs_embeds came without ids; pass "
                    "input_ids, or make the cache with model.make_cache(fold='none')"
                )
            self._compact()
            self.slots.write(self.tokens.slots(ids)[:, None, :, None])
            self._by_rows = set()
            if not torch.is_grad_enabled():  # gradients flow through values that are computed, not through rows read before
                # a first pass computes its own values rather than fold the whole vocabulary
                wanted = [c for c in self.plan.row_widths if self._length or self.values.is_elsewhere(c)]
                self.rows.fetch(wanted, self.tokens)
                self._by_rows = {core for core, contents in self.plan.contents.items() if set(contents) <= set(wanted)}
        self._batch, self._new = batch, new

    def commit(self) -> None:
        """Close the pass: the new positions now belong to the cache."""
        for buffer in self._buffers():
            buffer.commit()
        self._length += self._new
        self._new = 0

    def reads_table(self, layer_idx: int) -> bool:
        """Whether attention in this layer takes all its values by token, those of the new positions included."""
        found = self.plan.layers[layer_idx].v
        return isinstance(found, Tokens) and found.core in self._by_rows

    def update(
        self, key_states: Tensor, value_states: Tensor | None, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values (B, g, T, e) where the plan stores them, and return all that it attends over.

        Values are unweighted: the plan's outside weights are applied after attention.
        """
        keys, values = self.attended(key_states, value_states, layer_idx)
        return keys, values.gather() if isinstance(values, TokenRead) else values

    def attended(self, key_states: Tensor, value_states: Tensor | None, layer_idx: int) -> tuple[Tensor, Tensor | TokenRead]:
        """As ``update``; values that are read by token come as a ``TokenRead``, not yet gathered."""
        if not self._new:
            raise RuntimeError("a ValuePathCache is filled by the forward pass of its own model")
        layer = self.plan.layers[layer_idx]
        if isinstance(layer.k, Store):
            self.keys[layer_idx].write(key_states)
        if isinstance(layer.v, Store):
            assert value_states is not None
            self.stored_values[layer_idx].write(value_states)
        if isinstance(layer.v, Tokens) and value_states is not None and not self._length and not self.reads_table(layer_idx):
            return self.keys[layer.k_core].read(layer.window), value_states
        return self._read(layer_idx, layer.window)

    def read(self, layer_idx: int, window: int | None, new: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and unweighted values of a layer through a reader's window: (B, g, min(past, window - 1) + new, e)."""
        keys, values = self._read(layer_idx, window)
        return keys, values.gather() if isinstance(values, TokenRead) else values

    def _read(self, layer_idx: int, window: int | None) -> tuple[Tensor, Tensor | TokenRead]:
        layer = self.plan.layers[layer_idx]
        keys = self.keys[layer.k_core].read(window)
        if not isinstance(layer.v, Tokens):
            owner = layer.v.layer if isinstance(layer.v, Alias) else layer_idx
            return keys, self.stored_values[owner].read(window)
        assert self.slots is not None
        slots = self.slots.read(window)[:, 0, :, 0]
        if not self._new and not torch.is_grad_enabled():  # looked at from outside, between two passes
            self.rows.fetch(list(self.plan.contents[layer.v.core]), self.tokens)
        elif layer.v.core not in self._by_rows:
            return keys, self.values.compute(layer.v.core, self.tokens.ids[slots.long()]).transpose(1, 2)
        return keys, TokenRead(self, layer.v.core, slots)

    @plain_tensors
    def _compact(self) -> None:
        """Forget tokens that no sequence contains any more. What is dropped by windows, crops and beams leaves them behind; the
        history is looked through only when the set has doubled since the last time, so that a step stays cheap."""
        assert self.slots is not None
        if self.tokens.count < self._compact_at or not self.slots.kept:
            return
        kept, renumbered = self.tokens.keep(self.slots.content)
        self.rows.keep(kept)
        self.slots.apply(lambda slots: renumbered[slots.clamp(0, len(renumbered) - 1).long()])
        self._compact_at = max(COMPACT, 2 * self.tokens.count)

    # ------------------------------------------------------------------------------------------------------- sizes
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions seen so far, dropped ones included."""
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(number of keys, position of the first) that the layer attends over with ``query_length`` new positions."""
        window = self.plan.layers[layer_idx].window
        past = self._length if window is None else min(self._length, window - 1)
        return past + query_length, self._length - past

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: the cache grows as needed."""
        return -1

    def nbytes(self) -> CacheBytes:
        """Logical, allocated, shared and resident bytes: see ``CacheBytes``."""
        sizes = [buffer.nbytes() for buffer in self._buffers()]
        return CacheBytes(
            logical=sum(s[0] for s in sizes),
            allocated=sum(s[1] for s in sizes),
            shared=self.values.nbytes(self.plan.tables),
            rows=self.rows.nbytes() + self.tokens.nbytes(),
        )

    def nbytes_by_layer(self) -> list[tuple[int, int]]:
        """Logical bytes of (keys, values) that each layer stores itself; ids belong to no layer."""
        none = Buffer(None)
        return [
            (self.keys.get(n, none).nbytes()[0], self.stored_values.get(n, none).nbytes()[0])
            for n in range(self.plan.num_layers)
        ]

    @property
    def batch_size(self) -> int:
        """Number of sequences, -1 before the first pass."""
        return self._batch

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self._length > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.window is not None for layer in self.plan.layers]

    # ------------------------------------------------------------------------------------------------------- verbs
    def _buffers(self) -> list[Buffer]:
        return [*self.keys.values(), *self.stored_values.values(), *([self.slots] if self.slots is not None else [])]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` positions; 0 shrinks windows that recorded more than they need.

        Raises:
            ValueError: for a positive number or more than there is.
            RuntimeError: if a window has already dropped positions that would be visible again.
        """
        count = -tokens_to_remove
        if count < 0:
            raise ValueError(f"crop takes a negative number of positions to remove, e.g. crop(-3); got {tokens_to_remove}")
        if count > self._length:
            raise ValueError(f"cannot remove {count} positions from a cache of {self._length}")
        for buffer in self._buffers():
            buffer.check_crop(count)
        for buffer in self._buffers():
            buffer.crop(count)
        self._length -= count

    def activate_past_recording(self) -> None:
        """Keep what windows would drop until the next ``crop``, so that steps can be undone."""
        self.set_past_recording(True)

    def set_past_recording(self, on: bool) -> None:
        self._recording = on
        for buffer in self._buffers():
            buffer.keep_all = on

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return self._recording

    def _on_batch(self, change: Callable[[Tensor], Tensor], batch: int) -> None:
        for buffer in self._buffers():
            buffer.apply(change)
        if self._length:
            self._batch = batch

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes the former sequence ``beam_idx[i]``."""
        self._on_batch(lambda x: x.index_select(0, beam_idx.to(x.device)), len(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times in a row."""
        self._on_batch(lambda x: x.repeat_interleave(repeats, dim=0), self._batch * repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices`` (numbers or a boolean mask)."""
        kept = torch.arange(max(self._batch, 0))[torch.as_tensor(indices).cpu()]
        self._on_batch(lambda x: x[kept.to(x.device)], len(kept))

    def reset(self) -> None:
        """Forget all sequences and free their memory."""
        for buffer in self._buffers():
            buffer.reset()
        self.tokens.reset()
        self.rows.reset()
        self._compact_at = COMPACT
        self._length, self._new, self._batch = 0, 0, -1


class _LayerView(CacheLayerMixin):
    """One layer of the cache as transformers looks at it; the content belongs to the whole cache.

    It refers to the cache weakly: a discarded cache frees its memory at once, not when cycles are next collected.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: ValuePathCache, layer: int) -> None:
        self._whole_cache, self._layer = weakref.ref(cache), layer

    @property
    def _cache(self) -> ValuePathCache:
        cache = self._whole_cache()
        if cache is None:
            raise RuntimeError("the cache that this layer belonged to is gone")
        return cache

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self._cache.is_initialized

    @property
    def is_sliding(self) -> bool:
        return self._cache.plan.layers[self._layer].window is not None

    @property
    def record_past(self) -> bool:
        return self._cache.is_recording_past()

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self._cache.set_past_recording(on)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """What the next query of this layer sees of the past, (B, g, S, e)."""
        return self._read()[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """As ``keys``; without the weight that the plan keeps outside."""
        return self._read()[1] if self.is_initialized else None

    def _read(self) -> tuple[Tensor, Tensor]:
        return self._cache.read(self._layer, self._cache.plan.layers[self._layer].window)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers are made when they are first written."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.update(key_states, value_states, self._layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_mask_sizes(query_length, self._layer)

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1

    def _whole(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("layers of a ValuePathCache share buffers; call this on the whole cache")

    offload = prefetch = reset = reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _whole

"""Decode steps of whole models with caches of any length, filled synthetically: tokens per second and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from valuepath.bench.text import TextIds
from valuepath.bench.timing import alternating
from valuepath.compat import CACHE_NAME
from valuepath.config import ValuePathConfig
from valuepath.counts import break_even, cache_counts
from valuepath.infer.attend import kernel_for
from valuepath.infer.cache import CacheBytes, ValuePathCache
from valuepath.infer.choose import bucket, chooser
from valuepath.model.modeling import ValuePathForCausalLM
from valuepath.model.norm import compute_dtype

KEYS_ALONE = "valuepath_keys_alone"
BASELINE = "transformer"
WARM_UP = 4
"""Steps that do not count; every way of every layer has been tried within them."""


@dataclass(frozen=True)
class Contestant:
    """A model and the way in which its values are read."""

    name: str
    variant: str
    fold: str = "auto"
    way: str = ""
    """Of ``valuepath.infer.attend``; by default the fastest."""
    attention: str = "sdpa"


CONTESTANTS = (
    Contestant(BASELINE, "transformer"),
    Contestant("svformer, V_0 stored", "svformer", fold="none"),
    Contestant("svformer, folded", "svformer"),
    Contestant("bov, gathering", "bov", way="gather"),
    Contestant("bov, pooled", "bov"),
    Contestant("keys alone", "svformer", fold="none", attention=KEYS_ALONE),
)
"""The second and the fourth are what the papers and their authors' code do; the last reads no value and gives no text."""


@dataclass(frozen=True)
class WholeCell:
    dtype: torch.dtype
    batch: int
    context: int
    layers: int
    hidden: int
    heads: int

    def config(self, one: Contestant, vocab_size: int) -> ValuePathConfig:
        return ValuePathConfig(
            variant=one.variant,
            fold=one.fold,
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=2 * self.context,
        )

    def bytes_needed(self, vocab_size: int) -> int:
        """All models and all caches at once, which is how they are measured."""
        total = 0
        for one in {(one.variant, one.fold): one for one in CONTESTANTS}.values():
            plan = self.config(one, vocab_size).plan()
            size = self.dtype.itemsize
            cache = cache_counts(plan, self.context, self.batch, size)
            total += int(1.13 * cache.growing_bytes) + cache.shared_bytes - cache.shared_trained_bytes
            total += sum(parameter.size for parameter in plan.parameters) * size
        return total


def keys_alone(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attention weights and nothing else: the time that no layout of values can beat."""
    assert query.shape[1] == key.shape[1] and attention_mask is None
    wide = compute_dtype(query.dtype)
    candidates = {
        "q k^T": lambda: torch.softmax(torch.matmul(query, key.mT) * scaling, -1, dtype=wide),
        "k q^T": lambda: torch.softmax(torch.matmul(key, query.mT).mT * scaling, -1, dtype=wide),
    }
    kernel = kernel_for(query, key, None)
    if kernel is not None:  # everything into one slot, whose value nobody reads
        slots = torch.zeros(key.shape[0], key.shape[2], dtype=torch.int32, device=key.device)
        candidates["kernel"] = lambda: kernel.pool(query, key, slots, None, scaling, 1)
    chooser.run((KEYS_ALONE, query.dtype, query.shape[0], bucket(key.shape[2])), candidates, query.device)
    return torch.zeros_like(query).transpose(1, 2), None


def fill(cache: ValuePathCache, ids: Tensor, dtype: torch.dtype) -> None:
    """Make an empty cache look as after a prompt ``ids`` (B, T): its tokens, and random keys and values."""
    B, T = ids.shape
    plan = cache.plan
    g, e = plan.shape.num_kv_heads, plan.shape.head_dim
    cache.begin(ids, B, T)
    for buffer in (*cache.keys.values(), *cache.stored_values.values()):
        buffer.write(torch.randn(B, g, T, e, dtype=torch.float32, device=ids.device).to(dtype))
    cache.commit()


def steps_taken(rounds: int) -> int:
    """Tokens behind the context that are needed: two ways may share a cache."""
    return 2 * (WARM_UP + rounds)


@torch.no_grad()
def measure(cell: WholeCell, text: TextIds, rounds: int, device: torch.device) -> dict[str, Any]:
    """For each contestant: median milliseconds a step, tokens per second, bytes, and the ratios to the Transformer."""
    AttentionInterface.register(KEYS_ALONE, keys_alone)
    AttentionMaskInterface.register(KEYS_ALONE, sdpa_mask)
    ids = text.batch(cell.batch, cell.context + steps_taken(rounds)).to(device)
    prompt, rest = ids[:, : cell.context], ids[:, cell.context :]
    made: dict[tuple[str, str], tuple[Any, ValuePathCache]] = {}  # ways of one model share its weights and its cache
    filled: dict[tuple[str, str], CacheBytes] = {}
    caches: dict[str, ValuePathCache] = {}
    work: dict[str, Callable[[], Any]] = {}

    def step(one: Contestant, model: Any, cache: ValuePathCache) -> Callable[[], Any]:
        def run() -> None:
            at = cache.get_seq_length() - cell.context
            model.config._attn_implementation = one.attention
            with chooser.only(one.way):
                model(rest[:, at : at + 1], use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})

        return run

    for one in CONTESTANTS:
        key = (one.variant, one.fold)
        if key not in made:
            torch.manual_seed(0)
            model: Any = ValuePathForCausalLM(cell.config(one, text.vocab_size))
            model = model.to(device=device, dtype=cell.dtype).eval()
            model.fold()
            made[key] = (model, model.make_cache())
            fill(made[key][1], prompt, cell.dtype)
            filled[key] = made[key][1].nbytes()
        caches[one.name] = made[key][1]
        work[one.name] = step(one, *made[key])
    ms = alternating(work, rounds, WARM_UP, device)
    base_bytes = next(held.logical for (variant, _), held in filled.items() if variant == BASELINE)
    found: dict[str, Any] = {}
    for one in CONTESTANTS:
        held, rows = filled[(one.variant, one.fold)], caches[one.name].nbytes().rows
        even = break_even(cell.config(one, text.vocab_size).plan(), cell.context, cell.dtype.itemsize)
        found[one.name] = {
            "ms_per_step": ms[one.name],
            "tokens_per_second": cell.batch * 1e3 / ms[one.name],
            "speed_over_transformer": ms[BASELINE] / ms[one.name],
            "growing_bytes": held.logical,
            "growing_over_transformer": held.logical / base_bytes,
            "allocated_bytes": held.allocated,
            "table_bytes": held.shared,
            "row_bytes": rows,
            "growing_and_tables_over_transformer": (held.logical + held.shared) / base_bytes,
            "break_even_tokens": even.tokens,
        }
    distinct = {name: cache.tokens.count for name, cache in caches.items() if cache.plan.folds}
    return {"distinct": max(distinct.values()), "contestants": found}

"""From a wiring and the model's sizes to everything that follows: a pure function, no torch.

For each layer the plan says which projections, tables and coefficients exist, which streams have to be handed on to later
layers, and where each key and value lives at inference:

* ``Tokens``: every source is determined by the token id alone; the cache keeps ids, the values come from a table;
* ``Alias``: another layer's buffer holds the same content; it is read there, through this layer's own window;
* ``Store``: the finished mix is stored. Mixing is position-wise, so this is never more than an ordinary Transformer.

A lone source keeps its weight outside, on the attention output (``A (g V) = g (A V)``; for keys on the query), so what a
buffer or a table holds is the unweighted content, here called a *core*, and one buffer serves all layers that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from valuepath.parameters import Parameter, plan_parameters
from valuepath.residency import (
    Alias,
    Content,
    Core,
    Embedded,
    Finished,
    FirstInput,
    Item,
    NormedEmbedding,
    Projected,
    Residency,
    Rows,
    Store,
    Tokens,
    check_sizes,
    fuses_embed,
    ingredients,
    item_key,
    reads_input,
    received_items,
    resolve,
    token_layers,
)
from valuepath.shape import Fold, Mlp, QkNorm, Shape
from valuepath.wiring import Budget, Embed, Own, Table, Wiring

__all__ = [
    "Alias", "Content", "Core", "Embedded", "Finished", "FirstInput", "Fold", "Item", "LayerPlan", "Mlp", "NormedEmbedding",
    "Parameter", "Plan", "Projected", "QkNorm", "Residency", "Rows", "Shape", "Store", "Tokens", "item_key", "make_plan",
]  # fmt: skip


@dataclass(frozen=True)
class LayerPlan:
    """What exists in layer ``layer`` and where its keys and values live."""

    layer: int
    window: int | None
    projections: tuple[str, ...]
    """Which of q, k, v this layer projects itself."""
    value_products: int
    """How often the value projection is applied to a token: 2 if both V_n and x0 W_V are needed by themselves."""
    reads_input: bool
    """Whether a projection or a gate of this layer reads the normalised attention input."""
    fuses_embed: bool
    """Whether ``a V_n + b x0 W_V`` is computed as ``(a h + b x0) W_V``."""
    v_core: Core
    v_scale: tuple[int, ...]
    """Layers whose weight multiplies the value outside, the reader's own included."""
    k_core: int
    """The layer whose finished key is read."""
    k_scale: tuple[int, ...]
    k: Residency
    v: Residency
    receives: tuple[Item, ...]
    provides: tuple[Item, ...]


@dataclass(frozen=True)
class Plan:
    """All that follows from a wiring for a model of a given shape; build it with ``make_plan``."""

    wiring: Wiring
    shape: Shape
    fold: Fold
    layers: tuple[LayerPlan, ...]

    # ---------------------------------------------------------------------------------------------- what it needs
    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def needs_attention_matrix(self) -> bool:
        """Whether an equation mixes softmaxed attention, which fused backends never form."""
        return any(not layer.a.is_plain for layer in self.wiring.layers)

    @property
    def needs_ids(self) -> bool:
        """Whether a value comes from a table of token ids (in training too)."""
        return any(layer.v.has(Table) for layer in self.wiring.layers)

    @property
    def needs_embed(self) -> bool:
        return any(layer.v.has(Embed) for layer in self.wiring.layers)

    @property
    def shared_table(self) -> bool:
        return any(isinstance(t.source, Table) and t.source.shared for layer in self.wiring.layers for t in layer.v)

    @cached_property
    def budgets(self) -> dict[int, float]:
        """group -> total"""
        found = {}
        for _, _, mix in self.wiring.mixes():
            for term in mix:
                if isinstance(term.weight, Budget):
                    found[term.weight.group] = term.weight.total
        return found

    @property
    def generation_refusal(self) -> str | None:
        """Why no text may be generated, or None."""
        for n, layer in enumerate(self.wiring.layers):
            if layer.v.renorm == "tensor":
                return (
                    f"v[{n}] is rescaled by the norm of the whole tensor (axis=tensor), which includes tokens that come "
                    "later: there is no cache that gives the same result. Use axis=token or axis=head to generate"
                )
        return None

    @property
    def folds(self) -> bool:
        """Whether the cache keeps token ids."""
        return any(isinstance(layer.v, Tokens) for layer in self.layers)

    # --------------------------------------------------------------------------------------------------- buffers
    def readers(self, layer: LayerPlan) -> list[LayerPlan]:
        """The layers whose keys and values this layer attends over: its own, then those of ``concat``."""
        return [layer, *(self.layers[i] for i in self.wiring.layers[layer.layer].kv)]

    def _longest(self, windows: list[int | None]) -> int | None:
        return None if None in windows else max(w for w in windows if w is not None)

    @cached_property
    def key_windows(self) -> dict[int, int | None]:
        """Key buffer (its owner) -> the longest window of any reader."""
        windows: dict[int, list[int | None]] = {}
        for reader in self.layers:
            for read in self.readers(reader):
                windows.setdefault(read.k_core, []).append(reader.window)
        return {owner: self._longest(found) for owner, found in windows.items()}

    @cached_property
    def value_windows(self) -> dict[int, int | None]:
        """Value buffer (its owner) -> the longest window of any reader. Layers that keep ids have none."""
        windows: dict[int, list[int | None]] = {}
        for reader in self.layers:
            for read in self.readers(reader):
                if not isinstance(read.v, Tokens):
                    owner = read.v.layer if isinstance(read.v, Alias) else read.layer
                    windows.setdefault(owner, []).append(reader.window)
        return {owner: self._longest(found) for owner, found in windows.items()}

    @cached_property
    def id_window(self) -> int | None:
        """The longest window of any layer that reads values by token id; only meaningful if ``folds``."""
        found: list[int | None] = []
        for reader in self.layers:
            if any(isinstance(read.v, Tokens) for read in self.readers(reader)):
                found.append(reader.window)
        return self._longest(found) if found else None

    @cached_property
    def token_cores(self) -> tuple[Core, ...]:
        """The distinct contents that ``Tokens`` layers read, in order of first use."""
        return tuple(dict.fromkeys(layer.v.core for layer in self.layers if isinstance(layer.v, Tokens)))

    @cached_property
    def tables(self) -> tuple[Core, ...]:
        """Those of them that are read from a |V|-row table of values: all, or with ``fold="factored"`` the trained ones."""
        return tuple(core for core in self.token_cores if self.fold != "factored" or isinstance(core, Rows))

    @cached_property
    def contents(self) -> dict[Core, tuple[Content, ...]]:
        """Token core -> what is held for each distinct token of the sequences: its value, or with ``fold="factored"`` what its
        projection is applied to, which is summed first (an equation that is no weighted sum keeps its values)."""
        if self.fold != "factored":
            return {core: (core,) for core in self.token_cores}
        resolved = resolve(self.wiring, self.shape)
        return {core: ingredients(self.wiring, resolved, core) or (core,) for core in self.token_cores}

    @cached_property
    def row_widths(self) -> dict[Content, int]:
        """Channels held for each distinct token, by content."""
        return {
            content: self.shape.hidden_size if isinstance(content, FirstInput | NormedEmbedding) else self.shape.kv_width
            for contents in self.contents.values()
            for content in contents
        }

    # ------------------------------------------------------------------------------------------------- parameters
    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every stored parameter of the causal language model, by its name in the checkpoint."""
        return tuple(plan_parameters(self))

    def mix_name(self, stream: str, n: int) -> str:
        """The module that holds the coefficients of a mix."""
        if stream == "x":
            return "model.mix_x" if n == self.num_layers else f"model.layers.{n}.mix_x"
        return f"model.layers.{n}.self_attn.mix_{stream}"


def make_plan(wiring: Wiring, shape: Shape, fold: Fold = "auto") -> Plan:
    """The plan of ``wiring`` for a model of ``shape``.

    Args:
        fold: ``auto`` keeps ids wherever a layer after the first is token-determined, and for layer 0 where such a layer
            reads it; ``all`` also for layer 0 of any model; ``none`` only where a lone trained table is read, which needs
            no folding: the published layout; ``factored`` the layers of ``auto``, but without a |V|-row table: attention
            weights are summed over embedding rows, and W_V is applied after attention.

    Raises:
        WiringError: for what depends on sizes: gate channels, attention mixing across unequal windows.
        ValueError: for an unknown ``fold`` or another number of layers.
    """
    if fold not in get_args(Fold):
        raise ValueError(f"fold={fold!r}: expected {', '.join(map(repr, get_args(Fold)))}")
    if wiring.num_layers != shape.num_layers:
        raise ValueError(f"the wiring has {wiring.num_layers} layers, the shape {shape.num_layers}")
    check_sizes(wiring, shape)
    resolved = resolve(wiring, shape)
    tokens = token_layers(wiring, resolved, fold)
    owners: dict[Core, int] = {}
    layers = []
    reads = received_items(wiring, resolved)
    for n, read in enumerate(resolved):
        v: Residency
        if n in tokens:
            v = Tokens(read.v_core)
        elif read.v_core in owners:
            v = Alias(owners[read.v_core])
        else:
            owners[read.v_core] = n
            v = Store()
        wired = wiring.layers[n]
        fuses = fuses_embed(wiring, n)
        layers.append(
            LayerPlan(
                layer=n,
                window=shape.windows[n],
                projections=tuple(s for s in ("q", "k", "v") if wired.mix(s).has(Own, Embed)),
                value_products=1 if fuses else sum(wired.v.has(kind) for kind in (Own, Embed)),
                reads_input=reads_input(wired),
                fuses_embed=fuses,
                v_core=read.v_core,
                v_scale=read.v_scale,
                k_core=read.k_core,
                k_scale=read.k_scale,
                k=Store() if read.k_core == n else Alias(read.k_core),
                v=v,
                receives=reads[n],
                provides=tuple(
                    dict.fromkeys(item for later in reads[n + 1 :] for item in later if item.layer == n and item.stream != "x")
                ),
            )
        )
    return Plan(wiring, shape, fold, tuple(layers))

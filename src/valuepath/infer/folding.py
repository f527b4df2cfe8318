"""Values that are a function of the token id: computed for given ids, or folded into a |V|-row table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from valuepath.plan import Core, Embedded, Finished, Projected, Rows, item_key
from valuepath.wiring import Embed, Shared, Table, Tap

if TYPE_CHECKING:
    from valuepath.model.modeling import ValuePathModel

FOLD_BLOCK = 4096
"""Token ids that are folded at a time, which bounds the memory of folding."""


class TokenValues:
    """The token-determined values of one model.

    ``compute`` evaluates a core for given ids through the model's own layers, with gradients. ``gather`` reads the folded
    table, which is built when first needed and rebuilt when any weight it depends on has changed.
    """

    def __init__(self, model: ValuePathModel) -> None:
        self.model = model
        self._tables: dict[Core, tuple[Any, Tensor]] = {}

    # ---------------------------------------------------------------------------------------------------- compute
    def compute(self, core: Core, ids: Tensor, done: dict[Core, Tensor] | None = None) -> Tensor:
        """The unweighted value of each token id: (..., g, e) for ids (...).

        Args:
            done: cores of these ids that are known already; values that several layers share are computed once.
        """
        done = {} if done is None else done
        if core not in done:
            done[core] = self._compute(core, ids, done)
        return done[core]

    def _compute(self, core: Core, ids: Tensor, done: dict[Core, Tensor]) -> Tensor:
        model, layers = self.model, self.model.layers
        shape = model.plan.shape
        match core:
            case Rows(layer):
                table = model.v_table if layer is None else layers[layer].self_attn.v_table
                return table(ids).unflatten(-1, (shape.num_kv_heads, shape.head_dim))
            case Embedded(layer):
                return layers[layer].self_attn.project("v", self._x0(ids))
            case Projected(0):
                return layers[0].self_attn.project("v", self._first_input(ids))
            case Finished(layer):
                return self._finished(layer, ids, done)
        raise ValueError(f"{core} is not determined by the token id")

    def _x0(self, ids: Tensor) -> Tensor:
        return self.model.normalized_embedding(self.model.embed_tokens(ids))

    def _first_input(self, ids: Tensor) -> Tensor:
        return self.model.layers[0].input_layernorm(self.model.first_state(self.model.embed_tokens(ids)))

    def _finished(self, layer: int, ids: Tensor, done: dict[Core, Tensor]) -> Tensor:
        attention = self.model.layers[layer].self_attn
        budgets = self.model.budget_weights()
        env: dict[str, Tensor] = {}
        for term in attention.wiring.v:
            match term.source:
                case Tap(other):
                    env[item_key("tap", "v", other)] = self.compute(Projected(other), ids, done)
                case Shared(other):
                    env[item_key("shared", "v", other)] = self.compute(self.model.plan.layers[other].v_core, ids, done)
                    scale = self._outside(other, budgets)
                    if scale is not None:
                        env[item_key("scale", "v", other)] = scale
                case Embed():
                    env["x0"] = self._x0(ids)
                case Table(True):
                    env["table"] = self.compute(Rows(None), ids, done)
        # layers after the first read no hidden state here: the plan would not have called them token-determined
        h = self._first_input(ids) if layer == 0 else self._x0(ids)
        return attention.value(h, env, budgets, ids)[0]

    def _outside(self, layer: int, budgets: dict[int, Tensor]) -> Any:
        attention = self.model.layers[layer].self_attn
        env: dict[str, Any] = {}
        term = attention.wiring.v.lone
        if term is not None and isinstance(term.source, Shared):
            inner = self._outside(term.source.layer, budgets)
            if inner is not None:
                env[item_key("scale", "v", term.source.layer)] = inner
        return attention.value_scale(env, budgets)

    # ------------------------------------------------------------------------------------------------------- fold
    def gather(self, core: Core, ids: Tensor) -> Tensor:
        """As ``compute``, from the folded table; without gradients."""
        shape = self.model.plan.shape
        return F.embedding(ids, self.table(core)).unflatten(-1, (shape.num_kv_heads, shape.head_dim))

    def _trained(self, core: Core) -> Tensor | None:
        """The weight of a trained table; None for other cores and for a table that something else has been put around."""
        if not isinstance(core, Rows):
            return None
        holder = self.model if core.layer is None else self.model.layers[core.layer].self_attn
        return holder.v_table.weight if type(holder.v_table) is torch.nn.Embedding else None

    @torch.no_grad()
    def table(self, core: Core) -> Tensor:
        """The |V|-row table of a core, (|V|, g e). A trained table is returned as it is, never copied."""
        trained = self._trained(core)
        if trained is not None:
            return trained
        state = self._state(core)
        found = self._tables.get(core)
        if found is None or found[0] != state:
            device = self.model.embed_tokens.weight.device
            vocabulary = torch.arange(self.model.plan.shape.vocab_size, device=device)
            with torch.autocast(device.type, enabled=False):  # the table outlives the context that it was made in
                rows = torch.cat([self.compute(core, block).flatten(-2) for block in vocabulary.split(FOLD_BLOCK)])
            self._tables[core] = found = (state, rows)
        return found[1]

    def invalidate(self) -> None:
        """Drop every folded table."""
        self._tables.clear()

    def nbytes(self, cores: tuple[Core, ...]) -> int:
        """Bytes of the tables that are read for ``cores`` and exist now."""
        total = 0
        for core in cores:
            table = self._trained(core)
            if table is None and core in self._tables:
                table = self._tables[core][1]
            if table is not None:
                total += table.numel() * table.element_size()
        return total

    def _state(self, core: Core) -> tuple[Any, ...]:
        """Changes whenever a weight that the table depends on is replaced, moved, cast or changed in place."""
        return tuple((id(p), p.data_ptr(), _version(p), p.dtype, p.device) for p in self._weights(core))

    def _weights(self, core: Core, seen: set[Core] | None = None) -> list[Tensor]:
        """The parameters that a core depends on."""
        seen = set() if seen is None else seen
        if core in seen:
            return []
        seen.add(core)
        model = self.model
        attention = model.layers[core.layer or 0].self_attn
        found: list[Tensor] = [*model.embed_tokens.parameters(), *(p for b in model.budgets.values() for p in b.parameters())]
        match core:
            case Embedded():
                found += attention.v_proj.parameters()
            case Projected():
                found += [*attention.v_proj.parameters(), *model.layers[0].input_layernorm.parameters()]
            case Finished():
                found += model.layers[0].input_layernorm.parameters()
                for name in ("v_proj", "v_table", "mix_v"):
                    if hasattr(attention, name):
                        found += getattr(attention, name).parameters()
                for term in attention.wiring.v:
                    match term.source:
                        case Tap(other):
                            found += self._weights(Projected(other), seen)
                        case Shared(other):
                            found += self._weights(model.plan.layers[other].v_core, seen)
                            for n in model.plan.layers[other].v_scale:
                                if hasattr(model.layers[n].self_attn, "mix_v"):
                                    found += model.layers[n].self_attn.mix_v.parameters()
                        case Table(True):
                            found += model.v_table.parameters()
            case Rows():
                found = [*(model if core.layer is None else attention).v_table.parameters()]
        return found


def _version(tensor: Tensor) -> int:
    """PyTorch's count of in-place changes; tensors made in inference mode have none and cannot be trained."""
    return -1 if tensor.is_inference() else tensor._version

"""Values that are a function of the token id: computed for given ids, folded into a |V|-row table, or summed in factors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from valuepath.infer.buffer import plain_tensors
from valuepath.infer.tables import HostTable
from valuepath.model.norm import compute_dtype
from valuepath.plan import Content, Core, Embedded, Finished, FirstInput, NormedEmbedding, Projected, Rows, item_key
from valuepath.wiring import Embed, Own, Shared, Table, Tap

if TYPE_CHECKING:
    from valuepath.model.modeling import ValuePathModel

FOLD_BLOCK = 4096
"""Token ids that are folded at a time, which bounds the memory of folding."""


class Inputs(Protocol):
    """What token-determined values are made from."""

    def first(self) -> Tensor: ...

    def x0(self) -> Tensor: ...

    def rows(self, layer: int | None) -> Tensor: ...


class OfIds:
    """The inputs of token ids (...): with gradients, in the model's dtype or a wider one."""

    def __init__(self, model: ValuePathModel, ids: Tensor, dtype: torch.dtype | None = None) -> None:
        self.model, self.ids, self.dtype = model, ids, dtype

    def _wide(self, x: Tensor) -> Tensor:
        return x if self.dtype is None else x.to(self.dtype)

    def _embedding(self) -> Tensor:
        return self._wide(self.model.embed_tokens(self.ids))

    def first(self) -> Tensor:
        """The normalised attention input of layer 0, (..., d)."""
        return self.model.layers[0].input_layernorm(self.model.first_state(self._embedding()))

    def x0(self) -> Tensor:
        """The embedding's norm without gain, (..., d)."""
        return self.model.normalized_embedding(self._embedding())

    def rows(self, layer: int | None) -> Tensor:
        """Rows of the table of ``layer``, or of the shared one, (..., g, e)."""
        shape = self.model.plan.shape
        table = self.model.v_table if layer is None else self.model.layers[layer].self_attn.v_table
        return self._wide(table(self.ids)).unflatten(-1, (shape.num_kv_heads, shape.head_dim))


class Summed:
    """The same after they have been summed with attention weights: contents by name."""

    def __init__(self, sums: dict[Content, Tensor]) -> None:
        self.sums = sums

    def first(self) -> Tensor:
        return self.sums[FirstInput()]

    def x0(self) -> Tensor:
        return self.sums[NormedEmbedding()]

    def rows(self, layer: int | None) -> Tensor:
        return self.sums[Rows(layer)]


class TokenValues:
    """The token-determined values of one model.

    ``compute`` evaluates a core for given ids through the model's own layers, with gradients. ``rows`` reads them from the
    folded table, which is built when first needed and rebuilt when any weight it depends on has changed. ``of_sums`` applies a
    core's projections to what has been summed over tokens.
    """

    def __init__(self, model: ValuePathModel) -> None:
        self.model = model
        self.table_device: str | None = None
        """``cpu`` keeps folded tables in host memory, wherever the model is."""
        self._tables: dict[Core, tuple[Any, Tensor]] = {}

    # ---------------------------------------------------------------------------------------------------- compute
    def compute(self, core: Core, ids: Tensor, done: dict[Core, Tensor] | None = None) -> Tensor:
        """The unweighted value of each token id: (..., g, e) for ids (...).

        Args:
            done: cores of these ids that are known already; values that several layers share are computed once.
        """
        return self._evaluate(core, OfIds(self.model, ids), {} if done is None else done)

    def of_sums(self, core: Core, sums: dict[Content, Tensor]) -> Tensor:
        """``W sum_u a_u x_u``: the core's value for what its contents were summed to, (..., g, e).

        Args:
            sums: by content, (..., d), or (..., g, e) for a table.
        """
        return self._evaluate(core, Summed(sums), {})

    def _evaluate(self, core: Core, inputs: Inputs, done: dict[Core, Tensor]) -> Tensor:
        if core not in done:
            match core:
                case Rows(layer):
                    done[core] = inputs.rows(layer)
                case Embedded(layer):
                    done[core] = self._attention(layer).project("v", inputs.x0())
                case Projected(0):
                    done[core] = self._attention(0).project("v", inputs.first())
                case Finished(layer):
                    done[core] = self._finished(layer, inputs, done)
                case _:
                    raise ValueError(f"{core} is not determined by the token id")
        return done[core]

    def _attention(self, layer: int) -> Any:
        return self.model.layers[layer].self_attn

    def _finished(self, layer: int, inputs: Inputs, done: dict[Core, Tensor]) -> Tensor:
        attention = self._attention(layer)
        budgets = self.model.budget_weights()
        env: dict[str, Tensor] = {}
        for term in attention.wiring.v:
            match term.source:
                case Tap(other):
                    env[item_key("tap", "v", other)] = self._evaluate(Projected(other), inputs, done)
                case Shared(other):
                    env[item_key("shared", "v", other)] = self._evaluate(self.model.plan.layers[other].v_core, inputs, done)
                    scale = self._outside(other, budgets)
                    if scale is not None:
                        env[item_key("scale", "v", other)] = scale
                case Embed():
                    env["x0"] = inputs.x0()
                case Table(shared):
                    env["table" if shared else "rows"] = self._evaluate(Rows(None if shared else layer), inputs, done)
        # only layer 0 reads a hidden state here: the plan would not have called others token-determined
        h = inputs.first() if attention.wiring.v.has(Own) else None
        return attention.value(h, env, budgets, None)[0]

    def _outside(self, layer: int, budgets: dict[int, Tensor]) -> Any:
        attention = self._attention(layer)
        env: dict[str, Any] = {}
        term = attention.wiring.v.lone
        if term is not None and isinstance(term.source, Shared):
            inner = self._outside(term.source.layer, budgets)
            if inner is not None:
                env[item_key("scale", "v", term.source.layer)] = inner
        return attention.value_scale(env, budgets)

    # ----------------------------------------------------------------------------------------------------- tables
    def _trained(self, core: Content) -> nn.Embedding | None:
        """The module of a trained table; None for other contents and for a table that something else has been put around."""
        if not isinstance(core, Rows):
            return None
        table = self.model.v_table if core.layer is None else self._attention(core.layer).v_table
        return table if type(table) in (nn.Embedding, HostTable) else None

    @plain_tensors
    def table(self, core: Core) -> Tensor:
        """The |V|-row table of a core, (|V|, g e), in the model's dtype. A trained table is returned as it is, never copied;
        another is computed in blocks, in at least float32."""
        trained = self._trained(core)
        if trained is not None:
            return trained.weight
        state = self.state(core)
        found = self._tables.get(core)
        if found is None or found[0] != state:
            weight = self.model.embed_tokens.weight
            shape = self.model.plan.shape
            place = weight.device if self.table_device is None else torch.device("cpu")
            rows = torch.empty(shape.vocab_size, shape.kv_width, dtype=weight.dtype, device=place)
            with self._exact(core):
                for block in torch.arange(shape.vocab_size, device=weight.device).split(FOLD_BLOCK):
                    rows[block[0] : block[-1] + 1] = self._exactly(core, block).flatten(-2)
            self._tables[core] = found = (state, rows)
        return found[1]

    @plain_tensors
    def rows(self, content: Content, ids: Tensor, from_table: bool = True) -> Tensor:
        """What is held for token ids (n,): (n, heads, width) on the compute device.

        Args:
            from_table: read a core's rows from its |V|-row table, which is folded if need be; else compute these alone.
        """
        weight = self.model.embed_tokens.weight
        if isinstance(content, FirstInput | NormedEmbedding):
            inputs = OfIds(self.model, ids, compute_dtype(weight.dtype))
            return (inputs.first() if isinstance(content, FirstInput) else inputs.x0()).to(weight.dtype)[:, None]
        trained = self._trained(content)
        if trained is None and not from_table:
            with self._exact(content):
                return self._exactly(content, ids).to(weight.dtype)
        if trained is not None:
            found = trained(ids)
        else:
            table = self.table(content)
            found = table[ids.to(table.device)].to(weight.device)
        shape = self.model.plan.shape
        return found.unflatten(-1, (shape.num_kv_heads, shape.head_dim))

    def is_elsewhere(self, content: Content) -> bool:
        """Whether it is read from a table on another device or on disk, so that its rows should be read ahead."""
        trained = self._trained(content)
        if isinstance(trained, HostTable):
            return trained.is_mapped or trained.compute_device.type != "cpu"
        kept = self._tables.get(content) if isinstance(content, Core) else None
        return kept is not None and kept[1].device != self.model.embed_tokens.weight.device and kept[0] == self.state(content)

    @contextmanager
    def _exact(self, core: Core) -> Iterator[None]:
        """Evaluate ``core`` in at least float32, whatever the model's dtype and an autocast around."""
        weight = self.model.embed_tokens.weight
        wide = compute_dtype(weight.dtype)
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(weight.device.type, enabled=False))
            if weight.dtype != wide:
                for module in self._modules(core):
                    stack.enter_context(_widened(module, wide))
            yield

    def _exactly(self, core: Core, ids: Tensor) -> Tensor:
        return self._evaluate(core, OfIds(self.model, ids, compute_dtype(self.model.embed_tokens.weight.dtype)), {})

    def fold(self, cores: tuple[Core, ...] | None = None) -> None:
        """Build the tables of the model's plan now rather than when they are first read."""
        for core in self.model.plan.tables if cores is None else cores:
            self.table(core)

    def invalidate(self) -> None:
        """Drop every folded table."""
        self._tables.clear()

    def nbytes(self, cores: tuple[Core, ...]) -> int:
        """Bytes of the tables that are read for ``cores`` and exist now, wherever they are."""
        total = 0
        for core in cores:
            trained = self._trained(core)
            table = self._tables[core][1] if trained is None and core in self._tables else None
            table = trained.weight if trained is not None else table
            if table is not None:
                total += table.numel() * table.element_size()
        return total

    # ------------------------------------------------------------------------------------------------------ state
    def state(self, content: Content) -> tuple[Any, ...]:
        """Changes whenever a weight that the content depends on is replaced, moved, cast or changed in place."""
        found: list[Tensor] = [*self.model.embed_tokens.parameters(), *self.model.budgets.parameters()]
        match content:
            case FirstInput():
                found += self.model.layers[0].input_layernorm.parameters()
            case NormedEmbedding():
                pass
            case Rows(layer):
                found = [*(self.model if layer is None else self._attention(layer)).v_table.parameters()]
            case _:
                found += (p for module in self._modules(content) for p in module.parameters())
        return tuple((id(p), p.data_ptr(), _version(p), p.dtype, p.device) for p in found)

    def _modules(self, core: Core, seen: set[Core] | None = None) -> list[nn.Module]:
        """The modules besides the embedding and the budgets that a core is computed with."""
        seen = set() if seen is None else seen
        if core in seen:
            return []
        seen.add(core)
        model = self.model
        first = model.layers[0].input_layernorm
        match core:
            case Embedded(layer):
                return [self._attention(layer).v_proj]
            case Projected(layer):
                return [self._attention(layer).v_proj, first]
            case Rows(layer):
                return []  # a table's rows are looked up, and widened then
        attention = self._attention(core.layer)
        own = [getattr(attention, name) for name in ("v_proj", "v_table", "mix_v") if hasattr(attention, name)]
        found: list[nn.Module] = [first, *own]
        for term in attention.wiring.v:
            match term.source:
                case Tap(other):
                    found += self._modules(Projected(other), seen)
                case Shared(other):
                    found += self._modules(model.plan.layers[other].v_core, seen)
                    for n in model.plan.layers[other].v_scale:
                        if hasattr(self._attention(n), "mix_v"):
                            found.append(self._attention(n).mix_v)
                case Table(True):
                    found.append(model.v_table)
        return found


@contextmanager
def _widened(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The module with its floating point parameters in ``dtype``; tables, of which only rows are read, are left alone."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                changed.append((part, name, parameter))
    try:
        for part, name, parameter in changed:
            part._parameters[name] = nn.Parameter(parameter.to(dtype), requires_grad=False)
        yield
    finally:
        for part, name, parameter in changed:
            part._parameters[name] = parameter


def _version(tensor: Tensor) -> int:
    """PyTorch's count of in-place changes; tensors made in inference mode have none and cannot be trained."""
    return -1 if tensor.is_inference() else tensor._version

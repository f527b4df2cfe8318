"""The causal language model as a transformers ``PreTrainedModel``: embedding, blocks, final norm, head."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging

from valuepath.compat import CACHE_NAME
from valuepath.config import ValuePathConfig
from valuepath.infer.cache import ValuePathCache
from valuepath.infer.folding import TokenValues
from valuepath.infer.tables import check_table_device, moved_table
from valuepath.model.block import Block, mix_states
from valuepath.model.combine import BudgetWeights, Mixer
from valuepath.model.init import Initializer
from valuepath.model.masks import Masks
from valuepath.model.norm import RMSNorm, compute_dtype, rms_norm
from valuepath.model.rope import RotaryEmbedding
from valuepath.plan import Plan

logger = logging.get_logger(__name__)


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of the next token, in at least float32.

    Args:
        logits: (B, T, |V|).
        labels: (B, T); position t is predicted from t - 1, ``ignore_index`` is left out.
        num_items_in_batch: divide the sum by this instead, as the trainer's gradient accumulation asks.
        shift_labels: labels that are already shifted, instead of ``labels``.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    flat = logits.to(compute_dtype(logits.dtype)).flatten(0, -2)
    target = shift_labels.to(flat.device).flatten()
    if num_items_in_batch is None:
        return F.cross_entropy(flat, target, ignore_index=ignore_index)
    return F.cross_entropy(flat, target, ignore_index=ignore_index, reduction="sum") / num_items_in_batch


class ValuePathPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation."""

    config_class = ValuePathConfig
    config: ValuePathConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers reads plain class attributes)
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        plan = self.config.plan()
        if plan.needs_attention_matrix:
            if attn_implementation not in (None, "eager"):
                raise ValueError(
                    f"attn_implementation={attn_implementation!r} never forms the attention matrix, which this equation "
                    f"mixes ({self.config.equation()!r}); use attn_implementation='eager' or leave it out"
                )
            attn_implementation = "eager"
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, table_device: str | None = None, **kwargs: Any
    ) -> Any:
        """As in transformers, and

        Args:
            table_device: where value tables live: None with the model, ``cpu`` in host memory, ``mmap`` in the checkpoint's
                file, from which rows are read when their token appears. The model is loaded on the CPU then; move it with
                ``.to(device)``, and the tables stay.

        Raises:
            ValueError: for another place, for ``device_map`` at the same time, and for a checkpoint that cannot be mapped.
        """
        if table_device is None:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        if kwargs.get("device_map") is not None:
            raise ValueError(
                f"table_device={table_device!r} and device_map={kwargs['device_map']!r}: give table_device only, and move the "
                "loaded model with .to(device); its tables stay where they are"
            )
        check_table_device(table_device)
        found = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = found[0] if isinstance(found, tuple) else found
        names = ("cache_dir", "revision", "token", "subfolder", "local_files_only")
        where = {name: kwargs[name] for name in names if name in kwargs}
        model.place_tables(table_device, checkpoint=pretrained_model_name_or_path, **where)
        return found

    def place_tables(self, table_device: str | None, checkpoint: Any = None, **where: Any) -> None:
        """Move the value tables: None to the model's own device, ``cpu`` to host memory, ``mmap`` to the file they were loaded
        from. Tables that are folded later, which no file has, are held in host memory with the last two.

        Args:
            checkpoint: folder or hub name, for ``mmap``; ``where`` is passed on to transformers' ``cached_file``.
        """
        check_table_device(table_device)
        if table_device == "mmap" and checkpoint is None:
            raise ValueError("table_device='mmap' needs the checkpoint: from_pretrained(path, table_device='mmap')")
        base = cast(ValuePathModel, self.base_model)
        for name, module in [*self.named_modules()]:
            table = getattr(module, "v_table", None)
            if isinstance(table, nn.Embedding):
                full = self._full_name(f"{name}.v_table.weight" if name else "v_table.weight")
                module.v_table = moved_table(table, table_device, checkpoint, full, base.embed_tokens.weight.device, **where)
        base.token_values.table_device = None if table_device is None else "cpu"
        base.token_values.invalidate()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RotaryEmbedding):
            frequencies, module.attention_scaling = module.frequencies()
            module.inv_freq.copy_(frequencies)
            module.original_inv_freq.copy_(frequencies)
            return
        prefix = next((name for name, m in self.named_modules() if m is module), None)
        if prefix is None:  # more rows for an embedding or a head: see resize_token_embeddings
            return
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta or getattr(parameter, "_is_hf_initialized", False):
                continue
            full = self._full_name(f"{prefix}.{name}" if prefix else name)
            if full == "lm_head.weight" and self.config.tie_word_embeddings:
                continue  # no parameter of its own: it becomes the embedding once the model is built
            parameter.copy_(self._initializer()(full))

    def _full_name(self, name: str) -> str:
        """A parameter's name in the causal language model, as the plan has it, also if this is the base model by itself."""
        return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"

    def _initializer(self) -> Initializer:
        seed = self.config.init_seed
        return Initializer(
            cast(ValuePathModel, self.base_model).plan,
            self.config.initializer_range,
            self.config.rms_norm_eps,
            torch.initial_seed() if seed is None else seed,
        )

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers; tables of values have a row per token too and are resized with the embedding.

        New rows are drawn around the mean of the old ones; with ``mean_resizing=False`` they are those that a new model of
        the new size starts with.
        """
        base: Any = self.base_model
        before = self.config.vocab_size
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        after = self.config.vocab_size
        if after == before:
            return embedding
        base.plan = self.config.plan()
        for module in self.modules():
            if isinstance(getattr(module, "v_table", None), nn.Embedding):
                self._get_resized_embeddings(cast(nn.Embedding, module.v_table), after, mean_resizing=mean_resizing)
        if not mean_resizing:
            initial = self._initializer()
            for name, parameter in self.named_parameters():
                if initial.parameters[self._full_name(name)].role in ("embedding", "head", "table"):
                    parameter[before:] = initial(self._full_name(name))[before:].to(parameter)
        return embedding


class ValuePathModel(ValuePathPreTrainedModel):
    """Token ids to hidden states; ``plan`` is what the config's equation amounts to."""

    plan: Plan
    layers: Any  # of Block; nn.ModuleList has no element type
    v_table: nn.Embedding

    def __init__(self, config: ValuePathConfig) -> None:
        super().__init__(config)
        self.plan = plan = config.plan()
        shape = plan.shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        if plan.shared_table:
            self.v_table = nn.Embedding(shape.vocab_size, shape.kv_width)
        self.budgets = nn.ModuleDict(
            {str(group): BudgetWeights(total, plan.num_layers) for group, total in plan.budgets.items()}
        )
        self.layers = nn.ModuleList([Block(config, plan, n) for n in range(plan.num_layers)])
        final = plan.wiring.final_x
        self.mix_x = None if final.is_plain else Mixer(final, "x", plan.num_layers, shape)
        self.norm = RMSNorm(shape.hidden_size, config.rms_norm_eps, shape.norm_gain)
        self.rotary_emb = RotaryEmbedding(config)
        self.masks = Masks(config, plan)
        self.token_values = TokenValues(self)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]
        self.token_values.invalidate()

    def train(self, mode: bool = True) -> ValuePathModel:
        self.token_values.invalidate()
        return super().train(mode)

    # ------------------------------------------------------------------------------------------------------ pieces
    def normalized_embedding(self, embedding: Tensor) -> Tensor:
        """x0: the embedding's RMSNorm without gain."""
        return rms_norm(embedding, self.config.rms_norm_eps)

    def first_state(self, embedding: Tensor) -> Tensor:
        """What the residual stream starts from."""
        return self.normalized_embedding(embedding) if self.config.normalize_embedding else embedding

    def budget_weights(self) -> dict[int, Tensor]:
        """Budget group -> (N,) coefficients."""
        return {int(group): module() for group, module in self.budgets.items()}

    def make_cache(self, fold: str | None = None) -> ValuePathCache:
        """An empty cache for this model.

        Args:
            fold: instead of the config's: ``auto``, ``none`` (needed to start from ``inputs_embeds``), ``all`` or ``factored``.
        """
        return ValuePathCache(self.config.plan(fold), self.token_values)

    def fold(self) -> None:
        """Fold every token-determined value into its |V|-row table now, rather than at the first forward that reads the past.

        A trained table is used as it is. Tables are dropped by ``train()`` and built anew after any change of a weight.
        """
        self.token_values.fold()

    def check_cache(self, cache: Any) -> None:
        """Refuse a cache that this model cannot use as it is.

        Raises:
            ValueError: with the reason and what to pass instead.
        """
        if cache is None:
            return
        if isinstance(cache, ValuePathCache):
            if cache.values is not self.token_values:
                raise ValueError("this ValuePathCache was made for another model; use model.make_cache()")
            return
        if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
            raise ValueError(
                f"a {type(cache).__name__} cannot hold what this equation needs; leave the cache out, or pass "
                "model.make_cache() or a plain DynamicCache"
            )
        if any(layer.kv for layer in self.plan.wiring.layers):
            raise ValueError(
                "a DynamicCache holds one key and value per layer, but this equation attends over keys of several layers; "
                "leave the cache out or pass model.make_cache()"
            )
        windows = {layer.window for layer in self.plan.layers} - {None}
        if any(cache.is_sliding) and 1 in windows:
            raise ValueError("a DynamicCache cannot hold a window of 1; leave the cache out or pass model.make_cache()")
        if any(cache.is_sliding) and len(windows) > 1:
            raise ValueError(
                f"a DynamicCache has one sliding window, the layers have {sorted(w for w in windows if w)}; "
                "leave the cache out or pass model.make_cache()"
            )

    # ----------------------------------------------------------------------------------------------------- forward
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """
        Args:
            input_ids: (B, T); or ``inputs_embeds`` (B, T, d), unless a value comes from a table of token ids.
            attention_mask: None, (B, past + T) with 0 for padding, or a prepared 4-D mask.
            position_ids: (B or 1, T); by default counted on from the cache. With padding on the left, relative
                positions are all that matters.
            past_key_values, cache: the same under transformers' old and new name.
            use_cache: whether to make a cache if none is given; by default the config decides.

        Raises:
            ValueError: for inputs or a cache that do not fit; see ``check_cache``.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if input_ids is None and self.plan.needs_ids:
            raise ValueError(
                "a value of this equation is a table row per token id, so that inputs_embeds is not enough; pass input_ids"
            )
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("past_key_values and cache are two names of one argument; give one")
        cache = past_key_values if cache is None else cache
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or given.ndim < 2 or 0 in given.shape[:2]:
            found = None if given is None else tuple(given.shape)
            raise ValueError(f"the input has shape {found}: it needs at least one sequence and one token")
        embedding = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._prepare_cache(cache, use_cache, unfolded=input_ids is None)
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + embedding.shape[1], device=embedding.device)[None]
        masks = self.masks(embedding, attention_mask, cache, position_ids)
        cos, sin = self.rotary_emb(embedding, position_ids)
        if isinstance(cache, ValuePathCache):
            cache.begin(input_ids, embedding.shape[0], embedding.shape[1])

        env = self._environment(embedding, input_ids)
        x = self.first_state(embedding)
        states: list[Tensor] = []
        attentions: list[Tensor | None] = []
        for n, block in enumerate(self.layers):
            env[f"tap.x.{n}"] = x
            states.append(x)
            x, weights, *provided = block(
                x,
                cos,
                sin,
                *(env[name] for name in block.receives),
                ids=input_ids,
                attention_mask=masks[n],
                kv=cache,
                **kwargs,
            )
            attentions.append(weights)
            env.update(zip(block.provides, provided, strict=True))
        if isinstance(cache, ValuePathCache):
            cache.commit()
        x = self.norm(mix_states(self.plan.wiring.final_x, self.mix_x, x, env))
        output = BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=self._all_states(output_hidden_states, states, x),
            attentions=self._all_attentions(output_attentions, attentions),
            **{CACHE_NAME: cache},
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()

    def _prepare_cache(self, cache: Cache | None, use_cache: bool | None, unfolded: bool) -> Cache | None:
        self.check_cache(cache)
        refusal = self.plan.generation_refusal
        if cache is not None and refusal:
            raise ValueError(refusal)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None:
                raise ValueError("a cache cannot be filled under gradient checkpointing: its passes are run twice")
            return None
        wanted = self.config.use_cache if use_cache is None else use_cache
        if cache is None and wanted and not refusal:
            return self.make_cache("none" if unfolded else None)
        return cache

    def _environment(self, embedding: Tensor, ids: Tensor | None) -> dict[str, Tensor]:
        """What blocks may receive besides the tensors of earlier blocks."""
        env = {f"budget.{group}": weights for group, weights in self.budget_weights().items()}
        if self.plan.needs_embed:
            env["x0"] = self.normalized_embedding(embedding)
        if self.plan.shared_table:
            env["table"] = self.v_table(ids).unflatten(-1, (self.plan.shape.num_kv_heads, self.plan.shape.head_dim))
        return env

    def _all_states(self, wanted: bool | None, states: list[Tensor], last: Tensor) -> tuple[Tensor, ...] | None:
        wanted = self.config.output_hidden_states if wanted is None else wanted
        return (*states, last) if wanted else None

    def _all_attentions(self, wanted: bool | None, found: list[Tensor | None]) -> tuple[Tensor, ...] | None:
        wanted = self.config.output_attentions if wanted is None else wanted
        if not wanted:
            return None
        if any(weights is None for weights in found):
            raise ValueError(
                f"attn_implementation={self.config._attn_implementation!r} never forms the attention matrix; "
                "use attn_implementation='eager' for output_attentions"
            )
        return tuple(weights for weights in found if weights is not None)

    def _wants_dict(self, return_dict: bool | None) -> bool:
        return bool(self.config.return_dict if return_dict is None else return_dict)


class ValuePathForCausalLM(ValuePathPreTrainedModel, GenerationMixin):
    """A causal language model whose values come from where ``config`` says.

    ``logits = head(norm(x_N))``, optionally ``c tanh(logits / c)``.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ValuePathConfig) -> None:
        super().__init__(config)
        self.model = ValuePathModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    @property
    def token_values(self) -> TokenValues:
        """The token-determined values: see ``valuepath.infer.folding``."""
        return self.model.token_values

    def make_cache(self, fold: str | None = None) -> ValuePathCache:
        """An empty cache for this model: see ``ValuePathModel.make_cache``."""
        return self.model.make_cache(fold)

    def fold(self) -> None:
        """Build the tables of token-determined values now: see ``ValuePathModel.fold``."""
        self.model.fold()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As ``ValuePathModel.forward``, and

        Args:
            labels: (B, T) for the loss; -100 is left out.
            logits_to_keep: compute logits for the last so many positions, or for the given ones; 0 for all.

        Returns:
            loss (with labels), logits (B, T or kept, |V|), the cache, hidden states and attentions if asked for.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        if self.config.logit_softcap:
            cap = float(self.config.logit_softcap)
            logits = cap * torch.tanh(logits.to(compute_dtype(logits.dtype)) / cap)
        loss = None
        if labels is not None or shift_labels is not None:
            loss = causal_lm_loss(logits, labels, num_items_in_batch, shift_labels=shift_labels)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
        )
        return output if self.model._wants_dict(return_dict) else output.to_tuple()

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Give generation the cache of this equation; refuse others by name rather than misuse them."""
        refusal = self.model.plan.generation_refusal
        if refusal:
            raise ValueError(refusal)
        given = model_kwargs.get(CACHE_NAME)
        name = generation_config.cache_implementation
        if given is not None:
            self.model.check_cache(given)
        elif generation_config.use_cache is not False:
            if name not in (None, "dynamic"):
                raise ValueError(
                    f"cache_implementation={name!r} cannot hold what this equation needs; leave it out: the model makes "
                    "the cache that its equation asks for"
                )
            unfolded = model_kwargs.get("inputs_embeds") is not None
            made = self.make_cache("none" if unfolded else None)
            if getattr(generation_config, "is_assistant", False):
                made.activate_past_recording()
            model_kwargs[CACHE_NAME] = made
            return None
        parent: Any = super()
        return parent._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

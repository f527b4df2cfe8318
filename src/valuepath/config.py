"""``ValuePathConfig``: a transformers configuration that names a wiring and the parts of the model around it."""

# without ``from __future__ import annotations``: ``strict`` does not check the type of a field whose annotation is text
import dataclasses
import functools
import math
from typing import Any, Self, cast, get_args

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.generation import GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from valuepath.equations import nearest, parse
from valuepath.plan import Fold, Mlp, Plan, QkNorm, Shape, make_plan
from valuepath.variants import preset
from valuepath.wiring import Wiring

STYLES: dict[str, dict[str, Any]] = {
    "llama": {
        "mlp": "swiglu",
        "norm_gain": True,
        "qk_norm": "none",
        "qk_norm_scale": 1.0,
        "logit_softcap": 0.0,
        "normalize_embedding": False,
        "window_pattern": None,
    },
    "nanochat": {
        "mlp": "relu2",
        "norm_gain": False,
        "qk_norm": "plain",
        "qk_norm_scale": 1.2,
        "logit_softcap": 15.0,
        "normalize_embedding": True,
        "window_pattern": "SSSL",
    },
}
"""What a style fills in where the config leaves a field at ``None``. A variant never changes any of it."""

# keys that transformers itself puts into a config besides the fields of its classes
_FOREIGN = {
    "attn_implementation", "experts_implementation", "name_or_path", "torch_dtype", "rope_theta", "rope_scaling", "num_labels",
    "model_type", "output_attentions", "tie_last_hidden_states", "quantization_config", "auto_map", "use_return_dict",
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def _wiring(equation: str, num_layers: int) -> Wiring:
    return parse(equation, num_layers)


@functools.lru_cache(maxsize=256)
def _plan(equation: str, shape: Shape, fold: Fold) -> Plan:
    return make_plan(_wiring(equation, shape.num_layers), shape, fold)


@strict
class ValuePathConfig(PreTrainedConfig):
    r"""Configuration of ``ValuePathForCausalLM``.

    Where values come from:

    Args:
        variant: name of a preset (``valuepath.variants()``); an ordinary Transformer by default.
        variant_options: options of that preset, e.g. ``{"layers": [5, 6, 7], "first": 5.0}``.
        wiring: an equation of your own instead of a preset, e.g. ``"v[1:] = 0.5*own + 0.5*tap(0)"``.
        fold: which token-determined values the cache rebuilds from token ids: ``auto``, ``none`` (the published
            layout), ``all`` (layer 0 of any model too) or ``factored`` (as ``auto``, without a |V|-row table of values).

    The model around them; ``None`` lets ``style`` (``llama`` or ``nanochat``) decide:

    Args:
        mlp: ``swiglu`` or ``relu2``, with ``intermediate_size`` (default 7/2 or 4 times the width).
        norm_gain: whether RMSNorm has a learned gain.
        qk_norm: ``none``, ``plain`` or ``gain``: norm of queries and keys over the head width, before RoPE;
            both are then multiplied by ``qk_norm_scale``.
        logit_softcap: c in c tanh(logits / c); 0 for none.
        normalize_embedding: whether the residual stream starts from the normalised embedding.
        sliding_window, layer_types, window_pattern, layer_windows: how far each layer sees, its own position included.
            ``layer_windows`` (a number or None per layer) wins; else ``window_pattern`` such as ``SSSL`` (S:
            ``sliding_window``, L: everything; repeated, the last layer always L); else ``layer_types`` as in
            transformers; else ``sliding_window`` holds for every layer.
        attention_bias, output_bias, mlp_bias: biases of q/k/v, of the output projection, of the MLP.
        init_seed: seed of the initial weights; by default the seed given to ``torch.manual_seed``. Each parameter's start
            depends only on this seed and on its name, so that variants are paired.

    Raises:
        WiringError: for an equation that cannot be built.
        ValueError: for sizes that do not fit together and for unknown fields.
    """

    model_type = "valuepath"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 (transformers reads a plain list here)

    variant: str = "transformer"
    variant_options: dict[str, Any] | None = None
    wiring: str | None = None
    fold: str = "auto"
    style: str = "llama"

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048

    mlp: str | None = None
    norm_gain: bool | None = None
    rms_norm_eps: float = 1e-6
    qk_norm: str | None = None
    qk_norm_scale: float | int | None = None
    logit_softcap: float | int | None = None
    normalize_embedding: bool | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float | int = 0.0
    tie_word_embeddings: bool = False

    sliding_window: int | None = None
    layer_types: list[str] | None = None
    window_pattern: str | None = None
    layer_windows: list[int | None] | None = None

    initializer_range: float = 0.02
    init_seed: int | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        if self.style not in STYLES:
            raise ValueError(f"style={self.style!r}: expected {' or '.join(STYLES)}{nearest(self.style, [*STYLES])}")
        if self.qk_norm == "none" and self.qk_norm_scale is None:
            self.qk_norm_scale = 1.0  # the scale follows the norm
        for name, value in STYLES[self.style].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._one_of("mlp", ("swiglu", "relu2"))
        self._one_of("qk_norm", ("none", "plain", "gain"))
        self._one_of("fold", get_args(Fold))
        if not self.qk_norm_scale or self.qk_norm_scale < 0 or (self.qk_norm == "none" and self.qk_norm_scale != 1):
            raise ValueError(
                f"qk_norm_scale={self.qk_norm_scale} with qk_norm={self.qk_norm!r}: expected a positive factor after a norm, "
                "and 1 without one"
            )
        self._between("logit_softcap", "a positive cap, or 0 for none")
        self._between("rms_norm_eps", "a number of at least 0")
        self._between("initializer_range", "a number of at least 0")
        self._between("attention_dropout", "a probability from 0 to 1", most=1.0)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"):
            self._at_least_one(name)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                    "give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size if self.mlp == "relu2" else 7 * self.hidden_size // 2
        for name in ("num_key_value_heads", "head_dim", "intermediate_size"):
            self._at_least_one(name)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs of channels")
        self._resolve_windows()
        if (kwargs.get("partial_rotary_factor") or (self.rope_parameters or {}).get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError("partial_rotary_factor: only full RoPE (1.0) is covered")
        super().__post_init__(**kwargs)
        self._check_rope()
        self.plan()  # an equation that cannot be built is refused here, not in the first forward

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self:
        """As in transformers, but fields given while loading replace the stored ones before they are checked, not after it."""
        stored = config_dict.get("style", "llama")
        if kwargs.get("style", stored) != stored:
            raise ValueError(
                f"style={kwargs['style']!r}: the stored config has all that its style {stored!r} filled in; change those"
            )
        given = [name for name in kwargs if name in ValuePathConfig.__annotations__]
        return super().from_dict({**config_dict, **{name: kwargs.pop(name) for name in given}}, **kwargs)

    # ------------------------------------------------------------------------------------------------- what follows
    def equation(self) -> str:
        """The text of the wiring for this number of layers."""
        if self.wiring is not None:
            if self.variant != "transformer" or self.variant_options:
                raise ValueError(
                    f"variant={self.variant!r} and wiring={self.wiring!r} are both given; give the preset or the equation"
                )
            return self.wiring
        return preset(self.variant).equation(self.num_hidden_layers, **(self.variant_options or {}))

    def shape(self) -> Shape:
        """The sizes that the plan depends on."""
        assert self.num_key_value_heads and self.head_dim and self.intermediate_size and self.layer_windows
        return Shape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            windows=tuple(self.layer_windows),
            mlp=cast(Mlp, self.mlp),
            norm_gain=bool(self.norm_gain),
            qk_norm=None if self.qk_norm == "none" else cast(QkNorm, self.qk_norm),
            attention_bias=self.attention_bias,
            output_bias=self.output_bias,
            mlp_bias=self.mlp_bias,
            tied=self.tie_word_embeddings,
        )

    def plan(self, fold: str | None = None) -> Plan:
        """What exists, where each key and value lives, what it costs: see ``valuepath.plan`` and ``valuepath.counts``.

        Args:
            fold: instead of the config's own ``fold``.
        """
        return _plan(self.equation(), self.shape(), cast(Fold, fold or self.fold))

    # -------------------------------------------------------------------------------------------------- validation
    def _refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        fields = [field.name for field in dataclasses.fields(self)]
        allowed = _FOREIGN | set(GenerationConfig().to_dict())
        for key in kwargs:
            if not key.startswith("_") and key not in allowed:
                raise ValueError(f"unknown field {key!r} of ValuePathConfig{nearest(key, fields)}")

    def _one_of(self, name: str, words: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in words:
            raise ValueError(f"{name}={value!r}: expected {', '.join(words)}{nearest(str(value), words)}")

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")

    def _between(self, name: str, expected: str, most: float = math.inf) -> None:
        value = getattr(self, name)
        if value is None or not math.isfinite(value) or not 0 <= value <= most:
            raise ValueError(f"{name}={value!r}: expected {expected}")

    def validate_rope(self) -> None:
        """transformers' checks of the scaling type, which name missing factors in a KeyError."""
        try:
            super().validate_rope()
        except KeyError as missing:
            raise ValueError(str(missing.args[0])) from None

    def _check_rope(self) -> None:
        assert self.rope_parameters is not None  # filled in by transformers
        kind, theta = self.rope_parameters.get("rope_type"), self.rope_parameters.get("rope_theta")
        kinds = ["default", *(known for known in ROPE_INIT_FUNCTIONS if known != "proportional")]
        if kind not in kinds:
            raise ValueError(f"rope_parameters: rope_type={kind!r}: expected {', '.join(kinds)}{nearest(str(kind), kinds)}")
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
            raise ValueError(f"rope_parameters: rope_theta={theta!r}: expected a positive number")

    def _resolve_windows(self) -> None:
        layers = self.num_hidden_layers
        windows: list[int | None]
        if self.layer_windows is not None:
            windows = list(self.layer_windows)
            if len(windows) != layers:
                raise ValueError(f"layer_windows has {len(windows)} entries for {layers} layers; give one (or None) per layer")
        elif self.window_pattern is not None:
            if not self.window_pattern or set(self.window_pattern) - {"S", "L"}:
                raise ValueError(f"window_pattern={self.window_pattern!r}: expected letters S (short) and L (long), e.g. SSSL")
            if "S" in self.window_pattern and self.sliding_window is None:
                self.sliding_window = max(self.max_position_embeddings // 4, 1)
            letters = [self.window_pattern[n % len(self.window_pattern)] for n in range(layers - 1)] + ["L"]
            windows = [self.sliding_window if letter == "S" else None for letter in letters]
        elif self.layer_types is not None:
            if len(self.layer_types) != layers:
                raise ValueError(f"layer_types has {len(self.layer_types)} entries for {layers} layers")
            for kind in self.layer_types:
                if kind not in ("full_attention", "sliding_attention"):
                    raise ValueError(f"layer_types: {kind!r} is not covered; expected full_attention or sliding_attention")
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                raise ValueError("layer_types names sliding_attention, but sliding_window is not given")
            windows = [self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types]
        else:
            windows = [self.sliding_window] * layers
        for n, window in enumerate(windows):
            if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
                raise ValueError(f"layer {n} has window {window!r}: expected a whole number of at least 1, or None")
        sizes = {window for window in windows if window is not None}
        if self.layer_windows is not None and self.sliding_window is not None and self.sliding_window not in sizes:
            raise ValueError(
                f"sliding_window={self.sliding_window}, but layer_windows has {sorted(sizes) or 'only None'}; "
                "change layer_windows too, or give layer_windows=None"
            )
        if not sizes or self.sliding_window is None:
            self.sliding_window = max(sizes, default=None)
        self.layer_windows = windows
        self.layer_types = ["full_attention" if window is None else "sliding_attention" for window in windows]

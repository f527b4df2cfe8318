"""Which preset, with which options, reaches which published row.

``valuepath.variants`` hands these rows on as ``Preset.published``. Rows that differ only in learning rate, warm-up or training
length are reached by the same options: they differ in their recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class PublishedRow:
    """A row of a result table that a preset reproduces.

    Attributes:
        reference: ``file/table/variant``, see ``valuepath.published``.
        options: the preset's options that reach it.
        queries_per_kv_head: GQA in that row: ``num_key_value_heads = num_attention_heads // queries_per_kv_head``.
    """

    reference: str
    options: Mapping[str, Any]
    queries_per_kv_head: int = 1

    def __str__(self) -> str:
        return self.reference


NOT_COVERED: Mapping[str, str] = MappingProxyType(
    {
        "resformer/table9_svformer_lr_warmup/svformer_gpt2_lr_6e_4_warmup_120": (
            "GPT2 style (LayerNorm, learned position embeddings) is not built: with positions added to the embedding the "
            "first layer's value would depend on the position too, so it could not be kept as token ids"
        ),
    }
)
"""Rows of model variants that no preset reaches, with the reason."""


def reached(preset: str) -> tuple[PublishedRow, ...]:
    """The published rows that ``preset`` reproduces; empty if there are none."""
    return _REACHED.get(preset, ())


# ---------------------------------------------------------------------------------------------------------------- tables
_SHARE = "resformer/table1_share_every_two_layers"
_DOWNSTREAM = "resformer/table2_wikitext_ppl resformer/table2_lambada_ppl resformer/table2_avg_acc"
_TASKS = "resformer/table2_task_acc"
_METHODS = "resformer/table3_variants_82m"
_HIDDEN = "resformer/table4_hidden_vs_value"
_CUT = "resformer/table5_hidden_residual_cut"
_POSITION = "resformer/table6_residual_position"
_MAPPING = "resformer/table7_residual_mapping"
_HALF = "resformer/table8_left_2048 resformer/table8_left_64000"
_EIGHTH = "resformer/table8_right_64000"
_RATES = "resformer/table9_svformer_lr_warmup"
_GROUPS = "resformer/table10_lambda_by_layer_group"
_RESCALE = "resformer/table11_value_norm_rescale"

_SOURCES = "bov/table1_value_ablation_135m"
_LONG = "bov/table2_bpb_100b bov/table2_core_100b bov/table6_tasks_100b"
_EQUAL_FLOPS = "bov/table3_bpb_equal_flops bov/table3_core_equal_flops bov/table3_tasks_equal_flops"
_ALL_TASKS = "bov/table5_tasks_equal_flops"
_ADD_OR_REPLACE = (
    "bov/table4_selected_tasks bov/table7_bpb_add_vs_replace bov/table7_core_add_vs_replace "
    "bov/table7_tasks_add_vs_replace bov/table7_tasks_two_decimals"
)

_DEEP, _DEEPER, _SHALLOW = [4, 5, 6], [5, 6, 7], [1, 2, 3]
"""The papers' layers 5-7, 6-8 and 2-4."""


def _row(preset: str, tables: str, row: str = "", kv: int = 1, **options: Any) -> tuple[str, tuple[PublishedRow, ...]]:
    """The row called ``row`` (default: like the preset) in each of ``tables``, which are separated by blanks."""
    found = (f"{table}/{row or preset}" for table in tables.split())
    return preset, tuple(PublishedRow(reference, MappingProxyType(options), kv) for reference in found)


def _collect(*entries: tuple[str, tuple[PublishedRow, ...]]) -> Mapping[str, tuple[PublishedRow, ...]]:
    rows: dict[str, tuple[PublishedRow, ...]] = {}
    for preset, more in entries:
        rows[preset] = rows.get(preset, ()) + more
    return MappingProxyType(rows)


_REACHED = _collect(
    _row("transformer", f"{_SHARE} {_DOWNSTREAM} {_TASKS} {_METHODS} {_HIDDEN} {_POSITION} {_MAPPING} {_HALF} {_EIGHTH}"),
    _row("transformer", f"{_SOURCES} {_LONG} {_EQUAL_FLOPS} {_ALL_TASKS}"),
    _row("transformer", _CUT, "hidden_from_h0"),
    _row("transformer", _HALF, "gqa2", kv=2),
    _row("transformer", _EIGHTH, "gqa8", kv=8),
    _row("resformer_identity", f"{_DOWNSTREAM} {_METHODS} {_POSITION} {_MAPPING} {_RESCALE}"),
    _row("resformer_identity", _CUT, "hidden_from_h0_plus_v1"),
    _row("resformer_identity", _CUT, "hidden_from_h0_plus_v2", source=1),
    _row("resformer_constant", _METHODS),
    _row("resformer_learnable", f"{_DOWNSTREAM} {_TASKS} {_METHODS} {_HIDDEN}"),
    _row("resformer_learnable", _HIDDEN, "resformer_learnable_init_0_1", first=0.0, own=1.0),
    _row("resformer_plus", f"{_DOWNSTREAM} {_METHODS}"),
    _row("resformer_sparse", _METHODS, "resformer_sparse_6_8_v1_only", layers=_DEEPER, first=1.0, own=0.0),
    _row("resformer_sparse", _METHODS, "resformer_sparse_6_8_5v1", layers=_DEEPER, first=5.0),
    # the weight of V_n is not stated in this table; 1 as in Table 3
    _row("resformer_sparse", _GROUPS, "resformer_sparse_5_7_lambda1", layers=_DEEP, first=1.0, own=1.0),
    _row("resformer_sparse", _GROUPS, "resformer_sparse_5_7_lambda2", layers=_DEEP, first=2.0, own=1.0),
    _row("resformer_sparse", _GROUPS, "resformer_sparse_5_7_lambda5", layers=_DEEP, first=5.0, own=1.0),
    _row("resformer_sparse", _GROUPS, "resformer_sparse_2_4_lambda1", layers=_SHALLOW, first=1.0, own=1.0),
    _row("resformer_sparse", _GROUPS, "resformer_sparse_2_4_lambda2", layers=_SHALLOW, first=2.0, own=1.0),
    _row("resformer_sparse", _GROUPS, "resformer_sparse_2_4_lambda5", layers=_SHALLOW, first=5.0, own=1.0),
    _row("resformer_sparse", _RESCALE, "resformer_sparse_2_4", layers=_SHALLOW, first=0.5, own=0.5),
    _row("resformer_sparse", _RESCALE, "resformer_sparse_6_8", layers=_DEEPER, first=0.5, own=0.5),
    _row("resformer_dense", _METHODS),
    _row("resformer_identity_rescaled", _RESCALE),
    _row("resformer_identity_rescaled", _RESCALE, "resformer_sparse_2_4_rescaled", layers=_SHALLOW),
    _row("resformer_identity_rescaled", _RESCALE, "resformer_sparse_6_8_rescaled", layers=_DEEPER),
    _row("neutreno", f"{_DOWNSTREAM} {_METHODS}"),
    _row("denseformer", f"{_DOWNSTREAM} {_METHODS}"),
    _row("svformer", _HALF),
    _row("svformer", _EIGHTH, "svformer_gqa4", kv=4),
    _row("svformer", _RATES, "svformer_llama_lr_1e_4_warmup_120"),
    _row("svformer", _RATES, "svformer_llama_lr_3e_4_warmup_120"),
    _row("svformer", _RATES, "svformer_llama_lr_6e_4_warmup_120"),
    _row("svformer", _RATES, "svformer_llama_lr_6e_4_warmup_1200"),
    _row("svformer", f"{_SOURCES} {_EQUAL_FLOPS}", "v1_all"),
    _row("cla2", f"{_SHARE} {_HALF}"),
    _row("cla2", _SHARE, "share_v_every2", share="v"),
    _row("cla2", _SHARE, "share_k_every2", share="k"),
    _row("cla2", _EIGHTH, "cla2_gqa4", kv=4),
    _row("query_residual", _POSITION),
    _row("key_residual", _POSITION),
    _row("attention_residual", _POSITION),
    _row("v1_identity_mapping", _MAPPING),
    _row("v1_cross_layer_attention", _MAPPING),
    _row("hidden_skip", _HIDDEN, "hidden_skip_init_half"),
    _row("hidden_skip", _HIDDEN, "hidden_skip_init_0_1", first=0.0, own=1.0),
    _row("hidden_from_h1", _CUT),
    _row("hidden_from_h1", _CUT, "hidden_from_h1_plus_v2", source=1),
    _row("hidden_from_h2", _CUT),
    _row("hidden_from_h2", _CUT, "hidden_from_h2_plus_v2", source=1),
    _row("hidden_from_h2", _CUT, "hidden_from_h2_plus_v3", source=2),
    _row("hidden_from_h3", _CUT),
    _row("hidden_from_h3", _CUT, "hidden_from_h3_plus_v3", source=2),
    _row("v_last_third", _SOURCES),
    _row("v1_last_third", f"{_SOURCES} {_EQUAL_FLOPS}"),
    _row("v1_last_third", _SOURCES, "v1_last_third_fixed", learned=False),
    _row("v1_every2", _SOURCES),
    _row("x0wv_last_third", f"{_SOURCES} {_EQUAL_FLOPS}"),
    _row("x0wv_last_third", _SOURCES, "x0wv_last_third_fixed", learned=False),
    _row("x0wv_every2", _SOURCES),
    _row("v_plus_v1", _SOURCES),
    _row("v_plus_v1", _SOURCES, "v_plus_v1_fixed", learned=False),
    _row("v_plus_x0wv", _SOURCES),
    _row("v_plus_x0wv", _SOURCES, "v_plus_x0wv_fixed", learned=False),
    _row("bov", f"{_LONG} {_EQUAL_FLOPS} {_ALL_TASKS} {_ADD_OR_REPLACE}"),
    _row("v_plus_table_gated", _ADD_OR_REPLACE),
)

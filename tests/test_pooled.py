"""Token-pooled attention against attention over stored values in float64: every way, dtype, mask and grouping."""

from __future__ import annotations

import email.message
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from compiler import needs_compiler
from valuepath.infer import pooled, pooled_cpu, pooled_triton
from valuepath.infer.attend import pooled_attention

TEXT = Path(email.message.__file__).read_bytes()
"""Real text, as bytes: 256 tokens at most, few of them frequent."""
HEADS = {"MHA": (3, 6, 6, 1, 601, 10), "GQA": (3, 6, 2, 5, 97, 24), "MQA": (1, 7, 1, 1, 331, 64)}
"""B, h, g, Q, S, e"""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def torch_way(query: Tensor, keys: Tensor, slots: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
    sums = pooled.add_up(pooled.weights(query, keys, mask, query.shape[-1] ** -0.5), slots, rows.shape[1])
    return pooled.multiply(sums, rows).reshape(query.shape).to(query.dtype)


def kernel_way(kernel: Any, query: Tensor, keys: Tensor, slots: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
    sums = kernel.pool(query, keys, slots, mask, query.shape[-1] ** -0.5, rows.shape[1])
    return kernel.product(sums, rows).reshape(query.shape).to(query.dtype)


def triton_way(*inputs: Tensor | None) -> Tensor:
    """On the GPU if there is one, else in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] == "0" else "cpu"
    return kernel_way(pooled_triton, *(None if x is None else x.to(device) for x in inputs)).cpu()


def attend_way(kernel: Any, query: Tensor, keys: Tensor, slots: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
    return kernel.attend(query, keys, slots, mask, query.shape[-1] ** -0.5, rows).transpose(1, 2)


WAYS = {
    "PyTorch": torch_way,
    "C++": lambda *inputs: kernel_way(pooled_cpu, *inputs),
    "C++ at once": lambda *inputs: attend_way(pooled_cpu, *inputs),
    "Triton": triton_way,
    "public": pooled_attention,
}


MARKED = [pytest.param(way, marks=needs_compiler) if way.startswith("C++") else way for way in WAYS]


def inputs(B: int, h: int, g: int, Q: int, S: int, e: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    """query, keys, slots and rows; the slots are those of real text, each sequence from another place of it."""
    generator = torch.Generator().manual_seed(seed)
    bytes_ = torch.tensor([[*TEXT[1000 * b : 1000 * b + S]] for b in range(B)])
    distinct, slots = torch.unique(bytes_, return_inverse=True)
    query = torch.randn(B, h, Q, e, generator=generator, dtype=torch.float64) * 1.7
    keys = torch.randn(B, g, S, e, generator=generator, dtype=torch.float64)
    rows = torch.randn(g, len(distinct), e, generator=generator, dtype=torch.float64)
    return query.to(dtype), keys.to(dtype), slots.to(torch.int32), rows.to(dtype)


def stored(query: Tensor, keys: Tensor, slots: Tensor, rows: Tensor, mask: Tensor | None) -> Tensor:
    """A loop over sequences, query heads and queries, in float64."""
    B, h, Q, e = query.shape
    g, S = keys.shape[1:3]
    out = torch.zeros(B, h, Q, rows.shape[2], dtype=torch.float64)
    for b in range(B):
        for j in range(h):
            values = rows[j * g // h].double()[slots[b].long()]
            for i in range(Q):
                scores = keys[b, j * g // h].double() @ query[b, j, i].double() / e**0.5
                if mask is None:
                    scores[S - Q + i + 1 :] = -torch.inf
                elif mask.dtype == torch.bool:
                    scores[~mask[b if len(mask) > 1 else 0, 0, i]] = -torch.inf
                else:
                    scores += mask[b if len(mask) > 1 else 0, 0, i].double()
                out[b, j, i] = scores.softmax(0) @ values
    return out


def masks(kind: str, B: int, Q: int, S: int) -> Tensor | None:
    position = torch.arange(S)
    causal = position <= torch.arange(S - Q, S)[:, None]
    if kind == "causal":
        return None
    if kind == "window":
        return (causal & (position > torch.arange(S - Q, S)[:, None] - 29))[None, None]
    padded = causal & (position >= torch.tensor([0, 17, 41])[:B, None, None])
    return padded[:, None]


@pytest.mark.parametrize("mask", ["causal", "window", "left padding"])
@pytest.mark.parametrize("way", MARKED)
@pytest.mark.parametrize("heads", HEADS)
def test_pooled_equals_stored_values(heads: str, way: str, mask: str) -> None:
    B, h, g, Q, S, e = HEADS[heads]
    for dtype in (torch.float64, torch.float32):
        if dtype == torch.float64 and way.startswith(("C++", "Triton")):
            continue  # kernels sum in float32; double precision runs through PyTorch
        given = inputs(B, h, g, Q, S, e, dtype)
        seen = masks(mask, B, Q, S)
        with torch.no_grad():
            out = WAYS[way](*given, seen)
        assert out.dtype == dtype
        assert (out - stored(*given, seen)).abs().max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("e", [64, 128])
@pytest.mark.parametrize("way", MARKED)
def test_bfloat16_is_no_worse_than_fused_attention_over_stored_values(way: str, e: int) -> None:
    """Errors against float64 of the same bfloat16 inputs, relative to the output's norm; the kernels must not exceed SDPA's."""
    total: dict[str, float] = {"ours": 0.0, "SDPA": 0.0}
    for seed in range(4):
        query, keys, slots, rows = inputs(1, 4, 4, 1, 1777, e, torch.bfloat16, seed)
        values = rows[:, slots.long()].transpose(0, 1)
        exact = F.scaled_dot_product_attention(query.double(), keys.double(), values.double())
        with torch.no_grad():
            total["ours"] += ((WAYS[way](query, keys, slots, rows, None).double() - exact).norm() / exact.norm()).item()
        fused = F.scaled_dot_product_attention(query, keys, values)
        total["SDPA"] += ((fused.double() - exact).norm() / exact.norm()).item()
    assert 0 < total["ours"] <= total["SDPA"]


def test_an_added_mask_and_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, slots, rows = inputs(2, 6, 3, 23, 61, 10, torch.float64)
    added = torch.randn(2, 1, 23, 61, dtype=torch.float64)
    for block in (1, 2 * 6 * 61 * 8 * 5, 2**26):  # one query, five, all at a time
        monkeypatch.setattr(pooled, "BLOCK_BYTES", block)
        assert len(pooled.query_blocks(2, 6, 23, 61, 8)) == {1: 23, 2 * 6 * 61 * 8 * 5: 5, 2**26: 1}[block]
        for mask in (added, None, masks("window", 2, 23, 61)):
            out = pooled_attention(query, keys, slots, rows, mask)
            assert (out - stored(query, keys, slots, rows, mask)).abs().max() <= 1e-10


@pytest.mark.parametrize("way", [way for way in MARKED if way not in ("PyTorch", "public")])
def test_a_query_that_sees_nothing_weighs_nothing(way: str) -> None:
    query, keys, slots, rows = inputs(2, 6, 2, 3, 53, 10, torch.float32)
    mask = torch.ones(2, 1, 3, 53, dtype=torch.bool)
    mask[1, 0, 1] = False
    with torch.no_grad():
        out = WAYS[way](query, keys, slots, rows, mask)
    assert (out[1, :, 1] == 0).all()
    out[1, :, 1] = stored(query, keys, slots, rows, masks("causal", 2, 3, 53))[1, :, 1].float()
    mask[1, 0, 1] = masks("left padding", 2, 3, 53)[1, 0, 1]  # type: ignore[index]
    rest = [0, 2]
    assert (out[:, :, rest] - stored(query, keys, slots, rows, mask)[:, :, rest]).abs().max() <= 1e-5


def test_rows_may_be_wider_or_narrower_than_keys() -> None:
    for width in (5, 16, 31, 64):
        for dtype in (torch.float32, torch.float64):
            query, keys, slots, rows = inputs(2, 6, 2, 3, 53, 16, dtype)
            rows = torch.randn(2, rows.shape[1], width, dtype=dtype)
            with torch.no_grad():
                out = pooled_attention(query, keys, slots, rows)
            values = rows[:, slots.long()].transpose(0, 1).repeat_interleave(3, 1).double()
            seen = torch.ones(3, 53, dtype=torch.bool).tril(50)
            scores = query.double() @ keys.double().repeat_interleave(3, 1).mT / 4
            exact = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values
            assert out.shape == (2, 6, 3, width) and (out - exact).abs().max() <= TOLERANCE[dtype]


@needs_compiler
def test_keys_in_a_longer_buffer_and_many_threads() -> None:
    """Keys and slots are views of buffers that have room to grow; with more threads than heads the keys are split."""
    query, keys, slots, rows = inputs(2, 3, 3, 1, 4999, 10, torch.float32)
    buffer, ids = torch.full((2, 3, 6000, 10), 9.0), torch.zeros(2, 6000, dtype=torch.int32)
    buffer[:, :, 500:5499], ids[:, 500:5499] = keys, slots
    longer = torch.full((3, rows.shape[1] + 5, 10), 9.0)
    longer[:, : rows.shape[1]] = rows
    exact = stored(query, keys, slots, rows, None)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            with torch.no_grad():
                view = (query, buffer[:, :, 500:5499], ids[:, 500:5499], longer[:, : rows.shape[1]])
                assert (kernel_way(pooled_cpu, *view, None) - exact).abs().max() <= 1e-5
                assert (attend_way(pooled_cpu, *view, None) - exact).abs().max() <= 1e-5
                assert (triton_way(*view, None) - exact).abs().max() <= 1e-5
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_large_scores_and_nan() -> None:
    """Softmax of scores in the hundreds neither overflows nor loses its sum; NaN is not hidden."""
    query, keys, slots, rows = inputs(1, 2, 2, 1, 300, 16, torch.float32)
    with torch.no_grad():
        out = kernel_way(pooled_cpu, query * 300, keys, slots, rows, None)
        assert (out - stored(query * 300, keys, slots, rows, None)).abs().max() <= 1e-5 * 300
        sums = pooled_cpu.pool(query * 300, keys, slots, None, 0.25, rows.shape[1])
        assert (sums.sum(-1) - 1).abs().max() <= 1e-5
        for broken in (query.index_fill(1, torch.tensor(0), torch.nan), query):
            for way in WAYS.values():
                out = way(broken, keys, slots, rows, None)
                assert out[0, 0].isnan().all() and not out[0, 1].isnan().any()
            keys[0, 0, 7] = torch.nan  # then one key instead of the whole query


def test_without_a_compiler_pytorch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any) -> None:
    query, keys, slots, rows = inputs(1, 2, 2, 1, 300, 16, torch.float32)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("VALUEPATH_CPU_KERNEL", raising=False)
    pooled_cpu._library.cache_clear()
    try:
        with torch.no_grad(), caplog.at_level("WARNING"):
            assert not pooled_cpu.available()
            assert "no C++ compiler" in caplog.text
            out = pooled_attention(query, keys, slots, rows)
        assert (out - stored(query, keys, slots, rows, None)).abs().max() <= 1e-5
        monkeypatch.setenv("VALUEPATH_CPU_KERNEL", "0")
        pooled_cpu._library.cache_clear()
        assert not pooled_cpu.available()
    finally:
        pooled_cpu._library.cache_clear()


@needs_compiler
def test_a_compiler_that_fails_and_a_folder_that_cannot_be_written_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho no such option >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(RuntimeError, match="no such option"):
        pooled_cpu._build()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="cannot be written"):
        pooled_cpu._build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = pooled_cpu._build()
    assert made.parent == tmp_path / "cache" / "valuepath" and pooled_cpu._build() == made
    assert [*made.parent.iterdir()] == [made]


def test_shapes_and_slots_that_do_not_fit_are_refused() -> None:
    query, keys, slots, rows = inputs(2, 6, 3, 1, 61, 10, torch.float32)
    with torch.no_grad():
        for wrong in (
            (query[0], keys, slots, rows),
            (query[:1], keys, slots, rows),
            (query, keys, slots[:, :-1], rows),
            (query, keys, slots, rows[:2]),
            (query[:, :5], keys, slots, rows),
            (query[..., :8], keys, slots, rows),
        ):
            with pytest.raises(ValueError, match=r"expected \(B, h, Q, e\)"):
                pooled_attention(*wrong)
        for slot in (-1, rows.shape[1]):
            bad = slots.clone()
            bad[1, 5] = slot
            with pytest.raises(ValueError, match=f"expected 0 to {rows.shape[1] - 1}"):
                pooled_attention(query, keys, bad, rows)

"""The three GPU kernels that ``valuepath.infer.pooled_triton`` launches. Importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def scores(  # type: ignore[no-untyped-def]
    query, keys, mask, scores, tops, totals,
    g, R, Q, S, e, span, splits,
    key_batch, key_head, key_position, key_channel, mask_batch, mask_query, mask_key,
    HAS_MASK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One split of one query row: scores (rows, S), and per split the largest score and the sum of e^(score - largest)."""
    row = tl.program_id(0)  # (b g + head) R + r
    split = tl.program_id(1)
    head = row // R
    at = row % R % Q
    batch = (head // g).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    q = tl.load(query + row.to(tl.int64) * e + channel, mask=channel < e, other=0.0)
    base = keys + batch * key_batch + (head % g).to(tl.int64) * key_head
    top = -float("inf")
    total = 0.0
    for start in range(split * span, tl.minimum((split + 1) * span, S), BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = (t < S) & (t < (split + 1) * span)
        k = tl.load(
            base + t.to(tl.int64)[:, None] * key_position + channel[None, :] * key_channel,
            mask=inside[:, None] & (channel < e)[None, :],
            other=0.0,
        ).to(tl.float32)
        s = tl.sum(k * q[None, :], 1)
        if HAS_MASK:
            seen = tl.load(mask + batch * mask_batch + at * mask_query + t.to(tl.int64) * mask_key, mask=inside, other=0)
            s = tl.where(inside & (seen != 0), s, -float("inf"))
        else:
            s = tl.where(inside & (t <= S - Q + at), s, -float("inf"))
        tl.store(scores + row.to(tl.int64) * S + t, s, mask=inside)
        higher = tl.maximum(top, tl.max(s, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(s - safe), 0)
        top = higher
    tl.store(tops + row * splits + split, top)
    tl.store(totals + row * splits + split, total)


@triton.jit
def add_up(  # type: ignore[no-untyped-def]
    scores, slots, logs, sums, rows_per_batch, S, U, slot_batch, BLOCK: tl.constexpr
):
    """e^(score - log of the total) added to its slot."""
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = t < S
    s = tl.load(scores + row.to(tl.int64) * S + t, mask=inside, other=-float("inf"))
    weight = tl.exp(s - tl.load(logs + row))
    slot = tl.load(slots + (row // rows_per_batch).to(tl.int64) * slot_batch + t, mask=inside, other=0)
    tl.atomic_add(sums + row.to(tl.int64) * U + slot, weight, mask=inside & (weight != 0))  # what is not a number is passed on


@triton.jit
def product(  # type: ignore[no-untyped-def]
    sums, rows, out, g, R, U, e, span, splits, row_head, row_slot, row_channel,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One split of one query row: the sum over its slots of weight times row."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    head = row // R % g
    channel = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], dtype=tl.float32)
    for start in range(split * span, tl.minimum((split + 1) * span, U), BLOCK):
        u = start + tl.arange(0, BLOCK)
        inside = (u < U) & (u < (split + 1) * span)
        weight = tl.load(sums + row.to(tl.int64) * U + u, mask=inside, other=0.0)
        x = tl.load(
            rows + head.to(tl.int64) * row_head + u.to(tl.int64)[:, None] * row_slot + channel[None, :] * row_channel,
            # rows of tokens that this sequence does not contain need not be read
            mask=(inside & (weight != 0))[:, None] & (channel < e)[None, :],
            other=0.0,
        ).to(tl.float32)
        total += tl.sum(weight[:, None] * x, 0)
    tl.store(out + (row.to(tl.int64) * splits + split) * e + channel, total, mask=channel < e)

"""The cache: cached equals uncached, its bytes are the plan's, and every verb of transformers' protocol works."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch

import valuepath as vp
from models import LAYERS, in_pieces, left_padding, small_config, small_model, tokens
from valuepath.compat import CACHE_NAME
from valuepath.counts import cache_counts
from valuepath.infer.buffer import BLOCK, Buffer
from valuepath.variants import variants

T = 17
GRID_T = 10
PIECES = {"whole": [GRID_T], "chunked": [3, 5, 2], "one by one": [1] * GRID_T}
HEADS = {"MHA": 6, "GQA": 2, "MQA": 1}
WINDOWS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"sliding_window": 5},
    "SSSL": {"window_pattern": "SSSL", "sliding_window": 4},
}


def cacheable(name: str, heads: str = "MHA", windows: str = "full", **fields: Any) -> vp.ValuePathConfig:
    """The config, or a skip where the equation itself is refused for these windows, with the reason checked."""
    if name == "attention_residual" and windows == "SSSL":
        with pytest.raises(vp.WiringError, match="unequal windows"):
            small_config(variant=name, **WINDOWS[windows])
        pytest.skip("attention matrices of unequal windows cannot be mixed: refused by the plan")
    return small_config(variant=name, num_key_value_heads=HEADS[heads], **WINDOWS[windows], **fields)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", variants())
def test_cached_equals_uncached(name: str, heads: str, windows: str) -> None:
    config = cacheable(name, heads, windows, num_hidden_layers=4)
    ids, (mask, positions) = tokens(3, GRID_T), left_padding(3, GRID_T)
    real = mask.bool()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        model = small_model(dtype, **config_fields(config))
        with torch.no_grad():
            # random weights make logits of several hundred: bring them to the size of a trained model's
            model.lm_head.weight.div_(model(ids, use_cache=False).logits.abs().max() / 10)
            full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[real]
            for sizes in PIECES.values():
                pieces, _ = in_pieces(model, ids, sizes, mask, positions)
                assert (pieces[real] - full).abs().max() <= tolerance


def config_fields(config: vp.ValuePathConfig) -> dict[str, Any]:
    """The fields that this file sets, to build the same model in another dtype."""
    sizes = ("num_hidden_layers", "num_key_value_heads", "layer_windows", "sliding_window")
    return {name: getattr(config, name) for name in ("variant", "variant_options", "fold", *sizes)}


@pytest.mark.parametrize("fold", ["auto", "none", "all"])
@pytest.mark.parametrize(
    "name", ["transformer", "svformer", "bov", "x0wv_last_third", "v1_last_third", "cla2", "resformer_sparse"]
)
def test_folding_changes_where_values_live_but_not_the_logits(name: str, fold: str) -> None:
    model = small_model(variant=name, fold=fold, num_key_value_heads=2, **WINDOWS["SSSL"])
    ids, (mask, positions) = tokens(2, T), left_padding(2, T)
    with torch.no_grad():
        full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        pieces, _ = in_pieces(model, ids, [4, 6, 1, 3, 3], mask, positions)
    assert (pieces - full)[mask.bool()].abs().max() < 1e-10


# -------------------------------------------------------------------------------------------------------------- bytes
@pytest.mark.parametrize("fold", ["auto", "none", "all"])
@pytest.mark.parametrize("name", variants())
def test_bytes_are_the_plans_figure(name: str, fold: str) -> None:
    config = cacheable(name, "GQA", "full" if name == "attention_residual" else "SSSL", fold=fold)
    if config.plan().generation_refusal:
        pytest.skip("no cache gives this equation's result: generation is refused")
    model = small_model(torch.float32, **config_fields(config))
    batch = 2
    with torch.no_grad():
        for length in (1, 3, 4, 5, BLOCK, BLOCK + 1, 3 * BLOCK):
            ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
            _, cache = in_pieces(model, ids, [length], mask, torch.arange(length)[None])
            counted = cache_counts(config.plan(), context=length, batch=batch, bytes_per_element=4)
            measured = cache.nbytes()
            assert measured.logical == counted.growing_bytes
            buffers = len(cache._buffers())
            block = BLOCK * batch * 2 * 10 * 4
            assert measured.allocated <= 1.25 * measured.logical + buffers * block
            by_layer = [sum(pair) for pair in cache.nbytes_by_layer()]
            assert sum(by_layer) + counted.id_bytes == measured.logical


def test_folded_full_sharing_keeps_keys_and_ids_only() -> None:
    model = small_model(torch.float32, variant="svformer")
    with torch.no_grad():
        _, cache = in_pieces(model, tokens(2, T), [5, 12], torch.ones(2, T, dtype=torch.long), torch.arange(T)[None])
    width = 6 * 10
    assert cache.nbytes().logical == 2 * T * (LAYERS * width * 4 + 4)
    assert cache.nbytes().shared == 53 * width * 4
    assert not cache.stored_values


def test_sliding_windows_bound_the_cache() -> None:
    model = small_model(torch.float32, sliding_window=7)
    with torch.no_grad():
        _, cache = in_pieces(model, tokens(1, 900), [300] + [1] * 100 + [500], torch.ones(1, 900), torch.arange(900)[None])
    sizes = cache.nbytes()
    assert sizes.logical == 2 * LAYERS * 7 * 60 * 4
    assert sizes.allocated <= 2 * LAYERS * (7 + BLOCK) * 60 * 4


def test_growing_does_not_copy_at_every_step() -> None:
    for window in (None, 100, 300):
        buffer, storages = Buffer(window), []
        with torch.no_grad():
            for step in range(4000):
                buffer.write(torch.full((1, 1, 1, 1), float(step)))
                low = 0 if window is None else max(0, step - window + 1)
                assert torch.equal(buffer.read(window).flatten(), torch.arange(low, step + 1.0))
                buffer.commit()
                assert buffer.data is not None
                if not storages or storages[-1] is not buffer.data:
                    storages.append(buffer.data)
        allowed = 4000 // BLOCK + 2 if window else 30  # a full window shifts once a block; a growing one ever more rarely
        assert len(storages) <= allowed
        assert buffer.nbytes()[0] == 4 * (4000 if window is None else window)


# -------------------------------------------------------------------------------------------------------------- verbs
KINDS = ["transformer", "svformer", "bov", "cla2", "x0wv_last_third", "v1_cross_layer_attention"]


def prefilled(name: str, **fields: Any) -> tuple[Any, torch.Tensor, Any]:
    model = small_model(variant=name, num_key_value_heads=2, **fields)
    ids = tokens(3, T)
    _, cache = in_pieces(model, ids[:, :10], [6, 4], torch.ones(3, 10, dtype=torch.long), torch.arange(10)[None])
    return model, ids, cache


def continues_like(model: Any, cache: Any, past: torch.Tensor, new: torch.Tensor) -> None:
    """Running ``new`` on the cache gives the logits of running ``past`` and ``new`` from scratch."""
    whole = torch.cat([past, new], 1)
    full = model(whole, use_cache=False).logits[:, past.shape[1] :]
    ones = torch.ones(whole.shape, dtype=torch.long)
    positions = torch.arange(past.shape[1], whole.shape[1])[None]
    pieces, _ = in_pieces(model, new, [1] * new.shape[1], ones, positions, cache, start=past.shape[1])
    assert (pieces - full).abs().max() < 1e-10


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_reorder_repeat_select_crop_and_reset(name: str, windows: str) -> None:
    model, ids, cache = prefilled(name, **WINDOWS[windows])
    past, new = ids[:, :10], ids[:, 10:]

    moved = copy.deepcopy(cache)
    moved.reorder_cache(torch.tensor([2, 2, 0]))
    continues_like(model, moved, past[[2, 2, 0]], new)

    moved = copy.deepcopy(cache)
    moved.batch_repeat_interleave(2)
    assert moved.batch_size == 6
    continues_like(model, moved, past.repeat_interleave(2, 0), new.repeat_interleave(2, 0))

    moved = copy.deepcopy(cache)
    moved.batch_select_indices(torch.tensor([2, 0]))
    continues_like(model, moved, past[[2, 0]], new[[2, 0]])
    moved = copy.deepcopy(cache)
    moved.batch_select_indices(torch.tensor([True, False, True]))
    continues_like(model, moved, past[[0, 2]], new[[0, 2]])

    moved = copy.deepcopy(cache)
    moved.activate_past_recording()
    ones = torch.ones(3, T, dtype=torch.long)
    in_pieces(model, new, [4, 3], ones, torch.arange(10, T)[None], moved, start=10)
    moved.crop(-5)
    assert moved.get_seq_length() == 12
    continues_like(model, moved, ids[:, :12], new[:, 2:])
    assert moved.is_recording_past() and all(layer.record_past for layer in moved.layers)

    moved.reset()
    assert moved.get_seq_length() == 0 and moved.nbytes()[:2] == (0, 0)
    in_pieces(model, ids[:2, :7], [7], ones[:2], torch.arange(7)[None], moved)
    continues_like(model, moved, ids[:2, :7], ids[:2, 7:])

    continues_like(model, cache, past, new)  # the copies did not touch the original


@torch.no_grad()
def test_crop_beyond_what_a_window_kept_is_refused_and_changes_nothing() -> None:
    model, ids, cache = prefilled("svformer", sliding_window=3)
    with pytest.raises(RuntimeError, match=r"activate_past_recording"):
        cache.crop(-4)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(4)
    with pytest.raises(ValueError, match="cannot remove 11"):
        cache.crop(-11)
    assert cache.get_seq_length() == 10
    continues_like(model, cache, ids[:, :10], ids[:, 10:])


@torch.no_grad()
def test_a_pass_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for windows in WINDOWS.values():
        model, ids, cache = prefilled("bov", **windows)
        last = model.model.layers[-1]
        for size in (1, 5):
            with monkeypatch.context() as patch:

                def broken(*args: Any, **kwargs: Any) -> Any:
                    raise MemoryError("in the middle of a pass")

                patch.setattr(last.self_attn, "forward", broken)
                with pytest.raises(MemoryError):
                    model(ids[:, 10 : 10 + size], use_cache=True, **{CACHE_NAME: cache})
            assert cache.get_seq_length() == 10
        continues_like(model, cache, ids[:, :10], ids[:, 10:])


@torch.no_grad()
def test_a_copied_prompt_cache_shares_the_model_and_a_copied_model_does_not() -> None:
    model, ids, cache = prefilled("svformer")
    assert copy.deepcopy(cache).values is cache.values
    other = copy.deepcopy(model)
    assert other.token_values is not model.token_values and other.token_values.model is other.model
    other.model.embed_tokens.weight.mul_(1.5)
    continues_like(
        other, in_pieces(other, ids[:, :10], [6, 4], torch.ones(3, 10), torch.arange(10)[None])[1], ids[:, :10], ids[:, 10:]
    )
    with pytest.raises(ValueError, match="another model"):
        other(ids[:, 10:], use_cache=True, **{CACHE_NAME: cache})


@pytest.mark.parametrize("name", KINDS)
def test_gradients_flow_through_the_cache(name: str) -> None:
    """The gradient of a loss over pieces equals that over the whole, for every parameter."""
    model = small_model(variant=name, num_key_value_heads=2, **WINDOWS["SSSL"])
    ids = tokens(2, T)
    functional = torch.randn(2, T, 53, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def gradients(logits: torch.Tensor) -> dict[str, torch.Tensor]:
        model.zero_grad()
        (logits * functional).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    whole = gradients(model(ids, use_cache=False).logits)
    pieces = gradients(in_pieces(model, ids, [4, 1, 7, 5], torch.ones(2, T, dtype=torch.long), torch.arange(T)[None])[0])
    assert whole.keys() == pieces.keys() == dict(model.named_parameters()).keys()
    for name_, gradient in whole.items():
        assert (gradient - pieces[name_]).abs().max() <= 1e-9 * max(1.0, gradient.abs().max().item()), name_


def test_a_cache_may_cross_grad_and_inference_modes() -> None:
    for name in ("transformer", "svformer"):
        model, ids, _ = prefilled(name)
        ones = torch.ones(3, T, dtype=torch.long)
        with torch.inference_mode():
            _, cache = in_pieces(model, ids[:, :10], [10], ones, torch.arange(10)[None])
        with torch.no_grad():
            continues_like(model, cache, ids[:, :10], ids[:, 10:])
        logits, cache = in_pieces(model, ids[:, :10], [6, 4], ones, torch.arange(10)[None])
        with torch.no_grad():
            cache.crop(-1)
            continues_like(model, cache, ids[:, :9], ids[:, 9:])
        logits.sum().backward()  # later writes did not touch the graph of the earlier passes


# ------------------------------------------------------------------------------------------------------------- folding
def changes(model: Any) -> dict[str, Any]:
    """Ways to change a weight behind a folded table."""

    def in_place() -> None:
        model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.0)  # no change yet: .data leaves no trace by itself
        with torch.no_grad():
            model.model.layers[0].self_attn.v_proj.weight.mul_(1.7)

    def optimiser() -> None:
        model.train()
        model(tokens(1, 5), labels=tokens(1, 5)).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        model.eval()

    def load() -> None:
        state = {n: p.clone() * 1.3 for n, p in model.state_dict().items()}
        model.load_state_dict(state)

    def replace() -> None:
        model.set_input_embeddings(torch.nn.Embedding(53, 42, dtype=torch.float64))

    return {"an in-place change": in_place, "an optimiser step": optimiser, "load_state_dict": load, "new embeddings": replace}


@pytest.mark.parametrize("change", ["an in-place change", "an optimiser step", "load_state_dict", "new embeddings"])
def test_a_folded_table_follows_its_weights(change: str) -> None:
    model = small_model(variant="svformer")
    ids, ones, positions = tokens(2, T), torch.ones(2, T, dtype=torch.long), torch.arange(T)[None]
    with torch.no_grad():
        in_pieces(model, ids, [5, 12], ones, positions)
        before = model.token_values.table(model.model.plan.tables[0])
        assert model.token_values.table(model.model.plan.tables[0]) is before  # folded once
    changes(model)[change]()
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        pieces, _ = in_pieces(model, ids, [5, 12], ones, positions)
    assert (pieces - full).abs().max() < 1e-10
    assert not torch.equal(model.token_values.table(model.model.plan.tables[0]), before)


def test_a_trained_table_is_read_in_place() -> None:
    model = small_model(variant="bov")
    for core in model.model.plan.tables:
        assert model.token_values.table(core) is model.model.layers[core.layer].self_attn.v_table.weight


# ------------------------------------------------------------------------------------------------------------ refusals
@torch.no_grad()
def test_wrong_inputs_for_a_cache_are_refused() -> None:
    model, ids, cache = prefilled("svformer")
    with pytest.raises(ValueError, match="holds 3 sequences, the input 2"):
        model(ids[:2, 10:], **{CACHE_NAME: cache})
    with pytest.raises(ValueError, match="make_cache"):
        model(inputs_embeds=model.get_input_embeddings()(ids[:, 10:]), **{CACHE_NAME: cache})
    with pytest.raises(RuntimeError, match="forward pass of its own model"):
        cache.update(torch.zeros(3, 2, 1, 10), None, 0)
    with pytest.raises(RuntimeError, match="whole cache"):
        cache.layers[0].crop(-1)
    continues_like(model, cache, ids[:, :10], ids[:, 10:])


@torch.no_grad()
def test_embeddings_run_unfolded_and_may_be_continued_with_ids() -> None:
    for name in ("transformer", "svformer", "x0wv_last_third"):
        model, ids, _ = prefilled(name)
        out = model(inputs_embeds=model.get_input_embeddings()(ids[:, :10]), use_cache=True)
        continues_like(model, out[CACHE_NAME], ids[:, :10], ids[:, 10:])


@torch.no_grad()
def test_an_equation_that_reads_the_future_has_no_cache() -> None:
    model = small_model(variant="resformer_identity_rescaled", variant_options={"axis": "tensor"})
    assert model(tokens(1, 5), use_cache=True).get(CACHE_NAME) is None
    with pytest.raises(ValueError, match="axis=token"):
        model(tokens(1, 5), **{CACHE_NAME: model.make_cache()})
    with pytest.raises(ValueError, match="axis=token"):
        model.generate(tokens(1, 5), max_new_tokens=2)


def test_a_value_that_many_layers_share_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer reads the two before it: naively the number of evaluations would double with every two layers."""
    count = 31
    model = small_model(num_hidden_layers=count, wiring="v[:2] = embed; v[2:] = shared(n-1) + learn(0.5)*shared(n-2)")
    assert len(model.model.plan.tables) == count
    calls = []
    attention = type(model.model.layers[0].self_attn)
    original = attention.value
    monkeypatch.setattr(attention, "value", lambda self, *args: calls.append(self.layer_idx) or original(self, *args))
    ids = torch.arange(5)
    with torch.no_grad():
        values = [model.token_values.compute(layer.v_core, ids) for layer in model.model.plan.layers[:3]]
        model.token_values.compute(model.model.plan.layers[-1].v_core, ids)
    assert sorted(calls[1:]) == list(range(2, count))
    coefficient = model.model.layers[2].self_attn.mix_v.coefficients["shared_0"]
    torch.testing.assert_close(values[2], values[1] + coefficient * values[0])


@torch.no_grad()
def test_allocation_stays_near_the_logical_bytes_after_steps_and_crops() -> None:
    for windows in WINDOWS.values():
        model = small_model(torch.float32, variant="bov", num_key_value_heads=2, **windows)
        cache = model.make_cache()
        block = BLOCK * 2 * 10 * 4

        def within(cache: Any = cache, block: int = block) -> None:
            sizes = cache.nbytes()
            assert sizes.allocated <= 1.25 * sizes.logical + len(cache._buffers()) * block

        def run(count: int, model: Any = model, cache: Any = cache) -> None:
            model(tokens(1, count), use_cache=True, **{CACHE_NAME: cache})

        run(900)
        within()
        for _ in range(300):
            run(1)
            within()
        if not windows:
            cache.crop(-1190)
            within()
            run(1)
            within()


def test_gradients_flow_through_the_cache_of_frozen_weights() -> None:
    """What a query reads must outlive later passes even if no key or value is trained."""
    for name in KINDS:
        model = small_model(variant=name)
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in parameter_name)
        ids, gradients = tokens(1, 9), []
        for sizes in ([9], [3, 2, 2, 1, 1]):
            model.zero_grad()
            logits, _ = in_pieces(model, ids, sizes, torch.ones(1, 9, dtype=torch.long), torch.arange(9)[None])
            logits.square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert len(gradients[0]) == LAYERS
        for whole, pieces in zip(*gradients, strict=True):
            assert (whole - pieces).abs().max() <= 1e-9 * max(1.0, whole.abs().max().item())


class Adapter(torch.nn.Module):
    """A low-rank addition around a linear layer, as fine-tuning libraries put one there."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(5)
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype, generator=generator))
        self.up = torch.nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype, generator=generator))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class RowAdapter(Adapter):
    """The same around an embedding."""

    def __init__(self, base: torch.nn.Embedding) -> None:
        super().__init__(torch.nn.Linear(base.num_embeddings, base.embedding_dim, dtype=base.weight.dtype))
        self.base = base  # type: ignore[assignment]

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.down.T[x] @ self.up.T


@pytest.mark.parametrize("name", ["svformer", "x0wv_last_third", "v_plus_x0wv", "bov", "shared_table", "cla2"])
def test_adapters_take_part_with_a_cache_and_without(name: str) -> None:
    model = small_model(variant=name, attention_bias=True)
    ids = tokens(2, T)
    ones, positions = torch.ones(2, T, dtype=torch.long), torch.arange(T)[None]
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        in_pieces(model, ids, [5, 12], ones, positions)  # folds what will be wrong below
    adapters = []
    for holder in model.modules():
        for part, kind in (("v_proj", Adapter), ("v_table", RowAdapter)):
            if isinstance(getattr(holder, part, None), torch.nn.Module):
                setattr(holder, part, kind(getattr(holder, part)))
                adapters.append(getattr(holder, part))
    model.model.embed_tokens = RowAdapter(model.model.embed_tokens)
    adapters.append(model.model.embed_tokens)
    model(ids, use_cache=False).logits.square().sum().backward()
    assert all(a.up.grad is not None and a.up.grad.abs().max() > 0 for a in adapters)
    for _ in range(2):
        with torch.no_grad():
            full = model(ids, use_cache=False).logits
            pieces, _ = in_pieces(model, ids, [5, 12], ones, positions)
            assert (full - plain).abs().max() > 1e-3
            assert (pieces - full).abs().max() < 1e-9
            for adapter in adapters:
                adapter.up.add_(0.1)


def test_a_table_folded_under_autocast_serves_float32_later() -> None:
    for name in ("svformer", "x0wv_last_third", "cla2", "bov"):
        model = small_model(torch.float32, variant=name)
        ids = tokens(1, 9)
        fresh = copy.deepcopy(model).generate(ids, max_new_tokens=5, do_sample=False)
        with torch.autocast("cpu", torch.bfloat16):
            model.generate(ids, max_new_tokens=5, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), fresh)


def test_empty_inputs_are_refused() -> None:
    model = small_model()
    for shape in ((2, 0), (0, 5)):
        with pytest.raises(ValueError, match="at least one sequence and one token"):
            model(torch.zeros(shape, dtype=torch.long))


@torch.no_grad()
def test_a_discarded_cache_frees_its_memory_at_once() -> None:
    _, _, cache = prefilled("svformer")
    twin = copy.deepcopy(cache)
    assert twin.layers[0]._cache is twin
    gone = [weakref.ref(cache), weakref.ref(twin)]
    gc.disable()
    try:
        del cache, twin
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()

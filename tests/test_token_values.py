"""Values by token at inference: every way and every place of a table gives the logits of a model without a cache."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import valuepath as vp
from compiler import needs_compiler
from models import in_pieces, left_padding, randomise, small_config, small_model, tokens
from valuepath.compat import CACHE_NAME
from valuepath.counts import cache_counts
from valuepath.infer import attend
from valuepath.infer import cache as cache_module
from valuepath.infer import rows as rows_module
from valuepath.infer.choose import Chooser, bucket, chooser
from valuepath.infer.tables import HostTable, mapped_tensor

T = 23
PRESETS = [name for name in vp.variants() if small_config(variant=name).plan().folds]
SUMS = {
    "two sources": "v[1:] = learn(0.5, per=head)*tap(0) + 0.3*embed",
    "with tables": "v[1:] = tap(0) + learn(0.5, per=channel)*table + 2*table(shared)",
    "own and embedding of layer 0": "v[0] = 0.7*own + 0.5*embed; v[2:] = shared(0)",
    "a share of a sum": "v[1] = 0.5*embed + table; v[3:] = learn(0.9)*shared(1) + 0.2*tap(0)",
    "a rescaled sum": "v[0] = renorm(0.5*own + 0.5*embed, to=own, axis=token); v[2:] = shared(0)",
}
WAYS = ["gather", "pooled", "kernel"]


def model_of(name: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """A preset, or one of ``SUMS``."""
    what = {"wiring": SUMS[name]} if name in SUMS else {"variant": name}
    return small_model(dtype, **what, **fields)


def test_the_presets_with_token_determined_values_are_known() -> None:
    expected = {"svformer", "cla2", "v1_last_third", "v1_every2", "x0wv_last_third", "x0wv_every2", "bov", "shared_table"}
    assert {*PRESETS} == expected | {"table_fixed_scale", "table_all"}


@pytest.mark.parametrize("fold", ["auto", "all", "factored"])
@pytest.mark.parametrize("name", [*PRESETS, *SUMS])
def test_every_way_gives_the_logits_of_a_model_without_a_cache(name: str, fold: str) -> None:
    windows = {"window_pattern": "SSSL", "sliding_window": 9}
    for fields in ({}, {"num_key_value_heads": 2}, {"num_key_value_heads": 3, **windows}, {"attention_bias": True}):
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
            model = model_of(name, dtype, fold=fold, **fields)
            ids, (mask, positions) = tokens(3, T), left_padding(3, T)
            with torch.no_grad():
                full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
                scale = full.abs().max()
                for way in WAYS:
                    with chooser.only(way):
                        pieces, cache = in_pieces(model, ids, [8, 1, 5, 1, 1, 7], mask, positions)
                    assert (pieces[mask.bool()] - full).abs().max() <= tolerance * scale, (way, fields, dtype)
            assert cache.plan.fold == fold


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fold", ["auto", "factored"])
@pytest.mark.parametrize("name", ["svformer", "with tables"])
def test_half_precision_autocast_beams_and_lookup(name: str, fold: str, way: str) -> None:
    model = model_of(name, torch.float32, fold=fold, num_key_value_heads=2, head_dim=16)
    ids, ones, positions = tokens(2, T), torch.ones(2, T), torch.arange(T)[None]

    def difference(made: Any) -> float:
        full = made(ids, use_cache=False).logits.float()
        pieces, _ = in_pieces(made, ids, [9, 1, 6, 1, 6], ones, positions)
        return ((pieces.float() - full).norm() / full.norm()).item()

    with torch.no_grad(), chooser.only(way):
        with torch.autocast("cpu", torch.bfloat16):
            assert difference(model) < 0.05
        for dtype in (torch.bfloat16, torch.float16):
            assert difference(copy.deepcopy(model).to(dtype)) < 0.05
    model.lm_head.weight.data.mul_(0.05)
    repetitive = ids[:1, [0, 1, 2, 3, 0, 1, 2, 3, 0]]
    for options, given in (({"num_beams": 3}, ids[:, :9]), ({"prompt_lookup_num_tokens": 3}, repetitive)):
        fixed = {"attention_mask": torch.ones_like(given), "max_new_tokens": 12, "do_sample": False}
        with chooser.only(way), torch.inference_mode():
            found = model.generate(given, **fixed, **options)
        beams = {"num_beams": 3} if "num_beams" in options else {}
        assert torch.equal(found, model.generate(given, **fixed, **beams, use_cache=False)), options


# ------------------------------------------------------------------------------------------------------------- choosing
def test_the_fastest_candidate_is_found_by_measuring_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("valuepath.infer.choose.time.perf_counter", lambda: now[0])
    calls: list[str] = []

    def taking(name: str, *seconds: float) -> Callable[[], str]:
        left = [*seconds]

        def run() -> str:
            calls.append(name)
            now[0] += left.pop(0) if len(left) > 1 else left[0]
            return name

        return run

    made, device = Chooser(), torch.device("cpu")
    candidates = {
        "warms up": taking("warms up", 9.0, 1.0),
        "steady": taking("steady", 2.0),
        "hopeless": taking("hopeless", 30.0),
    }
    for _ in range(20):
        made.run("key", candidates, device)
    # the first call of a candidate may be slow; one that is hopeless beside the best is not tried again
    assert calls.count("hopeless") <= 2 and calls.count("steady") == 3
    assert calls[-10:] == ["warms up"] * 10 and made.chosen() == {"key": "warms up"}
    with made.only("steady"):
        assert made.run("key", candidates, device) == "steady"
    assert made.run("key", {"steady": candidates["steady"]}, device) == "steady"  # the winner may be gone
    assert made.run("other", candidates, device) != "" and "other" not in made.chosen()
    made.forget()
    assert made.chosen() == {}


def test_buckets_grow_with_the_size() -> None:
    found = [bucket(size) for size in range(1, 5000)]
    assert found == sorted(found) and len({*found}) < 28
    assert bucket(511) != bucket(1024) and bucket(1024) == bucket(1100)


@needs_compiler
def test_short_steps_and_long_chunks_take_the_ways_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, set[str]]] = []

    def spy(key: Any, candidates: dict[str, Callable[[], Any]], device: Any) -> Any:
        seen.append((key[0], {*candidates}))
        return next(iter(candidates.values()))()

    monkeypatch.setattr(attend.chooser, "run", spy)
    with torch.no_grad():
        model = model_of("svformer", torch.float32)
        ids, ones = tokens(2, T + 40), torch.ones(2, T + 40)
        in_pieces(model, ids, [T, 1, 39], ones, torch.arange(T + 40)[None])
        assert [s for _, s in seen] == [{*WAYS}] * 6 + [{"gather", "pooled"}] * 6
        seen.clear()
        in_pieces(model_of("svformer"), ids, [T + 39, 1], ones, torch.arange(T + 40)[None])
        assert [s for _, s in seen] == [{"gather", "pooled"}] * 6  # the kernels do not sum in double precision
        seen.clear()
        in_pieces(model_of("transformer", torch.float32), ids, [T + 39, 1], ones, torch.arange(T + 40)[None])
        assert seen == [("stored", {"fused", "explicit"})] * 6
        seen.clear()
        factored = model_of("svformer", torch.float32, fold="factored")
        in_pieces(factored, ids, [T + 39, 1], ones, torch.arange(T + 40)[None])
        assert [s for _, s in seen] == [{"pooled", "kernel"}] * 6
        seen.clear()
        factored.set_attn_implementation("eager")  # somebody may want the weights
        in_pieces(factored, ids, [T + 39, 1], ones, torch.arange(T + 40)[None])
        assert seen == []


# ----------------------------------------------------------------------------------------------- slots, rows and memory
def test_a_step_looks_at_its_own_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass over the history: what is made unique, and the rows that are fetched, are those of new tokens."""
    model = model_of("svformer", torch.float32)
    sizes: list[int] = []
    fetched: list[int] = []
    unique, rows = torch.unique, model.token_values.rows
    monkeypatch.setattr(torch, "unique", lambda x, *a, **k: sizes.append(x.numel()) or unique(x, *a, **k))
    monkeypatch.setattr(
        model.token_values, "rows", lambda content, ids, **k: fetched.append(len(ids)) or rows(content, ids, **k)
    )
    ids = torch.tensor([[3, 5, 3, 7, 5, 3, 3, 8, 7, 9, 9, 3]])
    with torch.no_grad():
        _, cache = in_pieces(model, ids, [5, 1, 1, 1, 1, 1, 1, 1], torch.ones(1, 12), torch.arange(12)[None])
    assert sizes == [5, 1, 1]  # the prompt, 8, 9
    assert fetched == [3, 1, 1]
    assert cache.tokens.ids.tolist() == [3, 5, 7, 8, 9]
    assert cache.slots.content.flatten().tolist() == [0, 1, 0, 2, 1, 0, 0, 3, 2, 4, 4, 0]


@pytest.mark.parametrize("fold", ["auto", "factored"])
@pytest.mark.parametrize("name", ["svformer", "bov", "x0wv_every2", "two sources", "with tables"])
def test_resident_bytes_are_those_of_the_distinct_tokens(name: str, fold: str) -> None:
    fields = {"vocab_size": 5003, "num_key_value_heads": 2, "fold": fold}
    model = model_of(name, torch.float32, **fields)
    ids = torch.randint(0, 5003, (2, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        _, cache = in_pieces(model, ids, [200, 1, 99], torch.ones(2, 300), torch.arange(300)[None])
    distinct = len(torch.unique(ids))
    held = cache.nbytes()
    counted = cache_counts(model.config.plan(), context=300, batch=2, bytes_per_element=4)
    by_token = counted.rows_in_use_bytes(distinct)
    assert cache.tokens.count == distinct
    logical = sum(buffer.nbytes()[0] for _, buffer in cache.rows._held.values())
    assert logical == by_token
    book = 5003 * 4 + 2 * distinct * 8
    assert by_token <= held.rows <= 1.25 * by_token + 128 * counted.row_bytes + book
    assert held.shared == (counted.shared_bytes if fold == "auto" else counted.shared_trained_bytes)
    assert held.logical == counted.growing_bytes


def test_tokens_that_left_every_sequence_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window drops positions; their tokens' rows go when the set has doubled, and nothing changes."""
    monkeypatch.setattr(cache_module, "COMPACT", 16)
    for name in ("svformer", "bov", "with tables"):
        model = model_of(name, torch.float64, vocab_size=1009, sliding_window=7)
        ids = (torch.arange(400) * 2 % 1009).view(2, 200)  # every token once
        ones, positions = torch.ones(2, 200), torch.arange(200)[None]
        with torch.no_grad():
            full = model(ids, use_cache=False).logits
            sizes = [9, *[1] * 91, 40, 60]
            cache, at, counts = None, 0, []
            for size in sizes:
                part = slice(at, at + size)
                pieces, cache = in_pieces(model, ids[:, part], [size], ones, positions[:, part], cache, start=at)
                assert (pieces - full[:, part]).abs().max() < 1e-9 * full.abs().max()
                counts.append(cache.tokens.count)
                at += size
            assert max(counts[1:92]) <= 2 * 2 * 7 + 16 + 2
            cache.batch_select_indices(torch.tensor([1]))
            assert cache.slots.content.shape[0] == 1
            cache.reset()
            assert cache.nbytes().logical == cache.nbytes().rows == cache.tokens.count == 0
            again, _ = in_pieces(model, ids[:1, :9], [4, 5], ones[:1], positions[:, :9], cache)
            assert (again - full[:1, :9]).abs().max() < 1e-9 * full.abs().max()


def test_rows_follow_a_changed_weight_in_the_middle_of_a_sequence() -> None:
    """Past keys are those of the old weights, but values by token are always those of the weights that there are."""
    for name in ("svformer", "bov", "with tables", "x0wv_every2"):
        for fold in ("auto", "factored"):
            model = model_of(name, fold=fold)
            ids, ones, positions = tokens(2, 12), torch.ones(2, 12), torch.arange(12)[None]
            with torch.no_grad():
                _, cache = in_pieces(model, ids[:, :9], [6, 3], ones, positions[:, :9])
                for parameter in model.parameters():
                    parameter.mul_(1.25)
                layer = model.model.plan.layers[-1]
                _, values = cache.read(5, None)
                expected = model.token_values.compute(layer.v_core, ids[:, :9]).transpose(1, 2)
                assert (values - expected).abs().max() < 1e-12


def test_tables_are_folded_once_when_asked_for_and_dropped_by_training() -> None:
    model = model_of("x0wv_every2")
    assert model.token_values._tables == {}
    model.fold()
    tables = {core: model.token_values.table(core) for core in model.model.plan.tables}
    assert len(tables) == 3 and all(t.shape == (53, 60) for t in tables.values())
    with torch.no_grad():
        in_pieces(model, tokens(2, T), [9, 14], torch.ones(2, T), torch.arange(T)[None])
    assert all(model.token_values.table(core) is table for core, table in tables.items())
    model.train()
    assert model.token_values._tables == {}
    trained = model_of("bov")
    trained.fold()
    assert trained.token_values._tables == {}  # a trained table is read as it is
    factored = model_of("svformer", fold="factored")
    factored.fold()
    assert factored.token_values._tables == {}


@pytest.mark.parametrize("name", ["svformer", "with tables", "own and embedding of layer 0", "a rescaled sum"])
def test_a_bfloat16_model_is_folded_in_float32(name: str) -> None:
    """The table is the rounded value of the float32 model with the same weights, not a chain of rounded steps."""
    model = model_of(name, torch.float32).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    for core in model.model.plan.tables:
        table = model.token_values.table(core)
        assert table.dtype == torch.bfloat16
        wide = exact.token_values.table(core)
        assert (table == wide.to(torch.bfloat16)).float().mean() > 0.999  # a sum in another order may round the other way
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        autocast = copy.deepcopy(exact)
        assert autocast.token_values.table(model.model.plan.tables[0]).dtype == torch.float32


# ---------------------------------------------------------------------------------------------- tables somewhere else
@pytest.mark.parametrize("place", ["cpu", "mmap"])
@pytest.mark.parametrize("name", ["bov", "shared_table", "with tables", "svformer"])
def test_a_table_elsewhere_gives_the_same_logits(name: str, place: str, tmp_path: Path) -> None:
    model = model_of(name, torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="20KB")  # several files
    assert (tmp_path / "model.safetensors.index.json").exists()
    moved = AutoModelForCausalLM.from_pretrained(tmp_path, table_device=place).eval()
    tables = [m for m in moved.modules() if isinstance(m, HostTable)]
    assert len(tables) == {"bov": 2, "shared_table": 1, "with tables": 6, "svformer": 0}[name]
    assert all(table.is_mapped == (place == "mmap") for table in tables)
    ids, ones, positions = tokens(2, T), torch.ones(2, T), torch.arange(T)[None]
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        assert torch.equal(moved(ids, use_cache=False).logits, full)
        pieces, cache = in_pieces(moved, ids, [9, 1, 6, 1, 6], ones, positions)
        assert (pieces - full).abs().max() <= 1e-5 * full.abs().max()
        assert cache.tokens.count == len(torch.unique(ids))
    assert moved.state_dict().keys() == model.state_dict().keys()
    for key, value in moved.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    moved.place_tables(None)
    assert not [m for m in moved.modules() if isinstance(m, HostTable)]
    with torch.no_grad():
        assert torch.equal(moved(ids, use_cache=False).logits, full)


def test_a_table_stays_when_the_model_moves_and_its_rows_are_cast(tmp_path: Path) -> None:
    model = model_of("bov", torch.float32)
    model.save_pretrained(tmp_path)
    for place in ("cpu", "mmap"):
        moved = vp.ValuePathForCausalLM.from_pretrained(tmp_path, table_device=place).eval()
        table = moved.model.layers[-1].self_attn.v_table
        moved.to("meta")  # a device that is not the host
        assert table.weight.device.type == "cpu" and table.compute_device.type == "meta"
        assert moved.model.embed_tokens.weight.device.type == "meta"
        assert table(torch.zeros(2, 3, dtype=torch.long)).device.type == "meta"
        half = vp.ValuePathForCausalLM.from_pretrained(tmp_path, table_device=place).to(torch.bfloat16)
        table = half.model.layers[-1].self_attn.v_table
        assert table(torch.zeros(2, 3, dtype=torch.long)).dtype == torch.bfloat16
        assert table.weight.dtype == (torch.bfloat16 if place == "cpu" else torch.float32)


def test_rows_elsewhere_are_asked_for_before_any_layer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("bov", torch.float32)
    model.save_pretrained(tmp_path)
    moved = vp.ValuePathForCausalLM.from_pretrained(tmp_path, table_device="mmap").eval()
    happened: list[str] = []
    submit = rows_module._reader.submit
    monkeypatch.setattr(rows_module._reader, "submit", lambda *a: happened.append("asked") or submit(*a))
    for n, layer in enumerate(moved.model.layers):
        layer.register_forward_pre_hook(lambda *_, n=n: happened.append(f"layer {n}"))
    layers = [f"layer {n}" for n in range(6)]
    with torch.no_grad():
        cache = moved.make_cache()
        for ids, asked in (([[3, 5, 3]], 2), ([[5]], 0), ([[7]], 2)):
            happened.clear()
            moved(torch.tensor(ids), **{CACHE_NAME: cache})
            assert happened == ["asked"] * asked + layers


MEMORY = """
import json, sys, torch, valuepath as vp
def anonymous():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) * 1024
torch.set_num_threads(1)
torch.ones(100, 100) @ torch.ones(100, 100)
before = anonymous()
model = vp.ValuePathForCausalLM.from_pretrained(sys.argv[1], table_device=sys.argv[2] if sys.argv[2] != "None" else None).eval()
if sys.argv[3] == "fold":
    model.fold()
ids = torch.arange(64).view(2, 32)
with torch.no_grad():
    cache = model(ids, use_cache=True, logits_to_keep=1)[vp.compat.CACHE_NAME]
    for step in range(4):
        model(ids[:, :1] + 100 + step, logits_to_keep=1, **{vp.compat.CACHE_NAME: cache})
print(json.dumps({"anonymous": anonymous() - before, "rows": cache.nbytes().rows, "tokens": cache.tokens.count}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_holds_the_rows_in_use_and_not_the_table(tmp_path: Path) -> None:
    """A real process: two tables of 102 MB in the file, and what the process holds that is not backed by a file."""
    sizes: dict[str, Any] = {"vocab_size": 25013, "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4}
    for name in ("bov", "x0wv_last_third"):
        config = vp.ValuePathConfig(variant=name, head_dim=256, intermediate_size=8, **sizes)
        vp.ValuePathForCausalLM(config).save_pretrained(tmp_path / name)
    table = 25013 * 1024 * 4

    def held(name: str, place: str, fold: str = "") -> dict[str, int]:
        command = [sys.executable, "-c", MEMORY, str(tmp_path / name), place, fold]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    mapped = held("bov", "mmap")
    assert mapped["tokens"] == 64 + 4 * 2
    assert mapped["rows"] < 2 * 128 * 1024 * 4 + 25013 * 4 + 4096
    assert mapped["anonymous"] < table / 3
    folded = held("x0wv_last_third", "None", "fold")
    assert folded["anonymous"] > 2 * table  # the test sees a table where there is one


def test_wrong_places_and_checkpoints_are_refused(tmp_path: Path) -> None:
    model = model_of("bov", torch.float32)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"table_device='disk': expected 'cpu', 'mmap' or None"):
        vp.ValuePathForCausalLM.from_pretrained(tmp_path, table_device="disk")
    with pytest.raises(ValueError, match="give table_device only"):
        vp.ValuePathForCausalLM.from_pretrained(tmp_path, table_device="cpu", device_map="cpu")
    with pytest.raises(ValueError, match="needs the checkpoint"):
        model.place_tables("mmap")
    with pytest.raises(ValueError, match=r"no tensor 'nothing'"):
        mapped_tensor(tmp_path / "model.safetensors", "nothing")
    (tmp_path / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        model.place_tables("mmap", checkpoint=tmp_path)


def test_randomised_models_are_random() -> None:
    """Guards this file: a randomised table is not the projection it started as."""
    model = model_of("bov")
    randomise(model)
    assert model.model.layers[-1].self_attn.v_table.weight.std() > 0.2

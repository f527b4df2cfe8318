"""``valuepath generate``: what comes out on the terminal, what it took, and how bad input ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import valuepath as vp
from models import randomise
from texts import once
from valuepath.cli import app
from valuepath.data.corpus import Corpus
from valuepath.infer.generate import Stats
from valuepath.infer.generate import generate as run_generate


@pytest.fixture(scope="session")
def saved(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each of three variants with the tokenizer of the small text, as a run leaves them."""
    folder, lock = once(tmp_path_factory, "saved-models")
    with lock:
        if not folder.exists():
            for name in ("transformer", "svformer", "bov"):
                config = vp.ValuePathConfig(
                    variant=name, vocab_size=corpus.vocab_size, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
                    eos_token_id=corpus.eos,
                )  # fmt: skip
                model = vp.ValuePathForCausalLM(config)
                randomise(model, std=0.1)
                model.save_pretrained(folder / name)
                corpus.tokenizer().save_pretrained(folder / name)
    return folder


def run(*arguments: Any, stdin: str | bytes | None = None) -> Any:
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin, env=environment)


def failure(*arguments: Any, stdin: str | None = None) -> str:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def reference(folder: Path, prompt: str, new: int, **options: Any) -> str:
    """The same text from transformers' own generate, without a cache."""
    model = vp.ValuePathForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, use_cache=False, **options)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("name", ["transformer", "svformer", "bov"])
def test_the_likeliest_text_is_that_of_transformers(saved: Path, name: str) -> None:
    prompt = "import email\nmessage = "
    expected = reference(saved / name, prompt, 30, do_sample=False)
    assert len(expected.strip()) > 5
    for options in ((), ("--fold", "factored"), ("--table-device", "mmap"), ("--table-device", "cpu"), ("--prefill-chunk", 4)):
        result = run(saved / name, prompt, "--temperature", 0, "--max-new-tokens", 30, *options)
        assert result.exit_code == 0, result.output
        assert result.stdout == expected + "\n", options
    piped = run(saved / name, "--temperature", 0, "--max-new-tokens", 30, stdin=prompt)
    assert piped.stdout == expected + "\n"


def test_draws_follow_the_seed_and_the_options(saved: Path) -> None:
    def text(*options: Any) -> str:
        result = run(saved / "svformer", "def ", "--max-new-tokens", 25, *options)
        assert result.exit_code == 0, result.output
        return result.stdout

    assert text("--seed", 3) == text("--seed", 3) != text("--seed", 4)
    likeliest = text("--temperature", 0)
    assert text("--top-k", 1) == text("--top-p", 0.0001) == text("--temperature", 0.0001) == likeliest
    assert text("--temperature", 0, "--no-eos") != likeliest
    assert text("--temperature", 0, "--repetition-penalty", 9.0) != likeliest
    torch.manual_seed(3)
    assert text("--seed", 3, "--top-k", 20, "--temperature", 0.7) == (
        reference_drawn(saved / "svformer", "def ", 25, 3, top_k=20, temperature=0.7) + "\n"
    )


def reference_drawn(folder: Path, prompt: str, new: int, seed: int, **options: Any) -> str:
    torch.manual_seed(seed)
    return reference(folder, prompt, new, do_sample=True, **options)


def test_the_statistics_are_those_of_the_cache(saved: Path) -> None:
    prompt = "import email\n" * 9
    tokens = len(AutoTokenizer.from_pretrained(saved / "bov")(prompt, add_special_tokens=False)["input_ids"]) + 1
    for name, distinct in (("transformer", False), ("bov", True)):
        result = run(saved / name, prompt, "--max-new-tokens", 20, "--seed", 1, "--stats", "--top-k", 5)
        assert result.exit_code == 0, result.output
        shown = dict(line.rsplit("  ", 1) for line in result.stderr.splitlines() if "  " in line)
        shown = {key.strip(): value.strip() for key, value in shown.items()}
        assert shown["prompt"] == f"{tokens} tokens"
        new = int(shown["new"].split()[0])
        assert 1 <= new <= 20
        assert float(shown["time to first token"].split()[0]) > 0
        kept = tokens + new - 1  # the last token is never run
        elements = kept * 32 * (6 if name == "transformer" else 5)
        wanted = 4 * elements + (4 * kept if distinct else 0)
        assert f"{wanted / 1024:.4g} KiB" == shown["cache that grows with the text"]
        assert ("rows of" in result.stderr) == ("tables that all texts share" in shown) == distinct
        assert max(map(len, result.stderr.splitlines())) <= 80


def test_text_arrives_piece_by_piece(saved: Path) -> None:
    """Each piece is written when its token is there, not when all are."""
    model = vp.ValuePathForCausalLM.from_pretrained(saved / "svformer").eval()
    tokenizer = AutoTokenizer.from_pretrained(saved / "svformer")
    pieces: list[tuple[int, str]] = []
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    model.register_forward_pre_hook(count)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    found = run_generate(model, tokenizer, "def f(x):\n", lambda text: pieces.append((steps, text)), **options)
    assert isinstance(found, Stats) and found.new_tokens == steps
    written = {step for step, text in pieces if text}
    assert len(written) > 1 and min(written) < found.new_tokens
    assert "".join(text for _, text in pieces) == reference(saved / "svformer", "def f(x):\n", 40, do_sample=False)
    assert found.tokens_per_second is not None and found.tokens_per_second > 0
    one = run_generate(model, tokenizer, "x", lambda text: None, max_new_tokens=1, do_sample=False)
    assert one.new_tokens == 1 and one.tokens_per_second is None


def test_ctrl_c_ends_a_real_process_without_a_traceback(saved: Path, tmp_path: Path) -> None:
    endless = vp.ValuePathForCausalLM.from_pretrained(saved / "svformer")
    endless.config.eos_token_id = endless.generation_config.eos_token_id = None  # it never ends a text by itself
    endless.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(saved / "svformer").save_pretrained(tmp_path)
    command = [sys.executable, "-c", "from valuepath.cli import main; main()", "generate", str(tmp_path), "def "]
    options = ["--max-new-tokens", "1000000", "--temperature", "1.5"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        # a shell that runs the tests in the background lets its children ignore the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    seen = process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert seen and errors == b""
    assert process.returncode == 130


def test_bad_input_is_one_message(saved: Path, tmp_path: Path) -> None:
    model = saved / "svformer"
    assert "no such folder" in failure("nowhere", "x")
    assert "no config.json" in failure(tmp_path, "x")
    assert "expected fp32, bf16, fp16, fp64" in failure(model, "x", "--dtype", "int8")
    assert "'disk': expected 'cpu', 'mmap' or None" in failure(model, "x", "--table-device", "disk")
    assert "expected 'auto', 'none', 'all', 'factored'" in failure(model, "x", "--fold", "some")
    assert "the prompt has no token" in failure(model, "", "--no-eos")
    assert "device 'nothing'" in failure(model, "x", "--device", "nothing")
    if not torch.cuda.is_available():
        assert "device 'cuda'" in failure(model, "x", "--device", "cuda")
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 311}
    refused = vp.ValuePathConfig(wiring="v[1:] = renorm(own + tap(0), axis=tensor)", **sizes)
    vp.ValuePathForCausalLM(refused).save_pretrained(tmp_path / "refused")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "refused")
    assert "includes tokens that come later" in failure(tmp_path / "refused", "x")
    vp.ValuePathForCausalLM(refused).save_pretrained(tmp_path / "no tokenizer")
    assert "tokenizer" in failure(tmp_path / "no tokenizer", "x")
    assert run(model, "x", "--max-new-tokens", 0).exit_code == 2

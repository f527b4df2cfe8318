"""Texts that break careless tokenisation, and small prepared folders made of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from valuepath.data.corpus import Corpus

ROOT = Path(__file__).resolve().parents[1]

AWKWARD = [
    "价值向量决定读取什么；查询和键决定在哪里读取。\n第二行。",
    "القيمة تقرر ماذا يُقرأ، والمفتاح يقرر أين. ١٢٣",
    "family 👨‍👩‍👧‍👦 flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿 thumbs 👍🏽 end",
    "combining: e\u0301 vs \u00e9, a\u030a\u0323, \u1112\u1161\u11ab",
    "देवनागरी: क्षत्रिय, ज्ञान, श्रीमान्",
    "mixed\r\nline\rends\n\nand\ttabs  \u00a0 and trailing spaces   \n",
    "<|endoftext|>literal<|endoftext|> <|endoftext|>",
    "\ufeffstarts with a byte order mark",
    "nul \x00 and controls \x01\x1f\x7f and \u2028 \u2029 separators",
    "   leading spaces",
    "</s> <s> [UNK] <unk> <pad>",
]


def plain(count: int, seed: int = 0, words: int = 40) -> list[str]:
    """Distinct documents of random English-looking words."""
    generator = random.Random(seed)
    stock = ["value", "key", "query", "layer", "cache", "table", "the", "of", "learned", "reads", "token", "row", "from"]
    return [f"Document {seed}-{n}. " + " ".join(generator.choices(stock, k=words)) for n in range(count)]


def write_jsonl(path: Path, texts: list[str], **columns: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for n, text in enumerate(texts):
            row = {"text": text} | {name: values[n] for name, values in columns.items()}
            out.write(json.dumps(row, ensure_ascii=bool(n % 2)) + "\n")
    return path


def documents(ids: np.ndarray, eos: int) -> list[list[int]]:
    """A stream cut at EOS, by hand: what stands between two of them."""
    assert ids[0] == eos
    found: list[list[int]] = []
    current: list[int] = []
    for token in ids[1:].tolist():
        if token == eos:
            found.append(current)
            current = []
        else:
            current.append(token)
    return [*found, current] if current else found


def decoded_documents(corpus: Corpus, name: str, split: str) -> list[str]:
    """Documents of a stream; of a training stream the last one may be cut off and is left out if so."""
    stream = getattr(corpus.domains[name], split)
    ids = stream.read(0, len(stream))
    parts = documents(ids, corpus.eos)
    if ids[-1] != corpus.eos:
        parts.pop()
    tokenizer = AutoTokenizer.from_pretrained(corpus.path / "tokenizer")
    return [tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in parts]


def run_python(code: str, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, with this checkout's package."""
    settings = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=settings, capture_output=True, text=True, check=False
    )

"""Small real texts, prepared once a test run: sources of Python's own packages, as two domains."""

from __future__ import annotations

import email
import json
from pathlib import Path

import pytest
from filelock import FileLock

from valuepath.data.corpus import Corpus
from valuepath.data.prepare import prepare

SOURCES = [f"mail={Path(email.__file__).parent}", f"json={Path(json.__file__).parent}"]


def once(factory: pytest.TempPathFactory, name: str) -> tuple[Path, FileLock]:
    """A folder that all test processes share, and the lock to hold while it is made."""
    root = factory.getbasetemp()
    shared = root.parent if root.name.startswith("popen-") else root
    return shared / name, FileLock(shared / f"{name}.lock")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared text of two domains with a vocabulary of 311."""
    folder, lock = once(tmp_path_factory, "text")
    with lock:
        if not folder.exists():
            prepare(SOURCES, folder, tokenizer="train:311", block=61, max_bytes=150_000, max_holdout_bytes=3_000)
    return folder


@pytest.fixture(scope="session")
def corpus(text_folder: Path) -> Corpus:
    return Corpus.load(text_folder)

"""Text from a model, streamed, with what it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.generation.streamers import TextStreamer

from valuepath.compat import CACHE_NAME
from valuepath.infer.cache import CacheBytes
from valuepath.model.modeling import ValuePathForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Stats:
    """What a generation took.

    Attributes:
        first_token_seconds: from the call to the first new token, the prompt included.
        seconds: from the first new token to the last.
        distinct: distinct tokens whose values are held; 0 if the cache keeps no ids.
    """

    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float
    cache: CacheBytes
    distinct: int

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None if there are none."""
        return (self.new_tokens - 1) / self.seconds if self.new_tokens > 1 and self.seconds > 0 else None


class _Stream(TextStreamer):
    """Hands finished text to ``write`` and notes when tokens came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.times = write, list[float]()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def load(
    path: Path | str, *, dtype: str | None = None, device: str = "cpu", table_device: str | None = None
) -> tuple[ValuePathForCausalLM, PreTrainedTokenizerBase]:
    """A model and its tokenizer from one folder (or hub name).

    Raises:
        ValueError: if there is no valuepath model or no tokenizer, or the device cannot be used.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected {', '.join(DTYPES)}")
    if Path(path).exists() and not (Path(path) / "config.json").is_file():
        raise ValueError(f"{path}: no config.json; expected a folder with a saved model, such as <run>/model")
    try:
        model = ValuePathForCausalLM.from_pretrained(
            path, table_device=table_device, dtype=DTYPES[dtype] if dtype else "auto", trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except OSError as wrong:
        raise ValueError(f"{path}: {str(wrong).splitlines()[0]}") from None
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as wrong:
        raise ValueError(f"device {device!r}: {str(wrong).splitlines()[0]}") from None


@torch.no_grad()
def generate(
    model: ValuePathForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    write: Callable[[str], None],
    *,
    fold: str | None = None,
    after_eos: bool = True,
    **options: Any,
) -> Stats:
    """Stream the continuation of ``prompt`` to ``write``.

    Args:
        fold: instead of the config's: where values by token live.
        after_eos: put the end token before the prompt, which stood before every text in training.
        options: of transformers' ``generate``: ``max_new_tokens``, ``do_sample``, ``temperature``, ...

    Raises:
        ValueError: for a prompt without a token.
    """
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    if after_eos and end is not None:
        ids = [end, *ids]
    if not ids:
        raise ValueError("the prompt has no token; give some text")
    given = torch.tensor([ids]).to(model.model.embed_tokens.weight.device)
    cache = model.make_cache(fold)
    stream = _Stream(tokenizer, write)
    start = time.perf_counter()
    model.generate(
        given, attention_mask=torch.ones_like(given), streamer=stream, **{CACHE_NAME: cache}, **options
    )
    times = stream.times
    return Stats(
        prompt_tokens=len(ids),
        new_tokens=len(times),
        first_token_seconds=times[0] - start,
        seconds=times[-1] - times[0],
        cache=cache.nbytes(),
        distinct=cache.tokens.count,
    )

"""Value tables that need not be on the compute device: in host memory, or mapped from the checkpoint's file."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

DEVICES = ("cpu", "mmap")
"""Places for tables besides the model's own device."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


class HostTable(nn.Embedding):
    """An embedding whose table stays in host memory while the model moves to another device.

    Rows are looked up on the host and brought to the device and dtype of ``like`` (or of the ids).

    Args:
        embedding: the table to take over; its parameter is shared, not copied.
        mapped: rows of a file instead, which are read when they are looked up; they are not trained.
    """

    def __init__(self, embedding: nn.Embedding, mapped: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        rows, width = embedding.weight.shape
        self.num_embeddings, self.embedding_dim = rows, width
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.is_mapped = mapped is not None
        self.compute_device, self.compute_dtype = embedding.weight.device, embedding.weight.dtype
        if mapped is not None:
            self.weight = nn.Parameter(mapped, requires_grad=False)
        elif embedding.weight.device.type == "cpu":
            self.weight = embedding.weight
        else:
            self.weight = nn.Parameter(embedding.weight.detach().cpu(), embedding.weight.requires_grad)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostTable:
        """Follow the model's moves and casts in what comes out; the table itself stays, and a mapped one keeps its dtype."""
        probe = fn(torch.empty(0, dtype=self.compute_dtype, device=self.compute_device))
        self.compute_device, self.compute_dtype = probe.device, probe.dtype
        if not self.is_mapped and self.weight.dtype != probe.dtype:
            with torch.no_grad():
                self.weight.data = self.weight.data.to(probe.dtype)
                if self.weight.grad is not None:
                    self.weight.grad.data = self.weight.grad.data.to(probe.dtype)
        return self

    def forward(self, input: Tensor) -> Tensor:
        """Rows (..., width) on the compute device."""
        rows = F.embedding(input.to(self.weight.device), self.weight)
        return rows.to(device=self.compute_device, dtype=self.compute_dtype)


def check_table_device(table_device: str | None) -> None:
    """
    Raises:
        ValueError: for a place that is none of ``DEVICES``.
    """
    if table_device is not None and table_device not in DEVICES:
        raise ValueError(f"table_device={table_device!r}: expected {', '.join(map(repr, DEVICES))} or None")


def moved_table(
    table: nn.Embedding, table_device: str | None, checkpoint: Any, name: str, device: torch.device, **where: Any
) -> nn.Embedding:
    """The table in another place: see ``ValuePathPreTrainedModel.place_tables``.

    Args:
        name: of the parameter in the checkpoint.
        device: where the model is.
    """
    if table_device is None:
        plain = nn.Embedding(1, 1, device="meta")
        plain.num_embeddings, plain.embedding_dim = table.num_embeddings, table.embedding_dim
        weight = table.weight if table.weight.device == device else nn.Parameter(table.weight.detach().to(device))
        plain.weight = weight
        return plain
    if table_device == "cpu":
        return HostTable(table)
    return HostTable(table, mapped_tensor(checkpoint_file(str(checkpoint), name, **where), name))


# ------------------------------------------------------------------------------------------------------------ mapping
def mapped_tensor(file: Path, name: str) -> Tensor:
    """A tensor of a safetensors file, mapped into memory: rows are read from the disk when they are first looked at.

    The layout is the format's: 8 bytes of length, a JSON header with ``dtype``, ``shape`` and ``data_offsets``, the data.

    Raises:
        ValueError: if the file has no such tensor, or in a dtype that is no floating point number of torch.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    if name not in header:
        raise ValueError(f"{file}: no tensor {name!r}; expected the checkpoint that this model was loaded from")
    entry = header[name]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{file}: {name!r} is stored as {entry['dtype']}; expected one of {', '.join(_DTYPES)} to map it")
    start = entry["data_offsets"][0]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    offset = 8 + length + start
    if offset % dtype.itemsize:  # the format does not promise alignment; torch needs it
        with safe_open(file, framework="pt") as opened_file:
            return opened_file.get_tensor(name)
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # writes, if any, stay in memory
    if hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_RANDOM)  # a row is read without its neighbours
    return torch.frombuffer(mapping, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)


def checkpoint_file(path: str, name: str, **options: Any) -> Path:
    """The safetensors file of a local or cached checkpoint that holds the tensor ``name``.

    Raises:
        ValueError: if there is none.
    """
    quiet = {**options, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **quiet)
    file = SAFE_WEIGHTS_NAME
    if index is not None:
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
        if name not in shards:
            raise ValueError(f"{index}: no entry for {name!r}")
        file = shards[name]
    found = cached_file(path, file, **quiet)
    if found is None:
        raise ValueError(f"table_device='mmap': {path} has no {SAFE_WEIGHTS_NAME} to map tables from; use save_pretrained")
    return Path(found)

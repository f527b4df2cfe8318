"""The CPU kernel of token-pooled attention: compiled with the machine's own C++ compiler at first use, and kept.

It reads the keys once, in float32 or bfloat16, and sums in float32. Without a compiler everything runs through PyTorch's
operations instead: the same results, slower.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("pooled_cpu.cpp")
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC", "-shared"]
SWITCH = "VALUEPATH_CPU_KERNEL"
"""Environment variable: 0 keeps to PyTorch's operations."""

DTYPES = (torch.float32, torch.bfloat16)


def _processor() -> str:
    """What code compiled for this machine depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor() + platform.machine()


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "valuepath"


def _build() -> Path:
    """The compiled library; compiled now if this machine has not done so.

    Raises:
        RuntimeError: with the reason if that is not possible.
    """
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler was found (CXX, c++, g++, clang++)")
    text = SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([text, " ".join([compiler, *FLAGS]).encode(), _processor().encode()])).hexdigest()[:16]
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"pooled-{key}.so"
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "pooled.so"
            done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(made)], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-400:]}")
            os.replace(made, target)
    except OSError as wrong:
        raise RuntimeError(f"the folder {folder} cannot be written: {wrong}") from None
    return target


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        library = ctypes.CDLL(str(_build()))
    except (RuntimeError, OSError) as wrong:
        logger.warning("token-pooled attention runs through PyTorch's operations, without its CPU kernel: %s", wrong)
        return None
    pointer = ctypes.c_void_p
    library.valuepath_pool.argtypes = [ctypes.c_int, pointer, *[pointer] * 5]
    library.valuepath_product.argtypes = [ctypes.c_int, pointer, *[pointer] * 3]
    library.valuepath_attend.argtypes = [ctypes.c_int, pointer, ctypes.c_float, *[pointer] * 6]
    library.valuepath_pool.restype = library.valuepath_product.restype = library.valuepath_attend.restype = None
    return library


def available() -> bool:
    """Whether the kernel can be used on this machine; compiles it if need be."""
    return _library() is not None


def takes(query: Tensor, keys: Tensor, mask: Tensor | None) -> bool:
    """Whether ``pool`` can take these: float32 or bfloat16 on the CPU, no mask or a bool one that is the same for all heads."""
    return (
        query.device.type == "cpu"
        and query.dtype in DTYPES
        and keys.dtype == query.dtype
        and keys.stride(-1) == 1
        and keys.stride(-2) == keys.shape[-1]
        and (mask is None or (mask.dtype == torch.bool and mask.ndim == 4 and mask.shape[1] == 1))
        and not torch.is_grad_enabled()
    )


def _numbers(*numbers: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _sizes(query: Tensor, keys: Tensor, slots: Tensor, mask: Tensor | None, distinct: int) -> list[int]:
    """What the kernels call Sizes. ``mask`` has been expanded to (B, 1, Q, S)."""
    B, h, Q, e = query.shape
    g, S = keys.shape[1:3]
    strides = (0, 0, 0) if mask is None else (mask.stride(0), mask.stride(2), mask.stride(3))
    lengths = [B, g, h // g * Q, Q, S, e, distinct]
    return [*lengths, keys.stride(0), keys.stride(1), slots.stride(0), *strides, torch.get_num_threads()]


def _ready(query: Tensor, keys: Tensor, slots: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Slots and mask as the kernels read them."""
    if slots.dtype != torch.int32 or slots.stride(1) != 1:
        slots = slots.to(torch.int32).contiguous()
    if mask is not None:
        mask = mask.expand(query.shape[0], 1, query.shape[2], keys.shape[2])
    return slots, mask


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def attend(query: Tensor, keys: Tensor, slots: Tensor, mask: Tensor | None, scaling: float, rows: Tensor) -> Tensor:
    """Token-pooled attention (B, Q, h, e) in the dtype of ``query``, ``keys`` and ``rows``; sums are in float32.

    Args:
        query: (B, h, Q, e).
        keys: (B, g, S, e), a head's keys one after another.
        slots: (B, S) int32, below U.
        rows: (g, U, e).
    """
    library = _library()
    assert library is not None
    slots, mask = _ready(query, keys, slots, mask)
    B, h, Q, e = query.shape
    query = query if query.stride(3) == 1 else query.contiguous()
    rows = rows if rows.stride(2) == 1 and rows.stride(1) == e else rows.contiguous()
    out = torch.empty(B, Q, h, e, dtype=query.dtype)
    sizes = _numbers(*_sizes(query, keys, slots, mask, rows.shape[1]), *query.stride()[:3], rows.stride(0))
    library.valuepath_attend(
        int(keys.dtype == torch.bfloat16),
        ctypes.addressof(sizes),
        scaling,
        query.data_ptr(),
        keys.data_ptr(),
        slots.data_ptr(),
        _pointer(mask),
        rows.data_ptr(),
        out.data_ptr(),
    )
    return out


def pool(query: Tensor, keys: Tensor, slots: Tensor, mask: Tensor | None, scaling: float, distinct: int) -> Tensor:
    """softmax(q k^T scaling + mask) added up per slot, float32 (B, g, R, U); see ``valuepath.infer.pooled``.

    Args:
        query, keys, slots: as for ``attend``; slots lie below ``distinct``.
    """
    library = _library()
    assert library is not None
    slots, mask = _ready(query, keys, slots, mask)
    B, h, Q, e = query.shape
    g = keys.shape[1]
    wide = (query.float() * scaling).reshape(B, g, h // g * Q, e).contiguous()
    sums = torch.empty(B, g, h // g * Q, distinct)
    sizes = _numbers(*_sizes(query, keys, slots, mask, distinct))
    library.valuepath_pool(
        int(keys.dtype == torch.bfloat16),
        ctypes.addressof(sizes),
        wide.data_ptr(),
        keys.data_ptr(),
        slots.data_ptr(),
        _pointer(mask),
        sums.data_ptr(),
    )
    return sums


def product(sums: Tensor, rows: Tensor) -> Tensor:
    """``sums rows`` in float32, (B, g, R, e), for sums (B, g, R, U) and rows (g, U, e) in float32 or bfloat16."""
    library = _library()
    assert library is not None
    if rows.dtype not in DTYPES or rows.device.type != "cpu":
        raise ValueError(f"rows in {rows.dtype} on {rows.device}: expected float32 or bfloat16 on the CPU")
    B, g, R, U = sums.shape
    e = rows.shape[2]
    if rows.stride(2) != 1 or rows.stride(1) != e:
        rows = rows.contiguous()
    sums = sums.contiguous()
    out = torch.empty(B, g, R, e)
    numbers = _numbers(B, g, R, U, e, rows.stride(0), torch.get_num_threads())
    library.valuepath_product(
        int(rows.dtype == torch.bfloat16), ctypes.addressof(numbers), sums.data_ptr(), rows.data_ptr(), out.data_ptr()
    )
    return out

"""Whether this machine can compile the CPU kernel; without a compiler PyTorch's operations do its work."""

from __future__ import annotations

import os

import pytest

from valuepath.infer import pooled_cpu

needs_compiler = pytest.mark.skipif(
    not pooled_cpu.available() and not os.environ.get("VALUEPATH_REQUIRE_COMPILER"),
    reason="no C++ compiler: VALUEPATH_REQUIRE_COMPILER=1 makes this a failure",
)

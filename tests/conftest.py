"""Shared by all tests: which versions run, and how hypothesis behaves."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings

# read when triton is first imported: without a GPU its kernels run in its interpreter
os.environ.setdefault("TRITON_INTERPRET", "0" if shutil.which("nvidia-smi") else "1")

pytest_plugins = ["texts"]

EXPECTED = os.environ.get("EXPECTED_TRANSFORMERS")
"""The transformers version that the caller means to test, if it said so (``make test`` does)."""

# no deadline: two test processes share the machine with whatever else runs there
settings.register_profile("valuepath", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("valuepath")


def pytest_configure(config: pytest.Config) -> None:
    """Stop before the first test if another transformers would be imported than the one that was meant."""
    if EXPECTED:
        import transformers

        if transformers.__version__ != EXPECTED:
            raise pytest.UsageError(
                f"transformers {transformers.__version__} from {transformers.__file__}, expected {EXPECTED}"
            )


def pytest_report_header(config: pytest.Config) -> str:
    return f"torch {version('torch')}, transformers {version('transformers')}" + (" as expected" if EXPECTED else "")

"""The few places where supported transformers versions differ."""

from __future__ import annotations

import dataclasses

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE_NAME = next(
    name for name in ("cache", "past_key_values") if name in {f.name for f in dataclasses.fields(CausalLMOutputWithPast)}
)
"""What forward arguments and outputs call the cache: ``past_key_values`` up to transformers 5.23, ``cache`` from 5.24."""

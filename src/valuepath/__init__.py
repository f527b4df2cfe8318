"""Valuepath: decide where each layer's value comes from.

Importing the package registers the model with transformers' Auto classes, so that ``AutoModelForCausalLM.from_pretrained``
loads its checkpoints without remote code.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from valuepath.config import ValuePathConfig
from valuepath.equations import parse
from valuepath.infer.cache import CacheBytes, ValuePathCache
from valuepath.model.modeling import ValuePathForCausalLM, ValuePathModel
from valuepath.plan import Plan, Shape, make_plan
from valuepath.variants import Preset, variants
from valuepath.wiring import Wiring, WiringError

AutoConfig.register(ValuePathConfig.model_type, ValuePathConfig, exist_ok=True)
AutoModel.register(ValuePathConfig, ValuePathModel, exist_ok=True)
AutoModelForCausalLM.register(ValuePathConfig, ValuePathForCausalLM, exist_ok=True)

__version__ = "0.1.0"

__all__ = [
    "CacheBytes",
    "Plan",
    "Preset",
    "Shape",
    "ValuePathCache",
    "ValuePathConfig",
    "ValuePathForCausalLM",
    "ValuePathModel",
    "Wiring",
    "WiringError",
    "make_plan",
    "parse",
    "variants",
]

"""Weights that look as if ZeRO-3 had sharded them."""

from typing import Any

from glm4v_patched.engine.deepspeed.internals import SHARDED_WEIGHT_ATTRIBUTES


def as_sharded(weight: Any, **names: Any) -> Any:
    """Give a weight the names of a sharded one: those that are given, and None for the others."""
    for name, value in (dict.fromkeys(SHARDED_WEIGHT_ATTRIBUTES) | names).items():
        setattr(weight, name, value)
    return weight

"""Model families by `model_type` of config.json. Every module of this package registers itself; none imports torch."""

from __future__ import annotations

from rlhf_megatron.models.families.base import FAMILIES, Family, HFConfig
from rlhf_megatron.registry import import_modules

import_modules(__name__, __path__)

__all__ = ["FAMILIES", "Family", "HFConfig"]

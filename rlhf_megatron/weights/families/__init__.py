"""Model families by `model_type` of config.json. Every module of this package registers itself;
none imports torch.
"""

from __future__ import annotations

from rlhf_megatron.registry import import_package_modules
from rlhf_megatron.weights.families.model_family import FAMILIES, HFConfig, ModelFamily

import_package_modules(__name__, __path__)

__all__ = ["FAMILIES", "HFConfig", "ModelFamily"]

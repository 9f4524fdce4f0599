"""torch and numpy, loaded at their first use: the configuration reads modules that declare
parts without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
else:

    class _LazyModule:
        def __init__(self, module_name: str) -> None:
            self._module_name = module_name

        def __getattr__(self, name: str) -> Any:
            """Import the module at its first use, and return its attribute."""
            return getattr(importlib.import_module(self._module_name), name)

    np = _LazyModule("numpy")
    torch = _LazyModule("torch")
    Tensor = Any  # it stands in annotations only

__all__ = ["Tensor", "np", "torch"]

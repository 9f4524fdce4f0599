"""torch, loaded at its first use. Modules that declare parts take it from here, so that config reads them without."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("torch"), name)

    torch, Tensor = _Torch(), Any  # Tensor stands in annotations only

__all__ = ["Tensor", "torch"]

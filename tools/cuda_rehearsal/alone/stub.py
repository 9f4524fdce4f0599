"""Transformer Engine's own Python (its wheel, without what that depends on) over an extension of
which every name is a class or a function that does nothing: enough to build its modules.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

PLACE = Path(sys.prefix) / "transformer_engine"  # where `make cuda-rehearsal` puts the wheel
ABSENT = (
    "transformer_engine_torch",
    "transformer_engine.pytorch.onnx_extensions",
    "onnx",
    "einops",
    "pydantic",
)


class Kind(type):
    """A class of the extension: each name in it is a member with a number of its own, as of
    an enumeration.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = int.__new__(cls, len(vars(cls)))  # type: ignore[type-var]
        setattr(cls, name, member)
        return member

    @property
    def __members__(cls) -> dict[str, Any]:
        return {name: member for name, member in vars(cls).items() if isinstance(member, cls)}


class Stub(types.ModuleType):
    """A module in which each name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        is_function = name[0].islower()
        made: Any = (
            (lambda *_, **__: 0)
            if is_function
            else Kind(name, (int,), {"__new__": lambda cls, *_, **__: int.__new__(cls)})
        )
        setattr(self, name, made)
        return made


def install() -> None:
    """Import it. Raises ImportError where the wheel is not in PLACE."""
    sys.path.append(str(PLACE))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # it loads no core library then
    for name in ABSENT:
        module = Stub(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    pydantic = types.ModuleType("pydantic.dataclasses")
    pydantic.dataclass = dataclasses.dataclass  # type: ignore[attr-defined]
    sys.modules[pydantic.__name__] = pydantic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first import finds no extension
        common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    importlib.import_module("transformer_engine.pytorch")

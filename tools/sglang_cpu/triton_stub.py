"""A module `triton` that can be imported and decorated with, for a machine that has none. Nothing of it computes."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


class _StubBase:
    """Base of the stub's classes; takes any class arguments."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__()


class _StubModule(types.ModuleType):
    """Has every attribute: a class for a capitalised name, a submodule otherwise. Called, it is a pass-through decorator."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__package__ = name
        self.__file__ = __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, _StubLoader(), is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full not in sys.modules and name[:1].isupper():
            value: Any = type(name, (_StubBase,), {"__module__": self.__name__})
        else:
            value = sys.modules.setdefault(full, _StubModule(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


class _StubLoader:
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> _StubModule:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _StubFinder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "triton" or name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, _StubLoader(), is_package=True)
        return None


def install() -> None:
    """Does nothing where a real triton is installed."""
    if importlib.util.find_spec("triton") is not None:
        return
    sys.meta_path.append(_StubFinder())
    import triton
    import triton.backends
    import triton.language
    import triton.runtime.autotuner
    import triton.runtime.cache
    import triton.runtime.jit

    class Config:
        def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 2, **extra: Any) -> None:
            self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages

    class constexpr:  # the name that annotations use
        def __init__(self, value: Any = None) -> None:
            self.value = value

    class StubError(Exception):
        pass

    triton.__version__ = "3.0.0"
    triton.cdiv = lambda a, b: -(a // -b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
    triton.Config = Config
    triton.language.constexpr = constexpr
    triton.backends.backends = {}  # torch.utils._triton.has_triton() looks here and must find nothing
    triton.runtime.autotuner.OutOfResources = StubError
    triton.runtime.autotuner.PTXASError = StubError

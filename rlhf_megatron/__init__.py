"""A Megatron-centric 3D-parallel reinforcement-learning trainer for very large language models.

Read `rlhf_megatron/controller/scheduler/loop.py` first: everything else exists to serve that page.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rlhf_megatron.mcore_patch import quiet_known_warnings

if TYPE_CHECKING:
    from rlhf_megatron.api import Run as Run
    from rlhf_megatron.api import RunFailed as RunFailed
    from rlhf_megatron.api import load_config as load_config
    from rlhf_megatron.api import report as report
    from rlhf_megatron.api import reward_model as reward_model
    from rlhf_megatron.api import sft as sft
    from rlhf_megatron.api import train as train

quiet_known_warnings()  # before anything imports megatron-core; needs the standard library only

__version__ = "0.2.0"
_API = ("Run", "RunFailed", "load_config", "report", "reward_model", "sft", "train")


def __getattr__(name: str) -> Any:
    """Return a name of the public API (docs/api.md), imported at its first use. Raise
    AttributeError for any other name.
    """
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("rlhf_megatron.api"), name)

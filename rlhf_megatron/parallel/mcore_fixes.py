"""Defects of megatron-core without Transformer Engine and Apex, mended on any device. `PATCHES` is the whole list.

Each looks first whether the installed version still has the defect, but for the last: its mending changes nothing where
there is none.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_megatron.parallel.mcore_patch import Patch, apply_all


def _router_gemm() -> None:
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    moe_utils.te_general_gemm = None


def _has_no_router_gemm() -> bool:
    return not hasattr(importlib.import_module("megatron.core.transformer.moe.moe_utils"), "te_general_gemm")


def _recomputes_with_fp8() -> bool:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    return bool(random.CheckpointWithoutOutput().fp8)


def _recompute_without_fp8() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    init = random.CheckpointWithoutOutput.__init__

    def __init__(self: Any, fp8: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, fp8 or None, *args, **kwargs)

    random.CheckpointWithoutOutput.__init__ = __init__


def _needs_a_saved_step() -> bool:
    """Loads one parameter whose moments lack "step", as checkpoints do, into a stand-in for the optimizer."""
    distributed_optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    parameter = torch.zeros(1)
    stand_in = SimpleNamespace(
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        model_param_group_index_map={parameter: (0, 0)},
        optimizer=SimpleNamespace(param_groups=[{"params": [parameter]}], state={parameter: {"step": torch.zeros(())}}),
    )
    try:
        distributed_optimizer._set_main_param_and_optimizer_states(stand_in, parameter, {"param": torch.ones(1)})
    except KeyError:
        return True
    return False


def _optimizer_load_step() -> None:
    distributed_optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    set_states = distributed_optimizer._set_main_param_and_optimizer_states

    def with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        set_states(self, model_param, {**({"step": state["step"]} if "step" in state else {}), **tensors})

    distributed_optimizer._set_main_param_and_optimizer_states = with_step


def _optimizer_shared_step() -> None:
    distributed_optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    load = distributed_optimizer.load_state_dict

    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    distributed_optimizer.load_state_dict = load_state_dict


PATCHES = (
    Patch(
        "transformer.moe.moe_utils.te_general_gemm",
        "undefined without Transformer Engine: every forward pass of an MoE router ends in NameError",
        _router_gemm,
        "0.16.1",
        _has_no_router_gemm,
    ),
    Patch(
        "tensor_parallel.random.CheckpointWithoutOutput.__init__",
        "`self.fp8 = fp8 is not None` with the default fp8=False: selective recompute asks for Transformer Engine",
        _recompute_without_fp8,
        is_needed=_recomputes_with_fp8,
    ),
    Patch(
        "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "loading a checkpoint with torch's AdamW ends in KeyError 'step': it is no saved tensor",
        _optimizer_load_step,
        is_needed=_needs_a_saved_step,
    ),
    Patch(
        "optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
        "all parameters get one `step` tensor, which AdamW then counts up once a parameter: silently wrong updates",
        _optimizer_shared_step,
    ),
)

_state = {"is_applied": False}


def apply() -> None:
    """Mend once in this process. Imports megatron-core."""
    if not _state["is_applied"]:
        _state["is_applied"] = True
        apply_all(PATCHES)

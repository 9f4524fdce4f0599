"""The world of one rank without its peers, and what stands in for values that nobody computes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule


class AnswersAll(dist.Store):
    """A rendezvous at which nobody waits: a key that was never set is an identity of NCCL."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.kept[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.kept.get(key, b"\7" * 128)

    def add(self, key: str, value: int) -> int:
        total = int(self.kept.get(key, b"0")) + value
        self.kept[key] = str(total).encode()
        return total

    def wait(self, *_: Any) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return False

    def compare_set(self, key: str, expected: Any, value: Any) -> bytes:
        self.set(key, value)
        return self.kept[key]

    def delete_key(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self.kept)

    def set_timeout(self, *_: Any) -> None:
        pass

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return False


class NoWeights:
    """A source of weights whose values mean nothing."""

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        return tuple(self.tensor(hf) for hf in rule.hf_tensors)

    def get_dtype_name(self, rule: WeightRule) -> str:
        return "bfloat16"

    def tensor(self, hf: HFTensor) -> Tensor:
        return torch.zeros(hf.shape, dtype=torch.bfloat16)


def _with_nobody(common: Any, options_of_nccl: Any) -> Any:
    """A group on the CPU whose collectives do nothing."""
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size)


dist.Backend.register_backend("nobody", _with_nobody, extended_api=True, devices=["cpu"])


@contextlib.contextmanager
def alone(
    layout: ParallelLayout, rank: int, hf_config: HFConfig, loads_weights: bool = True
) -> Iterator[World]:
    """The world of a rank of `layout`. Where `loads_weights` is not set, none are copied, which a
    large model needs.
    """
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = AnswersAll()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.distributed.distributed_c10d._store_based_barrier"))
        dist.init_process_group(
            "cpu:nobody,cuda:nccl", store=store, rank=rank, world_size=layout.world_size
        )
        try:
            world = create_world(layout, device)
            for patch in _stand_ins(hf_config, loads_weights):
                stack.enter_context(patch)
            yield world
        finally:
            destroy_world()


def _stand_ins(hf_config: HFConfig, loads_weights: bool) -> list[Any]:
    """Verdicts on values are good ones, and experts get as many tokens each."""
    from megatron.core.transformer.moe.token_dispatcher import (
        MoEAllGatherTokenDispatcher,
        MoEAlltoAllTokenDispatcher,
    )

    from rlhf_megatron.ranks.workers.megatron_optimizer import MegatronStepOptimizer

    judge = MegatronStepOptimizer.check_finiteness
    gathered = MoEAllGatherTokenDispatcher.dispatch_postprocess
    exchanged = MoEAlltoAllTokenDispatcher.preprocess

    def judged(self: Any, losses: Any) -> tuple[int, float]:
        # the root of a negative sum, a verdict that is none
        with contextlib.suppress(TypeError, KeyError):
            judge(self, losses)
        return 0, 1.0

    def after_gather(self: Any, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, counts, probs = gathered(self, hidden, probs)
        return hidden, even(len(hidden), len(counts)), probs

    def before_exchange(self: Any, routing_map: Tensor) -> Tensor:
        counts: Tensor = exchanged(self, routing_map)
        sent = even(self.num_out_tokens, self.num_experts)
        experts = self.num_local_experts
        ranks = self.ep_size
        if self.ep_size > 1 or self.tp_size > 1:
            write(self.input_splits, sent.view(ranks, experts).sum(1))
            write(self.output_splits, sent[:experts].sum().expand(ranks))
            write(self.output_splits_tp, (sent[:experts].sum() * ranks).expand(self.tp_size))
        others = ranks * self.tp_size
        if self.num_local_experts > 1:
            write(self.num_global_tokens_per_local_expert, sent[:experts].expand(others, experts))
        write(counts, sent[:experts] * others)
        return counts

    patches = [
        mock.patch.object(MegatronStepOptimizer, "check_finiteness", judged),
        mock.patch.object(MoEAllGatherTokenDispatcher, "dispatch_postprocess", after_gather),
        mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", before_exchange),
        mock.patch("rlhf_megatron.ranks.workers.trained_model.check_parameters_finite"),
        mock.patch("rlhf_megatron.ranks.workers.head_backend.try_triton_kernel", return_value=""),
        mock.patch(
            "rlhf_megatron.ranks.kernels.policy_row_loss.try_triton_kernel", return_value=""
        ),
        mock.patch(
            "rlhf_megatron.ranks.kernels.policy_row_loss._describe_kernel_problem", return_value=""
        ),
    ]
    if not loads_weights:
        patches.append(
            mock.patch("rlhf_megatron.ranks.workers.megatron_backend.load_weights_on_rank")
        )
    return [*patches, _evenly_selected(hf_config)]


@contextlib.contextmanager
def _evenly_selected(hf_config: HFConfig) -> Iterator[None]:
    """A mask of experts by tokens selects what an even routing would: how many is read
    from the device.
    """
    from rlhf_megatron.weights.families.family_lookup import find_model_family

    arguments = find_model_family(hf_config).make_transformer_arguments(hf_config)
    if not (num_experts := arguments.get("num_moe_experts")):
        yield
        return
    choices = int(arguments["moe_router_topk"])

    def masked_select(values: Tensor, mask: Tensor) -> Tensor:
        # its indices, as CUDA's kernel has them
        torch.nonzero_static(mask, size=mask.numel() * choices // num_experts)
        return values.new_empty(mask.numel() * choices // num_experts)

    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("masked_select", masked_select, "CUDA", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def even(total: int, parts: int) -> Tensor:
    """[parts] int64 with that sum."""
    return torch.arange(total + parts - 1, total - 1, -1) // parts


def write(there: Tensor, values: Tensor) -> None:
    """Device memory is host memory: what the host will read of it is written before it waits."""
    assert there.is_contiguous() and there.shape == values.shape, (
        f"{values.shape} into {there.shape}"
    )
    values = values.to(there.dtype).contiguous()
    ctypes.memmove(there.data_ptr(), values.data_ptr(), values.nbytes)

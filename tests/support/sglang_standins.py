"""Layers with the class names, attributes and parameter layouts of SGLang's, for one tp rank.

They slice by themselves, by the rule that heads, rows, columns and experts are dealt out evenly in
the order of ranks. SGLang's own layers are held against the same expectations
in test_sglang_layers.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

HEAD = 2  # rows of a head


class UnquantizedLinearMethod:
    pass


class UnquantizedFusedMoEMethod:
    pass


class Layer(nn.Module):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.tp_rank = rank
        self.tp_size = size
        self.quant_method: object = UnquantizedLinearMethod()

    def hold(self, **parameters: Tensor) -> None:
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value.clone()))


class ColumnParallelLinear(Layer):
    pass


class MergedColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, rank: int, size: int, *members: Tensor) -> None:
        super().__init__(rank, size)
        self.output_sizes = [len(member) for member in members]
        self.hold(weight=torch.cat([member.chunk(size)[rank] for member in members]))


class QKVParallelLinear(ColumnParallelLinear):
    def __init__(
        self, rank: int, size: int, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor
    ) -> None:
        super().__init__(rank, size)
        heads = len(k) // HEAD
        self.num_kv_head_replicas = max(1, size // heads)
        self.q_proj_shard_size = len(q) // size
        self.kv_proj_shard_size = self.v_proj_shard_size = (
            len(k) * self.num_kv_head_replicas // size
        )
        own = rank // self.num_kv_head_replicas

        def shard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return torch.cat(
                [q.chunk(size)[rank], *(x.split(self.kv_proj_shard_size)[own] for x in (k, v))]
            )

        self.hold(weight=shard(q, k, v))
        if biases:
            self.hold(bias=shard(*biases))


class RowParallelLinear(Layer):
    def __init__(self, rank: int, size: int, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(rank, size)
        self.hold(weight=weight.chunk(size, 1)[rank])
        if bias is not None:
            self.hold(bias=bias)


class VocabParallelEmbedding(Layer):
    def __init__(self, rank: int, size: int, weight: Tensor, padding: int = 4) -> None:
        super().__init__(rank, size)
        padded = -(-len(weight) // (padding * size)) * padding
        start, end = (min(len(weight), number * padded) for number in (rank, rank + 1))
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        self.hold(
            weight=torch.cat(
                [weight[start:end], torch.zeros(padded - (end - start), weight.shape[1])]
            )
        )


class ReplicatedLinear(Layer):
    def __init__(self, weight: Tensor) -> None:
        super().__init__(0, 1)
        self.hold(weight=weight)


class FusedMoE(nn.Module):
    def __init__(
        self,
        rank: int,
        size: int,
        experts: list[tuple[Tensor, Tensor, Tensor]],
        ep_size: int = 1,
        **changes: bool,
    ) -> None:
        """`experts`: gate, up and down of each. tp ranks are dealt out to ep groups first."""
        super().__init__()
        self.quant_method: object = UnquantizedFusedMoEMethod()
        self.layer_id = 0
        self.num_experts = self._num_global_routed = len(experts)
        self.num_fused_shared_experts = 0
        self.moe_tp_size = size // ep_size
        self.moe_ep_size = ep_size
        self.moe_ep_rank, self.moe_tp_rank = divmod(rank, self.moe_tp_size)
        self.num_local_experts = len(experts) // ep_size
        self.use_triton_kernels = changes.get("use_triton_kernels", False)
        self.use_flashinfer_trtllm_moe = changes.get("use_flashinfer_trtllm_moe", False)
        self.use_padded_loading = changes.get("use_padded_loading", False)
        own = experts[self.moe_ep_rank * self.num_local_experts :][: self.num_local_experts]
        part = self.moe_tp_rank
        parts = self.moe_tp_size
        order = (1, 0) if self.use_flashinfer_trtllm_moe else (0, 1)
        w13 = torch.stack(
            [torch.cat([expert[i].chunk(parts)[part] for i in order]) for expert in own]
        )
        w2 = torch.stack([expert[2].chunk(parts, 1)[part] for expert in own])
        if self.use_triton_kernels:
            w13 = w13.transpose(1, 2).contiguous()
            w2 = w2.transpose(1, 2).contiguous()
        for name, value in (("w13_weight", w13), ("w2_weight", w2)):
            self.register_parameter(name, nn.Parameter(value.clone()))

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        first = self.moe_ep_rank * self.num_local_experts
        return expert - first if first <= expert < first + self.num_local_experts else -1


def tree(**layers: nn.Module) -> nn.Module:
    """A model of these layers; names with __ for dots."""
    root = nn.Module()
    for name, layer in layers.items():
        *path, last = name.split("__")
        place = root
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.add_module(last, layer)
    return root

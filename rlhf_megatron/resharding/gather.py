"""One bucket: tp shards to the sender, joined, converted to Hugging Face tensors, cast, laid into a flat buffer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.models.table import Rule, join
from rlhf_megatron.resharding.digest import as_hex, digest
from rlhf_megatron.resharding.manifest import TensorEntry
from rlhf_megatron.resharding.plan import Bucket


def pack_shards(bucket: Bucket, shards: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """This rank's shards of a bucket, cast and flat: what it gives to `gather_packed`. Replicated ones are left out."""
    flat = [shards[rule.megatron_name].to(dtype).reshape(-1) for rule in _sharded(bucket)]
    if not flat:
        return torch.empty(0, dtype=dtype)
    return torch.cat(flat)


def gather_packed(mine: Tensor, tp_group: ProcessGroup) -> list[Tensor]:
    """The packed shards of all tp ranks, in rank order, on tp rank 0; [] elsewhere. All of the group call."""
    is_sender = tp_group.rank() == 0
    parts = [torch.empty_like(mine) for _ in range(tp_group.size())] if is_sender else []
    if mine.numel():
        raw = [part.view(torch.uint8) for part in parts]
        dist.gather(mine.view(torch.uint8), raw or None, group=tp_group, group_dst=0)
    return parts


def unpack_shards(bucket: Bucket, packed: list[Tensor], shards: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Returns by Megatron name the shards of all tp ranks; of replicated tensors this rank's own."""
    gathered: dict[str, list[Tensor]] = {}
    start = 0
    for rule in bucket.rules:
        own = shards[rule.megatron_name]
        if rule.split == "replicated" or not packed:
            gathered[rule.megatron_name] = [own]
            continue
        gathered[rule.megatron_name] = [part[start : start + own.numel()].view(own.shape) for part in packed]
        start += own.numel()
    return gathered


def write_bucket(bucket: Bucket, gathered: Mapping[str, list[Tensor]], dtype: str, buffer: Tensor) -> list[TensorEntry]:
    """Join, convert and cast into `buffer` ([>= bucket.num_bytes] uint8, host memory). Returns the manifest's entries,
    with digests of what stands in the buffer."""
    entries = []
    slots = iter(bucket.slots)
    for rule in bucket.rules:
        full = join(rule.split, gathered[rule.megatron_name])
        for tensor in rule.to_hf(full):
            slot = next(slots)
            assert tuple(tensor.shape) == slot.hf.shape, f"{slot.hf.name}: {tuple(tensor.shape)} is not {slot.hf.shape}"
            target = buffer[slot.offset : slot.offset + slot.num_bytes].view(getattr(torch, dtype)).view(slot.hf.shape)
            target.copy_(tensor)
            entries.append(TensorEntry(slot.hf.name, dtype, slot.hf.shape, slot.offset, as_hex(digest(target))))
    return entries


def _sharded(bucket: Bucket) -> list[Rule]:
    return [rule for rule in bucket.rules if rule.split != "replicated"]

"""Moments and float32 parameters as one full tensor a parameter: checkpoints load under any layout and optimizer.

Megatron's own formats differ between its plain and its distributed optimizer. And where the latter gathers its shards
("fully_reshardable", 0.16.1), the padding between buckets is left out, though it is counted where the parameters are
cut out again: what lies behind a padded bucket would be saved shifted, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from rlhf_megatron.workers.kept_state import MAIN, MOMENTS, restored, store


@dataclass(frozen=True)
class Held:
    """The state that this rank's optimizer has of one model parameter."""

    model: nn.Parameter
    main: Tensor | None  # what is stepped on: `model`, its float32 copy, or a flat shard of these; None: no part of it
    span: slice | None  # the elements of the flattened parameter that `main` has; None: all of them
    state: dict[str, Tensor]  # the inner optimizer's; that of `streamed_adam` also has the copy that `main` stands for
    group: dist.ProcessGroup | None  # ranks that share the parameter out; None where `span` is

    def tensors(self) -> dict[str, Tensor]:
        """Name in a checkpoint -> this rank's part of it. Float32 parameters are in the checkpoint as the model's."""
        return {name: restored(kept, self.part) for name, kept in self.kept().items()}

    def kept(self) -> dict[str, Tensor]:
        """The same tensors as they are kept between steps."""
        names = [*MOMENTS, *([] if self.model.dtype == torch.float32 else [MAIN])]
        empty = torch.empty(0, device=self.model.device)
        if self.main is None:
            return dict.fromkeys(names, empty)
        parts = self.state if MAIN in self.state else {**self.state, MAIN: self.main}
        return {name: parts[name] for name in names}

    @property
    def part(self) -> Tensor:
        """The part of the model's parameter that this rank steps on."""
        model = self.model.detach()
        return model if self.span is None else model.view(-1)[self.span]

    def load(self, name: str, value: Tensor) -> None:
        """Put what a checkpoint has under a name of `tensors` into place; the parameter is loaded already."""
        store(self.kept()[name], value, self.part)


def held_parameters(optimizer: Any) -> Iterator[Held]:
    """All model parameters of this rank, in an order that is the same on all ranks that share them out."""
    for part in optimizer.chained_optimizers:
        if any(
            len(part.optimizer.state[main]) == 0 for group in part.optimizer.param_groups for main in group["params"]
        ):
            part.init_state_fn(part.optimizer, part.config)  # a fused Adam before its first step
        yield from _shards(part) if isinstance(part, DistributedOptimizer) else _whole(part)


def sharded_state(optimizer: Any, model_state: dict[str, Any], is_loading: bool) -> dict[int, dict[str, Any]]:
    """Sharded tensors for megatron's distributed checkpoint, by `held_parameters`' order. All ranks.

    `model_state`: the model's, with the parameters themselves as data.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    of_parameter = {id(entry.data): entry for entry in nested_values(sharded)}
    all_held = list(held_parameters(optimizer))
    writers = [0] * len(all_held) if is_loading else _writers(all_held)
    return {
        number: {
            name: make_sharded_optimizer_tensor(
                _written_by(writer, of_parameter[id(held.model)], held),
                _target(held, tensor) if is_loading else _full(held, tensor, writer),
                prefix=f"optimizer.state.{name}",
            )
            for name, tensor in held.tensors().items()
        }
        for number, (held, writer) in enumerate(zip(all_held, writers, strict=True))
    }


@torch.no_grad()
def load_state(optimizer: Any, loaded: dict[int, dict[str, Tensor]], num_steps: int) -> None:
    """Undo `sharded_state`. `num_steps`: optimizer steps behind this state."""
    for number, held in enumerate(held_parameters(optimizer)):
        for name in held.kept():
            full = loaded[number][name]
            held.load(name, full if held.span is None else full.flatten()[held.span])
        if "step" in held.state:  # torch's AdamW
            held.state["step"].fill_(num_steps)
    for part in optimizer.chained_optimizers:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["step"] = num_steps  # where a fused Adam counts


def _whole(part: Any) -> Iterator[Held]:
    if hasattr(part, "float16_groups"):
        models = [*chain(*part.float16_groups), *chain(*part.fp32_from_fp32_groups)]
        mains = [*chain(*part.fp32_from_float16_groups), *chain(*part.fp32_from_fp32_groups)]
    else:
        models = mains = part.get_parameters()
    for model, main in zip(models, mains, strict=True):
        yield Held(model, main, None, part.optimizer.state[main], None)


def _shards(part: DistributedOptimizer) -> Iterator[Held]:
    for buffer in part.buffers:
        for model in buffer.param_index_map:
            if model not in part.model_param_gbuf_map:
                yield Held(model, None, slice(0, 0), {}, part.data_parallel_group)
                continue
            group, index = part.model_param_group_index_map[model]
            main = part.optimizer.param_groups[group]["params"][index]
            span = part._get_model_param_range_map(model)["param"]
            yield Held(model, main, slice(span.start, span.end), part.optimizer.state[main], part.data_parallel_group)


def _target(held: Held, part: Tensor) -> Tensor:
    """Return the tensor to load into. Rows that pad the vocabulary here but not in the file stay zero."""
    return part if held.span is None else torch.zeros(held.model.shape)


def _writers(all_held: Sequence[Held]) -> list[int]:
    """Choose, for each parameter, the rank of its group that writes what is put together of it, about as many bytes
    each.

    Megatron has the first rank write all model parameters.
    """
    loads: dict[int, list[int]] = {}
    writers = []
    for held in all_held:
        if held.span is None:
            writers.append(0)
            continue
        load = loads.setdefault(id(held.group), [0] * dist.get_world_size(held.group))
        load[0] += held.model.nbytes
        writers.append(load.index(min(load)))
        load[writers[-1]] += 4 * held.model.numel() * len(held.tensors())
    return writers


def _written_by(writer: int, entry: Any, held: Held) -> Any:
    """`entry` of the model, as one whose first replica is the one on rank `writer` of the group."""
    if writer == 0:
        return entry
    *others, number = entry.replica_id  # the last one counts the ranks of the data-parallel group
    return replace(entry, replica_id=(*others, (number - writer) % dist.get_world_size(held.group)))


def _full(held: Held, part: Tensor, writer: int) -> Tensor:
    """The whole tensor of a shard, on the rank of the group that writes it; a blank on the others."""
    if held.span is None:
        return part
    full = torch.zeros(held.model.numel(), device=held.model.device)
    full[held.span] = part.detach()
    dist.all_reduce(full, group=held.group)
    is_writer = dist.get_rank(held.group) == writer
    return full.view(held.model.shape).cpu() if is_writer else torch.zeros(()).expand(held.model.shape)

"""Moments and float32 parameters as one full tensor a parameter: checkpoints load under any layout
and optimizer.

Megatron's own formats differ between its plain and its distributed optimizer. And where the latter
gathers its shards ("fully_reshardable", 0.16.1), the padding between buckets is left out, though it
is counted where the parameters are cut out again: what lies behind a padded bucket would be saved
shifted, without an error.
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

from rlhf_megatron.ranks.workers.optimizer_state_format import (
    MAIN,
    MOMENTS,
    decode_float32_state,
    encode_float32_state,
)


@dataclass(frozen=True)
class ParameterState:
    """The optimizer state of one model parameter on this rank."""

    model_param: nn.Parameter
    # what is stepped on: `model_param`, its float32 copy, or a flat shard of these;
    # None: no part of it
    main_param: Tensor | None
    # the elements of the flattened parameter that `main_param` has; None: all of them
    element_range: slice | None
    # the inner optimizer's; that of `streamed_adam` also has the copy that `main_param` stands for
    optimizer_state: dict[str, Tensor]
    # ranks that share the parameter out; None where `element_range` is
    sharing_group: dist.ProcessGroup | None

    def decode_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of the moments and the float32 parameter in float32, by the names
        in a checkpoint. A float32 model has no separate parameter here.
        """
        return {
            name: decode_float32_state(kept, self.model_shard)
            for name, kept in self.get_stored_tensors().items()
        }

    def get_stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of `decode_tensors` as they are stored between steps; empty tensors
        where this rank has no part.
        """
        names = [*MOMENTS, *([] if self.model_param.dtype == torch.float32 else [MAIN])]
        empty = torch.empty(0, device=self.model_param.device)
        if self.main_param is None:
            return dict.fromkeys(names, empty)
        parts = (
            self.optimizer_state
            if MAIN in self.optimizer_state
            else {**self.optimizer_state, MAIN: self.main_param}
        )
        return {name: parts[name] for name in names}

    @property
    def model_shard(self) -> Tensor:
        """Return the part of the model's parameter that this rank updates."""
        model = self.model_param.detach()
        return model if self.element_range is None else model.view(-1)[self.element_range]

    def decode_first_values(self, num_values: int) -> tuple[Tensor, Tensor]:
        """Return (the first `num_values` values of the model's parameter, the float32 parameter
        that the optimizer steps on) of this rank's part, both flat. They are the same tensor for a
        float32 model.
        """
        weight = self.model_shard.reshape(-1)[:num_values]
        stored_main = self.get_stored_tensors().get(MAIN)
        if stored_main is None:
            return weight, weight
        return weight, decode_float32_state(stored_main.reshape(-1)[:num_values], weight)

    def load_tensor(self, state_name: str, value: Tensor) -> None:
        """Store a checkpoint's float32 value under a name of `decode_tensors`. The model's
        parameter must be loaded already.
        """
        encode_float32_state(self.get_stored_tensors()[state_name], value, self.model_shard)


def iterate_parameter_states(optimizer: Any) -> Iterator[ParameterState]:
    """Yield the state of each model parameter of this rank, in an order that is the same on all
    ranks that share the parameters out. Create the state of a fused Adam that has made no step.
    """
    for part in optimizer.chained_optimizers:
        if any(
            len(part.optimizer.state[main]) == 0
            for group in part.optimizer.param_groups
            for main in group["params"]
        ):
            part.init_state_fn(part.optimizer, part.config)  # a fused Adam before its first step
        yield from (
            _iterate_sharded_states(part)
            if isinstance(part, DistributedOptimizer)
            else _iterate_unsharded_states(part)
        )


def make_sharded_optimizer_state(
    optimizer: Any, model_state: dict[str, Any], is_loading: bool
) -> dict[int, dict[str, Any]]:
    """Return sharded tensors for megatron's distributed checkpoint, by the position in
    `iterate_parameter_states` and the tensor's name. All ranks must call it.

    `model_state` is the model's sharded state, with the parameters themselves as data. `is_loading`
    makes tensors to load into, without gathering.
    """
    sharded, _ = extract_sharded_tensors_and_factories(model_state)
    of_parameter = {id(entry.data): entry for entry in nested_values(sharded)}
    all_held = list(iterate_parameter_states(optimizer))
    writers = [0] * len(all_held) if is_loading else _choose_writer_ranks(all_held)
    return {
        number: {
            name: make_sharded_optimizer_tensor(
                _with_writer_rank(writer, of_parameter[id(held.model_param)], held),
                _make_load_target(held, tensor)
                if is_loading
                else _gather_full_tensor(held, tensor, writer),
                prefix=f"optimizer.state.{name}",
            )
            for name, tensor in held.decode_tensors().items()
        }
        for number, (held, writer) in enumerate(zip(all_held, writers, strict=True))
    }


@torch.no_grad()
def load_optimizer_state(
    optimizer: Any, loaded_state: dict[int, dict[str, Tensor]], num_steps: int
) -> None:
    """Load the tensors of `make_sharded_optimizer_state` that a checkpoint returned, and set the
    optimizer's count of steps to `num_steps`.
    """
    for number, held in enumerate(iterate_parameter_states(optimizer)):
        for name in held.get_stored_tensors():
            full = loaded_state[number][name]
            held.load_tensor(
                name, full if held.element_range is None else full.flatten()[held.element_range]
            )
        if "step" in held.optimizer_state:  # torch's AdamW
            held.optimizer_state["step"].fill_(num_steps)
    for part in optimizer.chained_optimizers:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["step"] = num_steps  # where a fused Adam counts


def _iterate_unsharded_states(chained_optimizer: Any) -> Iterator[ParameterState]:
    """Yield the states of the parameters of a plain optimizer, which holds them whole."""
    if hasattr(chained_optimizer, "float16_groups"):
        models = [
            *chain(*chained_optimizer.float16_groups),
            *chain(*chained_optimizer.fp32_from_fp32_groups),
        ]
        mains = [
            *chain(*chained_optimizer.fp32_from_float16_groups),
            *chain(*chained_optimizer.fp32_from_fp32_groups),
        ]
    else:
        models = mains = chained_optimizer.get_parameters()
    for model, main in zip(models, mains, strict=True):
        yield ParameterState(model, main, None, chained_optimizer.optimizer.state[main], None)


def _iterate_sharded_states(chained_optimizer: DistributedOptimizer) -> Iterator[ParameterState]:
    """Yield the states of the parameters of a distributed optimizer, with this rank's range of
    elements, which may be empty.
    """
    for buffer in chained_optimizer.buffers:
        for model in buffer.param_index_map:
            if model not in chained_optimizer.model_param_gbuf_map:
                yield ParameterState(
                    model, None, slice(0, 0), {}, chained_optimizer.data_parallel_group
                )
                continue
            group, index = chained_optimizer.model_param_group_index_map[model]
            main = chained_optimizer.optimizer.param_groups[group]["params"][index]
            span = chained_optimizer._get_model_param_range_map(model)["param"]
            yield ParameterState(
                model,
                main,
                slice(span.start, span.end),
                chained_optimizer.optimizer.state[main],
                chained_optimizer.data_parallel_group,
            )


def _make_load_target(parameter_state: ParameterState, local_shard: Tensor) -> Tensor:
    """Return the tensor to load into. Rows that pad the vocabulary here but not in the file stay
    zero.
    """
    return (
        local_shard
        if parameter_state.element_range is None
        else torch.zeros(parameter_state.model_param.shape)
    )


def _choose_writer_ranks(parameter_states: Sequence[ParameterState]) -> list[int]:
    """Return, for each parameter, the rank of its group that writes the gathered state, chosen so
    that the ranks write about the same number of bytes.

    Megatron has the first rank write all model parameters, which counts.
    """
    loads: dict[int, list[int]] = {}
    writers = []
    for held in parameter_states:
        if held.element_range is None:
            writers.append(0)
            continue
        load = loads.setdefault(
            id(held.sharing_group), [0] * dist.get_world_size(held.sharing_group)
        )
        load[0] += held.model_param.nbytes
        writers.append(load.index(min(load)))
        load[writers[-1]] += 4 * held.model_param.numel() * len(held.decode_tensors())
    return writers


def _with_writer_rank(
    writer_rank: int, sharded_tensor: Any, parameter_state: ParameterState
) -> Any:
    """Return the model's `sharded_tensor` with its replicas renumbered, so that the replica on rank
    `writer_rank` of the group is the first, which is written.
    """
    if writer_rank == 0:
        return sharded_tensor
    # the last one counts the ranks of the data-parallel group
    *others, number = sharded_tensor.replica_id
    return replace(
        sharded_tensor,
        replica_id=(
            *others,
            (number - writer_rank) % dist.get_world_size(parameter_state.sharing_group),
        ),
    )


def _gather_full_tensor(
    parameter_state: ParameterState, local_shard: Tensor, writer_rank: int
) -> Tensor:
    """Return the whole tensor of a shard on the CPU, on the rank of the group that writes the
    tensor; zeros without memory on the other ranks. A tensor that is whole already is returned as
    it is.
    """
    if parameter_state.element_range is None:
        return local_shard
    full = torch.zeros(
        parameter_state.model_param.numel(), device=parameter_state.model_param.device
    )
    full[parameter_state.element_range] = local_shard.detach()
    dist.all_reduce(full, group=parameter_state.sharing_group)
    is_writer = dist.get_rank(parameter_state.sharing_group) == writer_rank
    return (
        full.view(parameter_state.model_param.shape).cpu()
        if is_writer
        else torch.zeros(()).expand(parameter_state.model_param.shape)
    )

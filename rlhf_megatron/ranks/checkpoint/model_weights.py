"""Weights into a sharded model and out of it, one rule of the weight table at a time.
No communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import WeightRule, check_tensor_parallel_split, split_tensor

_HEAD = "output_layer.weight"
_GROUPED = re.compile(r"(?<=\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")
WEIGHT_BUFFER = ".router.expert_bias"  # the router adds it to the scores by which it picks experts


def load_weights_on_rank(
    chunks: Sequence[nn.Module], table: Sequence[WeightRule], source: WeightSource, world: World
) -> None:
    """Fill the parameters of this rank's chunks from `source` by `load_hf_weights`, at the rank's
    place in `world`.
    """
    layout = world.layout
    load_hf_weights(
        chunks,
        table,
        source,
        world.coordinates.tp,
        layout.tp,
        layout.compute_etp_rank(world.rank),
        layout.etp,
    )


def load_hf_weights(
    chunks: Sequence[nn.Module],
    table: Sequence[WeightRule],
    source: WeightSource,
    tp_rank: int,
    tp_size: int,
    etp_rank: int | None = None,
    etp_size: int | None = None,
) -> None:
    """Fill the parameters of this rank's model chunks. Call it on every rank; no rank waits for
    another.

    `etp_rank` and `etp_size` are those of the ranks that split an expert; None means the ranks that
    split the other layers. Values are rounded to each parameter's own type. One rule is in memory
    at a time. The last stage's copy of a tied embedding is filled from the embedding. Raise
    ValueError when the table and the model do not fit.
    """
    etp_rank, etp_size = (
        (tp_rank, tp_size) if etp_rank is None or etp_size is None else (etp_rank, etp_size)
    )
    check_tensor_parallel_split(table, tp_size, etp_size)
    parameters = collect_named_weights(chunks)
    for rule in table:
        for name in _find_names_on_rank(rule, table, parameters):
            full = rule.to_megatron(*source.read_hf_tensors(rule))
            rank, size = (tp_rank, tp_size) if rule.expert is None else (etp_rank, etp_size)
            shard = split_tensor(rule.split, full, size)[rank]
            target = parameters.pop(name)
            if target.shape != shard.shape:
                raise ValueError(
                    f"{name}: the model's parameter has shape {tuple(target.shape)}, the table's"
                    f" shard {tuple(shard.shape)} at tensor parallel size {size}; model and"
                    " config.json differ."
                )
            with torch.no_grad():
                target.copy_(shard)
    if parameters:
        raise ValueError(
            f"the weight table has no rule for the parameters {', '.join(sorted(parameters))}."
        )


def iterate_local_shards(
    chunks: Sequence[nn.Module], table: Sequence[WeightRule]
) -> Iterator[tuple[WeightRule, Tensor | None]]:
    """Yield the rules of this rank's stage with its shards, in table order: views of the
    parameters, no copies; None for an expert that other ranks of the stage hold.

    A tied embedding is yielded once, by the first stage.
    """
    parameters = collect_named_weights(chunks)
    layers = {
        rule.layer for rule in table if rule.expert is not None and rule.megatron_name in parameters
    }
    for rule in table:
        if rule.megatron_name in parameters:
            yield rule, parameters[rule.megatron_name].detach()
        elif rule.expert is not None and rule.layer in layers:
            yield rule, None


def collect_named_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of all chunks by their global names: layers and experts are counted
    over the whole model, and wrappers leave no trace in the names.
    """
    parameters: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        model = unwrap_model_chunk(chunk)
        for name, parameter in model.named_parameters():
            full_name = make_global_name(model, name)
            assert full_name not in parameters, f"two parameters are called {full_name}"
            parameters[full_name] = parameter
    return parameters


def collect_named_weights(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return `collect_named_parameters` and the buffers that are weights too (expert biases of
    routers), which no optimizer moves.
    """
    weights: dict[str, Tensor] = {**collect_named_parameters(chunks)}
    for model in map(unwrap_model_chunk, chunks):
        for name, buffer in model.named_buffers():
            if name.endswith(WEIGHT_BUFFER):
                weights[make_global_name(model, name)] = buffer
    return weights


def unwrap_model_chunk(chunk: nn.Module) -> nn.Module:
    """Return the GPTModel inside of DistributedDataParallel and Float16Module."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def make_global_name(model: Any, name: str) -> str:
    """Return the name of a parameter or module of this chunk with its layer and expert counted over
    the whole model. Matrices of grouped experts (`experts.linear_fc1.weight7`) are named like those
    of experts that run one after the other.
    """
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    local, dot, rest = name[len(prefix) :].partition(".")
    module = model.decoder.layers[int(local)]
    rest = _GROUPED.sub(r".local_experts.\3.\1.\2", rest)
    before, experts, number = rest.partition(".local_experts.")
    if experts:
        number, dot_of_expert, inside = number.partition(".")
        rest = (
            f"{before}{experts}"
            f"{module.mlp.local_expert_indices[int(number)]}"
            f"{dot_of_expert}{inside}"
        )
    # layer_number counts over all stages, from 1
    return f"{prefix}{module.layer_number - 1}{dot}{rest}"


def _find_names_on_rank(
    rule: WeightRule, table: Sequence[WeightRule], parameters: Mapping[str, Tensor]
) -> list[str]:
    """Return the global names of the parameters that a rule fills on this rank: none, one, or the
    embedding and its tied copy.
    """
    names = [rule.megatron_name]
    if rule.owner == "embedding" and not any(r.megatron_name == _HEAD for r in table):
        names.append(_HEAD)
    return [name for name in names if name in parameters]

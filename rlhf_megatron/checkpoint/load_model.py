"""Weights into a sharded model and out of it, one rule of the weight table at a time. No communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.models.table import Rule, check_tensor_parallel, split

_HEAD = "output_layer.weight"


def load_hf(
    chunks: Sequence[nn.Module], table: Sequence[Rule], source: WeightSource, tp_rank: int, tp_size: int
) -> None:
    """Fill the parameters of this rank's model chunks. Call on every rank; no rank waits for another.

    Values are rounded to each parameter's own type. Memory: one rule at a time. The last stage's copy of a tied
    embedding is filled from the embedding. Raises ValueError when the table and the model do not fit.
    """
    check_tensor_parallel(table, tp_size)
    parameters = named_parameters(chunks)
    for rule in table:
        for name in _names_on_this_rank(rule, table, parameters):
            full = rule.to_megatron(*source.hf_tensors(rule))
            shard = split(rule.split, full, tp_size)[tp_rank]
            target = parameters.pop(name)
            if target.shape != shard.shape:
                raise ValueError(
                    f"{name}: the model's parameter has shape {tuple(target.shape)}, the table's shard"
                    f" {tuple(shard.shape)} at tensor parallel size {tp_size}; model and config.json differ."
                )
            with torch.no_grad():
                target.copy_(shard)
    if parameters:
        raise ValueError(f"the weight table has no rule for the parameters {', '.join(sorted(parameters))}.")


def local_shards(chunks: Sequence[nn.Module], table: Sequence[Rule]) -> Iterator[tuple[Rule, Tensor]]:
    """This rank's shards with their rules, in table order: views of the parameters, no copies.

    A tied embedding is given once, by the first stage.
    """
    parameters = named_parameters(chunks)
    for rule in table:
        if rule.megatron_name in parameters:
            yield rule, parameters[rule.megatron_name].detach()


def named_parameters(chunks: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters of all chunks under their global names: layers counted over the whole model, wrappers peeled off."""
    parameters: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        for name, parameter in model.named_parameters():
            full_name = global_name(model, name)
            assert full_name not in parameters, f"two parameters are called {full_name}"
            parameters[full_name] = parameter
    return parameters


def unwrap(chunk: nn.Module) -> nn.Module:
    """The GPTModel inside of DistributedDataParallel and Float16Module."""
    while isinstance(inner := getattr(chunk, "module", None), nn.Module):
        chunk = inner
    return chunk


def global_name(model: Any, name: str) -> str:
    """Name of a parameter or module of this chunk, with its layer counted over the whole model."""
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    local, dot, rest = name[len(prefix) :].partition(".")
    layer = model.decoder.layers[int(local)].layer_number - 1  # layer_number counts over all stages, from 1
    return f"{prefix}{layer}{dot}{rest}"


def _names_on_this_rank(rule: Rule, table: Sequence[Rule], parameters: dict[str, nn.Parameter]) -> list[str]:
    """Global names of the parameters that a rule fills here: none, one, or the embedding and its tied copy."""
    names = [rule.megatron_name]
    if rule.owner == "embedding" and not any(r.megatron_name == _HEAD for r in table):
        names.append(_HEAD)
    return [name for name in names if name in parameters]

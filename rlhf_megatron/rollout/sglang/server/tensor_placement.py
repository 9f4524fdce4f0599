"""Where the parts of Hugging Face tensors stand in the model of one SGLang rank: which parameter,
which part of them.

How a layer is sharded, fused and padded is read off the layer itself. Its kind is told by the name
of its class, so that nothing of SGLang is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.rollout.sglang.server import sglang_runtime
from rlhf_megatron.weights.quantised_weights import SCALE
from rlhf_megatron.weights.weight_table import TensorSpan

FUSED_MEMBERS = {  # SGLang's fused part -> its Hugging Face members in order
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
# SGLang's [expert, rows, columns]
EXPERT_MEMBERS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
# GPT-OSS: an expert's entry of tensors whose input comes first, gate and up by turns.
EXPERT_ENTRY_NAMES = {
    "w13_weight": "gate_up_proj",
    "w13_weight_bias": "gate_up_proj_bias",
    "w2_weight": "down_proj",
    "w2_weight_bias": "down_proj_bias",
}
EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_EXPERT_PATTERN = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight(_scale_inv)?")
_EXPERT_ENTRY_PATTERN = re.compile(r"(.*\.experts)\.(\d+)\.((?:gate_up|down)_proj(?:_bias)?)")
# on GPUs it stands behind the other experts
_SHARED_EXPERT_PATTERN = re.compile(r"(.*)\.shared_experts\.(\w+)\.weight(_scale_inv)?")
_UNQUANTISED_MARK = "Unquant"  # names of SGLang's methods that keep weights as they come


class IncomparableFormError(ValueError):
    """The engine's form of a tensor is of another kind than the tensor, so the two
    cannot be compared.
    """


class SizeMismatchError(ValueError):
    """The engine's parameter is of another size than the tensor's."""


@dataclass(frozen=True)
class HeldTensorPart:
    """The part of a tensor that this rank holds, and its place in the whole tensor."""

    values: Tensor  # a view of what stands in the model, without padding
    axis: int
    start: int
    # made by the engine of what stands elsewhere in this rank: a copy, to be looked at only
    is_derived: bool = False

    @property
    def num_entries(self) -> int:
        """Return the length of the part along its axis."""
        return self.values.shape[self.axis]

    @property
    def span(self) -> TensorSpan:
        """Return the span of the whole tensor that the part covers."""
        return TensorSpan(self.axis, self.start, self.num_entries)


def find_held_parts(
    model: Any, parameters: Mapping[str, Tensor], tensor_name: str, shape: tuple[int, ...]
) -> list[HeldTensorPart]:
    """Return the parts of a tensor in this rank: none where the model has no such parameter or
    another rank holds it, several where the rank holds it twice. `parameters` are the model's, by
    name; `shape` is the whole tensor's. Raise IncomparableFormError where the engine keeps another
    form, SizeMismatchError where the sizes do not fit.
    """
    if tensor_name in parameters:
        direct = _find_direct_part(model, parameters[tensor_name], tensor_name, shape)
        return [
            direct,
            *_rebuild_derived_parts(model, tensor_name, direct),
            *_find_untied_head_part(model, parameters, tensor_name, shape),
        ]
    if expert := _EXPERT_PATTERN.fullmatch(tensor_name):
        return list(
            _find_expert_parts(
                model, parameters, expert[1], int(expert[2]), expert[3], expert[4], shape
            )
        )
    for fused, members in FUSED_MEMBERS.items():
        for index, member in enumerate(members):
            own = tensor_name.replace(f".{member}.", f".{fused}.")
            if f".{member}." in tensor_name and own in parameters:
                return [_find_fused_part(model, parameters[own], own, index, shape)]
    if entry := _EXPERT_ENTRY_PATTERN.fullmatch(tensor_name):
        return list(
            _find_expert_entry_parts(model, parameters, entry[1], int(entry[2]), entry[3], shape)
        )
    if shared := _SHARED_EXPERT_PATTERN.fullmatch(tensor_name):
        return list(
            _find_expert_parts(
                model, parameters, f"{shared[1]}.experts", None, shared[2], shared[3], shape
            )
        )
    return []


def list_missing_parameters(
    model: Any, parameters: Mapping[str, Tensor], received_names: set[str]
) -> list[str]:
    """Return the sorted names of the model's parameters that did not come whole. `received_names`
    are Hugging Face names.
    """
    return sorted(
        name
        for name, value in parameters.items()
        if not _has_arrived_whole(model, name, value, received_names)
    )


def _find_direct_part(
    model: Any, parameter: Tensor, tensor_name: str, shape: tuple[int, ...]
) -> HeldTensorPart:
    """Return the part that a parameter of the tensor's own name holds, sharded as its layer's class
    says.
    """
    prefix, _, leaf = tensor_name.rpartition(".")
    layer = model.get_submodule(prefix)
    _require_comparable(layer, parameter)
    if _is_instance_by_name(layer, "VocabParallelEmbedding"):
        return _make_held_part(parameter, 0, layer.shard_indices.org_vocab_start_index, shape)
    if _is_instance_by_name(layer, "RowParallelLinear") and leaf != "bias":
        return _make_held_part(parameter, 1, layer.tp_rank * parameter.shape[1], shape)
    if _is_instance_by_name(layer, "ColumnParallelLinear"):
        return _make_held_part(parameter, 0, layer.tp_rank * parameter.shape[0], shape)
    if leaf == "sinks":  # of this rank's heads
        return _make_held_part(parameter, 0, layer.o_proj.tp_rank * parameter.shape[0], shape)
    if tuple(parameter.shape) != shape:
        raise SizeMismatchError(
            f"the engine's is {list(parameter.shape)}, which is not {list(shape)}"
        )
    return HeldTensorPart(parameter, 0, 0)


def find_tied_head(model: Any, parameters: Mapping[str, Tensor], tensor_name: str) -> Tensor | None:
    """Return the head that an engine keeps beside the embedding `tensor_name`, although config.json
    ties the two, as SGLang does for Qwen3-MoE. Return None where there is no such head, or the
    tensor is not the embedding.
    """
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    return parameters.get(HEAD_NAME) if is_tied and tensor_name == EMBEDDING_NAME else None


def _find_untied_head_part(
    model: Any, parameters: Mapping[str, Tensor], tensor_name: str, shape: tuple[int, ...]
) -> Iterator[HeldTensorPart]:
    """Yield the head's part as a derived part, where the tensor is the embedding of such a head."""
    head = find_tied_head(model, parameters, tensor_name)
    if head is not None:
        yield replace(_find_direct_part(model, head, HEAD_NAME, shape), is_derived=True)


def _rebuild_derived_parts(
    model: Any, tensor_name: str, direct_part: HeldTensorPart
) -> Iterator[HeldTensorPart]:
    """For kv_b_proj of latent attention, yield the matrix rebuilt from the two matrices for each
    head that SGLang computes from it: the rows of keys, and the rows of values. Yield nothing for
    other tensors.
    """
    prefix, _, leaf = tensor_name.removesuffix(".weight").rpartition(".")
    if leaf != "kv_b_proj":
        return
    attention = model.get_submodule(prefix)
    # before the first load; rounded anew
    if attention.w_kc is None or is_quantised_layer(attention.kv_b_proj):
        return
    values = torch.cat([attention.w_kc, attention.w_vc.transpose(1, 2)], 1).flatten(0, 1)
    if values.dtype not in PLAIN_DTYPES:
        raise IncomparableFormError(
            f"w_kc and w_vc stand as {str(values.dtype).removeprefix('torch.')}"
        )
    yield HeldTensorPart(values, 0, direct_part.start, is_derived=True)


def _find_fused_part(
    model: Any, parameter: Tensor, tensor_name: str, index: int, shape: tuple[int, ...]
) -> HeldTensorPart:
    """Return the part of the Hugging Face tensor that is member number `index` of the fused
    parameter `tensor_name`.
    """
    layer = model.get_submodule(tensor_name.rpartition(".")[0])
    _require_comparable(layer, parameter)
    rank = getattr(layer, "tp_rank", 0)
    unit = 1
    if tensor_name.endswith(SCALE):
        unit = layer.quant_method.quant_config.weight_block_size[0]
    if _is_instance_by_name(layer, "ReplicatedLinear"):  # of latent attention
        of_queries = model.get_submodule(
            tensor_name.rpartition(".")[0].rpartition(".")[0]
        ).q_lora_rank
        rank = 0
        sizes = [of_queries, parameter.shape[0] * unit - of_queries]
    elif _is_instance_by_name(layer, "QKVParallelLinear"):
        sizes = [layer.q_proj_shard_size, layer.kv_proj_shard_size, layer.v_proj_shard_size]
        if index:  # fewer key-value heads than ranks: several ranks hold the same one
            rank = getattr(layer, "kv_tp_rank", rank) // layer.num_kv_head_replicas
    else:
        sizes = [size // layer.tp_size for size in layer.output_sizes]
    sizes = [size // unit for size in sizes]
    if parameter.shape[0] != sum(sizes):
        raise SizeMismatchError(
            f"the engine's {tensor_name} is {list(parameter.shape)}, its parts have"
            f" {sum(sizes)} rows"
        )
    values = parameter.narrow(0, sum(sizes[:index]), sizes[index])
    return _make_held_part(values, 0, rank * sizes[index], shape)


def _find_expert_parts(
    model: Any,
    parameters: Mapping[str, Tensor],
    prefix: str,
    expert: int | None,
    member: str,
    scale_suffix: str | None,
    shape: tuple[int, ...],
) -> Iterator[HeldTensorPart]:
    """Yield the parts of one matrix of an expert in the fused expert parameters of this rank.
    `expert` None is the shared expert, where the engine keeps it as one more expert. `scale_suffix`
    is the end of the name of FP8 scales, or None.
    """
    for fused, members in EXPERT_MEMBERS.items():
        parameter = parameters.get(f"{prefix}.{fused}{scale_suffix or ''}")
        if member not in members or parameter is None:
            continue
        layer = model.get_submodule(prefix)
        _require_comparable(layer, parameter)
        if parameter.ndim != 3:
            raise IncomparableFormError(f"it stands in blocks of shape {list(parameter.shape)}")
        axis = 0 if len(members) == 2 else 1
        for slot in _list_own_slots(layer, expert):
            values = parameter[slot].t() if layer.use_triton_kernels else parameter[slot]
            if axis == 0:
                half = values.shape[0] // 2
                values = values.narrow(
                    0, half * (members.index(member) ^ _has_up_first(layer)), half
                )
            size = (
                values.shape[axis] if layer.use_padded_loading else shape[axis] // layer.moe_tp_size
            )
            yield _make_held_part(
                values.narrow(axis, 0, size), axis, layer.moe_tp_rank * size, shape
            )


def _find_expert_entry_parts(
    model: Any,
    parameters: Mapping[str, Tensor],
    prefix: str,
    expert: int,
    entry_kind: str,
    shape: tuple[int, ...],
) -> Iterator[HeldTensorPart]:
    """Yield the parts of an expert's entry of a GPT-OSS tensor that this rank holds."""
    layer = model.get_submodule(prefix)
    for values in _iterate_expert_entries(model, parameters, prefix, expert, entry_kind):
        _require_comparable(layer, values)
        if entry_kind != "down_proj_bias":
            axis = 1 if entry_kind == "gate_up_proj" else 0
            size = shape[axis] // layer.moe_tp_size
            yield _make_held_part(
                values.narrow(axis, 0, size), axis, layer.moe_tp_rank * size, shape
            )
        elif layer.moe_tp_rank == 0:
            yield _make_held_part(values, 0, 0, shape)


def _iterate_expert_entries(
    model: Any, parameters: Mapping[str, Tensor], prefix: str, expert: int, entry_kind: str
) -> Iterator[Tensor]:
    """Yield this rank's entries of an expert in a GPT-OSS parameter, with the input dimension
    first.
    """
    fused = next(name for name, of_entry in EXPERT_ENTRY_NAMES.items() if of_entry == entry_kind)
    parameter = parameters.get(f"{prefix}.{fused}")
    if parameter is None:
        return
    layer = model.get_submodule(prefix)
    for slot in _list_own_slots(layer, expert):
        yield parameter[slot] if layer.use_triton_kernels else parameter[slot].t()


def is_expert_entry(tensor_name: str) -> bool:
    """Return whether the tensor is one expert's entry, which SGLang would load only together with
    those of all experts of its layer.
    """
    return _EXPERT_ENTRY_PATTERN.fullmatch(tensor_name) is not None


def list_values_to_zero(
    model: Any, parameters: Mapping[str, Tensor], tensor_name: str
) -> list[Tensor]:
    """Return the values of this rank that must be zero, because the ranks of an expert add their
    results and another rank has the bias: the expert's down_proj_bias. Empty for other tensors and
    for the first rank.
    """
    entry = _EXPERT_ENTRY_PATTERN.fullmatch(tensor_name)
    if (
        entry is None
        or entry[3] != "down_proj_bias"
        or not model.get_submodule(entry[1]).moe_tp_rank
    ):
        return []
    return list(_iterate_expert_entries(model, parameters, entry[1], int(entry[2]), entry[3]))


def _list_own_slots(layer: Any, expert: int | None) -> list[int]:
    """Return the slots of this rank's parameters that hold the expert; none where other ranks hold
    it. `expert` None is the shared expert.
    """
    if expert is None:
        numbers: Iterable[int] = range(
            layer._num_global_routed, layer._num_global_routed + _count_shared_experts(layer)
        )
    else:
        numbers = sglang_runtime.list_expert_slots(layer.layer_id, expert)
    slots = [layer._map_global_expert_id_to_local_expert_id(number) for number in numbers]
    return [slot for slot in slots if 0 <= slot < layer.num_local_experts]


def _count_shared_experts(layer: Any) -> int:
    """Return the number of shared experts that the layer keeps among the routed ones."""
    return int(layer.num_fused_shared_experts)


def _has_up_first(layer: Any) -> bool:
    """Return whether the layer's kernel stores the rows of up before those of gate."""
    method = layer.quant_method
    return bool(layer.use_flashinfer_trtllm_moe) != bool(
        getattr(method, "load_up_proj_weight_first", False)
    )


def _make_held_part(
    values: Tensor, axis: int, start: int, shape: tuple[int, ...]
) -> HeldTensorPart:
    """Return `values` as the part from `start` on along `axis` of a tensor of this shape, without
    padding. Raise SizeMismatchError where the other dimensions differ.
    """
    others = [size for i, size in enumerate(values.shape) if i != axis]
    if values.ndim != len(shape) or others != [size for i, size in enumerate(shape) if i != axis]:
        raise SizeMismatchError(
            f"the engine's is {list(values.shape)}, which is no part of {list(shape)}"
        )
    start = min(start, shape[axis])
    return HeldTensorPart(
        values.narrow(axis, 0, min(values.shape[axis], shape[axis] - start)), axis, start
    )


def _require_comparable(layer: nn.Module, parameter: Tensor) -> None:
    """Raise IncomparableFormError where the layer quantises the parameter itself, or its type is no
    plain one.
    """
    if is_quantised_layer(layer) and not _keeps_fp8_blocks(layer):
        raise IncomparableFormError(
            f"the engine quantises it ({type(layer.quant_method).__name__})"
        )
    if parameter.dtype not in PLAIN_DTYPES and not (
        _keeps_fp8_blocks(layer) and parameter.dtype == torch.float8_e4m3fn
    ):
        raise IncomparableFormError(f"it stands as {str(parameter.dtype).removeprefix('torch.')}")


def is_quantised_layer(layer: nn.Module) -> bool:
    """Return whether the layer keeps its weights in a quantised form."""
    method = getattr(layer, "quant_method", None)
    return method is not None and _UNQUANTISED_MARK not in type(method).__name__


def _keeps_fp8_blocks(layer: nn.Module) -> bool:
    """Return whether the layer keeps FP8 blocks as the checkpoint has them."""
    method = getattr(layer, "quant_method", None)
    is_given = getattr(getattr(method, "quant_config", None), "is_checkpoint_fp8_serialized", False)
    return bool(is_given and getattr(method, "block_quant", False))


def _is_instance_by_name(layer: nn.Module, class_name: str) -> bool:
    """Return whether the layer's class, or a base of it, has this name."""
    return any(base.__name__ == class_name for base in type(layer).__mro__)


def _has_arrived_whole(
    model: Any, parameter_name: str, parameter: Tensor, received_names: set[str]
) -> bool:
    """Return whether every Hugging Face tensor that this parameter is made of was received, as far
    as this rank holds it. Parameters that a quantising engine makes itself count as received.
    """
    if parameter_name in received_names or (
        parameter_name == HEAD_NAME
        and EMBEDDING_NAME in received_names
        and find_tied_head(model, {HEAD_NAME: parameter}, EMBEDDING_NAME) is not None
    ):
        return True
    prefix, _, leaf = parameter_name.rpartition(".")
    layer = model.get_submodule(prefix)
    if leaf in EXPERT_ENTRY_NAMES and getattr(layer, "with_bias", False):
        held = [
            number
            for number in range(sglang_runtime.count_layer_experts(layer._num_global_routed))
            if _list_own_slots(layer, number)
        ]
        return all(
            f"{prefix}.{number}.{EXPERT_ENTRY_NAMES[leaf]}" in received_names for number in held
        )
    scale = SCALE if leaf.endswith(SCALE) else ""
    if (fused := leaf.removesuffix(scale)) in EXPERT_MEMBERS and (
        not scale or _keeps_fp8_blocks(layer)
    ):
        held = [
            number
            for number in range(sglang_runtime.count_layer_experts(layer._num_global_routed))
            if _list_own_slots(layer, number)
        ]
        owners = [f"{prefix}.{number}" for number in held]
        if _count_shared_experts(layer):
            owners.append(f"{prefix.rpartition('.')[0]}.shared_experts")
        return all(
            f"{owner}.{member}.weight{scale}" in received_names
            for owner in owners
            for member in EXPERT_MEMBERS[fused]
        )
    if (
        leaf not in ("weight", "bias")
        and is_quantised_layer(layer)
        and not _keeps_fp8_blocks(layer)
    ):  # made by the engine
        return True
    for fused, members in FUSED_MEMBERS.items():
        if f".{fused}." in parameter_name:
            return all(
                parameter_name.replace(f".{fused}.", f".{member}.") in received_names
                for member in members
            )
    return False

"""Whether two directories hold the same weights, bit for bit, whatever their layouts. What is
wrong is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rlhf_megatron.weights.conversion.group_processes import run_groups_in_processes
from rlhf_megatron.weights.conversion.stored_model import (
    ConversionItem,
    StoredModel,
    group_items_into_units,
)
from rlhf_megatron.weights.megatron_dir import MegatronReader
from rlhf_megatron.weights.tensor_digest import digest_tensor
from rlhf_megatron.weights.weight_table import split_tensor

_SHOWN = 8
ReportBytes = Callable[[int], None]


def verify_weight_bits(
    reference: StoredModel,
    items: Sequence[ConversionItem],
    candidate: StoredModel,
    reference_digests: Mapping[str, str] | None = None,
    num_processes: int = 1,
    report_bytes: ReportBytes | None = None,
) -> None:
    """Compare all tensors of `candidate` with the tensors of `reference` in the types of `items`,
    bit for bit. Raise ValueError that names the tensors that differ; where a tensor has the content
    of another tensor, the message names the other tensor too.

    `reference_digests`: the digests of the reference's tensors where they are known; None: read the
    reference. `report_bytes` is called with the bytes of each unit that was compared. Where either
    side has one file for each rank, each shard is also compared with the shard that the other
    side's tensors make, so that copies on further ranks are checked too.
    """
    units = group_items_into_units(items)

    def compare_unit(unit_index: int) -> tuple[dict[str, str], dict[str, str], list[str]]:
        """Compare the items of one unit. Return the reference's digests and the candidate's
        digests, both by Hugging Face name, and the problems found.
        """
        wanted = dict[str, str]()
        found = dict[str, str]()
        problems = list[str]()
        for index in units[unit_index]:
            item = items[index]
            names = [hf.name for hf in item.rule.hf_tensors]
            try:
                read = candidate.read_item(item)
                found |= read.compute_digests()
                other: Sequence[Tensor] = ()
                if reference_digests is None or isinstance(candidate.source, MegatronReader):
                    other = (theirs := reference.read_item(item)).tensors
                wanted |= (
                    theirs.compute_digests()
                    if reference_digests is None
                    else {name: reference_digests[name] for name in names}
                )
                stored = item.dtype if item.is_mtp else candidate.source.get_dtype_name(item.rule)
                if stored != item.dtype:
                    problems.append(
                        f"{item.rule.megatron_name} is stored as {stored}, not {item.dtype}"
                    )
                if isinstance(candidate.source, MegatronReader) and not item.is_mtp:
                    problems += _describe_wrong_shards(candidate.source, item, other)
                if isinstance(reference.source, MegatronReader) and not item.is_mtp:
                    problems += _describe_wrong_shards(reference.source, item, read.tensors)
            except ValueError as error:
                problems.append(str(error).rstrip("."))
        return wanted, found, problems

    wanted = dict[str, str]()
    found = dict[str, str]()
    problems = list[str]()
    for number, (theirs, own, more) in run_groups_in_processes(
        range(len(units)), compare_unit, num_processes
    ):
        wanted |= theirs
        found |= own
        problems += more
        if report_bytes is not None:
            report_bytes(sum(items[index].num_bytes for index in units[number]))
    problems += _describe_digest_differences(wanted, found)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{candidate.directory} differs from {reference.directory}:"
            f" {'; '.join(problems[:_SHOWN])}{more}."
        )


def _describe_digest_differences(
    reference_digests: Mapping[str, str], candidate_digests: Mapping[str, str]
) -> list[str]:
    """Return one line for each candidate tensor that has another digest than the reference's
    tensor. Where a reference tensor has the candidate's digest, the line names this tensor.
    """
    owner = {value: name for name, value in reference_digests.items()}
    lines = []
    for name, value in candidate_digests.items():
        if name in reference_digests and value != reference_digests[name]:
            holds = f", it holds {owner[value]}" if value in owner else ""
            lines.append(f"{name} has digest {value}, not {reference_digests[name]}{holds}")
    return lines


def _describe_wrong_shards(
    reader: MegatronReader, item: ConversionItem, tensors: Sequence[Tensor]
) -> list[str]:
    """Return one line for each shard in `reader` that differs from the shard that `tensors`, the
    item's Hugging Face tensors, make. Return [] where the item was cast to another type.
    """
    own = reader.find_stored_rule(item.rule)
    shards = reader.read_shards(own)
    if str(shards[0].dtype) != f"torch.{item.dtype}":
        return []  # cast on the way
    expected = split_tensor(own.split, own.to_megatron(*tensors), len(shards))
    return [
        (
            f"{reader.directory}: the shard of {own.megatron_name} at tp rank {rank} is not the one"
            " that its Hugging Face tensors make"
        )
        for rank, (found, wanted) in enumerate(zip(shards, expected, strict=True))
        if digest_tensor(found) != digest_tensor(wanted)
    ]

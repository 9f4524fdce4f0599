"""Whether two directories hold the same weights, bit for bit, whatever their layouts. What is wrong is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rlhf_megatron.checkpoint.megatron_dir import MegatronReader
from rlhf_megatron.conversion.groups import run_groups
from rlhf_megatron.conversion.model import Item, Model, units_of
from rlhf_megatron.models.table import split
from rlhf_megatron.resharding.digest import digest

_SHOWN = 8
OnBytes = Callable[[int], None]


def verify_bits(
    reference: Model,
    items: Sequence[Item],
    candidate: Model,
    digests: Mapping[str, str] | None = None,
    num_processes: int = 1,
    on_bytes: OnBytes | None = None,
) -> None:
    """Raises ValueError that names the tensors of `candidate` which are not those of `reference` in the types of
    `items`, and where one holds what another should, which that is.

    `digests`: of the reference's tensors, where they are known; else they are read. A file a rank is compared with what
    the tensors of the other side make, so that copies on further ranks count too.
    """
    units = units_of(items)

    def check(number: int) -> tuple[dict[str, str], dict[str, str], list[str]]:
        wanted, found, problems = dict[str, str](), dict[str, str](), list[str]()
        for index in units[number]:
            item = items[index]
            names = [hf.name for hf in item.rule.hf]
            try:
                read = candidate.read(item)
                found |= read.digests()
                other: Sequence[Tensor] = ()
                if digests is None or isinstance(candidate.source, MegatronReader):
                    other = (theirs := reference.read(item)).tensors
                wanted |= theirs.digests() if digests is None else {name: digests[name] for name in names}
                stored = item.dtype if item.is_kept else candidate.source.dtype_of(item.rule)
                if stored != item.dtype:
                    problems.append(f"{item.rule.megatron_name} is stored as {stored}, not {item.dtype}")
                if isinstance(candidate.source, MegatronReader) and not item.is_kept:
                    problems += _wrong_shards(candidate.source, item, other)
                if isinstance(reference.source, MegatronReader) and not item.is_kept:
                    problems += _wrong_shards(reference.source, item, read.tensors)
            except ValueError as error:
                problems.append(str(error).rstrip("."))
        return wanted, found, problems

    wanted, found, problems = dict[str, str](), dict[str, str](), list[str]()
    for number, (theirs, own, more) in run_groups(range(len(units)), check, num_processes):
        wanted |= theirs
        found |= own
        problems += more
        if on_bytes is not None:
            on_bytes(sum(items[index].num_bytes for index in units[number]))
    problems += _differences(wanted, found)
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{candidate.directory} differs from {reference.directory}: {'; '.join(problems[:_SHOWN])}{more}."
        )


def _differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """One line a tensor that is not what it should be."""
    owner = {value: name for name, value in wanted.items()}
    lines = []
    for name, value in found.items():
        if name in wanted and value != wanted[name]:
            holds = f", it holds {owner[value]}" if value in owner else ""
            lines.append(f"{name} has digest {value}, not {wanted[name]}{holds}")
    return lines


def _wrong_shards(reader: MegatronReader, item: Item, tensors: Sequence[Tensor]) -> list[str]:
    own = reader.own(item.rule)
    shards = reader.shards(own)
    if str(shards[0].dtype) != f"torch.{item.dtype}":
        return []  # cast on the way
    expected = split(own.split, own.to_megatron(*tensors), len(shards))
    return [
        f"{reader.directory}: the shard of {own.megatron_name} at tp rank {rank} is not the one that its Hugging Face"
        " tensors make"
        for rank, (found, wanted) in enumerate(zip(shards, expected, strict=True))
        if digest(found) != digest(wanted)
    ]

"""What a conversion would do, from headers or from an index alone: no weights are read and nothing is written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlhf_megatron.checkpoint.hf_reader import INDEX, read_hf_config, read_json
from rlhf_megatron.checkpoint.quantised import BLOCKS, SCALE, SCALES, is_in_fp8
from rlhf_megatron.conversion.model import Item, Model, units_of
from rlhf_megatron.conversion.targets import Target
from rlhf_megatron.models.families.base import HFConfig, kept_prefixes
from rlhf_megatron.models.table import Rule
from rlhf_megatron.resharding.manifest import DTYPE_BYTES

_SHOWN = 8


@dataclass(frozen=True)
class IndexSource:
    """Implements the part of `WeightSource` that needs no weights: an index whose files are elsewhere."""

    dtype: str

    def hf_tensors(self, rule: Rule) -> tuple[object, ...]:
        raise ValueError(
            f"the weights of {rule.megatron_name} are missing; fetch them: an index alone is enough for --dry-run only."
        )

    def dtype_of(self, rule: Rule) -> str:
        return self.dtype


def has_index_alone(directory: Path) -> bool:
    """Whether the files that an index names are all somewhere else."""
    index = directory / INDEX
    return index.is_file() and not list(directory.glob("*.safetensors"))


def model_of_index(directory: Path) -> tuple[Model, list[str]]:
    """(the model in the type that its config.json names, what its index has too much or too little of)."""
    hf_config = read_hf_config(directory)
    plain: HFConfig = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    dtype = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
    names = set(read_json(directory / INDEX).get("weight_map", {}))
    model = Model(plain, IndexSource(dtype), directory, None, {})  # type: ignore[arg-type]
    return model, list(_problems(model.table, names, kept_prefixes(hf_config)))


def _problems(table: Sequence[Rule], names: set[str], kept: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for what is missing, for what is left over, and for what goes along uncounted."""
    wanted = {hf.stored_name for rule in table for hf in rule.hf}
    plain = {name.removesuffix(BLOCKS) for name in names if not name.endswith((SCALE, SCALES))}
    missing = sorted(wanted - plain)
    left_over = sorted(name for name in plain - wanted if not name.startswith(kept or ("\0",)))
    for what, found in (("missing", missing), ("left over", left_over)):
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield f"problem: {what} {len(found)}: {', '.join(found[:_SHOWN])}{more}"
    uncounted = sum(name.startswith(kept or ("\0",)) for name in plain - wanted)
    if uncounted:
        prefixes = ", ".join(f"{prefix}*" for prefix in kept)
        yield f"note: {uncounted} tensors of {prefixes} go along, too; their bytes are in files that are not here"


def describe(model: Model, items: Sequence[Item], target: Target, out: Path, problems: Sequence[str]) -> list[str]:
    """Lines for people: how much is read, what is written, what would stop it."""
    units = units_of(items)
    largest = max(units, key=lambda unit: sum(items[n].num_bytes for n in unit))
    largest_bytes = sum(items[n].num_bytes for n in largest)
    tensors = [hf for item in items for hf in item.rule.hf]
    num_bytes = sum(target.sizes.values())
    parent = next(path for path in out.absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    kinds = {dtype: sum(prod(h.shape) for i in items if i.dtype == dtype for h in i.rule.hf) for dtype in DTYPE_BYTES}
    kept = sum(item.is_kept for item in items)
    lines = [
        f"source: {model.directory}, {model.hf_config.get('model_type')}, {len(tensors)} tensors"
        + (f", {kept} of them kept as they are" if kept else ""),
        "elements: " + ", ".join(f"{count / 1e9:.3f} G {dtype}" for dtype, count in kinds.items() if count),
        *_kinds(items),
        f"units: {len(units)}, the largest {largest_bytes / 1e6:.1f} MB ({items[largest[0]].rule.megatron_name}):"
        f" {2 * largest_bytes / 1e9:.2f} GB and the interpreter a process",
        f"target: {out}, {len(target.sizes)} files, {num_bytes / 1e9:.3f} GB; {parent} has {free / 1e9:.1f} GB free",
        *(f"  {name} {size}" for name, size in list(target.sizes.items())[:_SHOWN]),
    ]
    if len(target.sizes) > _SHOWN:
        lines.append(f"  and {len(target.sizes) - _SHOWN} more")
    lines += problems
    if free < num_bytes:
        lines.append(f"problem: {(num_bytes - free) / 1e9:.1f} GB are missing on the disk")
    return lines


def _kinds(items: Sequence[Item]) -> list[str]:
    """One line for tensors that are alike but for their layer and expert."""
    found: dict[tuple[str, tuple[int, ...], str, str], int] = {}
    for item in items:
        for hf in item.rule.hf:
            dtype = "fp8" if item.block is not None and is_in_fp8(hf.name) else item.dtype
            kind = (_any_number(hf.name), hf.shape, dtype, _any_number(item.rule.megatron_name))
            found[kind] = found.get(kind, 0) + 1
    return [
        f"  {count:>6} x {name} {list(shape)} {dtype} -> {ours}" for (name, shape, dtype, ours), count in found.items()
    ]


def _any_number(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)

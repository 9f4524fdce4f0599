"""What a conversion would do, from headers or from an index alone: no weights are read and
nothing is written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.conversion.conversion_targets import ConversionTarget
from rlhf_megatron.weights.conversion.stored_model import (
    ConversionItem,
    StoredModel,
    group_items_into_units,
)
from rlhf_megatron.weights.families.model_family import HFConfig, find_mtp_prefixes
from rlhf_megatron.weights.hf_reader import read_hf_config, read_json_object
from rlhf_megatron.weights.quantised_weights import BLOCKS, SCALE, SCALES, is_stored_in_fp8
from rlhf_megatron.weights.unread_tensors import (
    find_droppable_kind,
    format_dropped_tensors,
    is_tied_head,
)
from rlhf_megatron.weights.weight_sets import INDEX
from rlhf_megatron.weights.weight_table import WeightRule

_SHOWN = 8


@dataclass(frozen=True)
class WeightIndexSource:
    """Implements the part of `WeightSource` that needs no weights: an index whose files
    are elsewhere.
    """

    dtype: str

    def read_hf_tensors(self, rule: WeightRule) -> tuple[object, ...]:
        """Raise ValueError: the weights are not on this machine."""
        raise ValueError(
            f"the weights of {rule.megatron_name} are missing; fetch them: an index alone is"
            " enough for --dry-run only."
        )

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type that config.json names, for every tensor."""
        return self.dtype


def has_only_weight_index(directory: Path) -> bool:
    """Return whether the directory has a weight index but no safetensors file."""
    index = directory / INDEX
    return index.is_file() and not list(directory.glob("*.safetensors"))


def open_model_from_index(directory: Path) -> tuple[StoredModel, list[str]]:
    """Return a model that can be planned but not read, with all tensors in the type that
    config.json names, and lines for people about tensors that its index lacks or has too many of.
    """
    hf_config = read_hf_config(directory)
    plain: HFConfig = {
        key: value for key, value in hf_config.items() if key != "quantization_config"
    }
    dtype = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
    names = set(read_json_object(directory / INDEX).get("weight_map", {}))
    model = StoredModel(
        plain,
        WeightIndexSource(dtype),  # type: ignore[arg-type]
        directory,
        None,
        {},
    )
    return model, list(
        _describe_index_problems(model.weight_table, names, find_mtp_prefixes(hf_config))
    )


def _describe_index_problems(
    table: Sequence[WeightRule], indexed_names: set[str], mtp_prefixes: tuple[str, ...]
) -> Iterator[str]:
    """Yield a line for the missing tensors, a line for the left-over tensors, notes about an output
    layer whose bytes decide and about parts that are left out, and a note that counts the
    multi-token prediction tensors: they are copied, but their bytes are not known.
    """
    wanted = {hf.stored_name for rule in table for hf in rule.hf_tensors}
    plain = {
        name.removesuffix(BLOCKS) for name in indexed_names if not name.endswith((SCALE, SCALES))
    }
    missing = sorted(wanted - plain)
    unread = sorted(name for name in plain - wanted if not name.startswith(mtp_prefixes or ("\0",)))
    heads = [name for name in unread if is_tied_head(name, table)]
    dropped = {
        name: kind for name in unread if (kind := find_droppable_kind(name, shape=None)) is not None
    }
    left_over = [name for name in unread if name not in dropped and name not in heads]
    for what, found in (("missing", missing), ("left over", left_over)):
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            yield f"problem: {what} {len(found)}: {', '.join(found[:_SHOWN])}{more}"
    for name in heads:
        yield (
            f"note: {name} must equal the embedding, to which config.json ties the head; the"
            " conversion compares them and refuses a head that differs"
        )
    for kind in dict.fromkeys(kind for kind in dropped.values() if kind.is_reported):
        names = [name for name, its_kind in dropped.items() if its_kind is kind]
        yield f"note: {format_dropped_tensors(kind, names)}"
    uncounted = sum(name.startswith(mtp_prefixes or ("\0",)) for name in plain - wanted)
    if uncounted:
        prefixes = ", ".join(f"{prefix}*" for prefix in mtp_prefixes)
        yield (
            f"note: {uncounted} tensors of {prefixes} go along, too; their bytes are in files that"
            " are not here"
        )


def describe_conversion(
    model: StoredModel,
    items: Sequence[ConversionItem],
    target: ConversionTarget,
    output_directory: Path,
    problems: Sequence[str],
) -> list[str]:
    """Return lines for people: what is read, what is written, `problems`, and whether disk space is
    short.
    """
    units = group_items_into_units(items)
    largest = max(units, key=lambda unit: sum(items[n].num_bytes for n in unit))
    largest_bytes = sum(items[n].num_bytes for n in largest)
    tensors = [hf for item in items for hf in item.rule.hf_tensors]
    num_bytes = sum(target.file_bytes.values())
    parent = next(path for path in output_directory.absolute().parents if path.is_dir())
    free = shutil.disk_usage(parent).free
    kinds = {
        dtype: sum(prod(h.shape) for i in items if i.dtype == dtype for h in i.rule.hf_tensors)
        for dtype in DTYPE_BYTES
    }
    kept = sum(item.is_mtp for item in items)
    lines = [
        f"source: {model.directory}, {model.hf_config.get('model_type')}, {len(tensors)} tensors"
        + (f", {kept} of them kept as they are" if kept else ""),
        "elements: "
        + ", ".join(f"{count / 1e9:.3f} G {dtype}" for dtype, count in kinds.items() if count),
        *_describe_tensor_kinds(items),
        (
            f"units: {len(units)}, the largest {largest_bytes / 1e6:.1f} MB"
            f" ({items[largest[0]].rule.megatron_name}): {2 * largest_bytes / 1e9:.2f} GB and the"
            " interpreter a process"
        ),
        (
            f"target: {output_directory}, {len(target.file_bytes)} files, {num_bytes / 1e9:.3f} GB;"
            f" {parent} has {free / 1e9:.1f} GB free"
        ),
        *(f"  {name} {size}" for name, size in list(target.file_bytes.items())[:_SHOWN]),
    ]
    if len(target.file_bytes) > _SHOWN:
        lines.append(f"  and {len(target.file_bytes) - _SHOWN} more")
    lines += problems
    if free < num_bytes:
        lines.append(f"problem: {(num_bytes - free) / 1e9:.1f} GB are missing on the disk")
    return lines


def _describe_tensor_kinds(items: Sequence[ConversionItem]) -> list[str]:
    """Return one line for each kind of tensor, with the number of tensors that differ in layer and
    expert only.
    """
    found: dict[tuple[str, tuple[int, ...], str, str], int] = {}
    for item in items:
        for hf in item.rule.hf_tensors:
            dtype = (
                "fp8" if item.fp8_block is not None and is_stored_in_fp8(hf.name) else item.dtype
            )
            kind = (
                _replace_numbers_by_stars(hf.name),
                hf.shape,
                dtype,
                _replace_numbers_by_stars(item.rule.megatron_name),
            )
            found[kind] = found.get(kind, 0) + 1
    return [
        f"  {count:>6} x {name} {list(shape)} {dtype} -> {ours}"
        for (name, shape, dtype, ours), count in found.items()
    ]


def _replace_numbers_by_stars(name: str) -> str:
    """Return the name with each layer or expert number inside it replaced by "*"."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)

"""Weights in Megatron layout on disk: one safetensors file a (tp, pp) rank, and a manifest.

`tp{t}_pp{p}.safetensors` holds what that rank of the model holds, under Megatron's names with layers counted over the
whole model. The head of a tied model is left out: it is the embedding. `manifest.json` says the layout, the model and
the digest of every tensor in Hugging Face layout, so that a file that changed is found. `kept.safetensors` has tensors
that no rank holds (checkpoint.kept).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron import __version__
from rlhf_megatron.checkpoint.aside import written_aside
from rlhf_megatron.checkpoint.hf_reader import DTYPES, read_json
from rlhf_megatron.checkpoint.hf_writer import SafetensorsWriter, TensorSpec, write_companions
from rlhf_megatron.checkpoint.kept import KEPT_FILE, NOTHING_KEPT, Kept
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Rule, check_tensor_parallel, join, rules_of_stage, shard_shape, split

MANIFEST = "manifest.json"
FORMAT = "rlhf-megatron weights"
FORMAT_VERSION = 2  # 1: digests of another kind


@dataclass(frozen=True)
class MegatronManifest:
    """The contents of manifest.json."""

    format: str
    format_version: int
    tool_version: str
    tp: int
    pp: int
    hf_config: dict[str, Any]
    digests: dict[str, str]  # Hugging Face name -> resharding.digest, hex

    @staticmethod
    def read(directory: Path) -> MegatronManifest:
        """Raises ValueError when the file is missing or not of this format."""
        path = Path(directory) / MANIFEST
        if not path.is_file():
            raise ValueError(f"{directory} has no {MANIFEST}; it is not a directory of converted weights.")
        raw = read_json(path)
        if raw.get("format") != FORMAT or raw.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format {raw.get('format')!r} {raw.get('format_version')!r}; this version reads"
                f" {FORMAT!r} {FORMAT_VERSION}. Convert the model again."
            )
        try:
            return MegatronManifest(**raw)
        except TypeError as error:
            raise ValueError(f"{path} is not a manifest of converted weights: {error}.") from error


def file_name(tp: int, pp: int) -> str:
    """The file of a rank."""
    return f"tp{tp}_pp{pp}.safetensors"


class MegatronReader:
    """Implements `WeightSource`: shards of all ranks are joined, so that any layout can load them."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError when a file is missing or broken."""
        self.directory = Path(directory)
        self.manifest = MegatronManifest.read(self.directory)
        self.table = table_for(self.manifest.hf_config, self.manifest.tp)
        self._rules = {rule.hf: rule for rule in self.table}
        self._stage_of = {
            rule.megatron_name: stage
            for stage in range(self.manifest.pp)
            for rule in rules_of_stage(self.table, stage, self.manifest.pp)
        }
        ranks = [(tp, pp) for pp in range(self.manifest.pp) for tp in range(self.manifest.tp)]
        self._files = {rank: self._open(file_name(*rank)) for rank in ranks}

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """`rule` may have other vocabulary padding or module names. Raises ValueError naming a broken shard."""
        own = self._own(rule)
        return own.to_hf(join(own.split, self.shards(own)))

    def dtype_of(self, rule: Rule) -> str:
        own = self._own(rule)
        view = self._view(own, 0)
        if view.get_dtype() not in DTYPES:
            raise ValueError(f"{self.directory}: {own.megatron_name} has type {view.get_dtype()}; convert it again.")
        return DTYPES[view.get_dtype()]

    def shards(self, rule: Rule) -> list[Tensor]:
        """The tp shards of a rule of `self.table`, views of the mapped files, in rank order."""
        expected = shard_shape(rule, self.manifest.tp)
        tensors = []
        for tp in range(self.manifest.tp):
            rank = (tp, self._stage_of[rule.megatron_name])
            shape = tuple(self._view(rule, tp).get_shape())
            if shape != expected:
                raise ValueError(
                    f"{self.directory / file_name(*rank)}: {rule.megatron_name} has shape {shape}, expected {expected}."
                    " Convert the model again."
                )
            tensors.append(self._files[rank].get_tensor(rule.megatron_name))
        return tensors

    def _own(self, rule: Rule) -> Rule:
        """The rule of the same Hugging Face tensors in this directory's table."""
        if rule.hf not in self._rules:
            raise ValueError(f"{self.directory} holds no {rule.megatron_name}; it is another model.")
        return self._rules[rule.hf]

    def _view(self, rule: Rule, tp: int) -> Any:
        rank = (tp, self._stage_of[rule.megatron_name])
        try:
            return self._files[rank].get_slice(rule.megatron_name)
        except SafetensorError as error:
            raise ValueError(
                f"{self.directory / file_name(*rank)} lacks {rule.megatron_name}; convert the model again."
            ) from error

    def _open(self, name: str) -> Any:
        path = self.directory / name
        if not path.is_file():
            raise ValueError(
                f"{path} is missing, though {MANIFEST} says tp{self.manifest.tp} pp{self.manifest.pp}; convert again."
            )
        try:
            return safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or corrupt: {error}. Convert the model again.") from error


@contextmanager
def megatron_directory_writer(
    directory: Path,
    hf_config: Mapping[str, Any],
    tp: int,
    pp: int,
    dtypes: Mapping[str, str],
    digests: Mapping[str, str],
    companions_from: Path | None,
    kept: Kept = NOTHING_KEPT,
) -> Iterator[Callable[[Rule, Sequence[Tensor]], None]]:
    """Gives a function that takes a rule of `table_for(hf_config, tp)` and its HF tensors, once for every rule.

    `dtypes`: Megatron name -> type. `digests` is read when the block ends: it may be filled meanwhile. `directory`
    appears complete at the end. Raises ValueError when it exists, or the model does not divide.
    """
    table = table_for(hf_config, tp)
    check_tensor_parallel(table, tp)
    stage_of = {rule.megatron_name: stage for stage in range(pp) for rule in rules_of_stage(table, stage, pp)}
    with written_aside(directory) as aside, ExitStack() as on_error:
        writers: dict[tuple[int, int], SafetensorsWriter] = {}
        for rank in [(t, p) for p in range(pp) for t in range(tp)]:
            specs = [_spec(rule, tp, dtypes) for rule in table if stage_of[rule.megatron_name] == rank[1]]
            writers[rank] = SafetensorsWriter(aside / file_name(*rank), specs)
            on_error.callback(writers[rank].close, is_complete=False)

        def write(rule: Rule, tensors: Sequence[Tensor]) -> None:
            for t, shard in enumerate(split(rule.split, rule.to_megatron(*tensors), tp)):
                writers[t, stage_of[rule.megatron_name]].write(rule.megatron_name, shard)

        yield write
        on_error.pop_all()
        for writer in writers.values():
            writer.close()
        if kept.files:
            kept.write(aside / KEPT_FILE)
        write_companions(aside, hf_config, set(dtypes.values()), companions_from)
        manifest = MegatronManifest(FORMAT, FORMAT_VERSION, __version__, tp, pp, dict(hf_config), dict(digests))
        (aside / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def _spec(rule: Rule, tp: int, dtypes: Mapping[str, str]) -> TensorSpec:
    return TensorSpec(rule.megatron_name, dtypes[rule.megatron_name], shard_shape(rule, tp))

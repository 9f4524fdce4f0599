"""Weights in Megatron layout on disk: one safetensors file a rank of a stage's first copy, and a manifest.

`tp{t}_pp{p}.safetensors` holds what that rank of the model holds, under Megatron's names with layers counted over the
whole model; experts that lie on the ranks in another order are in `ep{e}_etp{t}_pp{p}.safetensors`. The head of a tied
model is left out: it is the embedding. `manifest.json` says the layout, the model and the digest of every tensor in
Hugging Face layout, so that a file that changed is found. `kept.safetensors` has tensors that no rank holds
(checkpoint.kept).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron.checkpoint.hf_reader import DTYPES, read_json
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Rule, check_tensor_parallel, join, shard_shape
from rlhf_megatron.parallel.layout import Layout

MANIFEST = "manifest.json"
FORMAT = "rlhf-megatron weights"
FORMAT_VERSION = 3  # 2: no expert parallelism, no virtual stages


@dataclass(frozen=True)
class MegatronManifest:
    """The contents of manifest.json."""

    format: str
    format_version: int
    tool_version: str
    layout: dict[str, int]  # the arguments of `layout_on_disk`
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


def layout_on_disk(
    tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, etp: int = 0, first_layers: int = 0, last_layers: int = 0
) -> Layout:
    """The smallest layout of such axes: one copy of every tensor. Raises ValueError for a shape that cannot be."""
    for name, value in {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep}.items():
        if value <= 0:
            raise ValueError(f"--{name} is {value}; it must be positive.")
    for name, value in {"etp": etp, "first-layers": first_layers, "last-layers": last_layers}.items():
        if value < 0:
            raise ValueError(f"--{name} is {value}; it must be 0 (not set) or more.")
    world_size = pp * lcm(tp, ep * (etp or tp))
    return Layout(world_size, tp, pp, vpp=vpp, ep=ep, etp=etp, first_layers=first_layers, last_layers=last_layers)


class RankFiles:
    """Names the files that hold the shards of a rule."""

    def __init__(self, table: Sequence[Rule], layout: Layout) -> None:
        """Raises ValueError where the model does not divide."""
        check_tensor_parallel(table, layout.tp, layout.etp)
        num_layers = 1 + max((rule.layer for rule in table if rule.layer is not None), default=-1)
        num_experts = next((rule.num_experts for rule in table if rule.expert is not None), 0)
        if num_experts % layout.ep or (layout.ep > 1 and not num_experts):
            raise ValueError(f"expert parallel size ({layout.ep}) must divide the number of experts ({num_experts}).")
        self.layout = layout
        self._stage_of = layout.stage_of_layers(num_layers)
        self._has_expert_files = layout.ep > 1 or layout.etp != layout.tp

    def files(self, rule: Rule) -> list[str]:
        """List the files of a tensor in the order of its shards, or every file with a copy where it is not split."""
        stage = {"embedding": 0, "head": self.layout.pp - 1}.get(rule.owner, 0)
        stage = stage if rule.layer is None else self._stage_of[rule.layer]
        if rule.expert is None or not self._has_expert_files:
            return [f"tp{tp}_pp{stage}.safetensors" for tp in range(self.layout.tp)]
        ep = rule.expert // (rule.num_experts // self.layout.ep)
        return [f"ep{ep}_etp{etp}_pp{stage}.safetensors" for etp in range(self.layout.etp)]


class MegatronReader:
    """Implements `WeightSource`: shards of all ranks are joined, so that any layout can load them."""

    def __init__(self, directory: Path) -> None:
        """Raises ValueError when a file is missing or broken."""
        self.directory = Path(directory)
        self.manifest = MegatronManifest.read(self.directory)
        try:
            self.layout = layout_on_disk(**self.manifest.layout)
        except TypeError as error:
            raise ValueError(f"{self.directory / MANIFEST} has no layout that is read: {error}.") from error
        self.table = table_for(self.manifest.hf_config, self.layout.tp)
        self._rules = {rule.hf: rule for rule in self.table}
        self._of_rank = RankFiles(self.table, self.layout)
        names = dict.fromkeys(name for rule in self.table for name in self._of_rank.files(rule))
        self._files = {name: self._open(name) for name in names}

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """`rule` may have other vocabulary padding or module names. Raises ValueError naming a broken shard."""
        own = self.own(rule)
        return own.to_hf(join(own.split, self.shards(own)))

    def dtype_of(self, rule: Rule) -> str:
        own = self.own(rule)
        view = self._view(own, self._of_rank.files(own)[0])
        if view.get_dtype() not in DTYPES:
            raise ValueError(f"{self.directory}: {own.megatron_name} has type {view.get_dtype()}; convert it again.")
        return DTYPES[view.get_dtype()]

    def shards(self, rule: Rule) -> list[Tensor]:
        """The shards of a rule of `self.table`, views of the mapped files, in rank order."""
        files = self._of_rank.files(rule)
        expected = shard_shape(rule, len(files))
        tensors = []
        for file in files:
            shape = tuple(self._view(rule, file).get_shape())
            if shape != expected:
                raise ValueError(
                    f"{self.directory / file}: {rule.megatron_name} has shape {shape}, expected {expected}."
                    " Convert the model again."
                )
            tensors.append(self._files[file].get_tensor(rule.megatron_name))
        return tensors

    def own(self, rule: Rule) -> Rule:
        """The rule of the same Hugging Face tensors in this directory's table. Raises ValueError for none."""
        if rule.hf not in self._rules:
            raise ValueError(f"{self.directory} holds no {rule.megatron_name}; it is another model.")
        return self._rules[rule.hf]

    def _view(self, rule: Rule, file: str) -> Any:
        try:
            return self._files[file].get_slice(rule.megatron_name)
        except SafetensorError as error:
            raise ValueError(f"{self.directory / file} lacks {rule.megatron_name}; convert the model again.") from error

    def _open(self, name: str) -> Any:
        path = self.directory / name
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {MANIFEST} says {_text(self.manifest.layout)}; convert again.")
        try:
            return safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or corrupt: {error}. Convert the model again.") from error


def _text(layout: Mapping[str, int]) -> str:
    return " ".join(f"{name}{size}" for name, size in layout.items() if size > 1)

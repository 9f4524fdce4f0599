"""Weights in Megatron layout on disk: one safetensors file a rank of a stage's first copy,
and a manifest.

`tp{t}_pp{p}.safetensors` holds what that rank of the model holds, under Megatron's names with
layers counted over the whole model; experts that lie on the ranks in another order are in
`ep{e}_etp{t}_pp{p}.safetensors`. The head of a tied model is left out: it is the embedding.
`manifest.json` says the layout, the model and the digest of every tensor in Hugging Face layout, so
that a file that changed is found. `kept.safetensors` has tensors that no rank
holds (weights.mtp_tensors).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import DTYPES, read_json_object
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.unread_tensors import join_first_names
from rlhf_megatron.weights.weight_table import (
    WeightRule,
    check_tensor_parallel_split,
    compute_shard_shape,
    join_shards,
)

MANIFEST = "manifest.json"
FORMAT = "rlhf-megatron weights"
FORMAT_VERSION = 3  # 2: no expert parallelism, no virtual stages


@dataclass(frozen=True)
class MegatronManifest:
    """The contents of manifest.json."""

    format: str
    format_version: int
    tool_version: str
    layout: dict[str, int]  # the arguments of `make_disk_layout`
    hf_config: dict[str, Any]
    digests: dict[str, str]  # Hugging Face name -> weights.tensor_digest, hex

    @staticmethod
    def read(directory: Path) -> MegatronManifest:
        """Return the manifest of a directory of converted weights. Raise ValueError when the file
        is missing or not of this format.
        """
        path = Path(directory) / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"{directory} has no {MANIFEST}; it is not a directory of converted weights."
            )
        raw = read_json_object(path)
        if raw.get("format") != FORMAT or raw.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format {raw.get('format')!r} {raw.get('format_version')!r}; this"
                f" version reads {FORMAT!r} {FORMAT_VERSION}. Convert the model again."
            )
        try:
            return MegatronManifest(**raw)
        except TypeError as error:
            raise ValueError(f"{path} is not a manifest of converted weights: {error}.") from error


def make_disk_layout(
    tp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    ep: int = 1,
    etp: int = 0,
    first_layers: int = 0,
    last_layers: int = 0,
) -> ParallelLayout:
    """Return the smallest layout with these parallel sizes, which holds one copy of every tensor. 0
    means not set for `etp`, `first_layers` and `last_layers`. Raise ValueError for an impossible
    shape.
    """
    for name, value in {"tp": tp, "pp": pp, "vpp": vpp, "ep": ep}.items():
        if value <= 0:
            raise ValueError(f"--{name} is {value}; it must be positive.")
    for name, value in {
        "etp": etp,
        "first-layers": first_layers,
        "last-layers": last_layers,
    }.items():
        if value < 0:
            raise ValueError(f"--{name} is {value}; it must be 0 (not set) or more.")
    world_size = pp * lcm(tp, ep * (etp or tp))
    return ParallelLayout(
        world_size,
        tp,
        pp,
        vpp=vpp,
        ep=ep,
        etp=etp,
        num_first_stage_layers=first_layers,
        num_last_stage_layers=last_layers,
    )


class RankFileNames:
    """Names the files that hold the shards of a rule."""

    def __init__(self, table: Sequence[WeightRule], layout: ParallelLayout) -> None:
        """Raise ValueError where the layout does not divide the model's tensors, layers or
        experts.
        """
        check_tensor_parallel_split(table, layout.tp, layout.etp)
        num_layers = 1 + max((rule.layer for rule in table if rule.layer is not None), default=-1)
        num_experts = next((rule.num_experts for rule in table if rule.expert is not None), 0)
        if num_experts % layout.ep or (layout.ep > 1 and not num_experts):
            raise ValueError(
                f"expert parallel size ({layout.ep}) must divide the number of"
                f" experts ({num_experts})."
            )
        self.layout = layout
        self._stage_by_layer = layout.map_layers_to_stages(num_layers)
        self._has_expert_files = layout.ep > 1 or layout.etp != layout.tp

    def list_files(self, rule: WeightRule) -> list[str]:
        """Return the names of the files that hold a rule's shards, in shard order; for a tensor
        that is not split, of all files that hold a copy.
        """
        stage = {"embedding": 0, "head": self.layout.pp - 1}.get(rule.owner, 0)
        stage = stage if rule.layer is None else self._stage_by_layer[rule.layer]
        if rule.expert is None or not self._has_expert_files:
            return [f"tp{tp}_pp{stage}.safetensors" for tp in range(self.layout.tp)]
        ep = rule.expert // (rule.num_experts // self.layout.ep)
        return [f"ep{ep}_etp{etp}_pp{stage}.safetensors" for etp in range(self.layout.etp)]


class MegatronReader:
    """Implements `WeightSource`: shards of all ranks are joined,
    so that any layout can load them.
    """

    def __init__(self, directory: Path) -> None:
        """Open all files of the directory. Raise ValueError where one is missing or broken, or
        holds a tensor that nothing reads.
        """
        self.directory = Path(directory)
        self.manifest = MegatronManifest.read(self.directory)
        try:
            self.layout = make_disk_layout(**self.manifest.layout)
        except TypeError as error:
            raise ValueError(
                f"{self.directory / MANIFEST} has no layout that is read: {error}."
            ) from error
        self.table = make_weight_table(self.manifest.hf_config, self.layout.tp)
        self._rule_by_hf_tensors = {rule.hf_tensors: rule for rule in self.table}
        self._rank_file_names = RankFileNames(self.table, self.layout)
        names: dict[str, set[str]] = {}
        for rule in self.table:
            for name in self._rank_file_names.list_files(rule):
                names.setdefault(name, set()).add(rule.megatron_name)
        self._open_files = {name: self._open_rank_file(name) for name in names}
        for name, tensor_names in names.items():
            unread = sorted(set(self._open_files[name].keys()) - tensor_names)
            if unread:
                raise ValueError(
                    f"{self.directory / name} holds {join_first_names(unread)}, which the model of"
                    f" {MANIFEST} does not have; convert the model again."
                )

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Join the shards of a rule and return its Hugging Face tensors. `rule` may have another
        vocabulary padding and other module names than this directory's. Raise ValueError that names
        a broken shard.
        """
        own = self.find_stored_rule(rule)
        return own.to_hf(join_shards(own.split, self.read_shards(own)))

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type ("bfloat16") in which the rule's tensor is stored. Raise ValueError for a
        type that is not supported.
        """
        own = self.find_stored_rule(rule)
        view = self._get_tensor_slice(own, self._rank_file_names.list_files(own)[0])
        if view.get_dtype() not in DTYPES:
            raise ValueError(
                f"{self.directory}: {own.megatron_name} has type {view.get_dtype()};"
                " convert it again."
            )
        return DTYPES[view.get_dtype()]

    def read_shards(self, rule: WeightRule) -> list[Tensor]:
        """Return the shards of a rule of `self.table`, views of the mapped files, in rank order.
        Raise ValueError for a shard of another shape.
        """
        files = self._rank_file_names.list_files(rule)
        expected = compute_shard_shape(rule, len(files))
        tensors = []
        for file in files:
            shape = tuple(self._get_tensor_slice(rule, file).get_shape())
            if shape != expected:
                raise ValueError(
                    f"{self.directory / file}: {rule.megatron_name} has shape {shape}, expected"
                    f" {expected}. Convert the model again."
                )
            tensors.append(self._open_files[file].get_tensor(rule.megatron_name))
        return tensors

    def find_stored_rule(self, rule: WeightRule) -> WeightRule:
        """Return the rule of this directory's table that has the same Hugging Face tensors. Raise
        ValueError where there is none.
        """
        if rule.hf_tensors not in self._rule_by_hf_tensors:
            raise ValueError(
                f"{self.directory} holds no {rule.megatron_name}; it is another model."
            )
        return self._rule_by_hf_tensors[rule.hf_tensors]

    def _get_tensor_slice(self, rule: WeightRule, file_name: str) -> Any:
        """Return the safetensors slice of a rule's tensor in one file. Raise ValueError where the
        file lacks the tensor.
        """
        try:
            return self._open_files[file_name].get_slice(rule.megatron_name)
        except SafetensorError as error:
            raise ValueError(
                f"{self.directory / file_name} lacks {rule.megatron_name}; convert the model again."
            ) from error

    def _open_rank_file(self, file_name: str) -> Any:
        """Open and return one mapped file. Raise ValueError where it is missing or broken."""
        path = self.directory / file_name
        if not path.is_file():
            raise ValueError(
                f"{path} is missing, though {MANIFEST} says"
                f" {_format_layout(self.manifest.layout)}; convert again."
            )
        try:
            return safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is truncated or corrupt: {error}. Convert the model again."
            ) from error


def _format_layout(layout: Mapping[str, int]) -> str:
    """Return the sizes above 1 as text, such as "tp2 pp4"."""
    return " ".join(f"{name}{size}" for name, size in layout.items() if size > 1)

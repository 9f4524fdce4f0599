"""A capsule: all that it takes to run one skipped mini-batch again, in `capsules/step_000012_actor/` of a run.

    capsule.json       what was skipped and why: ranks, parameters, micro-batches, samples and tokens
    config.yaml        of the run
    samples.batch      the samples with all that the controller knew of them (TrainBatch)
    mini_batch.batch   what was trained on, with its loss weights; not where the step was left out before any update
    weights/           of the role, sharded, as they stood; loads under any layout
    rng/               random states of each rank

The hosts write weights and random states at the moment of the skip, into `.step_000012_actor.partial`; the controller
adds the rest and gives the directory its name. A disk that refuses costs the capsule and not the run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.checkpoint.aside import fsync
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import as_yaml
from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.data.codec import read_file, write_file
from rlhf_megatron.observe.line_file import strict
from rlhf_megatron.observe.run_dir import write_json, write_text
from rlhf_megatron.workers.findings import WEIGHTS

DIRECTORY = "capsules"
FORMAT, FORMAT_VERSION = "rlhf_megatron capsule", 1
FACTS, CONFIG, SAMPLES, MINI_BATCH = "capsule.json", "config.yaml", "samples.batch", "mini_batch.batch"


@dataclass(frozen=True)
class Capsule:
    """What a replay reads."""

    path: Path
    facts: Mapping[str, Any]  # capsule.json
    samples: TrainBatch
    mini_batch: TokenBatch | None

    @property
    def role(self) -> str:
        return str(self.facts["role"])

    @property
    def weights(self) -> Path | None:
        return self.path if (self.path / WEIGHTS).is_dir() else None


class Capsules:
    """Of a run: those that it has, and new ones, at most `trainer.capsules_kept` steps of them."""

    def __init__(self, run_dir: Path, config: RunConfig, note: Callable[[str], None]) -> None:
        self.directory = run_dir / DIRECTORY
        self.config = config
        self.note = note
        for partial in self.directory.glob(".*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def place(self, step: int, role: str) -> Path | None:
        """Where the hosts are to write, if this step has a skip; None: no more capsules are kept."""
        kept = {path.name.rpartition("_")[0] for path in self.directory.glob("step_*")}
        name = f"step_{step:06d}"
        is_full = name not in kept and len(kept) >= self.config.trainer.capsules_kept
        if is_full or (self.directory / f"{name}_{role}").exists():
            return None
        return self.directory / f".{name}_{role}.partial"

    def newest(self) -> Path | None:
        """The last one of the run."""
        return max(self.directory.glob("step_*"), default=None)

    def write(
        self, partial: Path, facts: Mapping[str, Any], samples: TrainBatch, mini_batch: TokenBatch | None
    ) -> Path | None:
        """Complete the directory and give it its name, which is returned; None, and said, where the disk refuses."""
        path = partial.with_name(partial.name.removeprefix(".").removesuffix(".partial"))
        try:
            partial.mkdir(parents=True, exist_ok=True)
            write_text(partial / CONFIG, as_yaml(self.config))
            write_file(partial / SAMPLES, samples)
            if mini_batch is not None:
                write_file(partial / MINI_BATCH, mini_batch)
            write_json(partial / FACTS, strict({"format": FORMAT, "format_version": FORMAT_VERSION, **facts}))
            fsync(partial)
            os.rename(partial, path)
            fsync(path.parent)
        except OSError as error:
            self.note(f"no capsule of step {facts.get('step')}: {error}")
            return None
        return path


def is_capsule(path: Path) -> bool:
    return (path / FACTS).is_file()


def read_capsule(path: Path) -> Capsule:
    """Raises ValueError for a directory that is none, or of another version."""
    if not is_capsule(path):
        raise ValueError(f"{path} is not a capsule: it has no {FACTS}. They are under {DIRECTORY}/ of a run.")
    try:
        facts = json.loads((path / FACTS).read_text())
    except ValueError as error:
        raise ValueError(f"{path / FACTS} cannot be read: {error}.") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path / FACTS} is not that of a capsule.")
    if facts.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} is a capsule of format {facts.get('format_version')}; this version of the package reads"
            f" {FORMAT_VERSION}."
        )
    samples = read_file(path / SAMPLES)
    mini_batch = read_file(path / MINI_BATCH) if (path / MINI_BATCH).exists() else None
    if not isinstance(samples, TrainBatch) or not isinstance(mini_batch, TokenBatch | None):
        raise ValueError(f"{path} holds batches of another kind than a capsule's.")
    return Capsule(path, facts, samples, mini_batch)

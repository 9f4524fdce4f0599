"""A capsule holds what a skipped mini-batch needs to run again, in
`capsules/step_000012_actor/` of a run.

    capsule.json       what was skipped and why: ranks, parameters, micro-batches,
                       samples and tokens
    config.yaml        of the run
    samples.batch      the samples with all that the controller knew of them (TrainBatch)
    mini_batch.batch   what was trained on, with its loss weights; not where the step was left out
                       before any update
    weights/           of the role, sharded, as they stood; loads under any layout
    rng/               random states of each rank

At the skip the hosts write weights and random states into `.step_000012_actor.partial`; the
controller adds the rest and renames the directory. When the disk fails, the capsule is lost and
the run goes on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.observe.line_file import replace_non_finite
from rlhf_megatron.controller.observe.run_dir import write_json_atomically, write_text_atomically
from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.data.codec import read_message_file, write_message_file
from rlhf_megatron.data.direct_file_io import fsync_path
from rlhf_megatron.ranks.workers.rank_reports import WEIGHTS

DIRECTORY = "capsules"
FORMAT = "rlhf_megatron capsule"
FORMAT_VERSION = 1
FACTS = "capsule.json"
CONFIG = "config.yaml"
SAMPLES = "samples.batch"
MINI_BATCH = "mini_batch.batch"


@dataclass(frozen=True)
class SkipCapsule:
    """The files of a capsule, as a replay reads them."""

    path: Path
    facts: Mapping[str, Any]  # capsule.json
    samples: TrainBatch
    mini_batch: TokenBatch | None

    @property
    def role(self) -> str:
        """Return the role whose update was skipped, such as "actor"."""
        return str(self.facts["role"])

    @property
    def weights_directory(self) -> Path | None:
        """Return the directory to load the weights from, or None where the capsule has no
        weights.
        """
        return self.path if (self.path / WEIGHTS).is_dir() else None


class CapsuleStore:
    """The capsules of a run. `max_steps` steps have one at most; `note` takes a line for whoever
    watches the run.
    """

    def __init__(
        self, run_dir: Path, config_yaml: str, max_steps: int, note: Callable[[str], None]
    ) -> None:
        """Open the store, and remove capsules that a killed run left unfinished."""
        self.directory = run_dir / DIRECTORY
        self.config_yaml = config_yaml
        self.max_steps = max_steps
        self.note = note
        for partial in self.directory.glob(".*.partial"):
            shutil.rmtree(partial, ignore_errors=True)

    def choose_partial_directory(self, step: int, role: str) -> Path | None:
        """Return where the hosts write if this step has a skip, without creating it; None when
        enough steps have capsules or this step and role have one.
        """
        kept = {path.name.rpartition("_")[0] for path in self.directory.glob("step_*")}
        name = f"step_{step:06d}"
        is_full = name not in kept and len(kept) >= self.max_steps
        if is_full or (self.directory / f"{name}_{role}").exists():
            return None
        return self.directory / f".{name}_{role}.partial"

    def find_newest(self) -> Path | None:
        """Return the last capsule of the run, or None."""
        return max(self.directory.glob("step_*"), default=None)

    def complete_capsule(
        self,
        partial_directory: Path,
        facts: Mapping[str, Any],
        samples: TrainBatch,
        mini_batch: TokenBatch | None,
    ) -> Path | None:
        """Add the controller's files to the directory, give it its final name and return the new
        path. When the disk fails, note it and return None.
        """
        path = partial_directory.with_name(
            partial_directory.name.removeprefix(".").removesuffix(".partial")
        )
        try:
            partial_directory.mkdir(parents=True, exist_ok=True)
            write_text_atomically(partial_directory / CONFIG, self.config_yaml)
            write_message_file(partial_directory / SAMPLES, samples)
            if mini_batch is not None:
                write_message_file(partial_directory / MINI_BATCH, mini_batch)
            write_json_atomically(
                partial_directory / FACTS,
                replace_non_finite({"format": FORMAT, "format_version": FORMAT_VERSION, **facts}),
            )
            fsync_path(partial_directory)
            os.rename(partial_directory, path)
            fsync_path(path.parent)
        except OSError as error:
            self.note(f"no capsule of step {facts.get('step')}: {error}")
            return None
        return path


def is_capsule_directory(path: Path) -> bool:
    """Return whether the directory has the facts of a capsule."""
    return (path / FACTS).is_file()


def read_skip_capsule(path: Path) -> SkipCapsule:
    """Read a capsule. Raise ValueError for another directory, or another version of the format."""
    if not is_capsule_directory(path):
        raise ValueError(
            f"{path} is not a capsule: it has no {FACTS}. They are under {DIRECTORY}/ of a run."
        )
    try:
        facts = json.loads((path / FACTS).read_text())
    except ValueError as error:
        raise ValueError(f"{path / FACTS} cannot be read: {error}.") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise ValueError(f"{path / FACTS} is not the file of a capsule.")
    if facts.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path} is a capsule of format {facts.get('format_version')}; this version of the"
            f" package reads {FORMAT_VERSION}."
        )
    samples = read_message_file(path / SAMPLES)
    mini_batch = read_message_file(path / MINI_BATCH) if (path / MINI_BATCH).exists() else None
    if not isinstance(samples, TrainBatch) or not isinstance(mini_batch, TokenBatch | None):
        raise ValueError(f"{path} holds batches of the wrong type for a capsule.")
    return SkipCapsule(path, facts, samples, mini_batch)

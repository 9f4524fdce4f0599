"""Two steps of the real loop in folded layouts, replayed on one unsharded rank, and compared.

The first layout makes the rollouts with an engine and records them; one rank and every further layout replay them, so
that all train on the same samples from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_megatron.checkpoint.random_init import random_source
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.scheduler.check import compare, programs, tiny_files
from rlhf_megatron.scheduler.check.fold_config import NUM_STEPS, fold_config
from rlhf_megatron.scheduler.check.fold_layout import UNSHARDED, Folded
from rlhf_megatron.scheduler.check.fold_model import fold_model, fold_recompute
from rlhf_megatron.scheduler.check.programs import Finished, ProgramError

ONE_RANK = "one_rank"
TIMEOUT_S = 1800.0  # of one run

Progress = Callable[[str], None]


@dataclass(frozen=True)
class LayoutResult:
    """What one folded layout came to."""

    folded: Folded
    seconds: float
    rows: tuple[compare.Row, ...]
    problems: tuple[str, ...]  # what is wrong beside the figures

    @property
    def is_ok(self) -> bool:
        return not self.problems and bool(self.rows) and all(row.is_ok for row in self.rows)


@dataclass(frozen=True)
class Proof:
    """Of all folded layouts."""

    model: Mapping[str, Any]  # config.json of the tiny model
    layouts: tuple[LayoutResult, ...]
    num_syncs: int  # each with the digests of all tensors verified in the engine
    one_rank_seconds: float

    @property
    def is_ok(self) -> bool:
        return all(layout.is_ok for layout in self.layouts)


def prove(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    layouts: tuple[Folded, ...],
    directory: Path,
    progress: Progress,
) -> Proof:
    """Runs everything below `directory`, which is absolute. `hf_config`: of the true model; `layouts`: of this run.

    A run that fails is a problem of its layout; one that fails on one rank is a problem of the first.
    """
    true = config.actor.megatron
    model = fold_model(hf_config, true, layouts)
    layouts = tuple(_with_recompute(folded, true, int(hf_config["num_hidden_layers"])) for folded in layouts)
    runs = _Runs(config, model, directory, progress)
    first, *others = layouts
    results: list[LayoutResult] = []
    try:
        recorded = runs.record(first)
        one_rank = runs.replay(ONE_RANK, UNSHARDED, 1)
    except ProgramError as error:
        return Proof(model, (LayoutResult(first, 0.0, (), (str(error),)),), 0, 0.0)
    results.append(runs.result(first, recorded, one_rank))
    for folded in others:
        try:
            results.append(runs.result(folded, runs.replay(folded.name, folded.megatron, folded.num_ranks), one_rank))
        except ProgramError as error:
            results.append(LayoutResult(folded, 0.0, (), (str(error),)))
    num_syncs = int(compare.read_metrics(recorded.run_dir)[-1]["policy/version"])
    return Proof(model, tuple(results), num_syncs, one_rank.seconds)


def _with_recompute(folded: Folded, true: MegatronConfig, num_layers: int) -> Folded:
    return replace(folded, megatron=fold_recompute(folded.megatron, true, num_layers))


class _Runs:
    """The runs of one proof: they share model, data and directory."""

    def __init__(self, config: RunConfig, model: Mapping[str, Any], directory: Path, progress: Progress) -> None:
        self.config = config
        self.model = model
        self.directory = directory
        self.progress = progress
        self.recorded: Path | None = None
        path = tiny_files.write_model(directory / "model", model)
        if config.actor.use_kl_loss and config.reference.path is not None:
            tiny_files.write_reference(directory / "reference", model, config.trainer.seed, path)
        tiny_files.write_prompts(directory, config.trainer.seed)

    def record(self, folded: Folded) -> Finished:
        """The run that the others replay. Raises ProgramError."""
        config = self._write(folded.name, folded.megatron, folded.num_ranks)
        finished = self._train(config, ["--record"], self.directory / folded.name, folded.num_ranks)
        self.recorded = finished.run_dir
        return finished

    def replay(self, name: str, megatron: MegatronConfig, num_ranks: int) -> Finished:
        """The recorded steps in another layout. Raises ProgramError."""
        assert self.recorded is not None
        config = self._write(name, megatron, num_ranks)
        words = ["--replay", str(NUM_STEPS), "--replay-from", str(self.recorded)]
        return self._train(config, words, self.directory / f"{name}-replay", num_ranks)

    def result(self, folded: Folded, found: Finished, one_rank: Finished) -> LayoutResult:
        steps, baseline = (compare.read_metrics(run.run_dir) for run in (found, one_rank))
        bar = load_run_config(self.directory / f"{folded.name}.yaml").config.checks.log_prob_max_abs_diff
        metrics = compare.compare_metrics(steps, baseline, bar)
        weights = compare.compare_weights(
            compare.read_weights(found.run_dir / "hf"), compare.read_weights(one_rank.run_dir / "hf"), self._start()
        )
        problems = tuple(compare.trains_nothing(baseline, weights))
        return LayoutResult(folded, found.seconds, (*metrics, *weights, *self._sent(steps)), problems)

    def _sent(self, steps: Sequence[Mapping[str, Any]]) -> list[compare.Row]:
        """Bytes of each weight sync, where the run had an engine, against what the table says."""
        expected = float(sum(4 * tensor.numel() for tensor in map(self._start(), self._names())))
        return [
            compare.Row("sync/num_bytes", f"step {step['step']}", found, expected, abs(found - expected), 0.0)
            for step in steps
            if (found := step.get("sync/num_bytes")) is not None
        ]

    def _names(self) -> list[str]:
        return [hf.name for rule in table_for(self.model) for hf in rule.hf]

    def _start(self) -> Callable[[str], Any]:
        """Weights before the first step, by their name."""
        tensors = {hf.name: hf for rule in table_for(self.model) for hf in rule.hf}
        seed = self.config.model.init_seed
        source = random_source(self.model, 1 if seed is None else seed)
        return lambda name: source.tensor(tensors[name])

    def _write(self, name: str, megatron: MegatronConfig, num_ranks: int) -> Path:
        path = tiny_files.write_config(
            self.directory, fold_config(self.config, megatron, num_ranks, name, self.directory)
        )
        try:
            load_run_config(path)
        except ConfigError as error:
            raise AssertionError(f"the folded configuration {path} breaks a rule: {error}") from error
        return path

    def _train(self, config: Path, words: Sequence[str], run_dir: Path, num_ranks: int) -> Finished:
        self.progress(f"{run_dir.name}: {num_ranks} processes; log: {run_dir}.log")
        finished = programs.run_train(config, words, run_dir, TIMEOUT_S)
        self.progress(f"{run_dir.name}: done in {finished.seconds:.0f} s")
        return finished

"""Two steps of the real loop in folded layouts, replayed on one unsharded rank, and compared.

The first layout makes the rollouts with an engine and records them; one rank and every further layout replay them, so
that all train on the same samples from the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_megatron.checkpoint.random_init import random_source
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.checkpoint.value_model import with_value_head
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.run import has_critic, megatron_sections, needs_reference
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Head
from rlhf_megatron.proof.check import compare, programs, tiny_files
from rlhf_megatron.proof.check.fold_config import NUM_STEPS, VALUE_HEAD_STD, fold_config, fold_model, fold_recompute
from rlhf_megatron.proof.check.fold_layout import UNSHARDED, Folded, FoldedPool
from rlhf_megatron.proof.check.programs import Finished, ProgramError

ONE_RANK = "one_rank"
CRITIC_WEIGHTS = "hf_critic"  # in a run's directory
TIMEOUT_S = 1800.0  # of one run

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Models:
    """config.json of the models of a run; the critic's is the policy's where it has no directory of its own."""

    policy: Mapping[str, Any]
    critic: Mapping[str, Any]


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

    model: Mapping[str, Any]  # config.json of the tiny policy
    layouts: tuple[LayoutResult, ...]
    num_syncs: int  # each with the digests of all tensors verified in the engine
    one_rank_seconds: float

    @property
    def is_ok(self) -> bool:
        return all(layout.is_ok for layout in self.layouts)


def prove(
    config: RunConfig,
    models: Models,
    layouts: tuple[Folded, ...],
    directory: Path,
    progress: Progress,
) -> Proof:
    """Runs everything below `directory`, which is absolute. `models`: the true ones; `layouts`: of this run.

    A run that fails is a problem of its layout; one that fails on one rank is a problem of the first.
    """
    tiny = fold_models(config, models, layouts)
    layouts = tuple(_with_recompute(folded, config, models) for folded in layouts)
    runs = _Runs(config, tiny, directory, progress)
    first, *others = layouts
    results: list[LayoutResult] = []
    try:
        recorded = runs.record(first)
        one_rank = runs.replay(Folded(ONE_RANK, FoldedPool(UNSHARDED, 1), None, ()))
    except ProgramError as error:
        return Proof(tiny.policy, (LayoutResult(first, 0.0, (), (str(error),)),), 0, 0.0)
    results.append(runs.result(first, recorded, one_rank))
    for folded in others:
        try:
            results.append(runs.result(folded, runs.replay(folded), one_rank))
        except ProgramError as error:
            results.append(LayoutResult(folded, 0.0, (), (str(error),)))
    num_syncs = int(compare.read_metrics(recorded.run_dir)[-1]["policy/version"])
    return Proof(tiny.policy, tuple(results), num_syncs, one_rank.seconds)


def fold_models(config: RunConfig, models: Models, layouts: Sequence[Folded]) -> Models:
    """Tiny ones that fit the folded layouts. A critic from a directory of its own reads the policy's tokens."""
    trues = [megatron for _, megatron, _ in megatron_sections(config)]
    of_actor = [folded.actor.megatron for folded in layouts]
    of_critic = [folded.pools[-1].megatron for folded in layouts]
    if config.critic.path is None or not has_critic(config):
        policy = fold_model(models.policy, trues, [*of_actor, *of_critic])
        return Models(policy, policy)
    policy = fold_model(models.policy, trues[:1], of_actor)
    critic = fold_model(models.critic, trues[-1:], of_critic)
    return Models(policy, {**critic, "vocab_size": policy["vocab_size"]})


def _with_recompute(folded: Folded, config: RunConfig, models: Models) -> Folded:
    """recompute_num_layers of every pool as the tiny models allow."""
    trues = [megatron for _, megatron, _ in megatron_sections(config)]

    def fitting(pool: FoldedPool, true: MegatronConfig, model: Mapping[str, Any]) -> FoldedPool:
        return replace(pool, megatron=fold_recompute(pool.megatron, true, int(model["num_hidden_layers"])))

    actor = fitting(folded.actor, trues[0], models.policy)
    critic = None if folded.critic is None else fitting(folded.critic, trues[-1], models.critic)
    return replace(folded, actor=actor, critic=critic)


class _Runs:
    """The runs of one proof: they share models, data and directory. `models`: the tiny ones."""

    def __init__(self, config: RunConfig, models: Models, directory: Path, progress: Progress) -> None:
        self.config = config
        self.models = models
        self.directory = directory
        self.progress = progress
        self.recorded: Path | None = None
        path = tiny_files.write_model(directory / "model", models.policy)
        if needs_reference(config) and config.reference.path is not None:
            tiny_files.write_reference(directory / "reference", models.policy, config.trainer.seed, path)
        if has_critic(config) and config.critic.path is not None:
            tiny_files.write_critic(directory / "critic", models.critic, config.trainer.seed, path)
        tiny_files.write_prompts(directory, config.trainer.seed)

    def record(self, folded: Folded) -> Finished:
        """The run that the others replay. Raises ProgramError."""
        finished = self._train(folded, ["--record"], self.directory / folded.name)
        self.recorded = finished.run_dir
        return finished

    def replay(self, folded: Folded) -> Finished:
        """The recorded steps in another layout. Raises ProgramError."""
        assert self.recorded is not None
        words = ["--replay", str(NUM_STEPS), "--replay-from", str(self.recorded)]
        return self._train(folded, words, self.directory / f"{folded.name}-replay")

    def result(self, folded: Folded, found: Finished, one_rank: Finished) -> LayoutResult:
        steps, baseline = (compare.read_metrics(run.run_dir) for run in (found, one_rank))
        bar = load_run_config(self.directory / f"{folded.name}.yaml").config.checks.log_prob_max_abs_diff
        rows = compare.compare_metrics(steps, baseline, bar)
        for place, start in self._starts().items():
            mine, theirs = (compare.read_weights(run.run_dir / place) for run in (found, one_rank))
            rows += compare.compare_weights(mine, theirs, start, "critic: " if place == CRITIC_WEIGHTS else "")
        problems = tuple(compare.trains_nothing(baseline, rows))
        return LayoutResult(folded, found.seconds, (*rows, *self._sent(steps)), problems)

    def _sent(self, steps: Sequence[Mapping[str, Any]]) -> list[compare.Row]:
        """Bytes of each weight sync, where the run had an engine, against what the table says."""
        tensors = [hf for rule in table_for(self.models.policy) for hf in rule.hf]
        expected = float(sum(4 * math.prod(hf.shape) for hf in tensors))
        return [
            compare.Row("sync/num_bytes", f"step {step['step']}", found, expected, abs(found - expected), 0.0)
            for step in steps
            if (found := step.get("sync/num_bytes")) is not None
        ]

    def _starts(self) -> dict[str, Callable[[str], Tensor]]:
        """Directory of trained weights in a run -> the weights before the first step, by their name."""
        seed = self.config.model.init_seed
        source = random_source(self.models.policy, 1 if seed is None else seed)
        starts = {"hf": by_name(source, self.models.policy, "vocabulary")}
        if not has_critic(self.config):
            return starts
        if self.config.critic.path is not None:
            return {**starts, CRITIC_WEIGHTS: compare.read_weights(self.directory / "critic").__getitem__}
        std = max(self.config.critic.value_head_init_std, VALUE_HEAD_STD)
        first = with_value_head(source, std, self.config.trainer.seed)
        return {**starts, CRITIC_WEIGHTS: by_name(first, self.models.critic, "value")}

    def _train(self, folded: Folded, words: Sequence[str], run_dir: Path) -> Finished:
        config = tiny_files.write_config(self.directory, fold_config(self.config, folded, self.directory))
        try:
            load_run_config(config)
        except ConfigError as error:
            raise AssertionError(f"the folded configuration {config} breaks a rule: {error}") from error
        self.progress(f"{run_dir.name}: {folded.num_ranks} processes; log: {run_dir}.log")
        finished = programs.run_train(config, words, run_dir, TIMEOUT_S)
        self.progress(f"{run_dir.name}: done in {finished.seconds:.0f} s")
        return finished


def by_name(source: WeightSource, hf_config: Mapping[str, Any], head: Head) -> Callable[[str], Tensor]:
    """A source's tensors by their Hugging Face name."""
    rules = {hf.name: (rule, index) for rule in table_for(hf_config, head=head) for index, hf in enumerate(rule.hf)}

    def tensor(name: str) -> Tensor:
        rule, index = rules[name]
        return source.hf_tensors(rule)[index]

    return tensor

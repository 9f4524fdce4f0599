"""Two steps of the real loop in folded layouts, replayed on one unsharded rank, and compared.

The first layout generates with an engine and records its rollouts; one rank and every further layout replay them, so
that all train on the same samples from the same weights. Each run is `rlhf-megatron train` in its own processes, on a
tiny model and prompts that are written here; nothing is fetched.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.hf_writer import TensorSpec, hf_directory_writer
from rlhf_megatron.checkpoint.source import WeightSource, random_source
from rlhf_megatron.checkpoint.value_model import value_model_config, with_value_head
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.run import has_critic, learning_sections, needs_reference
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.show import as_yaml
from rlhf_megatron.data.tokenizer import write_character_tokenizer
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Head, Rule, stored_specs
from rlhf_megatron.proof.check import compare
from rlhf_megatron.proof.check.fold_config import NUM_STEPS, VALUE_HEAD_STD, fold_config, fold_model, fold_recompute
from rlhf_megatron.proof.check.fold_layout import Folded, FoldedPool, unsharded
from rlhf_megatron.resharding.manifest import DTYPE_BYTES
from rlhf_megatron.resharding.quantised import engine_table
from rlhf_megatron.rollout.fleet.process import ServerProcess

ONE_RANK = "one_rank"
CRITIC_WEIGHTS = "hf_critic"  # in a run's directory
TIMEOUT_S = 1800.0  # of one run
POLL_S = 0.2
ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # processes, not GPUs
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
NUM_TRAIN, NUM_HELD_OUT = 64, 8
REFERENCE_SEED_OFFSET = 1000  # the reference's random weights are not those of the actor
CRITIC_SEED_OFFSET = 2000  # nor are those of a critic from a directory of its own

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Models:
    """config.json of the models of a run; the critic's is the policy's where it has no directory of its own."""

    policy: Mapping[str, Any]
    critic: Mapping[str, Any]


@dataclass(frozen=True)
class LayoutResult:
    """The figures of one folded layout."""

    folded: Folded
    seconds: float
    rows: tuple[compare.Row, ...]
    problems: tuple[str, ...]  # what is wrong beside the figures

    @property
    def is_ok(self) -> bool:
        return not self.problems and bool(self.rows) and all(row.is_ok for row in self.rows)


@dataclass(frozen=True)
class Proof:
    """The results of all folded layouts."""

    model: Mapping[str, Any]  # config.json of the tiny policy
    layouts: tuple[LayoutResult, ...]
    num_syncs: int  # each with the digests of all tensors verified in the engine
    one_rank_seconds: float

    @property
    def is_ok(self) -> bool:
        return all(layout.is_ok for layout in self.layouts)


def prove(config: RunConfig, models: Models, layouts: tuple[Folded, ...], directory: Path, progress: Progress) -> Proof:
    """Run every layout below `directory`, which is absolute. `models`: those of the run itself.

    A run that fails is a problem of its layout; when the run on one rank fails, the first layout has the problem.
    """
    trues = [megatron for _, megatron, _ in learning_sections(config)]
    has_other = has_critic(config) and config.critic.path is not None
    tiny = fold_models(trues, models, layouts, has_other, config.rollout.quantization)
    layouts = tuple(_with_recompute(folded, trues, models) for folded in layouts)
    runs = _Runs(config, tiny, directory, progress)
    first, *others = layouts
    results: list[LayoutResult] = []
    try:
        recorded = runs.record(first)
        one_rank = runs.replay(Folded(ONE_RANK, FoldedPool(unsharded(first.actor.megatron), 1), None, ()))
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


def fold_models(
    trues: Sequence[MegatronConfig],
    models: Models,
    layouts: Sequence[Folded],
    has_critic_path: bool,
    quantization: str | None = None,
) -> Models:
    """Make tiny models that fit the folded layouts. A critic from a directory of its own reads the policy's tokens.

    `trues`: the run's own layouts, one a pool.
    """
    of_actor = [folded.actor.megatron for folded in layouts]
    of_critic = [folded.pools[-1].megatron for folded in layouts]
    if not has_critic_path:
        policy = fold_model(models.policy, trues, [*of_actor, *of_critic], quantization)
        return Models(policy, policy)
    policy = fold_model(models.policy, trues[:1], of_actor, quantization)
    critic = fold_model(models.critic, trues[-1:], of_critic)
    return Models(policy, {**critic, "vocab_size": policy["vocab_size"]})


def _with_recompute(folded: Folded, trues: Sequence[MegatronConfig], models: Models) -> Folded:
    def fitting(pool: FoldedPool, true: MegatronConfig, model: Mapping[str, Any]) -> FoldedPool:
        return replace(pool, megatron=fold_recompute(pool.megatron, true, int(model["num_hidden_layers"])))

    actor = fitting(folded.actor, trues[0], models.policy)
    critic = None if folded.critic is None else fitting(folded.critic, trues[-1], models.critic)
    return replace(folded, actor=actor, critic=critic)


@dataclass
class _Runs:
    """The runs of one proof. They share models, data and directory."""

    config: RunConfig
    models: Models  # the tiny ones
    directory: Path
    progress: Progress
    recorded: Path | None = None

    def __post_init__(self) -> None:
        config, models, seed = self.config, self.models, self.config.trainer.seed
        path = write_model(self.directory / "model", models.policy)
        if needs_reference(config) and config.reference.path is not None:
            table, reference = table_for(models.policy), self.directory / "reference"
            _write_weights(reference, models.policy, table, seed + REFERENCE_SEED_OFFSET, path)
        if has_critic(config) and config.critic.path is not None:
            table, config_json = table_for(models.critic, head="value"), value_model_config(models.critic)
            _write_weights(self.directory / "critic", config_json, table, seed + CRITIC_SEED_OFFSET, path)
        write_prompts(self.directory, seed)

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
        bar = compare.QUANTISED if self.config.rollout.quantization else bar
        rows = compare.compare_metrics(steps, baseline, bar)
        for place, start in self._starts().items():
            mine, theirs = (compare.read_weights(run.run_dir / place) for run in (found, one_rank))
            rows += compare.compare_weights(mine, theirs, start, "critic: " if place == CRITIC_WEIGHTS else "")
        problems = tuple(compare.trains_nothing(baseline, rows))
        return LayoutResult(folded, found.seconds, (*rows, *self._sent(steps)), problems)

    def _sent(self, steps: Sequence[Mapping[str, Any]]) -> list[compare.Row]:
        """Bytes of each weight sync, where the run had an engine, against what the table says."""
        table = engine_table(table_for(self.models.policy), "float32", self.config.rollout.quantization)
        sizes = (DTYPE_BYTES[rule.type_of(hf, "float32")] * math.prod(hf.shape) for rule in table for hf in rule.hf)
        expected = float(sum(sizes))
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
        config = self.directory / f"{folded.name}.yaml"
        config.touch(0o600)
        text = as_yaml(fold_config(self.config, folded, self.directory), with_secrets=True)
        config.write_text(text, encoding="utf-8")
        try:
            load_run_config(config)
        except ConfigError as error:
            raise AssertionError(f"the folded configuration {config} breaks a rule: {error}") from error
        self.progress(f"{run_dir.name}: {folded.num_ranks} processes; log: {run_dir}.log")
        finished = run_train(config, words, run_dir, TIMEOUT_S)
        self.progress(f"{run_dir.name}: done in {finished.seconds:.0f} s")
        return finished


def by_name(source: WeightSource, hf_config: Mapping[str, Any], head: Head) -> Callable[[str], Tensor]:
    """A source's tensors by the names that files have for them."""
    places: dict[str, list[tuple[Rule, int]]] = {}
    for rule in table_for(hf_config, head=head):
        for index, hf in enumerate(rule.hf):
            places.setdefault(hf.stored_name, []).append((rule, index))

    def tensor(name: str) -> Tensor:
        parts = [source.hf_tensors(rule)[index] for rule, index in places[name]]
        first, at = places[name][0]
        return parts[0] if first.hf[at].entry is None else torch.stack(parts)

    return tensor


class ProgramError(RuntimeError):
    """A program that failed or took too long. The message has the end of what it said, and where the logs are."""


@dataclass(frozen=True)
class Finished:
    """A run that ended well."""

    run_dir: Path
    seconds: float


def run_train(config: Path, arguments: Sequence[str], run_dir: Path, timeout_s: float) -> Finished:
    """`rlhf-megatron train config arguments` until it ends; its output goes to `run_dir` + ".log".

    Raises ProgramError. The processes are gone when this returns or raises, KeyboardInterrupt included.
    """
    log = run_dir.with_name(run_dir.name + ".log")
    start = time.monotonic()
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(config), *arguments]
    process = ServerProcess(run_dir.name, command, log, ENVIRONMENT)
    try:
        while (code := process.exit_code) is None and time.monotonic() - start < timeout_s:
            time.sleep(POLL_S)
    finally:
        process.stop()
    if code != 0:
        reason = f"no end within {timeout_s:.0f} s" if code is None else f"exit code {code}"
        logs = f"{log}, {run_dir / 'logs'} and {run_dir / 'engines'}"
        raise ProgramError(f"{run_dir.name}: {reason}. It ended with:\n{process.tail()}\nLogs: {logs}")
    return Finished(run_dir, time.monotonic() - start)


def write_model(directory: Path, hf_config: Mapping[str, Any]) -> Path:
    """config.json and tokenizer; weights come from a seed."""
    write_character_tokenizer(directory, int(hf_config["vocab_size"]))
    (directory / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
    return directory


def _write_weights(
    directory: Path, hf_config: Mapping[str, Any], table: Sequence[Rule], seed: int, model: Path
) -> None:
    tensors = [hf for rule in table for hf in rule.hf]
    source = random_source(hf_config, seed)
    specs = [TensorSpec(name, "float32", shape) for name, shape in stored_specs(tensors).items()]
    with hf_directory_writer(directory, specs, hf_config, model) as writer:
        for hf in tensors:
            writer.write(hf.stored_name, source.tensor(hf), None if hf.entry is None else hf.entry.index)


def write_prompts(directory: Path, seed: int) -> None:
    """train.jsonl and val.jsonl: additions of one, two and three digits, so that samples have different lengths."""
    draw = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("val", NUM_HELD_OUT)):
        lines = [json.dumps(_addition(draw, 1 + number % 3)) + "\n" for number in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _addition(draw: random.Random, num_digits: int) -> dict[str, str]:
    """A problem as those of the addition task: "07+45=" -> "052"."""
    a, b = (draw.randrange(10**num_digits) for _ in range(2))
    return {"prompt": f"{a:0{num_digits}d}+{b:0{num_digits}d}=", "answer": f"{a + b:0{num_digits + 1}d}"}

"""Two steps of the real loop in folded layouts, replayed on one unsharded rank, and compared.

The first layout generates with an engine and records its rollouts; one rank and every further
layout replay them, so that all train on the same samples from the same weights. Each run is
`rlhf-megatron train` in its own processes, on a tiny model and prompts that are written here;
nothing is fetched.
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

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.run_rules import (
    has_critic,
    list_learning_pool_layouts,
    needs_reference,
)
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.data.tokenizer import write_character_tokenizer
from rlhf_megatron.planning.check import run_comparison
from rlhf_megatron.planning.check.fold_config import (
    NUM_STEPS,
    VALUE_HEAD_STD,
    fold_model_config,
    fold_recompute,
    fold_run_config,
)
from rlhf_megatron.planning.check.fold_layout import FoldedPool, FoldedRun, make_unsharded_layout
from rlhf_megatron.rollout.fleet.server_process import ServerProcess
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import make_engine_table
from rlhf_megatron.weights.hf_writer import TensorSpec, open_hf_directory_writer
from rlhf_megatron.weights.value_model import add_value_head, make_value_model_config
from rlhf_megatron.weights.weight_source import WeightSource, make_random_source
from rlhf_megatron.weights.weight_table import HeadKind, WeightRule, collect_stored_shapes
from rlhf_megatron.write_errors import write_text_file

ONE_RANK = "one_rank"
CRITIC_WEIGHTS = "hf_critic"  # in a run's directory
TIMEOUT_S = 1800.0  # of one run
POLL_S = 0.2
RUN_ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # processes, not GPUs
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
NUM_TRAIN = 64
NUM_HELD_OUT = 8
REFERENCE_SEED_OFFSET = 1000  # the reference's random weights are not those of the actor
CRITIC_SEED_OFFSET = 2000  # nor are those of a critic from a directory of its own

ReportProgress = Callable[[str], None]


@dataclass(frozen=True)
class ModelConfigs:
    """config.json of the models of a run; the critic's is the policy's where it has no
    directory of its own.
    """

    policy: Mapping[str, Any]
    critic: Mapping[str, Any]


@dataclass(frozen=True)
class LayoutProofResult:
    """The figures of one folded layout."""

    folded_run: FoldedRun
    seconds: float
    rows: tuple[run_comparison.ComparisonRow, ...]
    problems: tuple[str, ...]  # what is wrong beside the figures

    @property
    def is_ok(self) -> bool:
        """Return whether there are figures, all within their bars, and no problems."""
        return not self.problems and bool(self.rows) and all(row.is_ok for row in self.rows)


@dataclass(frozen=True)
class LayoutProof:
    """The results of all folded layouts."""

    model: Mapping[str, Any]  # config.json of the tiny policy
    layouts: tuple[LayoutProofResult, ...]
    num_syncs: int  # each with the digests of all tensors verified in the engine
    one_rank_seconds: float

    @property
    def is_ok(self) -> bool:
        """Return whether all layouts are within their bars."""
        return all(layout.is_ok for layout in self.layouts)


def prove_layouts(
    config: RunConfig,
    model_configs: ModelConfigs,
    folded_runs: tuple[FoldedRun, ...],
    directory: Path,
    report_progress: ReportProgress,
) -> LayoutProof:
    """Run every layout and one unsharded rank below `directory`, which must be absolute, and
    compare them. `model_configs`: the configurations of the run's own models.

    A run that fails is a problem of its layout; when the recorded run or the run on one rank fails,
    the proof has only the first layout, with that problem.
    """
    trues = [megatron for _, megatron, _ in list_learning_pool_layouts(config)]
    has_other = has_critic(config) and config.critic.path is not None
    tiny = fold_model_configs(
        trues, model_configs, folded_runs, has_other, config.rollout.quantization
    )
    folded_runs = tuple(
        _fold_recompute_settings(folded, trues, model_configs) for folded in folded_runs
    )
    runs = _ProofRuns(config, tiny, directory, report_progress)
    first, *others = folded_runs
    results: list[LayoutProofResult] = []
    try:
        recorded = runs.record_run(first)
        one_rank = runs.replay_recorded_run(
            FoldedRun(
                ONE_RANK, FoldedPool(make_unsharded_layout(first.actor.megatron), 1), None, ()
            )
        )
    except ProofRunError as error:
        return LayoutProof(tiny.policy, (LayoutProofResult(first, 0.0, (), (str(error),)),), 0, 0.0)
    results.append(runs.compare_with_one_rank(first, recorded, one_rank))
    for folded in others:
        try:
            results.append(
                runs.compare_with_one_rank(folded, runs.replay_recorded_run(folded), one_rank)
            )
        except ProofRunError as error:
            results.append(LayoutProofResult(folded, 0.0, (), (str(error),)))
    num_syncs = int(run_comparison.read_training_metrics(recorded.run_dir)[-1]["policy/version"])
    return LayoutProof(tiny.policy, tuple(results), num_syncs, one_rank.seconds)


def fold_model_configs(
    run_layouts: Sequence[MegatronConfig],
    model_configs: ModelConfigs,
    folded_runs: Sequence[FoldedRun],
    has_critic_path: bool,
    quantization: str | None = None,
) -> ModelConfigs:
    """Return config.json of tiny models that fit the folded layouts. A critic with a directory of
    its own has the vocabulary size of the policy.

    `run_layouts`: the run's own layouts, one for each pool.
    """
    of_actor = [folded.actor.megatron for folded in folded_runs]
    of_critic = [folded.pools[-1].megatron for folded in folded_runs]
    if not has_critic_path:
        policy = fold_model_config(
            model_configs.policy, run_layouts, [*of_actor, *of_critic], quantization
        )
        return ModelConfigs(policy, policy)
    policy = fold_model_config(model_configs.policy, run_layouts[:1], of_actor, quantization)
    critic = fold_model_config(model_configs.critic, run_layouts[-1:], of_critic)
    return ModelConfigs(policy, {**critic, "vocab_size": policy["vocab_size"]})


def _fold_recompute_settings(
    folded_run: FoldedRun, run_layouts: Sequence[MegatronConfig], model_configs: ModelConfigs
) -> FoldedRun:
    """Return the folded run with recompute settings that fit the tiny models."""

    def fold_pool(
        pool: FoldedPool, run_layout: MegatronConfig, hf_config: Mapping[str, Any]
    ) -> FoldedPool:
        """Return the pool with recompute settings that fit its tiny model."""
        return replace(
            pool,
            megatron=fold_recompute(pool.megatron, run_layout, int(hf_config["num_hidden_layers"])),
        )

    actor = fold_pool(folded_run.actor, run_layouts[0], model_configs.policy)
    critic = (
        None
        if folded_run.critic is None
        else fold_pool(folded_run.critic, run_layouts[-1], model_configs.critic)
    )
    return replace(folded_run, actor=actor, critic=critic)


@dataclass
class _ProofRuns:
    """The runs of one proof. They share models, data and directory."""

    config: RunConfig
    model_configs: ModelConfigs  # the tiny ones
    directory: Path
    report_progress: ReportProgress
    recorded_run_dir: Path | None = None

    def __post_init__(self) -> None:
        """Write the tiny models and the prompts into the directory."""
        config = self.config
        models = self.model_configs
        seed = self.config.trainer.seed
        path = write_tiny_model(self.directory / "model", models.policy)
        if needs_reference(config) and config.reference.path is not None:
            table = make_weight_table(models.policy)
            reference = self.directory / "reference"
            _write_random_weights(
                reference, models.policy, table, seed + REFERENCE_SEED_OFFSET, path
            )
        if has_critic(config) and config.critic.path is not None:
            table = make_weight_table(models.critic, head="value")
            config_json = make_value_model_config(models.critic)
            _write_random_weights(
                self.directory / "critic", config_json, table, seed + CRITIC_SEED_OFFSET, path
            )
        write_addition_prompts(self.directory, seed)

    def record_run(self, folded_run: FoldedRun) -> FinishedRun:
        """Run training with an engine, and record the run for the others to replay. Raise
        ProofRunError.
        """
        finished = self._run_folded_training(
            folded_run, ["--record"], self.directory / folded_run.name
        )
        self.recorded_run_dir = finished.run_dir
        return finished

    def replay_recorded_run(self, folded_run: FoldedRun) -> FinishedRun:
        """Train on the recorded steps in another layout. Raise ProofRunError."""
        assert self.recorded_run_dir is not None
        words = ["--replay", str(NUM_STEPS), "--replay-from", str(self.recorded_run_dir)]
        return self._run_folded_training(
            folded_run, words, self.directory / f"{folded_run.name}-replay"
        )

    def compare_with_one_rank(
        self, folded_run: FoldedRun, finished_run: FinishedRun, one_rank_run: FinishedRun
    ) -> LayoutProofResult:
        """Compare metrics, trained weights and bytes of weight syncs of a finished run with the run
        on one rank.
        """
        steps, baseline = (
            run_comparison.read_training_metrics(run.run_dir)
            for run in (finished_run, one_rank_run)
        )
        bar = load_run_config(
            self.directory / f"{folded_run.name}.yaml"
        ).config.checks.log_prob_max_abs_diff
        bar = run_comparison.QUANTISED_TOLERANCE if self.config.rollout.quantization else bar
        rows = run_comparison.compare_metrics(steps, baseline, bar)
        for place, start in self._make_start_weight_getters().items():
            mine, theirs = (
                run_comparison.read_hf_weights(run.run_dir / place)
                for run in (finished_run, one_rank_run)
            )
            rows += run_comparison.compare_weights(
                mine, theirs, start, "critic: " if place == CRITIC_WEIGHTS else ""
            )
        problems = tuple(run_comparison.find_reasons_for_no_training(baseline, rows))
        return LayoutProofResult(
            folded_run, finished_run.seconds, (*rows, *self._compare_sync_bytes(steps)), problems
        )

    def _compare_sync_bytes(
        self, metric_rows: Sequence[Mapping[str, Any]]
    ) -> list[run_comparison.ComparisonRow]:
        """Return the bytes of each weight sync against those of the weight table; [] for a run
        without an engine.
        """
        table = make_engine_table(
            make_weight_table(self.model_configs.policy),
            "float32",
            self.config.rollout.quantization,
        )
        sizes = (
            DTYPE_BYTES[rule.get_sent_dtype(hf, "float32")] * math.prod(hf.shape)
            for rule in table
            for hf in rule.hf_tensors
        )
        expected = float(sum(sizes))
        return [
            run_comparison.ComparisonRow(
                "sync/num_bytes",
                f"step {step['step']}",
                found,
                expected,
                abs(found - expected),
                0.0,
            )
            for step in metric_rows
            if (found := step.get("sync/num_bytes")) is not None
        ]

    def _make_start_weight_getters(self) -> dict[str, Callable[[str], Tensor]]:
        """Return, by directory of trained weights in a run, a function from a tensor's name to its
        value before the first step.
        """
        seed = self.config.model.init_seed
        source = make_random_source(self.model_configs.policy, 1 if seed is None else seed)
        starts = {"hf": make_tensor_getter(source, self.model_configs.policy, "vocabulary")}
        if not has_critic(self.config):
            return starts
        if self.config.critic.path is not None:
            return {
                **starts,
                CRITIC_WEIGHTS: run_comparison.read_hf_weights(
                    self.directory / "critic"
                ).__getitem__,
            }
        std = max(self.config.critic.value_head_init_std, VALUE_HEAD_STD)
        first = add_value_head(source, std, self.config.trainer.seed)
        return {
            **starts,
            CRITIC_WEIGHTS: make_tensor_getter(first, self.model_configs.critic, "value"),
        }

    def _run_folded_training(
        self, folded_run: FoldedRun, arguments: Sequence[str], run_dir: Path
    ) -> FinishedRun:
        """Write the folded configuration, and run training with it until it ends. Raise
        ProofRunError.
        """
        config = self.directory / f"{folded_run.name}.yaml"
        config.touch(0o600)
        text = render_config_yaml(
            fold_run_config(self.config, folded_run, self.directory), with_secrets=True
        )
        write_text_file(config, text)
        try:
            load_run_config(config)
        except ConfigError as error:
            raise AssertionError(
                f"the folded configuration {config} breaks a rule: {error}"
            ) from error
        self.report_progress(
            f"{run_dir.name}: {folded_run.num_ranks} processes; log: {run_dir}.log"
        )
        finished = run_train_command(config, arguments, run_dir, TIMEOUT_S)
        self.report_progress(f"{run_dir.name}: done in {finished.seconds:.0f} s")
        return finished


def make_tensor_getter(
    weight_source: WeightSource, hf_config: Mapping[str, Any], head: HeadKind
) -> Callable[[str], Tensor]:
    """Return a function that reads a tensor of the source by the name that weight files have for
    it.
    """
    places: dict[str, list[tuple[WeightRule, int]]] = {}
    for rule in make_weight_table(hf_config, head=head):
        for index, hf in enumerate(rule.hf_tensors):
            places.setdefault(hf.stored_name, []).append((rule, index))

    def get_tensor(stored_name: str) -> Tensor:
        """Return the tensor of this name, stacked where the file has several tensors in one."""
        parts = [weight_source.read_hf_tensors(rule)[index] for rule, index in places[stored_name]]
        first, at = places[stored_name][0]
        return parts[0] if first.hf_tensors[at].entry is None else torch.stack(parts)

    return get_tensor


class ProofRunError(RuntimeError):
    """A program that failed or took too long. The message has the end of what it said, and
    where the logs are.
    """


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended well."""

    run_dir: Path
    seconds: float


def run_train_command(
    config: Path, arguments: Sequence[str], run_dir: Path, timeout_s: float
) -> FinishedRun:
    """Run `rlhf-megatron train config arguments` until it ends; its output goes to `run_dir` +
    ".log".

    Raise ProofRunError where it fails or takes longer than `timeout_s`. Its processes are gone when
    this function returns or raises, KeyboardInterrupt included.
    """
    log = run_dir.with_name(run_dir.name + ".log")
    start = time.monotonic()
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(config), *arguments]
    process = ServerProcess(run_dir.name, command, log, RUN_ENVIRONMENT)
    try:
        while (code := process.exit_code) is None and time.monotonic() - start < timeout_s:
            time.sleep(POLL_S)
    finally:
        process.stop()
    if code != 0:
        reason = f"no end within {timeout_s:.0f} s" if code is None else f"exit code {code}"
        logs = f"{log}, {run_dir / 'logs'} and {run_dir / 'engines'}"
        raise ProofRunError(
            f"{run_dir.name}: {reason}. It ended with:\n{process.read_log_tail()}\nLogs: {logs}"
        )
    return FinishedRun(run_dir, time.monotonic() - start)


def write_tiny_model(directory: Path, hf_config: Mapping[str, Any]) -> Path:
    """Write config.json and a character tokenizer, and return the directory. There are no weight
    files: the weights come from a seed.
    """
    write_character_tokenizer(directory, int(hf_config["vocab_size"]))
    write_text_file(directory / "config.json", json.dumps(dict(hf_config), indent=2) + "\n")
    return directory


def _write_random_weights(
    directory: Path,
    hf_config: Mapping[str, Any],
    weight_table: Sequence[WeightRule],
    seed: int,
    tokenizer_dir: Path,
) -> None:
    """Write a model directory with random weights of this seed, and the tokenizer of
    `tokenizer_dir`.
    """
    tensors = [hf for rule in weight_table for hf in rule.hf_tensors]
    source = make_random_source(hf_config, seed)
    specs = [
        TensorSpec(name, "float32", shape) for name, shape in collect_stored_shapes(tensors).items()
    ]
    with open_hf_directory_writer(directory, specs, hf_config, tokenizer_dir) as writer:
        for hf in tensors:
            writer.write_tensor(
                hf.stored_name,
                source.make_random_tensor(hf),
                None if hf.entry is None else hf.entry.index,
            )


def write_addition_prompts(directory: Path, seed: int) -> None:
    """Write train.jsonl and val.jsonl: additions of one, two and three digits, so that samples have
    different lengths.
    """
    draw = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("val", NUM_HELD_OUT)):
        lines = [
            json.dumps(_make_addition_problem(draw, 1 + number % 3)) + "\n"
            for number in range(count)
        ]
        write_text_file(directory / f"{name}.jsonl", "".join(lines))


def _make_addition_problem(generator: random.Random, num_digits: int) -> dict[str, str]:
    """Return a problem like those of the addition task: "07+45=" with the answer "052"."""
    a, b = (generator.randrange(10**num_digits) for _ in range(2))
    return {
        "prompt": f"{a:0{num_digits}d}+{b:0{num_digits}d}=",
        "answer": f"{a + b:0{num_digits + 1}d}",
    }

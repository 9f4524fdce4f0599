"""The same recorded rollouts trained in every layout: losses and gradient norms of each \
step must agree.

    python -m benchmarks.replay_layouts                  # records 5 steps of the quickstart, then
                                                         replays them 10 times
    python -m benchmarks.replay_layouts --record RUN_DIR # replays an earlier record of
        the quickstart

Then the same with PPO, the critic in the actor's pool and in a pool and layout of its own.

The record is made once, on one rank, from weights that already solve some problems: those in
examples/quickstart/warm_model where they are, else a warm-up is part of the recorded run. Each
replay is a whole `rlhf-megatron train --replay` in float32 with its launcher, controller and hosts;
log-probs, advantages, mini-batches and optimizer steps are computed anew. One rank, inline, is what
the others are compared with:

    |loss - loss at one rank|             <= 1e-4 x mean |advantage| over the step's response tokens
    |grad norm / grad norm at one rank - 1| <= 1e-4
    |value loss / value loss at one rank - 1| <= 1e-4

PPO's advantages are whitened over a step: their scale is 1. In its first step the critic learns
alone. Its value head starts with weights from a seed, so that the first values already differ from
token to token.

Losses and norms are means over the step's optimizer steps, as a run reports them. Exit code 1 on a
miss. Writes benchmarks/results/replay_layouts.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.common import RESULTS, ROOT, write_result
from benchmarks.parity.layouts import LAYOUTS, Axes
from rlhf_megatron.weights.parallel_layout import make_parallel_layout

CONFIG = ROOT / "configs" / "quickstart.yaml"
PPO_CONFIG = ROOT / "configs" / "quickstart_ppo.yaml"
MODEL = ROOT / "examples" / "quickstart" / "model"
WARM_MODEL = ROOT / "examples" / "quickstart" / "warm_model"
RUNS = ROOT / "runs" / "replay_layouts"
LOSS_TOLERANCE = 1e-4  # times the mean absolute advantage
RELATIVE_TOLERANCE = 1e-4
LOSSES = ("actor/loss", "actor/pg_loss")
RELATIVE = ("actor/grad_norm", "critic/vf_loss", "critic/grad_norm")
PPO_ADVANTAGE = 1.0  # root mean square
TIMEOUT_S = 900.0
BASELINE = "one_rank"
REPLAYED = (
    BASELINE,
    "tp2",
    "tp2_sequence",
    "pp2",
    "pp2_vpp2",
    "dp2",
    "dp2_distributed_overlap",
    "cp2",
    "tp2_pp2",
    "tp2_pp2_dp2",
)


@dataclass(frozen=True)
class Placement:
    """Where the models stand. `critic`: a pool of its own; None: the actor's pool, where there is a
    critic at all.
    """

    actor: Axes
    critic: Axes | None = None

    @property
    def name(self) -> str:
        return self.actor.name + (f"_critic_{self.critic.name}" if self.critic else "")

    @property
    def settings(self) -> list[str]:
        if self.critic is None:
            return in_layout(self.actor)
        ranks = self.actor.num_ranks + self.critic.num_ranks
        return [
            *megatron_settings("actor", self.actor),
            *megatron_settings("critic", self.critic),
            f"critic.num_ranks={self.critic.num_ranks}",
            "trainer.runtime=torchrun",
            f"trainer.n_gpus_per_node={ranks}",
        ]


ONE = Placement(LAYOUTS[BASELINE])
PPO_REPLAYED = (
    ONE,
    Placement(LAYOUTS["tp2_pp2"]),
    Placement(LAYOUTS["tp2_pp2"], LAYOUTS["tp2"]),
    Placement(LAYOUTS["dp2"], LAYOUTS["pp2"]),
    Placement(LAYOUTS["one_rank"], LAYOUTS["cp2"]),
)
PPO_SETTINGS = ("trainer.critic_warmup=1", "critic.value_head_init_std=0.05")


@dataclass(frozen=True)
class Row:
    """One figure of one step in one layout."""

    layout: str
    step: int
    quantity: str
    value: float
    one_rank: float
    error: float
    bar: float
    ok: bool


def train(config: Path, name: str, arguments: Sequence[str], runs: Path) -> Path:
    """`rlhf-megatron train` in processes of its own. Returns the directory of that name; SystemExit
    when it fails.
    """
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{name}.log"
    shared = [
        f"trainer.default_local_dir={runs}",
        f"trainer.experiment_name={name}",
        "trainer.test_freq=0",
    ]
    shared += ["trainer.save_last=none"]
    shared += [
        "trainer.val_before_train=false",
        "trainer.device=cpu",
        "trainer.logger=[jsonl]",
        "model.dtype=float32",
    ]
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(config), *shared, *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
            env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"none within {TIMEOUT_S:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        raise SystemExit(
            f"{name}: exit code {code}; {log} ends with:\n{log.read_text(errors='replace')[-3000:]}"
        )
    return runs / name


def in_layout(axes: Axes) -> list[str]:
    """The settings of a layout, of the actor's pool alone."""
    runtime = "inline" if axes.num_ranks == 1 else "torchrun"
    return [
        f"trainer.runtime={runtime}",
        f"trainer.n_gpus_per_node={axes.num_ranks}",
        *megatron_settings("actor", axes),
    ]


def megatron_settings(section: str, axes: Axes) -> list[str]:
    """The quickstart has its own tp and pp, so these are always given."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return [
        f"{section}.megatron.{field.name}={json.dumps(value)}"
        for field in fields(axes.megatron)
        if (value := getattr(axes.megatron, field.name)) != field.default or field.name in sizes
    ]


def weights(path: Path) -> list[str]:
    """Start from a directory of weights, without a warm-up."""
    return [
        f"model.path={path}",
        f"model.tokenizer_path={MODEL}",
        "model.init_seed=null",
        "warmup.max_steps=0",
    ]


def record(config: Path, name: str, more: Sequence[str], num_steps: int, runs: Path) -> Path:
    """The run directory of a run recorded on one rank."""
    start = (
        weights(WARM_MODEL) if any(WARM_MODEL.glob("*.safetensors")) else ["warmup.save_hf=true"]
    )
    total = f"trainer.total_training_steps={num_steps}"
    return train(config, name, [*ONE.settings, *start, *more, total, "--record"], runs)


def start_weights(recorded: Path) -> Path:
    """The weights that the recorded run's first step started from."""
    kept = recorded / "warm_model"
    return kept if kept.is_dir() else WARM_MODEL


def replay(
    config: Path,
    recorded: Path,
    start: Sequence[str],
    placement: Placement,
    num_steps: int,
    runs: Path,
) -> list[dict[str, float]]:
    """Metrics of each step."""
    settings = [*placement.settings, *start, f"trainer.total_training_steps={num_steps}"]
    name = f"{config.stem}_{placement.name}"
    named = train(
        config, name, [*settings, "--replay", str(num_steps), "--replay-from", str(recorded)], runs
    )
    run_dir = named.with_name(f"{named.name}-replay")
    layout = json.loads((run_dir / "summary.json").read_text())["layout"]
    asked = make_parallel_layout(placement.actor.megatron, placement.actor.num_ranks)
    assert layout == str(asked), f"the actor of {name} ran as {layout}"
    return step_metrics(run_dir)


def step_metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


def mean_abs_advantage(recorded: Path, step: int) -> float:
    """Over response tokens: (reward - mean of the group) / standard deviation of the group."""
    from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder

    batch = RolloutRecorder(recorded / "record").read_step(step)
    total = 0.0
    for group in batch.group_ids.unique():
        rows = (batch.group_ids == group).nonzero().flatten().tolist()
        rewards = batch.rewards[rows].double()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for row, advantage in zip(rows, advantages.abs().tolist(), strict=True):
            total += advantage * int(
                batch.response_mask[int(batch.offsets[row]) : int(batch.offsets[row + 1])].sum()
            )
    return total / int(batch.response_mask.sum())


def compare(
    layout: str,
    found: list[dict[str, float]],
    baseline: list[dict[str, float]],
    advantages: Sequence[float],
) -> list[Row]:
    """`advantages`: mean absolute advantage of each step. A quantity may be missing: in a step
    without an actor's update, in a run without a critic; but on both sides then.
    """
    rows = []
    for step, (mine, theirs, advantage) in enumerate(
        zip(found, baseline, advantages, strict=True), 1
    ):
        for name in (*LOSSES, *RELATIVE):
            if name not in theirs and name not in mine:
                continue
            error = abs(mine[name] - theirs[name])
            bar = LOSS_TOLERANCE * advantage
            if name in RELATIVE:
                error = error / abs(theirs[name])
                bar = RELATIVE_TOLERANCE
            rows.append(
                Row(layout, step, name, mine[name], theirs[name], error, bar, bool(error <= bar))
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    wide = max([6, *(len(row.layout) for row in rows)])
    lines = [
        f"{'layout':<{wide}} {'step':>4} {'quantity':<16} {'value':>12} {'error':>9} {'bar':>9}"
    ]
    for row in rows:
        mark = "" if row.ok else "  OVER THE BAR"
        lines.append(
            f"{row.layout:<{wide}} {row.step:>4} {row.quantity:<16} {row.value:12.5e}"
            f" {row.error:9.2e} {row.bar:9.2e}{mark}"
        )
    return "\n".join(lines)


def replay_all(
    config: Path,
    recorded: Path,
    start: Sequence[str],
    placements: Sequence[Placement],
    advantages: Sequence[float],
    runs: Path,
) -> list[Row]:
    """Rows of every placement but the baseline, and of the recorded run. `advantages`: the scale
    of each step's.

    Raises ValueError where the record teaches nothing.
    """
    if min(advantages) < 1e-3:
        raise ValueError(
            f"mean |advantage| of the steps is {advantages}: rewards must differ within groups."
        )
    num_steps = len(advantages)
    baseline = replay(config, recorded, start, ONE, num_steps, runs)
    rows = []
    for placement in placements:
        if placement != ONE:
            begin = time.monotonic()
            metrics = replay(config, recorded, start, placement, num_steps, runs)
            found = compare(placement.name, metrics, baseline, advantages)
            rows += found
            worst = max(row.error / row.bar for row in found)
            print(
                (
                    f"{placement.name}: {time.monotonic() - begin:.0f} s, at most"
                    f" {worst:.2g} of the bar"
                ),
                flush=True,
            )
    if (recorded / "metrics.jsonl").exists():
        rows += compare("recorded run", step_metrics(recorded)[:num_steps], baseline, advantages)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay_layouts", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--record", type=Path, help="run directory of an earlier record; made when left out"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps of the loop (%(default)s)")
    parser.add_argument(
        "--layouts", default=",".join(REPLAYED), help="comma-separated (%(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "replay_layouts.json",
        help="result file (%(default)s)",
    )
    args = parser.parse_args(argv)
    unknown = [name for name in args.layouts.split(",") if name not in LAYOUTS]
    if unknown:
        raise SystemExit(f"unknown layout {', '.join(unknown)}; known: {', '.join(LAYOUTS)}.")
    begin = time.monotonic()
    recorded = (
        args.record.resolve() if args.record else record(CONFIG, "record", (), args.steps, RUNS)
    )
    print(f"record: {recorded} ({time.monotonic() - begin:.0f} s)", flush=True)
    start = weights(start_weights(recorded))
    placements = [Placement(LAYOUTS[name]) for name in args.layouts.split(",")]
    advantages = [mean_abs_advantage(recorded, step) for step in range(1, args.steps + 1)]
    rows = replay_all(CONFIG, recorded, start, placements, advantages, RUNS)
    print(table(rows))
    ppo_recorded = record(PPO_CONFIG, "record_ppo", PPO_SETTINGS, args.steps, RUNS)
    ppo_start = [*weights(start_weights(ppo_recorded)), *PPO_SETTINGS]
    scales = [PPO_ADVANTAGE] * args.steps
    ppo_rows = replay_all(PPO_CONFIG, ppo_recorded, ppo_start, PPO_REPLAYED, scales, RUNS)
    print(table(ppo_rows))
    misses = sum(not row.ok for row in [*rows, *ppo_rows])
    seconds = time.monotonic() - begin
    result = {
        "baseline": "one rank, inline",
        "start_weights": os.path.relpath(start_weights(recorded), ROOT),
        "mean_abs_advantage": advantages,
        "num_over_the_bar": misses,
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
        "ppo_rows": [asdict(row) for row in ppo_rows],
    }
    command = " ".join(
        ["python -m benchmarks.replay_layouts", *(sys.argv[1:] if argv is None else argv)]
    )
    path = write_result(args.out.stem, command, result, args.out.parent)
    print(f"{len(rows) + len(ppo_rows)} figures, {misses} over the bar, {seconds:.0f} s; {path}")
    return 1 if misses or not rows or not ppo_rows else 0


if __name__ == "__main__":
    sys.exit(main())

"""The same recorded rollouts trained in every layout: losses and gradient norms of each step must agree.

    python -m benchmarks.replay_layouts                  # records 5 steps of the quickstart, then replays them 10 times
    python -m benchmarks.replay_layouts --record RUN_DIR # replays an earlier record: a run directory of this program

The record is made once, on one rank, from weights that already solve some problems: those in
examples/quickstart/warm_model where they are, else a warm-up is part of the recorded run. Each replay is a whole
`rlhf-megatron train --replay` in float32 with its launcher, controller and hosts; log-probs, advantages, mini-batches
and optimizer steps are computed anew. One rank, inline, is what the others are compared with:

    |loss - loss at one rank|             <= 1e-4 x mean |advantage| over the step's response tokens
    |grad norm / grad norm at one rank - 1| <= 1e-4

Losses and norms are means over the step's optimizer steps, as a run reports them. Exit code 1 on a miss.
Writes benchmarks/results/replay_layouts.json.
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
from rlhf_megatron.parallel.layout import layout_of

CONFIG = ROOT / "configs" / "quickstart.yaml"
MODEL = ROOT / "examples" / "quickstart" / "model"
WARM_MODEL = ROOT / "examples" / "quickstart" / "warm_model"
RUNS = ROOT / "runs" / "replay_layouts"
LOSS_TOLERANCE = 1e-4  # times the mean absolute advantage
NORM_TOLERANCE = 1e-4  # relative
LOSSES = ("actor/loss", "actor/pg_loss")
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


def train(name: str, arguments: Sequence[str], runs: Path) -> Path:
    """`rlhf-megatron train` in processes of its own. Returns the directory of that name; SystemExit when it fails."""
    runs.mkdir(parents=True, exist_ok=True)
    log = runs / f"{name}.log"
    shared = [f"trainer.default_local_dir={runs}", f"trainer.experiment_name={name}", "trainer.test_freq=0"]
    shared += ["trainer.val_before_train=false", "trainer.device=cpu", "trainer.logger=[jsonl]", "model.dtype=float32"]
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(CONFIG), *shared, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
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
        raise SystemExit(f"{name}: exit code {code}; {log} ends with:\n{log.read_text(errors='replace')[-3000:]}")
    return runs / name


def in_layout(axes: Axes) -> list[str]:
    """The settings of a layout. The quickstart has its own tp and pp, so these are always given."""
    runtime = "inline" if axes.num_ranks == 1 else "torchrun"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    given = [
        f"actor.megatron.{field.name}={json.dumps(value)}"
        for field in fields(axes.megatron)
        if (value := getattr(axes.megatron, field.name)) != field.default or field.name in sizes
    ]
    return [f"trainer.runtime={runtime}", f"trainer.n_gpus_per_node={axes.num_ranks}", *given]


def weights(path: Path) -> list[str]:
    """Start from a directory of weights, without a warm-up."""
    return [f"model.path={path}", f"model.tokenizer_path={MODEL}", "model.init_seed=null", "warmup.max_steps=0"]


def record(num_steps: int, runs: Path) -> Path:
    """The run directory of a recorded run."""
    start = weights(WARM_MODEL) if any(WARM_MODEL.glob("*.safetensors")) else ["warmup.save_hf=true"]
    return train(
        "record", [*in_layout(LAYOUTS[BASELINE]), *start, f"trainer.total_training_steps={num_steps}", "--record"], runs
    )


def start_weights(recorded: Path) -> Path:
    """The weights that the recorded run's first step started from."""
    kept = recorded / "warm_model"
    return kept if kept.is_dir() else WARM_MODEL


def replay(recorded: Path, start: Sequence[str], axes: Axes, num_steps: int, runs: Path) -> list[dict[str, float]]:
    """Metrics of each step."""
    arguments = ["--replay", str(num_steps), "--replay-from", str(recorded)]
    total = f"trainer.total_training_steps={num_steps}"
    named = train(axes.name, [*in_layout(axes), *start, total, *arguments], runs)
    run_dir = named.with_name(f"{named.name}-replay")
    layout = json.loads((run_dir / "summary.json").read_text())["layout"]
    assert layout == str(layout_of(axes.megatron, axes.num_ranks)), f"{axes.name} ran as {layout}"
    return step_metrics(run_dir)


def step_metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


def mean_abs_advantage(recorded: Path, step: int) -> float:
    """Over response tokens: (reward - mean of the group) / standard deviation of the group."""
    from rlhf_megatron.scheduler.recorder import Recorder

    batch = Recorder(recorded / "record").read(step)
    total = 0.0
    for group in batch.group_ids.unique():
        rows = (batch.group_ids == group).nonzero().flatten().tolist()
        rewards = batch.rewards[rows].double()
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for row, advantage in zip(rows, advantages.abs().tolist(), strict=True):
            total += advantage * int(batch.response_mask[int(batch.offsets[row]) : int(batch.offsets[row + 1])].sum())
    return total / int(batch.response_mask.sum())


def compare(
    layout: str, found: list[dict[str, float]], baseline: list[dict[str, float]], advantages: Sequence[float]
) -> list[Row]:
    """`advantages`: mean absolute advantage of each step."""
    rows = []
    for step, (mine, theirs, advantage) in enumerate(zip(found, baseline, advantages, strict=True), 1):
        figures = [(name, abs(mine[name] - theirs[name]), LOSS_TOLERANCE * advantage) for name in LOSSES]
        norm = "actor/grad_norm"
        figures.append((norm, abs(mine[norm] / theirs[norm] - 1), NORM_TOLERANCE))
        for name, error, bar in figures:
            rows.append(Row(layout, step, name, mine[name], theirs[name], error, bar, bool(error <= bar)))
    return rows


def table(rows: Sequence[Row]) -> str:
    wide = max([6, *(len(row.layout) for row in rows)])
    lines = [f"{'layout':<{wide}} {'step':>4} {'quantity':<16} {'value':>12} {'error':>9} {'bar':>9}"]
    for row in rows:
        mark = "" if row.ok else "  OVER THE BAR"
        lines.append(
            f"{row.layout:<{wide}} {row.step:>4} {row.quantity:<16} {row.value:12.5e} {row.error:9.2e}"
            f" {row.bar:9.2e}{mark}"
        )
    return "\n".join(lines)


def replay_all(
    recorded: Path, start: Sequence[str], layouts: Sequence[Axes], num_steps: int, runs: Path
) -> tuple[list[Row], list[float]]:
    """(rows of every layout but the baseline, mean absolute advantage of each step). Raises ValueError where the
    record teaches nothing."""
    advantages = [mean_abs_advantage(recorded, step) for step in range(1, num_steps + 1)]
    if min(advantages) < 1e-3:
        raise ValueError(f"mean |advantage| of the steps is {advantages}: rewards must differ within groups.")
    baseline = replay(recorded, start, LAYOUTS[BASELINE], num_steps, runs)
    rows = []
    for axes in layouts:
        if axes.name != BASELINE:
            begin = time.monotonic()
            found = compare(axes.name, replay(recorded, start, axes, num_steps, runs), baseline, advantages)
            rows += found
            worst = max(row.error / row.bar for row in found)
            print(f"{axes.name}: {time.monotonic() - begin:.0f} s, at most {worst:.2g} of the bar", flush=True)
    if (recorded / "metrics.jsonl").exists():
        rows += compare("recorded run", step_metrics(recorded)[:num_steps], baseline, advantages)
    return rows, advantages


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay_layouts", description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=Path, help="run directory of an earlier record; made when left out")
    parser.add_argument("--steps", type=int, default=5, help="steps of the loop (%(default)s)")
    parser.add_argument("--layouts", default=",".join(REPLAYED), help="comma-separated (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "replay_layouts.json", help="result file (%(default)s)")
    args = parser.parse_args(argv)
    unknown = [name for name in args.layouts.split(",") if name not in LAYOUTS]
    if unknown:
        raise SystemExit(f"unknown layout {', '.join(unknown)}; known: {', '.join(LAYOUTS)}.")
    begin = time.monotonic()
    recorded = args.record.resolve() if args.record else record(args.steps, RUNS)
    print(f"record: {recorded} ({time.monotonic() - begin:.0f} s)", flush=True)
    start = weights(start_weights(recorded))
    layouts = [LAYOUTS[name] for name in args.layouts.split(",")]
    rows, advantages = replay_all(recorded, start, layouts, args.steps, RUNS)
    print(table(rows))
    misses = sum(not row.ok for row in rows)
    seconds = time.monotonic() - begin
    result = {
        "baseline": "one rank, inline",
        "start_weights": os.path.relpath(start_weights(recorded), ROOT),
        "mean_abs_advantage": advantages,
        "num_over_the_bar": misses,
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }
    command = " ".join(["python -m benchmarks.replay_layouts", *(sys.argv[1:] if argv is None else argv)])
    path = write_result(args.out.stem, command, result, args.out.parent)
    print(f"{len(rows)} figures, {misses} over the bar, {seconds:.0f} s; {path}")
    return 1 if misses or not rows else 0


if __name__ == "__main__":
    sys.exit(main())

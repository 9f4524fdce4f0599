"""The head of a report: what was run, how it ended, what it came to, and which settings somebody chose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rlhf_megatron.config.keys import leaves, value_of
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import as_text
from rlhf_megatron.evaluation.intervals import Z95
from rlhf_megatron.observe.line_file import COMPLETE, FAILED, STOPPED
from rlhf_megatron.observe.report.charts import MASKED, NUM_SAMPLES, REWARD_STD
from rlhf_megatron.observe.report.files import Row, RunFiles

STEP_S = "timing_s/step"
FRESH_S = 180.0  # a run without a summary that wrote so lately may still be at work
NO_INFLUENCE = (  # on what a run does
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.samples_kept",
)
WINDOW = 10  # steps at each end that "first" and "last" reward are means of


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval, where there is one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Fact:
    label: str
    value: str
    hint: str = ""


@dataclass(frozen=True)
class Setting:
    key: str
    value: str
    default: str  # empty: this version has no such setting
    doc: str


@dataclass(frozen=True)
class Status:
    word: str  # "finished", "stopped", "failed", "interrupted" or "running"
    text: str


def setting(run: RunFiles, key: str) -> Any:
    """The value of a setting in the run's config.yaml; None where it is not written there."""
    value: Any = run.config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def last_step(run: RunFiles) -> int:
    return run.steps[-1].step if run.steps else 0


def seconds(run: RunFiles) -> float:
    """Wall time, as far as the files tell."""
    told = (run.summary or {}).get("seconds")
    rows = [*run.steps, *run.evaluations, *run.warmups]
    return float(told) if isinstance(told, int | float) else max(row.seconds for row in rows)


def status(run: RunFiles) -> Status:
    """How the run ended, as attempts.jsonl tells; without an end there, what its logs and the age of its files tell."""
    step, total = last_step(run), setting(run, "trainer.total_training_steps")
    place = f"step {step} of {total}" if isinstance(total, int) else f"step {step}"
    if not run.steps and run.warmups:
        place = f"warm-up step {run.warmups[-1].step}"
    last = run.attempts[-1] if run.attempts else {}
    word, _, why = str(last.get("reason", "")).partition(": ")
    if run.summary is not None or word == COMPLETE:
        return Status("finished", f"finished at {place}")
    if word in (STOPPED, FAILED):
        return Status(word, f"{word} after {place}: {why}")
    if run.log_errors:
        return Status("failed", f"failed after {place}")
    if run.age_s < FRESH_S:
        return Status("running", f"no summary yet; {place} was written less than {FRESH_S / 60:.0f} minutes ago")
    return Status("interrupted", f"interrupted after {place}: no summary.json and no error in its logs")


RECENT = 20  # steps whose mean is what a step takes


def seconds_left(step_seconds: Sequence[float], steps_left: int) -> float | None:
    """Estimate the time of the steps to come from the last ones, without evaluations; None where no step is known
    yet.
    """
    recent = list(step_seconds)[-RECENT:]
    return sum(recent) / len(recent) * steps_left if recent else None


def progress_lines(run: RunFiles) -> list[str]:
    """Return what `rlhf-megatron status` prints."""
    found, total, done = status(run), setting(run, "trainer.total_training_steps"), last_step(run)
    if found.word != "running":
        lines = [found.text]
    else:
        place = f"step {done} of {total}" if done or not run.warmups else f"warm-up step {run.warmups[-1].step}"
        lines = [f"running, {place} done {duration(run.age_s)} ago"]
        took = [row.metrics[STEP_S] for row in run.steps if math.isfinite(row.metrics.get(STEP_S, math.nan))]
        left = seconds_left(took, total - done) if isinstance(total, int) else None
        if left is not None:
            lines.append(f"about {duration(left)} left for {total - done} steps, as long as the last ones")
    rewards = [row for row in run.steps if "critic/rewards/mean" in row.metrics]
    if rewards:
        lines.append(f"reward {rewards[-1].metrics['critic/rewards/mean']:.3f} at step {rewards[-1].step}")
    if (value := _accuracy(run.evaluations[-1] if run.evaluations else None)) is not None:
        lines.append(f"held-out accuracy {value.value:.3f} at step {run.evaluations[-1].step}")
    if run.log_errors and found.word == "running":
        lines.append(f"logged: {run.log_errors[-1]}")
    return lines


def held_out(run: RunFiles) -> tuple[Estimate | None, Estimate | None]:
    """Held-out accuracy before the first step, and last."""
    before = next((row for row in run.evaluations if row.step == 0), None)
    after = next((row for row in reversed(run.evaluations) if row.step > 0), None)
    return _accuracy(before), _accuracy(after)


def _accuracy(row: Row | None) -> Estimate | None:
    value = row.metrics.get("val/accuracy") if row else None
    if row is None or value is None:
        return None
    return Estimate(value, row.metrics.get("val/accuracy_low"), row.metrics.get("val/accuracy_high"))


def gain(before: Estimate, after: Estimate) -> Estimate:
    """after - before. Interval: Newcombe 1998, method 10, of two independent proportions; wide for the same items."""
    if None in (before.low, before.high, after.low, after.high):
        return Estimate(after.value - before.value)
    assert before.low is not None and before.high is not None and after.low is not None and after.high is not None
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    difference = after.value - before.value
    return Estimate(difference, difference - down, difference + up)


def mean_reward(rows: Sequence[Row]) -> Estimate | None:
    """Mean over steps of the mean reward; the interval is over their samples, where the rows have the deviation."""
    rows = [row for row in rows if math.isfinite(row.metrics.get("critic/rewards/mean", math.nan))]
    if not rows:
        return None
    value = sum(row.metrics["critic/rewards/mean"] for row in rows) / len(rows)
    variance = 0.0
    for row in rows:
        count = row.metrics.get(NUM_SAMPLES, 0.0) * (1 - row.metrics.get(MASKED, 0.0))
        if REWARD_STD not in row.metrics or not count >= 2:
            return Estimate(value)
        variance += row.metrics[REWARD_STD] ** 2 / count
    half = Z95 * math.sqrt(variance) / len(rows)
    return Estimate(value, value - half, value + half)


def ends(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """The first and the last steps, at most WINDOW and never more than half of all."""
    count = max(1, min(WINDOW, len(rows) // 2))
    return rows[:count], rows[-count:]


def layouts(run: RunFiles) -> str:
    """Return the layouts of the actor's pool and of the critic's, if it has one; of a resumed run all of them in
    turn.
    """
    told = [line.get("layouts") for line in run.attempts] + [(run.summary or {}).get("layouts")]
    texts = [", ".join(f"{name} {layout}" for name, layout in one.items()) for one in told if isinstance(one, Mapping)]
    return ", then ".join(text for text, _ in groupby(texts)) or str((run.summary or {}).get("layout") or "")


def _ranks(run: RunFiles) -> int:
    nodes, per_node = setting(run, "trainer.nnodes"), setting(run, "trainer.n_gpus_per_node")
    return nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else 0


def facts(run: RunFiles) -> list[Fact]:
    """Describe the run, a line each, as far as its files tell."""
    summary = run.summary or {}
    engine, num_engines = setting(run, "rollout.engine"), setting(run, "rollout.num_engines")
    prompts, group = setting(run, "data.train_batch_size"), setting(run, "rollout.n")
    sources = setting(run, "data.sources") or []
    names = [str(s.get("name")) for s in sources if isinstance(s, Mapping)]
    versions = summary.get("versions")
    found = [
        Fact("Model", _joined(setting(run, "model.path") or summary.get("model"), setting(run, "model.dtype"))),
        Fact("Layout", layouts(run), "of the ranks: tensor, pipeline, context and data parallel sizes"),
        Fact("Ranks", str(_ranks(run) or "")),
        Fact("Engine", f"{num_engines} × {engine}" if engine and num_engines else str(engine or "")),
        Fact(
            "Algorithm", _joined(setting(run, "algorithm.adv_estimator"), setting(run, "actor.policy_loss.loss_mode"))
        ),
        Fact("Samples a step", f"{prompts} prompts × {group}" if prompts and group else ""),
        Fact("Data", ", ".join(names) or str(setting(run, "data.task") or "") or _files(run)),
        Fact("Reward", str(setting(run, "reward.name") or "")),
        Fact("Seed", str(summary.get("seed", setting(run, "trainer.seed") or ""))),
        Fact("Versions", ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, Mapping) else ""),
    ]
    return [fact for fact in found if fact.value]


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _files(run: RunFiles) -> str:
    return ", ".join(str(name) for name in setting(run, "data.train_files") or [])


def duration(value: float) -> str:
    """ "3 h 05 min", "1 min 46 s", "12 s" """
    total = round(value)
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def usual_settings() -> dict[str, tuple[str, str]]:
    """Full key -> (default of this version as text, what it is)."""
    default = RunConfig()
    return {leaf.key: (as_text(value_of(default, leaf.key)), leaf.doc) for leaf in leaves(RunConfig)}


def settings(run: RunFiles) -> list[Setting]:
    """Return the settings that differ from this version's defaults, in the order of config.yaml."""
    usual, unknown = usual_settings(), ("", "not a setting of this version")
    found = [Setting(key, value, *usual.get(key, unknown)) for key, value in written_settings(run).items()]
    return [setting for setting in found if setting.value != setting.default]


def written_settings(run: RunFiles) -> dict[str, str]:
    """Full key -> value as text, of all that config.yaml has, also of what this version does not know."""
    known = {leaf.key for leaf in leaves(RunConfig)}

    def walk(tree: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
        for name, value in tree.items():
            key = f"{path}{name}"
            if key not in known and isinstance(value, Mapping) and any(k.startswith(f"{key}.") for k in known):
                yield from walk(value, f"{key}.")
            else:
                yield key, as_text(value)

    return dict(walk(run.config or {}, ""))

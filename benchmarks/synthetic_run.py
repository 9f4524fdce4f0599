"""A run directory as a PPO run with a critic and three sources leaves it, written from formulas: \
input of bench_report.

The files have the formats of controller/observe/tracker.py; curves, texts and times are invented
(seeded), no model is trained.

    python -m benchmarks.synthetic_run DIR [--steps 500] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.observe.run_dir import write_json_atomically

# weight, accuracy at first
SOURCES = {"addition": (0.5, 0.45), "percentages": (0.3, 0.3), "chain_sum": (0.2, 0.12)}
STAGES = {
    "next": 0.01,
    "generate": 5.2,
    "score": 0.4,
    "annotate": 2.1,
    "advantages": 0.05,
    "update": 6.4,
    "sync": 0.7,
}
NUM_SAMPLES = 256
TEST_FREQ = 25
HELD_OUT = 400
EDGES = (0.0, *(10 ** (-8 + i / 5) for i in range(41)))
STATUSES = ("ok", "malformed", "timeout")


@dataclass(frozen=True)
class Shape:
    """What is written. `steps` of `total_steps` were done;
    a run that was cut off has no summary.
    """

    steps: int = 500
    total_steps: int = 500
    seed: int = 1
    warmup_steps: int = 60
    samples_kept: int = 6
    learning_rate: float = 1e-5

    @property
    def is_finished(self) -> bool:
        return self.steps == self.total_steps


def write_run(directory: Path, shape: Shape) -> None:
    """config.yaml, metrics.jsonl, trace.json, samples.jsonl, held_out_samples.jsonl, mismatch.jsonl
    and, if it finished, summary.json.
    """
    directory.mkdir(parents=True)
    noise = random.Random(shape.seed)
    write_config(directory / "config.yaml", shape)
    rows = list(metric_rows(shape, noise))
    _write_lines(directory / "metrics.jsonl", rows)
    _write_lines(directory / "samples.jsonl", sample_lines(shape, noise))
    _write_lines(directory / "mismatch.jsonl", mismatch_lines(shape, noise))
    evaluated_steps = [row["step"] for row in rows if row["kind"] == "evaluation"]
    _write_lines(
        directory / "held_out_samples.jsonl", held_out_sample_lines(shape, evaluated_steps)
    )
    _write_trace(directory / "trace.json", [row for row in rows if row["kind"] != "warmup"])
    if shape.is_finished:
        write_json_atomically(directory / "summary.json", summary(rows, shape))


def _write_lines(path: Path, lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_config(path: Path, shape: Shape) -> None:
    """The resolved settings of such a run, as `rlhf-megatron train` writes them."""
    sources = ", ".join(
        f"{{name: {name}, weight: {weight}, task: addition}}"
        for name, (weight, _) in SOURCES.items()
    )
    path.write_text("")
    settings = [
        "model.path=.cache/smollm2-135m-instruct",
        f"data.sources=[{sources}]",
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.megatron.pipeline_model_parallel_size=2",
        f"actor.optim.lr={shape.learning_rate}",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "critic.num_ranks=2",
        "critic.megatron.tensor_model_parallel_size=2",
        f"warmup.max_steps={shape.warmup_steps}",
        "data.train_batch_size=32",
        f"trainer.experiment_name={path.parent.name}",
        "trainer.n_gpus_per_node=6",
        f"trainer.seed={shape.seed}",
        f"trainer.total_training_steps={shape.total_steps}",
        f"trainer.test_freq={TEST_FREQ}",
    ]
    path.write_text(render_config_yaml(read_run_config(path, settings).config))


def accuracy(step: int, first: float, shape: Shape) -> float:
    """Saturating growth; a larger learning rate is faster."""
    speed = 0.012 * math.sqrt(shape.learning_rate / 1e-5)
    return first + (0.94 - first) * (1 - math.exp(-speed * step)) / (
        1 + 0.5 * math.exp(-0.02 * (step - 150))
    )


def metric_rows(shape: Shape, noise: random.Random) -> Iterator[dict[str, Any]]:
    seconds = 12.0
    for step in range(1, shape.warmup_steps + 1):
        seconds += 0.4
        row = {"warmup/loss": 3.6 * math.exp(-step / 20) + 0.4 + noise.gauss(0, 0.03)}
        row["warmup/grad_norm"] = 1 + 5 * math.exp(-step / 10) * noise.uniform(0.8, 1.2)
        if step % 20 == 0:
            row["warmup/accuracy"] = 0.35 * step / shape.warmup_steps
        yield {"kind": "warmup", "step": step, "seconds": round(seconds, 3), **row}
    state = {"coefficient": 0.02, "kl": 0.0}
    for step in range(shape.steps + 1):
        if step:
            row = step_metrics(step, shape, noise, state)
            seconds += row["timing_s/step"]
            yield {"kind": "step", "step": step, "seconds": round(seconds, 3), **row}
        if step % TEST_FREQ == 0 or step == shape.total_steps:
            seconds += 6.0
            yield {
                "kind": "evaluation",
                "step": step,
                "seconds": round(seconds, 3),
                **held_out(step, shape, noise),
            }


def step_metrics(
    step: int, shape: Shape, noise: random.Random, state: dict[str, float]
) -> dict[str, float]:
    progress = step / shape.total_steps
    g = noise.gauss
    shares = {name: accuracy(step, first, shape) for name, (_, first) in SOURCES.items()}
    mean = sum(SOURCES[name][0] * share for name, share in shares.items())
    reward = min(1.1, max(0.0, mean + g(0, 0.03)))
    state["kl"] = max(
        0.0, 0.9 * state["kl"] + 0.1 * (0.06 * (1 - math.exp(-step / 80)) + abs(g(0, 0.008)))
    )
    state["coefficient"] *= 1 + 0.02 * max(-0.2, min(0.2, state["kl"] / 0.05 - 1))
    length = 42 + 30 * progress + g(0, 1.5)
    stages = {
        name: base * noise.uniform(0.85, 1.2) * (1 + 0.4 * progress)
        for name, base in STAGES.items()
    }
    stages["generate"] *= 3.0 if noise.random() < 0.01 else 1.0  # a slow engine, now and then
    error = 2e-3 * math.exp(g(0, 0.15)) * (1 + progress)
    bad = max(0.0, 0.06 * math.exp(-step / 60) + g(0, 0.004))
    explained = 0.85 * (1 - math.exp(-step / 40)) + g(0, 0.03)
    row = {
        "critic/rewards/mean": reward,
        "critic/rewards/std": math.sqrt(max(0.01, reward * (1.05 - min(1.0, reward)))),
        "critic/rewards/max": 1.1,
        "critic/rewards/min": 0.0,
        "critic/advantages/mean": g(0, 1e-3),
        "critic/advantages/max": 3.1 + g(0, 0.3),
        "critic/advantages/min": -3.4 + g(0, 0.3),
        "critic/values/mean": reward * min(1.0, 0.3 + step / 60) + g(0, 0.02),
        "critic/values/max": 1.05 + g(0, 0.03),
        "critic/values/min": -0.1 + g(0, 0.03),
        "critic/returns/mean": reward + g(0, 0.005),
        "critic/returns/max": 1.1,
        "critic/returns/min": -0.05 + g(0, 0.01),
        "critic/vf_loss": 0.12 * math.exp(-step / 70) + 0.02 + abs(g(0, 0.003)),
        "critic/vf_clipfrac": max(0.0, 0.08 * math.exp(-step / 30) + abs(g(0, 0.004))),
        "critic/vpred_mean": reward * min(1.0, 0.35 + step / 60),
        "critic/vf_explained_var": explained,
        "critic/grad_norm": 0.8 + 3 * math.exp(-step / 30) + abs(g(0, 0.15)),
        "critic/lr": 1e-5,
        "actor/reward_kl_penalty": state["kl"],
        "actor/reward_kl_penalty_coeff": state["coefficient"],
        "actor/loss": g(0, 4e-3),
        "actor/pg_loss": g(0, 4e-3),
        "actor/pg_clipfrac": abs(g(0.02, 0.008)),
        "actor/pg_clipfrac_lower": abs(g(0, 0.0005)),
        "actor/ppo_kl": g(2e-3, 8e-4),
        "actor/entropy": 0.9 * math.exp(-2.2 * progress) + 0.08 + g(0, 0.012),
        "actor/grad_norm": math.exp(g(0, 0.2)) * (8 if noise.random() < 0.006 else 1),
        "actor/lr": shape.learning_rate
        * min(1.0, step / 20)
        * (0.5 + 0.5 * math.cos(math.pi * progress)),
        "actor/num_epochs": 1.0,
        "actor/num_optimizer_steps": 4.0,
        "actor/num_skipped_steps": 0.0,
        "reward/mixed_groups": max(0.0, 4 * mean * (1 - mean) * 0.9 + g(0, 0.03)),
        "reward/masked": 0.0,
        "reward/part/correct": min(1.0, reward),
        "reward/part/format": min(0.1, 0.1 * (1 - bad)),
        "reward/status/ok": 1 - 1.3 * bad,
        "reward/status/malformed": bad,
        "reward/status/timeout": 0.3 * bad,
        "response_length/mean": length,
        "response_length/max": 128.0,
        "response_length/min": 6 + noise.randrange(5),
        "response_length/clip_ratio": max(0.0, 0.02 + 0.05 * progress + g(0, 0.008)),
        "prompt_length/mean": 58 + g(0, 1),
        "prompt_length/max": 96.0,
        "prompt_length/min": 31.0,
        "training/rollout_log_probs_diff_max": 14 * error * math.exp(g(0, 0.3)),
        "training/rollout_log_probs_diff_p50": error,
        "training/rollout_log_probs_diff_p99": 6 * error,
        "training/rollout_log_probs_diff_mean": 1.4 * error,
        "training/rollout_kl": error * error,
        "policy/version": float(step + 1),
        "policy/lag": 0.0,
        "rollout/num_samples": float(NUM_SAMPLES),
        "rollout/finish_reason/stop": 0.95 - 0.05 * progress,
        "rollout/finish_reason/length": 0.05 + 0.05 * progress,
        "rollout/finish_reason/abort": 0.0,
        "rollout/cached_token_share": 0.8 + g(0, 0.02),
        "rollout/num_retractions": float(noise.random() < 0.1),
        "rollout/samples_of_several_versions": 0.0,
        "rollout/engine_failures": float(noise.random() < 0.02),
        "rollout/engine_restarts": 0.0,
        "rollout/requests_reissued": 0.0,
        "sync/num_bytes": 269e6,
        "sync/bytes_moved": 269e6 * (1.02 + g(0, 0.001)),
        "sync/bytes_needed": 269e6,
        "sync/seconds": stages["sync"],
        "perf/total_num_tokens": (length + 58) * NUM_SAMPLES,
    }
    for name, share in shares.items():
        row[f"reward/source/{name}/mean"] = min(1.1, max(0.0, share + g(0, 0.05)))
        row[f"reward/source/{name}/count"] = round(NUM_SAMPLES * SOURCES[name][0])
    row |= {f"timing_s/{name}": value for name, value in stages.items()}
    row["timing_s/step"] = sum(stages.values()) + 0.05
    row["perf/tokens_per_s"] = row["perf/total_num_tokens"] / row["timing_s/step"]
    row["perf/tokens_per_s_generate"] = length * NUM_SAMPLES / stages["generate"]
    row["perf/tokens_per_s_update"] = row["perf/total_num_tokens"] / stages["update"]
    return row


def held_out(step: int, shape: Shape, noise: random.Random) -> dict[str, float]:
    row: dict[str, float] = {}
    whole = 0.0
    for name, (weight, first) in SOURCES.items():
        items = round(HELD_OUT * weight)
        mean = min(1.0, max(0.0, accuracy(step, first, shape) + noise.gauss(0, 0.02)))
        half = 1.96 * math.sqrt(mean * (1 - mean) / items + 1e-4)
        row |= {
            f"val/{name}/mean@4": mean,
            f"val/{name}/std@4": 0.3,
            f"val/{name}/best@4": min(1.0, mean + 0.1),
        }
        row |= {f"val/{name}/low": max(0.0, mean - half), f"val/{name}/high": min(1.0, mean + half)}
        row[f"val/{name}/num_items"] = float(items)
        whole += weight * mean
    half = 1.96 * math.sqrt(whole * (1 - whole) / HELD_OUT)
    row |= {"val/accuracy": whole, "val/accuracy_low": max(0.0, whole - half)}
    row |= {"val/accuracy_high": min(1.0, whole + half), "val/num_items": float(HELD_OUT)}
    row["val/binary_scores"] = 1.0
    return {**row, "val/response_length": 45.0, "timing_s/evaluate": 6.0}


def sample_lines(shape: Shape, noise: random.Random) -> Iterator[dict[str, Any]]:
    kinds = ("best", "worst", "random")
    for step in range(1, shape.steps + 1):
        for i in range(shape.samples_kept):
            kind = kinds[i * len(kinds) // shape.samples_kept]
            source = noise.choice(list(SOURCES))
            a = noise.randrange(10, 999)
            b = noise.randrange(10, 999)
            is_right = kind == "best" or (kind == "random" and noise.random() < 0.6)
            answer = a + b if is_right else a + b + noise.randrange(1, 30)
            steps = "".join(
                f"Step {n}: {a} + {b // n} = {a + b // n}.\n"
                for n in range(1, noise.randrange(3, 14))
            )
            status = "ok" if is_right or noise.random() < 0.8 else noise.choice(STATUSES)
            yield {
                "step": step,
                "kind": kind,
                "prompt": (
                    f"<|user|>\nA shop has {a} apples and buys {b} more. How many are there? Think"
                    " first, then put the number into <answer></answer>.\n<|assistant|>\n"
                ),
                "response": f"{steps}So the sum is {answer}.\n<answer>{answer}</answer>",
                "label": str(a + b),
                "source": source,
                "reward": 1.1 if is_right else (0.1 if status == "ok" else 0.0),
                "status": status,
                "parts": {"correct": float(is_right), "format": 0.1 if status == "ok" else 0.0},
                "finish_reason": "stop" if noise.random() < 0.95 else "length",
                "num_cached_tokens": noise.randrange(50),
                "num_retractions": 0,
                "version_spans": [],
                "num_tokens": 20 + 9 * steps.count("\n"),
                "policy_version": step,
            }


def held_out_sample_lines(shape: Shape, evaluated_steps: list[int]) -> Iterator[dict[str, Any]]:
    """The same prompts in each evaluation; the later, the more of them are answered rightly."""
    noise = random.Random(shape.seed)
    items = [
        (source, item, noise.randrange(10, 999), noise.randrange(10, 999))
        for source in SOURCES
        for item in range(max(1, shape.samples_kept // len(SOURCES)))
    ]
    for step in evaluated_steps:
        for source, item, a, b in items:
            is_right = noise.random() < 0.3 + 0.6 * step / shape.total_steps
            answer = a + b if is_right else a + b + noise.randrange(1, 30)
            yield {
                "step": step,
                "source": source,
                "item": item,
                "prompt": f"<|user|>\nWhat is {a} + {b}?\n<|assistant|>\n",
                "response": f"The sum is {answer}.\n<answer>{answer}</answer>",
                "label": str(a + b),
                "score": float(is_right),
                "reward": 1.1 if is_right else 0.1,
                "status": "ok",
                "parts": {"correct": float(is_right), "format": 0.1},
                "num_tokens": 12,
            }


def mismatch_lines(shape: Shape, noise: random.Random) -> Iterator[dict[str, Any]]:
    logs = [math.log10(edge) for edge in EDGES[1:]]
    for step in range(1, shape.steps + 1):
        centre = -2.8 + 0.4 * step / shape.total_steps
        groups = []
        for reason, share in (("stop", 0.95), ("length", 0.05)):
            counts = [0] * (len(EDGES) - 1)
            for i, low in enumerate(logs[:-1]):
                shift = (low - centre - (0.3 if reason == "length" else 0)) / 0.55
                counts[i + 1] = int(
                    12000 * share * math.exp(-shift * shift / 2) / 6 * noise.uniform(0.9, 1.1)
                )
            counts[0] = int(400 * share)
            top = 10 ** (centre + 1.6) * noise.uniform(0.8, 1.4)
            groups.append(
                {
                    "policy_version": step,
                    "finish_reason": reason,
                    "counts": counts,
                    "num_tokens": sum(counts),
                    "mean": 10**centre,
                    "p99": top / 3,
                    "max": top,
                }
            )
        yield {
            "step": step,
            "edges": list(EDGES),
            "groups": groups,
            "worst": _worst(step, groups, noise),
        }


def _worst(step: int, groups: list[dict[str, Any]], noise: random.Random) -> list[dict[str, Any]]:
    tokens = []
    for rank in range(10):
        group = noise.choice(groups)
        difference = group["max"] * 0.9**rank
        trainer = -noise.expovariate(0.3)
        tokens.append(
            {
                "token": noise.choice([" the", "\n", "7", " answer", "</", " therefore", "é"]),
                "token_id": noise.randrange(49152),
                "position": noise.randrange(100),
                "trainer": trainer,
                "engine": trainer - noise.choice((-1, 1)) * difference,
                "difference": difference,
                "context": "So the sum of the two numbers is 412 + 77, and therefore we write",
                "sample_id": noise.randrange(NUM_SAMPLES),
                "policy_version": step,
                "finish_reason": group["finish_reason"],
            }
        )
    return tokens


def _write_trace(path: Path, rows: list[dict[str, Any]]) -> None:
    """Left open at its end, as by a run that was killed:
    readers must not need the closing bracket.
    """
    lines = ['{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "controller"}},']

    def event(name: str, begin_s: float, seconds: float, thread: int, step: int) -> None:
        times = {"ts": round(begin_s * 1e6), "dur": round(seconds * 1e6)}
        fields = {
            "name": name,
            "cat": "stage",
            "ph": "X",
            **times,
            "pid": 1,
            "tid": thread,
            "args": {"step": step},
        }
        lines.append(json.dumps(fields) + ",")

    for row in rows:
        if row["kind"] == "evaluation":
            event("evaluate", row["seconds"] - 6.0, 6.0, 1, row["step"])
            continue
        begin = row["seconds"] - row["timing_s/step"]
        event(f"step {row['step']}", begin, row["timing_s/step"], 0, row["step"])
        for name in STAGES:
            event(name, begin, row[f"timing_s/{name}"], 1, row["step"])
            begin += row[f"timing_s/{name}"]
    path.write_text("[\n" + "\n".join(lines) + "\n")


def summary(rows: list[dict[str, Any]], shape: Shape) -> dict[str, Any]:
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    found: dict[str, Any] = {}
    for name, row in (("before", evaluations[0]), ("after", evaluations[-1])):
        found[f"accuracy_{name}"] = row["val/accuracy"]
        found[f"accuracy_{name}_interval"] = [row["val/accuracy_low"], row["val/accuracy_high"]]
        found[f"accuracy_{name}_items"] = HELD_OUT
    steps = [row for row in rows if row["kind"] == "step"]
    return {
        **found,
        "majority_answer_accuracy": 0.11,
        "warmup_sampled_accuracy": 0.35 if shape.warmup_steps else None,
        "reward_first": steps[0]["critic/rewards/mean"],
        "reward_last": steps[-1]["critic/rewards/mean"],
        "steps": shape.steps,
        "layout": "tp2 pp2 dp1",
        "seconds": rows[-1]["seconds"] + 3,
        "seed": shape.seed,
        "log_prob_max_abs_diff": 0.021,
        "model": ".cache/smollm2-135m-instruct",
        "versions": {
            "python": "3.11.7",
            "torch": "2.13.0",
            "megatron-core": "0.16.1",
            "rlhf-megatron": "0.1.0",
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    write_run(args.directory, Shape(args.steps, args.steps, args.seed))
    print(args.directory)


if __name__ == "__main__":
    main()

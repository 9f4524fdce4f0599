"""A whole GRPO step against TRL's GRPOTrainer: same cores, model, prompts, lengths and group size.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_grpo_step [--shape quickstart]
        [--rounds 3 --steps 24]

A step of the quickstart: 32 prompts x 16 samples of up to 4 tokens, log-probs of the old policy,
group advantages, four optimizer steps of 128 samples, weights to the engine. `SHAPES` has two more:
its model (random, since the warm one ends after four tokens) with prompts of 512 and answers of up
to 64 tokens, and SmolLM2-135M with 256 and up to 512.

Runs, each a process (group) of its own, in turns, `rounds` times:

    ours_1     `rlhf-megatron train` with the inline launcher: one rank and one local engine,
               which take turns
    ours_dp2   two ranks (dp2) and two local engines
    ours_dp2_shared   the same with share_prompts: a prompt is computed once for its samples
                      in a micro-batch
    trl_1      benchmarks/trl_grpo.py (its settings are explained there) in one process
               with one thread
    trl_2      the same with two threads
    trl_dp2    two processes of one thread, data parallel over gloo

A step's seconds are wall time from the start of one step to the start of the next, logging and data
loading included; the first step of a run is a warm-up and left out. TRL computes the entropy in its
update, ours with the old log-probs; ours also compares the engine's log-probs with the trainer's
and verifies digests of the weights in each step. Where a step is one optimizer step (smollm2),
neither side has a pass for the old log-probs, but ours in its first step.

CPU seconds a step are those of all processes of a run, less what starting and the first steps cost;
their ratio is to TRL's run of as many processes. The mean tokens of a response tell that both sides
generated alike.

Needs .venv-trl (`make .venv-trl/.installed`). Writes benchmarks/results/grpo_step.json, or
grpo_step_SHAPE.json; the ratio is the median of our better run over the median of TRL's better run.
Results of processors of another name stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT, machine, significant, spread, write_result

MODEL = ROOT / "examples/quickstart/model"
WARM_MODEL = ROOT / "examples/quickstart/warm_model"
TRL_PYTHON = ROOT / ".venv-trl/bin/python"
TIMEOUT_S = 3600
SHORT = 1  # measured steps of the run that tells what starting costs
DP2 = ["trainer.n_gpus_per_node=2", "rollout.num_engines=2"]
OURS = {
    "ours_1": ["trainer.runtime=inline", "trainer.n_gpus_per_node=1"],
    "ours_dp2": DP2,
    "ours_dp2_shared": [*DP2, "actor.megatron.share_prompts=true"],
}
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc-per-node",
    "2",
]
# launcher, threads of a process
TRL = {"trl_1": ([], 1), "trl_2": ([], 2), "trl_dp2": (TORCHRUN, 1)}
# TRL's runs of as many processes
ALIKE = {"ours_1": ("trl_1", "trl_2"), "ours_dp2": ("trl_dp2",), "ours_dp2_shared": ("trl_dp2",)}
STAGES = {
    "generate": ("generate",),
    "log_probs": ("annotate",),
    "update": ("update",),
    "sync": ("sync",),
}


@dataclass(frozen=True)
class Shape:
    """One step, on both sides."""

    num_prompts: int
    group_size: int
    mini_batch: int  # samples an optimizer step
    prompt_tokens: int  # 0: the quickstart's own
    response_tokens: int  # at most
    token_budget: int  # of a micro-batch of ours
    lr: float = 2e-4
    num_rounds: int = 3
    num_steps: int = 8  # measured in a round


SHAPES = {
    "quickstart": Shape(
        32, 16, 128, 0, 4, 1280, num_steps=24
    ),  # short steps beside a start of seconds
    "long": Shape(8, 8, 32, 512, 64, 1152),
    "smollm2": Shape(2, 4, 8, 256, 512, 3072, lr=1e-5, num_rounds=1, num_steps=4),
}
SMOLLM2 = ROOT / ".cache/smollm2-135m-instruct"
TEXT = {"long": "07+45=", "smollm2": "One day a fox told a bear how to count fish in the river.\n"}
Steps = list[dict[str, float]]
"""One entry a step: stage -> seconds, "step", and "response_tokens", their mean."""


def make_model(directory: Path, shape: str) -> str:
    """The quickstart's warm weights where they exist and are asked for, else random ones, or
    SmolLM2's, for both sides. Returns which.
    """
    if shape == "smollm2":
        directory.symlink_to(SMOLLM2)
        return "SmolLM2-135M-Instruct"
    if shape == "quickstart" and list(WARM_MODEL.glob("*.safetensors")):
        shutil.copytree(WARM_MODEL, directory)
        return "warm"
    from safetensors.torch import save_file

    from rlhf_megatron.weights.weight_source import generate_random_hf_tensors

    shutil.copytree(MODEL, directory)
    config = json.loads((MODEL / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        dict(generate_random_hf_tensors(config, seed=1)),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return "random"


def write_prompts(path: Path, model: Path, shape: str) -> None:
    """Prompts for TRL: the quickstart's, in its own order, or one of the shape's length; ours
    reads the same.
    """
    from rlhf_megatron.config.load import load_run_config
    from rlhf_megatron.data.prompts import load_prompt_sets
    from rlhf_megatron.data.tokenizer import load_tokenizer

    if shape != "quickstart":
        tokenizer = load_tokenizer(model)
        wanted = SHAPES[shape].prompt_tokens
        prompts = [
            tokenizer.decode(tokenizer.encode(f"{n % 10}" + TEXT[shape] * wanted)[:wanted])
            for n in range(64)
        ]
        rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
        path.write_text(json.dumps(rows))
        path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    config = load_run_config(ROOT / "configs/quickstart.yaml").config
    items = load_prompt_sets(config.data, load_tokenizer(model)).train_items
    path.write_text(json.dumps([{"prompt": item.prompt, "answer": item.label} for item in items]))


def run_ours(name: str, folder: Path, num_steps: int, shape: Shape) -> Steps:
    """A training run of num_steps + 1 steps through the command line; timings from
    its metrics.jsonl.
    """
    overrides = {
        "model.path": folder / "model",
        "model.init_seed": "null",
        "actor.megatron.tensor_model_parallel_size": 1,
        "actor.megatron.pipeline_model_parallel_size": 1,
        "warmup.max_steps": 0,
        "actor.mini_batch_size": shape.mini_batch,
        "actor.optim.lr": shape.lr,
        "actor.ppo_max_token_len_per_gpu": shape.token_budget,
        "data.train_batch_size": shape.num_prompts,
        "data.max_response_length": shape.response_tokens,
        "rollout.n": shape.group_size,
        "trainer.total_training_steps": num_steps + 1,
        "trainer.val_before_train": "false",
        "trainer.test_freq": 0,
        "trainer.default_local_dir": folder / "runs",
        "trainer.experiment_name": name,
        "trainer.save_last": "none",
        "trainer.logger": "[jsonl]",
    }
    if shape.prompt_tokens:
        overrides |= {"data.task": "null", "data.max_prompt_length": shape.prompt_tokens + 8}
        overrides |= {
            f"data.{part}_files": f"[{folder / 'prompts.jsonl'}]" for part in ("train", "val")
        }
        reward = folder / "reward.py"
        # as TRL's: all groups differ
        reward.write_text("def score(response):\n    return float(len(response) % 2)\n")
        overrides |= {"reward.name": "function", "reward.params": f"{{path: '{reward}:score'}}"}
    command = [sys.executable, "-m", "rlhf_megatron", "train", "configs/quickstart.yaml"]
    _run(
        command + [f"{key}={value}" for key, value in overrides.items()] + OURS[name],
        folder / f"{name}.log",
    )
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "step"]
    return [our_step(before, row) for before, row in pairwise(rows)]


def our_step(before: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step from two successive lines of metrics.jsonl."""
    parts = {stage: sum(row[f"timing_s/{key}"] for key in keys) for stage, keys in STAGES.items()}
    seconds = row["seconds"] - before["seconds"]
    other = {"other": seconds - sum(parts.values()), "response_tokens": row["response_length/mean"]}
    return {"step": seconds, **parts, **other}


def run_trl(name: str, folder: Path, num_steps: int, shape: Shape) -> Steps:
    launcher, threads = TRL[name]
    output = folder / f"{name}.json"
    command = [str(TRL_PYTHON), *launcher, "benchmarks/trl_grpo.py", str(folder / "model")]
    command += [str(folder / "prompts.json")]
    command += [
        str(output),
        "--steps",
        str(num_steps),
        "--threads",
        str(threads),
        "--shape",
        json.dumps(asdict(shape)),
    ]
    # Threads that wait must not spin: on a machine that others use too they would take
    # each other's core.
    _run(command, folder / f"{name}.log", OMP_NUM_THREADS=str(threads), OMP_WAIT_POLICY="passive")
    return json.loads(output.read_text())["steps"]


def children_cpu_s() -> float:
    """CPU seconds of all processes that ended below this one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(command: list[str], log: Path, **env: str) -> None:
    """Raises RuntimeError with the end of the output when the process fails."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **env,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with log.open("w") as out:
        code = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            timeout=TIMEOUT_S,
        ).returncode
    if code:
        raise RuntimeError(
            f"{' '.join(command[:4])} ... exited with {code}:\n{log.read_text()[-3000:]}"
        )


def summarize(steps: dict[str, Steps]) -> dict[str, Any]:
    """Per run and stage the spread of seconds; the ratios of our runs to TRL's better one."""
    tokens = {
        name: statistics.fmean(step.pop("response_tokens") for step in rows)
        for name, rows in steps.items()
    }
    seconds = {
        name: {stage: spread([step[stage] for step in rows]) for stage in rows[0]}
        for name, rows in steps.items()
    }
    for stages in seconds.values():
        for stage, values in stages.items():
            if stage != "step":
                del values["values"]
    ours = {name: seconds[name]["step"] for name in seconds if name in OURS}
    trl = {name: seconds[name]["step"] for name in seconds if name in TRL}
    best_trl = min(trl, key=lambda name: trl[name]["median"])
    by_run = {
        name: {key: significant(value[key] / trl[best_trl][key]) for key in ("median", "min")}
        for name, value in ours.items()
    }
    return {
        "seconds": seconds,
        "response_tokens": {name: significant(mean) for name, mean in tokens.items()},
        "baseline": best_trl,
        "ratio_by_run": by_run,
        "ratio": min(value["median"] for value in by_run.values()),
    }


def cpu_summary(cpu_s: dict[str, list[float]], more_steps: int) -> dict[str, Any]:
    """CPU seconds a step, all processes of a run together: what `more_steps` steps more cost than
    the first, short run. Ratios to TRL's run of as many processes, where it was measured.

    Steadier than wall time on a busy machine, but blind to how well two cores are used.
    """
    by_step = {
        name: statistics.median((value - values[0]) / more_steps for value in values[1:])
        for name, values in cpu_s.items()
    }
    ratio = {}
    for name, alike in ALIKE.items():
        if name in by_step and (of_trl := [by_step[other] for other in alike if other in by_step]):
            ratio[name] = significant(by_step[name] / min(of_trl))
    return {
        "cpu_s_per_step": {name: significant(value) for name, value in by_step.items()},
        "cpu_ratio": ratio,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="quickstart")
    parser.add_argument("--rounds", type=int, help="the shape's, where it is left out")
    parser.add_argument(
        "--steps", type=int, help="measured steps of a run, 2 at least; the shape's"
    )
    parser.add_argument("--runs", nargs="+", choices=[*OURS, *TRL], default=[*OURS, *TRL])
    args = parser.parse_args()
    if not TRL_PYTHON.is_file():
        print(
            f"{TRL_PYTHON} is missing: `make .venv-trl/.installed` makes"
            " it (benchmarks/requirements-trl.txt)."
        )
        return 1
    steps: dict[str, Steps] = {name: [] for name in args.runs}
    cpu_s: dict[str, list[float]] = {name: [] for name in args.runs}
    shape = SHAPES[args.shape]
    num_rounds = args.rounds or shape.num_rounds
    num_steps = args.steps or shape.num_steps
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        weights = make_model(folder / "model", args.shape)
        write_prompts(folder / "prompts.json", folder / "model", args.shape)
        for count in [SHORT] + [num_steps] * num_rounds:
            for name in args.runs:
                run: Callable[[str, Path, int, Shape], Steps] = (
                    run_ours if name in OURS else run_trl
                )
                before = children_cpu_s()
                measured = run(name, folder, count, shape)
                cpu_s[name].append(children_cpu_s() - before)
                steps[name] += measured if count != SHORT else []
    result = summarize(steps) | cpu_summary(cpu_s, num_steps - SHORT)
    print_table(result)
    command = (
        f"python -m benchmarks.bench_grpo_step --shape {args.shape} --rounds {num_rounds}"
        f" --steps {num_steps}"
    )
    command += f" --runs {' '.join(args.runs)}" if len(args.runs) < len(OURS) + len(TRL) else ""
    trl_requirements = (ROOT / "benchmarks/requirements-trl.txt").read_text().split()
    pins = [word for word in trl_requirements if "==" in word]
    output = "grpo_step" if args.shape == "quickstart" else f"grpo_step_{args.shape}"
    facts = {"shape": asdict(shape), "weights": weights, "trl_environment": pins}
    print(
        write_result(output, command, {**facts, **result, "other_machines": other_machines(output)})
    )
    return 0


def other_machines(output: str) -> list[dict[str, Any]]:
    """Earlier results of this name on processors of another name, one each."""
    path = RESULTS / f"{output}.json"
    if not path.is_file():
        return []
    before = json.loads(path.read_text())
    rows = [*before.pop("other_machines", []), before]
    by_cpu = {row["machine"]["cpu"]: row for row in rows}
    return [row for cpu, row in by_cpu.items() if cpu != machine()["cpu"]]


def print_table(result: dict[str, Any]) -> None:
    stages = ("step", "generate", "log_probs", "update", "sync", "other")
    print("median seconds".ljust(16) + "".join(stage.rjust(11) for stage in stages))
    for name, values in result["seconds"].items():
        cells = [f"{values[stage]['median']:.3f}" if stage in values else "-" for stage in stages]
        print(name.ljust(16) + "".join(cell.rjust(11) for cell in cells))
    for name, ratio in result["ratio_by_run"].items():
        cpu = result["cpu_ratio"].get(name)
        text = (
            f"{name} / {result['baseline']}: {ratio['median']:.3f} (median),"
            f" {ratio['min']:.3f} (minimum)"
        )
        print(
            text
            + (f"; CPU time {cpu:.3f} of TRL's with as many processes" if cpu is not None else "")
        )
    print(
        "mean response tokens: "
        + ", ".join(f"{name} {mean:g}" for name, mean in result["response_tokens"].items())
    )


if __name__ == "__main__":
    sys.exit(main())

"""Runs of the real program with tiny settings, for the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from places import MODEL, ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TIMEOUT_S = 300.0  # of one run; it takes 5 to 20 s where nothing else does
MARKER = "RLHF_MEGATRON_TEST_RUN"  # stands in the environment of every process of a run

ONE_RANK = {
    "trainer.runtime": "inline",
    "trainer.n_gpus_per_node": 1,
    **dict.fromkeys(("tp", "pp"), 1),
}
TP2_PP2 = {"trainer.n_gpus_per_node": 4, "tp": 2, "pp": 2}
DP2 = {"trainer.n_gpus_per_node": 2, "tp": 1, "pp": 1}
_SHORT = {
    "tp": "actor.megatron.tensor_model_parallel_size",
    "pp": "actor.megatron.pipeline_model_parallel_size",
}


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    directory: Path  # the working directory; the run's own is `run_dir`
    run_dir: Path
    exit_code: int
    console: str  # stdout and stderr
    marker: str

    def rows(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def left_over(self, within_s: float = 10.0) -> list[str]:
        """Command lines of processes of this run that still live."""
        found = wait_for_the_end(self.marker, within_s)
        return [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in found
        ]


def processes_with(marker: str) -> list[int]:
    """Living processes whose environment was given `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] if state != "Z" else []
    return found


def wait_for_the_end(marker: str, within_s: float) -> list[int]:
    """The processes with `marker` that still live after so long;
    none, as soon as all have ended.
    """
    deadline = time.monotonic() + within_s
    while (found := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def write_rows(path: Path, num_rows: int, seed: int) -> Path:
    """Sums as prompts; the label is a digit that a policy soon guesses now and then, so that
    rewards differ.
    """
    draw = random.Random(seed)
    prompts = [f"{draw.randrange(100):02d}+{draw.randrange(100):02d}=" for _ in range(num_rows)]
    rows = [{"prompt": prompt, "answer": draw.choice("0011234")} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_config(
    directory: Path, data: dict[str, Any] | None = None, base: Path = QUICKSTART
) -> Path:
    """`base` with 2 steps of 4 prompts x 4 samples after 3 warm-up steps. The reward reads the
    first character.
    """
    if data is None:
        train = write_rows(directory / "train.jsonl", 64, seed=1)
        val = write_rows(directory / "val.jsonl", 40, seed=2)
        data = {"task": None, "train_files": [str(train)], "val_files": [str(val)]}
    transfer = directory / "transfer"
    transfer.mkdir()
    settings = {
        "extends": os.path.relpath(base, directory),
        "model": {"path": str(MODEL), "init_seed": 1},
        "data": {"train_batch_size": 4, **data},
        "actor": {"mini_batch_size": 16},
        "reward": {"params": {"pattern": "^(.)", "allow_truncated": True}},
        "rollout": {
            "n": 4,
            "max_num_seqs": 64,
            "update_weights_bucket_megabytes": 2,
            "transfer_dir": str(transfer),
        },
        "warmup": {
            "max_steps": 3,
            "batch_size": 16,
            "test_freq": 3,
            "test_samples": 8,
            "optim": {"lr": 5e-3, "lr_warmup_steps": 0},
        },
        "trainer": {
            "experiment_name": "tiny",
            "default_local_dir": str(directory / "runs"),
            "device": "cpu",
            "total_training_steps": 2,
            "test_freq": 0,
        },
    }
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def write_sections(
    directory: Path, settings: dict[str, Any], sections: dict[str, dict[str, Any]]
) -> Path:
    """The configuration `tiny.yaml` of `settings`, with the values of `sections` over theirs."""
    for section, values in sections.items():
        settings[section] = {**settings[section], **values}
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def overrides(settings: dict[str, Any]) -> list[str]:
    """`key=value` words; the keys "tp" and "pp" are short for Megatron's."""
    return [f"{_SHORT.get(key, key)}={json.dumps(value)}" for key, value in settings.items()]


def train(
    config: Path,
    settings: dict[str, Any],
    *options: str,
    launcher: tuple[str, ...] = (sys.executable, "-m", "rlhf_megatron", "train"),
    env: dict[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Finished:
    """`rlhf-megatron train` in the directory of `config`, until it ends. `launcher`: what stands
    before the config.
    """
    directory = config.parent
    marker = f"{MARKER}={uuid.uuid4().hex}"
    given = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "MASTER_"))
    }
    environment = {
        **given,
        MARKER: marker.partition("=")[2],
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,  # of launch/torchrun.sh
        "PYTHONPATH": str(ROOT),
        **(env or {}),
    }
    with (directory / "console").open("wb") as out:
        process = subprocess.Popen(
            [*launcher, str(config), *overrides(settings), *options],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        exit_code = process.wait(timeout_s)
    except BaseException:
        for pid in {process.pid, *processes_with(marker)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        raise
    name = settings.get("trainer.experiment_name", "tiny") + (
        "-replay" if "--replay" in options else ""
    )
    parent = Path(settings.get("trainer.default_local_dir", directory / "runs"))
    return Finished(
        directory, parent / name, exit_code, (directory / "console").read_text(), marker
    )


def greedy_score(model: Path, rows: Path) -> float:
    """The share of `rows` whose answer is the first character that transformers' greedy decoding of
    `model` gives.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    items = [json.loads(line) for line in rows.read_text().splitlines()]
    num_right = 0
    for item in items:
        prompt = torch.tensor([tokenizer(item["prompt"], add_special_tokens=False)["input_ids"]])
        ids = policy.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :]
        num_right += tokenizer.decode(ids, skip_special_tokens=True)[:1] == item["answer"]
    return num_right / len(items)

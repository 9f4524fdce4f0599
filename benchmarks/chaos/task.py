"""The run that is disturbed: six steps of a tiny random model that learns to write small digits, in
several layouts.

A step takes a fraction of a second. There are two optimizer steps in each and several buckets in a
weight sync, so that a fault can fall between them; every group has different rewards, so that each
step changes the weights.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import ROOT

MODEL = ROOT / "examples" / "quickstart" / "model"
NAME = "tiny"
NUM_STEPS = 6
SAVE_FREQ = 2
PROMPTS = 8
GROUP_SIZE = 4
SAMPLES = PROMPTS * GROUP_SIZE
TEST_SAMPLES = 8
SOAK_PROMPTS = 16
SOAK_GROUP_SIZE = 8
SOAK_LR = 1.0e-4
SOAK_SAVE_FREQ = 10
_TP = "actor.megatron.tensor_model_parallel_size"
_PP = "actor.megatron.pipeline_model_parallel_size"

LAYOUTS: dict[str, dict[str, Any]] = {
    "inline": {"trainer.runtime": "inline", "trainer.n_gpus_per_node": 1, _TP: 1, _PP: 1},
    "tp2": {"trainer.runtime": "torchrun", "trainer.n_gpus_per_node": 2, _TP: 2, _PP: 1},
    "pp2": {"trainer.runtime": "torchrun", "trainer.n_gpus_per_node": 2, _TP: 1, _PP: 2},
    "dp2": {"trainer.runtime": "torchrun", "trainer.n_gpus_per_node": 2, _TP: 1, _PP: 1},
    "tp2_pp2": {"trainer.runtime": "torchrun", "trainer.n_gpus_per_node": 4, _TP: 2, _PP: 2},
}


def settings(directory: Path) -> dict[str, Any]:
    """The configuration as a tree; files are seen from `directory`."""
    return {
        "model": {"path": str(MODEL), "dtype": "float32", "init_seed": 1},
        "data": {
            "task": None,
            "train_files": [str(directory / "train.jsonl")],
            "val_files": [str(directory / "val.jsonl")],
            "train_batch_size": PROMPTS,
            "max_prompt_length": 6,
            "max_response_length": 4,
        },
        "actor": {
            "optim": {"lr": 3.0e-4, "lr_decay_style": "cosine", "lr_warmup_steps": 2},
            "mini_batch_size": SAMPLES // 2,
            "ppo_max_token_len_per_gpu": 96,
        },
        "rollout": {
            "engine": "local",
            "n": GROUP_SIZE,
            "max_num_seqs": 64,
            "update_weights_bucket_megabytes": 1,
            "health_interval_s": 1.0,
            "health_timeout_s": 10.0,
        },
        "reward": {"name": "character_share", "params": {"pattern": "[0-4]"}},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {
            "experiment_name": NAME,
            "device": "cpu",
            "seed": 1,
            "total_training_steps": NUM_STEPS,
            "test_freq": 2,
            "test_samples": TEST_SAMPLES,
            "save_hf": True,
            "save_freq": SAVE_FREQ,
            "deterministic": True,
            "samples_kept": SAMPLES,
            "stop_grace_s": 30.0,
            "desync_freq": 1,
            "logger": ["console", "jsonl"],
        },
    }


def write_task(directory: Path, seed: int = 1) -> Path:
    """Prompts and configuration under `directory`. Returns the configuration's path."""
    directory.mkdir(parents=True, exist_ok=True)
    # 20 prompts, 8 a step: an epoch ends inside a step
    for name, count in (("train", 20), ("val", 12)):
        draw = random.Random(f"{name}{seed}")
        rows = [
            {"prompt": f"{draw.randrange(100):02d}+{draw.randrange(100):02d}=", "answer": "0"}
            for _ in range(count)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings(directory)))
    return path


def overrides(values: Mapping[str, Any]) -> list[str]:
    """As `key=value` words of the command line."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def place(directory: Path) -> dict[str, Any]:
    """Settings by which a run keeps all its files under `directory`, which it makes where
    they must exist.
    """
    (directory / "transfer").mkdir(parents=True, exist_ok=True)
    return {
        "trainer.default_local_dir": str(directory / "runs"),
        "rollout.transfer_dir": str(directory / "transfer"),
    }


def run_dir_of(directory: Path) -> Path:
    return directory / "runs" / NAME


def write_soak(directory: Path, seed: int) -> Path:
    """A task that takes minutes to learn: to write the first digit of the prompt four times. Two
    ranks, two engines.
    """
    path = write_task(directory, seed)
    tree = settings(directory)
    draw = random.Random(seed)
    rows = [
        {"prompt": f"{i % 100:02d}+{draw.randrange(100):02d}=", "answer": "0"} for i in range(300)
    ]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree["data"] |= {"train_batch_size": SOAK_PROMPTS}
    tree["actor"] |= {"optim": {"lr": SOAK_LR}, "mini_batch_size": SOAK_PROMPTS * SOAK_GROUP_SIZE}
    tree["actor"] |= {"ppo_max_token_len_per_gpu": 1024}
    tree["rollout"] |= {
        "n": SOAK_GROUP_SIZE,
        "max_num_seqs": 256,
        "num_engines": 2,
        "max_engine_restarts": 1000,
    }
    tree["rollout"] |= {"health_timeout_s": 5.0}
    tree["reward"] = {
        "name": "function",
        "params": {
            "path": f"{ROOT / 'benchmarks' / 'chaos' / 'echo.py'}:echo",
            "kwargs": {"outage": str(directory / "outage")},
        },
        "num_workers": 2,
        "max_error_rate": 0.5,
    }
    tree["trainer"] |= {
        "total_training_steps": 1_000_000,
        "test_freq": 0,
        "val_before_train": False,
        "deterministic": False,
        "save_freq": SOAK_SAVE_FREQ,
        "samples_kept": SOAK_PROMPTS * SOAK_GROUP_SIZE,
        "seed": seed,
        "stage_timeout_s": 60.0,
        "desync_freq": 10,
        "save_hf": False,
    }
    path.write_text(yaml.safe_dump(tree))
    return path

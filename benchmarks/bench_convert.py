"""Conversion of a model against a plain copy of its files, in turns: Hugging Face -> \
torch_dist -> Hugging Face.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_convert [--gb 4] [--processes 2] [--dir /tmp]
        [--repetitions 3]

A Qwen3-MoE of random bytes whose experts have the shape of Qwen3-30B's. Every target is written
once and removed before anything is timed, so that all meet the same warm pages; medians count,
flushes to disk are part of all. From these rates follow the minutes that published models would
take on this machine, which has no room for them. Writes benchmarks/results/convert.json.

--memory measures, in place of that, the largest anonymous and shared memory of a process, polled,
on sparse files of one and of ten times the size, and writes benchmarks/results/convert_memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, ratios, significant, take_turns, write_result
from rlhf_megatron.weights.conversion.conversion_targets import HFTarget, TorchDistTarget
from rlhf_megatron.weights.conversion.conversion_writer import convert_model
from rlhf_megatron.weights.conversion.stored_model import group_items_into_units, open_stored_model
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.hf_writer import (
    TensorSpec,
    build_safetensors_header,
    plan_weight_files,
    write_weight_index,
)

GB = 10**9
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}
PUBLISHED = ("qwen3_30b_a3b", "qwen3_235b_a22b", "deepseek_v3")
EXPERT_BYTES = 3 * 2048 * 768 * 2


def make(directory: Path, num_bytes: int, is_sparse: bool) -> Path:
    """A model of about so many bytes."""
    experts = max(8, (num_bytes - 4 * 32768 * 2048) // EXPERT_BYTES // 4)
    config = {**CONFIG, "num_experts": int(experts), "num_hidden_layers": 4}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    specs = [
        TensorSpec(hf.name, "bfloat16", hf.shape)
        for rule in make_weight_table(config)
        for hf in rule.hf_tensors
    ]
    files = plan_weight_files(specs)
    write_weight_index(directory, files)
    noise = np.random.default_rng(0).integers(0, 255, 1 << 26, dtype=np.uint8)
    for name, members in files.items():
        begin, _ = build_safetensors_header(members)
        total = len(begin) + sum(spec.num_bytes for spec in members)
        with open(directory / name, "wb") as file:
            file.write(begin)
            while not is_sparse and (left := total - file.tell()) > 0:
                file.write(noise[: min(left, len(noise))].data)
            file.truncate(total)
    return directory


def copy(source: Path, out: Path) -> None:
    """Every file, flushed."""
    out.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, out / path.name)
        descriptor = os.open(out / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def to_torch_dist(source: Path, out: Path, num_processes: int) -> None:
    model = open_stored_model(source)
    items = model.make_conversion_items()
    convert_model(model, items, TorchDistTarget(model, items), out, num_processes)


def to_hf(source: Path, out: Path, num_processes: int) -> None:
    model = open_stored_model(source)
    items = model.make_conversion_items()
    convert_model(model, items, HFTarget(model, items), out, num_processes)


def throughput(root: Path, args: argparse.Namespace) -> dict[str, Any]:
    source = make(root / "hf", int(args.gb * GB), is_sparse=False)
    between = root / "between"
    to_torch_dist(source, between, args.processes)
    runs: dict[str, Callable[[Path], None]] = {
        "copy": lambda out: copy(source, out),
        "to_torch_dist": lambda out: to_torch_dist(source, out, args.processes),
        "to_hf": lambda out: to_hf(between, out, args.processes),
    }

    def clean(run: Callable[[Path], None]) -> Callable[[], None]:
        def timed() -> None:
            shutil.rmtree(root / "out", ignore_errors=True)
            run(root / "out")

        return timed

    timings = take_turns({name: clean(run) for name, run in runs.items()}, args.repetitions)
    num_bytes = sum(path.stat().st_size for path in source.iterdir())
    seconds = {name: statistics.median(timing.wall_s) for name, timing in timings.items()}
    return {
        "bytes": num_bytes,
        "extrapolated": {name: extrapolated(name, num_bytes, seconds) for name in PUBLISHED},
        "runs": {name: timing.summary() for name, timing in timings.items()},
        "ratios": {
            name: ratios(timings[name], timings["copy"]) for name in ("to_torch_dist", "to_hf")
        },
    }


def extrapolated(name: str, num_bytes: int, seconds: dict[str, float]) -> dict[str, float]:
    """Minutes of each way for a published model in bfloat16, at the rate of `num_bytes` in so
    many `seconds`.
    """
    total = 2 * sum(
        prod(hf.shape)
        for rule in make_weight_table(read_hf_config(ROOT / "examples" / name))
        for hf in rule.hf_tensors
    )
    return {"gb": significant(total / GB)} | {
        f"{way}_minutes": significant(total / num_bytes * spent / 60)
        for way, spent in seconds.items()
    }


def peak_bytes(work: Callable[[], None]) -> int:
    """The largest RssAnon + RssShmem of this process or of a child while it works, over what
    it was before.
    """
    before = _held(os.getpid())
    peak = [0]
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            peak[0] = max(peak[0], _held(os.getpid()), *(_held(int(pid)) for pid in children))

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    is_over.set()
    watcher.join()
    return peak[0] - before


def _held(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def memory(root: Path, gigabytes: float, num_processes: int) -> dict[str, Any]:
    source = make(root / "sparse", int(gigabytes * GB), is_sparse=True)
    model = open_stored_model(source)
    items = model.make_conversion_items()
    unit = max(
        sum(items[number].num_bytes for number in unit) for unit in group_items_into_units(items)
    )
    began = time.monotonic()
    peak = peak_bytes(lambda: to_torch_dist(source, root / "out", num_processes))
    found = {
        "gb": gigabytes,
        "largest_unit": unit,
        "peak": peak,
        "seconds": round(time.monotonic() - began, 1),
    }
    shutil.rmtree(root / "out")
    shutil.rmtree(source)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument(
        "--memory",
        action="store_true",
        help="memory instead, on sparse files of one and ten times it",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.dir) as root:
        result: dict[str, Any] = {"settings": {"gb": args.gb, "processes": args.processes}}
        if args.memory:
            result["memory"] = [
                memory(Path(root), args.gb * times, args.processes) for times in (1, 10)
            ]
        else:
            result |= throughput(Path(root), args)
    command = f"python -m benchmarks.bench_convert --gb {args.gb:g} --processes {args.processes}"
    print(json.dumps(result, indent=1))
    name = "convert_memory" if args.memory else "convert"
    print(write_result(name, command + " --memory" * args.memory, result))


if __name__ == "__main__":
    main()

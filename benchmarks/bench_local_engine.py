"""The bundled engine's generator against transformers' own batched `generate`: same model, \
prompts and lengths.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_local_engine            # on CPU, float32
    python -m benchmarks.bench_local_engine --device cuda --dtype bfloat16

Two workloads. `quickstart`: 32 prompts of 6 tokens x 16 samples, 4 new tokens each. `lognormal`: 64
prompts, one sample each, response lengths lognormal (median 55, sigma 0.8) up to 256. transformers
gets its best static batching: all rows at once, sampling at temperature 1 without top-k, and, for
lognormal lengths, also the rows sorted by length in batches of 16 (the better of both counts).
Repetitions alternate in one process; the median is reported.
Writes benchmarks/results/local_engine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhf_megatron.rollout.engine_interface import GenerateRequest, SamplingParams
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.local_model import load_local_model

RESULTS = Path(__file__).parent / "results" / "local_engine.json"


def tiny_model(path: Path) -> None:
    """The quickstart's shape: 4 layers, hidden 128, 4 heads over 2 key heads, vocabulary 32."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        initializer_range=0.06,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)


def workloads() -> dict[str, list[GenerateRequest]]:
    rng = np.random.default_rng(0)
    quick = [
        GenerateRequest(
            tuple(rng.integers(1, 17, 6).tolist()),
            tuple(range(16 * i, 16 * i + 16)),
            SamplingParams(4),
        )
        for i in range(32)
    ]
    lengths = np.clip(rng.lognormal(4.0, 0.8, 64).astype(int), 1, 256)
    varied = [
        GenerateRequest(tuple(rng.integers(1, 17, 6).tolist()), (i,), SamplingParams(int(length)))
        for i, length in enumerate(lengths)
    ]
    return {"quickstart": quick, "lognormal": varied}


def stock_generate(model: Any, requests: list[GenerateRequest], rows_at_once: int) -> None:
    """transformers decodes a batch until its longest row is done;
    `rows_at_once` rows are a batch.
    """
    rows = [
        (request.prompt_ids, request.params.max_new_tokens)
        for request in requests
        for _ in request.seeds
    ]
    rows.sort(key=lambda row: row[1])
    for start in range(0, len(rows), rows_at_once):
        batch = rows[start : start + rows_at_once]
        ids = torch.tensor([prompt for prompt, _ in batch], device=model.device)
        longest = max(length for _, length in batch)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=longest,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
        assert out.shape == (len(batch), ids.shape[1] + longest), out.shape


def measure(
    runs: dict[str, Callable[[], object]], repetitions: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each repetition. All runs take turns, so that a busy machine hits them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            if repetition:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        tiny_model(path)
        ours = load_local_model(path, args.dtype, args.device, load_weights=True)
        stock = Qwen3ForCausalLM.from_pretrained(path, dtype=args.dtype, attn_implementation="sdpa")
        stock = stock.to(args.device).eval()
        for name, requests in workloads().items():
            num_rows = sum(len(request.seeds) for request in requests)
            num_tokens = sum(
                len(request.seeds) * request.params.max_new_tokens for request in requests
            )
            generator = BatchGenerator(ours, num_rows, 1 << 20)
            runs: dict[str, Callable[[], object]] = {
                "local": lambda g=generator, r=requests: g.generate(r),
                "transformers": lambda r=requests, n=num_rows: stock_generate(stock, r, n),
            }
            if name == "lognormal":
                runs["transformers_sorted_16"] = lambda r=requests: stock_generate(stock, r, 16)
            seconds = measure(runs, args.repetitions, args.device)
            medians = {run: statistics.median(values) for run, values in seconds.items()}
            best = min(value for run, value in medians.items() if run != "local")
            rows[name] = {
                "rows": num_rows,
                "new_tokens": num_tokens,
                "median_s": {run: round(value, 4) for run, value in medians.items()},
                "min_s": {run: round(min(values), 4) for run, values in seconds.items()},
                "local_tokens_per_s": round(num_tokens / medians["local"]),
                "speedup": round(best / medians["local"], 3),
            }
            print(
                f"{name}: local {medians['local']:.3f} s, transformers {best:.3f}"
                f" s: {best / medians['local']:.2f}x"
            )
    report = {
        "command": (
            f"python -m benchmarks.bench_local_engine --device {args.device} --dtype {args.dtype}"
        ),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if args.device != "cpu"
        else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "repetitions": args.repetitions,
        "workloads": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

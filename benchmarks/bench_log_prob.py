"""The LM head, chunked against naive: CPU seconds and peak memory of log-prob + entropy, forward and backward.

    python -m benchmarks.bench_log_prob [--repeats 3] [--tokens 2048 --hidden 576 --vocab 49152]

Naive is the reference: float32 logits, log_softmax, autograd. Each measurement is a process of its own with one thread,
the two variants alternating. Peak memory is the resident high-water mark above what stood before the forward pass
(inputs, libraries), so it contains the gradients that both must return; `extra_mb` leaves these out. Writes
benchmarks/results/log_prob.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "log_prob.json"
BACKENDS = ("chunked", "reference")
CHUNK_SIZE = 4096


def high_water_mark_mb() -> float:
    """Peak resident memory since the last reset, MB (10^6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError("/proc/self/status has no VmHWM line; this benchmark needs Linux.")


def measure(backend: str, num_tokens: int, hidden: int, vocab: int) -> dict[str, float]:
    """One forward and backward in this process, after a small one that loads everything."""
    import torch

    from rlhf_megatron.kernels.log_prob import linear_log_prob

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def run(num_tokens: int, vocab: int) -> dict[str, float]:
        hidden_TH = torch.randn(num_tokens, hidden, generator=generator).requires_grad_()
        weight_VH = torch.randn(vocab, hidden, generator=generator).div_(hidden**0.5).requires_grad_()
        targets_T = torch.randint(0, vocab, (num_tokens,), generator=generator)
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        before_mb = high_water_mark_mb()
        start_s = time.process_time()
        log_probs_T, entropies_T, _ = linear_log_prob(
            hidden_TH,
            weight_VH,
            targets_T,
            temperature=1.0,
            vocab_start=0,
            vocab_size=vocab,
            tp_group=None,
            chunk_size=CHUNK_SIZE,
            with_entropy=True,
            backend=backend,  # type: ignore[arg-type]
        )
        assert entropies_T is not None
        forward_s = time.process_time() - start_s
        (log_probs_T.sum() - 0.01 * entropies_T.sum()).backward()
        total_s = time.process_time() - start_s
        gradients_mb = (hidden_TH.numel() + weight_VH.numel()) * 4 / 1e6
        peak_mb = high_water_mark_mb() - before_mb
        return {
            "forward_s": forward_s,
            "backward_s": total_s - forward_s,
            "total_s": total_s,
            "peak_mb": peak_mb,
            "extra_mb": peak_mb - gradients_mb,
            "log_prob_mean": log_probs_T.mean().item(),
        }

    run(16, 128)
    return run(num_tokens, vocab)


def measure_in_child(backend: str, sizes: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.bench_log_prob", "--child", backend, *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.tokens, args.hidden, args.vocab)))
        return

    sizes = ["--tokens", str(args.tokens), "--hidden", str(args.hidden), "--vocab", str(args.vocab)]
    runs: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for _ in range(args.repeats):
        for backend in BACKENDS:
            runs[backend].append(measure_in_child(backend, sizes))
    median = {
        backend: {key: statistics.median(run[key] for run in repeats) for key in repeats[0]}
        for backend, repeats in runs.items()
    }
    ratios = {key: median["chunked"][key] / median["reference"][key] for key in ("total_s", "peak_mb", "extra_mb")}
    report = {
        "command": "python -m benchmarks.bench_log_prob " + " ".join([*sizes, "--repeats", str(args.repeats)]),
        "shape": {"tokens": args.tokens, "hidden": args.hidden, "vocab": args.vocab, "chunk_size": CHUNK_SIZE},
        "dtype": "float32",
        "median": median,
        "chunked_over_naive": ratios,
        "runs": runs,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    for backend, values in median.items():
        print(f"{backend:10} {values['total_s']:6.2f} CPU s  peak {values['peak_mb']:7.0f} MB")
    print("chunked / naive: " + ", ".join(f"{key} {value:.3f}" for key, value in ratios.items()))
    print(f"written: {RESULTS}")


if __name__ == "__main__":
    main()

"""The digest of a tensor against a memory copy of the same bytes, on one core: seconds, bytes a second, the ratio.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_receipt [--repetitions 7]

"model": the 272 tensors of SmolLM2-135M, norms and all. Beside them tensors of one size, 1 to 512 MiB: "memory": they
are parts of an arena that no cache holds, and all of it is digested or copied in one go, as when the weights of a model
are; the target of the copy is mapped already. "cache": one tensor again and again, which for the small ones a cache
holds, source and target: a copy is then up to three times as fast, the digest is not. The bar of 2 is on all but these.
Writes benchmarks/results/receipt.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import ratios, significant, take_turns, write_result
from rlhf_megatron.resharding.digest import digest

MIB = 1 << 20
SIZES_MIB = (1, 8, 64, 512)
ARENA_MIB = 512
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LAYER = [576 * 576, 192 * 576, 192 * 576, 576 * 576, 1536 * 576, 1536 * 576, 576 * 1536, 576, 576]
MODEL = [49152 * 576, *(LAYER * 30), 576]  # numbers in the tensors of SmolLM2-135M


def measure(dtype: torch.dtype, sizes: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Digests and copies of tensors that hold `sizes` numbers, in turns."""
    sources = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1), dtype=torch.float32).to(dtype)
    targets = torch.empty_like(sources).copy_(sources)
    parts = [arena.split(list(sizes)) for arena in (sources, targets)]

    def copy() -> None:
        for source, target in zip(*parts, strict=True):
            target.copy_(source)

    def take_digests() -> None:
        for source in parts[0]:
            digest(source)

    timings = take_turns({"digest": take_digests, "copy": copy}, repetitions)
    rates = {name: significant(sources.nbytes / min(run.wall_s) / 1e9) for name, run in timings.items()}
    return {
        **{name: run.summary() for name, run in timings.items()},
        "gigabytes_per_s": rates,
        "ratio": ratios(timings["digest"], timings["copy"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        cases = {f"model, {name}": MODEL}
        for size_mib in SIZES_MIB:
            size, count = size_mib * MIB // dtype.itemsize, ARENA_MIB // size_mib
            cases[f"{size_mib} MiB {name}, memory"] = [size] * count
            if count > 1:
                cases[f"{size_mib} MiB {name}, cache"] = [size]
        for case, sizes in cases.items():
            runs[case] = row = measure(dtype, sizes, args.repetitions)
            rate, ratio = row["gigabytes_per_s"], row["ratio"]["cpu_min"]
            print(
                f"digest, {case}: {rate['digest']:.1f} GB/s, a copy {rate['copy']:.1f} GB/s: {ratio:.2f} times a copy"
            )
    command = f"python -m benchmarks.bench_receipt --repetitions {args.repetitions}"
    result = {"runs": runs, "ratio": {name: row["ratio"]["cpu_min"] for name, row in runs.items()}}
    print(write_result("receipt", command, result))


if __name__ == "__main__":
    main()

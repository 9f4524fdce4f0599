"""The digest of a tensor against a memory copy of the same bytes, on one core: seconds, bytes a \
second, the ratio.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_receipt [--repetitions 7]

"model": the 272 tensors of SmolLM2-135M, norms and all. Beside them tensors of one size, 1 to 512
MiB: "memory": they are parts of an arena that no cache holds, and all of it is digested or copied
in one go, as when the weights of a model are; the target of the copy is mapped already. "cache":
one tensor again and again, which for the small ones a cache holds, source and target: a copy is
then up to three times as fast, the digest is not. The bar of 2 is on all but these.

"columns": what one of 2 or 8 ranks of an engine holds of a tensor that is cut along its columns,
digested at its place, against a plain digest of the same bytes. "rank": all that such a rank holds
of a model, a third of it columns, against a plain digest of the whole model: what a receipt costs a
rank beside what it would cost an engine of one rank. Writes benchmarks/results/receipt.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.common import Timings, ratios, significant, take_turns, write_result
from rlhf_megatron.weights.tensor_digest import digest_tensor, digest_tensor_part

MIB = 1 << 20
SIZES_MIB = (1, 8, 64, 512)
ARENA_MIB = 512
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
LAYER = [576 * 576, 192 * 576, 192 * 576, 576 * 576, 1536 * 576, 1536 * 576, 576 * 1536, 576, 576]
# down and output projections of models
COLUMNS = (576, 1536), (896, 4864), (4096, 4096), (4096, 14336)
RANKS = (2, 8)
PROJECTIONS = {
    "q": (0, 1),
    "k": (0, 1),
    "o": (1, 1),
    "gate": (0, 4),
    "up": (0, 4),
    "down": (1, 4),
}  # axis, times hidden
RANK_HIDDEN = 2048
RANK_LAYERS = 4
MODEL = [49152 * 576, *(LAYER * 30), 576]  # numbers in the tensors of SmolLM2-135M


def measure(dtype: torch.dtype, sizes: Sequence[int], repetitions: int) -> dict[str, Any]:
    """Digests and copies of tensors that hold `sizes` numbers, in turns."""
    sources = torch.randn(
        sum(sizes), generator=torch.Generator().manual_seed(1), dtype=torch.float32
    ).to(dtype)
    targets = torch.empty_like(sources).copy_(sources)
    parts = [arena.split(list(sizes)) for arena in (sources, targets)]

    def copy() -> None:
        for source, target in zip(*parts, strict=True):
            target.copy_(source)

    def take_digests() -> None:
        for source in parts[0]:
            digest_tensor(source)

    timings = take_turns({"digest": take_digests, "copy": copy}, repetitions)
    return _compared(timings, "digest", "copy", sources.nbytes)


def measure_columns(
    dtype: torch.dtype, shape: tuple[int, int], num_ranks: int, repetitions: int
) -> dict[str, Any]:
    """The columns of the second rank, as it holds them, against a plain digest of as many bytes."""
    count = shape[1] // num_ranks
    times = max(1, 4 * MIB // (shape[0] * count * dtype.itemsize))
    parts = torch.randn(times, shape[0], count, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    runs = {
        "columns": lambda: [digest_tensor_part(part, shape, 1, count) for part in parts],
        "plain": lambda: [digest_tensor(part) for part in parts],
    }
    return _compared(take_turns(runs, repetitions), "columns", "plain", parts.nbytes)


def measure_rank(dtype: torch.dtype, num_ranks: int, repetitions: int) -> dict[str, Any]:
    """All that the second rank holds of a model, against the whole model in one rank."""
    held: list[tuple[torch.Tensor, tuple[int, int], int, int]] = []
    whole: list[torch.Tensor] = []
    for axis, times in list(PROJECTIONS.values()) * RANK_LAYERS:
        long = times * RANK_HIDDEN
        hidden = RANK_HIDDEN
        tensor = torch.randn((hidden, long) if axis else (long, hidden)).to(dtype)
        count = tensor.shape[axis] // num_ranks
        part = tensor.narrow(axis, count, count).contiguous()
        held.append((part, (tensor.shape[0], tensor.shape[1]), axis, count))
        whole.append(tensor)
    runs = {
        "rank": lambda: [
            digest_tensor_part(part, shape, axis, start) for part, shape, axis, start in held
        ],
        "whole": lambda: [digest_tensor(tensor) for tensor in whole],
    }
    return _compared(
        take_turns(runs, repetitions), "rank", "whole", sum(tensor.nbytes for tensor in whole)
    )


def _compared(
    timings: Mapping[str, Timings], run: str, baseline: str, num_bytes: int
) -> dict[str, Any]:
    rates = {
        name: significant(num_bytes / min(found.wall_s) / 1e9) for name, found in timings.items()
    }
    return {
        **{name: found.summary() for name, found in timings.items()},
        "gigabytes_per_s": rates,
        "ratio": ratios(timings[run], timings[baseline]),
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
            size = size_mib * MIB // dtype.itemsize
            count = ARENA_MIB // size_mib
            cases[f"{size_mib} MiB {name}, memory"] = [size] * count
            if count > 1:
                cases[f"{size_mib} MiB {name}, cache"] = [size]
        for case, sizes in cases.items():
            runs[case] = row = measure(dtype, sizes, args.repetitions)
            rate = row["gigabytes_per_s"]
            ratio = row["ratio"]["cpu_min"]
            print(
                f"digest, {case}: {rate['digest']:.1f} GB/s, a copy {rate['copy']:.1f} GB/s:"
                f" {ratio:.2f} times a copy"
            )
        for shape in COLUMNS:
            for num_ranks in RANKS:
                case = f"columns of {shape[0]} x {shape[1]} in {num_ranks} ranks, {name}"
                runs[case] = row = measure_columns(dtype, shape, num_ranks, args.repetitions)
                rate = row["gigabytes_per_s"]["columns"]
                ratio = row["ratio"]["cpu_min"]
                print(f"digest, {case}: {rate:.1f} GB/s, {ratio:.2f} times a plain digest")
        for num_ranks in RANKS:
            case = f"rank of {num_ranks}, {name}"
            runs[case] = row = measure_rank(dtype, num_ranks, args.repetitions)
            print(
                f"digest, {case}: {row['ratio']['cpu_min']:.2f} times that of the whole model"
                " in one rank"
            )
    command = f"python -m benchmarks.bench_receipt --repetitions {args.repetitions}"
    result = {"runs": runs, "ratio": {name: row["ratio"]["cpu_min"] for name, row in runs.items()}}
    print(write_result("receipt", command, result))


if __name__ == "__main__":
    main()

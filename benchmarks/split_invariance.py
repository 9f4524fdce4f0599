"""The gradient of a mini-batch does not depend on how it was cut. `make split-invariance`.

    python -m benchmarks.split_invariance [--only pure|corrected|megatron|losses] [--families A,B]
        [--layouts A,B]

Token budget (all in one micro-batch, 1/2, 1/7), data-parallel and context-parallel size (1, 2),
pipeline stages (1, 2, 2 virtual ones on 2), sequence parallelism, order of the samples, each
aggregation mode. Compared with the gradient of the same mini-batch on one rank in one micro-batch;
error: L2 norm of the difference of all gradients over the L2 norm.

    pure       every registered loss with its regularizers, float64, one process
               (split_pure.py) <= 1e-12
               metrics of the update likewise, absolute <= 1e-12
               uncut, against means over single samples; weights are float32 <= 2e-7
    corrected  every mode of the rollout correction with every loss and aggregation
               (split_correction.py): the same
               three comparisons, in two of the splits each, all of them in turn
    megatron   actor and critic through megatron-core, float32, on the layout's ranks
               (split_mcore.py) <= 5e-6
    losses     the actor with every registered policy loss, and with five corrections,
               likewise <= 5e-6

Exit code 1 when a figure is over its bar. Writes benchmarks/results/split_invariance.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from benchmarks import split_mcore, split_pure
from benchmarks.common import RESULTS, significant, write_result
from benchmarks.parity.cases import Recipe
from benchmarks.parity.run import DistPool, make_case
from benchmarks.split_pure import SPLITS

PURE_BAR = 1e-12
PLAIN_BAR = 2e-7  # three roundings to float32
MEGATRON_BAR = 5e-6


@dataclass(frozen=True)
class Row:
    """One comparison. `error`: of all gradients together; the tensor that is worst by itself is
    reported only.
    """

    kind: str  # pure, pure metrics, plain means, megatron
    what: str  # loss and regularizers, or family and layout
    mode: str
    split: str
    error: float
    bar: float
    worst_tensor: str = ""
    worst_error: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.error <= self.bar  # False for NaN


def compare(value: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> tuple[float, str, float]:
    """(relative L2 error of all tensors together,
    the tensor that is worst by itself, its error).
    """
    assert set(value) == set(truth), (
        f"tensors that one side lacks: {sorted(set(value) ^ set(truth))}"
    )
    differences = {
        name: float((value[name].double() - truth[name].double()).norm()) for name in truth
    }
    norms = {name: float(truth[name].double().norm()) for name in truth}
    errors = {
        name: differences[name] / norms[name] if norms[name] else differences[name]
        for name in truth
    }
    worst = max(errors, key=lambda name: _size(errors[name]))
    whole = (
        torch.tensor(list(differences.values())).norm() / torch.tensor(list(norms.values())).norm()
    )
    return float(whole), worst, errors[worst]


def _size(error: float) -> float:
    """For comparisons: what is not a number is larger than any."""
    return float("inf") if error != error else error


def pure_rows(
    cases: Iterable[split_pure.LossCase],
    splits: Sequence[split_pure.Split] = split_pure.SPLITS,
    spoil: split_pure.Spoil | None = None,
) -> Iterator[Row]:
    """`spoil`: a planted mistake in the shards of the splits."""
    for case in cases:
        batch = split_pure.batch_of(case)
        whole = split_pure.split_gradient(batch, case, split_pure.Split())
        assert whole.num_micro_batches == 1, "the whole mini-batch must be in one micro-batch"
        mode = case.config.loss_agg_mode
        plain = compare(whole.gradients, split_pure.plain_gradient(batch, case))
        yield Row("plain means", case.name, mode, "uncut", plain[0], PLAIN_BAR, *plain[1:])
        for split in splits:
            cut = split_pure.split_gradient(batch, case, split, spoil)
            found = compare(cut.gradients, whole.gradients)
            yield Row("pure", case.name, mode, str(split), found[0], PURE_BAR, *found[1:])
            assert set(cut.metrics) == set(whole.metrics), "a split has other metrics"
            differences = {
                name: abs(cut.metrics[name] - value) for name, value in whole.metrics.items()
            }
            worst = max(differences, key=lambda name: differences[name])
            yield Row(
                "pure metrics",
                case.name,
                mode,
                str(split),
                differences[worst],
                PURE_BAR,
                worst,
                differences[worst],
            )


def corrected_rows(cases: Iterable[split_pure.LossCase], num_splits: int = 2) -> Iterator[Row]:
    """Each case in one split that cuts every way but stages, and in another one in turn: a mode
    meets all of them.
    """
    for number, case in enumerate(cases):
        others = [
            SPLITS[(number * (num_splits - 1) + i) * 7 % len(SPLITS)] for i in range(num_splits - 1)
        ]
        for row in pure_rows([case], [split_pure.EVERY_CUT, *others]):
            kind = (
                row.kind.replace("pure", "corrected")
                if "pure" in row.kind
                else f"corrected {row.kind}"
            )
            yield replace(
                row, kind=kind, what=case.correction_name, split=f"{case.name}; {row.split}"
            )


def megatron_rows(
    families: Sequence[str], layouts: Sequence[split_mcore.Axes], report: Callable[[str], None]
) -> Iterator[Row]:
    """Starts worker processes, and ends them."""
    pool = DistPool()
    try:
        for family in families:
            baseline, cells = split_mcore.run_family(pool, family, layouts, report)
            for cell in cells:
                found = compare(cell.gradients, baseline[cell.mode])
                split = f"budget 1/{cell.parts}{', shuffled' if cell.is_shuffled else ''}"
                yield Row(
                    "megatron",
                    f"{family} {cell.layout}",
                    cell.mode,
                    split,
                    found[0],
                    MEGATRON_BAR,
                    *found[1:],
                )
    finally:
        pool.close()


def loss_rows(layouts: Sequence[split_mcore.Axes], report: Callable[[str], None]) -> Iterator[Row]:
    """Starts worker processes, and ends them."""
    pool = DistPool()
    parts = split_mcore.LOSS_PARTS
    try:
        case = make_case(split_mcore.LOSS_FAMILY, Recipe(), cuts=())
        whole = {
            cell.mode: cell for cell in split_mcore.run_losses(pool, case, split_mcore.Axes(), 1)
        }
        for axes in layouts:
            for cell in split_mcore.run_losses(pool, case, axes, parts):
                found = compare(cell.gradients, whole[cell.mode].gradients)
                what = f"{cell.mode} {cell.layout}"
                yield Row(
                    "losses",
                    what,
                    "seq-mean-token-mean",
                    f"budget 1/{parts}",
                    found[0],
                    MEGATRON_BAR,
                    *found[1:],
                )
            report(f"every loss, {axes.name}")
    finally:
        pool.close()


def worst_rows(rows: Iterable[Row], *columns: str) -> list[Row]:
    """Of the rows that agree in `columns`, the one with the largest error."""
    worst: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(getattr(row, column) for column in columns)
        if key not in worst or _size(row.error) > _size(worst[key].error):
            worst[key] = row
    return list(worst.values())


def table(rows: Iterable[Row]) -> str:
    lines = [
        f"{'kind':<22}{'what':<58}{'mode':<25}{'error':>9}{'bar':>9}  worst tensor alone; split"
    ]
    for row in rows:
        mark = "" if row.is_ok else "  OVER THE BAR"
        lines.append(
            f"{row.kind:<22}{row.what:<58}{row.mode:<25}{row.error:9.1e}{row.bar:9.0e}"
            f"  {row.worst_error:.1e} {row.worst_tensor}; {row.split}{mark}"
        )
    return "\n".join(lines)


def chosen(names: str | None, known: Sequence[str], what: str) -> list[str]:
    """The names of a comma-separated list; None: all. Raises SystemExit for an unknown one."""
    picked = names.split(",") if names else list(known)
    unknown = [name for name in picked if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}.")
    return picked


def main(argv: list[str] | None = None) -> int:
    layouts = {axes.name: axes for axes in split_mcore.LAYOUTS}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split_invariance", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--only", choices=("pure", "corrected", "megatron", "losses"), help="this part alone"
    )
    parser.add_argument(
        "--families", help=f"of the part megatron: {', '.join(split_mcore.FAMILIES)}"
    )
    parser.add_argument("--layouts", help=f"of the part megatron: {', '.join(layouts)}")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "split_invariance.json",
        help="result file (%(default)s)",
    )
    args = parser.parse_args(argv)
    families = chosen(args.families, list(split_mcore.FAMILIES), "family")
    axes = [layouts[name] for name in chosen(args.layouts, list(layouts), "layout")]
    torch.set_num_threads(1)
    start = time.monotonic()

    def report(line: str) -> None:
        print(f"[{time.monotonic() - start:6.1f} s] {line}", flush=True)

    rows: list[Row] = []
    if args.only in (None, "pure"):
        rows += pure_rows(split_pure.loss_cases())
        report(f"pure: {len(rows)} comparisons")
    if args.only in (None, "corrected"):
        rows += corrected_rows(split_pure.corrected_cases())
        report(f"corrected: {len(rows)} comparisons so far")
    if args.only in (None, "megatron"):
        rows += megatron_rows(families, axes, report)
    if args.only in (None, "losses"):
        rows += loss_rows(split_mcore.LOSS_LAYOUTS, report)
    print(table(worst_rows(rows, "kind", "what")))
    misses = [row for row in rows if not row.is_ok]
    result = {
        "measure": (
            "relative L2 error of all gradients against one rank and one micro-batch;"
            " metrics: absolute"
        ),
        "seconds": round(time.monotonic() - start, 1),
        "num_comparisons": dict(Counter(row.kind for row in rows)),
        "num_over_the_bar": len(misses),
        "rows_are": "the worst of each kind, loss or layout, and mode; all that are over the bar",
        "rows": [
            _rounded(row)
            for row in dict.fromkeys([*worst_rows(rows, "kind", "what", "mode"), *misses])
        ],
    }
    command = " ".join(
        ["python -m benchmarks.split_invariance", *(sys.argv[1:] if argv is None else argv)]
    )
    path = write_result(args.out.stem, command, result, args.out.parent)
    print(
        f"{len(rows)} comparisons, {len(misses)} over the bar,"
        f" {time.monotonic() - start:.0f} s; {path}"
    )
    return 1 if misses or not rows else 0


def _rounded(row: Row) -> dict[str, object]:
    return {
        key: significant(value) if isinstance(value, float) else value
        for key, value in asdict(row).items()
    }


if __name__ == "__main__":
    sys.exit(main())

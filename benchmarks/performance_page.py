"""docs/performance.md, written from the files in benchmarks/results.

    python -m benchmarks.performance_page --write    # writes the page
    python -m benchmarks.performance_page            # exit code 1 where the page is not
                                                     what the files say

Each section tells the command, the hardware, versions and commit of its figures; a benchmark that
has not been run is named with the command that runs it. A case of kernels is shown by the figure
nearest to its bar, and all that missed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, ROOT
from benchmarks.kernels.case import Figure
from benchmarks.kernels.report import bar_of, figures_of, verdict_of
from benchmarks.run_all import BENCHMARKS, Row, over_bar

PAGE = ROOT / "docs" / "performance.md"
GPU_FILE = re.compile(r"gpu_check-(\d{4}-\d{2}-\d{2})-(.+?)(-part\d)?\.json")
PACKAGES = ("torch", "triton", "megatron-core", "transformers", "liger-kernel", "cut-cross-entropy")

INTRODUCTION = """\
# Performance

Written by `python -m benchmarks.performance_page --write` from the files in \
`benchmarks/results/`; do not edit.

A value in `x` is ours over the baseline of the same run: below 1 is faster, or smaller. CPU \
figures are CPU seconds of
one thread unless they say wall time. What each case does is told at the top of its file: \
`benchmarks/kernels/` for
C1 to C11, `benchmarks/gpu/` for G1 to G11, [benchmarks/README.md](../benchmarks/README.md) for \
the rest. Of a case of
kernels the number of figures, the one nearest to its bar and all that missed are shown; \
the command prints every one.
A weight sync sends what each rank holds through shared memory (`shards`) or over process groups \
(`links`), or gathers
whole tensors on one rank first (`whole`).
"""


def page(directory: Path = RESULTS) -> str:
    sections = [
        kernels_on_cpu(directory),
        kernels_on_gpu(directory),
        section(
            "Trainer step",
            directory,
            dict.fromkeys(("actor_update", "grpo_step", "grpo_step_long", "grpo_step_smollm2")),
        ),
        section("Engines", directory, {"local_engine": None}) + engine_speeds(directory),
        section("Weight sync", directory, {"weight_sync": None, "receipt": _is_of_a_model}),
    ]
    return "\n".join([INTRODUCTION, *sections])


def kernels_on_cpu(directory: Path) -> str:
    result = read(directory / "kernels_cpu.json")
    title = "## Kernels on a CPU\n"
    if result is None:
        return f"{title}\nNo run on a CPU has been recorded yet: `python -m benchmarks.kernels`.\n"
    return f"{title}\n{provenance(result)}\n\n{cases_text(result['cases'])}"


def kernels_on_gpu(directory: Path) -> str:
    title = "## Kernels and training on a GPU\n"
    results = newest_gpu_results(directory)
    if not results:
        return (
            f"{title}\nNo run on a GPU has been recorded yet. One command, where torch sees a GPU: "
            "`make gpu-check PYTHON=python3`.\n"
        )
    text = title
    for result in results:
        text += f"\n{provenance(result)}\n"
        counts = ", ".join(
            f"{number} {kind}" for kind, number in sorted(result.get("counts", {}).items())
        )
        text += f"\nTests that need a GPU: {counts}.\n" if counts else ""
        text += f"\n{cases_text(result['cases'])}" if result.get("cases") else ""
        text += runs_text(result.get("runs", ()))
        text += "".join(f"\n{note}\n" for note in result.get("notes", ()))
        left_out = result.get("out_of_time", [])
        text += f"\nNot run, for want of time: {', '.join(left_out)}.\n" if left_out else ""
    return text


def runs_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say which whole runs had the figures of a CPU, and what the others differed in."""
    runs = [row for row in rows if "name" in row]
    text = ""
    for is_compared, words in (
        (True, "Whole runs with the figures of a CPU"),
        (False, "Not compared, ended well"),
    ):
        names = [
            row["name"] for row in runs if row["is_compared"] == is_compared and not row["problems"]
        ]
        text += f"\n{words}: {', '.join(names)}.\n" if names else ""
    return text + "".join(
        f"\nWhole run {row['name']}: {'; '.join(row['problems'])}.\n"
        for row in runs
        if row["problems"]
    )


def newest_gpu_results(directory: Path) -> list[dict[str, Any]]:
    """The parts of the latest whole run. Runs of tiny sizes do not count."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted(directory.glob("gpu_check-*.json")):
        match = GPU_FILE.fullmatch(path.name)
        result = read(path)
        if match and result is not None and not result.get("is_quick"):
            runs.setdefault((match[1], match[2]), []).append(result)
    if not runs:
        return []
    newest = max(runs, key=lambda run: max(result["machine"]["time"] for result in runs[run]))
    return runs[newest]


def cases_text(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """One table of all cases, and below it what was not measured."""
    rows = [
        row for name, case in cases.items() for row in case_rows(f"{name}: {case['what']}", case)
    ]
    text = table(("case", "nearest to its bar", "value", "bar", "", "beside"), rows)
    for name, case in cases.items():
        details = case.get("details", {})
        absent = {
            **details.get("absent", {}),
            **details.get("skipped", {}),
            **details.get("failed", {}),
        }
        why = (
            {"not complete": case.get("message", "")}
            if case["figures"] and case.get("message")
            else {}
        )
        lines = [f"{what}: {_last_line(reason)}" for what, reason in {**why, **absent}.items()]
        text += f"\nNot measured in {name}: {'; '.join(lines)}.\n" if lines else ""
    return text


def case_rows(title: str, case: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Figures that missed their bar, else the nearest to it; without bars all of them."""
    if not case["figures"]:
        why = _last_line(case.get("error") or case.get("message", "")) or "nothing was measured"
        return [(title, f"no result: {why}", "", "", "", "")]
    figures = figures_of(case)
    with_bar = [figure for figure in figures if figure.bar is not None]
    missed = [figure for figure in with_bar if not figure.is_met]
    shown = missed or sorted(with_bar, key=over_bar)[-1:] or figures
    return [(f"{title} ({len(figures)})", *_figure_cells(figure)) for figure in shown]


def section(title: str, directory: Path, wanted: Mapping[str, Callable[[Row], bool] | None]) -> str:
    """Benchmarks of `run_all`, each with the rows that its function lets through."""
    text = f"## {title}\n"
    for name, is_wanted in wanted.items():
        benchmark = BENCHMARKS[name]
        result = read(directory / f"{benchmark.result}.json")
        if result is None:
            command = " ".join([benchmark.module, *benchmark.arguments])
            text += f"\nNot run yet: `python -m {command}`.\n"
            continue
        rows = [row for row in benchmark.rows(result) if is_wanted is None or is_wanted(row)]
        cells = [_row_cells(row) for row in rows]
        text += f"\n{provenance(result)}\n\n" + table(
            (f"against {benchmark.baseline}", "value", "bar", ""), cells
        )
    return text


def engine_speeds(directory: Path) -> str:
    result = read(directory / "engines.json")
    if result is None:
        return (
            "\nStock SGLang beside it has not been run yet: `python -m benchmarks.bench_engines`.\n"
        )
    rows = [
        (
            f"{model}, {workload}",
            ", ".join(f"{engine} {speed['tokens_per_s']:.0f}" for engine, speed in engines.items()),
        )
        for model, found in result["models"].items()
        for workload, engines in found["workloads"].items()
    ]
    return f"\n{provenance(result)}\n\n" + table(("model, workload", "tokens/s, wall time"), rows)


def provenance(result: Mapping[str, Any]) -> str:
    """One paragraph: command, hardware, versions, commit, day. What a file does not
    say is left out.
    """
    machine = result.get("machine", {})
    device = result.get("device")
    hardware = [device["name"]] if isinstance(device, dict) else []
    if machine:
        hardware.append(f"{machine['cpu']}, {machine['cores']} cores")
    elif isinstance(device, str):
        hardware.append(device)
    found = {
        "torch": result.get("torch"),
        **result.get("versions", {}),
        **result.get("gpu_versions", {}),
    }
    packages = [f"{name} {found[name]}" for name in ("python", *PACKAGES) if found.get(name)]
    load = machine.get("load_average", [result["load_average"]] if "load_average" in result else [])
    parts = [f"`{result['command']}`", *hardware, ", ".join(packages)]
    parts += (
        [f"commit {result['commit']}, {machine['time'][:10]}"]
        if "commit" in result and machine
        else []
    )
    parts += [f"load average {load[0]:g}"] if load else []
    return "; ".join(parts) + "."


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


def read(path: Path) -> dict[str, Any] | None:
    """None: there is no such file."""
    return json.loads(path.read_text()) if path.is_file() else None


def _figure_cells(figure: Figure) -> tuple[str, str, str, str, str]:
    value = f"{figure.value:.3g} {figure.unit}".strip()
    return figure.what, value, bar_of(figure), verdict_of(figure), figure.baseline


def _row_cells(row: Row) -> tuple[str, ...]:
    return _figure_cells(Figure(row.what, row.ratio, "x", bar=row.bar))[:4]


def _is_of_a_model(row: Row) -> bool:
    return row.what.startswith("model")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].rstrip(".") if text.strip() else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    args = parser.parse_args()
    text = page()
    if args.write:
        PAGE.write_text(text)
        return 0
    if not PAGE.is_file() or PAGE.read_text() != text:
        print(
            "docs/performance.md is not what the result files say: python -m"
            " benchmarks.performance_page --write"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

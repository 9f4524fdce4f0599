"""docs/algorithms/curves.md and its figure, from benchmarks/results/algorithm_curves.json.

`python -m benchmarks.algorithm_curves --draw` writes both. The text between the two markers of the
page is generated; tests compare it with the result file. The figure has a panel a family: held-out
accuracy of each member, mean and range over its seeds, and (thin) the share of right answers among
the samples of a step, smoothed over five steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.algorithm_families import FAMILIES, Family, Member
from benchmarks.common import RESULTS, ROOT
from benchmarks.quickstart_seeds import mean_interval

RESULT_FILE = RESULTS / "algorithm_curves.json"
PAGE = ROOT / "docs" / "algorithms" / "curves.md"
FIGURE = ROOT / "docs" / "images" / "algorithm_curves.png"
BEGIN = "<!-- generated: begin -->\n"
END = "<!-- generated: end -->\n"
NUM_COLUMNS = 3
NUM_SMOOTHED = 5  # steps
COLORS = ("tab:orange", "tab:blue", "tab:green", "tab:red", "tab:purple")

Row = Mapping[str, Any]


def rows_of(result: Row, name: str) -> list[Row]:
    return [row for row in result["runs"] if row["name"] == name]


def finals(rows: Sequence[Row]) -> list[float]:
    return [row["accuracy"][-1][1] for row in rows]


def generated(result: Row) -> str:
    """The part of the page between the markers."""
    versions = result["versions"]
    cores = result["machine"]["cores"]
    cpu = result["machine"]["cpu"]
    commits = ", ".join(sorted({row["commit"] for row in result["runs"]}))
    before = finals_before(result)
    seeds = ", ".join(f"{value:.3f}" for value in before.values())
    return "\n".join(
        [
            (
                f"`{result['command']}` on a machine with {cores} cores ({cpu}), torch"
                f" {versions['torch']}, megatron-core {versions['megatron-core']}, commit"
                f" {commits}."
            ),
            (
                f"Accuracy before, seeds {', '.join(map(str, before))}: {seeds}"
                f" (mean {mean(before.values()):.3f})."
            ),
            "",
            "| family | algorithm | accuracy after [95 %] | samples right | CPU s | settings |",
            "|---|---|---|---|---|---|",
            *(line for family in FAMILIES for line in table_lines(result, family)),
            "",
        ]
    )


def finals_before(result: Row) -> dict[int, float]:
    """Seed -> accuracy of the weights that every algorithm starts from."""
    return {
        row["seed"]: row["accuracy"][0][1]
        for row in sorted(result["runs"], key=lambda row: row["seed"])
    }


def table_lines(result: Row, family: Family) -> list[str]:
    lines = []
    for index, member in enumerate(family.members):
        title = family.title if index == 0 else ""
        rows = rows_of(result, member.name)
        figures = figures_of(rows) if rows else "not run yet | | "
        lines.append(f"| {title} | {member.name} | {figures} | {member.note} |")
    return lines


def figures_of(rows: Sequence[Row]) -> str:
    """Student's t over the seeds, cut at 0 and 1."""
    after = finals(rows)
    low, high = mean_interval(after)
    interval = f" [{max(0.0, low):.3f}, {min(1.0, high):.3f}]" if len(rows) > 1 else ""
    few = f" ({len(rows)} seed{'s' if len(rows) > 1 else ''})" if len(rows) < 3 else ""
    first, last = (
        mean(mean(row["reward"][part]) for row in rows) for part in (slice(5), slice(-5, None))
    )
    cells = (
        f"{mean(after):.3f}{interval}{few}",
        f"{first:.3f} to {last:.3f}",
        f"{mean(row['cpu_s'] for row in rows):.0f}",
    )
    return " | ".join(cells)


def page_with(text: str, result: Row) -> str:
    """`text` with its generated part made anew."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + generated(result) + END + rest.split(END)[1]


def smoothed(values: Sequence[float], width: int = NUM_SMOOTHED) -> list[float]:
    """Mean of each value and up to `width` - 1 before it."""
    return [mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def draw_member(axes: Any, rows: Sequence[Row], label: str, color: str) -> None:
    steps = [step for step, _ in rows[0]["accuracy"]]
    by_step = [[row["accuracy"][i][1] for row in rows] for i in range(len(steps))]
    axes.plot(
        steps, [mean(values) for values in by_step], "o-", markersize=3, color=color, label=label
    )
    axes.fill_between(
        steps,
        list(map(min, by_step)),
        list(map(max, by_step)),
        color=color,
        alpha=0.15,
        linewidth=0,
    )
    rewards = [mean(values) for values in zip(*(row["reward"] for row in rows), strict=True)]
    axes.plot(range(1, len(rewards) + 1), smoothed(rewards), color=color, linewidth=0.8)


def draw_family(axes: Any, result: Row, family: Family) -> None:
    shown: list[tuple[Member, list[Row]]] = [(m, rows_of(result, m.name)) for m in family.members]
    reference = rows_of(result, "grpo")
    if reference and all(member.name != "grpo" for member, _ in shown):
        steps = [step for step, _ in reference[0]["accuracy"]]
        by_step = [mean(row["accuracy"][i][1] for row in reference) for i in range(len(steps))]
        axes.plot(steps, by_step, color="grey", linestyle=":", linewidth=1.2, label="grpo")
    for (member, rows), color in zip(shown, COLORS, strict=False):
        if rows:
            draw_member(axes, rows, member.name, color)
    if not any(rows for _, rows in shown):
        axes.text(0.5, 0.2, "not run yet", transform=axes.transAxes, ha="center", fontsize=8)
    axes.set_title(family.title, fontsize=9)
    axes.set_ylim(0.3, 1.0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=6)


def draw_figure(result: Row, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_rows = -(-len(FAMILIES) // NUM_COLUMNS)
    size = (3.3 * NUM_COLUMNS, 2.2 * num_rows)
    figure, panels = pyplot.subplots(
        num_rows, NUM_COLUMNS, figsize=size, dpi=90, sharex=True, sharey=True
    )
    for axes, family in zip(panels.flat, FAMILIES, strict=False):
        draw_family(axes, result, family)
    for axes in panels.flat[len(FAMILIES) :]:
        axes.axis("off")
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("held-out accuracy (points), share of right samples (thin)", fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def draw() -> int:
    result = json.loads(RESULT_FILE.read_text())
    PAGE.write_text(page_with(PAGE.read_text(), result))
    draw_figure(result, FIGURE)
    print(PAGE, FIGURE)
    return 0

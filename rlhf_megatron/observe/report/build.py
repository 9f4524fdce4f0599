"""Writes a report: one HTML page, and PNGs of the main charts beside it where matplotlib (the `demo` extra) is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron.observe.line_file import write_whole
from rlhf_megatron.observe.report.catalogue import SECTIONS
from rlhf_megatron.observe.report.charts import Chart, Series, section_charts
from rlhf_megatron.observe.report.compare import compare_charts, compare_page, group_runs
from rlhf_megatron.observe.report.differences import as_html, differences, told
from rlhf_megatron.observe.report.facts import status
from rlhf_megatron.observe.report.files import RunFiles, read_run
from rlhf_megatron.observe.report.page import run_page
from rlhf_megatron.observe.report.payload import Mismatch, mismatch

PAGE = "index.html"


@dataclass(frozen=True)
class Written:
    page: Path
    pictures: tuple[str, ...] | None  # file names beside the page; None: matplotlib is not installed
    notes: tuple[str, ...]  # what was left out of the files of the runs
    states: tuple[str, ...]  # how each run ended
    is_final: bool = True  # no run goes on
    differences: tuple[str, ...] = ()  # of two runs, in words


def write_report(run_dirs: Sequence[Path], out: Path | None, reload_s: int | None = None) -> Written:
    """`out`: the directory, made where it is not there; None: report/ in the (first) run directory.

    `reload_s`: seconds after which a browser reads the page again, while a run goes on; None: never.

    Raises ValueError for a directory that is no run, or an `out` that cannot be written.
    """
    runs = [read_run(path) for path in run_dirs]
    is_single = len(runs) == 1
    found = [status(run) for run in runs]
    is_final = not any(each.word == "running" for each in found)
    reload_s = None if is_final else reload_s
    out = out or run_dirs[0] / ("report" if is_single else "report-compare")
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = draw_pictures(out, runs)
        two = differences(*runs) if len(runs) == 2 else None
        what_differs = "" if two is None else as_html(two, [run.path.resolve().name for run in runs])
        html = run_page(runs[0], names, reload_s) if is_single else compare_page(runs, names, reload_s, what_differs)
        write_whole(out / PAGE, html.encode())
    except OSError as error:
        raise ValueError(f"cannot write the report to {out}: {error.strerror}; choose a directory by --out.") from error
    notes = [note if is_single else f"{run.path}: {note}" for run in runs for note in run.notes]
    states = tuple(f"{run.path.resolve().name}: {each.text}" for run, each in zip(runs, found))
    return Written(out / PAGE, names, tuple(notes), states, is_final, () if two is None else tuple(told(two)))


PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#6b7280")  # as in report.css
COLUMNS, WIDTH, HEIGHT, DPI = 2, 5.6, 3.0, 110  # of a panel: inches
MAX_PANELS = 4
MAX_LABEL = 60  # characters
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 0.65, 0.2, 0.65, 0.55, 0.95  # margins: inches. A solver for them takes seconds
INK, GRID = "#1b212b", "#e3e6ea"
STYLE: Any = {"font.size": 9, "axes.edgecolor": "#b8bfc8", "axes.labelcolor": INK, "text.color": INK}
Draw = Callable[[Any], None]  # into a panel of matplotlib


def draw_pictures(out: Path, runs: Sequence[RunFiles]) -> tuple[str, ...] | None:
    """The file names: a picture of up to MAX_PANELS charts for each section. None without matplotlib."""
    try:
        from matplotlib import rc_context
    except ImportError:
        return None
    groups, names = group_runs(runs), []
    for section in SECTIONS:
        title, charts = section.title, compare_charts(groups, section.name) if len(runs) > 1 else []
        draws: list[Draw] = []
        if len(runs) == 1:
            title = f"{runs[0].path.resolve().name}: {title}"
            found = mismatch(runs[0].mismatch) if section.name == "mismatch" else None
            draws = [partial(_draw_histogram, found=found)] if found is not None else []
            charts = section_charts(runs[0], section.name) if section.name != "mismatch" else []
        draws += [partial(_draw, chart=chart) for chart in charts[:MAX_PANELS]]
        if draws:
            with rc_context(STYLE):
                _save(out / f"{section.name}.png", title, draws)
            names.append(f"{section.name}.png")
    return tuple(names)


def _save(path: Path, title: str, draws: Sequence[Draw]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(COLUMNS, len(draws))
    rows = -(-len(draws) // columns)
    width, height = WIDTH * columns, HEIGHT * rows + 0.4
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=LEFT / width,
        right=1 - RIGHT / width,
        top=1 - TOP / height,
        bottom=BOTTOM / height,
        wspace=BETWEEN * columns / (width - LEFT - RIGHT - BETWEEN * (columns - 1)),
        hspace=BETWEEN * rows / (height - TOP - BOTTOM - BETWEEN * (rows - 1)),
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, draw in zip(panels, draws):
        draw(panel)
        panel.grid(color=GRID, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(draws) :]:
        panel.set_visible(False)
    place = {"x": 0.12 / width, "y": 1 - 0.12 / height, "ha": "left", "va": "top"}
    figure.suptitle(plain(title), fontsize=11, fontweight="bold", **place)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=DPI)


def plain(text: str) -> str:
    """A text that matplotlib takes for neither a formula nor a hidden label."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in text[:MAX_LABEL]).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _draw(panel: Any, chart: Chart) -> None:
    colours = [PALETTE[(i if s.group is None else s.group) % len(PALETTE)] for i, s in enumerate(chart.series)]
    if chart.kind == "stack":
        sums = [sum(value or 0.0 for value in values) or 1.0 for values in zip(*(s.values for s in chart.series))]
        shares = [[(v or 0.0) / total for v, total in zip(s.values, sums, strict=True)] for s in chart.series]
        labels = [plain(s.label) for s in chart.series]
        panel.stackplot(chart.series[0].steps, *shares, labels=labels, colors=colours, alpha=0.85, linewidth=0)
        panel.set_ylim(0, 1)
    else:
        for series, colour in zip(chart.series, colours, strict=True):
            _line(panel, chart, series, colour)
    for value, label in chart.rules:
        panel.axhline(value, color="#56606e", linestyle="--", linewidth=1, label=plain(label))
    if chart.is_log:
        panel.set_yscale("log")
        panel.minorticks_off()
    elif chart.from_zero and chart.kind != "stack":
        has_negative = any(value is not None and value < 0 for series in chart.series for value in series.values)
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]) if has_negative else 0.0)
    panel.set_title(plain(chart.title), fontsize=9.5, loc="left", y=1.0)  # a given place: it is not searched for
    panel.set_xlabel(chart.axis)
    panel.set_ylabel("share" if chart.kind == "stack" else "no unit" if chart.unit == "1" else chart.unit)
    if len([s for s in chart.series if not s.is_faint]) > 1 or chart.rules:
        panel.legend(fontsize=7.5, frameon=chart.kind == "stack", framealpha=0.85)


def _line(panel: Any, chart: Chart, series: Series, colour: str) -> None:
    def known(values: Sequence[float | None]) -> list[float]:
        return [float("nan") if value is None else value for value in values]

    if series.low is not None and series.high is not None:
        panel.fill_between(series.steps, known(series.low), known(series.high), color=colour, alpha=0.2, linewidth=0)
    style = {"marker": "o", "markersize": 3} if chart.kind == "points" or len(series.values) < 3 else {}
    weight = {"alpha": 0.35, "linewidth": 0.8} if series.is_faint else {"linewidth": 1.2, "label": plain(series.label)}
    panel.plot(series.steps, known(series.values), color=colour, **style, **weight)


def _draw_histogram(panel: Any, found: Mismatch) -> None:
    """Over all steps, a curve for each finish reason."""
    edges = [found.edges[1] / (found.edges[2] / found.edges[1] if len(found.edges) > 2 else 10.0), *found.edges[1:]]
    for i, reason in enumerate(found.reasons):
        counts = [sum(c) for c in zip(*(cell.counts for cell in found.cells if cell.reason == i), strict=True)]
        colour, label = PALETTE[i % len(PALETTE)], plain(f"ended by {reason or '?'}")
        panel.stairs(counts, edges, color=colour, label=label, linewidth=1.3)
    panel.set(xscale="log", yscale="log", ylabel="tokens")
    panel.minorticks_off()
    panel.set_xlabel("|log-prob of trainer − of engine|, nats (the first bin begins at 0)")
    panel.legend(fontsize=7.5, frameon=False)

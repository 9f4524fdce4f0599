"""Writes a report: one HTML page, and PNGs of the main charts beside it where matplotlib (the
`demo` extra) is.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.observe.line_file import write_file_atomically
from rlhf_megatron.controller.observe.report.chart_catalogue import REPORT_SECTIONS
from rlhf_megatron.controller.observe.report.charts import (
    ChartSeries,
    ReportChart,
    is_all_zero,
    make_section_charts,
)
from rlhf_megatron.controller.observe.report.comparison_page import (
    group_runs,
    make_comparison_charts,
    render_comparison_page,
)
from rlhf_megatron.controller.observe.report.page_payload import (
    MismatchHistograms,
    make_mismatch_histograms,
)
from rlhf_megatron.controller.observe.report.run_differences import (
    compare_runs,
    format_difference_lines,
    render_differences_html,
)
from rlhf_megatron.controller.observe.report.run_files import RunFiles, read_run_files
from rlhf_megatron.controller.observe.report.run_overview import determine_run_status
from rlhf_megatron.controller.observe.report.run_page import render_run_page
from rlhf_megatron.write_errors import explain_write_errors

PAGE_FILE = "index.html"

PALETTE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a5195",
    "#6b7280",
)  # as in report.css
# of a panel: inches
MAX_PANEL_COLUMNS = 2
PANEL_WIDTH_INCHES = 5.6
PANEL_HEIGHT_INCHES = 3.0
DPI = 110
MAX_PANELS = 4
MAX_LABEL_CHARACTERS = 60  # characters
MAX_CHARACTERS_NAMED = 10  # characters without a glyph that a note names
# margins: inches. A solver for them takes seconds
LEFT_MARGIN_INCHES = 0.65
RIGHT_MARGIN_INCHES = 0.2
TOP_MARGIN_INCHES = 0.65
BOTTOM_MARGIN_INCHES = 0.55
PANEL_GAP_INCHES = 0.95
TEXT_COLOUR = "#1b212b"
GRID_COLOUR = "#e3e6ea"
MATPLOTLIB_STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": "#b8bfc8",
    "axes.labelcolor": TEXT_COLOUR,
    "text.color": TEXT_COLOUR,
}


@dataclass(frozen=True)
class WrittenReport:
    page_path: Path
    # file names beside the page; None: matplotlib is not installed
    picture_names: tuple[str, ...] | None
    notes: tuple[str, ...]  # what was left out of the files of the runs
    run_states: tuple[str, ...]  # how each run ended
    is_final: bool = True  # no run goes on
    difference_lines: tuple[str, ...] = ()  # of two runs, in words


def write_report(
    run_dirs: Sequence[Path], out_dir: Path | None, reload_s: int | None = None
) -> WrittenReport:
    """Write the report of one run, or the comparison of several, and return what was written.
    `out_dir` is created where it does not exist; None: report/ or report-compare/ in the (first)
    run directory.

    `reload_s`: seconds after which a browser loads the page again, while a run goes on; None:
    never.

    Raise ValueError for a directory that is no run, or an `out_dir` that cannot be written.
    """
    runs = [read_run_files(path) for path in run_dirs]
    is_single = len(runs) == 1
    found = [determine_run_status(run) for run in runs]
    is_final = not any(each.state == "running" for each in found)
    reload_s = None if is_final else reload_s
    out_dir = out_dir or run_dirs[0] / ("report" if is_single else "report-compare")
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with collect_drawing_notes() as drawing_notes:
            names = draw_section_pictures(out_dir, runs)
        differences = compare_runs(runs[0], runs[1]) if len(runs) == 2 else None
        differences_html = (
            ""
            if differences is None
            else render_differences_html(differences, [run.run_dir.resolve().name for run in runs])
        )
        html = (
            render_run_page(runs[0], names, reload_s)
            if is_single
            else render_comparison_page(runs, names, reload_s, differences_html)
        )
        write_file_atomically(out_dir / PAGE_FILE, html.encode())
    except OSError as error:
        raise ValueError(
            f"cannot write the report to {out_dir}: {error.strerror} Choose a directory by --out."
        ) from error
    notes = [note if is_single else f"{run.run_dir}: {note}" for run in runs for note in run.notes]
    notes += drawing_notes
    states = tuple(f"{run.run_dir.resolve().name}: {each.text}" for run, each in zip(runs, found))
    return WrittenReport(
        out_dir / PAGE_FILE,
        names,
        tuple(notes),
        states,
        is_final,
        () if differences is None else tuple(format_difference_lines(differences)),
    )


_MISSING_GLYPH = re.compile(r"Glyph (\d+) .*missing from")  # a warning of matplotlib's


@contextmanager
def collect_drawing_notes() -> Iterator[list[str]]:
    """Yield a list that has, after the block, sentences in place of matplotlib's warnings: the
    characters that its font lacks, and anything else that it said.
    """
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    texts = dict.fromkeys(" ".join(str(warning.message).split()) for warning in caught)
    matches = {text: _MISSING_GLYPH.match(text) for text in texts}
    characters = [chr(int(match[1])) for match in matches.values() if match is not None]
    if characters:
        more = " ..." if len(characters) > MAX_CHARACTERS_NAMED else ""
        named = " ".join(characters[:MAX_CHARACTERS_NAMED])
        notes.append(
            f"the pictures have boxes for characters that matplotlib's font lacks ({named}{more});"
            " the page shows them"
        )
    notes += [f"matplotlib: {text}" for text, match in matches.items() if match is None]


DrawPanel = Callable[[Any], None]  # into a panel of matplotlib


def draw_section_pictures(out_dir: Path, runs: Sequence[RunFiles]) -> tuple[str, ...] | None:
    """Draw a picture with up to MAX_PANELS charts for each section into `out_dir`, and return the
    file names. Return None where matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError:
        return None
    groups = group_runs(runs)
    names = []
    for section in REPORT_SECTIONS:
        title = section.title
        charts = make_comparison_charts(groups, section.name) if len(runs) > 1 else []
        draws: list[DrawPanel] = []
        if len(runs) == 1:
            title = f"{runs[0].run_dir.resolve().name}: {title}"
            found = (
                make_mismatch_histograms(runs[0].mismatch_steps)
                if section.name == "mismatch"
                else None
            )
            draws = [partial(_draw_mismatch_histogram, mismatch=found)] if found is not None else []
            charts = (
                make_section_charts(runs[0], section.name) if section.name != "mismatch" else []
            )
        charts = [chart for chart in charts if chart.is_wide or not is_all_zero(chart)]
        draws += [partial(_draw_chart_panel, chart=chart) for chart in charts[:MAX_PANELS]]
        if draws:
            with rc_context(MATPLOTLIB_STYLE):
                _save_figure(out_dir / f"{section.name}.png", title, draws)
            names.append(f"{section.name}.png")
    return tuple(names)


def _save_figure(path: Path, title: str, draw_panels: Sequence[DrawPanel]) -> None:
    """Draw the panels into one figure and save it as an image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(MAX_PANEL_COLUMNS, len(draw_panels))
    rows = -(-len(draw_panels) // columns)
    width = PANEL_WIDTH_INCHES * columns
    height = PANEL_HEIGHT_INCHES * rows + 0.4
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=LEFT_MARGIN_INCHES / width,
        right=1 - RIGHT_MARGIN_INCHES / width,
        top=1 - TOP_MARGIN_INCHES / height,
        bottom=BOTTOM_MARGIN_INCHES / height,
        wspace=PANEL_GAP_INCHES
        * columns
        / (width - LEFT_MARGIN_INCHES - RIGHT_MARGIN_INCHES - PANEL_GAP_INCHES * (columns - 1)),
        hspace=PANEL_GAP_INCHES
        * rows
        / (height - TOP_MARGIN_INCHES - BOTTOM_MARGIN_INCHES - PANEL_GAP_INCHES * (rows - 1)),
    )
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, draw in zip(panels, draw_panels):
        draw(panel)
        panel.grid(color=GRID_COLOUR, linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(draw_panels) :]:
        panel.set_visible(False)
    place = {"x": 0.12 / width, "y": 1 - 0.12 / height, "ha": "left", "va": "top"}
    figure.suptitle(escape_matplotlib_text(title), fontsize=11, fontweight="bold", **place)
    with explain_write_errors(path):
        figure.savefig(path, dpi=DPI)


def escape_matplotlib_text(text: str) -> str:
    """Return a text that matplotlib takes neither for a formula nor for a hidden label, cut to
    MAX_LABEL_CHARACTERS.
    """
    text = "".join(c if c.isprintable() else "\ufffd" for c in text[:MAX_LABEL_CHARACTERS]).replace(
        "$", r"\$"
    )
    return f" {text}" if text.startswith("_") else text


def _draw_chart_panel(panel: Any, chart: ReportChart) -> None:
    """Draw a chart into a panel of matplotlib."""
    colours = [
        PALETTE[(i if s.colour_index is None else s.colour_index) % len(PALETTE)]
        for i, s in enumerate(chart.series)
    ]
    if chart.kind == "stack":
        sums = [
            sum(value or 0.0 for value in values) or 1.0
            for values in zip(*(s.values for s in chart.series))
        ]
        shares = [
            [(v or 0.0) / total for v, total in zip(s.values, sums, strict=True)]
            for s in chart.series
        ]
        labels = [escape_matplotlib_text(s.label) for s in chart.series]
        panel.stackplot(
            chart.series[0].steps, shares, labels=labels, colors=colours, alpha=0.85, linewidth=0
        )
        panel.set_ylim(0, 1)
    else:
        for series, colour in zip(chart.series, colours, strict=True):
            _draw_series(panel, chart, series, colour)
    for value, label in chart.horizontal_lines:
        panel.axhline(
            value, color="#56606e", linestyle="--", linewidth=1, label=escape_matplotlib_text(label)
        )
    values = [value for series in chart.series for value in series.values if value is not None]
    if chart.is_log and max(values, default=0.0) > 0:
        panel.set_yscale("log")
        panel.minorticks_off()
    elif chart.is_from_zero and chart.kind != "stack":
        has_negative = min(values, default=0.0) < 0
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]) if has_negative else 0.0)
    # a given place: it is not searched for
    panel.set_title(escape_matplotlib_text(chart.title), fontsize=9.5, loc="left", y=1.0)
    panel.set_xlabel(chart.axis_label)
    if chart.kind == "stack":
        y_label = "share"
    elif chart.unit == "1":
        y_label = "no unit"
    else:
        y_label = chart.unit
    panel.set_ylabel(y_label)
    if len([s for s in chart.series if not s.is_faint]) > 1 or chart.horizontal_lines:
        panel.legend(fontsize=7.5, frameon=chart.kind == "stack", framealpha=0.85)


def _draw_series(panel: Any, chart: ReportChart, series: ChartSeries, colour: str) -> None:
    """Draw a curve and its band into a panel."""

    def replace_none_by_nan(values: Sequence[float | None]) -> list[float]:
        """Return the values with NaN for None."""
        return [float("nan") if value is None else value for value in values]

    if series.low is not None and series.high is not None:
        panel.fill_between(
            series.steps,
            replace_none_by_nan(series.low),
            replace_none_by_nan(series.high),
            color=colour,
            alpha=0.2,
            linewidth=0,
        )
    style = (
        {"marker": "o", "markersize": 3} if chart.kind == "points" or len(series.values) < 3 else {}
    )
    weight = (
        {"alpha": 0.35, "linewidth": 0.8}
        if series.is_faint
        else {"linewidth": 1.2, "label": escape_matplotlib_text(series.label)}
    )
    panel.plot(series.steps, replace_none_by_nan(series.values), color=colour, **style, **weight)


def _draw_mismatch_histogram(panel: Any, mismatch: MismatchHistograms) -> None:
    """Draw the differences of all steps into a panel, a curve for each finish reason."""
    edges = [
        mismatch.edges[1]
        / (mismatch.edges[2] / mismatch.edges[1] if len(mismatch.edges) > 2 else 10.0),
        *mismatch.edges[1:],
    ]
    for i, reason in enumerate(mismatch.finish_reasons):
        counts = [
            sum(c)
            for c in zip(
                *(cell.counts for cell in mismatch.cells if cell.reason_index == i), strict=True
            )
        ]
        colour = PALETTE[i % len(PALETTE)]
        label = escape_matplotlib_text(f"ended by {reason or '?'}")
        panel.stairs(counts, edges, color=colour, label=label, linewidth=1.3)
    panel.set(xscale="log", yscale="log", ylabel="tokens")
    panel.minorticks_off()
    panel.set_xlabel("|log-prob of trainer − of engine|, nats (the first bin begins at 0)")
    panel.legend(fontsize=7.5, frameon=False)

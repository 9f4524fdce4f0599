"""The main charts as PNG files. matplotlib is in the `demo` extra; without it there are none."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlhf_megatron.observe.report.charts import Chart, Series
from rlhf_megatron.observe.report.payload import Mismatch

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#6b7280")  # as in report.css
COLUMNS, WIDTH, HEIGHT, DPI = 2, 5.6, 3.0, 110  # of a panel: inches
MAX_PANELS = 4
MAX_LABEL = 60  # characters
LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 0.65, 0.2, 0.65, 0.55, 0.95  # margins: inches. A solver for them takes seconds
INK, GRID = "#1b212b", "#e3e6ea"


class Figures:
    """Draws pictures into one directory. Raises ImportError without matplotlib."""

    def __init__(self, directory: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        self.directory = directory
        self.names: list[str] = []

    def charts(self, name: str, title: str, charts: Sequence[Chart]) -> None:
        """A picture of up to MAX_PANELS charts; nothing where there are none."""
        charts = charts[:MAX_PANELS]
        if not charts:
            return
        with _style():
            columns = min(COLUMNS, len(charts))
            rows = -(-len(charts) // columns)
            figure, panels = _panels(rows, columns)
            for panel, chart in zip(panels, charts):
                _draw(panel, chart)
            for panel in panels[len(charts) :]:
                panel.set_visible(False)
            self._save(figure, name, title)

    def mismatch(self, name: str, title: str, found: Mismatch) -> None:
        """The histogram over all steps, a curve for each finish reason."""
        with _style():
            figure, panels = _panels(1, 1)
            _draw_histogram(panels[0], found)
            self._save(figure, name, title)

    def _save(self, figure: Any, name: str, title: str) -> None:
        figure.suptitle(
            plain(title),
            fontsize=11,
            fontweight="bold",
            x=0.12 / figure.get_figwidth(),
            y=1 - 0.12 / figure.get_figheight(),
            ha="left",
            va="top",
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(self.directory / f"{name}.png", dpi=DPI)
        self.names.append(f"{name}.png")


def plain(text: str) -> str:
    """A text that matplotlib takes for neither a formula nor a hidden label."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in text[:MAX_LABEL]).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _style() -> AbstractContextManager[None]:
    from matplotlib import rc_context

    return rc_context({"font.size": 9, "axes.edgecolor": "#b8bfc8", "axes.labelcolor": INK, "text.color": INK})


def _panels(rows: int, columns: int) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = WIDTH * columns, HEIGHT * rows + 0.4
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    panel_width = (width - LEFT - RIGHT - BETWEEN * (columns - 1)) / columns
    panel_height = (height - TOP - BOTTOM - BETWEEN * (rows - 1)) / rows
    figure.subplots_adjust(
        left=LEFT / width,
        right=1 - RIGHT / width,
        top=1 - TOP / height,
        bottom=BOTTOM / height,
        wspace=BETWEEN / panel_width,
        hspace=BETWEEN / panel_height,
    )
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _draw(panel: Any, chart: Chart) -> None:
    if chart.kind == "stack":
        _stack(panel, chart)
    else:
        for i, series in enumerate(chart.series):
            _line(panel, chart, series, PALETTE[(i if series.group is None else series.group) % len(PALETTE)])
    for value, label in chart.rules:
        panel.axhline(value, color="#56606e", linestyle="--", linewidth=1, label=plain(label))
    if chart.is_log:
        panel.set_yscale("log")
        panel.minorticks_off()
    elif chart.from_zero:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]) if _has_negative(chart) else 0.0)
    panel.set_title(plain(chart.title), fontsize=9.5, loc="left", y=1.0)  # a given place: it is not searched for
    panel.set_xlabel(chart.axis)
    panel.set_ylabel("share" if chart.kind == "stack" else "" if chart.unit == "1" else chart.unit)
    panel.grid(color=GRID, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    if len([s for s in chart.series if not s.is_faint]) > 1 or chart.rules:
        panel.legend(fontsize=7.5, frameon=chart.kind == "stack", framealpha=0.85)


def _has_negative(chart: Chart) -> bool:
    return any(value is not None and value < 0 for series in chart.series for value in series.values)


def _line(panel: Any, chart: Chart, series: Series, colour: str) -> None:
    values = [float("nan") if value is None else value for value in series.values]
    if series.low is not None and series.high is not None:
        low = [float("nan") if value is None else value for value in series.low]
        high = [float("nan") if value is None else value for value in series.high]
        panel.fill_between(series.steps, low, high, color=colour, alpha=0.2, linewidth=0)
    style = {"marker": "o", "markersize": 3} if chart.kind == "points" or len(values) < 3 else {}
    weight = {"alpha": 0.35, "linewidth": 0.8} if series.is_faint else {"linewidth": 1.2, "label": plain(series.label)}
    panel.plot(series.steps, values, color=colour, **style, **weight)


def _stack(panel: Any, chart: Chart) -> None:
    colours = [PALETTE[(i if s.group is None else s.group) % len(PALETTE)] for i, s in enumerate(chart.series)]
    sums = [sum(value or 0.0 for value in values) or 1.0 for values in zip(*(s.values for s in chart.series))]
    shares = [[(v or 0.0) / total for v, total in zip(s.values, sums, strict=True)] for s in chart.series]
    steps, labels = chart.series[0].steps, [plain(s.label) for s in chart.series]
    panel.stackplot(steps, *shares, labels=labels, colors=colours, alpha=0.85, linewidth=0)
    panel.set_ylim(0, 1)


def _draw_histogram(panel: Any, found: Mismatch) -> None:
    edges = [found.edges[1] / (found.edges[2] / found.edges[1] if len(found.edges) > 2 else 10.0), *found.edges[1:]]
    for i, reason in enumerate(found.reasons):
        cells = [cell.counts for cell in found.cells if cell.reason == i]
        counts = [sum(values) for values in zip(*cells, strict=True)]
        panel.stairs(
            counts, edges, color=PALETTE[i % len(PALETTE)], label=plain(f"ended by {reason or '?'}"), linewidth=1.3
        )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.minorticks_off()
    panel.set_xlabel("|log-prob of trainer − of engine|, nats (the first bin begins at 0)")
    panel.set_ylabel("tokens")
    panel.grid(color=GRID, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(fontsize=7.5, frameon=False)

"""Writes a report: one HTML page, and PNGs beside it where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.observe.report.catalogue import SECTIONS
from rlhf_megatron.observe.report.charts import section_charts
from rlhf_megatron.observe.report.compare import compare_charts, compare_page, group_runs
from rlhf_megatron.observe.report.figures import Figures
from rlhf_megatron.observe.report.files import read_run
from rlhf_megatron.observe.report.page import run_page
from rlhf_megatron.observe.report.payload import mismatch
from rlhf_megatron.observe.report.records import RunFiles

PAGE = "index.html"


@dataclass(frozen=True)
class Written:
    page: Path
    pictures: tuple[str, ...] | None  # file names beside the page; None: matplotlib is not installed
    notes: tuple[str, ...]  # what was left out of the files of the runs


def write_report(run_dirs: Sequence[Path], out: Path | None) -> Written:
    """`out`: the directory, made where it is not there; None: report/ in the (first) run directory.

    Raises ValueError for a directory that is no run, or an `out` that cannot be written.
    """
    runs = [read_run(path) for path in run_dirs]
    is_single = len(runs) == 1
    out = out or run_dirs[0] / ("report" if is_single else "report-compare")
    try:
        out.mkdir(parents=True, exist_ok=True)
        figures = _figures(out)
        if figures is not None:
            _draw_run(figures, runs[0]) if is_single else _draw_compare(figures, runs)
        names = tuple(figures.names) if figures is not None else None
        html = run_page(runs[0], names) if is_single else compare_page(runs, names)
        aside = out / f"{PAGE}.tmp"
        aside.write_text(html, encoding="utf-8")
        aside.replace(out / PAGE)
    except OSError as error:
        raise ValueError(f"cannot write the report to {out}: {error.strerror}; choose a directory by --out.") from error
    notes = [note if is_single else f"{run.path}: {note}" for run in runs for note in run.notes]
    return Written(out / PAGE, names, tuple(notes))


def _figures(out: Path) -> Figures | None:
    try:
        return Figures(out)
    except ImportError:
        return None


def _draw_run(figures: Figures, run: RunFiles) -> None:
    name = run.path.resolve().name
    for section in SECTIONS:
        if section.name != "mismatch":
            figures.charts(section.name, f"{name}: {section.title}", section_charts(run, section.name))
    found = mismatch(run.mismatch)
    if found is not None:
        figures.mismatch("mismatch", f"{name}: engine against trainer, all steps", found)


def _draw_compare(figures: Figures, runs: Sequence[RunFiles]) -> None:
    groups = group_runs(runs)
    for section in SECTIONS:
        figures.charts(section.name, section.title, compare_charts(groups, section.name))

"""`rlhf-megatron report RUN_DIR ...`: one HTML page about a run, or a comparison. `status` says where runs are."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser

from rlhf_megatron import api


def report(args: argparse.Namespace) -> None:
    """Write the report, say where it is and open it. Raises ValueError if there is nothing to report."""
    written = api.report(args.run_dirs, args.out)
    print(*written.states, sep="\n")
    for note in written.notes:
        print(f"note: {note}")
    if written.pictures is None:
        print("no pictures: install matplotlib (pip install '.[demo]')")
    else:
        print(f"pictures: {', '.join(written.pictures)}")
    print(f"report: {written.page}")
    if args.open == "yes" or (args.open == "auto" and _has_screen()):
        webbrowser.open(written.page.resolve().as_uri())


def status(args: argparse.Namespace) -> None:
    """Print a few lines a run: its end or where it is, and when it will be done. Reads its files only."""
    from rlhf_megatron.observe.report.facts import progress_lines
    from rlhf_megatron.observe.report.files import read_run

    for run_dir in args.run_dirs:
        print(f"{run_dir}: " + "\n  ".join(progress_lines(read_run(run_dir))))


def _has_screen() -> bool:
    has_display = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    return has_display and sys.stdout.isatty()

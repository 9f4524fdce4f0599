"""`rlhf-megatron report RUN_DIR ...`: one HTML page about a run, or a comparison. `status` says where runs are."""

from __future__ import annotations

import argparse
import os
import sys
import time
import webbrowser
from contextlib import suppress

from rlhf_megatron import api
from rlhf_megatron.observe.report.build import Written


def report(args: argparse.Namespace) -> None:
    """Write the report, say where it is and open it; with --watch again and again while a run goes on.

    Raises ValueError if there is nothing to report.
    """
    written = api.report(args.run_dirs, args.out, args.watch)
    _tell(args, written)
    if args.watch is not None and not written.is_final:
        print(f"written again every {args.watch} s until the run ends; Ctrl-C leaves it as it is", flush=True)
        with suppress(KeyboardInterrupt):
            while not written.is_final:
                time.sleep(args.watch)
                written = api.report(args.run_dirs, args.out, args.watch)
            print(*written.states, sep="\n")


def _tell(args: argparse.Namespace, written: Written) -> None:
    print(*written.states, *written.differences, sep="\n")
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

"""`rlhf-megatron report RUN_DIR ...`: one HTML page about a run, or a comparison.
`status` says how far runs are.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import webbrowser
from contextlib import suppress

from rlhf_megatron import api
from rlhf_megatron.controller.observe.report.report_writer import WrittenReport
from rlhf_megatron.install_hints import format_install_command


def run_report_command(args: argparse.Namespace) -> None:
    """Write the report of the runs, print where it is, and open it if --open says so; with --watch
    write it again until the runs end or Ctrl-C. Raise ValueError if there is nothing to report.
    """
    written = api.report(args.run_dirs, args.out, args.watch)
    _print_written_report(args, written)
    if args.watch is not None and not written.is_final:
        print(
            f"written again every {args.watch} s until the run ends; Ctrl-C leaves it as it is",
            flush=True,
        )
        with suppress(KeyboardInterrupt):
            while not written.is_final:
                time.sleep(args.watch)
                written = api.report(args.run_dirs, args.out, args.watch)
            print(*written.run_states, sep="\n")


def _print_written_report(args: argparse.Namespace, written_report: WrittenReport) -> None:
    """Print the state of the runs, notes and the report's path, and open the page in a browser if
    --open and the machine allow.
    """
    print(*written_report.run_states, *written_report.difference_lines, sep="\n")
    for note in written_report.notes:
        print(f"note: {note}")
    if written_report.picture_names is None:
        print(f"no pictures: install matplotlib ({format_install_command('demo')})")
    else:
        print(f"pictures: {', '.join(written_report.picture_names)}")
    print(f"report: {written_report.page_path}")
    if args.open == "yes" or (args.open == "auto" and _has_screen()):
        webbrowser.open(written_report.page_path.resolve().as_uri())


def run_status_command(args: argparse.Namespace) -> None:
    """Print a few lines for each run: its end, or its present step and when it will be done. Only
    the run's files are read.
    """
    from rlhf_megatron.controller.observe.report.run_files import read_run_files
    from rlhf_megatron.controller.observe.report.run_overview import format_progress_lines

    for run_dir in args.run_dirs:
        print(f"{run_dir}: " + "\n  ".join(format_progress_lines(read_run_files(run_dir))))


def _has_screen() -> bool:
    """Return whether this is a terminal on a machine with a graphical display."""
    has_display = sys.platform in ("darwin", "win32") or bool(
        {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    )
    return has_display and sys.stdout.isatty()

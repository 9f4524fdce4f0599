"""`rlhf-megatron report RUN_DIR ...`: writes one HTML page and pictures about a run, or compares several."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from rlhf_megatron import api


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Run directories, where the report goes, and whether a browser opens it."""
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="directory of a run; several are compared"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the report goes (RUN_DIR/report)")
    parser.add_argument(
        "--open",
        choices=("auto", "yes", "no"),
        default="auto",
        help="open the page in a browser; auto: from a terminal on a machine with a screen (%(default)s)",
    )


def report(args: argparse.Namespace) -> None:
    """Write the report, say where it is and open it. Raises ValueError if there is nothing to report."""
    written = api.report(args.run_dirs, args.out)
    for note in written.notes:
        print(f"note: {note}")
    if written.pictures is None:
        print("no pictures: install matplotlib (pip install '.[demo]')")
    else:
        print(f"pictures: {', '.join(written.pictures)}")
    print(f"report: {written.page}")
    if args.open == "yes" or (args.open == "auto" and _has_screen()):
        webbrowser.open(written.page.resolve().as_uri())


def _has_screen() -> bool:
    has_display = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    return has_display and sys.stdout.isatty()

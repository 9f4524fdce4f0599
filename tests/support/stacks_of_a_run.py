"""The program with a profile hook: python tests/support/stacks_of_a_run.py train CONFIG ...

Writes to the file that STACKS names, as JSON: for each function in `WATCHED`, the longest way from
the loop to it as "file function" of every call in the package, in order. Calls in other
libraries are left out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import rlhf_megatron
from rlhf_megatron.cli.main import main

PACKAGE = f"{Path(rlhf_megatron.__file__).parent}{os.sep}"
LOOP = ("controller/scheduler/loop.py", "run_training_loop")
WATCHED = {
    "clip formula": ("algorithms/losses/ppo_clip.py", "ppo_clip"),
    "bytes of a bucket": ("ranks/resharding/weight_sender.py", "fill_bucket_buffer"),
}


def place(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name


def way_to(frame: FrameType) -> list[str] | None:
    """The package's calls after the loop; None where the loop did not call."""
    calls: list[str] = []
    at: FrameType | None = frame
    while at is not None and place(at) != LOOP:
        if at.f_code.co_filename.startswith(PACKAGE):
            calls.append(" ".join(place(at)))
        at = at.f_back
    return calls[::-1] if at is not None else None


def watch(found: dict[str, list[str]]) -> Any:
    names = {function: what for what, (_, function) in WATCHED.items()}

    def on_event(frame: FrameType, event: str, _: object) -> None:
        what = names.get(frame.f_code.co_name) if event == "call" else None
        if (
            what is not None
            and place(frame) == WATCHED[what]
            and (way := way_to(frame)) is not None
        ):
            found[what] = max(found.get(what, []), way, key=len)

    return on_event


if __name__ == "__main__":
    ways: dict[str, list[str]] = {}
    sys.setprofile(watch(ways))
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        sys.setprofile(None)
        Path(os.environ["STACKS"]).write_text(json.dumps(ways))

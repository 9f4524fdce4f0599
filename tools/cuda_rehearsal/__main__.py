"""Runs a command on device cuda without a GPU, with the interpreter that has torch's CUDA build.

.venv-cuda/bin/python -m tools.cuda_rehearsal --devices 2 -- .venv-cuda/bin/python my_script.py
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tools.cuda_rehearsal.build import build, missing_tools
from tools.cuda_rehearsal.environment import environment


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.cuda_rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("--no-numbers", action="store_true", help="kernels do nothing; CUDA's own checks are made")
    parser.add_argument("--devices", type=int, default=1, help="that the command sees (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path(sys.prefix) / "null_cuda", help="what is compiled")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    if why := missing_tools():
        parser.error(f"nothing can be compiled here: {why}.")
    os.execvpe(args.command[0], args.command, environment(build(args.cache), not args.no_numbers, args.devices))


if __name__ == "__main__":
    main(sys.argv[1:])

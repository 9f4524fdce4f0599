"""With the interpreter that has torch's CUDA build: whole runs on device cuda without a GPU, \
or one command.

.venv-cuda/bin/python -m tools.cuda_rehearsal                            # all runs, each
    against the CPU
.venv-cuda/bin/python -m tools.cuda_rehearsal --cases "pp2,tp2 pp2"      # some of them
.venv-cuda/bin/python -m tools.cuda_rehearsal --on-gpus --jobs 4         # on the machine's own GPUs
.venv-cuda/bin/python -m tools.cuda_rehearsal --alone layouts            # one rank of each layout,
    without numbers
.venv-cuda/bin/python -m tools.cuda_rehearsal --devices 2 -- .venv-cuda/bin/python my_script.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tools.cuda_rehearsal.branches import TAKEN, device_branches, listed, not_seen, seen
from tools.cuda_rehearsal.build import build, missing_tools
from tools.cuda_rehearsal.cases import CASES, PROGRAMS, Case
from tools.cuda_rehearsal.environment import BRANCHES_ENV, REPOSITORY, environment
from tools.cuda_rehearsal.runs import rehearse

ALONE = ("layouts", "kernels", "memory", "launches", "names")


def alone(built: Path, part: str, words: list[str]) -> int:
    """Run a module of alone/. 1 where something failed."""
    command = [sys.executable, "-m", f"tools.cuda_rehearsal.alone.{part}", *words]
    env = environment(built, has_numbers=False, num_devices=1, is_alone=True)
    return min(1, subprocess.run(command, cwd=REPOSITORY, env=env).returncode)


def on_gpus(cases: list[Case]) -> list[Case]:
    """Those that have a GPU for each rank."""
    import torch

    return [case for case in cases if case.num_ranks <= torch.cuda.device_count()]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cuda_rehearsal", description=__doc__.splitlines()[0]
    )
    names = [one.name for one in (*CASES, *PROGRAMS)]
    parser.add_argument("--cases", help=f"comma-separated, of: {', '.join(names)}; all")
    parser.add_argument("--steps", type=int, default=2, help="of each run (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "runs/cuda_rehearsal", help="of runs (%(default)s)"
    )
    parser.add_argument(
        "--on-gpus",
        action="store_true",
        help="of this machine: cases of as many ranks as it has GPUs",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the runs' outcomes")
    parser.add_argument(
        "--alone", choices=ALONE, help="one process for a rank of any world; the rest: parts of it"
    )
    parser.add_argument(
        "--no-numbers", action="store_true", help="kernels do nothing; CUDA's own checks are made"
    )
    parser.add_argument(
        "--devices", type=int, default=1, help="that the command sees (%(default)s)"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path(sys.prefix) / "null_cuda", help="what is compiled"
    )
    parser.add_argument("command", nargs="*", help="in place of the runs")
    args = parser.parse_args(argv)
    built = None
    if not args.on_gpus:
        if why := missing_tools():
            parser.error(f"nothing can be compiled here: {why}.")
        built = build(args.cache)
        if args.alone:
            return alone(built, args.alone, args.command)
        if args.command:
            os.execvpe(
                args.command[0], args.command, environment(built, not args.no_numbers, args.devices)
            )
    elif args.alone or args.command:
        parser.error("--on-gpus runs cases only; leave out --alone and the command.")
    wanted = [name.strip() for name in args.cases.split(",")] if args.cases else names
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"unknown cases {unknown}; there are {names}")
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ[BRANCHES_ENV] = str(path := listed(args.out))
    cases = [case for case in CASES if case.name in wanted]
    programs = [program for program in PROGRAMS if program.name in wanted]
    chosen = on_gpus(cases) if built is None else [*cases, *programs]
    outcomes = rehearse(chosen, args.out, built, args.steps, args.jobs)
    num_failed = sum(bool(outcome.problems) for outcome in outcomes)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    if built is not None and len(wanted) == len(names):
        num_failed += sum(alone(built, part, []) for part in ("layouts", "kernels", "names"))
        TAKEN.write_text("".join(f"{name}\n" for name in sorted(seen(path) & device_branches())))
        if missing := not_seen(path):
            print("FAILED no process came to these on device cuda:", *missing, sep="\n       ")
            num_failed += 1
    print(f"{num_failed} failed" if num_failed else "all passed")
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`rlhf-megatron launch-scripts DIR`: writes the scripts that start runs on several machines, on
Slurm and on Ray, as a checkout has them in launch/.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rlhf_megatron.cli.init_command import find_shipped_dir


def run_launch_scripts_command(args: argparse.Namespace) -> None:
    """Copy the scripts into a directory, and print their names and how to start one. Raise
    ValueError where one of them is there already, which is never overwritten.
    """
    directory: Path = args.directory
    sources = sorted((find_shipped_dir() / "launch").iterdir())
    existing = [directory / path.name for path in sources if (directory / path.name).exists()]
    if existing:
        raise ValueError(
            f"{existing[0]} is there already and is not overwritten; name another folder, or"
            " remove it."
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path in sources:
        shutil.copyfile(path, directory / path.name)
        # A wheel may have been unpacked without the mode of its files.
        is_script = path.read_bytes().startswith(b"#!")
        (directory / path.name).chmod(0o755 if is_script else 0o644)
    print(f"{directory}: {', '.join(path.name for path in sources)}")
    print(f"next: {directory / 'torchrun.sh'} RUN.yaml, or {_format_slurm_start(directory)}")


def _format_slurm_start(directory: Path) -> str:
    """Return the command that submits a job with the scripts in this directory. Slurm runs a copy
    of slurm.sbatch, which looks for torchrun.sh in launch/ of the folder of submission unless
    LAUNCH names it.
    """
    start = f"sbatch --nodes=N {directory / 'slurm.sbatch'} RUN.yaml"
    is_default = directory.resolve() == Path("launch").resolve()
    return start if is_default else f"LAUNCH={directory.resolve() / 'torchrun.sh'} {start}"

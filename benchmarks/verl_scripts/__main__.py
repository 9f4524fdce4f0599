"""`config from-verl` on 160 of verl's own scripts, each against what table.csv says of it.

    python -m benchmarks.verl_scripts DIRECTORY [--write]

DIRECTORY has the files of verl's commit b178a3cd5 (2026-01-29), a "+" for each "/" of their paths.
A `converted` one must exit 0 and pass `config check --no-files`; a `refused` one must exit
otherwise and give the reason of its class. All get --train-rows, --response-length and a reward,
which no script says, and ENVIRONMENT; `arguments` are further settings, where a script reads what
only its user has. --write makes the table anew, with the outcomes as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import io
import os
import re
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from unittest.mock import patch

from rlhf_megatron.cli.main import main as command

TABLE = Path(__file__).with_name("table.csv")
ENVIRONMENT = {
    **dict.fromkeys(
        ("HOME", "PWD", "DATA_HOME", "HOME_DATA", "HDFS_ROOT", "DATA_ROOT", "RAY_DATA_HOME"),
        "/home/user",
    ),
    **dict.fromkeys(("SLURM_JOB_NUM_NODES", "ARNOLD_WORKER_NUM"), "2"),
    **dict.fromkeys(("ARNOLD_WORKER_GPU", "SLURM_GPUS_PER_NODE"), "8"),
}
TOLD = ["--train-rows", "7473", "--response-length", "300", "--set", "reward.name=math_verify"]
CLASSES = {  # the first that fits counts
    "other job": "it is a job of|it holds no setting of verl",
    "images": "it is a job with images",
    "experts": r"router_replay|by its name a model of (qwen2_moe|deepseek_v2|gpt_oss|glm)",
    "family": "by its name a model of",
    "reward model": "reward models are not supported",
    "tools": r"multi_turn\.\S+: not supported yet",
    "LoRA": r"lora\S*: not supported yet",
    "sandbox": r"sandbox_fusion\.url=\S+: not supported yet",
    "model": "the model is as in its config.json",
    "group of one": r"rollout\.n \(1\) must be at least 2",
    "broken script": "the command that starts verl ends before",
    "unknown value": "only the shell can tell .*; give",
}


@dataclass(frozen=True)
class Row:
    path: str
    sha256: str
    outcome: str  # converted | refused
    reason: str  # class of it, of a refused one
    arguments: str  # settings of verl, behind the file


def outcome_of(file: Path, arguments: str) -> tuple[str, str, str]:
    """(converted or refused, class of the reason, what was said)."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, ENVIRONMENT, clear=True):
        made = str(Path(folder) / "run.yaml")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = command(
                ["config", "from-verl", str(file), *arguments.split(), *TOLD, "--out", made]
            )
            code = code or command(["config", "check", "--no-files", made])
    if code == 0:
        return "converted", "", said.getvalue()
    fitting = (name for name, pattern in CLASSES.items() if re.search(pattern, said.getvalue()))
    return "refused", next(fitting, "not told"), said.getvalue()


def looked_at(directory: Path, row: Row) -> tuple[Row, str]:
    """The row as it is now, and what was said."""
    file = directory / row.path.replace("/", "+")
    outcome, reason, said = outcome_of(file, row.arguments)
    return Row(
        row.path, hashlib.sha256(file.read_bytes()).hexdigest()[:16], outcome, reason, row.arguments
    ), said


def read_table() -> list[Row]:
    with TABLE.open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--write", action="store_true", help="write the table with the outcomes as they are"
    )
    args = parser.parse_args()
    known = {row.path: row for row in (read_table() if TABLE.exists() else ())}
    paths = sorted(file.name.replace("+", "/") for file in args.directory.iterdir())
    found = []
    wrong = sorted(set(known) ^ set(paths)) if not args.write else []
    for path in paths:
        row = known.get(path, Row(path, "", "", "", ""))
        now, said = looked_at(args.directory, row)
        found.append(now)
        if now != row and not args.write:
            wrong.append(path)
            print(
                f"{path}: {row.outcome} {row.reason} {row.sha256} -> {now.outcome} {now.reason}"
                f" {now.sha256}\n{said}"
            )
    if args.write:
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, [field.name for field in fields(Row)], lineterminator="\n"
            )
            writer.writeheader()
            writer.writerows(map(asdict, found))
    counts = Counter(row.reason or row.outcome for row in found)
    print(
        f"{len(found)} files:", ", ".join(f"{count} {name}" for name, count in counts.most_common())
    )
    print(f"{len(wrong)} are not as the table says." if wrong else "All as the table says.")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""`config from-verl` on 160 of verl's own scripts, each against what table.csv says of it.

    python -m benchmarks.verl_scripts DIRECTORY [--write]

DIRECTORY has the files of verl's commit b178a3cd5 (2026-01-29), a "+" for each "/" of their paths.
All get --train-rows, --response-length and a reward, which no script says, and ENVIRONMENT;
`arguments` are further settings, where a script reads what only its user has. The outcomes:

- accepted: the result passes `config check --no-files`;
- refused: the check refuses lines of `untranslated`, and passes once they are removed; `reason`
  has their features;
- problem: the result breaks another rule; `reason` has its class;
- unreadable: the file is not read as a configuration of verl.

--write makes the table anew, with the outcomes as they are.
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
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from unittest.mock import patch

import yaml

from rlhf_megatron.cli.main import main as run_command
from rlhf_megatron.config.unsupported_features import FEATURES_BY_NAME
from rlhf_megatron.config.untranslated_settings import UNTRANSLATED

TABLE = Path(__file__).with_name("table.csv")
ENVIRONMENT = {
    **dict.fromkeys(
        ("HOME", "PWD", "DATA_HOME", "HOME_DATA", "HDFS_ROOT", "DATA_ROOT", "RAY_DATA_HOME"),
        "/home/user",
    ),
    **dict.fromkeys(("SLURM_JOB_NUM_NODES", "ARNOLD_WORKER_NUM"), "2"),
    **dict.fromkeys(("ARNOLD_WORKER_GPU", "SLURM_GPUS_PER_NODE"), "8"),
}
FACTS = ["--train-rows", "7473", "--response-length", "300", "--set", "reward.name=math_verify"]
OUTCOMES = ("accepted", "refused", "problem", "unreadable")
CLASSES = {  # class of a problem -> its message; the first that fits counts
    "other job": "it is a job of|it holds no setting of verl",
    "no files": r"data\.train_files \(\[\]\) must name",
    "group of one": r"rollout\.n \(1\) must be at least 2",
    "broken script": "the command that starts verl ends before",
}


@dataclass(frozen=True)
class ScriptRow:
    """A line of the table: a script, its outcome, and the features or class of its reason."""

    path: str
    sha256: str
    outcome: str  # of OUTCOMES
    reason: str  # features that are refused, separated by spaces; else a key of CLASSES
    arguments: str  # settings of verl, behind the file


def translate_script(file: Path, arguments: str) -> tuple[str, str, str]:
    """Return (outcome, reason, output of the commands) of a script."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, ENVIRONMENT, clear=True):
        result = Path(folder) / "run.yaml"
        words = ["config", "from-verl", str(file), *arguments.split(), *FACTS, "--lenient"]
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = run_command([*words, "--out", str(result)])
            if result.exists():
                features = list_refused_features(result)
                is_refused = run_command(["config", "check", "--no-files", str(result)]) != 0
                remove_refused_lines(result)
                code = run_command(["config", "check", "--no-files", str(result)])
    said = output.getvalue()
    if code == 0 and not features:
        assert not is_refused, "nothing was removed that the check could refuse"
        return "accepted", "", said
    if code == 0:
        assert is_refused, f"config check accepts a file without {features}"
        return "refused", " ".join(features), said
    reason = next((name for name, text in CLASSES.items() if re.search(text, said)), "not known")
    return ("unreadable" if not is_read_as_config(said) else "problem"), reason, said


def is_read_as_config(said: str) -> bool:
    """Return whether `config from-verl` said how many settings it took over."""
    return "settings taken over" in said


def list_refused_features(result: Path) -> list[str]:
    """Return the features of the lines that every command refuses, in the order of the list."""
    lines = yaml.safe_load(result.read_text()).get(UNTRANSLATED) or {}
    features = {entry["feature"] for entry in lines.values()}
    return [name for name in FEATURES_BY_NAME if name in features]


def remove_refused_lines(result: Path) -> None:
    """Remove the lines below `untranslated`, as a user does."""
    head, section, tail = result.read_text().partition(f"\n{UNTRANSLATED}:\n")
    rest = re.sub(r"(?m)\A(  \S.*\n)+", "", tail)
    result.write_text(head + section + rest)


def measure_row(directory: Path, row: ScriptRow) -> tuple[ScriptRow, str]:
    """Return the row as it is now, and the output of the commands."""
    file = directory / row.path.replace("/", "+")
    outcome, reason, said = translate_script(file, row.arguments)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return ScriptRow(row.path, digest, outcome, reason, row.arguments), said


def read_table() -> list[ScriptRow]:
    """Return the rows of table.csv."""
    with TABLE.open(newline="") as file:
        return [ScriptRow(**row) for row in csv.DictReader(file)]


def write_table(rows: Iterable[ScriptRow]) -> None:
    """Write table.csv anew."""
    with TABLE.open("w", newline="") as file:
        names = [field.name for field in fields(ScriptRow)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def count_outcomes(rows: Iterable[ScriptRow]) -> dict[str, int]:
    """Return outcome -> number of scripts, in the order of OUTCOMES."""
    counts = Counter(row.outcome for row in rows)
    return {outcome: counts[outcome] for outcome in OUTCOMES}


def count_refused_features(rows: Iterable[ScriptRow]) -> dict[str, int]:
    """Return feature -> number of scripts that are refused for it, the most frequent first. A
    script with two features counts for both.
    """
    refused = [row for row in rows if row.outcome == "refused"]
    return dict(Counter(name for row in refused for name in row.reason.split()).most_common())


def main() -> int:
    """Compare all scripts of a directory with the table, or write the table; return the exit
    code.
    """
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
    rows = []
    wrong = sorted(set(known) ^ set(paths)) if not args.write else []
    for path in paths:
        row = known.get(path, ScriptRow(path, "", "", "", ""))
        now, said = measure_row(args.directory, row)
        rows.append(now)
        if now != row and not args.write:
            wrong.append(path)
            print(
                f"{path}: {row.outcome} {row.reason} {row.sha256} -> {now.outcome} {now.reason}"
                f" {now.sha256}\n{said}"
            )
    if args.write:
        write_table(rows)
    print(f"{len(rows)} files:", _format_counts(count_outcomes(rows)))
    print("refused for:", _format_counts(count_refused_features(rows)))
    others = Counter(row.reason for row in rows if row.outcome in ("problem", "unreadable"))
    print("the others:", _format_counts(others))
    print(f"{len(wrong)} are not as the table says." if wrong else "All as the table says.")
    return 1 if wrong else 0


def _format_counts(counts: dict[str, int]) -> str:
    """Return counts in words, such as "3 accepted, 1 refused"."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


if __name__ == "__main__":
    raise SystemExit(main())

"""Two finished run directories: what a resumed run must share with one that was left alone."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

NOT_COMPARED = ("timing_", "perf/", "memory/", "sync/seconds", "checkpoint/")
OF_ENGINE_FAULTS = (
    *(
        "rollout/engine_restarts",
        "rollout/engine_failures",
        "rollout/driver_restarts",
        "rollout/requests_reissued",
    ),
    *("sync/bytes_moved", "sync/bytes_needed"),  # to the engines that take part
)
STATE = (
    "kind",
    "step",
    "policy/version",
    "policy/lag",
    "rollout/num_samples",
    "actor/num_optimizer_steps",
    "actor/lr",
)
SAMPLE_STATE = ("step", "prompt", "policy_version")
MAX_SHOWN = 5
Row = dict[str, Any]


def rows_of(run_dir: Path) -> list[Row]:
    """Of metrics.jsonl, in order."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def samples_of(run_dir: Path) -> list[Row]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def weight_digests(run_dir: Path) -> dict[str, str]:
    """File -> sha256, of the weights that the run ended with."""
    files = sorted((run_dir / "hf").glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def bare(row: Row) -> Row:
    """Without the time of day."""
    ignored = (*NOT_COMPARED, *OF_ENGINE_FAULTS)
    return {
        key: value for key, value in row.items() if key != "seconds" and not key.startswith(ignored)
    }


def differences(undisturbed: Path, disturbed: Path, is_bitwise: bool) -> list[str]:
    """Empty when the two runs are the same. `is_bitwise` False: in state only, which a resumed
    run keeps always.
    """
    found = [*_repeated(disturbed), *_rows(undisturbed, disturbed, is_bitwise)]
    found += _samples(undisturbed, disturbed, is_bitwise)
    if is_bitwise:
        mine = weight_digests(disturbed)
        theirs = weight_digests(undisturbed)
        assert theirs, f"{undisturbed} has no final weights"
        names = sorted(
            name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
        )
        found += [f"final weights {name} differ" for name in names]
    return found[:MAX_SHOWN] + ([f"... {len(found)} in all"] if len(found) > MAX_SHOWN else [])


def _repeated(run_dir: Path) -> list[str]:
    counts = Counter((row["kind"], row["step"]) for row in rows_of(run_dir))
    return [
        f"{kind} {step} has {count} rows" for (kind, step), count in counts.items() if count > 1
    ]


def _rows(undisturbed: Path, disturbed: Path, is_bitwise: bool) -> Iterator[str]:
    for theirs, mine in zip_longest(rows_of(undisturbed), rows_of(disturbed)):
        if theirs is None or mine is None:
            row = theirs or mine
            yield f"{row['kind']} {row['step']} is {'missing' if mine is None else 'one too many'}"
            continue
        a = bare(theirs)
        b = bare(mine)
        keys = sorted(a.keys() | b.keys()) if is_bitwise else STATE
        for key in keys:
            if a.get(key) != b.get(key):
                yield (
                    f"{theirs['kind']} {theirs['step']} {key}: {a.get(key)!r} undisturbed,"
                    f" {b.get(key)!r} here"
                )


def _samples(undisturbed: Path, disturbed: Path, is_bitwise: bool) -> Iterator[str]:
    """All samples of all steps; by state, the prompts of each step and how often
    each was sampled.
    """
    theirs = samples_of(undisturbed)
    mine = samples_of(disturbed)
    if is_bitwise:
        if theirs != mine:
            where = next(i for i, (a, b) in enumerate(zip_longest(theirs, mine)) if a != b)
            yield (
                f"samples.jsonl differs from line {where + 1} of {len(theirs)} on ({len(mine)}"
                " lines here)"
            )
        return
    expected, found = (
        Counter(tuple(row[key] for key in SAMPLE_STATE) for row in rows) for rows in (theirs, mine)
    )
    for sample in sorted((expected - found).elements()):
        yield f"sample of {sample} is lost"
    for sample in sorted((found - expected).elements()):
        yield f"sample of {sample} is one too many"

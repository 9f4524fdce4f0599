"""Each weight transport from each trainer layout to stock SGLang, of a dense model and two of
experts, at its tp-size 1 and 2, ep-size 2 and with DP attention: what arrives, and what moves.

    OMP_NUM_THREADS=1 python -m benchmarks.sync_matrix

Runs TEST (real Megatron ranks, two real servers): after every sync the digests of what stands in
the engine are those of what was exported, bit for bit, and its log-probs are those of transformers
with the exported weights to 1e-4. Bytes moved are what the ranks of the engine read or were sent;
bytes needed, what stands in them afterwards. Writes benchmarks/results/sync_matrix.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import ROOT, write_result

TEST = "tests/engines/test_sync_matrix.py"
TIMEOUT_S = 7200
# environment variable: file that the tests add a line to for each sync
RESULTS = "RLHF_MEGATRON_SYNC_MATRIX"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "rows.jsonl")
        environment = {**os.environ, RESULTS: str(lines)}
        command = [sys.executable, "-m", "pytest", "-q", TEST]
        done = subprocess.run(command, cwd=ROOT, env=environment, timeout=TIMEOUT_S)
        rows = (
            [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        )
    if done.returncode or not rows:
        raise SystemExit(f"{TEST} ended with code {done.returncode} after {len(rows)} syncs.")
    for row in rows:
        print(
            f"{row['model']:>11}, {row['transport']:>13}, trainer {row['trainer']:>11}, engine"
            f" {row['engine']:>11}: moved {row['bytes_moved']}, needed {row['bytes_needed']}"
            f" bytes, log-probs differ by {row['log_prob_max_abs_diff']:.1e}"
        )
    worst = max(row["log_prob_max_abs_diff"] for row in rows)
    figures = {
        "dtype": "float32",
        "syncs": rows,
        "num_syncs": len(rows),
        "log_prob_max_abs_diff": worst,
    }
    print(write_result("sync_matrix", "python -m benchmarks.sync_matrix", figures))


if __name__ == "__main__":
    main()

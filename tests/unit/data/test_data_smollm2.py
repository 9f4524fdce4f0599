"""The program that writes the data of docs/smollm2.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from places import ROOT


def test_pairs_are_wrong_answers_beside_the_right_one(tmp_path: Path) -> None:
    program = [sys.executable, str(ROOT / "examples" / "smollm2" / "data.py")]
    subprocess.run([*program, "problems"], cwd=tmp_path, check=True, capture_output=True)
    folder = tmp_path / "runs" / "smollm2_data"
    train, val = (
        [json.loads(line) for line in (folder / f"{n}.jsonl").read_text().splitlines()]
        for n in ("train", "val")
    )
    assert len(train) == 309 and len(val) == 120
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}
    assert all(
        eval(row["prompt"].removesuffix("=")) == int(row["answer"]) for row in (*train, *val)
    )

    responses = [[train[0]["answer"], " 999 ", "999"], ["", train[1]["answer"]]]
    answers = [
        {"index": n, "prompt": "<in a template>", "responses": given}
        for n, given in enumerate(responses)
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    subprocess.run(
        [*program, "pairs", "answers.jsonl"], cwd=tmp_path, check=True, capture_output=True
    )
    written = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    assert written == [
        {"prompt": train[0]["prompt"], "chosen": train[0]["answer"], "rejected": "999"}
    ]

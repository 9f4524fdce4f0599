"""The data of docs/smollm2.md.

python examples/smollm2/data.py problems           # runs/smollm2_data/train.jsonl and val.jsonl
python examples/smollm2/data.py pairs ANSWERS      # runs/smollm2_data/pairs.jsonl, of a model's
                                                   own wrong answers
"""

import json
import random
import sys
from pathlib import Path

OUT = Path("runs/smollm2_data")
HELD_OUT = 120


def problems() -> None:
    """Sums and products of 0 to 12, and differences that are not negative."""
    numbers = range(13)
    texts = [(f"{a} + {b} =", a + b) for a in numbers for b in numbers]
    texts += [(f"{a} - {b} =", a - b) for a in numbers for b in numbers if a >= b]
    texts += [(f"{a} * {b} =", a * b) for a in numbers for b in numbers]
    rows = [{"prompt": text, "answer": str(value)} for text, value in texts]
    random.Random(1).shuffle(rows)
    write("val", rows[:HELD_OUT])
    write("train", rows[HELD_OUT:])


def pairs(answers: Path) -> None:
    """A pair for each wrong answer that a prompt was given:
    the right one is the better of the two.
    """
    asked = [json.loads(line) for line in (OUT / "train.jsonl").read_text().splitlines()]
    rows = []
    for line in answers.read_text().splitlines():
        given = json.loads(line)
        # what the file of answers has as "prompt" is in the chat template already
        row = asked[given["index"]]
        for wrong in sorted({text.strip() for text in given["responses"]} - {row["answer"], ""}):
            rows.append({"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong})
    random.Random(1).shuffle(rows)
    write("pairs", rows)


def write(name: str, rows: list[dict[str, str]]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{OUT / name}.jsonl: {len(rows)} rows")


if __name__ == "__main__":
    problems() if sys.argv[1] == "problems" else pairs(Path(sys.argv[2]))

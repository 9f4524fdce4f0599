"""What verl's own scorers say of their published examples and of adversarial answers, as a table for our tests.

    python -m benchmarks.verl_scores VERL      # the folder of a verl package, such as an unpacked wheel of it

Writes tests/support/verl_scores.jsonl: scorer, kind of the answer, response, label, verl's score from 0 to 1. Only the
files of verl/utils/reward_score are read; the test (tests/unit/rewards/test_rewards_verl.py) needs no verl.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.common import ROOT

OUT = ROOT / "tests" / "support" / "verl_scores.jsonl"
NUMBERS = ("72", "-3", "1,234", "0.5")
FORMS = ("1/2", r"\frac{1}{2}", r"x^2+1", "(1, 2)", r"2\sqrt{3}", "12")
NAMES = ("Paris", "The Beatles", "New York City", "1989")

OF_GSM8K = {  # kind -> the answer, with {0} for the label's number
    "published": "Natalia sold 48/2 = 24 clips in May.\n#### {0}",
    "no blank": "####{0}",
    "two blanks": "####  {0}",
    "full stop": "#### {0}.",
    "decimals": "#### {0}.0",
    "dollar": "#### ${0}",
    "percent": "#### {0}%",
    "unit": "#### {0} clips",
    "blank behind": "#### {0} ",
    "second one wrong": "#### {0}\n#### 5",
    "second one right": "#### 5\n#### {0}",
    "no mark": "The answer is {0}",
    "wrong": "#### 1{0}",
    "empty": "",
    "mark only": "#### ",
    "box": r"\boxed{{{0}}}",
    "sum": "#### {0} + 0",
    "both": "#### {0} or 5",
    "far from the end": "#### {0}" + "\n" + "x" * 400,
    "unicode digits": "#### ７２",
}
OF_MATH = {
    "published": r"The answer is \boxed{{{0}}}.",
    "fbox": r"\fbox{{{0}}}",
    "last one wrong": r"\boxed{{{0}}} and \boxed{{77}}",
    "last one right": r"\boxed{{77}} and \boxed{{{0}}}",
    "no box": "The answer is {0}",
    "dollars in the box": r"\boxed{{${0}$}}",
    "blanks": r"\boxed{{ {0} }}",
    "equation": r"\boxed{{y={0}}}",
    "text in the box": r"\boxed{{\text{{{0}}}}}",
    "open box": r"\boxed{{{0}",
    "empty box": r"\boxed{{}}",
    "wrong": r"\boxed{{{0}+1}}",
    "unit": r"\boxed{{{0}\text{{ cm}}}}",
    "tie of answers": r"\boxed{{{0}, 77}}",
}
OF_DAPO = {
    "published": "Answer: {0}",
    "dollars": "Answer: ${0}$",
    "lower case": "answer: {0}",
    "full stop": "Answer: {0}.",
    "last one wrong": "Answer: {0}\nAnswer: 77",
    "last one right": "Answer: 77\nAnswer: {0}",
    "wrong": "Answer: {0}+1",
    "nothing": "Answer:",
    "empty": "",
    "text behind": "Answer: {0} apples",
}
OF_SEARCH = {
    "published": "<think>…</think><answer>{0}</answer>",
    "case": "<answer>{0}</answer>",
    "article": "<answer>the {0}</answer>",
    "punctuation": "<answer>{0}!</answer>",
    "last one wrong": "<answer>{0}</answer><answer>Rome</answer>",
    "last one right": "<answer>Rome</answer><answer>{0}</answer>",
    "sentence": "<answer>It is {0}.</answer>",
    "no tag": "{0}",
    "open tag": "<answer>{0}",
    "empty tag": "<answer></answer>",
    "lines": "<answer>\n{0}\n</answer>",
    "wrong": "<answer>not {0}</answer>",
    "two names": "<answer>{0} or Rome</answer>",
    "eleven tags": "<answer>{0}</answer>" * 11,
}


def module(folder: Path, name: str) -> ModuleType:
    """One file of verl's, without its package."""
    spec = importlib.util.spec_from_file_location(f"verl_{name}", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def rows(verl: Path) -> Iterator[dict[str, Any]]:
    """All answers with verl's score; what verl raises is null."""
    folder = verl / "utils" / "reward_score"
    gsm8k, math, dapo, search = (
        module(folder, name) for name in ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em")
    )
    scorers: list[tuple[str, dict[str, str], tuple[str, ...], Callable[[str, str], float]]] = [
        ("gsm8k", OF_GSM8K, NUMBERS, lambda r, label: gsm8k.compute_score(r, label.replace(",", ""))),
        ("math", OF_MATH, FORMS, math.compute_score),
        ("math_dapo", OF_DAPO, NUMBERS, lambda r, label: (dapo.compute_score(r, label)["score"] + 1) / 2),
        ("search_r1", OF_SEARCH, NAMES, lambda r, label: search.compute_score(r, {"target": [label]})),
    ]
    for name, answers, labels, score in scorers:
        for kind, template in answers.items():
            for label in labels:
                written = label.lower() if kind == "case" else label
                response = template.format(written)
                try:
                    found: float | None = float(score(response, label))
                except Exception:  # of verl's parsers: a run there ends, or scores 0
                    found = None
                yield {"scorer": name, "kind": kind, "response": response, "label": label, "verl": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verl", type=Path, help="folder of the package verl")
    found = list(rows(parser.parse_args().verl))
    OUT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    print(f"{len(found)} rows in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

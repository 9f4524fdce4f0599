"""What verl's own scorers say of their published examples and of adversarial answers, as a table \
for our tests.

    python -m benchmarks.verl_scores VERL      # the folder of a verl package, such as an
                                               unpacked wheel of it

Writes tests/support/verl_scores.jsonl: scorer, kind of the answer, response, label, verl's score
from 0 to 1. Only the files of verl/utils/reward_score are read; the test
(tests/unit/rewards/test_rewards_verl.py) needs no verl.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import verl_programs
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
    "comma behind": "#### {0},",
    "minus": "#### -{0}",
    "two minuses": "#### --{0}",
    "plus": "#### +{0}",
    "bold": "#### **{0}**",
    "equation": "#### x = {0}",
    "over one": "#### {0}/1",
    "exponent": "#### {0}e0",
    "leading zero": "#### 0{0}",
    "two points": "#### {0}..",
    "blank in the number": "#### {0} 000",
    "five marks": "##### {0}",
    "three marks": "### {0}",
    "line behind the mark": "####\n{0}",
    "tab": "####\t{0}",
    "in a sentence": "so #### {0} is it",
    "wrong on the same line": "#### {0} #### 5",
    "about": "#### ≈{0}",
    "word": "#### seventy-two",
    "colon": "####: {0}",
    "brackets": "#### ({0})",
    "box behind the mark": "#### \\boxed{{{0}}}",
    "comma only": "#### ,",
    "points only": "#### ...",
    "minus only": "#### -",
    "a list of numbers": "#### 72 -3 1234 0.5",
    "a number joined to it": "#### {0},72,-3,1234,0.5",
    "unicode minus": "#### \u2212{0}",
    "blank that does not break": "####\u00a0{0}",
    "thousands": "#### {0},000",
    "mark before the last 300": "#### {0}" + "y" * 296,
    "text of the label in words": "#### the number is {0}",
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
    "box with a blank": r"\boxed {0}$",
    "box with a blank and braces": r"\boxed {{{0}}}",
    "no braces": r"\boxed{0}",
    "box in a box": r"\boxed{{\boxed{{{0}}}}}",
    "box without a backslash": "boxed{{{0}}}",
    "two backslashes": r"\\boxed{{{0}}}",
    "capital": r"\Boxed{{{0}}}",
    "brace behind": r"\boxed{{{0}}}}}",
    "line in the box": "\\boxed{{\n{0}\n}}",
    "thin blank": r"\boxed{{\!{0}\!}}",
    "left right": r"\boxed{{\left({0}\right)}}",
    "degrees": r"\boxed{{{0}^\circ}}",
    "percent": r"\boxed{{{0}\%}}",
    "dollar sign": r"\boxed{{\${0}}}",
    "two units": r"\boxed{{{0}\text{{ cm}}\text{{ m}}}}",
    "name of two letters": r"\boxed{{ab={0}}}",
    "name of three letters": r"\boxed{{abc={0}}}",
    "two equations": r"\boxed{{x=y={0}}}",
    "decimal of one half": r"\boxed{{0.5}}",
    "no leading zero": r"\boxed{{.5}}",
    "fraction without braces": r"\boxed{{\frac12}}",
    "fraction of which one has braces": r"\boxed{{\frac1{{2}}}}",
    "dfrac": r"\boxed{{\dfrac{{1}}{{2}}}}",
    "fraction without an end": r"\boxed{{\frac}}",
    "root without braces": r"\boxed{{2\sqrt3}}",
    "root without an end": r"\boxed{{\sqrt}}",
    "another order": r"\boxed{{1+x^2}}",
    "with a sign": r"\boxed{{+{0}}}",
    "full stop in the box": r"\boxed{{{0}.}}",
    "an unfinished box behind": r"\boxed{{{0}}} and \boxed{{7",
    "fbox behind": r"\boxed{{{0}}} \fbox{{77}}",
    "approximately": r"\boxed{{\approx {0}}}",
    "both": r"\boxed{{{0} \text{{ or }} 77}}",
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
    "box": r"\boxed{{{0}}}",
    "box behind Answer": r"Answer: \boxed{{{0}}}",
    "wrong answer, right box": r"Answer: 77 \boxed{{{0}}}",
    "right answer, wrong box": "Answer: {0}\n" + r"\boxed{{77}}",
    "wrong answer on a line, right box": "Answer: 77\n" + r"\boxed{{{0}}}",
    "unfinished box": r"\boxed{{{0}",
    "box far from the end": r"\boxed{{{0}}}" + "y" * 120,
    "answer far from the end": "Answer: {0}\n" + "y" * 300,
    "equation": "Answer: x = {0}",
    "two equations": "Answer: 77 = {0}",
    "not": "Answer: {0} != 77",
    "unit": "Answer: {0} units",
    "words that are left out": "Answer: an {0} points inches",
    "blanks in the number": "Answer: 7 2",
    "leading zero": "Answer: 0{0}",
    "decimals": "Answer: {0}.0",
    "comma": "Answer: {0},",
    "blank before the colon": "Answer : {0}",
    "capitals": "ANSWER: {0}",
    "line behind the colon": "Answer:\n\n{0}",
    "part of a word": "Nonanswer: {0}",
    "is": "The answer is {0}",
    "bold": "**Answer:** {0}",
    "bold number": "Answer: **{0}**",
    "brackets": "Answer: ({0})",
    "text": r"Answer: \text{{{0}}}",
    "textbf": r"Answer: \textbf{{{0}}}",
    "degrees": r"Answer: {0}^\circ",
    "dollar sign": r"Answer: \${0}",
    "two formulas": "Answer: ${0}$ or $77$",
    "quotes": 'Answer: "{0}"',
    "invalid": "Answer: [INVALID]",
    "minus": "Answer: -{0}",
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
    "tag in capitals": "<ANSWER>{0}</ANSWER>",
    "blank in the tag": "<answer >{0}</answer>",
    "two openings": "<answer><answer>{0}</answer>",
    "two closings": "<answer>{0}</answer></answer>",
    "wrong behind the opening": "<answer>Rome <answer>{0}</answer>",
    "tags the other way round": "</answer>{0}<answer>",
    "an empty one behind": "<answer>{0}</answer><answer></answer>",
    "an open one behind": "<answer>{0}</answer><answer>Rome",
    "articles only": "<answer>the a an</answer>",
    "punctuation only": "<answer>...!</answer>",
    "article inside": "<answer>{0} the</answer>",
    "article without a blank": "<answer>the{0}</answer>",
    "twice": "<answer>{0} {0}</answer>",
    "hyphens": "<answer>-{0}-</answer>",
    "apostrophe": "<answer>{0}'s</answer>",
    "quotes": '<answer>"{0}"</answer>',
    "curly quotes": "<answer>“{0}”</answer>",
    "brackets": "<answer>({0})</answer>",
    "comma and more": "<answer>{0}, France</answer>",
    "capitals": "<answer>PARIS</answer>",
    "accents": "<answer>Pàris</answer>",
    "full width": "<answer>Ｐａｒｉｓ</answer>",
    "tab and lines": "<answer>\t{0}\r\n</answer>",
    "in a tool's result": "<information><answer>{0}</answer></information>",
    "ten tags": "<answer>{0}</answer>" * 10,
    "all of them": "<answer>Paris The Beatles New York City 1989</answer>",
    "a prefix": "<answer>New York</answer>",
    "words in another order": "<answer>City New York</answer>",
    "a digit more": "<answer>19890</answer>",
    "tag in a tag": "<answer><b>{0}</b></answer>",
    "braces": "<answer>\\boxed{{{0}}}</answer>",
    "zero width": "<answer>{0}\u200b</answer>",
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
    gsm8k, math, dapo, search, algebra = (
        module(folder, name)
        for name in ("gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em", "math_verify")
    )
    scorers: list[tuple[str, dict[str, str], tuple[str, ...], Callable[[str, str], float]]] = [
        (
            "gsm8k",
            OF_GSM8K,
            NUMBERS,
            lambda r, label: gsm8k.compute_score(r, label.replace(",", "")),
        ),
        ("math", OF_MATH, FORMS, math.compute_score),
        (
            "math_dapo",
            OF_DAPO,
            NUMBERS,
            lambda r, label: (dapo.compute_score(r, label)["score"] + 1) / 2,
        ),
        (
            "math_verify",
            OF_MATH,
            FORMS,
            lambda r, label: algebra._verify_in_subprocess(f"\\boxed{{{label}}}", r),
        ),
        (
            "search_r1",
            OF_SEARCH,
            NAMES,
            lambda r, label: search.compute_score(r, {"target": [label]}),
        ),
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
                yield {
                    "scorer": name,
                    "kind": kind,
                    "response": response,
                    "label": label,
                    "verl": found,
                }
    sys.path.insert(0, str(folder))
    programs = importlib.import_module("prime_code")
    for kind, response, label in verl_programs.answers():
        found = float(programs.compute_score(response, label, continuous=True)[0])
        yield {
            "scorer": "prime_code",
            "kind": kind,
            "response": response,
            "label": label,
            "verl": found,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verl", type=Path, help="folder of the package verl")
    found = list(rows(parser.parse_args().verl))
    OUT.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    print(f"{len(found)} rows in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

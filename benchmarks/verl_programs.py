"""Programs for verl_scores: right ones in many forms, mistakes and cheats, with {0} for what a
right one computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

PRINTED: tuple[tuple[str, dict[str, Any]], ...] = (  # of the words `t` that stand in the input
    ("sum(map(int, t))", {"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]}),
    ("int(t[0]) / 2", {"inputs": ["1\n", "3\n"], "outputs": ["0.5\n", "1.5\n"]}),
    ("'\\n'.join(t)", {"inputs": ["ab cd\n", "x y\n"], "outputs": ["ab\ncd\n", "x\ny\n"]}),
)
CALLED: tuple[tuple[str, dict[str, Any]], ...] = (  # of the argument `a`
    (
        "[2 * x for x in a]",
        {"fn_name": "f", "inputs": ["[1, 2]", "[3]"], "outputs": ["[2, 4]", "[6]"]},
    ),
    ("len(a)", {"fn_name": "f", "inputs": ['"ab"', '"abc"'], "outputs": ["2", "3"]}),
    ("a % 2 == 0", {"fn_name": "f", "inputs": ["2", "3"], "outputs": ["true", "false"]}),
)
READS = "import sys\nt = sys.stdin.read().split()\n"
OF_PRINTED = {
    "published": READS + "print({0})",
    "blank behind": READS + "print({0}, '')",
    "lines behind": READS + "print({0})\nprint()\nprint()",
    "blank before": READS + "print('', {0})",
    "line before": READS + "print()\nprint({0})",
    "no end of line": READS + "sys.stdout.write(str({0}))",
    "capitals": READS + "print(str({0}).upper())",
    "words before": READS + "print('Answer:', {0})",
    "twice": READS + "print({0})\nprint({0})",
    "a part": READS + "print(str({0})[:1])",
    "input()": "t = input().split()\nprint({0})",
    "open(0)": "t = open(0).read().split()\nprint({0})",
    "buffer": "import sys\nt = sys.stdin.buffer.read().decode().split()\nprint({0})",
    "lines of stdin": (
        "import sys\nt = [word for line in sys.stdin for word in line.split()]\nprint({0})"
    ),
    "main guard": READS + "def main():\n    print({0})\nif __name__ == '__main__':\n    main()",
    "class": READS + "class Solution:\n    def run(self):\n        print({0})\nSolution().run()",
    "exit behind": READS + "print({0})\nsys.exit()",
    "exit(0) behind": READS + "print({0})\nexit(0)",
    "exit code 1 behind": READS + "print({0})\nsys.exit(1)",
    "error behind": READS + "print({0})\nraise ValueError",
    "nothing": "",
    "exit first": "exit(0)",
    "no Python": READS + "print({0}",
    "one output by heart": "print(3)",
    "to stderr": READS + "print({0}, file=sys.stderr)",
    "bytes": READS + "sys.stdout.buffer.write(str({0}).encode())",
    "a digit more": READS + "print(str({0}) + '0')",
    "nearly": READS + "print(str({0}) + '.0000001')",
    "point": READS + "print(str({0}) + '.')",
    "plus": READS + "print('+' + str({0}))",
    "zero before": READS + "print('0' + str({0}))",
    "spread": READS + "print(*str({0}))",
    "tabs": READS + "print(str({0}).replace('\\n', '\\t'))",
    "joined": READS + "print(str({0}).replace('\\n', ' '))",
    "reversed": READS + "print('\\n'.join(reversed(str({0}).split())))",
    "brackets": READS + "print([{0}])",
    "quotes": READS + "print(repr(str({0})))",
    "a thread": READS
    + "import threading\nx = threading.Thread(target=lambda: print({0}))\nx.start()\nx.join()",
    "recursion": READS
    + "sys.setrecursionlimit(9999)\nf = lambda n: n and f(n - 1)\nf(2000)\nprint({0})",
    "without an import": READS + "c = Counter(t)\nprint({0})",
    "star": READS + "from math import *\nprint({0})",
    "reads too much": "t = input().split()\ninput()\nprint({0})",
    "an error": READS + "1 / 0\nprint({0})",
}
OF_CALLED = {
    "published": "def f(a):\n    return {0}",
    "method": "class Solution:\n    def f(self, a):\n        return {0}",
    "helper": "def g(a):\n    return {0}\ndef f(a):\n    return g(a)",
    "annotated": "def f(a: List[int]) -> int:\n    return {0}",
    "lambda": "f = lambda a: {0}",
    "default": "def f(a, b=0):\n    return {0}",
    "prints too": "def f(a):\n    print('x')\n    return {0}",
    "tuple": "def f(a):\n    r = {0}\n    return tuple(r) if isinstance(r, list) else r",
    "number as float": "def f(a):\n    r = {0}\n    return float(r) if type(r) is int else r",
    "boolean": "def f(a):\n    return bool({0})",
    "number": "def f(a):\n    r = {0}\n    return r if isinstance(r, list) else int(r)",
    "text": "def f(a):\n    return str({0})",
    "none": "def f(a):\n    return None",
    "in a list": "def f(a):\n    return [{0}]",
    "the first": "def f(a):\n    r = {0}\n    return r[0] if isinstance(r, list) else r",
    "equals all": "class E(list):\n    __eq__ = lambda s, o: True\ndef f(a):\n    return E()",
    "error": "def f(a):\n    raise ValueError",
    "exit": "def f(a):\n    raise SystemExit(0)",
    "another name": "def g(a):\n    return {0}",
    "generator": "def f(a):\n    yield {0}",
    "two arguments": "def f(a, b):\n    return {0}",
    "one more": "def f(a):\n    r = {0}\n    return r + [0] if isinstance(r, list) else r + 1",
    "no Python": "def f(a:\n    return {0}",
    "by heart": "def f(a):\n    return [2, 4]",
    "nan": "def f(a):\n    return float('nan')",
}
FENCES = {
    "no mark": "```\n{0}\n```",
    "a draft before": "```python\nprint(0)\n```\nBetter:\n```python\n{0}\n```",
    "a draft behind": "```python\n{0}\n```\nWorse:\n```python\nprint(0)\n```",
    "text behind": "```python\n{0}\n```\nIt prints the answer.",
    "not closed": "```python\n{0}\n",
}


def answers() -> Iterator[tuple[str, str, str]]:
    """Yield (kind, response, label) of each."""
    for problems, programs in ((PRINTED, OF_PRINTED), (CALLED, OF_CALLED)):
        for right, tests in problems:
            for kind, program in programs.items():
                yield kind, f"```python\n{program.replace('{0}', right)}\n```", json.dumps(tests)
            for kind, fence in FENCES.items():
                yield (
                    kind,
                    fence.replace("{0}", programs["published"].replace("{0}", right)),
                    json.dumps(tests),
                )

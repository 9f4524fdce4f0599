"""Where the answer stands in a response."""

from __future__ import annotations

import re

BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)


def pattern_problem(pattern: str | None) -> str | None:
    """Why `pattern` cannot cut out an answer."""
    if pattern is None:
        return None
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        return f"pattern ({pattern!r}) is not a regular expression: {error}."
    return None if num_groups else f"pattern ({pattern!r}) needs a group; put parentheses around the answer."


def parse_answer(response: str, pattern: str | None) -> str | None:
    """The stripped group 1 of the last match of `pattern`, None without one. No pattern: the whole response."""
    if pattern is None:
        return response.strip()
    answer = None
    for match in re.finditer(pattern, response):
        answer = match.group(1)
    return answer.strip() if answer is not None else None


def last_boxed(response: str) -> str | None:
    r"""What stands in the \boxed{...} that is closed last. None without a whole one. Takes time in proportion."""
    answer = None
    opened: list[int | None] = []  # of each open brace, where its content starts if it is a box
    for match in BRACES.finditer(response):
        text = match.group()
        if text == "}":
            start = opened.pop() if opened else None
            if start is not None:
                answer = response[start : match.start()]
        elif text.endswith("{") and text != r"\{":
            opened.append(match.end() if text != "{" else None)
    return answer.strip() if answer is not None else None

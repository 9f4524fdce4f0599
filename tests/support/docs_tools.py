"""What the documents quote: blocks of code, and the words of the sources."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from places import ROOT

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may name after its #, as GitHub makes it."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.MULTILINE
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@cache
def messages() -> str:
    """All string literals of the sources, a line each, values as the character …"""
    texts = []
    for path in [
        *sorted((ROOT / "rlhf_megatron").rglob("*.py")),
        ROOT / "Makefile",
        ROOT / "launch" / "torchrun.sh",
    ]:
        if path.suffix != ".py":
            texts.append(path.read_text())
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def is_said(message: str) -> bool:
    """Whether a line of the sources has the parts of `message`, in order; between them stands …"""
    parts = message.split("…")
    return any(_has_in_order(line, parts) for line in messages().split("\n") if parts[0] in line)


def _has_in_order(line: str, parts: list[str]) -> bool:
    at = 0
    for part in parts:
        at = line.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True

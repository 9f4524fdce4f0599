"""The command lines that documents and headers print: in blocks of code, in indented lines, between
backticks, and in the comments at the head of configurations and launch scripts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs_tools import BLOCK
from places import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
HEADERS = [
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *sorted((ROOT / "examples").rglob("*.yaml")),
    *sorted((ROOT / "rlhf_megatron" / "cli" / "starters").rglob("*.yaml")),
    *sorted(path for path in (ROOT / "launch").iterdir() if path.is_file()),
]
NOT_RUN = {
    "git": "asks a network",
    "pip": "asks a network",
    "curl": "asks a server that has to be started before",
    "docker": "needs docker",
    "ray": "needs a cluster",
    "export": "sets a variable of the reader's shell",
    "source": "sets variables of the reader's shell",
    "make": "test_make_targets_exist looks for its target",
    "srun": "needs Slurm",
    "ssh": "needs another machine",
    "cd": "goes to a folder of the reader",
}
"""Programs whose lines no test runs, with the reason."""
RUN = ("rlhf-megatron", "python", "sbatch", "torchrun.sh", "slurm.sbatch", "ray_cluster.sh")
SHELL_LANGUAGES = ("sh", "bash", "console", "shell")

_VARIABLES = r"(?:[A-Z][A-Z0-9_]*=\S+ )*"
_PROGRAM = re.compile(
    rf"(?:\$ )?(?:time )?(?P<variables>{_VARIABLES})"
    r"(?P<folder>(?:[\w.$-]*/)*)(?P<program>rlhf-megatron|python3?(?:\.\d+)?|sbatch|torchrun\.sh"
    r"|slurm\.sbatch|slurm_ray\.sbatch|ray_cluster\.sh|git|pip|curl|docker|ray|export|source|make"
    r"|srun|ssh|cd)(?= |$)"
)
# In a comment a command stands alone, behind a colon or behind two blanks.
_IN_COMMENT = re.compile(r"^\s*#+\s*(?:.*?(?::\s+|\s{2,}))?(?=\S)")


@dataclass(frozen=True)
class DocumentedCommand:
    """A command line and the file that prints it."""

    place: str
    text: str
    is_mention: bool = False  # between backticks: may be the name of a command alone

    def split(self) -> tuple[dict[str, str], str, list[str]]:
        """The variables in front, the program without its folder, and its words. Comments, pipes
        and the marks of optional words are left out.
        """
        match = _PROGRAM.match(self.text)
        assert match is not None, self
        variables = dict(item.split("=", 1) for item in match["variables"].split())
        words = []
        for word in shlex.split(self.text[match.end() :], comments=True):
            if word in ("|", ">", ">>", "&", "&&"):
                break
            plain = word if "=[" in word else word.strip("[]")
            if plain not in ("", "..."):
                words.append("trainer.seed=1" if plain.lower() == "key=value" else plain)
        program = "python" if match["program"].startswith("python") else match["program"]
        return variables, program, words


def list_documented_commands() -> list[DocumentedCommand]:
    commands = []
    for path in DOCUMENTS:
        commands += _list_of_document(path)
    for path in HEADERS:
        commands += _list_of_header(path)
    return commands


def list_unknown_lines() -> list[str]:
    """Lines of shell blocks that begin with no known program: a reader would run them, too."""
    unknown = []
    for path in DOCUMENTS:
        for language, body in BLOCK.findall(path.read_text()):
            if language in SHELL_LANGUAGES:
                lines = [line for line in _join_lines(body) if not line.startswith("#")]
                unknown += [f"{path.name}: {line}" for line in lines if not _PROGRAM.match(line)]
    return unknown


def _list_of_document(path: Path) -> Iterator[DocumentedCommand]:
    text = path.read_text()
    place = str(path.relative_to(ROOT))
    for language, body in BLOCK.findall(text):
        if language in ("", *SHELL_LANGUAGES):
            yield from _list_of_lines(place, _join_lines(body))
    rest = BLOCK.sub("", text)
    # a continued line may be indented further
    indented = "\n".join(re.findall(r"^(?:    |\t)\s*(\S.*)$", rest, re.MULTILINE))
    yield from _list_of_lines(place, _join_lines(indented))
    for code in re.findall(r"`([^`\n]+)`", rest):
        for line in code.split(" && "):
            if _PROGRAM.match(line) and " " in line:
                yield DocumentedCommand(place, line, is_mention=True)


def _list_of_header(path: Path) -> Iterator[DocumentedCommand]:
    comments = [
        _IN_COMMENT.sub("", line)
        for line in path.read_text().replace("\\\n#", " ").splitlines()
        if re.match(r"\s*#", line) and not line.startswith(("#!", "#SBATCH"))
    ]
    place = str(path.relative_to(ROOT))
    for comment in comments:
        for line in (comment, *re.findall(r"`([^`]+)`", comment)):
            # Prose goes on behind two blanks; a sentence ends with a dot.
            command = re.split(r"\s{2,}", line.strip())[0].rstrip(".,;")
            if _PROGRAM.match(command) and " " in command:
                yield DocumentedCommand(place, command, is_mention=True)


def _list_of_lines(place: str, lines: list[str]) -> Iterator[DocumentedCommand]:
    for line in lines:
        for part in line.split(" && "):
            if _PROGRAM.match(part):
                yield DocumentedCommand(place, part)


def _join_lines(text: str) -> list[str]:
    """The lines with their continuations, without blanks around."""
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", text).splitlines() if line.strip()]

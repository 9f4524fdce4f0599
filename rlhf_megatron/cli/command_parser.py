"""The argument parser of `rlhf-megatron`: it names the command that a mistyped word is near to."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import NoReturn

# What users of other trainers type, and the command that does it here.
COMMAND_BY_OTHER_NAME = {
    "run": "train",
    "start": "train",
    "rl": "train",
    "rlhf": "train",
    "ppo": "train",
    "grpo": "train",
    "main_ppo": "train",
    "finetune": "sft",
    "fine-tune": "sft",
    "dpo": "sft",
    "rm": "reward-model",
    "reward": "reward-model",
    "infer": "generate",
    "inference": "generate",
    "chat": "serve",
    "vllm": "serve",
    "sglang": "engine",
    "eval": "evaluate",
    "score": "evaluate",
    "benchmark": "load-test",
    "download": "fetch",
    "merge": "export",
    "model_merger": "export",
    "save": "export",
    "verl": "config",
    "from-verl": "config",
    "validate": "config",
    "logs": "report",
    "compare": "report",
    "plot": "report",
    "info": "doctor",
    "env": "doctor",
    "memory": "plan",
    "layout": "plan",
}
_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
_MIN_SIMILARITY = 0.6


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose error for an unknown command, or for an unknown value of an option
    with a fixed set of values, ends with the nearest valid word. Its subparsers do likewise.
    """

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with code 2. Where a word is near, it takes
        the place of the list of all choices.
        """
        invalid = _INVALID_CHOICE.search(message)
        if invalid is not None:
            # Python 3.11 quotes the choices, 3.14 does not.
            choices = [choice.strip(" '") for choice in invalid[2].split(",")]
            nearest = suggest_word(invalid[1], choices)
            if nearest is not None:
                argument = message[: invalid.start()]
                message = (
                    f"{argument}{invalid[1]!r} is unknown; did you mean {nearest}? -h lists all"
                )
        super().error(message)


def suggest_word(word: str, choices: list[str]) -> str | None:
    """Return the choice that `word` is another name of, that begins with `word`, or that is most
    similar to it; None where no choice is near.
    """
    other_name = COMMAND_BY_OTHER_NAME.get(word.lower())
    if other_name in choices:
        return other_name
    # --gpu h100 means h100-80g, though h200 is more similar
    for choice in choices:
        if word and choice.startswith(word.lower()):
            return choice
    similar = difflib.get_close_matches(word.lower(), choices, 1, _MIN_SIMILARITY)
    return similar[0] if similar else None

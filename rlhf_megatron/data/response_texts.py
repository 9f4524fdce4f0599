"""What a response's text does not show: the beginning of the answer that the prompt wrote
already, and the special tokens that decoding leaves out.

    prompt    "<|im_start|>assistant\n<think>\n"    the prefix of the response is "<think>\n"
    response  "7</think>9", where </think> is a special token: text "79", special tokens
              ((1, "</think>"),)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rlhf_megatron.data.chat_template import ChatFormat
from rlhf_megatron.data.tokenizer import Tokenizer

# (position in the text without special tokens, name) of each special token, in order
SpecialTokenPlaces = tuple[tuple[int, str], ...]

THOUGHT_NAMES = "think|thinking|thought|reasoning"
THOUGHT_TAG = re.compile(rf"</?(?:{THOUGHT_NAMES})>|\[/?THINK\]", re.IGNORECASE)
TRAILING_THOUGHT_TAGS = re.compile(rf"(?:(?:{THOUGHT_TAG.pattern})\s*)+\Z", re.IGNORECASE)
# thoughts that a prompt opens, or that it opens and closes without words, at its end
OPENED_THOUGHTS = re.compile(
    rf"<({THOUGHT_NAMES})>\s*(?:</\1>\s*)?\Z|\[THINK\]\s*(?:\[/THINK\]\s*)?\Z", re.IGNORECASE
)
TAG = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]")
# contents of messages that no template writes by itself, and that begin unlike any prefix
PROBE_QUESTION = "☃ question"
PROBE_ANSWER = "☃ answer"
ANSWER_OF_FORMER_TURN = re.compile(
    rf"\s*(?:(?:{THOUGHT_TAG.pattern})\s*)*{PROBE_ANSWER}", re.IGNORECASE
)


def find_template_prefix(chat: ChatFormat) -> str:
    """Return the text that a chat template writes of the assistant's answer at the end of each
    prompt, such as "<think>\n"; "" where it writes none or refuses the probe.

    The header of the assistant's turn ends where a prompt and a conversation that goes on after the
    answer begin to differ: templates leave thoughts out of former turns. What the prompt has behind
    the header is of the answer. Tags of thoughts are never a header, since some templates write
    empty ones into former turns. Where the conversation has something else than the answer there,
    only tags of thoughts at the prompt's end count.
    """
    question = {"role": "user", "content": PROBE_QUESTION}
    answer = {"role": "assistant", "content": PROBE_ANSWER}
    try:
        prompt = chat.render_conversation([question])
        conversation = chat.render_conversation([question, answer, question])
    except ValueError:  # the template wants other conversations; a prompt may tell of itself
        return ""
    header_end = _move_out_of_tag(prompt, _count_common_characters(prompt, conversation))
    if not ANSWER_OF_FORMER_TURN.match(conversation, header_end):
        return _find_opened_thoughts(prompt)
    question_end = prompt.rfind(PROBE_QUESTION) + len(PROBE_QUESTION)
    thoughts = TRAILING_THOUGHT_TAGS.search(prompt, question_end)
    return prompt[header_end if thoughts is None else min(header_end, thoughts.start()) :]


def _count_common_characters(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


def _move_out_of_tag(text: str, position: int) -> int:
    """Return the position, or the beginning of the tag of `text` that it lies within."""
    tags = TAG.finditer(text)
    return next((tag.start() for tag in tags if tag.start() < position < tag.end()), position)


def find_response_prefix(prompt: str, template_prefix: str = "") -> str:
    """Return the end of a rendered prompt that the answer begins with, or "". `template_prefix`:
    see `find_template_prefix`.

    Without one, which is so for prompts that are plain text, it is a tag of thoughts at the
    prompt's end.
    """
    if template_prefix and prompt.endswith(template_prefix):
        return template_prefix
    return _find_opened_thoughts(prompt)


def _find_opened_thoughts(prompt: str) -> str:
    """Return the tag of thoughts that ends the prompt, with the white space behind it, or ""."""
    # no tag is longer; the search must not begin anew at each tag of a long prompt
    match = OPENED_THOUGHTS.search(prompt, max(0, len(prompt.rstrip()) - 64))
    return "" if match is None else match.group()


@dataclass(frozen=True)
class ResponseReader:
    """Reads what the text of a response does not show."""

    tokenizer: Tokenizer
    template_prefix: str = ""  # see `find_template_prefix`

    def find_prefix(self, prompt: str) -> str:
        """Return the end of a rendered prompt that the answer begins with, or ""."""
        return find_response_prefix(prompt, self.template_prefix)

    def locate_special_tokens(self, token_ids: Sequence[int], text: str) -> SpecialTokenPlaces:
        """Return the places in `text`, which is what the ids decode to, of the special tokens that
        it lacks.
        """
        names = self.tokenizer.special_tokens_by_id
        indices = [index for index, token_id in enumerate(token_ids) if token_id in names]
        num_before_end = len(indices)  # most responses have one special token, which ends them
        while num_before_end and len(token_ids) - indices[num_before_end - 1] == (
            len(indices) - num_before_end + 1
        ):
            num_before_end -= 1
        positions = self._measure_texts_before(token_ids, indices[:num_before_end], text)
        positions += [len(text)] * (len(indices) - num_before_end)
        places = zip(positions, indices, strict=True)
        return tuple((position, names[token_ids[index]]) for position, index in places)

    def _measure_texts_before(
        self, token_ids: Sequence[int], indices: Sequence[int], text: str
    ) -> list[int]:
        """Return for each index of a special token the length of the text before that token."""
        if not indices:
            return []
        begins = [0, *(index + 1 for index in indices)]
        pieces = [
            self.tokenizer.decode(token_ids[begin:end])
            for begin, end in zip(begins, [*indices, len(token_ids)], strict=True)
        ]
        if "".join(pieces) == text:
            return [*accumulate(map(len, pieces[:-1]))]
        # the decoder writes some token otherwise at the beginning of a text
        return [min(len(self.tokenizer.decode(token_ids[:index])), len(text)) for index in indices]

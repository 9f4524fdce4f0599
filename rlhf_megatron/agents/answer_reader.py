"""Reads what a policy has sampled: thoughts, calls of tools and text, in the format in which the
model's chat template writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.agents.answer_formats.parsed_answer import AnswerFormat, ParsedAnswer
from rlhf_megatron.agents.answer_formats.template_calls import (
    choose_answer_format,
    describe_tool_problem,
    is_thought_open,
)
from rlhf_megatron.agents.dialogue import DialogueFormat
from rlhf_megatron.data.tokenizer import Tokenizer

NUM_SHOWN_TOKENS = 32  # last ones of the prompt, decoded to see whether it opens a thought


@dataclass(frozen=True)
class AnswerReader:
    """Turns sampled ids into the parts of an answer."""

    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]  # ids that end a turn
    answer_format: AnswerFormat | None  # None: an answer is all text
    tool_problem: str  # why the policy cannot be offered tools; "": it can

    def read_answer(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> ParsedAnswer:
        """Return the parts of the answer `token_ids`. `prompt_ids`: all ids before it, whose end
        says whether the answer begins within a thought. `tools`: those that the prompt described.
        """
        ends_with_stop = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        shown_ids = token_ids[:-1] if ends_with_stop else token_ids
        if self.answer_format is None:
            return ParsedAnswer(self.tokenizer.decode(shown_ids), "", (), ())
        prompt_end = self.tokenizer.decode_with_special_tokens(prompt_ids[-NUM_SHOWN_TOKENS:])
        text = self.tokenizer.decode_with_special_tokens(shown_ids)
        return self.answer_format.parse_answer(text, is_thought_open(prompt_end), tools)

    def describe(self) -> str:
        """Return a line for the log on the format, and on why tools are refused."""
        name = "text" if self.answer_format is None else self.answer_format.name
        line = f"answers are read as {name}"
        if self.tool_problem:
            line += f"; tools are refused: {self.tool_problem}"
        return line


def make_answer_reader(
    dialogue_format: DialogueFormat, template_kwargs: Mapping[str, Any]
) -> AnswerReader:
    """Return the reader of the answers in a run's dialogues. `template_kwargs`: the run's variables
    of the chat template (`data.apply_chat_template_kwargs`).
    """
    chat = dialogue_format.chat
    tokenizer = dialogue_format.tokenizer
    stop_token_ids = dialogue_format.stop_token_ids
    if chat is None:
        problem = "prompts are plain text, without a chat template (data.apply_chat_template)"
        return AnswerReader(tokenizer, stop_token_ids, None, problem)
    try:
        answer_format = choose_answer_format(tokenizer, template_kwargs)
    except ValueError as error:
        return AnswerReader(tokenizer, stop_token_ids, None, str(error))
    problem = describe_tool_problem(
        lambda messages, tools, has_answer_prompt: chat.render_conversation(
            messages, has_answer_prompt, tools
        )
    )
    return AnswerReader(tokenizer, stop_token_ids, answer_format, problem)

"""One row of a supervised or preference job as samples: a conversation, a plain text, or a pair of
answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import accumulate
from typing import Any

from rlhf_megatron.algorithms.distillation.distillation_loss import DistillationParams
from rlhf_megatron.config.schema import DataConfig, SFTConfig
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.data.assistant_turns import (
    ConversationDocuments,
    TokenDocument,
    tokenize_conversation,
)
from rlhf_megatron.data.chat_template import ChatFormat
from rlhf_megatron.data.data_rows import ChatMessage, look_up_key, parse_prompt
from rlhf_megatron.data.document_samples import DocumentSample
from rlhf_megatron.data.message_content import drop_absent_entries, join_text_parts
from rlhf_megatron.data.prompt_items import PromptFormat
from rlhf_megatron.data.teacher_top_tokens import parse_teacher_top_tokens
from rlhf_megatron.data.tokenizer import Tokenizer


@dataclass
class RowOutcomeCounts:
    """Counts of what became of a job's rows, updated while they are read."""

    num_bad: int = 0  # skipped
    num_overlong: int = 0  # dropped
    num_cut: int = 0
    num_in_one_document: int = 0  # conversations in one document
    num_split_by_turn: int = 0  # conversations with a document a turn
    num_stops_added: int = 0
    num_thoughts_lost: int = 0
    num_tools_lost: int = 0  # conversations

    def describe_counts(self) -> list[str]:
        """Return the counts that are not 0, as one phrase each, for people."""
        phrases = {
            "malformed rows skipped": self.num_bad,
            "over-long documents dropped": self.num_overlong,
            "over-long documents cut": self.num_cut,
            "conversations in one document": self.num_in_one_document,
            (
                "conversations as a document a turn (the chat template rewrites earlier turns)"
            ): self.num_split_by_turn,
            (
                "stop tokens put behind turns that the chat template ends with none"
            ): self.num_stops_added,
            (
                "turns whose reasoning_content, or <think>, the chat template leaves out"
            ): self.num_thoughts_lost,
            "conversations whose tools the chat template leaves out": self.num_tools_lost,
        }
        return [f"{count} {what}" for what, count in phrases.items() if count]


def parse_conversation_row(
    row: Mapping[str, Any],
    sft: SFTConfig,
    chat: ChatFormat,
    tokenizer: Tokenizer,
    counts: RowOutcomeCounts,
) -> list[DocumentSample]:
    """Return the samples of a conversation row: one document with all turns, or one for each turn
    where the chat template rewrites earlier turns. Add to `counts`. Raise ValueError for a
    malformed row.
    """
    assert sft.messages_key is not None, "the job reads conversations"
    messages = _parse_messages(
        look_up_key(row, sft.messages_key, "sft.messages_key"), sft.messages_key
    )
    turns = _tokenize_row_turns(messages, row, sft, chat, tokenizer, counts)
    documents = turns.documents
    counts.num_in_one_document += turns.is_single_document
    counts.num_split_by_turn += not turns.is_single_document
    weight = parse_sample_weight(row, sft)
    samples = [DocumentSample((document,), "", weight) for document in documents]
    if sft.teacher_key is None:
        return samples
    ends = list(accumulate((d.num_trained for d in documents), initial=0))
    top_k = build_params(DistillationParams, sft.params, "sft.params").top_k
    told = parse_teacher_top_tokens(row, sft.teacher_key, ends[-1], top_k, tokenizer.vocab_size)
    return [
        replace(s, teacher_top_tokens=told.select_positions(b, e))
        for s, b, e in zip(samples, ends, ends[1:], strict=False)
    ]


def parse_text_row(
    row: Mapping[str, Any],
    text_key: str,
    data: DataConfig,
    sft: SFTConfig,
    tokenizer: Tokenizer,
    counts: RowOutcomeCounts | None = None,
) -> list[DocumentSample]:
    """Return the plain text under `text_key` as a document with the token ids of transformers' own
    call; all tokens but the first train, since nothing predicts that one. `counts` stays as it is.
    Raise ValueError where the row has no text.
    """
    text = look_up_key(row, text_key, "a row")
    if not isinstance(text, str):
        raise ValueError(f"{text_key!r} must be a text, not {type(text).__name__}")
    ids = tokenizer.encode_document(text, data.add_special_tokens)
    trained_spans = ((1, len(ids)),) if len(ids) > 1 else ()
    return [DocumentSample((TokenDocument(ids, trained_spans),), "", parse_sample_weight(row, sft))]


def _tokenize_row_turns(
    messages: list[dict[str, Any]],
    row: Mapping[str, Any],
    sft: SFTConfig,
    chat: ChatFormat,
    tokenizer: Tokenizer,
    counts: RowOutcomeCounts,
) -> ConversationDocuments:
    """Tokenize the assistant's turns of a conversation, with the tools that the row names. Add to
    `counts`. Raise ValueError for malformed tools or a conversation that cannot be tokenized.
    """
    tools = _parse_json_text(row.get(sft.tools_key) or None, sft.tools_key)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError(
            f"{sft.tools_key!r} must be a list of objects, or such a list as JSON text"
        )
    _refuse_nan(tools, repr(sft.tools_key))
    turns = tokenize_conversation(
        messages, lambda part, asks: chat.render_conversation(part, asks, tools), tokenizer
    )
    counts.num_stops_added += turns.num_stops_added
    counts.num_thoughts_lost += turns.num_thoughts_lost
    first = turns.documents[0]
    asked = (
        tokenizer.decode_with_special_tokens(first.token_ids[: first.trained_spans[0][0]])
        if tools
        else ""
    )
    functions = (tool.get("function", tool) for tool in tools or ())
    counts.num_tools_lost += any(
        isinstance(f, dict) and str(f.get("name", "")) not in asked for f in functions
    )
    return turns


def _parse_messages(value: Any, key: str) -> list[dict[str, Any]]:
    """Return the messages of a row's value, a list or JSON text, as the template gets them: role
    and content, and whatever else the row has, without nulls and empty lists. Raise ValueError for
    malformed messages.
    """
    value = _parse_json_text(value, key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} must be a list of messages")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'message {number} of {key!r} must be an object with a "role"')
        if not isinstance(_read_content(message), str):
            raise ValueError(
                f"message {number} of {key!r} must have text, or parts of text, as content"
            )
        _refuse_nan(message.get("tool_calls"), f"message {number} of {key!r}")
    return [
        {**drop_absent_entries(message), "content": _read_content(message)} for message in value
    ]


def _refuse_nan(value: Any, place: str) -> None:
    """Raise ValueError where a value that a template writes as JSON holds NaN or Infinity."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        raise ValueError(
            f"{place} has NaN or Infinity, which JSON does not have and a template would write;"
            " make it null or text"
        ) from None


def _read_content(message: Mapping[str, Any]) -> Any:
    """Return the text of a message, joined from its text parts; "" where the message has no content
    or an empty list of parts. Content in another form is returned as it is.
    """
    content = message.get("content")
    return "" if content is None or content == [] else join_text_parts(content)


def _parse_json_text(value: Any, key: str) -> Any:
    """Return the value or, where it is text, the value that the text holds as JSON. Raise
    ValueError for text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{key!r} is text that is no JSON ({error}): {value[:40]!r}") from None


def parse_preference_row(
    row: Mapping[str, Any],
    data: DataConfig,
    sft: SFTConfig,
    prompt_format: PromptFormat,
    tokenizer: Tokenizer,
    counts: RowOutcomeCounts,
) -> list[DocumentSample]:
    """Return one sample with the chosen and the rejected answer, each behind the prompt that RL
    would ask. Only the answers train: in a conversation, the text that the chat template writes for
    the last message. Raise ValueError for a malformed row and for two equal answers.
    """
    chosen, rejected = (
        join_text_parts(look_up_key(row, key, f"sft.{name}"))
        for name, key in (("chosen_key", sft.chosen_key), ("rejected_key", sft.rejected_key))
    )
    prompt = parse_prompt(row[data.prompt_key], data.prompt_key) if data.prompt_key in row else None
    if not isinstance(chosen, str) and (prompt is None or prompt_format.chat is not None):
        if prompt_format.chat is None:
            raise ValueError(
                f"{sft.chosen_key!r} is a conversation; set data.apply_chat_template=true"
            )
        both = _parse_messages(chosen, sft.chosen_key), _parse_messages(rejected, sft.rejected_key)
        if prompt is not None:
            asked = [ChatMessage("user", prompt)] if isinstance(prompt, str) else prompt
            before = [{"role": message.role, "content": message.content} for message in asked]
            both = before + both[0][-1:], before + both[1][-1:]
        if both[0][:-1] != both[1][:-1]:
            raise ValueError(
                f"{sft.chosen_key!r} and {sft.rejected_key!r} must differ in their last"
                " message only"
            )
        if not all(messages[-1]["role"] == "assistant" for messages in both):
            raise ValueError(
                f"{sft.chosen_key!r} and {sft.rejected_key!r} must end with messages of"
                " the assistant"
            )
        found = [
            _tokenize_row_turns(
                messages, row, sft, prompt_format.chat, tokenizer, counts
            ).documents[-1]
            for messages in both
        ]
        documents = tuple(TokenDocument(one.token_ids, one.trained_spans[-1:]) for one in found)
    else:
        prompt = parse_prompt(look_up_key(row, data.prompt_key, "data.prompt_key"), data.prompt_key)
        answers = [
            _parse_answer(value, key)
            for value, key in ((chosen, sft.chosen_key), (rejected, sft.rejected_key))
        ]
        text_ids, *answer_ids = tokenizer.encode_texts(
            [prompt_format.format_prompt(prompt), *answers]
        )
        prompt_ids = (*prompt_format.select_opening_ids(tokenizer), *text_ids)
        ends = [(*prompt_ids, *ids, tokenizer.eos_token_id) for ids in answer_ids]
        documents = tuple(TokenDocument(ids, ((len(prompt_ids), len(ids)),)) for ids in ends)
    if documents[0].token_ids == documents[1].token_ids:
        raise ValueError(
            "both answers are the same: nothing can be learnt from the pair; remove it"
        )
    return [DocumentSample(documents, "", parse_sample_weight(row, sft))]


def _parse_answer(value: Any, key: str) -> str:
    """Return an answer that is text or the last message of a conversation. Raise ValueError where
    the last message is not the assistant's.
    """
    if isinstance(value, str):
        return value
    last = _parse_messages(value, key)[-1]
    if last["role"] != "assistant":
        raise ValueError(f"{key!r} must end with a message of the assistant")
    return str(last["content"])


def parse_sample_weight(row: Mapping[str, Any], sft: SFTConfig) -> float:
    """Return a row's weight in the loss, 1 where no key is set. Raise ValueError for anything but a
    number from 0 to below a million.
    """
    if sft.weight_key is None:
        return 1.0
    weight = look_up_key(row, sft.weight_key, "sft.weight_key")
    weight = float(weight) if isinstance(weight, Decimal) else weight
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e6:
        raise ValueError(
            f"{sft.weight_key!r} must be a number from 0 up to a million, not {weight!r}"
        )
    return float(weight)

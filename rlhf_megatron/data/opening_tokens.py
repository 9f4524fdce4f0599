"""Tells what the token ids of prompts and documents begin with, so that a beginning-of-sequence
token which is missing, or there twice, shows at the start of a job.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.data.tokenizer import Tokenizer

SETTING = "data.add_special_tokens"
# of a chat, before its first word
SHOWN_CHARACTERS = 40


def describe_opening_tokens(
    tokenizer: Tokenizer, data: DataConfig, first_ids: Sequence[int], items_name: str
) -> str:
    """Return a phrase on what the items of a job begin with. `first_ids` are the token ids of the
    first item; `items_name` is what the items are called, such as "prompts".
    """
    if data.apply_chat_template:
        shown = tokenizer.decode_with_special_tokens(first_ids[:SHOWN_CHARACTERS])
        return f"{items_name} begin as the chat template writes them: {shown[:SHOWN_CHARACTERS]!r}"
    opening_ids = tokenizer.opening_ids
    if not opening_ids:
        return f"{items_name} begin with their own text: the tokenizer writes nothing before text"
    opening = tokenizer.decode_with_special_tokens(opening_ids)
    if not data.add_special_tokens:
        return (
            f"{items_name} begin without {opening!r}, which the tokenizer writes before text:"
            f" {SETTING} is false"
        )
    phrase = f"{items_name} begin with {opening!r}, which the tokenizer writes before text"
    if tuple(first_ids[len(opening_ids) : 2 * len(opening_ids)]) == opening_ids:
        phrase += (
            f", and their own text begins with {opening!r}, too, so that the model reads it twice:"
            f" remove it from the text, or set {SETTING}=false"
        )
    return phrase

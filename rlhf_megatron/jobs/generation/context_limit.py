"""How many tokens a prompt and its response may have together: the smallest limit of the model and
of its engines. A job looks before it starts engines, which would refuse the requests one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.config.schema import RolloutConfig

RESPONSE_LENGTH_OPTION = "--max-tokens (data.max_response_length)"
_SGLANG_LIMITS = ("context_length", "context-length", "max_total_tokens", "max-total-tokens")


@dataclass(frozen=True)
class ContextLimit:
    """The number of tokens that a sequence may have, and the setting that says so."""

    num_tokens: int
    setting: str

    def __str__(self) -> str:
        """Return the setting with its value in brackets."""
        return f"{self.setting} ({self.num_tokens})"


def find_context_limit(hf_config: Mapping[str, Any], rollout: RolloutConfig) -> ContextLimit | None:
    """Return the smallest limit of a model and its engines; None where no setting names one."""
    limits = {"max_position_embeddings": hf_config.get("max_position_embeddings")}
    if rollout.engine == "local":
        limits["rollout.max_num_batched_tokens"] = rollout.max_num_batched_tokens
    for name in _SGLANG_LIMITS:
        limits[f"rollout.sglang.args.{name}"] = rollout.sglang.args.get(name)
    known = [
        ContextLimit(num_tokens, setting)
        for setting, num_tokens in limits.items()
        if isinstance(num_tokens, int)
    ]
    return min(known, key=lambda limit: limit.num_tokens, default=None)


def fit_response_length(
    limit: ContextLimit | None,
    prompt_lengths: Sequence[int],
    max_response_length: int,
    is_default_length: bool,
) -> int:
    """Return the number of tokens that a response may have: `max_response_length` where the longest
    prompt leaves room for it, else what is left where the length is only the default.

    Raise ValueError for a prompt without room for one token, and for a length that somebody has set
    and that does not fit.
    """
    if limit is None:
        return max_response_length
    longest = max(prompt_lengths)
    num_left = limit.num_tokens - longest
    if num_left < 1:
        raise ValueError(
            f"prompt {prompt_lengths.index(longest)} has {longest} tokens, and {limit} leaves no"
            " room for a response; shorten the prompt, or use a model with a longer context."
        )
    if max_response_length <= num_left:
        return max_response_length
    if is_default_length:
        return num_left
    raise ValueError(
        f"{RESPONSE_LENGTH_OPTION} is {max_response_length}, but {limit} leaves {num_left} tokens"
        f" behind the longest prompt, which has {longest}; set it to {num_left} or less."
    )


def check_document_lengths(limit: ContextLimit | None, document_lengths: Sequence[int]) -> None:
    """Raise ValueError where a document is longer than the limit."""
    if limit is None:
        return
    longest = max(document_lengths)
    if longest > limit.num_tokens:
        raise ValueError(
            f"document {document_lengths.index(longest)} has {longest} tokens, more than {limit};"
            " shorten the document, or leave it out."
        )

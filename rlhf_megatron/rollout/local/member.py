"""Samples on their way through the generator, and the groups in which they wait."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from rlhf_megatron.rollout.engine import UNSYNCED, FinishReason, GeneratedSample, SamplingParams, VersionSpan


@dataclass(eq=False)
class Member:
    """A sample on its way."""

    prompt_ids: tuple[int, ...]
    seed: int
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)  # response; brought up to date when it leaves its row
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None  # None: not finished
    num_cached_tokens: int = 0  # of the prompt, copied from what another sample of the group made the engine read
    num_retractions: int = 0
    _versions: list[tuple[int, int]] = field(default_factory=list)  # (version, first token drawn from its weights)

    @property
    def context(self) -> list[int]:
        return [*self.prompt_ids, *self.token_ids]

    @property
    def limit(self) -> int:
        """Tokens, prompt included, at which it ends."""
        return len(self.prompt_ids) + self.params.max_new_tokens

    def draws_from(self, version: int, num_tokens: int) -> None:
        """It has `num_tokens` tokens, and what follows comes from the weights of `version`."""
        if self._versions and self._versions[-1][1] == num_tokens:
            self._versions.pop()  # no token came from those
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, num_tokens))

    def result(self) -> GeneratedSample:
        """Raises FloatingPointError when the model gave no finite log-prob."""
        assert self.finish_reason is not None, "the sample has not finished"
        if not all(value > float("-inf") for value in self.log_probs):
            raise FloatingPointError("the model's logits are not finite: a sampled token has no finite log-prob.")
        spans = self._spans()
        return GeneratedSample(
            tuple(self.token_ids),
            tuple(self.log_probs),
            self.finish_reason,
            spans[0].version if spans else UNSYNCED,
            spans,
            self.num_cached_tokens,
            self.num_retractions,
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        if len(self._versions) == 1 and self.token_ids:  # by far the most
            return (VersionSpan(self._versions[0][0], 0, len(self.token_ids)),)
        borders = [*(start for _, start in self._versions), len(self.token_ids)]
        spans = [VersionSpan(self._versions[i][0], *borders[i : i + 2]) for i in range(len(self._versions))]
        return tuple(span for span in spans if span.start < span.end)


@dataclass(eq=False)
class Group:
    """Samples that share all tokens so far and wait for a row."""

    context: list[int]
    waiting: deque[Member]
    is_used: bool = False  # a sample has joined with the context as it was read last

    def next(self) -> Member:
        """Take the next sample, which joins with the context that was read."""
        member = self.waiting.popleft()
        if self.is_used and not member.token_ids:
            member.num_cached_tokens = len(self.context)
        self.is_used = True
        return member


@dataclass(eq=False)
class Prefilled:
    """Groups whose contexts were read in one pass: kept until their last samples have joined."""

    groups: deque[tuple[int, Group]]  # (row of the tensors below, group)
    keys_values: Tensor  # [2, layers, rows, columns, heads, head size]
    logits: Tensor  # [rows, V], of the last position

    @property
    def num_tokens(self) -> int:
        return self.keys_values.shape[2] * self.keys_values.shape[3]

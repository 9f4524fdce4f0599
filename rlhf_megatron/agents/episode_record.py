"""A finished episode: what the policy read and sampled, how it ended, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.agents.episode_messages import EpisodeEnd
from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import VersionSpans
from rlhf_megatron.rollout.engine_interface import GeneratedSample
from rlhf_megatron.rollout.group_columns import make_plain_version_spans

# What the policy has caused is scored; what it has not caused is left out of group and loss.
SCORED_ENDS: tuple[EpisodeEnd, ...] = ("done", "max_turns", "max_tokens")
# Where more of an episode's time than this passed while the policy spoke, a timeout is its doing.
POLICY_TIMEOUT_SHARE = 0.5


@codec.register("EpisodeTurn")
@dataclass(frozen=True)
class EpisodeTurn:
    """One answer of the policy."""

    begin: int  # of its tokens in the episode's ids
    end: int
    finish_reason: str
    policy_version: int  # of its first token
    version_spans: VersionSpans  # (version, start, end) within the turn; (): all of policy_version
    num_cached_tokens: int  # of its prompt, found in the engine's prefix cache
    num_retractions: int
    engine_seconds: float  # from the request's start at an engine to its answer
    environment_seconds: float  # of the environment before it: since the former answer


@codec.register("Episode")
@dataclass(frozen=True)
class Episode:
    """An episode as one row of tokens, in which only what the policy sampled trains."""

    token_ids: Tensor  # [T] int32: the first prompt, turns, and what stands between them
    log_probs: Tensor  # [sampled tokens] float32, of all turns one after the other
    num_prompt_tokens: int
    turns: tuple[EpisodeTurn, ...]
    end: EpisodeEnd
    reward: float | None  # of the environment, without those of turns; None: it gives none
    turn_rewards: tuple[float, ...]  # one a turn, or ()
    metrics: dict[str, float] = field(default_factory=dict)
    messages: str = ""  # the talk as JSON, for people
    error: str = ""
    num_restarts: int = 0  # because its worker was lost
    seconds: float = 0.0  # from its start to its end
    environment: str = ""  # its registered name
    unfinished_turn_seconds: float = 0.0  # at an engine, of a turn that its end has cut off

    @property
    def num_sampled_tokens(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return sum(turn.end - turn.begin for turn in self.turns)

    @property
    def is_policy_timeout(self) -> bool:
        """Return whether the episode timed out because the policy spoke for too long."""
        seconds = self.unfinished_turn_seconds + sum(turn.engine_seconds for turn in self.turns)
        return self.end == "timeout" and seconds > POLICY_TIMEOUT_SHARE * self.seconds

    @property
    def is_scored(self) -> bool:
        """Return whether the episode counts, because its end is the policy's doing."""
        return self.end in SCORED_ENDS or self.is_policy_timeout


class EpisodeTokens:
    """The tokens of an episode that goes on: each turn is put behind those before it."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.turns: list[EpisodeTurn] = []
        self.num_prompt_tokens = 0
        self._log_probs: list[np.ndarray] = []
        self._pending_ids: list[int] = []

    def append_prompt(self, new_ids: Sequence[int]) -> tuple[int, ...]:
        """Add the ids that stand before the next turn, and return all ids: what the engine reads.
        They count only once the turn has come, so that an episode ends with a sampled token.
        """
        self._pending_ids = list(new_ids)
        return (*self.token_ids, *self._pending_ids)

    def append_turn(
        self, sample: GeneratedSample, engine_seconds: float, environment_seconds: float
    ) -> None:
        """Add what the policy has sampled behind the ids of `append_prompt`."""
        if not self.turns:
            self.num_prompt_tokens = len(self._pending_ids)
        self.token_ids += self._pending_ids
        self._pending_ids = []
        begin = len(self.token_ids)
        self.token_ids += sample.token_ids
        self._log_probs.append(np.asarray(sample.log_probs, np.float32))
        self.turns.append(
            EpisodeTurn(
                begin,
                len(self.token_ids),
                sample.finish_reason,
                sample.policy_version,
                make_plain_version_spans(sample),
                sample.num_cached_tokens,
                sample.num_retractions,
                engine_seconds,
                environment_seconds,
            )
        )

    def join_columns(self, prompt_ids: Sequence[int]) -> tuple[Tensor, Tensor, int]:
        """Return (token ids, log-probs, number of prompt tokens). An episode without a turn has the
        ids of its row's prompt alone.
        """
        token_ids = self.token_ids or list(prompt_ids)
        log_probs = np.concatenate([np.zeros(0, np.float32), *self._log_probs])
        num_prompt = self.num_prompt_tokens or len(prompt_ids)
        return (
            torch.tensor(token_ids, dtype=torch.int32),
            torch.from_numpy(log_probs),
            num_prompt,
        )

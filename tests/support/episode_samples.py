"""Episodes for the tests of agents/ and of what trains on them."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_megatron.agents.episode_record import Episode, EpisodeTurn
from rlhf_megatron.data.batch import PromptBatch, VersionSpans


def make_turn(
    begin: int,
    end: int,
    version: int = 3,
    spans: VersionSpans = (),
    finish_reason: str = "stop",
    seconds: float = 1.0,
) -> EpisodeTurn:
    return EpisodeTurn(begin, end, finish_reason, version, spans, begin // 2, 1, seconds, 0.25)


def make_episode(
    token_ids: list[int], turns: list[EpisodeTurn], end: str = "done", **fields: Any
) -> Episode:
    """An episode whose k-th sampled token has the log-prob -(k + 1) / 8."""
    num_sampled = sum(turn.end - turn.begin for turn in turns)
    columns: dict[str, Any] = {
        "num_prompt_tokens": turns[0].begin if turns else len(token_ids),
        "reward": 0.0,
        "turn_rewards": (),
        "seconds": 10.0,
        **fields,
    }
    return Episode(
        torch.tensor(token_ids, dtype=torch.int32),
        -torch.arange(1, num_sampled + 1, dtype=torch.float32) / 8,
        turns=tuple(turns),
        end=end,  # type: ignore[arg-type]
        **columns,
    )


def make_prompts(prompt_ids: list[tuple[int, ...]], first_group: int = 7) -> PromptBatch:
    count = len(prompt_ids)
    names = tuple(str(row) for row in range(count))
    return PromptBatch(
        tuple(prompt_ids),
        names,
        names,
        ("games",) * count,
        tuple(range(first_group, first_group + count)),
        ("",) * count,
    )

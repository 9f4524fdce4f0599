"""The samples of a step that people are shown: the best, the worst and random ones."""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import Tensor

from rlhf_megatron.data.batch import ScoredBatch, Spans
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.observe.metrics.batch import response_lengths, valid_samples

PURPOSE = 5  # of the seed


@dataclass(frozen=True)
class Sample:
    """A line of samples.jsonl."""

    step: int
    kind: str  # best, worst or random
    prompt: str
    response: str
    label: str
    source: str
    reward: float | None  # None where the status is masked: there is none
    status: str  # "masked:<why>": left out of training
    parts: dict[str, float]  # named components of the reward
    finish_reason: str
    num_tokens: int  # of the response
    policy_version: int
    version_spans: Spans  # (version, start, end) each; (): all tokens are of `policy_version`
    num_cached_tokens: int | None  # of the prompt; None, here and below: the recorded step does not tell
    num_retractions: int | None


def choose(step: int, batch: ScoredBatch, count: int, seed: int) -> list[tuple[int, str]]:
    """(index, kind) of at most `count` different samples: a third best, a third worst, the rest random.

    Equal rewards are told apart by lot, and a masked sample is neither best nor worst. The lot depends on `seed` and
    `step` only, so that a replay shows the same.
    """
    order = list(range(len(batch)))
    random.Random(derive_seed(seed, step, PURPOSE)).shuffle(order)
    is_valid = valid_samples(batch).tolist()
    rewards = batch.rewards.tolist()
    ranked = sorted((i for i in order if is_valid[i]), key=lambda i: -rewards[i])
    num_best, num_worst = (count + 2) // 3, (count + 1) // 3
    best = ranked[:num_best]
    worst = ranked[len(best) :][::-1][:num_worst]
    taken = {*best, *worst}
    others = [i for i in order if i not in taken][: max(0, count - len(taken))]
    return [(i, "best") for i in best] + [(i, "worst") for i in worst] + [(i, "random") for i in others]


def samples_of(step: int, batch: ScoredBatch, count: int, seed: int) -> list[Sample]:
    """The chosen samples of a step in full."""
    lengths, is_valid = response_lengths(batch), valid_samples(batch)
    return [
        Sample(
            step=step,
            kind=kind,
            prompt=batch.prompts[i],
            response=batch.responses[i],
            label=batch.labels[i],
            source=batch.sources[i],
            reward=batch.rewards[i].item() if is_valid[i] else None,
            status=batch.reward_statuses[i],
            parts={name: part[i].item() for name, part in batch.reward_parts.items() if not part[i].isnan()},
            finish_reason=batch.finish_reasons[i],
            num_tokens=int(lengths[i]),
            policy_version=int(batch.policy_versions[i]),
            version_spans=batch.version_spans[i] if batch.version_spans is not None else (),
            num_cached_tokens=_entry(batch.num_cached_tokens, i),
            num_retractions=_entry(batch.num_retractions, i),
        )
        for i, kind in choose(step, batch, count, seed)
    ]


def _entry(column: Tensor | None, i: int) -> int | None:
    return None if column is None else int(column[i])

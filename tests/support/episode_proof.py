"""Proof that what trains in episodes is what engines sampled: every id, mask and log-prob against
what the engines answered and against transformers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from rollout_tools import tiny_qwen3

from rlhf_megatron.agents.episode_batch import collect_episode_batch
from rlhf_megatron.agents.episode_record import Episode, EpisodeTurn
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    GeneratedSample,
    GenerateRequest,
    InferenceEngine,
)

Answers = dict[tuple[tuple[int, ...], int], list[GeneratedSample]]


@dataclass
class AnswerRecorder:
    """Notes what engines answer, by prompt and seed; `connect` makes an engine that is watched."""

    connect: Callable[[EngineAddress], InferenceEngine]
    answers: Answers = field(default_factory=lambda: defaultdict(list))

    def __call__(self, address: EngineAddress) -> InferenceEngine:
        engine = self.connect(address)
        engine.generate_async = partial(  # type: ignore[method-assign]
            self._generate, engine.generate_async
        )
        return engine

    async def _generate(
        self,
        generate: Callable,
        requests: Sequence[GenerateRequest],
        timeout_s: float,
        name: str = "",
    ) -> list[list[GeneratedSample]]:
        groups = await generate(requests, timeout_s, name)
        for request, samples in zip(requests, groups, strict=True):
            for seed, sample in zip(request.seeds, samples, strict=True):
                self.answers[request.prompt_ids, seed].append(sample)
        return groups


@dataclass
class EpisodeProof:
    """What was compared."""

    num_episodes: int = 0
    num_turns: int = 0
    num_tokens: int = 0
    turns_of_episodes: Counter[int] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    num_turns_over_syncs: int = 0
    num_retractions: int = 0
    num_asked_again: int = 0  # turns that engines answered more than once
    largest_difference: float = 0.0  # of a log-prob from transformers'

    def __str__(self) -> str:
        return (
            f"{self.num_episodes} episodes ({dict(sorted(self.ends.items()))}), {self.num_turns}"
            f" turns, {self.num_tokens} sampled tokens; {self.num_turns_over_syncs} turns over a"
            f" sync, {self.num_retractions} retractions, {self.num_asked_again} turns answered"
            f" more than once; largest |difference| from transformers {self.largest_difference:.1e}"
        )


def prove_episodes(
    prompts: PromptBatch,
    groups: Sequence[Sequence[Episode]],
    answers: Answers,
    tokenizer: Tokenizer,
    *,
    run_seed: int,
    step: int,
    versions: Collection[int],
) -> EpisodeProof:
    """Compare each turn of each episode with the answers and the models of these versions."""
    proof = EpisodeProof()
    models = {version: tiny_qwen3(version) for version in versions}
    batch = collect_episode_batch(prompts, groups, tokenizer, max(versions))
    episodes = [
        (row, number, episode)
        for row, group in enumerate(groups)
        for number, episode in enumerate(group)
    ]
    for place, (row, number, episode) in enumerate(episodes):
        tokens = slice(int(batch.offsets[place]), int(batch.offsets[place + 1]))
        ids = batch.token_ids[tokens].tolist()
        sampled = [False] * len(ids)
        log_probs = batch.rollout_log_probs[tokens]
        assert ids == episode.token_ids.tolist()
        for turn_number, turn in enumerate(episode.turns):
            seed = derive_seed(run_seed, step, prompts.group_ids[row], number, turn_number)
            told = answers[tuple(ids[: turn.begin]), seed]
            found = [one for one in told if list(one.token_ids) == ids[turn.begin : turn.end]]
            assert found, f"turn {turn_number} of episode {row}.{number} was never sampled"
            by_batch = log_probs[turn.begin : turn.end]
            assert any(
                torch.equal(torch.tensor(one.log_probs, dtype=torch.float32), by_batch)
                and one.finish_reason == turn.finish_reason
                for one in found
            )
            sampled[turn.begin : turn.end] = [True] * (turn.end - turn.begin)
            _compare_turn(proof, models, ids, turn, by_batch)
            proof.num_asked_again += len(told) > 1
        assert batch.response_mask[tokens].tolist() == sampled, "the mask is exact"
        assert not sampled or not sampled[0]
        assert not episode.turns or sampled[-1], "an episode ends with a sampled token"
        assert not log_probs[~batch.response_mask[tokens]].any()
        proof.num_episodes += 1
        proof.ends[episode.end] += 1
        proof.turns_of_episodes[len(episode.turns)] += 1
    print(f"\n{proof}\nepisodes by turns: {dict(sorted(proof.turns_of_episodes.items()))}")
    return proof


def _compare_turn(
    proof: EpisodeProof,
    models: dict[int, torch.nn.Module],
    ids: list[int],
    turn: EpisodeTurn,
    log_probs: torch.Tensor,
) -> None:
    """Compare the log-probs of a turn with those of the model of each version span."""
    num_tokens = turn.end - turn.begin
    spans = turn.version_spans or ((turn.policy_version, 0, num_tokens),)
    for version, begin, end in spans:
        with torch.no_grad():
            rows = models[version](torch.tensor([ids[: turn.begin + end]])).logits[0].float()
        places = range(turn.begin + begin, turn.begin + end)
        by_model = rows.log_softmax(-1)[
            [place - 1 for place in places], [ids[place] for place in places]
        ]
        difference = (by_model - log_probs[begin:end]).abs().max().item()
        proof.largest_difference = max(proof.largest_difference, difference)
    proof.num_turns += 1
    proof.num_tokens += num_tokens
    proof.num_turns_over_syncs += len(spans) > 1
    proof.num_retractions += turn.num_retractions

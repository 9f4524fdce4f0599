"""Fixed prompts, continued by an engine and scored by the trainer: the check for an engine that
cannot tell digests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_megatron.algorithms.log_prob_mismatch import (
    compute_mismatch_statistics,
    find_worst_tokens,
)
from rlhf_megatron.config.schema import CheckConfig, RolloutConfig
from rlhf_megatron.controller.observe.metrics.mismatch_check import describe_exceeded_thresholds
from rlhf_megatron.data.batch import TokenBatch, compute_offsets
from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    GeneratedSample,
    GenerateRequest,
    InferenceEngine,
    SamplingParams,
)
from rlhf_megatron.runtime.role_proxies import ActorProxy

NUM_TOKENS = 16  # that are sampled for a prompt
_SEED = 20_000  # of the first; the others count up


class EngineWeightProbe:
    """Callable with an engine that serves. To be called while the hosts hold what the
    engine was sent.
    """

    def __init__(
        self,
        checks: CheckConfig,
        has_exact_weights: bool,
        rollout: RolloutConfig,
        max_response_length: int,
        token_budget: int,
        actor: ActorProxy,
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        """Make the probe of a run, on the first of its `prompts` (token ids). `has_exact_weights`:
        whether trainer and engines have the same float32 weights; `token_budget`: tokens of a
        micro-batch.
        """
        params = SamplingParams(min(NUM_TOKENS, max_response_length), rollout.temperature)
        self.actor = actor
        self.checks = checks
        self.has_exact_weights = has_exact_weights
        self.token_budget = token_budget
        self.timeout_s = rollout.request_timeout_s  # of the engine
        prompts = prompts[: checks.probe_prompts]
        self._requests = [
            GenerateRequest(ids, (_SEED + i,), params) for i, ids in enumerate(prompts)
        ]

    def __call__(self, engine: InferenceEngine) -> None:
        """Generate from the probe's prompts, and compare the engine's log-probs with the trainer's.
        Raise EngineError naming the token on which they differ most, when the difference is too
        large.
        """
        samples = [group[0] for group in engine.generate(self._requests, self.timeout_s)]
        if not all(sample.token_ids for sample in samples):
            raise EngineError(
                f"{engine.address.name} returned no token for a prompt of the probe; see its log."
            )
        tokens = self._make_token_batch(samples)
        by_engine = self._pack_engine_log_probs(samples)
        temperature = self._requests[0].params.temperature
        by_trainer = (
            self.actor.log_probs(tokens, self.token_budget, temperature=temperature)
            .result()
            .log_probs
        )
        found = compute_mismatch_statistics(by_engine, by_trainer, tokens.response_mask)
        past = describe_exceeded_thresholds(self.checks, self.has_exact_weights, found)
        if past:
            raise EngineError(
                f"{engine.address.name} does not sample from the weights that it was sent: over"
                f" {int(tokens.response_mask.sum())} tokens after {len(samples)} prompts"
                f" {'; '.join(past)}; the worst is"
                f" {_describe_worst_token(by_engine, by_trainer, tokens)}. It is STALE."
            )

    def _make_token_batch(self, samples: Sequence[GeneratedSample]) -> TokenBatch:
        """Return each prompt with its sampled response as a batch; the mask is True on the
        responses.
        """
        rows = [(r.prompt_ids, s.token_ids) for r, s in zip(self._requests, samples, strict=True)]
        return TokenBatch(
            offsets=compute_offsets(
                torch.tensor([len(prompt) + len(response) for prompt, response in rows])
            ),
            token_ids=torch.tensor([token for row in rows for part in row for token in part]),
            response_mask=torch.tensor(
                [is_new for row in rows for is_new in (0, 1) for _ in row[is_new]]
            )
            == 1,
        )

    def _pack_engine_log_probs(self, samples: Sequence[GeneratedSample]) -> Tensor:
        """Return the log-probs that the engine reported, [T] float32, zero on prompts."""
        rows = zip(self._requests, samples, strict=True)
        return torch.tensor(
            [x for r, s in rows for x in (*(0.0 for _ in r.prompt_ids), *s.log_probs)]
        )


def _describe_worst_token(
    engine_log_probs: Tensor, trainer_log_probs: Tensor, tokens: TokenBatch
) -> str:
    """Return a text on the token on which engine and trainer differ most."""
    position = int(
        find_worst_tokens(engine_log_probs, trainer_log_probs, tokens.response_mask, 1)[0]
    )
    prompt = int(torch.searchsorted(tokens.offsets, position, right=True)) - 1
    place = int(tokens.response_mask[tokens.offsets[prompt] : position].sum())
    return (
        f"token {int(tokens.token_ids[position])} at place {place} after prompt {prompt}: log-prob"
        f" {engine_log_probs[position]:.5f} by the engine, {trainer_log_probs[position]:.5f} by"
        " the trainer"
    )

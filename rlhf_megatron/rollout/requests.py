"""Prompts to engine requests, and what engines return to a RolloutBatch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlhf_megatron.config.schema import SamplingConfig
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, Spans, offsets_from_lengths
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rollout.engine import GeneratedSample, GenerateRequest, SamplingParams


def sampling_params(sampling: SamplingConfig, max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The settings of a configuration as an engine takes them."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=sampling.temperature,
        stop_token_ids=stop_token_ids,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def build_requests(
    prompts: PromptBatch, num_samples: int, params: SamplingParams, seed: int, step: int
) -> list[GenerateRequest]:
    """One request a prompt; each sample's seed comes from (seed, step, group, sample)."""
    return [
        GenerateRequest(ids, tuple(derive_seed(seed, step, group, i) for i in range(num_samples)), params)
        for ids, group in zip(prompts.prompt_ids, prompts.group_ids, strict=True)
    ]


def collect(prompts: PromptBatch, groups: Sequence[Sequence[GeneratedSample]], tokenizer: Tokenizer) -> RolloutBatch:
    """The samples of all groups as one ragged batch, groups in order."""
    token_ids: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    lengths: list[int] = []
    flat = [(row, sample) for row, group in enumerate(groups) for sample in group]
    for row, sample in flat:
        prompt = prompts.prompt_ids[row]
        token_ids += [*prompt, *sample.token_ids]
        mask += [False] * len(prompt) + [True] * len(sample.token_ids)
        log_probs += [0.0] * len(prompt) + list(sample.log_probs)
        lengths.append(len(prompt) + len(sample.token_ids))
    num_samples = len(groups[0])
    sample_ids = [prompts.group_ids[row] * num_samples + i % num_samples for i, (row, _) in enumerate(flat)]
    return RolloutBatch(
        offsets=offsets_from_lengths(torch.tensor(lengths)),
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
        rollout_log_probs=torch.tensor(log_probs, dtype=torch.float32),
        group_ids=torch.tensor([prompts.group_ids[row] for row, _ in flat], dtype=torch.int64),
        sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
        policy_versions=torch.tensor([sample.policy_version for _, sample in flat], dtype=torch.int64),
        finish_reasons=tuple(sample.finish_reason for _, sample in flat),
        prompts=tuple(prompts.prompts[row] for row, _ in flat),
        responses=tuple(tokenizer.decode(sample.token_ids) for _, sample in flat),
        labels=tuple(prompts.labels[row] for row, _ in flat),
        sources=tuple(prompts.sources[row] for row, _ in flat),
        extras=tuple(prompts.extras[row] for row, _ in flat),
        version_spans=tuple(spans_of(sample) for _, sample in flat),
        num_cached_tokens=torch.tensor([sample.num_cached_tokens for _, sample in flat], dtype=torch.int64),
        num_retractions=torch.tensor([sample.num_retractions for _, sample in flat], dtype=torch.int64),
    )


def spans_of(sample: GeneratedSample) -> Spans:
    """Returns the sample's version spans as plain numbers: `data` knows no engines."""
    return tuple((span.version, span.start, span.end) for span in sample.version_spans)

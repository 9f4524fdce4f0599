"""Prompts to engine requests, and what engines return to a RolloutBatch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlhf_megatron.config.schema import SamplingConfig
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch, compute_offsets
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.group_columns import make_plain_version_spans


def make_sampling_params(
    sampling: SamplingConfig, max_new_tokens: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Return the engine's sampling parameters for these settings of the configuration."""
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=sampling.temperature,
        stop_token_ids=stop_token_ids,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def build_generate_requests(
    prompts: PromptBatch,
    num_samples: int,
    params: SamplingParams,
    seed: int,
    step: int,
    routes_dir_and_bytes: tuple[str, int] = ("", 0),
) -> list[GenerateRequest]:
    """Return one request for each prompt. The seed of each of its `num_samples` samples comes from
    (seed, step, group id, sample index). `routes_dir_and_bytes`: the directory for the expert-route
    files, "" for none, and the bytes that they may take.
    """

    def derive_sample_seeds(group: int) -> tuple[int, ...]:
        """Return the seeds of the samples of this group."""
        return tuple(derive_seed(seed, step, group, i) for i in range(num_samples))

    return [
        GenerateRequest(
            ids,
            derive_sample_seeds(group),
            params,
            routes_dir=routes_dir_and_bytes[0],
            routes_bytes=routes_dir_and_bytes[1],
        )
        for ids, group in zip(prompts.prompt_ids, prompts.group_ids, strict=True)
    ]


def collect_rollout_batch(
    prompts: PromptBatch, groups: Sequence[Sequence[GeneratedSample]], tokenizer: Tokenizer
) -> RolloutBatch:
    """Join the prompts and the samples of all groups to one ragged batch, in the order of the
    groups, with the responses decoded to text. All groups must have the same number of samples.
    """
    flat = [(row, sample) for row, group in enumerate(groups) for sample in group]
    lengths = [len(prompts.prompt_ids[row]) + len(sample.token_ids) for row, sample in flat]
    token_ids = np.empty(sum(lengths), np.int32)
    mask = np.zeros(sum(lengths), np.bool_)
    log_probs = np.zeros(sum(lengths), np.float32)
    end = 0
    for (row, sample), length in zip(flat, lengths, strict=True):
        start = end
        end = end + length
        begin = end - len(sample.token_ids)
        token_ids[start:begin] = prompts.prompt_ids[row]
        token_ids[begin:end] = sample.token_ids
        mask[begin:end] = True
        log_probs[begin:end] = sample.log_probs
    num_samples = len(groups[0])
    sample_ids = [
        prompts.group_ids[row] * num_samples + i % num_samples for i, (row, _) in enumerate(flat)
    ]
    return RolloutBatch(
        offsets=compute_offsets(torch.tensor(lengths)),
        token_ids=torch.from_numpy(token_ids),
        response_mask=torch.from_numpy(mask),
        rollout_log_probs=torch.from_numpy(log_probs),
        group_ids=torch.tensor([prompts.group_ids[row] for row, _ in flat], dtype=torch.int64),
        sample_ids=torch.tensor(sample_ids, dtype=torch.int64),
        routes=tuple(sample.routes for _, sample in flat),
        policy_versions=torch.tensor(
            [sample.policy_version for _, sample in flat], dtype=torch.int64
        ),
        finish_reasons=tuple(sample.finish_reason for _, sample in flat),
        prompts=tuple(prompts.prompts[row] for row, _ in flat),
        responses=tuple(tokenizer.decode(sample.token_ids) for _, sample in flat),
        labels=tuple(prompts.labels[row] for row, _ in flat),
        sources=tuple(prompts.sources[row] for row, _ in flat),
        extras=tuple(prompts.extras[row] for row, _ in flat),
        version_spans=tuple(make_plain_version_spans(sample) for _, sample in flat),
        num_cached_tokens=torch.tensor(
            [sample.num_cached_tokens for _, sample in flat], dtype=torch.int64
        ),
        num_retractions=torch.tensor(
            [sample.num_retractions for _, sample in flat], dtype=torch.int64
        ),
    )

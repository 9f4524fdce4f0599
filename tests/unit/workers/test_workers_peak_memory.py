"""The peak that `check` and `plan` compute is what torch's CUDA allocator counted on ranks
of five recipes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf_megatron.config.rules.run_rules import count_actor_ranks
from rlhf_megatron.planning.check.memory_table import estimate_actor_head_memory
from rlhf_megatron.ranks.workers.peak_memory import (
    TrainedModelSpec,
    estimate_stage_activation_bytes,
    estimate_state_bytes,
)
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import make_parallel_layout
from tools.cuda_rehearsal.alone.memory import Peak, config_of, questions, recorded

PEAKS = recorded()


def test_every_shape_was_counted() -> None:
    assert [(peak.shape, peak.recompute, peak.stage) for peak in PEAKS] == questions()


@pytest.mark.parametrize(
    "peak", PEAKS, ids=lambda peak: f"{peak.shape}-{peak.recompute}-{peak.stage}"
)
def test_the_peak_is_what_was_counted(peak: Peak) -> None:
    config = config_of(peak.shape, peak.recompute)
    hf_config = read_hf_config(Path(config.model.path))
    megatron = config.actor.megatron
    if megatron.recompute_granularity == "none":
        megatron = replace(megatron, recompute_granularity=None)
    layout = make_parallel_layout(megatron, count_actor_ranks(config))
    model = TrainedModelSpec(hf_config, torch.bfloat16, peak.tokens)
    assert str(layout) == peak.layout and peak.tokens == config.actor.ppo_max_token_len_per_gpu
    states = estimate_state_bytes(model, megatron, layout, peak.stage)
    kept = estimate_stage_activation_bytes(model, megatron, layout, "local", peak.stage)
    head = estimate_actor_head_memory(config.actor, hf_config, torch.bfloat16, is_cpu=False)
    of_head = head.peak_bytes if head is not None and peak.stage == layout.pp - 1 else 0
    assert states <= peak.states <= 1.07 * states  # with what layers keep between updates
    assert peak.peak == pytest.approx(states + kept + of_head, rel=0.06)

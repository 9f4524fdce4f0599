"""PF-PPO in a step: what is drawn keeps its columns, is the same for the same seed and step, and
nothing masked.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from scheduler_samples import train_batch

from rlhf_megatron.config.schema import PFPPOConfig
from rlhf_megatron.controller.scheduler.scored_samples import resample_batch
from rlhf_megatron.data.batch import TrainBatch, select_samples

ON = PFPPOConfig(enable=True)


def rows(batch: TrainBatch) -> list[tuple[object, ...]]:
    """Each sample with all of its columns."""
    found = []
    for i in range(len(batch)):
        one = select_samples(batch, [i])
        columns = [getattr(one, f.name) for f in fields(one) if f.name != "offsets"]
        found.append(
            tuple(str(c.tolist()) if isinstance(c, torch.Tensor) else str(c) for c in columns)
        )
    return found


def test_rows_and_weights_stay_paired() -> None:
    batch = train_batch()
    drawn, _ = resample_batch(batch, ON, seed=3, step=1)
    known = rows(batch)
    assert len(drawn) == len(batch) and set(rows(drawn)) < set(known)
    for i in range(len(drawn)):
        tokens = slice(int(drawn.offsets[i]), int(drawn.offsets[i + 1]))
        sample = int(drawn.sample_ids[i])
        assert drawn.rewards[i] == sample and set(drawn.token_ids[tokens].tolist()) == {
            100 + sample
        }
        assert drawn.advantages[tokens].tolist() == [0.0] + [float(sample)] * (sample + 1)


def test_a_reward_of_zero_is_never_drawn_and_the_largest_are_drawn_most() -> None:
    """|r|^2 of rewards 0 .. 9 sums to 285: sample 9 has 81 of them, 2.84 of 10 draws; the smaller
    half 30 / 285.
    """
    batch = train_batch()
    counts = torch.zeros(10)
    for step in range(400):
        drawn, _ = resample_batch(batch, ON, seed=0, step=step)
        counts += torch.bincount(drawn.sample_ids, minlength=10)
    shares = counts / counts.sum()
    assert counts[0] == 0
    # The standard deviation of a share p of 4000 draws is sqrt(p (1 - p) / 4000): 0.0071
    # for the largest.
    assert shares[9].item() == pytest.approx(81 / 285, abs=0.03)
    assert shares[:5].sum().item() == pytest.approx(30 / 285, abs=0.02)


def test_the_draw_is_that_of_seed_and_step() -> None:
    batch = train_batch()
    first = resample_batch(batch, ON, seed=3, step=1)[0].sample_ids.tolist()
    assert first == resample_batch(batch, ON, seed=3, step=1)[0].sample_ids.tolist()
    others = {
        tuple(resample_batch(batch, ON, seed, step)[0].sample_ids.tolist())
        for seed, step in [(3, 2), (4, 1), (1, 3)]
    }
    assert len(others) == 3 and tuple(first) not in others


def test_what_is_masked_is_not_drawn_and_the_metric_counts_what_is_left() -> None:
    batch = train_batch()
    statuses = ("ok", "ok", *("masked:worker_died",) * 8)
    drawn, metrics = resample_batch(replace(batch, reward_statuses=statuses), ON, seed=1, step=1)
    assert drawn.sample_ids.tolist() == [1] * 10, "sample 0 has reward 0"
    assert metrics == {"pf_ppo/distinct_samples": 0.1}


def test_switched_off_it_is_the_batch_itself() -> None:
    batch = train_batch()
    drawn, metrics = resample_batch(batch, PFPPOConfig(), seed=1, step=1)
    assert drawn is batch and metrics == {}

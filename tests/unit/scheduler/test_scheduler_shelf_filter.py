"""Groups without signal give way to other prompts: until the step is full, the batches are used up,
or none teaches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import MODEL

from rlhf_megatron.algorithms.metric_names import find_matching_metric
from rlhf_megatron.config.schema import (
    AlgorithmConfig,
    DataConfig,
    FilterGroupsConfig,
    RolloutConfig,
    RunConfig,
)
from rlhf_megatron.controller.observe.metrics.metric_catalogue import METRIC_CATALOGUE as METRICS
from rlhf_megatron.controller.recovery.route_file_retention import RouteFileRetention
from rlhf_megatron.controller.recovery.run_journal import StepJournal
from rlhf_megatron.controller.scheduler.algorithm_setup import RunData, load_algorithm_setup
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data.batch import AnnotatedBatch, ScoredBatch, add_columns
from rlhf_megatron.data.expert_route_files import write_route_file
from rlhf_megatron.data.item_stream import PromptStream
from rlhf_megatron.data.prompt_items import PromptItem, PromptSource
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest

# By the token of the prompt: 2 samples are right and wrong (M), both right (R), both wrong (W).
KINDS = "RMWWRMMRWMRRWWMM"


class Killed(Exception):
    """The process is gone."""


class Fleet:
    """A prompt's samples are as its kind says; asks for nothing that is `known`."""

    def __init__(self, kinds: str = KINDS, stops_after: int | None = None) -> None:
        self.tokenizer = load_tokenizer(MODEL)
        self.kinds = kinds
        self.stops_after = stops_after
        self.num_asked = 0

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_groups: Callable[[int, Sequence[Sequence[GeneratedSample]]], None],
        known: Mapping[int, list[GeneratedSample]],
    ) -> list[list[GeneratedSample]]:
        assert all(0 <= index < len(requests) for index in known)
        groups = []
        for index, request in enumerate(requests):
            texts = {"M": ["1", "9"], "R": ["1", "1"], "W": ["9", "9"]}[
                self.kinds[request.prompt_ids[0] - 2]
            ]
            encoded = [self.tokenizer.encode(text) for text in texts[: len(request.seeds)]]
            group = [GeneratedSample(tuple(ids), (-0.5,) * len(ids), "stop", 1) for ids in encoded]
            if index not in known:
                if self.num_asked == self.stops_after:
                    raise Killed
                self.num_asked += 1
                on_groups(index, [group])
            assert known.get(index, group) == group, "the journal's groups belong to these prompts"
            groups.append(group)
        return groups

    def take_counters(self) -> dict[str, float]:
        return {}


def reward(samples: Sequence[RewardSample]) -> list[RewardResult]:
    """1 for "1". The part says the other thing of the second half of the prompts."""
    return [
        RewardResult(float(s.response == "1"), parts={"length": float(int(s.prompt) % 2)})
        for s in samples
    ]


def stream_of(count: int = len(KINDS)) -> PromptStream:
    items = tuple(PromptItem((i + 2,), str(i), "1", "s") for i in range(count))
    return PromptStream([PromptSource("s", 1.0, items)], batch_size=4, shuffle=False, seed=0)


def stages_of(
    fleet: Fleet, journal: StepJournal | None = None, estimator: str = "rloo", **settings: object
) -> StepStages:
    filter_groups = FilterGroupsConfig(**{"enable": True, **settings})  # type: ignore[arg-type]
    config = RunConfig(
        algorithm=AlgorithmConfig(adv_estimator=estimator, filter_groups=filter_groups),
        data=replace(DataConfig(), task="addition", train_batch_size=4),
        rollout=RolloutConfig(n=2),
    )
    data = RunData(stream_of(), (), fleet.tokenizer, (14,))
    return StepStages(
        config,
        None,
        fleet,
        data,
        load_algorithm_setup(config),
        PolicySync(1),
        reward,
        journal=journal,  # type: ignore[arg-type]
    )


def run(stages: StepStages, step: int = 1) -> ScoredBatch:
    scored = stages.score_rollout(step, stages.generate_rollout(step, stages.draw_prompts(step)))
    if stages.journal is not None:
        stages.journal.wait_for_write()
    return scored


def prompts_of(batch: ScoredBatch) -> list[int]:
    return [int(prompt) for prompt in batch.prompts[::2]]


def drawn(stages: StepStages) -> int:
    assert stages.run_data.stream is not None
    return stages.run_data.stream.num_drawn


def test_prompts_follow_until_the_step_is_full() -> None:
    """KINDS has mixed groups at 1 | 5 6 | 9 | 14 15:
    the fourth group comes with the third batch.
    """
    stages = stages_of(Fleet())
    batch = run(stages)
    assert prompts_of(batch) == [1, 5, 6, 9] and batch.group_ids.tolist() == [
        1,
        1,
        5,
        5,
        6,
        6,
        9,
        9,
    ]
    assert batch.sample_ids.tolist() == [2, 3, 10, 11, 12, 13, 18, 19]
    assert batch.rewards.tolist() == [1, 0] * 4
    found = {
        key: value
        for key, value in stages._step_metrics.items()
        if key.startswith("filter_groups/")
    }
    assert found == {
        "filter_groups/num_gen_batches": 3.0,
        "filter_groups/kept": pytest.approx(4 / 12),
        "filter_groups/num_groups": 4.0,
    }
    assert all(find_matching_metric(METRICS, key) for key in found)
    assert drawn(stages) == 12
    assert prompts_of(run(stages, 2))[:2] == [14, 15], (
        "the next step goes on behind what this one drew"
    )


def test_what_is_over_is_left_out() -> None:
    assert prompts_of(run(stages_of(Fleet("RMMMMMMMMMMMMMMM")))) == [1, 2, 3, 4]


def test_without_the_filter_a_step_has_its_prompts() -> None:
    stages = stages_of(Fleet(), enable=False)
    assert prompts_of(run(stages)) == [0, 1, 2, 3] and drawn(stages) == 4


def test_a_step_trains_on_what_stands_when_the_batches_are_used_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stages = stages_of(Fleet(), max_num_gen_batches=2)
    with caplog.at_level(logging.WARNING):
        batch = run(stages)
    assert prompts_of(batch) == [1, 5, 6] and drawn(stages) == 8
    assert stages._step_metrics["filter_groups/num_groups"] == 3.0
    assert (
        "algorithm.filter_groups: 3 of 4 groups differ in the main reward after 2 batches"
        " (max_num_gen_batches); the step trains on those."
    ) in caplog.text


def test_where_none_teaches_nothing_is_updated(caplog: pytest.LogCaptureFixture) -> None:
    """`group` is None: an update that sent anything would fail."""
    stages = stages_of(Fleet("R" * 16), max_num_gen_batches=2)
    with caplog.at_level(logging.WARNING):
        scored = run(stages)
    assert (
        "0 of 4 groups differ in the main reward after 2 batches (max_num_gen_batches); no update"
        " in this step"
    ) in caplog.text
    assert prompts_of(scored) == [0, 1, 2, 3] and drawn(stages) == 8
    old = torch.zeros(scored.num_tokens)
    train = stages.compute_advantages(1, add_columns(AnnotatedBatch, scored, old_log_probs=old))
    _, metrics = stages.update_models(1, train)
    assert (
        metrics["actor/num_optimizer_steps"] == 0.0 and metrics["filter_groups/num_groups"] == 0.0
    )
    assert stages.sync_weights()["policy/version"] == 1.0, (
        "the policy is as it was: nothing is sent"
    )


def test_the_metric_may_be_a_part_of_the_reward() -> None:
    """`length` is the same for both samples of every prompt."""
    stages = stages_of(Fleet(), metric="length", max_num_gen_batches=1)
    run(stages)
    assert stages._step_metrics["filter_groups/num_groups"] == 0.0


def test_greedy_samples_come_with_every_batch() -> None:
    """The greedy sample is right where the first of the samples is: in all mixed groups."""
    batch = run(stages_of(Fleet(), estimator="remax"))
    assert prompts_of(batch) == [1, 5, 6, 9]
    assert batch.greedy_rewards is not None and batch.greedy_rewards.tolist() == [1.0] * 8


@pytest.mark.parametrize("stops_after", [0, 3, 4, 6, 11])
@pytest.mark.parametrize("estimator", ["rloo", "remax"])
def test_a_killed_step_goes_on_where_it_was(
    tmp_path: Path, stops_after: int, estimator: str
) -> None:
    """Killed before, in and between batches of 4 prompts; the same step comes out, and the same
    place of the stream.
    """
    whole = run(stages_of(straight := Fleet(), estimator=estimator))
    with pytest.raises(Killed):
        run(stages_of(Fleet(stops_after=stops_after), StepJournal(tmp_path, "same"), estimator))
    again = stages_of(fleet := Fleet(), StepJournal(tmp_path, "same"), estimator)
    batch = run(again)
    assert fleet.num_asked == straight.num_asked - stops_after
    assert torch.equal(batch.token_ids, whole.token_ids) and torch.equal(
        batch.sample_ids, whole.sample_ids
    )
    assert drawn(again) == 12


def test_a_step_that_the_journal_has_leaves_the_stream_where_it_had(tmp_path: Path) -> None:
    first = stages_of(Fleet(), StepJournal(tmp_path, "same"))
    batch = run(first)
    after = run(first, 2)
    again = stages_of(fleet := Fleet(), StepJournal(tmp_path, "same"))
    assert (
        prompts_of(run(again)) == prompts_of(batch) and fleet.num_asked == 0 and drawn(again) == 12
    )
    assert again._step_metrics["filter_groups/num_gen_batches"] == 3.0
    assert prompts_of(run(again, 2)) == prompts_of(after) and drawn(again) == drawn(first)


def test_files_of_routes_of_groups_that_are_left_out_go(tmp_path: Path) -> None:
    class Routed(Fleet):
        def generate(self, *arguments: Any) -> list[list[GeneratedSample]]:
            groups = super().generate(*arguments)
            return [
                [
                    replace(s, routes=write_route_file(str(tmp_path), np.ones((1, 2), int)))
                    for s in g
                ]
                for g in groups
            ]

    stages = stages_of(Routed())
    stages.route_files = RouteFileRetention(tmp_path)
    batch = run(stages)
    assert drawn(stages) == 12 and batch.routes is not None
    assert {str(path) for path in tmp_path.iterdir()} == set(batch.routes)


def test_a_checkpoint_keeps_the_place_of_the_stream() -> None:
    first = stages_of(Fleet())
    run(first)
    assert first.run_data.stream is not None
    cursor = first.run_data.stream.make_cursor()
    resumed = stream_of()
    resumed.restore_cursor(cursor)
    assert resumed.draw_more_prompts().group_ids == (12, 13, 14, 15)

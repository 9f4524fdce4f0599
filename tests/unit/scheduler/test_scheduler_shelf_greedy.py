"""One greedy sample a prompt: asked for with the step's own, scored with them, kept as a column
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.recovery.run_journal import StepJournal
from rlhf_megatron.controller.scheduler.algorithm_setup import RunData, load_algorithm_setup
from rlhf_megatron.controller.scheduler.scored_samples import select_groups
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    PromptBatch,
    ScoredBatch,
    add_columns,
    select_samples,
)
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.reward_types import make_masked_result
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest

PROMPTS = PromptBatch(
    ((3, 4), (5,), (6, 7)),
    ("34", "5", "67"),
    ("12", "12", "12"),
    ("s",) * 3,
    (10, 11, 12),
    ("",) * 3,
)
SAMPLED = [["12", "9"], ["9", "12"], ["12", "12"]]
GREEDY = [["12"], ["999"], ["8"]]


class Killed(Exception):
    """The process is gone."""


class Fleet:
    """Knows the answer to each request by its place; asks for nothing that is `known`."""

    def __init__(self, stops_after: int | None = None) -> None:
        self.tokenizer = load_tokenizer(MODEL)
        self.requests: list[GenerateRequest] = []
        self.asked: list[int] = []
        self.stops_after = stops_after

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_groups: Callable[[int, Sequence[Sequence[GeneratedSample]]], None],
        known: Mapping[int, list[GeneratedSample]],
    ) -> list[list[GeneratedSample]]:
        self.requests = list(requests)
        groups = []
        for index, texts in enumerate([*SAMPLED, *GREEDY][: len(requests)]):
            encoded = [self.tokenizer.encode(text) for text in texts]
            group = [GeneratedSample(tuple(ids), (-0.5,) * len(ids), "stop", 1) for ids in encoded]
            if index not in known:
                if len(self.asked) == self.stops_after:
                    raise Killed
                self.asked.append(index)
                on_groups(index, [group])
            groups.append(known.get(index, group))
        return groups


def reward(samples: Sequence[RewardSample]) -> list[RewardResult]:
    """1 for the label; a response that begins with 8 cannot be judged."""
    return [
        make_masked_result("worker_died")
        if s.response.startswith("8")
        else RewardResult(float(s.response == s.label))
        for s in samples
    ]


def stages_of(
    estimator: str, fleet: Fleet, journal: StepJournal | None = None, num_gen_batches: int = 0
) -> StepStages:
    """`num_gen_batches`: above 0, groups are filtered, and a step is to have 2."""
    filtering = FilterGroupsConfig(num_gen_batches > 0, max_num_gen_batches=max(1, num_gen_batches))
    config = RunConfig(
        algorithm=AlgorithmConfig(adv_estimator=estimator, filter_groups=filtering),
        data=replace(DataConfig(), task="addition", train_batch_size=2),
        rollout=RolloutConfig(n=2),
    )
    data = RunData(None, (), fleet.tokenizer, (14,))
    return StepStages(
        config, None, fleet, data, load_algorithm_setup(config), dict, reward, journal=journal
    )  # type: ignore[arg-type]


def run(stages: StepStages) -> ScoredBatch:
    scored = stages.score_rollout(1, stages.generate_rollout(1, PROMPTS))
    if stages.journal is not None:
        stages.journal.wait_for_write()
    return scored


def test_a_greedy_sample_a_prompt_goes_with_the_batch_and_leaves_its_reward() -> None:
    stages = stages_of("remax", fleet := Fleet())
    scored = run(stages)
    assert [(len(r.seeds), r.params.temperature) for r in fleet.requests] == [(2, 1.0)] * 3 + [
        (1, 0.0)
    ] * 3
    assert [r.prompt_ids for r in fleet.requests] == list(PROMPTS.prompt_ids) * 2
    assert len(scored) == 6 and scored.responses == ("12", "9", "9", "12", "12", "12")
    assert scored.rewards.tolist() == [1, 0, 0, 1, 1, 1] and scored.reward_statuses == ("ok",) * 6
    assert scored.greedy_rewards is not None
    assert scored.greedy_rewards[:4].tolist() == [1, 1, 0, 0] and bool(
        scored.greedy_rewards[4:].isnan().all()
    )


def test_advantages_go_against_the_greedy_reward_and_metrics_count_it_apart() -> None:
    stages = stages_of("remax", Fleet())
    train = stages.compute_advantages(1, add_columns(AnnotatedBatch, run(stages)))
    first = [
        train.advantages[start:end][train.response_mask[start:end]]
        for start, end in _spans(train.offsets)
    ]
    assert [set(a.tolist()) for a in first] == [{0.0}, {-1.0}, {0.0}, {1.0}, {0.0}, {0.0}]
    found = {
        name: value for name, value in stages._step_metrics.items() if name.startswith("greedy/")
    }
    assert found == {
        "greedy/rewards/mean": 0.5,
        "greedy/rewards/max": 1.0,
        "greedy/rewards/min": 0.0,
        "greedy/masked": pytest.approx(1 / 3),
        "greedy/response_length/mean": 2.0,
        "greedy/response_length/max": 3.0,
        "greedy/response_length/min": 1.0,
    }
    assert all(find_matching_metric(METRICS, name) for name in found)


def test_lengths_of_greedy_samples_are_those_of_the_groups_that_stay() -> None:
    """The third group is right in both samples: its greedy response of one token goes with it."""
    stages = stages_of("remax", Fleet(), num_gen_batches=1)
    assert run(stages).group_ids.tolist() == [10, 10, 11, 11]
    assert stages._step_metrics["greedy/response_length/mean"] == 2.5
    assert stages._step_metrics["greedy/response_length/min"] == 2.0


def test_lengths_of_greedy_samples_are_of_all_batches_of_a_step() -> None:
    batch = run(stages_of("rloo", Fleet()))
    both = select_groups(
        [select_samples(batch, [0, 2]), select_samples(batch, [4])], torch.tensor([10, 12])
    )
    assert both.group_ids.tolist() == [10, 12] and both.responses == ("12", "12")


def _spans(offsets: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))


def test_other_estimators_ask_for_none() -> None:
    stages = stages_of("rloo", fleet := Fleet())
    assert run(stages).greedy_rewards is None and len(fleet.requests) == 3


@pytest.mark.parametrize("stops_after", [0, 2, 4, 5])
def test_what_was_generated_before_a_kill_is_not_asked_for_again(
    tmp_path: Path, stops_after: int
) -> None:
    with pytest.raises(Killed):
        run(stages_of("remax", Fleet(stops_after), StepJournal(tmp_path, "same")))
    again = stages_of("remax", fleet := Fleet(), StepJournal(tmp_path, "same"))
    scored = run(again)
    whole = run(stages_of("remax", Fleet()))
    assert fleet.asked == list(range(stops_after, 6))
    assert torch.equal(scored.token_ids, whole.token_ids) and torch.equal(
        scored.rewards, whole.rewards
    )
    assert scored.greedy_rewards is not None and whole.greedy_rewards is not None
    torch.testing.assert_close(
        scored.greedy_rewards, whole.greedy_rewards, rtol=0, atol=0, equal_nan=True
    )


def test_the_journal_and_a_record_keep_the_column(tmp_path: Path) -> None:
    scored = run(stages_of("remax", Fleet(), StepJournal(tmp_path / "journal", "same")))
    after = stages_of("remax", fleet := Fleet(), StepJournal(tmp_path / "journal", "same"))
    regained = run(after)
    assert fleet.requests == [] and after._step_metrics["greedy/response_length/max"] == 3.0
    RolloutRecorder(tmp_path / "record").write_step(1, scored)
    for found in (regained, RolloutRecorder(tmp_path / "record").read_step(1)):
        assert found.greedy_rewards is not None and scored.greedy_rewards is not None
        torch.testing.assert_close(
            found.greedy_rewards, scored.greedy_rewards, rtol=0, atol=0, equal_nan=True
        )


def test_a_record_without_greedy_samples_cannot_be_replayed_with_remax() -> None:
    scored = run(stages_of("rloo", Fleet()))
    with pytest.raises(
        ValueError,
        match="this step was recorded without them; record a run that has this estimator",
    ):
        stages_of("remax", Fleet()).compute_advantages(1, add_columns(AnnotatedBatch, scored))

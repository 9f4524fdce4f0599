"""A run whose engines, rewards and trainer only sleep: the real loop, supplies, session and fleet,
for the simulator.

Engines make a token of each response at a time, tick by tick, in real time; the simulator
never sees a token.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from supply_tools import READER, TOKENIZER
from watched_foreground import WatchedForeground

from rlhf_megatron.config.schema import FilterGroupsConfig, ScheduleConfig
from rlhf_megatron.controller.recovery.save_policy import SavePolicy
from rlhf_megatron.controller.scheduler.loop import LoopPlan, run_training_loop
from rlhf_megatron.controller.scheduler.schedules import load_schedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowEvent, GroupFlow
from rlhf_megatron.controller.scheduler.schedules.synchronous import SynchronousSchedule
from rlhf_megatron.controller.scheduler.scored_samples import make_reward_samples, make_scored_batch
from rlhf_megatron.controller.scheduler.supply.background_supply import (
    BackgroundSupply,
    SupplyServices,
)
from rlhf_megatron.controller.scheduler.supply.supply_threads import GroupScorer
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    add_columns,
)
from rlhf_megatron.data.item_stream import PromptStream
from rlhf_megatron.data.prompt_items import PromptItem, PromptSource
from rlhf_megatron.planning.simulator.durations import SimulatedWorkload
from rlhf_megatron.planning.simulator.simulation_plan import SimulationPlan
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.rollout_requests import build_generate_requests, collect_rollout_batch

PROMPT_TOKENS = 2
NUM_PROMPTS = 100
TOKEN = 3
FIRST_ID = 2


@dataclass(eq=False)
class Row:
    """A response on its way."""

    name: str  # of the call
    length: int
    versions: list[int] = field(default_factory=list)  # of each token so far
    is_over: bool = False


class SleepingEngine:
    """An `Engine`. `seconds_a_token[n]`: a tick with n responses; as many slots as it has entries
    behind the first.
    """

    def __init__(
        self, number: int, seconds_a_token: Sequence[float], workload: SimulatedWorkload
    ) -> None:
        self.address = EngineAddress(f"engine{number}", "local", "", "")
        self._pace = seconds_a_token
        self._workload = workload
        self._served: int | None = 1
        self._changed = threading.Condition()
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._is_paused = self._is_closed = False
        self._waiters = ThreadPoolExecutor(1000)  # a call each
        threading.Thread(target=self._decode, daemon=True).start()

    async def generate_async(
        self, requests: Sequence[GenerateRequest], timeout_s: float, name: str = ""
    ) -> list[list[GeneratedSample]]:
        groups = [[Row(name, length) for length in self._lengths(request)] for request in requests]
        rows = [row for group in groups for row in group]
        with self._changed:
            self._waiting += rows
            self._changed.notify_all()
        await asyncio.get_running_loop().run_in_executor(self._waiters, self._await_end, rows)
        return [[_sample(row) for row in group] for group in groups]

    def _await_end(self, rows: Sequence[Row]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(row.is_over for row in rows), 600)

    def abort_calls(self, call_names: Collection[str] = ()) -> None:
        with self._changed:
            for row in [*self._running, *self._waiting]:
                row.is_over |= not call_names or row.name in call_names
            self._waiting = deque(row for row in self._waiting if not row.is_over)
            self._running = [row for row in self._running if not row.is_over]
            self._changed.notify_all()

    def get_max_running_samples(self) -> int | None:
        return len(self._pace) - 1

    def begin_weight_update(self, version: int, is_full_resync: bool = False) -> None:
        with self._changed:
            self._is_paused = True

    def commit_weight_update(self, version: int) -> None:
        with self._changed:
            self._served = version
            self._is_paused = False
            self._changed.notify_all()

    def get_served_version(self) -> int | None:
        return self._served

    def check_health(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _lengths(self, request: GenerateRequest) -> tuple[int, ...]:
        low, high = request.prompt_ids
        return self._workload.draw_response_lengths(low - FIRST_ID + 10 * (high - FIRST_ID))

    def _decode(self) -> None:
        """What comes during a tick takes part from the next one on. A tick that a pause cuts short
        goes on after it.
        """
        due = time.monotonic()
        with self._changed:
            while not self._is_closed:
                while self._waiting and len(self._running) < len(self._pace) - 1:
                    self._running.append(self._waiting.popleft())
                if not self._running or self._is_paused:
                    self._changed.wait_for(
                        lambda: (
                            self._is_closed
                            or ((self._running or self._waiting) and not self._is_paused)
                        )
                    )
                    due = time.monotonic()
                    continue
                due += self._pace[len(self._running)]
                left = self._changed.wait_for(
                    lambda: self._is_closed or self._is_paused, due - time.monotonic()
                )
                if left:
                    continue
                assert self._served is not None
                for row in self._running:
                    row.versions.append(self._served)
                    row.is_over = len(row.versions) == row.length
                self._running = [row for row in self._running if not row.is_over]
                self._changed.notify_all()


def _sample(row: Row) -> GeneratedSample:
    count = len(row.versions)
    starts = [i for i in range(count) if i == 0 or row.versions[i] != row.versions[i - 1]]
    ends = [*starts[1:], count]
    spans = tuple(VersionSpan(row.versions[s], s, e) for s, e in zip(starts, ends, strict=True))
    first = row.versions[0] if row.versions else -1
    return GeneratedSample(
        (TOKEN,) * count, (-1.0,) * count, "stop" if count == row.length else "abort", first, spans
    )


class SleepingStages:
    """What the loop and a supply ask of `StepStages`. It sleeps by the plan."""

    def __init__(
        self, plan: SimulationPlan, workload: SimulatedWorkload, fleet: EngineFleet
    ) -> None:
        self.plan = plan
        self.fleet = fleet
        items = tuple(
            PromptItem((FIRST_ID + i % 10, FIRST_ID + i // 10), str(i), "1", "s")
            for i in range(NUM_PROMPTS)
        )
        sources = [PromptSource("s", 1.0, items)]
        self.stream = PromptStream(sources, plan.batch_size, shuffle=False, seed=0)
        self.policy_version = self.trained_version = 1
        self.on_generated: Any = lambda numbers: None

    @property
    def num_prompts_drawn(self) -> int:
        return self.stream.num_drawn

    def draw_prompts(self, step: int) -> PromptBatch:
        return self.stream.draw_step_prompts(step)

    def make_requests(self, prompts: PromptBatch) -> list[GenerateRequest]:
        longest = SamplingParams(10**6)
        return build_generate_requests(
            prompts, self.plan.group_size, longest, 1, self.policy_version
        )

    def generate_rollout(self, step: int, prompts: PromptBatch) -> RolloutBatch:
        def on_groups(first: int, groups: Sequence[Sequence[GeneratedSample]]) -> None:
            self.on_generated(prompts.group_ids[first : first + len(groups)])

        return collect_rollout_batch(
            prompts, self.fleet.generate(self.make_requests(prompts), on_groups), TOKENIZER
        )

    def score_rollout(self, step: int, rollout: RolloutBatch) -> ScoredBatch:
        results = self.scorer(make_reward_samples(rollout, READER))
        return make_scored_batch(rollout, results, None, [])

    def scorer(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        time.sleep(self.plan.compute_score_seconds(len(samples)))
        return [RewardResult(1.0) for _ in samples]

    def annotate_step(self, step: int, scored: ScoredBatch) -> AnnotatedBatch:
        if isinstance(scored, AnnotatedBatch):
            return scored
        time.sleep(self.plan.compute_annotate_seconds(scored.num_tokens))
        return add_columns(AnnotatedBatch, scored)

    def compute_advantages(self, step: int, batch: AnnotatedBatch) -> AnnotatedBatch:
        time.sleep(self.plan.advantages_s)
        return batch

    def update_models(
        self, step: int, batch: AnnotatedBatch
    ) -> tuple[AnnotatedBatch, dict[str, float]]:
        time.sleep(self.plan.compute_update_seconds(batch.num_tokens))
        return batch, {}

    def sync_weights(self) -> dict[str, float]:
        self.fleet.begin_weight_update(self.policy_version + 1)
        time.sleep(self.plan.sync_s)
        self.fleet.commit_weight_update(self.policy_version + 1)
        self.policy_version += 1
        return {}

    def evaluate_held_out(self, is_final: bool = True) -> None:
        return None


class Stopwatch:
    """In place of a tracker: when each step ended."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.ends: list[float] = []

    @contextmanager
    def track_step(self, step: int) -> Iterator[None]:
        yield
        self.ends.append(time.monotonic() - self.begin)

    def set_step_batch(self, *of_step: object) -> None:
        pass

    def log_evaluation(self, step: int, result: None) -> None:
        pass


@dataclass(frozen=True)
class Slept:
    ends: list[float]
    events: list[str]


def sleep_through(
    plan: SimulationPlan, section: ScheduleConfig, workload: SimulatedWorkload
) -> Slept:
    """The steps of the plan in real time."""
    engines = [
        SleepingEngine(number, plan.seconds_per_token, workload)
        for number in range(plan.num_engines)
    ]
    fleet = EngineFleet(engines, 600.0, 0)
    stages = SleepingStages(plan, workload, fleet)
    events = list[FlowEvent]()
    flow = GroupFlow(plan.batch_size, plan.last_step, served_version=1)
    schedule = load_schedule(section)
    watch = Stopwatch()
    if isinstance(schedule, SynchronousSchedule):
        supply: Any = WatchedForeground(stages, flow, schedule, on_events=events.extend)
    else:
        session = fleet.open_session()

        def make_requests(prompts: PromptBatch, version: int) -> list[list[GenerateRequest]]:
            return [[request] for request in stages.make_requests(prompts)]

        score = GroupScorer(READER, stages.scorer, FilterGroupsConfig())
        supply = BackgroundSupply(
            flow,
            schedule,
            SupplyServices(
                session, stages.stream.fetch_prompts, make_requests, score, stages.annotate_step
            ),
            get_policy_version=lambda: stages.policy_version,
            mini_batch_size=plan.min_annotated_samples,
            pause_session=fleet.hold_exclusively,
            on_events=events.extend,
        )
    try:
        with supply:
            watch.begin = time.monotonic()
            guard: Any = partial(_no_guard)
            run_training_loop(stages, supply, watch, guard, SavePolicy(), LoopPlan(plan.last_step))  # type: ignore[arg-type]
    finally:
        fleet.close()
        for engine in engines:
            engine.close()
    return Slept(watch.ends, [str(event) for event in events])


def _no_guard(name: str, is_continuation: bool = False) -> Any:
    return nullcontext()

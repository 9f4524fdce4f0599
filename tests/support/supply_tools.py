"""A supply in the background over engines that a test holds in its hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from places import MODEL

from rlhf_megatron.config.schema import FilterGroupsConfig, ScheduleConfig
from rlhf_megatron.controller.scheduler.schedules import Schedule, load_schedule
from rlhf_megatron.controller.scheduler.schedules.group_flow import FlowEvent, GroupFlow
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import StalePolicy, SyncPolicy
from rlhf_megatron.controller.scheduler.scored_samples import GroupFilterReport
from rlhf_megatron.controller.scheduler.supply.background_supply import (
    BackgroundSupply,
    SupplyServices,
)
from rlhf_megatron.controller.scheduler.supply.supply_threads import GroupScorer
from rlhf_megatron.data.batch import AnnotatedBatch, PromptBatch, ScoredBatch, add_columns
from rlhf_megatron.data.item_stream import PromptStream
from rlhf_megatron.data.prompt_items import PromptItem, PromptSource
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rollout.engine_interface import (
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
)
from rlhf_megatron.rollout.rollout_requests import build_generate_requests

LIMIT_S = 120.0  # of anything that a test waits for
TOKENIZER = load_tokenizer(MODEL)
READER = ResponseReader(TOKENIZER)
NUM_SAMPLES = 2


class HeldSession:
    """A group ends when the test says so, or at once. Its first token is of the version at its
    submission, and the second of the version at its end.
    """

    def __init__(self, is_free: bool = False) -> None:
        self.is_free = is_free
        self.version = 1
        self.submitted: list[int] = []
        self.aborted: list[int] = []
        # of a group's two samples; "1" and "9" where none is given
        self.answers: dict[int, tuple[str, str]] = {}
        self.error: Exception | None = None
        self.num_mended = 0
        self.is_closed = False
        self._condition = threading.Condition()
        self._running: dict[int, tuple[int, Sequence[GenerateRequest]]] = {}
        self._ended: list[int] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit_requests(self, key: int, requests: Sequence[GenerateRequest]) -> None:
        with self._condition:
            assert key not in self._running, f"{key} runs already"
            self._running[key] = (self.version, requests)
            self.submitted.append(key)
            if self.is_free:
                self._ended.append(key)
            self._condition.notify_all()

    def poll_finished(self) -> list[tuple[int, list[list[GeneratedSample]]]]:
        with self._condition:
            if self.error is not None:
                raise self.error
            self._condition.wait_for(lambda: self._ended, 0.02)
            ended = self._ended
            self._ended = []
            return [(key, self._samples(key)) for key in ended if key in self._running]

    def abort_keys(self, keys: Sequence[int]) -> None:
        with self._condition:
            for key in keys:
                del self._running[key]
                self.aborted.append(key)

    def mend_engines(self) -> None:
        self.num_mended += 1

    def close(self) -> None:
        self.is_closed = True

    def end(self, *keys: int) -> None:
        """These groups are finished, as soon as they run."""
        with self._condition:
            assert self._condition.wait_for(lambda: {*keys} <= self._running.keys(), LIMIT_S), (
                keys,
                self._running,
            )
            self._ended += keys
            self._condition.notify_all()

    def end_one(self, choose: Callable[[list[int]], int]) -> None:
        """One of those that run now and have not ended. No other thread takes the chosen one back
        meanwhile: it would be awaited in vain.
        """
        with self._condition:
            if running := sorted(self._running.keys() - self._ended):
                self._ended.append(choose(running))
                self._condition.notify_all()

    def _samples(self, key: int) -> list[list[GeneratedSample]]:
        begun, requests = self._running.pop(key)
        spans = (VersionSpan(begun, 0, 1), VersionSpan(self.version, 1, 2))
        texts = self.answers.get(key, ("1", "9"))
        ids = [(*TOKENIZER.encode(text), TOKENIZER.eos_token_id) for text in texts]
        samples = [GeneratedSample(two, (-0.5, -0.25), "stop", begun, spans) for two in ids]
        return [samples[: len(request.seeds)] for request in requests]


@dataclass(frozen=True)
class Hasty:
    """Starts the two groups that it may have at a time again as soon as the policy has changed."""

    max_lag: int = 0
    sync_policy: SyncPolicy = SyncPolicy.CONTINUE
    stale_policy: StalePolicy = StalePolicy.REGENERATE
    annotates_early: bool = False

    def count_groups_to_start(self, flow: GroupFlow) -> int:
        return max(0, min(2 - len(flow.groups_in_flight), flow.num_groups_needed))

    def select_groups_to_annotate(self, flow: GroupFlow) -> Sequence[int]:
        return ()

    def select_batch(self, flow: GroupFlow) -> Sequence[int] | None:
        return sorted(flow.scored_order[:1]) or None

    def select_groups_to_give_up(self, flow: GroupFlow) -> Sequence[int]:
        return ()

    def find_stale_groups(self, flow: GroupFlow) -> Sequence[int]:
        return [
            g.number
            for g in flow.groups_in_flight.values()
            if not flow.is_training and g.oldest_version < flow.served_version
        ]


def stream_of(num_prompts: int = 1000, batch_size: int = 4) -> PromptStream:
    items = tuple(PromptItem((2 + i % 10, 3), str(i), "1", "s") for i in range(num_prompts))
    return PromptStream([PromptSource("s", 1.0, items)], batch_size, shuffle=False, seed=0)


def make_requests(prompts: PromptBatch, version: int) -> list[list[GenerateRequest]]:
    return [
        [request]
        for request in build_generate_requests(prompts, NUM_SAMPLES, SamplingParams(2), 1, version)
    ]


def right_or_wrong(samples: Sequence[RewardSample]) -> list[RewardResult]:
    return [RewardResult(float(sample.response == "1"), parts={"p": 1.0}) for sample in samples]


def annotate(step: int, batch: ScoredBatch) -> AnnotatedBatch:
    """A number that tells its sample, its place in it, and the step."""
    owner_T = batch.sample_ids.repeat_interleave(batch.lengths)
    return add_columns(
        AnnotatedBatch, batch, old_log_probs=(1000.0 * step + owner_T + 0.25 * batch.response_mask)
    )


class Bench:
    """What a test has beside the supply. `events`: lines of the Flow."""

    def __init__(
        self, name: str | Schedule, params: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.session = settings.pop("session", None) or HeldSession()
        self.stream = stream_of()
        self.version = settings.pop("version", 1)
        self.session.version = self.version
        self.events: list[FlowEvent] = []
        self.pieces: list[int] = []  # samples of each call of annotate
        self.schedule = (
            load_schedule(ScheduleConfig(name, params or {})) if isinstance(name, str) else name
        )
        filters = settings.pop("filter_groups", FilterGroupsConfig())
        deadline = time.monotonic() + LIMIT_S

        def in_time() -> None:
            assert time.monotonic() < deadline, f"the supply waits: {self.supply.ledger}"

        settings.setdefault("should_stop", in_time)
        work = SupplyServices(
            session=self.session,
            draw_prompts=self.stream.fetch_prompts,
            make_requests=make_requests,
            score_groups=settings.pop("score", None)
            or GroupScorer(READER, right_or_wrong, filters),
            annotate_samples=self._annotate,
        )
        batch_size = settings.pop("batch_size", 2)
        found = settings.get("resumed_groups")
        steps_done = settings.pop("steps_done", 0)
        last_step = settings.pop("last_step", 5)
        num_drawn = settings.pop("num_drawn", 0 if found is None else found.num_drawn)
        self.supply = BackgroundSupply(
            GroupFlow(batch_size, last_step, self.version, steps_done, num_drawn),
            self.schedule,
            work,
            get_policy_version=lambda: self.version,
            mini_batch_size=settings.pop("mini_batch_size", 2),
            filter_report=GroupFilterReport(filters, batch_size) if filters.enable else None,
            on_events=self._log,
            **settings,
        )

    def take(self, step: int) -> list[int]:
        """Groups of the batch."""
        return self.take_batch(step).group_ids[::NUM_SAMPLES].tolist()

    def take_batch(self, step: int) -> ScoredBatch:
        return self.supply.take_batch(step, lambda name: nullcontext())

    def sync(self, is_new: bool = True) -> None:
        with self.supply.sync_window():
            self.version += is_new
            self.session.version = self.version

    @property
    def log(self) -> list[str]:
        return [str(event) for event in self.events]

    def _annotate(self, step: int, batch: ScoredBatch) -> AnnotatedBatch:
        self.pieces.append(len(batch))
        return annotate(step, batch)

    def _log(self, events: Sequence[FlowEvent]) -> None:
        self.events += events


def until(is_true: Callable[[], object]) -> None:
    """Wait for other threads."""
    deadline = time.monotonic() + LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


@contextmanager
def in_thread(run: Callable[[], object]) -> Iterator[threading.Event]:
    """`run` beside the block; the event: it has ended. It must have when the block ends."""
    is_over = threading.Event()
    errors = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)
        is_over.set()

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    yield is_over
    thread.join(LIMIT_S)
    assert is_over.is_set(), "it has not ended"
    if errors:
        raise errors[0]


def lag_of(batch: ScoredBatch, version: int) -> int:
    """The largest, from the spans of the samples."""
    assert batch.version_spans is not None
    return version - min(of for spans in batch.version_spans for of, _, _ in spans)


def expected_log_probs(step: int, batch: ScoredBatch) -> torch.Tensor:
    found = annotate(step, batch).old_log_probs
    assert found is not None
    return found

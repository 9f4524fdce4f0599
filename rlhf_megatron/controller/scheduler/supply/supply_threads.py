"""The two threads of a supply in the background: one drives the engines, one has what
they made scored.

Also: Finished groups of the background to groups with rewards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from rlhf_megatron import faults
from rlhf_megatron.config.schema import FilterGroupsConfig
from rlhf_megatron.controller.recovery.run_journal import GroupJournal
from rlhf_megatron.controller.scheduler.scored_samples import (
    has_no_signal,
    make_reward_samples,
    make_scored_batch,
)
from rlhf_megatron.controller.scheduler.supply.group_ledger import (
    DrawPrompts,
    EngineOrder,
    FinishedGroup,
    GroupLedger,
    MakeRequests,
    ScoredGroup,
    ScoreFinishedGroups,
)
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.service.reward_scorer import check_reward_error_rate
from rlhf_megatron.rollout.fleet.generation_session import GenerationSession
from rlhf_megatron.rollout.rollout_requests import collect_rollout_batch

WAIT_S = 0.1  # for something to happen before the threads look whether they are to end


class EngineDriver:
    """Submits and aborts as the ledger orders, and tells it what has come."""

    def __init__(
        self,
        ledger: GroupLedger,
        session: GenerationSession,
        draw_prompts: DrawPrompts,
        make_requests: MakeRequests,
        journal: GroupJournal | None,
    ) -> None:
        """Make the driver of a session; it does nothing before `run_until_closed`."""
        self._ledger = ledger
        self._session = session
        self._draw_prompts = draw_prompts
        self._make_requests = make_requests
        self._journal = journal
        # by group: its prompt and attempt
        self._running_groups: dict[int, tuple[PromptBatch, int]] = {}

    def run_until_closed(self) -> None:
        """Follow the ledger's orders and report finished groups, until the ledger is closed; then
        close the session.
        """
        try:
            while not self._ledger.is_closed:
                self.follow_orders(self._ledger.take_orders())
                if self._session.num_running:
                    self._report_finished_groups()
                else:
                    self._ledger.await_orders(WAIT_S)
        finally:
            self._session.close()

    def follow_orders(self, orders: Sequence[EngineOrder]) -> None:
        """Abort the groups that the orders give up, and submit the requests of the others. A
        submission that a later order takes back is not made.
        """
        given_up = {order.number for order in orders if order.kind == "abort"}
        if running := sorted(given_up & self._running_groups.keys()):
            self._session.abort_keys(running)
            for number in running:
                del self._running_groups[number]
        for order in _drop_revoked_submissions(orders):
            prompt = self._draw_prompts([order.number])
            (requests,) = self._make_requests(prompt, order.served_version)
            self._running_groups[order.number] = (prompt, order.attempt)
            self._session.submit_requests(order.number, requests)

    def _report_finished_groups(self) -> None:
        """Write each group that has finished to the journal and report it to the ledger."""
        for number, samples in self._session.poll_finished():
            prompt, attempt = self._running_groups.pop(number)
            finished = FinishedGroup(number, prompt, samples)
            if self._journal is not None:
                self._journal.write_prompt_groups(number, samples)
            self._ledger.record_generated(finished, attempt)
            faults.reach_fault_point("rollout.mid_generate")


class ScoringThread:
    """Has all groups that have come scored in one call, then those that came meanwhile."""

    def __init__(self, ledger: GroupLedger, score_groups: ScoreFinishedGroups) -> None:
        """Make the scorer of a ledger's groups; it does nothing before `run_until_closed`."""
        self._ledger = ledger
        self._score_groups = score_groups

    def run_until_closed(self) -> None:
        """Score all waiting groups in one call and record them in the ledger, again and again until
        the ledger is closed.
        """
        ledger = self._ledger
        while not ledger.is_closed:
            with ledger.state_changed:
                ledger.state_changed.wait_for(
                    lambda: ledger.groups_to_score or ledger.is_closed, WAIT_S
                )
                groups = ledger.groups_to_score
                ledger.groups_to_score = []
            if groups and not ledger.is_closed:
                ledger.record_scored(groups, self._score_groups(groups))


def _drop_revoked_submissions(orders: Sequence[EngineOrder]) -> list[EngineOrder]:
    """Return the submissions that no later order takes back, the last one of each group."""
    wanted: dict[int, EngineOrder] = {}
    for order in orders:
        wanted.pop(order.number, None)
        if order.kind == "submit":
            wanted[order.number] = order
    return list(wanted.values())


def start_daemon_thread(
    thread_name: str, target: Callable[[], None], on_failure: Callable[[BaseException], None]
) -> threading.Thread:
    """Start and return a thread that runs `target`. The thread is a daemon, so that a thread which
    hangs does not keep the process alive. `on_failure` is called, on that thread, with an exception
    that ends it.
    """

    def run_guarded() -> None:
        """Run the target, and pass an exception to `on_failure`."""
        try:
            target()
        except BaseException as error:  # raised again on the main thread
            on_failure(error)

    thread = threading.Thread(target=run_guarded, name=thread_name, daemon=True)
    thread.start()
    return thread


class GroupScorer:
    """Callable: groups -> the same with rewards. See `ScoreFinishedGroups`."""

    def __init__(
        self,
        reader: ResponseReader,
        scorer: Callable[[Sequence[RewardSample]], list[RewardResult]],
        filter_groups: FilterGroupsConfig,
    ) -> None:
        """Make a function that scores finished groups with `scorer`, and marks those that
        `filter_groups` leaves out. `reader` decodes the responses.
        """
        self._reader = reader
        self._scorer = scorer
        self._filter_groups = filter_groups

    def __call__(self, groups: Sequence[FinishedGroup]) -> list[ScoredGroup]:
        """Score the samples of all groups in one call, greedy samples too. Return the groups with
        rewards, and whether the filter leaves them in.
        """
        faults.reach_fault_point("reward.before_score")
        rollouts = [
            collect_rollout_batch(group.prompts, [group.samples[0]], self._reader.tokenizer)
            for group in groups
        ]
        greedy = [
            collect_rollout_batch(group.prompts, [group.samples[1]], self._reader.tokenizer)
            if len(group.samples) > 1
            else None
            for group in groups
        ]
        asked = [make_reward_samples(rollout, self._reader) for rollout in rollouts]
        asked_greedy = [
            make_reward_samples(one, self._reader) if one is not None else [] for one in greedy
        ]
        pairs = list(zip(asked, asked_greedy, strict=True))
        results = iter(
            self._scorer([sample for pair in pairs for samples in pair for sample in samples])
        )
        found = []
        for group, rollout, one, (samples, greedy_samples) in zip(
            groups, rollouts, greedy, pairs, strict=True
        ):
            of_samples = [next(results) for _ in samples]
            batch = make_scored_batch(
                rollout, of_samples, one, [next(results) for _ in greedy_samples]
            )
            has_signal = not (
                self._filter_groups.enable and has_no_signal(batch, self._filter_groups)
            )
            found.append(ScoredGroup(group.number, batch, one, has_signal))
        return found


class RecentErrorBound:
    """A scorer whose share of failures counts over the last `count` samples: a call may have
    a single group.

    `score_samples`: as the scorer, without a bound on failures. Raises RewardErrorRateError.
    """

    def __init__(
        self,
        score_samples: Callable[[Sequence[RewardSample]], list[RewardResult]],
        num_samples: int,
        max_error_rate: float,
        log_path: str,
    ) -> None:
        """Bound the failures of `score_samples`, which has no bound of its own, to a share of
        `max_error_rate` over the last `num_samples` samples. `log_path` is named in the error.
        """
        self._score_samples = score_samples
        self._recent_results: deque[tuple[RewardSample, RewardResult]] = deque(maxlen=num_samples)
        self._max_error_rate = max_error_rate
        self._log_path = log_path

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """Score the samples. Raise RewardErrorRateError where too large a share of the last
        `num_samples` samples has failed; nothing is checked before so many were scored.
        """
        results = self._score_samples(samples)
        self._recent_results.extend(zip(samples, results, strict=True))
        if len(self._recent_results) == self._recent_results.maxlen:
            last, of_last = zip(*self._recent_results, strict=True)
            check_reward_error_rate(last, of_last, self._max_error_rate, self._log_path)
        return results

"""The two threads of a supply in the background: one drives the engines, one has what they made scored.

Also: Finished groups of the background to groups with rewards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from rlhf_megatron import faults
from rlhf_megatron.config.schema import FilterGroupsConfig
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.recovery.journal import GroupJournal
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.service.scorer import check_error_rate
from rlhf_megatron.rollout.fleet.session import Session
from rlhf_megatron.rollout.requests import collect
from rlhf_megatron.scheduler.samples import reward_samples, teaches_nothing, to_scored
from rlhf_megatron.scheduler.supply.ledger import Draw, Finished, Ledger, MakeRequests, Order, Score, Scored

WAIT_S = 0.1  # for something to happen before the threads look whether they are to end


class Driver:
    """Submits and aborts as the ledger orders, and tells it what has come."""

    def __init__(
        self, ledger: Ledger, session: Session, draw: Draw, make_requests: MakeRequests, journal: GroupJournal | None
    ) -> None:
        self._ledger = ledger
        self._session = session
        self._draw = draw
        self._make_requests = make_requests
        self._journal = journal
        self._running: dict[int, tuple[PromptBatch, int]] = {}  # by group: its prompt and attempt

    def run(self) -> None:
        """Until the ledger is closed."""
        try:
            while not self._ledger.is_closed:
                self.follow(self._ledger.orders())
                if self._session.num_running:
                    self._tell()
                else:
                    self._ledger.await_orders(WAIT_S)
        finally:
            self._session.close()

    def follow(self, orders: Sequence[Order]) -> None:
        """All that was ordered since the last time, in that order."""
        given_up = {order.number for order in orders if order.kind == "abort"}
        if running := sorted(given_up & self._running.keys()):
            self._session.abort(running)
            for number in running:
                del self._running[number]
        for order in _still_wanted(orders):
            prompt = self._draw([order.number])
            (requests,) = self._make_requests(prompt, order.version)
            self._running[order.number] = (prompt, order.attempt)
            self._session.submit(order.number, requests)

    def _tell(self) -> None:
        for number, samples in self._session.poll():
            prompt, attempt = self._running.pop(number)
            finished = Finished(number, prompt, samples)
            if self._journal is not None:
                self._journal.append(number, samples)
            self._ledger.generated(finished, attempt)
            faults.reach("rollout.mid_generate")


class Scoring:
    """Has all groups that have come scored in one call, then those that came meanwhile."""

    def __init__(self, ledger: Ledger, score: Score) -> None:
        self._ledger = ledger
        self._score = score

    def run(self) -> None:
        """Until the ledger is closed."""
        ledger = self._ledger
        while not ledger.is_closed:
            with ledger.changed:
                ledger.changed.wait_for(lambda: ledger.to_score or ledger.is_closed, WAIT_S)
                groups, ledger.to_score = ledger.to_score, []
            if groups and not ledger.is_closed:
                ledger.scored(groups, self._score(groups))


def _still_wanted(orders: Sequence[Order]) -> list[Order]:
    """Submissions that no later order takes back."""
    wanted: dict[int, Order] = {}
    for order in orders:
        wanted.pop(order.number, None)
        if order.kind == "submit":
            wanted[order.number] = order
    return list(wanted.values())


def start(name: str, run: Callable[[], None], failed: Callable[[BaseException], None]) -> threading.Thread:
    """A daemon, so that one which hangs does not keep the process alive. `failed` gets what ends it early."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # raised again on the main thread
            failed(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class ScoreGroups:
    """Callable: groups -> the same with rewards. See `base.Score`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scorer: Callable[[Sequence[RewardSample]], list[RewardResult]],
        filter_groups: FilterGroupsConfig,
    ) -> None:
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._filter_groups = filter_groups

    def __call__(self, groups: Sequence[Finished]) -> list[Scored]:
        faults.reach("reward.before_score")
        rollouts = [collect(group.prompts, [group.samples[0]], self._tokenizer) for group in groups]
        greedy = [
            collect(group.prompts, [group.samples[1]], self._tokenizer) if len(group.samples) > 1 else None
            for group in groups
        ]
        asked = [reward_samples(rollout) for rollout in rollouts]
        asked_greedy = [reward_samples(one) if one is not None else [] for one in greedy]
        pairs = list(zip(asked, asked_greedy, strict=True))
        results = iter(self._scorer([sample for pair in pairs for samples in pair for sample in samples]))
        found = []
        for group, rollout, one, (samples, greedy_samples) in zip(groups, rollouts, greedy, pairs, strict=True):
            of_samples = [next(results) for _ in samples]
            batch = to_scored(rollout, of_samples, one, [next(results) for _ in greedy_samples])
            has_signal = not (self._filter_groups.enable and teaches_nothing(batch, self._filter_groups))
            found.append(Scored(group.number, batch, one, has_signal))
        return found


class LastSamples:
    """A scorer whose share of failures counts over the last `count` samples: a call may have a single group.

    `score`: as the scorer, without a bound on failures. Raises RewardError.
    """

    def __init__(
        self,
        score: Callable[[Sequence[RewardSample]], list[RewardResult]],
        count: int,
        max_error_rate: float,
        log: str,
    ) -> None:
        self._score = score
        self._last: deque[tuple[RewardSample, RewardResult]] = deque(maxlen=count)
        self._max_error_rate = max_error_rate
        self._log = log

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        results = self._score(samples)
        self._last.extend(zip(samples, results, strict=True))
        if len(self._last) == self._last.maxlen:
            last, of_last = zip(*self._last, strict=True)
            check_error_rate(last, of_last, self._max_error_rate, self._log)
        return results

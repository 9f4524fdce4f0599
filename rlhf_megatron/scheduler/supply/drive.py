"""The two threads of a supply in the background: one drives the engines, one has what they made scored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from rlhf_megatron import faults
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.scheduler.supply.base import Draw, Finished, MakeRequests, Score, Session
from rlhf_megatron.scheduler.supply.ledger import Ledger, Order

WAIT_S = 0.1  # for something to happen before the threads look whether they are to end


class Keeps(Protocol):
    """Finished groups that a later process can go on with; see `group_journal`."""

    def append(self, finished: Finished) -> None: ...


class Driver:
    """Submits and aborts as the ledger orders, and tells it what has come."""

    def __init__(
        self, ledger: Ledger, session: Session, draw: Draw, make_requests: MakeRequests, journal: Keeps | None
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
                self._journal.append(finished)
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

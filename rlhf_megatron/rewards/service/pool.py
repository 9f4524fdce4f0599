"""Worker processes that are killed when a sample hangs, and replaced in milliseconds.

The library `pebble` kills on wall time alone: of 40 samples of 0.4 CPU seconds under a limit of 1 s, its pool of four
ended all 40 on a busy machine with two cores, each a mistaken timeout. Here time without a CPU does not count.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.rewards.scorers.base import TIMEOUT, RewardResult, masked
from rlhf_megatron.rewards.service.processes import Ended, TemplateProcess, Worker
from rlhf_megatron.rewards.service.wire import Task
from rlhf_megatron.rewards.stopwatch import POLL_S

MAX_CHUNK = 16  # tasks that a worker is given at once
CHUNKS_PER_WORKER = 4  # as long as there are enough tasks
OVERLOAD = 20  # times its limit that a sample may take in all, with the time that the machine kept it waiting
MAX_DEATHS = 2  # of workers, at one sample
MAX_RESTARTS = 3  # of the template, in one batch
MAX_LOG_BYTES = 1 << 24


class WorkerPool:
    """Used by one thread. `rewards`: see TemplateProcess; a task names one by its position. `waits_s`: of each the
    seconds that a sample may wait for a server, also since another had its answer, which are not the policy's doing;
    None: it waits for none.
    `num_machines`: that have pools of the run, which share the limits of servers."""

    def __init__(
        self,
        rewards: Sequence[Mapping[str, Any]],
        num_workers: int,
        timeout_s: float,
        log: Path | None,
        waits_s: Sequence[float | None] = (),
        num_machines: int = 1,
    ) -> None:
        self.rewards = rewards
        self.waits_s = waits_s or [None] * len(rewards)
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.log = log
        self.num_machines = num_machines
        self.workers: dict[int, Worker] = {}
        self.template: TemplateProcess | None = None
        self.num_hiring = 0
        self._is_ready = False
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Start without waiting. Call it on the main thread: the processes end with the thread that started them."""
        self.template = TemplateProcess(self.rewards, self.log, self.num_machines)
        self._selector.register(self.template.control, selectors.EVENT_READ)

    def await_ready(self) -> TemplateProcess:
        """Raises what `TemplateProcess.await_ready` does."""
        assert self.template is not None, "the pool is not started"
        if not self._is_ready:
            self.template.await_ready()
            self._is_ready = True
        return self.template

    def run(self, tasks: Sequence[Task]) -> list[RewardResult]:
        """Return one result a task, in order."""
        if not tasks:
            return []
        self.await_ready()
        self.shorten_log()
        for worker in [worker for worker in self.workers.values() if worker.in_hand]:
            self.dismiss(worker)  # of a batch that was interrupted
        return _Batch(self, tasks).run()

    def hire(self, count: int) -> None:
        """Fork workers until there are `count`."""
        missing = count - len(self.workers) - self.num_hiring
        if missing > 0:
            self.await_ready().fork(missing)
            self.num_hiring += missing

    def welcome(self, worker: Worker) -> None:
        self.num_hiring -= 1
        self.workers[worker.pid] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def dismiss(self, worker: Worker) -> None:
        """Kill a worker and all that it started, and forget it."""
        self.workers.pop(worker.pid, None)
        self.disconnect(worker)
        self.await_ready().kill(worker.pid)

    def disconnect(self, worker: Worker) -> None:
        if worker.is_connected:
            self._selector.unregister(worker.connection)
            worker.connection.close()

    def wait(self, seconds: float) -> list[Worker | None]:
        """Return the workers that have something to read; None stands for the template."""
        return [key.data for key, _ in self._selector.select(max(0.0, seconds))]

    def restart(self) -> None:
        """Start anew after the template has gone, and all workers with it."""
        self.close()
        self.start()
        self.await_ready()

    def shorten_log(self) -> None:
        """Keep the last half of a log that has grown too long; who writes to it appends."""
        with contextlib.suppress(OSError):
            if self.log is not None and self.log.stat().st_size > MAX_LOG_BYTES:
                with self.log.open("r+b") as file:
                    file.seek(-MAX_LOG_BYTES // 2, os.SEEK_END)
                    rest = file.read(MAX_LOG_BYTES // 2)
                    file.seek(0)
                    file.write(b"[what was before is left out]\n" + rest)
                    file.truncate()

    def close(self) -> None:
        """Safe to call twice."""
        for worker in self.workers.values():
            self.disconnect(worker)
        self.workers.clear()
        if self.template is not None:
            self._selector.unregister(self.template.control)
            self.template.close()
        self.template, self._is_ready, self.num_hiring = None, False, 0


class _Batch:
    """The tasks of one call: which worker has which, and their results."""

    def __init__(self, pool: WorkerPool, tasks: Sequence[Task]) -> None:
        self.pool = pool
        self.tasks = tasks
        self.results: dict[int, RewardResult] = {}
        self.waiting = deque(range(len(tasks)))
        self.once_more: deque[int] = deque()  # their worker died: each is for a fresh one, alone
        self.deaths: Counter[int] = Counter()
        self.heard_at: dict[int, float] = {}  # component -> when a worker answered for it: others may await their turn
        self.num_restarts = 0

    def run(self) -> list[RewardResult]:
        looked_at = time.monotonic()
        while len(self.results) < len(self.tasks):
            in_hand = sum(len(worker.in_hand) for worker in self.pool.workers.values())
            self.pool.hire(min(self.pool.num_workers, len(self.waiting) + len(self.once_more) + in_hand))
            for worker in tuple(self.pool.workers.values()):
                if worker.is_idle:
                    self._hand_out(worker)
            for speaker in self.pool.wait(POLL_S):
                if speaker is None:
                    self._hear_template()
                elif speaker.pid in self.pool.workers:
                    self._hear(speaker)
            if time.monotonic() - looked_at >= POLL_S:
                looked_at = time.monotonic()
                self._look_at_limits()
        return [self.results[number] for number in range(len(self.tasks))]

    def _hand_out(self, worker: Worker) -> None:
        if self.once_more and not worker.is_used:
            chunk = [self.once_more.popleft()]
        else:
            share = len(self.waiting) // (CHUNKS_PER_WORKER * self.pool.num_workers)
            size = min(max(1, share), MAX_CHUNK, len(self.waiting))
            chunk = [self.waiting.popleft() for _ in range(size)]
        if not chunk:
            if self.once_more:
                self.pool.dismiss(worker)  # it makes room for a fresh one
            return
        try:
            worker.give({number: self.tasks[number] for number in chunk})
        except OSError:
            if worker.in_hand:
                self._lose(worker, "could not be reached")
            else:  # it had ended before, with the template: that is not the sample's doing
                self.pool.dismiss(worker)
                (self.once_more if self.deaths[chunk[0]] else self.waiting).extendleft(reversed(chunk))

    def _hear(self, worker: Worker) -> None:
        """Replies of a worker. At the end of its stream it is on its way out: what ended it comes from the template."""
        try:
            for reply in worker.replies():
                self.results[reply.number] = reply.result
                self.heard_at[self.tasks[reply.number].component] = time.monotonic()
        except ValueError:
            self._lose(worker, "was ended because something else than its reply came through its socket")
        except (EOFError, OSError):
            self.pool.disconnect(worker)
            self.pool.await_ready().kill(worker.pid)

    def _hear_template(self) -> None:
        template = self.pool.await_ready()
        try:
            for message in template.read():
                if isinstance(message, Ended):
                    self._bury(message)
                else:
                    self.pool.welcome(message)
        except EOFError:
            self._start_again()

    def _bury(self, ended: Ended) -> None:
        worker = self.pool.workers.get(ended.pid)
        if worker is None:
            return  # dismissed before
        if worker.is_connected:
            worker.connection.setblocking(False)
        while worker.is_connected:  # what it said before it ended
            self._hear(worker)
        how = f"was ended by signal {-ended.code}" if ended.code < 0 else f"ended with code {ended.code}"
        self._lose(worker, how)

    def _lose(self, worker: Worker, how: str) -> None:
        """Account for a dead worker: it died at the first of the tasks in its hands, and had not begun the others."""
        self.pool.dismiss(worker)
        numbers = list(worker.in_hand)
        worker.in_hand.clear()
        if numbers and not worker.is_spent:
            first = numbers.pop(0)
            self.deaths[first] += 1
            if self.deaths[first] < MAX_DEATHS:
                self.once_more.append(first)
            else:
                error = f"The worker process {how} at this sample, and one before it died at it too."
                self.results[first] = masked("worker_died", error)
        self.waiting.extendleft(reversed(numbers))

    def _start_again(self) -> None:
        self.num_restarts += 1
        if self.num_restarts > MAX_RESTARTS:
            raise ValueError(
                f"the process that reward workers are forked off died {self.num_restarts} times in one batch of"
                f" samples; look at the memory of this machine and at {self.pool.log}."
            )
        lost = [number for worker in self.pool.workers.values() for number in worker.in_hand]
        self.pool.restart()
        self.waiting.extendleft(reversed(lost))

    def _look_at_limits(self) -> None:
        limit = self.pool.timeout_s
        self.pool.shorten_log()
        for worker in tuple(self.pool.workers.values()):
            took = time.monotonic() - worker.started_at
            if not worker.in_hand or not worker.is_connected or took < POLL_S:
                continue
            component = self.tasks[worker.in_hand[0]].component
            if (waits_s := self.pool.waits_s[component]) is not None:
                if min(took, time.monotonic() - self.heard_at.get(component, 0.0)) < waits_s:
                    continue
                verdict = masked("endpoint", f"After {took:.0f} s a server had not answered.")
            elif (counted := worker.stopwatch.look()) > limit:
                verdict = RewardResult(0.0, TIMEOUT)
            elif took > OVERLOAD * limit:
                verdict = masked(
                    "overloaded", f"Of {took:.1f} s the machine kept it waiting for {took - counted:.1f} s."
                )
            else:
                continue
            if worker not in self.pool.wait(0.0):  # it has answered after all
                self._end_sample(worker, verdict)

    def _end_sample(self, worker: Worker, verdict: RewardResult) -> None:
        self.results[worker.in_hand.popleft()] = verdict
        self.waiting.extendleft(reversed(worker.in_hand))
        worker.in_hand.clear()
        self.pool.dismiss(worker)

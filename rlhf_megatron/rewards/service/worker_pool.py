"""Worker processes that are killed when a sample hangs, and replaced in milliseconds.

The library `pebble` kills on wall time alone: of 40 samples of 0.4 CPU seconds under a limit of 1
s, its pool of four ended all 40 on a busy machine with two cores, each a mistaken timeout. Here
time without a CPU does not count.
"""

from __future__ import annotations

import selectors
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.rewards.process_stopwatch import POLL_S
from rlhf_megatron.rewards.scorers.reward_types import TIMEOUT, RewardResult, make_masked_result
from rlhf_megatron.rewards.service.worker_messages import RewardTask
from rlhf_megatron.rewards.service.worker_processes import (
    RewardWorkerProcess,
    TemplateProcess,
    WorkerEnd,
    shorten_log,
    start_reward_template,
)

MAX_CHUNK = 16  # tasks that a worker is given at once
CHUNKS_PER_WORKER = 4  # as long as there are enough tasks
# times its limit that a sample may take in all, with the time that the machine kept it waiting
OVERLOAD = 20
MAX_DEATHS = 2  # of workers, at one sample
MAX_RESTARTS = 3  # of the template, in one batch


class RewardWorkerPool:
    """The worker processes of a run's rewards. One thread uses the pool.

    See `start_reward_template` for `rewards`; a task names a reward by its index there. `waits_s`
    has for each reward the seconds that a sample may wait for a server, counted from the last
    answer to another sample, for which the policy is not to blame; None for a reward that waits for
    no server. `num_machines` is the number of machines with pools of the run, which share the
    servers' limits.
    """

    def __init__(
        self,
        rewards: Sequence[Mapping[str, Any]],
        num_workers: int,
        timeout_s: float,
        log_path: Path | None,
        waits_s: Sequence[float | None] = (),
        num_machines: int = 1,
    ) -> None:
        """Keep the settings; nothing starts yet. `timeout_s` is the limit for one sample. See the
        class for the rest.
        """
        self.rewards = rewards
        self.waits_s = waits_s or [None] * len(rewards)
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self.log_path = log_path
        self.num_machines = num_machines
        self.workers: dict[int, RewardWorkerProcess] = {}
        self.template_process: TemplateProcess[RewardWorkerProcess] | None = None
        self.num_forking = 0
        self._is_ready = False
        self._selector = selectors.DefaultSelector()

    def start(self) -> None:
        """Start the template process without waiting. Call it on the main thread: the processes end
        with the thread that started them.
        """
        self.template_process = start_reward_template(
            self.rewards, self.log_path, self.num_machines
        )
        self._selector.register(self.template_process.control, selectors.EVENT_READ)

    def wait_until_ready(self) -> TemplateProcess[RewardWorkerProcess]:
        """Wait until the template has loaded the rewards, and return the template. Raise the errors
        that `TemplateProcess.wait_until_ready` raises.
        """
        assert self.template_process is not None, "the pool is not started"
        if not self._is_ready:
            self.template_process.wait_until_ready()
            self._is_ready = True
        return self.template_process

    def score_tasks(self, tasks: Sequence[RewardTask]) -> list[RewardResult]:
        """Score the tasks and return one result for each, in order. Raise ValueError where the
        template dies too often. Kill workers of a batch that was interrupted.
        """
        if not tasks:
            return []
        self.wait_until_ready()
        self.shorten_log()
        for worker in [worker for worker in self.workers.values() if worker.task_numbers]:
            self.kill_worker(worker)  # of a batch that was interrupted
        return _TaskBatch(self, tasks).score_batch()

    def ensure_workers(self, num_workers: int) -> None:
        """Request new workers until `num_workers` workers run or are being forked."""
        missing = num_workers - len(self.workers) - self.num_forking
        if missing > 0:
            self.wait_until_ready().request_workers(missing)
            self.num_forking += missing

    def add_worker(self, worker: RewardWorkerProcess) -> None:
        """Add a worker that the template has forked."""
        self.num_forking -= 1
        self.workers[worker.pid] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def kill_worker(self, worker: RewardWorkerProcess) -> None:
        """Kill a worker and its process group, and remove it from the pool. Its tasks are left to
        the caller.
        """
        self.workers.pop(worker.pid, None)
        self.disconnect_worker(worker)
        self.wait_until_ready().kill_worker(worker.pid)

    def disconnect_worker(self, worker: RewardWorkerProcess) -> None:
        """Close the connection to a worker, if it is open, and stop watching it."""
        if worker.is_connected:
            self._selector.unregister(worker.connection)
            worker.connection.close()

    def wait_for_messages(self, timeout_s: float) -> list[RewardWorkerProcess | None]:
        """Wait, `timeout_s` at most, and return the workers with something to read; None in the
        list stands for the template.
        """
        return [key.data for key, _ in self._selector.select(max(0.0, timeout_s))]

    def restart_template(self) -> None:
        """End the template and all workers, start the template again, and wait for it."""
        self.close()
        self.start()
        self.wait_until_ready()

    def shorten_log(self) -> None:
        """Keep the log of the processes short."""
        if self.log_path is not None:
            shorten_log(self.log_path)

    def close(self) -> None:
        """End the template and all workers. Safe to call twice; `start` may follow."""
        for worker in self.workers.values():
            self.disconnect_worker(worker)
        self.workers.clear()
        if self.template_process is not None:
            self._selector.unregister(self.template_process.control)
            self.template_process.close()
        self.template_process = None
        self._is_ready = False
        self.num_forking = 0


class _TaskBatch:
    """The tasks of one call of `score_tasks`: their results, and the tasks that wait."""

    def __init__(self, pool: RewardWorkerPool, tasks: Sequence[RewardTask]) -> None:
        """Let all tasks wait for a worker of the pool."""
        self.pool = pool
        self.tasks = tasks
        self.results: dict[int, RewardResult] = {}
        self.waiting_numbers = deque(range(len(tasks)))
        # their worker died: each is for a fresh one, alone
        self.retry_numbers: deque[int] = deque()
        self.num_deaths: Counter[int] = Counter()
        # component -> when a worker answered for it: others may await their turn
        self.last_reply_at: dict[int, float] = {}
        self.num_restarts = 0

    def score_batch(self) -> list[RewardResult]:
        """Give tasks to workers until every task has a result, and return the results in order."""
        looked_at = time.monotonic()
        while len(self.results) < len(self.tasks):
            in_hand = sum(len(worker.task_numbers) for worker in self.pool.workers.values())
            self.pool.ensure_workers(
                min(
                    self.pool.num_workers,
                    len(self.waiting_numbers) + len(self.retry_numbers) + in_hand,
                )
            )
            for worker in tuple(self.pool.workers.values()):
                if worker.is_idle:
                    self._assign_tasks(worker)
            for speaker in self.pool.wait_for_messages(POLL_S):
                if speaker is None:
                    self._handle_template_messages()
                elif speaker.pid in self.pool.workers:
                    self._read_worker_replies(speaker)
            if time.monotonic() - looked_at >= POLL_S:
                looked_at = time.monotonic()
                self._check_time_limits()
        return [self.results[number] for number in range(len(self.tasks))]

    def _assign_tasks(self, worker: RewardWorkerProcess) -> None:
        """Send an idle worker its next tasks: a task whose worker died goes alone to a worker that
        is not used yet. Kill a used worker where only such tasks are left.
        """
        if self.retry_numbers and not worker.is_used:
            chunk = [self.retry_numbers.popleft()]
        else:
            share = len(self.waiting_numbers) // (CHUNKS_PER_WORKER * self.pool.num_workers)
            size = min(max(1, share), MAX_CHUNK, len(self.waiting_numbers))
            chunk = [self.waiting_numbers.popleft() for _ in range(size)]
        if not chunk:
            if self.retry_numbers:
                self.pool.kill_worker(worker)  # it makes room for a fresh one
            return
        try:
            worker.send_tasks({number: self.tasks[number] for number in chunk})
        except OSError:
            if worker.task_numbers:
                self._handle_worker_loss(worker, "could not be reached")
            else:  # it had ended before, with the template: that is not the sample's doing
                self.pool.kill_worker(worker)
                (
                    self.retry_numbers if self.num_deaths[chunk[0]] else self.waiting_numbers
                ).extendleft(reversed(chunk))

    def _read_worker_replies(self, worker: RewardWorkerProcess) -> None:
        """Record the replies of a worker. At the end of its stream disconnect and kill it; the
        template reports how it ended.
        """
        try:
            for reply in worker.read_replies():
                self.results[reply.number] = reply.result
                self.last_reply_at[self.tasks[reply.number].component_index] = time.monotonic()
        except ValueError:
            self._handle_worker_loss(
                worker, "was ended because something else than its reply came through its socket"
            )
        except (EOFError, OSError):
            self.pool.disconnect_worker(worker)
            self.pool.wait_until_ready().kill_worker(worker.pid)

    def _handle_template_messages(self) -> None:
        """Add forked workers and handle the ends of workers. Restart a template that is gone."""
        template = self.pool.wait_until_ready()
        try:
            for message in template.read_messages():
                if isinstance(message, WorkerEnd):
                    self._handle_worker_end(message)
                else:
                    self.pool.add_worker(message)
        except EOFError:
            self._restart_template()

    def _handle_worker_end(self, worker_end: WorkerEnd) -> None:
        """Read the last replies of a worker that has ended, and account for its loss."""
        worker = self.pool.workers.get(worker_end.pid)
        if worker is None:
            return  # dismissed before
        if worker.is_connected:
            worker.connection.setblocking(False)
        while worker.is_connected:  # what it said before it ended
            self._read_worker_replies(worker)
        how = (
            f"was ended by signal {-worker_end.exit_code}"
            if worker_end.exit_code < 0
            else f"ended with code {worker_end.exit_code}"
        )
        self._handle_worker_loss(worker, how)

    def _handle_worker_loss(self, worker: RewardWorkerProcess, cause: str) -> None:
        """Kill a lost worker and account for its tasks: it died at the first, which is tried once
        more and masked after MAX_DEATHS; the others had not begun and wait again.
        """
        self.pool.kill_worker(worker)
        numbers = list(worker.task_numbers)
        worker.task_numbers.clear()
        if numbers and not worker.is_ending:
            first = numbers.pop(0)
            self.num_deaths[first] += 1
            if self.num_deaths[first] < MAX_DEATHS:
                self.retry_numbers.append(first)
            else:
                error = (
                    f"The worker process {cause} at this sample, and one before it died at it too."
                )
                self.results[first] = make_masked_result("worker_died", error)
        self.waiting_numbers.extendleft(reversed(numbers))

    def _restart_template(self) -> None:
        """Restart the template and let the workers' tasks wait again. Raise ValueError after
        MAX_RESTARTS in this batch.
        """
        self.num_restarts += 1
        if self.num_restarts > MAX_RESTARTS:
            raise ValueError(
                f"the process that reward workers are forked off died {self.num_restarts} times in"
                " one batch of samples; look at the memory of this machine and"
                f" at {self.pool.log_path}."
            )
        lost = [number for worker in self.pool.workers.values() for number in worker.task_numbers]
        self.pool.restart_template()
        self.waiting_numbers.extendleft(reversed(lost))

    def _check_time_limits(self) -> None:
        """End each sample that is over its limit: masked where a server or the machine kept it
        waiting, TIMEOUT with score 0 where its own time passed `timeout_s`.
        """
        limit = self.pool.timeout_s
        self.pool.shorten_log()
        for worker in tuple(self.pool.workers.values()):
            took = time.monotonic() - worker.started_at
            if not worker.task_numbers or not worker.is_connected or took < POLL_S:
                continue
            component = self.tasks[worker.task_numbers[0]].component_index
            if (waits_s := self.pool.waits_s[component]) is not None:
                if min(took, time.monotonic() - self.last_reply_at.get(component, 0.0)) < waits_s:
                    continue
                verdict = make_masked_result(
                    "endpoint", f"After {took:.0f} s a server had not answered."
                )
            elif (counted := worker.stopwatch.update_counted_s()) > limit:
                verdict = RewardResult(0.0, TIMEOUT)
            elif took > OVERLOAD * limit:
                verdict = make_masked_result(
                    "overloaded",
                    f"Of {took:.1f} s the machine kept it waiting for {took - counted:.1f} s.",
                )
            else:
                continue
            if worker not in self.pool.wait_for_messages(0.0):  # it has answered after all
                self._end_sample(worker, verdict)

    def _end_sample(self, worker: RewardWorkerProcess, result: RewardResult) -> None:
        """Record the result of a worker's first task, let its other tasks wait again, and kill the
        worker.
        """
        self.results[worker.task_numbers.popleft()] = result
        self.waiting_numbers.extendleft(reversed(worker.task_numbers))
        worker.task_numbers.clear()
        self.pool.kill_worker(worker)

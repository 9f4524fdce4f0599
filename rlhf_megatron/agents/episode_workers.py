"""The worker processes of episodes, as the controller sees them: forks of one template. A thread of
their own reads what they report, and sends them what they cannot take at once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_megatron.agents.episode_messages import (
    CancelEpisode,
    ReportAlive,
    StartEpisode,
    WorkerOrder,
    WorkerReport,
    decode_report,
    encode_worker_message,
)
from rlhf_megatron.rewards.service.worker_messages import SocketLineReader
from rlhf_megatron.rewards.service.worker_processes import (
    TemplateProcess,
    WorkerEnd,
    shorten_log,
)

logger = logging.getLogger(__name__)

EPISODE_TEMPLATE = "rlhf_megatron.agents.worker"
SELECT_S = 5.0
CONTROL_S = 5.0  # for the template to take a request
FORK_S = 60.0  # a template that forks nothing for so long is broken
CLOSE_S = 5.0  # for workers to close environments at the end of a run
RELEASE_S = 30.0  # for code of an episode that is over to come back, else its worker is retired
MAX_UNSENT_BYTES = 1 << 26  # orders that a worker has not taken
MAX_TEMPLATE_RESTARTS = 3  # within RESTART_WINDOW_S
RESTART_WINDOW_S = 600.0
MAX_FAILED_STARTS = 5  # of an episode, in workers that were gone before they had its order
HELD_UP_S = 0.5  # from here on it counts that code keeps a worker's event loop to itself
MAX_ALIVE_GAP_S = 3.0  # between two reports of a worker that it is alive


@dataclass(eq=False)
class EpisodeWorkerProcess:
    """One forked worker, and the attempts that it runs."""

    pid: int
    connection: socket.socket
    send_bytes: Callable[[EpisodeWorkerProcess, bytes], bool]
    line_reader: SocketLineReader = field(init=False)
    unsent: bytearray = field(default_factory=bytearray)
    is_connected: bool = True
    # attempt -> since when it is over, its code not having come back; None: it goes on
    attempts: dict[int, float | None] = field(default_factory=dict)
    heard_at: float = field(default_factory=time.monotonic)
    alive_report: ReportAlive = field(default_factory=lambda: ReportAlive(0.0, None))  # the last
    # of one episode alone, so that whatever ends the worker is the episode's doing
    is_solitary: bool = False
    # it takes no further episodes: code of one that is over has not come back
    is_retired: bool = False

    def __post_init__(self) -> None:
        """Make the reader of the worker's reports. Nothing waits for the connection."""
        self.connection.setblocking(False)
        self.line_reader = SocketLineReader(self.connection)

    @property
    def is_silent(self) -> bool:
        """Return whether the worker's reports that it is alive fail to come: code in C keeps
        Python's lock, or the process is stopped.
        """
        return time.monotonic() - self.heard_at > MAX_ALIVE_GAP_S

    @property
    def is_held_up(self) -> bool:
        """Return whether something keeps the worker's event loop from its episodes."""
        return self.is_silent or self.alive_report.blocked_s > HELD_UP_S

    def send_order(self, order: WorkerOrder) -> bool:
        """Send an order to the worker, now or as soon as it reads, and return whether the worker
        is there.
        """
        return self.send_bytes(self, encode_worker_message(order))


@dataclass(frozen=True)
class WorkerLoss:
    """A worker is gone, or has written what no worker writes."""

    worker: EpisodeWorkerProcess
    cause: str
    # False: all workers were lost, with the process that they were forked off
    is_own_doing: bool = True


PoolEvent = tuple[EpisodeWorkerProcess, WorkerReport] | WorkerLoss


class EpisodeWorkerPool:
    """The workers of a run's episodes. Its own thread serves their connections; one other thread
    starts episodes and takes the events.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, Any]],
        dialogue_settings: Mapping[str, Any],
        num_workers: int,
        log_path: Path | None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep the settings; nothing starts yet. `environments`: name, params and setting of each
        that the run may use. `dialogue_settings`: what the template makes the dialogue's format of
        (see `worker.main`). `notify` is called, on the pool's thread, when there is an event.
        """
        self.num_workers = num_workers
        self.notify = notify
        # row -> error, of rows whose code has ended a worker of its own: see `EpisodeBook`
        self.quarantined_rows: dict[str, str] = {}
        self._message = {"environments": list(environments), **dialogue_settings}
        self._log_path = log_path
        self._template: TemplateProcess[EpisodeWorkerProcess] | None = None
        self._workers: dict[int, EpisodeWorkerProcess] = {}
        self._events: queue.SimpleQueue[PoolEvent] = queue.SimpleQueue()
        self._new_workers: queue.SimpleQueue[EpisodeWorkerProcess | None] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        # of `_workers`, their connections and unsent orders, and the selector's registrations
        self._lock = threading.Lock()
        self._has_news = False  # the pool's thread has put events into the queue
        self._thread: threading.Thread | None = None
        self._thread_error: BaseException | None = None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._is_closed = False
        self._attempt_numbers = itertools.count(1)
        self._restart_times: deque[float] = deque(maxlen=MAX_TEMPLATE_RESTARTS)

    def start(self) -> None:
        """Start the template and wait until it has loaded the environments. Call it on the main
        thread: the processes end with the thread that started them. Raise ConfigError or ValueError
        with what is wrong with them.
        """
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._start_template()
        self._thread = threading.Thread(
            target=self._serve_connections, name="episode workers", daemon=True
        )
        self._thread.start()

    def make_attempt_number(self) -> int:
        """Return a number that no start of an episode has had before."""
        return next(self._attempt_numbers)

    def count_solitary_workers(self) -> int:
        """Return the number of workers of one episode, those included whose episode is over."""
        with self._lock:
            return sum(worker.is_solitary for worker in self._workers.values())

    def start_episode(self, order: StartEpisode, is_alone: bool) -> EpisodeWorkerProcess:
        """Send the order to the worker with the fewest episodes, or, where `is_alone`, to a new
        worker that runs nothing else. Return the worker. Raise ValueError where no worker can be
        forked, or where workers end before they have an order.
        """
        for _ in range(MAX_FAILED_STARTS):
            worker = self._fork_worker() if is_alone else self._choose_worker()
            worker.is_solitary = is_alone
            worker.attempts[order.attempt] = None
            if worker.send_order(order):
                return worker
            del worker.attempts[order.attempt]
        raise ValueError(
            f"{MAX_FAILED_STARTS} workers of episodes ended as soon as they were forked; look at"
            f" the memory of this machine and at {self._log_path}."
        )

    def take_events(self) -> list[PoolEvent]:
        """Return what the workers have reported since the last call, in order; at once. Raise the
        error that has ended the pool's thread.
        """
        if self._thread_error is not None:
            raise self._thread_error
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def mark_over(self, worker: EpisodeWorkerProcess, attempt: int) -> None:
        """Note that an episode has ended; its code is to come back."""
        if attempt in worker.attempts:
            worker.attempts[attempt] = time.monotonic()

    def cancel_attempt(self, worker: EpisodeWorkerProcess, key: int, attempt: int) -> None:
        """Tell a worker that an episode is ended from outside."""
        self.mark_over(worker, attempt)
        worker.send_order(CancelEpisode(key, attempt))

    def release_attempt(
        self, worker: EpisodeWorkerProcess, attempt: int, is_clean: bool = True
    ) -> None:
        """Note that an episode's code has come back, or, unless `is_clean`, that it never will: its
        worker then takes no more episodes. A worker that is of no further use ends.
        """
        worker.attempts.pop(attempt, None)
        worker.is_retired = worker.is_retired or not is_clean
        is_needed = not worker.is_solitary and not worker.is_retired
        if not worker.attempts and not (is_needed and self._count_shared() <= self.num_workers):
            self.kill_worker(worker)

    def retire_stuck_workers(self) -> None:
        """Give up the code of episodes that has not come back for RELEASE_S after their end. Keep
        the log short. Call it again and again.
        """
        now = time.monotonic()
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            for attempt, ended_at in list(worker.attempts.items()):
                if ended_at is not None and now - ended_at > RELEASE_S:
                    self.release_attempt(worker, attempt, is_clean=False)
        if self._log_path is not None:
            shorten_log(self._log_path)

    def kill_worker(self, worker: EpisodeWorkerProcess) -> None:
        """Kill a worker with all that it has started. Its episodes are left to the caller; no event
        follows.
        """
        self._forget_worker(worker)
        self._end_process(worker)

    def close(self) -> None:
        """Let workers close the environments of their episodes, for a moment; then end all of them
        and the template. Safe to call twice.
        """
        try:
            self._wait_for_closings()
        finally:
            self._is_closed = True
            if self._thread is not None:
                self._wake_sender.send(b"x")
                self._thread.join()
                self._thread = None
            with self._lock:
                workers = list(self._workers.values())
                self._workers.clear()
            for worker in workers:
                worker.connection.close()
            if self._template is not None:
                self._template.close()
                self._template = None
            for thing in (self._selector, self._wake_sender, self._wake_receiver):
                thing.close()

    def __enter__(self) -> EpisodeWorkerPool:
        """Return the pool; start it with `start`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def _start_template(self) -> None:
        """Start a template, wait for it, and let the pool's thread hear it."""
        template = TemplateProcess(
            EPISODE_TEMPLATE, self._message, self._log_path, "environments", self._make_worker
        )
        self._template = template
        template.wait_until_ready()
        template.control.settimeout(CONTROL_S)
        with self._lock:
            self._selector.register(template.control, selectors.EVENT_READ, template)

    def _restart_template(self) -> None:
        """Start another template in place of one that is gone, or does not answer; its workers end
        with it. Raise ValueError where that happens too often.
        """
        now = time.monotonic()
        num_restarts = len(self._restart_times)
        if (
            num_restarts == MAX_TEMPLATE_RESTARTS
            and now - self._restart_times[0] < RESTART_WINDOW_S
        ):
            raise ValueError(
                f"the process that workers of episodes are forked off was lost {num_restarts + 1}"
                f" times within {RESTART_WINDOW_S / 60:.0f} minutes; look at the memory of this"
                f" machine and at {self._log_path}."
            )
        self._restart_times.append(now)
        assert self._template is not None, "the pool is not started"
        logger.warning("the process that workers of episodes are forked off is started again")
        self._lose_template(self._template)
        self._template.close()
        with contextlib.suppress(queue.Empty):
            while True:
                self._new_workers.get_nowait()
        self._start_template()

    def _make_worker(self, pid: int, connection: socket.socket) -> EpisodeWorkerProcess:
        """Return the worker of a pid and a socket that the template has sent."""
        return EpisodeWorkerProcess(pid, connection, self._send_bytes)

    def _choose_worker(self) -> EpisodeWorkerProcess:
        """Return the worker with the fewest episodes, a new one while there are fewer than
        `num_workers`. Workers that are held up do not count; they recover, or are ended soon.
        """
        with self._lock:
            shared = [
                worker
                for worker in self._workers.values()
                if not (worker.is_solitary or worker.is_retired or worker.is_held_up)
                and worker.is_connected
            ]
        if len(shared) < self.num_workers:
            return self._fork_worker()
        return min(shared, key=lambda worker: len(worker.attempts))

    def _fork_worker(self) -> EpisodeWorkerProcess:
        """Let the template fork a worker, and wait for it. Raise ValueError where that fails."""
        while True:
            assert self._template is not None, "the pool is not started"
            self._template.request_workers(1)
            worker = None
            with contextlib.suppress(queue.Empty):
                worker = self._new_workers.get(timeout=FORK_S)
            if worker is not None:
                return worker
            if self._thread_error is not None:
                raise self._thread_error
            self._restart_template()

    def _count_shared(self) -> int:
        """Return the number of workers of many episodes: more than `num_workers` where some were
        held up for a while.
        """
        with self._lock:
            return sum(
                not worker.is_solitary and not worker.is_retired
                for worker in self._workers.values()
            )

    def _forget_worker(self, worker: EpisodeWorkerProcess) -> bool:
        """Close the connection to a worker, and hear it no more. Return whether it was known."""
        with self._lock:
            if self._workers.get(worker.pid) is not worker:
                return False
            del self._workers[worker.pid]
            self._disconnect_worker(worker)
            worker.connection.close()
        return True

    def _disconnect_worker(self, worker: EpisodeWorkerProcess) -> None:
        """Stop watching a worker's connection. The caller holds the lock."""
        if worker.is_connected:
            worker.is_connected = False
            self._selector.unregister(worker.connection)

    def _send_bytes(self, worker: EpisodeWorkerProcess, data: bytes) -> bool:
        """Send bytes to a worker; what it cannot take now is sent by the pool's thread. Return
        whether the worker is there.
        """
        with self._lock:
            if self._workers.get(worker.pid) is not worker or not worker.is_connected:
                return False
            worker.unsent += data
            return self._flush_orders(worker)

    def _flush_orders(self, worker: EpisodeWorkerProcess) -> bool:
        """Send what a worker takes now, and return whether it is there. The caller holds the
        lock.
        """
        try:
            while worker.unsent:
                del worker.unsent[: worker.connection.send(worker.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            worker.is_retired = True  # its end is on the way
            return False
        writing = selectors.EVENT_WRITE if worker.unsent else 0
        self._selector.modify(worker.connection, selectors.EVENT_READ | writing, worker)
        return len(worker.unsent) <= MAX_UNSENT_BYTES

    def _serve_connections(self) -> None:
        """Serve the connections until the pool is closed. Runs on the pool's thread."""
        try:
            while not self._is_closed:
                self._has_news = False
                for selected, ready in self._selector.select(SELECT_S):
                    if isinstance(selected.data, TemplateProcess):
                        self._read_template(selected.data)
                    elif selected.data is not None:
                        self._serve_worker(selected.data, ready)
                if self._has_news:
                    self.notify()
        except BaseException as error:
            self._thread_error = error
            self._new_workers.put(None)
            self.notify()

    def _serve_worker(self, worker: EpisodeWorkerProcess, ready: int) -> None:
        """Send a worker what waits for it, and read what it has written."""
        if ready & selectors.EVENT_WRITE:
            with self._lock:
                if worker.is_connected:
                    self._flush_orders(worker)
        if ready & selectors.EVENT_READ:
            self._read_worker(worker)

    def _read_template(self, template: TemplateProcess[EpisodeWorkerProcess]) -> None:
        """Take a new worker, or the end of one, from the template."""
        if template is not self._template:
            return  # replaced meanwhile
        try:
            for message in template.read_messages():
                if isinstance(message, WorkerEnd):
                    self._note_worker_end(message)
                    continue
                with self._lock:
                    self._workers[message.pid] = message
                    self._selector.register(message.connection, selectors.EVENT_READ, message)
                self._new_workers.put(message)
        except (EOFError, OSError):
            self._lose_template(template)
            self._new_workers.put(None)

    def _lose_template(self, template: TemplateProcess[EpisodeWorkerProcess]) -> None:
        """Report the loss of all workers: they end with their template."""
        with self._lock:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(template.control)
            workers = list(self._workers.values())
        for worker in workers:
            self._report_loss(
                WorkerLoss(worker, "ended with the process that it was forked off", False)
            )

    def _read_worker(self, worker: EpisodeWorkerProcess) -> bool:
        """Take the reports that a worker has written; return whether there may be more."""
        with self._lock:
            if not worker.is_connected:
                return False
            try:
                lines = list(worker.line_reader.read_lines())
            except BlockingIOError:
                return False
            except (EOFError, OSError):
                # the template tells how it ended; one that has closed its connection has not
                self._disconnect_worker(worker)
                self._end_process(worker)
                return False
            except ValueError:
                lines = [b""]  # which is no report
        worker.heard_at = time.monotonic()
        try:
            for line in lines:
                report = decode_report(line)
                if isinstance(report, ReportAlive):
                    worker.alive_report = report
                if not isinstance(report, ReportAlive) or report.blocked_s > HELD_UP_S:
                    self._events.put((worker, report))
                    self._has_news = True
        except ValueError:
            cause = "was ended because something else than its reports came from it"
            if self._report_loss(WorkerLoss(worker, cause)):
                self._end_process(worker)
            return False
        return True

    def _note_worker_end(self, worker_end: WorkerEnd) -> None:
        """Report the loss of a worker that has ended by itself, after what it has written."""
        with self._lock:
            worker = self._workers.get(worker_end.pid)
        if worker is None:
            return  # killed by the pool
        while self._read_worker(worker):
            pass
        how = (
            f"was ended by signal {-worker_end.exit_code}"
            if worker_end.exit_code < 0
            else f"ended with code {worker_end.exit_code}"
        )
        self._report_loss(WorkerLoss(worker, how))

    def _report_loss(self, loss: WorkerLoss) -> bool:
        """Forget a worker, and put its loss among the events. Return whether it was known."""
        is_known = self._forget_worker(loss.worker)
        if is_known:
            self._events.put(loss)
            self._has_news = True
        return is_known

    def _end_process(self, worker: EpisodeWorkerProcess) -> None:
        """Let the template kill a worker's process group."""
        if self._template is not None:
            self._template.kill_worker(worker.pid)

    def _wait_for_closings(self) -> None:
        """Tell workers with episodes that the run is over, and wait until they have ended, or for
        CLOSE_S.
        """
        with self._lock:
            busy = [worker for worker in self._workers.values() if worker.attempts]
            for worker in busy:
                with contextlib.suppress(OSError):
                    worker.connection.shutdown(socket.SHUT_WR)
        give_up_at = time.monotonic() + CLOSE_S
        while busy and time.monotonic() < give_up_at and self._thread_error is None:
            time.sleep(0.02)
            busy = [worker for worker in busy if self._workers.get(worker.pid) is worker]

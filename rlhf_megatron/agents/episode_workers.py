"""The worker processes of episodes, as the controller sees them: forks of one template, read by a
thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_megatron.agents.episode_messages import (
    StartEpisode,
    WorkerOrder,
    WorkerReport,
    decode_report,
    encode_worker_message,
)
from rlhf_megatron.rewards.service.worker_messages import SocketLineReader
from rlhf_megatron.rewards.service.worker_processes import TemplateProcess, WorkerEnd

logger = logging.getLogger(__name__)

EPISODE_TEMPLATE = "rlhf_megatron.agents.worker"
SEND_S = 30.0  # a worker that reads nothing for so long is broken
STOP_S = 5.0
MAX_TEMPLATE_RESTARTS = 3


@dataclass(eq=False)
class EpisodeWorkerProcess:
    """One forked worker, and the episodes that it runs."""

    pid: int
    connection: socket.socket
    line_reader: SocketLineReader = field(init=False)
    keys: set[int] = field(default_factory=set)  # of its episodes
    # of one episode alone, so that whatever ends the worker is the episode's doing
    is_solitary: bool = False
    # it takes no further episodes: code of one that is over has not come back
    is_retired: bool = False

    def __post_init__(self) -> None:
        """Make the reader of the worker's reports, and bound what sending takes."""
        self.connection.settimeout(SEND_S)
        self.line_reader = SocketLineReader(self.connection)

    def send_order(self, order: WorkerOrder) -> bool:
        """Send an order to the worker, and return whether that was possible."""
        try:
            self.connection.sendall(encode_worker_message(order))
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class WorkerLoss:
    """A worker is gone, or has written what no worker writes."""

    worker: EpisodeWorkerProcess
    cause: str


PoolEvent = tuple[EpisodeWorkerProcess, WorkerReport] | WorkerLoss


class EpisodeWorkerPool:
    """The workers of a run's episodes. Its reading thread collects what they report; one other
    thread starts episodes and takes the events.
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
        (see `worker.main`). `notify` is called, on the reading thread, when there is an event.
        """
        self.num_workers = num_workers
        self.notify = notify
        self._message = {"environments": list(environments), **dialogue_settings}
        self._log_path = log_path
        self._template: TemplateProcess[EpisodeWorkerProcess] | None = None
        self._workers: dict[int, EpisodeWorkerProcess] = {}
        self._events: queue.SimpleQueue[PoolEvent] = queue.SimpleQueue()
        self._new_workers: queue.SimpleQueue[EpisodeWorkerProcess | None] = queue.SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()  # of the selector's registrations and of `_workers`
        self._is_closed = False
        self._num_restarts = 0

    def start(self) -> None:
        """Start the template and wait until it has loaded the environments. Call it on the main
        thread: the processes end with the thread that started them. Raise ConfigError or ValueError
        with what is wrong with them.
        """
        self._start_template()
        threading.Thread(target=self._read_reports, name="episode reports", daemon=True).start()

    def start_episode(self, order: StartEpisode, is_alone: bool) -> EpisodeWorkerProcess:
        """Send the order to the worker with the fewest episodes, or, where `is_alone`, to a new
        worker that runs nothing else. Return the worker. Raise ValueError where no worker can be
        forked.
        """
        while True:
            worker = self._fork_worker() if is_alone else self._choose_worker()
            worker.is_solitary = is_alone
            worker.keys.add(order.key)
            if worker.send_order(order):
                return worker
            worker.keys.discard(order.key)
            self.kill_worker(worker)

    def take_events(self) -> list[PoolEvent]:
        """Return what the workers have reported since the last call, in order; at once."""
        events = []
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return events

    def release_episode(self, worker: EpisodeWorkerProcess, key: int) -> None:
        """Note that an episode's code has come back. A worker that is of no further use ends."""
        worker.keys.discard(key)
        if not worker.keys and (worker.is_solitary or worker.is_retired):
            self.kill_worker(worker)

    def kill_worker(self, worker: EpisodeWorkerProcess) -> None:
        """Kill a worker with all that it has started. Its episodes are left to the caller; no event
        follows.
        """
        self._forget_worker(worker)
        if self._template is not None:
            self._template.kill_worker(worker.pid)

    def close(self) -> None:
        """End all workers and the template. Safe to call twice."""
        self._is_closed = True
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            self._forget_worker(worker)
        if self._template is not None:
            self._template.close()
        self._template = None

    def __enter__(self) -> EpisodeWorkerPool:
        """Return the pool; start it with `start`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def _start_template(self) -> None:
        """Start a template, wait for it, and let the reading thread hear it."""
        template = TemplateProcess(
            EPISODE_TEMPLATE, self._message, self._log_path, "environments", EpisodeWorkerProcess
        )
        self._template = template
        template.wait_until_ready()
        template.control.settimeout(None)
        with self._lock:
            self._selector.register(template.control, selectors.EVENT_READ, None)

    def _choose_worker(self) -> EpisodeWorkerProcess:
        """Return the worker with the fewest episodes, a new one while there are fewer than
        `num_workers`.
        """
        with self._lock:
            shared = [
                worker
                for worker in self._workers.values()
                if not worker.is_solitary and not worker.is_retired
            ]
        if len(shared) < self.num_workers:
            return self._fork_worker()
        return min(shared, key=lambda worker: len(worker.keys))

    def _fork_worker(self) -> EpisodeWorkerProcess:
        """Let the template fork a worker, and wait for it. Raise ValueError where that fails."""
        while True:
            assert self._template is not None, "the pool is not started"
            self._template.request_workers(1)
            worker = self._new_workers.get()
            if worker is not None:
                return worker
            # the template was lost
            self._num_restarts += 1
            if self._num_restarts > MAX_TEMPLATE_RESTARTS:
                raise ValueError(
                    "the process that workers of episodes are forked off died"
                    f" {self._num_restarts} times; look at the memory of this machine and at"
                    f" {self._log_path}."
                )
            self._template.close()
            self._start_template()

    def _forget_worker(self, worker: EpisodeWorkerProcess) -> None:
        """Close the connection to a worker, and hear it no more."""
        with self._lock:
            if self._workers.pop(worker.pid, None) is None:
                return
            self._selector.unregister(worker.connection)
        worker.connection.close()

    def _read_reports(self) -> None:
        """Collect events until the pool is closed. Runs on the reading thread."""
        while not self._is_closed:
            try:
                ready = self._selector.select(STOP_S)
            except (OSError, ValueError):  # closed meanwhile
                continue
            for selected, _ in ready:
                worker = selected.data
                if worker is None:
                    self._read_template(selected.fileobj)
                else:
                    self._read_worker(worker)
            if ready:
                self.notify()

    def _read_template(self, control: Any) -> None:
        """Take a new worker, or the end of one, from the template."""
        template = self._template
        if template is None or template.control is not control:
            return
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
            with self._lock, contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(control)
            with self._lock:
                lost = list(self._workers.values())
            for worker in lost:  # they end with the template
                self._report_loss(worker, "ended with the process that it was forked off")
            self._new_workers.put(None)

    def _read_worker(self, worker: EpisodeWorkerProcess) -> None:
        """Take the reports that a worker has written."""
        try:
            for line in worker.line_reader.read_lines():
                self._events.put((worker, decode_report(line)))
        except ValueError:
            self._report_loss(
                worker, "was ended because something else than its reports came from it"
            )
            if self._template is not None:
                self._template.kill_worker(worker.pid)
        except (EOFError, OSError):
            # the template tells how it ended
            with self._lock, contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(worker.connection)

    def _note_worker_end(self, worker_end: WorkerEnd) -> None:
        """Report the loss of a worker that has ended by itself."""
        with self._lock:
            worker = self._workers.get(worker_end.pid)
        if worker is None:
            return  # killed by the pool
        how = (
            f"was ended by signal {-worker_end.exit_code}"
            if worker_end.exit_code < 0
            else f"ended with code {worker_end.exit_code}"
        )
        self._report_loss(worker, how)

    def _report_loss(self, worker: EpisodeWorkerProcess, cause: str) -> None:
        """Forget a worker, and put its loss among the events."""
        with self._lock:
            if self._workers.pop(worker.pid, None) is None:
                return
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(worker.connection)
        worker.connection.close()
        self._events.put(WorkerLoss(worker, cause))

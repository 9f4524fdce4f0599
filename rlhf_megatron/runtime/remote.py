"""A WorkerGroup whose hosts are other processes: calls over channels, deadlines, and the end when a host fails."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.rollout.sockets import VANISHED_S
from rlhf_megatron.runtime.channel import MAX_FRAME_BYTES, Channel, FrameError, VanishedError
from rlhf_megatron.runtime.dispatch import join, scatter_calls
from rlhf_megatron.runtime.failures import HostError, HostLostError, HostTimeoutError, as_error
from rlhf_megatron.runtime.hang import DescribeHang, HostView, describe_hosts
from rlhf_megatron.runtime.messages import BUILD, Call, Leave, Ping, Reply, Signalled, Status
from rlhf_megatron.runtime.processes import machine_id

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = MAX_FRAME_BYTES // 2  # the rest of a call is small
FAILURE_GRACE_S = 1.0  # after a call failed on one rank: for the others to say why, or to turn out dead
STATUS_TIMEOUT_S = 3.0  # for hosts to answer a ping
CLOSE_GRACE_S = 30.0  # for roles to close at the end of a run
ABORT_GRACE_S = 1.0  # the same after a failure
KILL_AFTER_S = 3.0  # beyond the grace; then hosts on this machine are killed


Finish = Callable[[dict[int, Any]], Any]  # rank -> value, of all ranks; makes the future's result


@dataclass
class HostLink:
    """The controller's end of one host."""

    rank: int
    where: str
    channel: Channel
    pid: int
    machine: str
    host: str = ""  # name and address of its machine, for messages
    is_vanished: bool = False  # the machine gives no sign any more
    is_open: bool = True  # set to False by the thread that reads the channels


@dataclass
class _Pending:
    """A call that hosts have not answered."""

    method: str
    future: Future[Any]
    finish: Finish
    timeout_s: float
    replies: dict[int, Reply] = field(default_factory=dict)
    deadline: float | None = None  # set when all calls before it are done
    failed_at: float | None = None  # when the first rank said that it raised

    @property
    def failures(self) -> list[Reply]:
        return [reply for reply in self.replies.values() if reply.failure is not None]


class RemoteGroup:
    """Calls to all hosts of a pool. Any failure ends the group: hosts are told to leave, then killed where possible.

    Groups that are tied (see `tie`) end together.

    `links`: one a rank, in rank order, authenticated and registered. `on_signalled(coordinates, message)` is called,
    on a thread, when a host was told to stop.
    """

    def __init__(
        self,
        layout: Layout,
        links: Sequence[HostLink],
        startup_timeout_s: float,
        call_timeout_s: float,
        on_signalled: Callable[[str, Signalled], None],
    ) -> None:
        assert [link.rank for link in links] == list(range(layout.world_size)), "one link a rank, in order"
        self.layout = layout
        self.failure: HostError | None = None
        self._links = links
        self._call_timeout_s = call_timeout_s
        self._on_signalled = on_signalled
        self._changed = threading.Condition()
        self._submit_lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}  # in the order in which hosts run them
        self._next_id = BUILD + 1
        self._next_ping = 1
        self._statuses: dict[int, dict[int, Status]] = {}  # ping id -> rank -> status
        self._is_closing = False
        self._tied: Sequence[RemoteGroup] = (self,)  # all pools of the job, in order
        self._describe_hang: DescribeHang = _hang_of_hosts
        self._failure_elsewhere: HostError | None = None  # of one of them
        self._built = self._expect(BUILD, _Pending("building roles", Future(), lambda values: None, startup_timeout_s))
        self._reader = threading.Thread(target=self._read, name="control channels", daemon=True)
        self._monitor_thread = threading.Thread(target=self._monitor, name="control channel monitor", daemon=True)
        self._reader.start()
        self._monitor_thread.start()

    @property
    def own_address(self) -> str:
        """The address of the controller's machine that the hosts reach."""
        return self._links[0].channel.own_address

    def wait_until_built(self) -> None:
        """Returns when the roles stand on all ranks. Raises HostError, also a ValueError where the user can fix it."""
        self._built.result()

    def scatter(self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any) -> Future[Any]:
        with self._submit_lock:
            scattered = scatter_calls(self._next_id, method, batch, self.layout, token_budget, arguments)

            leaders, plans, offsets = scattered.leaders, scattered.plans, batch.offsets

            def finish(values: dict[int, Any]) -> Any:  # keeps nothing of the batch but these
                return join(method, [values[rank] for rank in leaders], plans, offsets)

            if scattered.largest_bytes > MAX_SHARD_BYTES:
                raise ValueError(
                    f"{method}: the shard of one replica has {scattered.largest_bytes} bytes, over the limit of"
                    f" {MAX_SHARD_BYTES}; lower data.train_batch_size or rollout.n, or use more replicas."
                )
            return self._submit(method, scattered.call, finish)

    def broadcast(self, method: str, **arguments: Any) -> Future[list[Any]]:
        with self._submit_lock:
            call = Call(self._next_id, method, arguments)
            return self._submit(method, lambda rank: call, lambda values: [values[rank] for rank in sorted(values)])

    def statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, Status | None]:
        """Ask each host what it is doing, by coordinates; None where it did not answer within `timeout_s`."""
        return {view.where: view.status for view in views_of([self], timeout_s)}

    def describe_hangs_by(self, describe: DescribeHang) -> None:
        """Set what makes the error of a call that is late, from now on."""
        self._describe_hang = describe

    def ping(self) -> int:
        """Ask every host what it is doing. Returns what `answers` takes."""
        with self._changed:
            ping_id, self._next_ping = self._next_ping, self._next_ping + 1
            self._statuses[ping_id] = {}
        for link in self._links:
            with contextlib.suppress(ConnectionError):  # it is then missing from the answers
                link.channel.send(Ping(ping_id), lock_timeout_s=0.5)
        return ping_id

    def answers(self, ping_id: int, timeout_s: float) -> list[HostView]:
        """Return what the hosts answered within `timeout_s`, by rank. Call it once for each ping."""
        with self._changed:
            answers = self._statuses[ping_id]
            self._changed.wait_for(lambda: len(answers) == len(self._links), timeout_s)
            del self._statuses[ping_id]
        here = machine_id()
        return [HostView(link.where, link.pid, link.machine == here, answers.get(link.rank)) for link in self._links]

    def fail_with(self, error: HostError) -> None:
        """Another group that this one is tied to has failed: this one ends in the same way. Safe to call twice."""
        with self._changed:
            self._failure_elsewhere = self._failure_elsewhere or error
            self._changed.notify_all()

    def close(self) -> None:
        """Tell all hosts to leave and wait for them; kill what stays and can be reached. Safe to call twice."""
        with self._changed:
            is_first = not self._is_closing and self.failure is None
            is_idle = not self._pending
            self._is_closing = True
            self._changed.notify_all()
        self._monitor_thread.join(timeout=2 * (STATUS_TIMEOUT_S + ABORT_GRACE_S + KILL_AFTER_S))
        if is_first:
            self._end_hosts("the run is over", CLOSE_GRACE_S if is_idle else ABORT_GRACE_S)
            self._fail_pending(HostError("the group was closed."))
        # A thread that frees a tensor while the interpreter shuts down aborts the process.
        self._reader.join(ABORT_GRACE_S)

    def _tie(self, groups: Sequence[RemoteGroup]) -> None:
        with self._changed:
            self._tied = groups
            failure = self.failure
        if failure is not None:  # it was faster
            self._fail_others(failure)

    def _fail_others(self, error: HostError) -> None:
        for other in self._tied:
            if other is not self:
                other.fail_with(error)

    def _submit(self, method: str, call_of: Callable[[int], Call], finish: Finish) -> Future[Any]:
        """`call_of`: rank -> its call."""
        future: Future[Any] = Future()
        call_id = self._next_id
        with self._changed:
            if self.failure is not None or self._is_closing:
                future.set_exception(self.failure or HostError("the group is closed."))
                return future
            self._next_id += 1
            self._expect(call_id, _Pending(method, future, finish, self._call_timeout_s))
        try:
            shared: dict[int, list[codec.Buffer]] = {}  # of calls that several ranks get
            for link in self._links:
                call = call_of(link.rank)
                parts = codec.encode_parts(call) if call.shard else shared.get(id(call))
                if parts is None:
                    parts = shared[id(call)] = codec.encode_parts(call)
                with contextlib.suppress(ConnectionError):  # its reading thread sees it too
                    link.channel.send_parts(parts)
        except ValueError:  # cannot be encoded: no host has got it, since all calls have the same arguments
            with self._changed:
                self._pending.pop(call_id, None)
            raise
        except Exception as error:  # memory, a device: some hosts may have got it, and wait for the others
            self.fail_with(HostError(f"{method} could not be sent to all hosts: {type(error).__name__}: {error}"))
            raise
        return future

    def _expect(self, call_id: int, pending: _Pending) -> Future[Any]:
        if not self._pending:
            pending.deadline = time.monotonic() + pending.timeout_s
        self._pending[call_id] = pending
        self._changed_notify()
        return pending.future

    def _changed_notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _read(self) -> None:
        """A thread, until the channels of all hosts have ended."""
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link.channel, selectors.EVENT_READ, link)
            while selector.get_map():
                for key, _ in selector.select():
                    link = key.data
                    try:
                        if (message := link.channel.take()) is not None:
                            self._take_message(link, message)
                            del message  # and its tensors, while the next is waited for
                    except (EOFError, FrameError, MemoryError) as error:
                        is_usual = isinstance(error, EOFError)
                        logger.log(logging.DEBUG if is_usual else logging.ERROR, "%s %r", link.where, error)
                        selector.unregister(link.channel)
                        link.is_vanished = isinstance(error, VanishedError)
                        with self._changed:
                            link.is_open = False
                            self._changed.notify_all()

    def _take_message(self, link: HostLink, message: Any) -> None:
        if isinstance(message, Reply):
            self._take_reply(link, message)
        elif isinstance(message, Status):
            with self._changed:
                self._statuses.get(message.id, {})[link.rank] = message
                self._changed.notify_all()
        elif isinstance(message, Signalled):
            self._on_signalled(link.where, message)
        else:
            raise FrameError(f"a host sent a {type(message).__name__}.")

    def _take_reply(self, link: HostLink, reply: Reply) -> None:
        with self._changed:
            pending = self._pending.get(reply.id)
            if pending is None:
                return
            pending.replies[link.rank] = reply
            if reply.failure is None and pending.failed_at is None and len(pending.replies) < len(self._links):
                return  # nobody waits for less: waking them at every reply would cost the square of the ranks
            if pending.failures:
                pending.failed_at = pending.failed_at or time.monotonic()
            else:
                del self._pending[reply.id]
                if self._pending:
                    head = next(iter(self._pending.values()))
                    head.deadline = time.monotonic() + head.timeout_s
            self._changed.notify_all()
            if pending.failures:
                return
        try:
            result = pending.finish({rank: reply.value for rank, reply in pending.replies.items()})
        except Exception as error:  # the future carries it
            pending.future.set_exception(error)
        else:
            pending.future.set_result(result)

    def _monitor(self) -> None:
        """A thread: turns lost hosts, failed calls and passed deadlines into the failure of the group."""
        while True:
            with self._changed:
                if self._is_closing:
                    return
                error = self._find_failure()
                late = self._find_late()
                if error is None and late is None:
                    self._changed.wait(self._seconds_to_next_event())
                    continue
            if error is None and late is not None:
                header = f"{late.method} was not finished within {late.timeout_s:g} s (trainer.stage_timeout_s)."
                error = self._describe_hang(header, describe_hosts(views_of(self._tied, STATUS_TIMEOUT_S)))
            assert error is not None
            with self._changed:
                self.failure = error
            self._fail_others(error)
            self._fail_pending(error)
            self._end_hosts("another host failed", ABORT_GRACE_S)
            return

    def _find_failure(self) -> HostError | None:
        if self._failure_elsewhere is not None:
            return self._failure_elsewhere
        head = next(iter(self._pending.values()), None)
        if lost := [link for link in self._links if not link.is_open]:
            doing = f" during {head.method}" if head else ""
            names = ", ".join(f"{link.where} (process {link.pid})" for link in lost)
            if gone := {link.host for link in lost if link.is_vanished}:
                there = ", ".join(link.where for link in self._links if link.host in gone)
                machines = " and ".join(sorted(gone))
                return HostLostError(
                    f"the machine {machines} is lost{doing}: it has given no sign for {VANISHED_S} s, and {there} were"
                    " there. Look at its power, its network and its system log."
                )
            said = "".join(f"\n{as_error(head.method, r.failure)}" for r in head.failures if r.failure) if head else ""
            return HostLostError(f"{names} died{doing}; its log may tell why.{said}")
        for pending in self._pending.values():
            if pending.failed_at is None:
                continue
            is_complete = len(pending.replies) == len(self._links)
            if is_complete or time.monotonic() >= pending.failed_at + FAILURE_GRACE_S:
                failure = pending.failures[0].failure
                assert failure is not None
                return as_error(pending.method, failure)
        return None

    def _find_late(self) -> _Pending | None:
        head = next(iter(self._pending.values()), None)
        is_late = head is not None and head.deadline is not None and time.monotonic() >= head.deadline
        return head if is_late else None

    def _seconds_to_next_event(self) -> float | None:
        events = [p.deadline for p in self._pending.values() if p.deadline is not None]
        events += [p.failed_at + FAILURE_GRACE_S for p in self._pending.values() if p.failed_at is not None]
        return max(0.0, min(events) - time.monotonic()) if events else None

    def _fail_pending(self, error: HostError) -> None:
        with self._changed:
            left = list(self._pending.values())
            self._pending.clear()
        for pending in left:
            pending.future.set_exception(error)

    def _end_hosts(self, reason: str, grace_s: float) -> None:
        for link in self._links:
            if link.is_open:
                with contextlib.suppress(ConnectionError):  # it is gone, or is killed below
                    link.channel.send(Leave(reason, grace_s), lock_timeout_s=0.5)
        with self._changed:
            self._changed.wait_for(lambda: not any(link.is_open for link in self._links), grace_s + KILL_AFTER_S)
        for link in self._links:
            if link.is_open:
                is_here = link.machine == machine_id()
                logger.error(
                    "%s (process %d) does not end%s", link.where, link.pid, "; it is killed" if is_here else ""
                )
                if is_here:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(link.pid, signal.SIGKILL)
            link.channel.shut_down()
        self._reader.join(ABORT_GRACE_S)
        for link in self._links:
            link.channel.close()


def tie(groups: Sequence[RemoteGroup]) -> None:
    """Make groups one job: when one fails all fail with its error, and a report of what hosts do names those of all."""
    for group in groups:
        group._tie(groups)


def views_of(groups: Sequence[RemoteGroup], timeout_s: float) -> list[HostView]:
    """Ask the hosts of all groups what they are doing, and return what they answered within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pings = [group.ping() for group in groups]
    answers = [group.answers(p, max(0.0, deadline - time.monotonic())) for group, p in zip(groups, pings, strict=True)]
    return [view for views in answers for view in views]


def _hang_of_hosts(header: str, lines: Sequence[str]) -> HostTimeoutError:
    return HostTimeoutError("\n".join([f"{header} The hosts:", *lines]))

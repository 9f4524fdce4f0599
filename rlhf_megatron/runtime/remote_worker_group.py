"""A WorkerGroup whose hosts are other processes: calls over channels, deadlines, and the end
when a host fails.
"""

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
from rlhf_megatron.rollout.socket_limits import DEAD_PEER_TIMEOUT_S
from rlhf_megatron.runtime.call_dispatch import join_replica_results, make_scattered_call
from rlhf_megatron.runtime.control_messages import (
    BUILD,
    HostSignalNotice,
    HostStatus,
    LeaveRequest,
    RoleCall,
    RoleCallReply,
    StatusRequest,
)
from rlhf_megatron.runtime.hang_report import DescribeHang, HostSnapshot, describe_hosts
from rlhf_megatron.runtime.host_errors import (
    HostError,
    HostLostError,
    HostTimeoutError,
    make_host_call_error,
)
from rlhf_megatron.runtime.message_channel import (
    MAX_FRAME_BYTES,
    FrameError,
    MessageChannel,
    PeerVanishedError,
)
from rlhf_megatron.runtime.process_control import read_machine_id
from rlhf_megatron.weights.parallel_layout import ParallelLayout

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = MAX_FRAME_BYTES // 2  # the rest of a call is small
# after a call failed on one rank: for the others to say why, or to turn out dead
FAILURE_GRACE_S = 1.0
STATUS_TIMEOUT_S = 3.0  # for hosts to answer a ping
CLOSE_GRACE_S = 30.0  # for roles to close at the end of a run
ABORT_GRACE_S = 1.0  # the same after a failure
KILL_AFTER_S = 3.0  # beyond the grace; then hosts on this machine are killed


Finish = Callable[[dict[int, Any]], Any]  # rank -> value, of all ranks; makes the future's result


@dataclass
class HostLink:
    """The controller's end of one host."""

    rank: int
    rank_label: str
    channel: MessageChannel
    pid: int
    machine_id: str
    machine_name: str = ""  # name and address of its machine, for messages
    is_vanished: bool = False  # the machine gives no sign any more
    is_open: bool = True  # set to False by the thread that reads the channels


@dataclass
class _PendingCall:
    """A call that hosts have not answered."""

    method: str
    future: Future[Any]
    combine_values: Finish
    timeout_s: float
    replies: dict[int, RoleCallReply] = field(default_factory=dict)
    deadline: float | None = None  # set when all calls before it are done
    failed_at: float | None = None  # when the first rank said that it raised

    @property
    def failed_replies(self) -> list[RoleCallReply]:
        """Return the replies that carry a failure, in the order in which they arrived."""
        return [reply for reply in self.replies.values() if reply.failure is not None]


class RemoteWorkerGroup:
    """Calls to all hosts of a pool. Any failure ends the group: hosts are told to leave, then
    killed where possible.

    Groups that are tied (see `tie_worker_groups`) end together.

    `links` has one authenticated and registered link for each rank, in rank order. A thread calls
    `on_host_signal(rank label, notice)` when a host got a signal.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        links: Sequence[HostLink],
        startup_timeout_s: float,
        call_timeout_s: float,
        on_host_signal: Callable[[str, HostSignalNotice], None],
    ) -> None:
        """Start the threads that read the channels and watch the hosts, and return without waiting
        for the roles. See the class for `links` and `on_host_signal`; the timeouts are in seconds.
        """
        assert [link.rank for link in links] == list(range(layout.world_size)), (
            "one link a rank, in order"
        )
        self.layout = layout
        self.failure: HostError | None = None
        self._links = links
        self._call_timeout_s = call_timeout_s
        self._on_host_signal = on_host_signal
        self._state_changed = threading.Condition()
        self._submit_lock = threading.Lock()
        self._pending_calls: dict[int, _PendingCall] = {}  # in the order in which hosts run them
        self._next_call_id = BUILD + 1
        self._next_ping_id = 1
        self._statuses: dict[int, dict[int, HostStatus]] = {}  # ping id -> rank -> status
        self._is_closing = False
        self._tied_groups: Sequence[RemoteWorkerGroup] = (self,)  # all pools of the job, in order
        self._describe_hang: DescribeHang = _make_hang_error
        self._tied_group_failure: HostError | None = None  # of one of them
        self._built_future = self._add_pending_call(
            BUILD, _PendingCall("building roles", Future(), lambda values: None, startup_timeout_s)
        )
        self._reader = threading.Thread(
            target=self._read_channels, name="control channels", daemon=True
        )
        self._monitor_thread = threading.Thread(
            target=self._monitor_hosts, name="control channel monitor", daemon=True
        )
        self._reader.start()
        self._monitor_thread.start()

    @property
    def controller_address(self) -> str:
        """Return the address of the controller's machine that the hosts reach."""
        return self._links[0].channel.local_address

    def wait_until_built(self) -> None:
        """Wait until all ranks have built their roles. Raise HostError for a failure there, which
        is a ValueError too where the user can fix it.
        """
        self._built_future.result()

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        """Split `batch` over the replicas and call the method on every rank; the future gets the
        joined result. Raise ValueError for a sample over `token_budget`, or a shard over
        MAX_SHARD_BYTES.
        """
        with self._submit_lock:
            scattered = make_scattered_call(
                self._next_call_id, method, batch, self.layout, token_budget, arguments
            )

            leaders = scattered.leader_ranks
            plans = scattered.replica_plans
            offsets = batch.offsets

            def join_leader_values(
                values_by_rank: dict[int, Any],
            ) -> Any:  # keeps nothing of the batch but these
                """Join the values of the replicas' leaders. The closure keeps nothing of the batch
                but its offsets.
                """
                return join_replica_results(
                    method, [values_by_rank[rank] for rank in leaders], plans, offsets
                )

            if scattered.max_shard_bytes > MAX_SHARD_BYTES:
                raise ValueError(
                    f"{method}: the shard of one replica has {scattered.max_shard_bytes} bytes,"
                    f" over the limit of {MAX_SHARD_BYTES}; lower data.train_batch_size or"
                    " rollout.n, or use more replicas."
                )
            return self._submit_call(method, scattered.make_rank_call, join_leader_values)

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """Make the same call on every rank; the future gets the results in rank order."""
        with self._submit_lock:
            call = RoleCall(self._next_call_id, method, arguments)
            return self._submit_call(
                method, lambda rank: call, lambda values: [values[rank] for rank in sorted(values)]
            )

    def query_statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, HostStatus | None]:
        """Ask each host for its current work, and return the statuses by rank label. A host that
        did not answer within `timeout_s` has None.
        """
        return {view.rank_label: view.status for view in query_snapshots([self], timeout_s)}

    def set_hang_describer(self, describe_hang: DescribeHang) -> None:
        """Set the function that makes the error of a late call, from now on."""
        self._describe_hang = describe_hang

    def send_status_requests(self) -> int:
        """Ask every host for its current work. Return the id of the request, which
        `collect_snapshots` takes.
        """
        with self._state_changed:
            ping_id = self._next_ping_id
            self._next_ping_id = self._next_ping_id + 1
            self._statuses[ping_id] = {}
        for link in self._links:
            with contextlib.suppress(ConnectionError):  # it is then missing from the answers
                link.channel.send(StatusRequest(ping_id), lock_timeout_s=0.5)
        return ping_id

    def collect_snapshots(self, ping_id: int, timeout_s: float) -> list[HostSnapshot]:
        """Wait for the hosts' answers to the request, for `timeout_s` at most, and return a
        snapshot of each host in rank order. The status of a host that did not answer is None. Call
        it once for each request.
        """
        with self._state_changed:
            answers = self._statuses[ping_id]
            self._state_changed.wait_for(lambda: len(answers) == len(self._links), timeout_s)
            del self._statuses[ping_id]
        here = read_machine_id()
        return [
            HostSnapshot(link.rank_label, link.pid, link.machine_id == here, answers.get(link.rank))
            for link in self._links
        ]

    def abort_with_error(self, error: HostError) -> None:
        """Make `error` the failure of this group, which then fails its calls and ends its hosts.
        Return at once. Safe to call twice; the first error stays.
        """
        with self._state_changed:
            self._tied_group_failure = self._tied_group_failure or error
            self._state_changed.notify_all()

    def close(self) -> None:
        """Tell all hosts to leave and wait for their end; kill hosts on this machine that do not
        end in time. Pending calls fail. Safe to call twice.
        """
        with self._state_changed:
            is_first = not self._is_closing and self.failure is None
            is_idle = not self._pending_calls
            self._is_closing = True
            self._state_changed.notify_all()
        self._monitor_thread.join(timeout=2 * (STATUS_TIMEOUT_S + ABORT_GRACE_S + KILL_AFTER_S))
        if is_first:
            self._end_hosts("the run is over", CLOSE_GRACE_S if is_idle else ABORT_GRACE_S)
            self._fail_pending_calls(HostError("the group was closed."))
        # A thread that frees a tensor while the interpreter shuts down aborts the process.
        self._reader.join(ABORT_GRACE_S)

    def _set_tied_groups(self, groups: Sequence[RemoteWorkerGroup]) -> None:
        """Set the groups that fail together with this group, and pass on a failure that has
        happened already.
        """
        with self._state_changed:
            self._tied_groups = groups
            failure = self.failure
        if failure is not None:  # it was faster
            self._abort_tied_groups(failure)

    def _abort_tied_groups(self, error: HostError) -> None:
        """Abort all other tied groups with `error`."""
        for other in self._tied_groups:
            if other is not self:
                other.abort_with_error(error)

    def _submit_call(
        self, method: str, make_rank_call: Callable[[int], RoleCall], combine_values: Finish
    ) -> Future[Any]:
        """Send the call that `make_rank_call` returns for a rank to each host, and return the
        future of the combined result. The caller holds `_submit_lock`.

        The future fails at once where the group has failed or is closed. Raise ValueError, with
        nothing sent, for a call that cannot be encoded; any other error of sending ends the group.
        """
        future: Future[Any] = Future()
        call_id = self._next_call_id
        with self._state_changed:
            if self.failure is not None or self._is_closing:
                future.set_exception(self.failure or HostError("the group is closed."))
                return future
            self._next_call_id += 1
            self._add_pending_call(
                call_id, _PendingCall(method, future, combine_values, self._call_timeout_s)
            )
        try:
            shared: dict[int, list[codec.Buffer]] = {}  # of calls that several ranks get
            for link in self._links:
                call = make_rank_call(link.rank)
                parts = codec.encode_message_pieces(call) if call.shard else shared.get(id(call))
                if parts is None:
                    parts = shared[id(call)] = codec.encode_message_pieces(call)
                with contextlib.suppress(ConnectionError):  # its reading thread sees it too
                    link.channel.send_encoded(parts)
        except (
            ValueError
        ):  # cannot be encoded: no host has got it, since all calls have the same arguments
            with self._state_changed:
                self._pending_calls.pop(call_id, None)
            raise
        except (
            Exception
        ) as error:  # memory, a device: some hosts may have got it, and wait for the others
            self.abort_with_error(
                HostError(
                    f"{method} could not be sent to all hosts: {type(error).__name__}: {error}"
                )
            )
            raise
        return future

    def _add_pending_call(self, call_id: int, pending: _PendingCall) -> Future[Any]:
        """Append the call to the pending calls, and set its deadline if no other call is pending.
        Return the call's future.
        """
        if not self._pending_calls:
            pending.deadline = time.monotonic() + pending.timeout_s
        self._pending_calls[call_id] = pending
        self._notify_state_changed()
        return pending.future

    def _notify_state_changed(self) -> None:
        """Wake the threads that wait for a change of the group's state."""
        with self._state_changed:
            self._state_changed.notify_all()

    def _read_channels(self) -> None:
        """Read the messages of all hosts, in a thread, until the channels of all hosts have ended.
        Mark a host whose channel ends as closed.
        """
        with selectors.DefaultSelector() as selector:
            for link in self._links:
                selector.register(link.channel, selectors.EVENT_READ, link)
            while selector.get_map():
                for key, _ in selector.select():
                    link = key.data
                    try:
                        if (message := link.channel.receive_nowait()) is not None:
                            self._handle_message(link, message)
                            del message  # and its tensors, while the next is waited for
                    except (EOFError, FrameError, MemoryError) as error:
                        is_usual = isinstance(error, EOFError)
                        logger.log(
                            logging.DEBUG if is_usual else logging.ERROR,
                            "%s %r",
                            link.rank_label,
                            error,
                        )
                        selector.unregister(link.channel)
                        link.is_vanished = isinstance(error, PeerVanishedError)
                        with self._state_changed:
                            link.is_open = False
                            self._state_changed.notify_all()

    def _handle_message(self, link: HostLink, message: Any) -> None:
        """Handle a host's reply, status or signal notice. Raise FrameError for another message."""
        if isinstance(message, RoleCallReply):
            self._handle_reply(link, message)
        elif isinstance(message, HostStatus):
            with self._state_changed:
                self._statuses.get(message.id, {})[link.rank] = message
                self._state_changed.notify_all()
        elif isinstance(message, HostSignalNotice):
            self._on_host_signal(link.rank_label, message)
        else:
            raise FrameError(f"a host sent a {type(message).__name__}.")

    def _handle_reply(self, link: HostLink, reply: RoleCallReply) -> None:
        """Record a host's reply. When all ranks have replied without a failure, remove the call,
        start the deadline of the next call and set the future; after a failure leave the call to
        the monitoring thread.
        """
        with self._state_changed:
            pending = self._pending_calls.get(reply.id)
            if pending is None:
                return
            pending.replies[link.rank] = reply
            if (
                reply.failure is None
                and pending.failed_at is None
                and len(pending.replies) < len(self._links)
            ):
                # nobody waits for less: waking them at every reply would cost the
                # square of the ranks
                return
            if pending.failed_replies:
                pending.failed_at = pending.failed_at or time.monotonic()
            else:
                del self._pending_calls[reply.id]
                if self._pending_calls:
                    head = next(iter(self._pending_calls.values()))
                    head.deadline = time.monotonic() + head.timeout_s
            self._state_changed.notify_all()
            if pending.failed_replies:
                return
        try:
            result = pending.combine_values(
                {rank: reply.value for rank, reply in pending.replies.items()}
            )
        except Exception as error:  # the future carries it
            pending.future.set_exception(error)
        else:
            pending.future.set_result(result)

    def _monitor_hosts(self) -> None:
        """Watch the group, in a thread, for lost hosts, failed calls and passed deadlines. The
        first of them becomes the failure of the group: all calls fail, tied groups abort, and the
        hosts are ended.
        """
        while True:
            with self._state_changed:
                if self._is_closing:
                    return
                error = self._find_failure()
                late = self._find_late_call()
                if error is None and late is None:
                    self._state_changed.wait(self._seconds_to_next_event())
                    continue
            if error is None and late is not None:
                header = (
                    f"{late.method} was not finished within {late.timeout_s:g}"
                    " s (trainer.stage_timeout_s)."
                )
                error = self._describe_hang(
                    header, describe_hosts(query_snapshots(self._tied_groups, STATUS_TIMEOUT_S))
                )
            assert error is not None
            with self._state_changed:
                self.failure = error
            self._abort_tied_groups(error)
            self._fail_pending_calls(error)
            self._end_hosts("another host failed", ABORT_GRACE_S)
            return

    def _find_failure(self) -> HostError | None:
        """Return the error of a tied group, of a lost host, or of a failed call, or None. A failed
        call counts when all ranks have replied or FAILURE_GRACE_S has passed.
        """
        if self._tied_group_failure is not None:
            return self._tied_group_failure
        head = next(iter(self._pending_calls.values()), None)
        if lost := [link for link in self._links if not link.is_open]:
            doing = f" during {head.method}" if head else ""
            names = ", ".join(f"{link.rank_label} (process {link.pid})" for link in lost)
            if gone := {link.machine_name for link in lost if link.is_vanished}:
                there = ", ".join(
                    link.rank_label for link in self._links if link.machine_name in gone
                )
                machines = " and ".join(sorted(gone))
                return HostLostError(
                    f"the machine {machines} is lost{doing}: it has given no sign for"
                    f" {DEAD_PEER_TIMEOUT_S} s, and {there} were there. Look at its power, its"
                    " network and its system log."
                )
            said = (
                "".join(
                    f"\n{make_host_call_error(head.method, r.failure)}"
                    for r in head.failed_replies
                    if r.failure
                )
                if head
                else ""
            )
            return HostLostError(f"{names} died{doing}; its log may tell why.{said}")
        for pending in self._pending_calls.values():
            if pending.failed_at is None:
                continue
            is_complete = len(pending.replies) == len(self._links)
            if is_complete or time.monotonic() >= pending.failed_at + FAILURE_GRACE_S:
                failure = pending.failed_replies[0].failure
                assert failure is not None
                return make_host_call_error(pending.method, failure)
        return None

    def _find_late_call(self) -> _PendingCall | None:
        """Return the first pending call if its deadline has passed, else None."""
        head = next(iter(self._pending_calls.values()), None)
        is_late = (
            head is not None and head.deadline is not None and time.monotonic() >= head.deadline
        )
        return head if is_late else None

    def _seconds_to_next_event(self) -> float | None:
        """Return the seconds until the next deadline or end of a grace period; None where there is
        none.
        """
        events = [p.deadline for p in self._pending_calls.values() if p.deadline is not None]
        events += [
            p.failed_at + FAILURE_GRACE_S
            for p in self._pending_calls.values()
            if p.failed_at is not None
        ]
        return max(0.0, min(events) - time.monotonic()) if events else None

    def _fail_pending_calls(self, error: HostError) -> None:
        """Remove all pending calls and set `error` on their futures."""
        with self._state_changed:
            left = list(self._pending_calls.values())
            self._pending_calls.clear()
        for pending in left:
            pending.future.set_exception(error)

    def _end_hosts(self, reason: str, grace_s: float) -> None:
        """Tell the hosts to leave within `grace_s`, kill hosts on this machine that stay
        KILL_AFTER_S longer, and close all channels.
        """
        for link in self._links:
            if link.is_open:
                with contextlib.suppress(ConnectionError):  # it is gone, or is killed below
                    link.channel.send(LeaveRequest(reason, grace_s), lock_timeout_s=0.5)
        with self._state_changed:
            self._state_changed.wait_for(
                lambda: not any(link.is_open for link in self._links), grace_s + KILL_AFTER_S
            )
        for link in self._links:
            if link.is_open:
                is_here = link.machine_id == read_machine_id()
                logger.error(
                    "%s (process %d) does not end%s",
                    link.rank_label,
                    link.pid,
                    "; it is killed" if is_here else "",
                )
                if is_here:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(link.pid, signal.SIGKILL)
            link.channel.shut_down()
        self._reader.join(ABORT_GRACE_S)
        for link in self._links:
            link.channel.close()


def tie_worker_groups(groups: Sequence[RemoteWorkerGroup]) -> None:
    """Tie the groups of one job together: when one group fails all groups fail with its error, and
    a report of a hang names the hosts of all groups.
    """
    for group in groups:
        group._set_tied_groups(groups)


def query_snapshots(groups: Sequence[RemoteWorkerGroup], timeout_s: float) -> list[HostSnapshot]:
    """Ask the hosts of all groups for their current work, and return the snapshots, group by group.
    The status of a host that did not answer within `timeout_s` is None.
    """
    deadline = time.monotonic() + timeout_s
    pings = [group.send_status_requests() for group in groups]
    answers = [
        group.collect_snapshots(p, max(0.0, deadline - time.monotonic()))
        for group, p in zip(groups, pings, strict=True)
    ]
    return [view for views in answers for view in views]


def _make_hang_error(header: str, host_lines: Sequence[str]) -> HostTimeoutError:
    """Return the timeout error of a late call: the header, and the lines about the hosts."""
    return HostTimeoutError("\n".join([f"{header} The hosts:", *host_lines]))

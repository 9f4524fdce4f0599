"""The control channel: who is let in, what is taken, and what a peer cannot do. Threads
and sockets only.
"""

import errno
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from rlhf_megatron.data import codec
from rlhf_megatron.rollout import socket_limits
from rlhf_megatron.rollout.socket_limits import MAX_OPEN_FILES, raise_open_file_limit
from rlhf_megatron.runtime import host_registration, message_channel
from rlhf_megatron.runtime.control_messages import (
    HostRegistration,
    HostStatus,
    LeaveRequest,
    RoleCall,
    RoleCallReply,
    StatusRequest,
)
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.host_registration import gather_hosts, register_host
from rlhf_megatron.runtime.host_service import HostService
from rlhf_megatron.runtime.message_channel import (
    AuthenticationError,
    FrameError,
    MessageChannel,
    accept_channel,
    open_channel,
    open_listener,
)
from rlhf_megatron.runtime.rank_pools import PoolSpec
from rlhf_megatron.runtime.remote_worker_group import HostLink, RemoteWorkerGroup
from rlhf_megatron.runtime.role_host import MainThreadActivity
from rlhf_megatron.weights.parallel_layout import ParallelLayout

SECRET = b"s" * 64
OTHER = b"t" * 64


def handshake(host_secret: bytes, controller_secret: bytes) -> list[object]:
    """What each side ends with: [controller's, host's], a Channel or the exception."""
    ends: list[object] = [None, None]
    left, right = socket.socketpair()

    def run(index: int, function, sock: socket.socket, secret: bytes) -> None:
        try:
            ends[index] = function(sock, secret, timeout_s=60)
        except AuthenticationError as error:
            ends[index] = error
            sock.close()

    threads = [
        threading.Thread(target=run, args=(0, accept_channel, left, controller_secret)),
        threading.Thread(target=run, args=(1, open_channel, right, host_secret)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def test_messages_pass_both_ways_after_the_handshake() -> None:
    controller, host = handshake(SECRET, SECRET)
    assert isinstance(controller, MessageChannel) and isinstance(host, MessageChannel)
    controller.send(
        RoleCall(
            3,
            "actor.update",
            {"x": torch.tensor([1.5, 2.0]), "names": ("a", "b")},
            shard=b"\x00\xff",
        )
    )
    call = host.receive()
    assert (call.id, call.method, call.shard, call.arguments["names"]) == (
        3,
        "actor.update",
        b"\x00\xff",
        ("a", "b"),
    )
    assert call.arguments["x"].tolist() == [1.5, 2.0]
    host.send(StatusRequest(4))
    assert controller.receive() == StatusRequest(4)
    controller.close()
    with pytest.raises(EOFError):
        host.receive()
    with pytest.raises(ConnectionError):
        for _ in range(1000):
            host.send(StatusRequest(5))


def test_a_wrong_secret_is_refused_by_both_sides() -> None:
    controller, host = handshake(OTHER, SECRET)
    assert isinstance(host, AuthenticationError) and "controller does not hold the secret" in str(
        host
    )
    assert isinstance(controller, AuthenticationError)


def test_a_reflected_proof_is_refused() -> None:
    """A peer without the secret cannot let the controller make the proof for it."""
    left, right = socket.socketpair()
    error: list[AuthenticationError] = []

    def serve() -> None:
        try:
            accept_channel(left, SECRET, timeout_s=60)
        except AuthenticationError as caught:
            error.append(caught)

    thread = threading.Thread(target=serve)
    thread.start()
    right.sendall(b"n" * 32)
    answer = b""
    while len(answer) < 64:
        answer += right.recv(64)
    right.sendall(answer[32:])
    thread.join(60)
    assert "does not hold the secret" in str(error[0])


def test_oversized_and_malformed_frames_are_refused_without_reading_them() -> None:
    left, right = socket.socketpair()
    receiver = MessageChannel(left, max_frame_bytes=1000)
    right.sendall(struct.pack("<Q", 1001))
    with pytest.raises(FrameError, match="1001 bytes was announced; the limit is 1000"):
        receiver.receive()
    right.sendall(struct.pack("<Q", 5) + b"\x80\x04N.x")  # a pickle
    with pytest.raises(FrameError, match="malformed message"):
        receiver.receive()
    with pytest.raises(ValueError, match="over the limit of 1000"):
        receiver.send(RoleCall(1, "a.b", shard=bytes(2000)))


def test_take_returns_a_message_when_the_last_byte_of_it_is_here() -> None:
    left, right = socket.socketpair()
    receiver = MessageChannel(left, max_frame_bytes=1000)
    assert receiver.receive_nowait() is None
    message = codec.encode_message(StatusRequest(4))
    for byte in struct.pack("<Q", len(message)) + message[:-1]:
        right.sendall(bytes([byte]))
        assert receiver.receive_nowait() is None
    right.sendall(message[-1:] + struct.pack("<Q", len(message)) + message)
    assert [receiver.receive_nowait(), receiver.receive_nowait(), receiver.receive_nowait()] == [
        StatusRequest(4),
        StatusRequest(4),
        None,
    ]
    right.sendall(struct.pack("<Q", 5) + b"\x80\x04N.x")  # a pickle
    with pytest.raises(FrameError, match="malformed message"):
        receiver.receive_nowait()
    right.sendall(struct.pack("<Q", 1001))
    with pytest.raises(FrameError, match="1001 bytes was announced; the limit is 1000"):
        receiver.receive_nowait()
    left, right = socket.socketpair()
    right.close()
    with pytest.raises(EOFError):
        MessageChannel(left).receive_nowait()


def test_half_of_a_reply_holds_up_no_other_host() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    links = [
        HostLink(rank, f"[toy tp{rank}]", MessageChannel(ours), 0, "")
        for rank, (ours, _) in enumerate(pairs)
    ]
    group = RemoteWorkerGroup(ParallelLayout(2), links, 600.0, 600.0, lambda where, message: None)
    slow = pairs[0][1]
    fast = MessageChannel(pairs[1][1])
    try:
        called = group.broadcast_call("toy.update")
        reply = codec.encode_message(RoleCallReply(1, "whole"))
        frame = struct.pack("<Q", len(reply)) + reply
        slow.sendall(frame[:-7])
        fast.send(RoleCallReply(1, "first"))
        ping = group.send_status_requests()
        status = HostStatus(ping, "[toy tp1]", "toy.update", "running", 1.0, "", ())
        fast.send(status)
        assert [view.status for view in group.collect_snapshots(ping, 1.0)] == [None, status]
        slow.sendall(frame[-7:])
        assert called.result(60) == ["whole", "first"]
    finally:
        slow.close()
        fast.close()
        group.close()


def test_secret_file_must_be_private(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("k" * 64 + "\n")
    file.chmod(0o600)
    assert message_channel.read_secret({message_channel.SECRET_FILE_ENV: str(file)}) == b"k" * 64
    file.chmod(0o640)
    with pytest.raises(ValueError, match="mode 0600"):
        message_channel.read_secret({message_channel.SECRET_FILE_ENV: str(file)})
    with pytest.raises(ValueError, match="at least 32"):
        message_channel.read_secret({message_channel.SECRET_ENV: "short"})
    assert message_channel.read_secret({}) is None


def test_hosts_register_and_intruders_do_not_hold_them_up() -> None:
    pools = (
        PoolSpec("actor", ParallelLayout(world_size=2, pp=2), 0),
        PoolSpec("critic", ParallelLayout(world_size=1), 2),
    )
    listener = open_listener("127.0.0.1")
    port = listener.getsockname()[1]
    assert listener.getsockname()[0] == "127.0.0.1"
    intruder = socket.create_connection(("127.0.0.1", port))  # says nothing
    hosts: list[MessageChannel] = []

    def arrive() -> None:
        with pytest.raises(AuthenticationError):
            register_host("127.0.0.1", port, OTHER, 0, "actor", timeout_s=60)
        # of another job
        hosts.append(register_host("127.0.0.1", port, SECRET, 1, "judge", timeout_s=60))
        # it has one rank
        hosts.append(register_host("127.0.0.1", port, SECRET, 1, "critic", timeout_s=60))
        hosts.append(register_host("127.0.0.1", port, SECRET, 0, "critic", timeout_s=60))
        hosts.append(register_host("127.0.0.1", port, SECRET, 1, "actor", timeout_s=60))
        hosts.append(register_host("127.0.0.1", port, SECRET, 0, "actor", timeout_s=60))

    thread = threading.Thread(target=arrive)
    thread.start()
    links = gather_hosts(listener, SECRET, pools, timeout_s=60)
    thread.join(60)
    assert {name: [link.rank_label for link in found] for name, found in links.items()} == {
        "actor": ["[actor dp0 pp0 tp0]", "[actor dp0 pp1 tp0]"],
        "critic": ["[critic dp0 pp0 tp0]"],
    }
    assert [link.pid for found in links.values() for link in found] == [os.getpid()] * 3
    for refused in hosts[:2]:
        with pytest.raises(EOFError):
            refused.receive()
    intruder.close()


def test_missing_hosts_are_named() -> None:
    pools = (PoolSpec("actor", ParallelLayout(1), 0), PoolSpec("critic", ParallelLayout(1), 1))
    with pytest.raises(
        HostError,
        match=r"\[actor dp0 pp0 tp0\], \[critic dp0 pp0 tp0\] did not register within 0.3 s",
    ):
        gather_hosts(open_listener("127.0.0.1"), SECRET, pools, timeout_s=0.3)


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft > hard:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_two_thousand_ranks_register() -> None:
    """And not one is lost, though more connect at one time than are greeted, and
    strangers hold places.
    """
    layout = ParallelLayout(world_size=2000)
    listener = open_listener("127.0.0.1")
    port = listener.getsockname()[1]
    with open_files(4500), closing(socket.socket()) as stranger, ThreadPoolExecutor(32) as threads:
        stranger.connect(("127.0.0.1", port))
        hosts = [
            threads.submit(register_host, "127.0.0.1", port, SECRET, rank, "actor", timeout_s=60)
            for rank in range(layout.world_size)
        ]
        links = gather_hosts(listener, SECRET, [PoolSpec("actor", layout, 0)], timeout_s=60)[
            "actor"
        ]
        assert [link.rank for link in links] == list(range(layout.world_size))
        for end in [*(link.channel for link in links), *(host.result() for host in hosts)]:
            end.close()


def test_registration_goes_on_when_file_descriptors_were_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pools = [PoolSpec("actor", ParallelLayout(world_size=8), 0)]
    listener = open_listener("127.0.0.1")
    address = listener.getsockname()
    socks = [socket.create_connection(address) for _ in range(8)]
    free = os.dup(0)
    os.close(free)
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(
        host_registration,
        "raise_open_file_limit",
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (free + 3, hard)),
    )

    def register(rank: int) -> MessageChannel:
        made = open_channel(socks[rank], SECRET, timeout_s=20)
        made.send(HostRegistration(rank, "actor", os.getpid(), "here", "host"))
        return made

    with ThreadPoolExecutor(9) as threads:
        gathered = threads.submit(gather_hosts, listener, SECRET, pools, 20.0)
        hosts = [threads.submit(register, rank) for rank in range(8)]
        try:
            while "Too many open files" not in caplog.text:
                assert not gathered.done()
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
        links = gathered.result()["actor"]
        assert (
            "raise the hard limit (ulimit -Hn)" in caplog.text
            and caplog.text.count("Too many open files") == 1
        )
        for end in [*(link.channel for link in links), *(host.result() for host in hosts)]:
            end.close()


def test_the_soft_limit_of_open_files_is_raised() -> None:
    with open_files(256):
        assert raise_open_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == (
            MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
        )


def test_a_peer_that_says_a_byte_now_and_then_has_no_more_time_than_others() -> None:
    left, right = socket.socketpair()
    refused: list[AuthenticationError] = []

    def serve() -> None:
        try:
            accept_channel(left, SECRET, timeout_s=0.4)
        except AuthenticationError as error:
            refused.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with suppress(OSError):  # it is closed between the look and the byte
        while thread.is_alive():
            right.sendall(b"n")
            thread.join(0.1)
    thread.join(60)
    assert "timed out" in str(refused[0])


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot listen on '192\.0\.2\.1'.*MASTER_ADDR"):
        open_listener("192.0.2.1")


def test_an_answer_that_cannot_be_sent_becomes_a_failure_and_pings_are_answered_meanwhile() -> None:
    left, right = socket.socketpair()
    service = HostService(
        MessageChannel(left), MainThreadActivity("[actor dp0 pp0 tp0]"), get_exit_code=lambda: 1
    )
    controller = MessageChannel(right)
    controller.send(StatusRequest(9))  # this thread, the host's main thread, is busy with the test
    status = controller.receive()
    assert (status.id, status.rank_label, status.stage) == (
        9,
        "[actor dp0 pp0 tp0]",
        "waiting for a call",
    )
    assert any("runtime/test_runtime_channel.py" in frame for frame in status.stack)
    service.send_reply(RoleCallReply(5, value=object()))
    reply = controller.receive()
    assert (
        reply.id == 5
        and reply.failure.is_value_error
        and "cannot encode a builtins.object" in reply.failure.message
    )
    controller.send(LeaveRequest("the run is over", grace_s=30.0))
    assert service.wait_for_call() is None
    service.leave_run()
    with pytest.raises(EOFError):
        controller.receive()


def test_a_call_that_breaks_while_it_is_sent_ends_the_group_at_once() -> None:
    """One host may have it already, and would wait in a collective for the other
    until the deadline.
    """
    pairs = [socket.socketpair() for _ in range(2)]
    links = [
        HostLink(rank, f"[toy tp{rank}]", MessageChannel(ours), 0, "")
        for rank, (ours, _) in enumerate(pairs)
    ]
    group = RemoteWorkerGroup(ParallelLayout(2), links, 600.0, 600.0, lambda where, message: None)
    hosts = [MessageChannel(theirs) for _, theirs in pairs]
    try:
        earlier = group.broadcast_call("toy.update")
        with pytest.raises(NotImplementedError):
            # as a device that has failed
            group.broadcast_call("toy.update", batch=torch.empty(2, device="meta"))
        with pytest.raises(
            HostError, match=r"toy.update could not be sent to all hosts: NotImplementedError"
        ):
            earlier.result(60)
        for host in hosts:
            assert [type(host.receive()) for _ in range(2)] == [RoleCall, LeaveRequest]
    finally:
        for host in hosts:
            host.close()
        group.close()


def test_the_kernel_looks_for_a_machine_that_gives_no_sign() -> None:
    with (
        open_listener("127.0.0.1") as server,
        socket.create_connection(server.getsockname()) as sock,
    ):
        MessageChannel(sock)
        options = (
            socket.TCP_KEEPIDLE,
            socket.TCP_KEEPINTVL,
            socket.TCP_KEEPCNT,
            socket.TCP_USER_TIMEOUT,
        )
        idle, every, count, unanswered = (
            sock.getsockopt(socket.IPPROTO_TCP, option) for option in options
        )
        assert (
            idle + every * count <= socket_limits.DEAD_PEER_TIMEOUT_S
            and unanswered == socket_limits.DEAD_PEER_TIMEOUT_S * 1000
        )
        assert socket_limits.is_dead_peer_error(
            OSError(errno.ETIMEDOUT, "")
        ) and not socket_limits.is_dead_peer_error(ConnectionResetError())

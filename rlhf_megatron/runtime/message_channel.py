"""One connection between the controller and a host: mutual authentication, then
length-prefixed messages.

Handshake, before anything is decoded, on a secret that is drawn for each run:

    host -> controller   32 random bytes a
    controller -> host   32 random bytes b, HMAC-SHA256(secret, "controller" a b)
    host -> controller   HMAC-SHA256(secret, "host" a b)

Messages are neither encrypted nor signed one by one: the connection belongs on a private network.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.data import codec
from rlhf_megatron.rollout.socket_limits import enable_dead_peer_detection, is_dead_peer_error

MAX_FRAME_BYTES = 1 << 33
SEND_TIMEOUT_S = 60  # without progress; then the peer counts as lost
NONCE_BYTES = 32
SECRET_ENV = "RLHF_MEGATRON_SECRET"
SECRET_FILE_ENV = "RLHF_MEGATRON_SECRET_FILE"
_HEADER = struct.Struct("<Q")


def open_listener(address: str) -> socket.socket:
    """Return a listening socket on a free port of `address`, and of no other address. Raise
    ValueError where this machine does not have the address.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server((place[0], 0), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"cannot listen on {address!r} ({error}); MASTER_ADDR must be an address of the"
            " machine with node rank 0."
        ) from error


class AuthenticationError(ConnectionError):
    """The peer does not hold this run's secret, or did not finish the handshake in time."""


class FrameError(ConnectionError):
    """The peer announced a message over the limit, or sent bytes that are no message."""


class PeerVanishedError(EOFError):
    """The peer's machine gives no sign any more: it has lost its power or its network."""


class MessageChannel:
    """Messages over a connected socket. `send` may be called from several threads, `receive` and
    `receive_nowait` from one.

    A thread that reads many channels waits for them by `selectors` and calls `receive_nowait`.
    """

    def __init__(self, sock: socket.socket, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """Take over a connected socket on which the handshake is done. A message is limited to
        `max_frame_bytes`.
        """
        self.max_frame_bytes = max_frame_bytes
        self._socket = sock
        self._send_lock = threading.Lock()
        # of `receive_nowait`: a header, then its message
        self._receive_buffer = bytearray(_HEADER.size)
        self._num_received_bytes = 0
        self._is_reading_body = False
        sock.settimeout(None)
        detect_dead_peers(sock)

    def send(self, message: Any, lock_timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Send a message. Raise ConnectionError when the peer is gone or stopped reading, or
        another thread holds the channel for `lock_timeout_s`; ValueError for a message that cannot
        be encoded or is too large.
        """
        self.send_encoded(codec.encode_message_pieces(message), lock_timeout_s)

    def send_encoded(
        self, encoded_pieces: Sequence[codec.Buffer], lock_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        """Send a message that `codec.encode_message_pieces` has encoded; the pieces can go to
        several channels. Raise the errors that `send` raises.
        """
        size = sum(len(part) for part in encoded_pieces)
        if size > self.max_frame_bytes:
            raise ValueError(
                f"a message of {size} bytes is over the limit of {self.max_frame_bytes}; send"
                " less at once."
            )
        if not self._send_lock.acquire(timeout=lock_timeout_s):
            raise ConnectionError("the peer stopped reading.")
        try:
            # one piece wakes the reader once
            self._socket.sendall(b"".join((_HEADER.pack(size), *encoded_pieces[:1])))
            for part in encoded_pieces[1:]:
                self._socket.sendall(part)
        except BlockingIOError as error:
            raise ConnectionError(f"the peer stopped reading for {SEND_TIMEOUT_S} s.") from error
        except OSError as error:
            raise ConnectionError(f"the connection broke: {error}") from error
        finally:
            self._send_lock.release()

    def receive(self, deadline: float | None = None) -> Any:
        """Wait for the next message and return it. `deadline` counts as time.monotonic does; None
        waits without limit.

        Raise EOFError when the peer is gone, PeerVanishedError when its machine is, FrameError for
        a bad message, TimeoutError at the deadline.
        """
        size = self._decode_message_size(_receive_exactly(self._socket, _HEADER.size, deadline))
        data = _receive_exactly(self._socket, size, deadline)
        if deadline is not None:
            self._socket.settimeout(None)
        return _decode_message(data)

    def receive_nowait(self) -> Any:
        """Return the next message if it has arrived completely, else None, without waiting. Keep
        the part that has arrived.

        Raise EOFError, PeerVanishedError and FrameError as `receive` does, MemoryError when there
        is no room for the message.
        """
        while True:
            try:
                count = self._socket.recv_into(
                    memoryview(self._receive_buffer)[self._num_received_bytes :],
                    flags=socket.MSG_DONTWAIT,
                )
            except BlockingIOError:
                return None
            except OSError as error:
                raise _make_connection_error(error) from error
            if count == 0:
                raise EOFError("the connection was closed.")
            self._num_received_bytes += count
            if self._num_received_bytes < len(self._receive_buffer):
                return None
            arrived = self._receive_buffer
            is_message = self._is_reading_body
            self._num_received_bytes = 0
            self._is_reading_body = not is_message
            if is_message:
                self._receive_buffer = bytearray(_HEADER.size)
                return _decode_message(arrived)
            self._receive_buffer = bytearray(self._decode_message_size(arrived))

    def fileno(self) -> int:
        """Return the socket's file descriptor, for `selectors`."""
        return self._socket.fileno()

    def _decode_message_size(self, header: codec.Buffer) -> int:
        """Return the number of bytes of the message after this header. Raise FrameError where the
        number is over the limit.
        """
        (size,) = _HEADER.unpack(header)
        if size > self.max_frame_bytes:
            raise FrameError(
                f"a message of {size} bytes was announced; the limit is {self.max_frame_bytes}."
            )
        return int(size)

    @property
    def local_address(self) -> str:
        """Return the address of this machine that the peer reaches."""
        return str(self._socket.getsockname()[0])

    @property
    def peer_address(self) -> str:
        """Return the address of the peer's machine; "" for a Unix socket, and when the peer is
        gone.
        """
        try:
            return (
                str(self._socket.getpeername()[0]) if self._socket.family != socket.AF_UNIX else ""
            )
        except OSError:
            return ""

    def shut_down(self) -> None:
        """End the connection in both directions, and keep the socket. A blocked `receive` and the
        next `receive_nowait` raise EOFError.
        """
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close the socket. Safe to call twice."""
        self.shut_down()
        self._socket.close()


def accept_channel(sock: socket.socket, secret: bytes, timeout_s: float) -> MessageChannel:
    """Run the controller's side of the handshake within `timeout_s`, and return the channel. Raise
    AuthenticationError.
    """
    deadline = time.monotonic() + timeout_s
    try:
        theirs = _receive_exactly(sock, NONCE_BYTES, deadline)
        ours = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(ours + _compute_proof(secret, b"controller", theirs, ours))
        proof = _receive_exactly(sock, NONCE_BYTES, deadline)
    except (OSError, EOFError) as error:
        raise AuthenticationError(f"the handshake was not finished: {error}") from error
    if not hmac.compare_digest(proof, _compute_proof(secret, b"host", theirs, ours)):
        raise AuthenticationError("the peer does not hold the secret of this run.")
    return MessageChannel(sock)


def open_channel(sock: socket.socket, secret: bytes, timeout_s: float) -> MessageChannel:
    """Run the host's side of the handshake within `timeout_s`, and return the channel. Raise
    AuthenticationError.
    """
    deadline = time.monotonic() + timeout_s
    ours = secrets.token_bytes(NONCE_BYTES)
    try:
        sock.settimeout(timeout_s)
        sock.sendall(ours)
        theirs = _receive_exactly(sock, NONCE_BYTES, deadline)
        proof = _receive_exactly(sock, NONCE_BYTES, deadline)
        if not hmac.compare_digest(proof, _compute_proof(secret, b"controller", ours, theirs)):
            raise AuthenticationError("the controller does not hold the secret of this run.")
        sock.sendall(_compute_proof(secret, b"host", ours, theirs))
    except (OSError, EOFError) as error:
        if isinstance(error, AuthenticationError):
            raise
        raise AuthenticationError(f"the handshake was not finished: {error}") from error
    return MessageChannel(sock)


def read_secret(environment: Mapping[str, str]) -> bytes | None:
    """Return the run's secret from the file that SECRET_FILE_ENV names, or from SECRET_ENV; None
    where neither is set.

    Raise ValueError when the file is open to other users or the secret has fewer than 32
    characters.
    """
    text = environment.get(SECRET_ENV)
    if path := environment.get(SECRET_FILE_ENV):
        with open(path, encoding="ascii") as file:
            info = os.fstat(file.fileno())
            if stat.S_IMODE(info.st_mode) & 0o077 or info.st_uid != os.getuid():
                raise ValueError(
                    f"{SECRET_FILE_ENV}: {Path(path).name} must belong to you and have mode 0600;"
                    " run chmod 600."
                )
            text = file.read().strip()
    if text is None:
        return None
    if len(text) < 32:
        raise ValueError(
            f"the secret in {SECRET_ENV} or {SECRET_FILE_ENV} must have at least 32 characters."
        )
    return text.encode("ascii")


def generate_secret() -> str:
    """Return a new random secret of 64 hex digits."""
    return secrets.token_hex(32)


def _compute_proof(
    secret: bytes, side: bytes, host_nonce: codec.Buffer, controller_nonce: codec.Buffer
) -> bytes:
    """Return the HMAC by which a side ("controller" or "host") shows that it holds the secret."""
    return hmac.digest(secret, b"".join((side, host_nonce, controller_nonce)), "sha256")


def _decode_message(data: bytearray) -> Any:
    """Decode a message. Raise FrameError for bytes that are no message."""
    try:
        return codec.decode_message(data)
    except ValueError as error:
        raise FrameError(str(error)) from error


def _make_connection_error(error: OSError) -> EOFError:
    """Return the EOFError for a broken connection, a PeerVanishedError where the peer's machine
    gives no sign.
    """
    kind = PeerVanishedError if is_dead_peer_error(error) else EOFError
    return kind(f"the connection broke: {error}")


def _receive_exactly(
    sock: socket.socket, num_bytes: int, deadline: float | None = None
) -> bytearray:
    """Wait for `num_bytes` bytes and return them. Raise TimeoutError at `deadline`, EOFError where
    the connection ends. With a deadline the socket keeps a timeout.
    """
    data = bytearray(num_bytes)
    view = memoryview(data)
    position = 0
    while position < num_bytes:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        try:
            count = sock.recv_into(view[position:])
        except OSError as error:
            # ours, not the kernel's ETIMEDOUT
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            raise _make_connection_error(error) from error
        if count == 0:
            raise EOFError("the connection was closed.")
        position += count
    return data


def detect_dead_peers(sock: socket.socket) -> None:
    """Set the socket's options so that a peer's machine that vanished, or a peer that stopped
    reading for SEND_TIMEOUT_S, becomes an error of the socket. Also send small messages at once.
    """
    enable_dead_peer_detection(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

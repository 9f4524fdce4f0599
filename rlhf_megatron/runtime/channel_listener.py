"""Accepts connections of peers that must show the run's secret, so that peers without it hold up
nobody.

Each peer is greeted in a thread of its own, within a deadline. While too many have not shown the
secret, the one that has waited longest is sent away; where no file descriptor is left, all are that
have waited a while. A peer of the run needs milliseconds for the handshake.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

from rlhf_megatron.runtime.message_channel import (
    AuthenticationError,
    MessageChannel,
    accept_channel,
)

logger = logging.getLogger(__name__)

MAX_GREETINGS = 256  # connections that have not shown the secret
RETRY_S = 0.2  # after an error of accepting
PATIENCE_S = 0.5  # with a peer that has not shown the secret, where file descriptors are short
LOOK_S = 1.0
_LISTENER_ENDED = (errno.EBADF, errno.EINVAL)
_LOG_INTERVAL_S = 60.0
# serves a peer that has shown the secret, in the thread of its connection; closes the connection
ServeChannel = Callable[[MessageChannel, socket.socket, str], None]


class ChannelListener:
    """Greets the peers that connect to a listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        handshake_timeout_s: float,
        serve_channel: ServeChannel,
        report_error: Callable[[OSError | RuntimeError], None] | None = None,
        max_greetings: int = MAX_GREETINGS,
    ) -> None:
        """Take a listening socket. `serve_channel` is called with the channel of an authenticated
        peer, its socket and its address. `report_error` gets each error of accepting (no file
        descriptor, no memory, a peer that has gone); None: one line of the log a minute.
        """
        self._listener = listener
        self._secret = secret
        self._handshake_timeout_s = handshake_timeout_s
        self._serve_channel = serve_channel
        self._report_error = report_error or self._log_error
        self._max_greetings = max_greetings
        self._lock = threading.Lock()
        # by number, the oldest first: the connection, and when it came
        self._greetings: dict[int, tuple[socket.socket, float]] = {}
        self._num_connections = 0
        self._next_log_s = 0.0

    def accept_until_closed(self) -> None:
        """Accept connections until the listening socket is closed or shut down. Errors of accepting
        are reported, and accepting goes on.
        """
        self._listener.settimeout(LOOK_S)
        while True:
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno in _LISTENER_ENDED:
                    return
                self._report_error(error)
                self._drop_slow_greetings()
                time.sleep(RETRY_S)
                continue
            self._greet_in_thread(connection, address[0])

    def _greet_in_thread(self, connection: socket.socket, peer_address: str) -> None:
        """Start the thread of a connection; close the connection where there is none to be had."""
        with self._lock:
            if len(self._greetings) >= self._max_greetings:
                self._drop_greeting(next(iter(self._greetings)))
            self._num_connections += 1
            number = self._num_connections
            self._greetings[number] = (connection, time.monotonic())
        thread = threading.Thread(
            target=self._greet_peer, args=(number, connection, peer_address), daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left
            self._end_greeting(number)
            connection.close()
            self._report_error(error)
            time.sleep(RETRY_S)

    def _greet_peer(self, number: int, connection: socket.socket, peer_address: str) -> None:
        """Run the handshake with a peer, and serve the peer where it holds the secret."""
        try:
            channel = accept_channel(connection, self._secret, self._handshake_timeout_s)
        except AuthenticationError as error:
            self._end_greeting(number)
            connection.close()
            self._log_refusal(peer_address, error)
            return
        self._end_greeting(number)
        self._serve_channel(channel, connection, peer_address)

    def _end_greeting(self, number: int) -> None:
        """Note that a peer has shown the secret, or was sent away."""
        with self._lock:
            self._greetings.pop(number, None)

    def _drop_slow_greetings(self) -> None:
        """Send the peers away that have had time enough to show the secret."""
        now = time.monotonic()
        with self._lock:
            for number, (_, began_at) in list(self._greetings.items()):
                if now - began_at > PATIENCE_S:
                    self._drop_greeting(number)

    def _drop_greeting(self, number: int) -> None:
        """Send a peer away. The lock must be held."""
        connection, _ = self._greetings.pop(number)
        with contextlib.suppress(OSError):  # the peer's thread finds the end, and closes the socket
            connection.shutdown(socket.SHUT_RDWR)

    def _log_refusal(self, peer_address: str, error: Exception) -> None:
        """Log that a peer was refused, at most once a minute: anybody who can connect can cause
        such lines.
        """
        if self._may_log():
            logger.warning("refused a connection from %s: %s", peer_address, error)

    def _log_error(self, error: OSError | RuntimeError) -> None:
        """Log an error of accepting, at most once a minute."""
        if self._may_log():
            logger.warning("connections cannot be taken: %s. It goes on trying.", error)

    def _may_log(self) -> bool:
        """Return whether the last line is a minute old; the next minute begins then."""
        with self._lock:
            now = time.monotonic()
            if now < self._next_log_s:
                return False
            self._next_log_s = now + _LOG_INTERVAL_S
            return True

"""Several nodes under torchrun: the interface that leads to node 0, and how each agent learns that
another has ended.

torchrun's static rendezvous tells no node of another's end, nor that a machine is lost. A rank that
is connected to the controller is missed at once; before that its node would be waited for until the
deadline of the start. So an agent that fails leaves a word in node 0's store, and all look there;
that the store itself is gone means that node 0 has ended.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from rlhf_megatron.rollout.socket_limits import DEAD_PEER_TIMEOUT_S, is_dead_peer_error
from rlhf_megatron.runtime.message_channel import detect_dead_peers

POLL_S = 1.0
GRACE_S = 10.0  # for the ranks to end by themselves: the controller says more than an agent can
LIMIT_S = 40.0  # for the agent to end after it was told to
VANISHED_LIMIT_S = 5.0  # the same where node 0 has vanished: nobody there has anything to say
_CONNECT_S = 600.0
_ENDED = "rlhf_megatron/ended"  # key in the store: "<node> <exit code>"


def format_early_exit(reason: str) -> str:
    """Return the message for a run that another node ended. `reason` says which node has ended or
    is lost.
    """
    return f"{reason} before this run was over; the output there says why.\n"


class OtherNodesWatcher:
    """A thread that watches the other nodes from an agent, and calls `end_ranks` when another node
    has ended and this node has not.

    An agent that has not ended LIMIT_S later is ended there, after `kill_ranks`.
    """

    def __init__(
        self,
        store_address: str,
        store_port: int,
        node_rank: int,
        end_ranks: Callable[[], None],
        kill_ranks: Callable[[], None],
    ) -> None:
        """Start the thread that watches node 0's store. `end_ranks` asks the ranks of this node to
        end, `kill_ranks` kills them.
        """
        # which one, with the exit code that is to be this agent's too
        self.early_exit: tuple[str, int] | None = None
        self._store_address = (store_address, store_port)
        self._node_rank = node_rank
        self._end_ranks = end_ranks
        self._kill_ranks = kill_ranks
        self._store: TCPStore | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch_store, name="other nodes", daemon=True)
        self._thread.start()

    def report_exit(self, exit_code: int) -> None:
        """Stop watching, because this node's run is over. Where it failed before another node did,
        write its exit code into node 0's store for the other nodes; the end of node 0 shows by
        itself.
        """
        self._is_over.set()
        if (
            exit_code != 0
            and self._node_rank != 0
            and self._store is not None
            and self.early_exit is None
        ):
            with contextlib.suppress(RuntimeError):  # node 0 was first
                self._store.set(_ENDED, f"{self._node_rank} {exit_code}")
        self._thread.join(POLL_S)

    def _watch_store(self) -> None:
        """Watch node 0's store, in a thread. When another node has ended and this one does not
        within GRACE_S, set `early_exit` and end the ranks; LIMIT_S later kill them and end this
        process.
        """
        with contextlib.suppress(RuntimeError):  # no rendezvous: the agent says so
            self._store = TCPStore(
                *self._store_address,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_CONNECT_S),
            )
            if self._node_rank:
                threading.Thread(
                    target=self._watch_node_0_machine, name="node 0", daemon=True
                ).start()
            ended = self._wait_for_early_exit(self._store)
            if not self._is_over.wait(GRACE_S):
                self.early_exit = ended
                self._end_ranks()
                # the main thread sits in a call to a store that is gone
                if not self._is_over.wait(LIMIT_S):
                    self._kill_ranks()
                    sys.stderr.write(format_early_exit(ended[0]))
                    os._exit(ended[1])

    def _watch_node_0_machine(self) -> None:
        """Wait, in a thread, on an idle connection to node 0; kill the ranks when the machine of
        node 0 is lost. A call to the store would wait for a quarter of an hour then.
        """
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self._store_address, timeout=_CONNECT_S) as node_0,
        ):
            node_0.settimeout(None)
            detect_dead_peers(node_0)
            try:
                node_0.recv(1)  # returns when the store has ended, which the other thread finds out
            except OSError as error:
                if not is_dead_peer_error(error) or self._is_over.is_set():
                    return
                reason = (
                    f"node 0 ({self._store_address[0]}) was lost, with no sign for"
                    f" {DEAD_PEER_TIMEOUT_S} s,"
                )
                self.early_exit = (reason, 1)
                self._kill_ranks()
                if not self._is_over.wait(VANISHED_LIMIT_S):
                    sys.stderr.write(format_early_exit(reason))
                    os._exit(1)

    def _wait_for_early_exit(self, store: TCPStore) -> tuple[str, int]:
        """Wait until another node has ended, and return the reason and the exit code; ("", 0) when
        this node's run is over.
        """
        try:
            while not self._is_over.wait(POLL_S) and not store.check([_ENDED]):
                pass
            if self._is_over.is_set():
                return ("", 0)
            node, code = store.get(_ENDED).decode().split()
            return (f"node {node} ended with exit code {code}", int(code))
        except RuntimeError:
            return ("node 0 has ended", 1)

"""Servers that stand in for each other: one is asked, where it fails another one, and it
rests for a while.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from rlhf_megatron.rewards.reward_endpoint import (
    RewardEndpoint,
    RewardEndpointError,
    RewardEndpointRefusedError,
)

T = TypeVar("T")
# in which a failed request is sent to the same server again, where there are others
FAILOVER_S = 0.5
PAUSE_S = 0.5  # when no server answers
# of this worker process: url of a server that failed -> until when it rests
_resting: dict[str, float] = {}


def ask_any_replica(
    servers: Sequence[RewardEndpoint],
    patience_s: float,
    rest_s: float,
    send_request: Callable[[RewardEndpoint], T],
) -> tuple[T, int]:
    """Send the request to one server after another until a server answers, and return (answer,
    number of failures before). A server that failed rests for `rest_s`: it is asked only after the
    others.

    Raise RewardEndpointRefusedError where a server refuses the request and no other server answers
    it, RewardEndpointError where none has answered after `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    num_failed = 0
    refused = None
    while True:
        now = time.monotonic()
        for server in sorted(
            servers, key=lambda one: (_resting.get(one.url, 0.0) > now, random.random())
        ):
            try:
                answer = send_request(
                    replace(server, patience_s=FAILOVER_S) if len(servers) > 1 else server
                )
            except RewardEndpointRefusedError as error:
                if refused is not None or len(servers) == 1:
                    raise
                refused = error
                refuser = server
                num_failed += 1
            except RewardEndpointError as error:
                _resting[server.url] = time.monotonic() + rest_s
                last = error
                num_failed += 1
            else:
                _resting.pop(server.url, None)
                if refused is not None:  # it is the server, then, not the request
                    _resting[refuser.url] = time.monotonic() + rest_s
                return answer, num_failed
        if refused is not None:
            raise refused
        if time.monotonic() >= deadline:
            raise last
        time.sleep(PAUSE_S)


def compute_max_wait_s(servers: Sequence[RewardEndpoint], patience_s: float) -> float:
    """Return the longest time in seconds that a sample may wait for `ask_any_replica`."""
    return patience_s + sum(server.max_wait_s for server in servers)

"""What a server is asked to generate, as a value: this process asks it, or a driver
does (`rollout.drivers`).

A question goes out when the engine's client has let it pass (gate, limits, STALE): all of that
stays with the client.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    GenerateRequest,
    SampleGroups,
    TokenColumn,
)
from rlhf_megatron.rollout.http_client import HttpClient, run_in_thread_if_large

T = TypeVar("T")
_MAX_CACHED_VALUES = 4096  # values that many questions have: servers, sampling parameters
_get_http_client = functools.lru_cache(_MAX_CACHED_VALUES)(HttpClient)


@functools.lru_cache(_MAX_CACHED_VALUES)
def _intern_value(value: T) -> T:
    """Return the first value that equals this one."""
    return value


@dataclass(frozen=True)
class GenerationQuery:
    """A generate call to one server, as a value. A subclass says how to speak to its kind of
    server, and is registered with `data.codec`.
    """

    server: EngineAddress
    requests: tuple[GenerateRequest, ...]
    timeout_s: float  # for messages
    remaining_s: float  # of it, when the question is asked

    # statuses that say that the requests are wrong
    refused_statuses: ClassVar[Collection[int]] = range(400, 500)

    @property
    def bearer_key(self) -> str:
        """Return the bearer token of the generate call: the server's API key, or its admin token
        where it has none.
        """
        return self.server.api_key or self.server.token

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the HTTP headers to add to the request; a subclass may add some."""
        return {}

    def encode_body(self) -> bytes:
        """Return the JSON body of the HTTP request."""
        raise NotImplementedError

    def decode_answer(self, data: bytes) -> SampleGroups:
        """Return the samples of the server's answer, one list for each request. Raise ValueError or
        KeyError where they do not fit the requests.
        """
        raise NotImplementedError

    def fetch_groups(self) -> Coroutine[Any, Any, SampleGroups]:
        """Return a coroutine that sends the query to the server and returns the samples of each
        request, in order. It raises EngineError. The body is encoded now; the coroutine keeps
        prompts as compact columns, because thousands wait for answers at once.
        """
        requests = (
            replace(
                each,
                prompt_ids=TokenColumn(  # type: ignore[arg-type]
                    np.array(each.prompt_ids, np.int32)
                ),
                params=_intern_value(each.params),
            )
            for each in self.requests
        )
        return replace(
            self, server=_intern_value(self.server), requests=tuple(requests)
        )._post_and_decode(self.encode_body())

    async def _post_and_decode(self, body: bytes) -> SampleGroups:
        """Post the body and return the samples of the answer. Raise EngineError, also where the
        number of samples differs from the seeds of the requests.
        """
        http = _get_http_client(self.server, self.bearer_key)
        left_s = self.remaining_s
        found = await http.send("POST", "/generate", body, self.timeout_s, self.headers, left_s)
        data = found.require_data(refused_statuses=self.refused_statuses)
        try:
            groups = await run_in_thread_if_large(len(data), self.decode_answer, data)
        except (ValueError, KeyError) as error:
            raise EngineError(f"{found.server_label}: {error}") from error
        counts = [len(group) for group in groups]
        wanted = [len(request.seeds) for request in self.requests]
        if counts != wanted:
            raise EngineError(
                f"{found.server_label} returned {counts} samples for requests of {wanted}."
            )
        return groups


class QuerySender(Protocol):
    def send_query(self, query: GenerationQuery) -> Coroutine[Any, Any, SampleGroups]:
        """Return a coroutine that has the query sent and returns the samples of each request."""


_sender_by_loop: dict[asyncio.AbstractEventLoop, QuerySender] = {}


def set_query_sender(sender: QuerySender | None) -> None:
    """Route the queries of the running event loop through `sender` from now on; None: this process
    sends them to the engines itself.
    """
    loop = asyncio.get_running_loop()
    _sender_by_loop.pop(loop, None)
    if sender is not None:
        _sender_by_loop[loop] = sender


def send_query(query: GenerationQuery) -> Coroutine[Any, Any, SampleGroups]:
    """Return a coroutine that sends the query, through the sender of the running loop where one is
    set, and returns the samples of each request in order. It raises EngineError. Call it in the
    event loop of `rollout.http_client`.
    """
    asker = _sender_by_loop.get(asyncio.get_running_loop())
    return query.fetch_groups() if asker is None else asker.send_query(query)

"""What a server is asked to generate, as a value: this process asks it, or a driver does (`rollout.drivers`).

A question goes out when the engine's client has let it pass (gate, limits, STALE): all of that stays with the client.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from rlhf_megatron.rollout.engine import Column, EngineAddress, EngineError, GenerateRequest, Groups
from rlhf_megatron.rollout.http import HttpClient, aside

T = TypeVar("T")
_KEPT = 4096  # values that many questions have: servers, sampling parameters
_client = functools.lru_cache(_KEPT)(HttpClient)


@functools.lru_cache(_KEPT)
def _one(value: T) -> T:
    """Return the first value that equals this one."""
    return value


@dataclass(frozen=True)
class Question:
    """A subclass says how its server is spoken to, and is registered with `data.codec`."""

    server: EngineAddress
    requests: tuple[GenerateRequest, ...]
    timeout_s: float  # for messages
    left_s: float  # of it, when the question is asked

    refused: ClassVar[Collection[int]] = range(400, 500)  # statuses that say that the requests are wrong

    @property
    def key(self) -> str:
        return self.server.api_key or self.server.token

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    def body(self) -> bytes:
        """JSON."""
        raise NotImplementedError

    def read(self, data: bytes) -> Groups:
        """The samples that an answer has. Raises ValueError or KeyError where it has others than were asked for."""
        raise NotImplementedError

    def answer(self) -> Coroutine[Any, Any, Groups]:
        """Ask the server. Raises EngineError. Thousands wait for answers: of the prompts that has columns."""
        requests = (
            replace(each, prompt_ids=Column(np.array(each.prompt_ids, np.int32)), params=_one(each.params))  # type: ignore[arg-type]
            for each in self.requests
        )
        return replace(self, server=_one(self.server), requests=tuple(requests))._answer(self.body())

    async def _answer(self, body: bytes) -> Groups:
        http, left_s = _client(self.server, self.key), self.left_s
        found = await http.send("POST", "/generate", body, self.timeout_s, self.headers, left_s)
        data = found.good_data(refused=self.refused)
        try:
            groups = await aside(len(data), self.read, data)
        except (ValueError, KeyError) as error:
            raise EngineError(f"{found.who}: {error}") from error
        counts, wanted = [len(group) for group in groups], [len(request.seeds) for request in self.requests]
        if counts != wanted:
            raise EngineError(f"{found.who} returned {counts} samples for requests of {wanted}.")
        return groups


class Asker(Protocol):
    def ask(self, question: Question) -> Coroutine[Any, Any, Groups]: ...


_askers: dict[asyncio.AbstractEventLoop, Asker] = {}


def use(asker: Asker | None) -> None:
    """Send questions of the running loop to `asker` from now on; None: this process asks the engines itself."""
    loop = asyncio.get_running_loop()
    _askers.pop(loop, None)
    if asker is not None:
        _askers[loop] = asker


def ask(question: Question) -> Coroutine[Any, Any, Groups]:
    """Per request its samples, in order. Raises EngineError. To be called in the loop of `rollout.http`."""
    asker = _askers.get(asyncio.get_running_loop())
    return question.answer() if asker is None else asker.ask(question)

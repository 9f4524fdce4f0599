"""One generate call of a fleet: the pieces that wait, the ones on their way, and what failed of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial

from rlhf_megatron.rollout.balancer import Balancer, Groups, Sent
from rlhf_megatron.rollout.calls import EngineCalls
from rlhf_megatron.rollout.chunks import Chunk
from rlhf_megatron.rollout.engine import EngineError, EngineRequestError
from rlhf_megatron.rollout.supervisor import State, Supervisor

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_ABORT_S = 5.0


class Generation:
    """One thread calls it, the fleet's: `take_back`, `dispatch`, `completed`, again and again until `is_finished`."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        supervisor: Supervisor,
        balancer: Balancer,
        calls: EngineCalls,
        version: int | None,
        request_timeout_s: float,
        request_retries: int,
    ) -> None:
        """`version`: that samples must have; None: any."""
        self.is_aborted = False  # by the caller: samples that end so are good
        self._supervisor = supervisor
        self._balancer = balancer
        self._calls = calls
        self._version = version
        self._request_timeout_s = request_timeout_s
        self._request_retries = request_retries
        self._todo = list(chunks)
        self._running: dict[Future[Groups], Sent] = {}

    @property
    def is_finished(self) -> bool:
        return not self._todo and not self._running

    def take_back(self) -> None:
        """Chunks of engines that serve no more. What such an engine still answers is read by nobody."""
        for future, sent in list(self._running.items()):
            if sent.member is None:
                continue  # its connection breaks when its engine is killed; one that is STALE aborts it
            if not sent.is_current or sent.member.state not in (State.SERVING, State.CHECKED):
                del self._running[future]
                self._again(sent, sent.member.reason)

    def dispatch(self) -> None:
        """Send what the balancer has a place for. Raises EngineError when no engine is left."""
        while self._todo:
            serving = self._supervisor.of(State.SERVING)
            if not serving:
                if not self._supervisor.is_hopeful:
                    raise EngineError(self._supervisor.nobody)
                return
            sent = self._balancer.place(self._todo[0], serving, self._running.values(), self._version)
            if sent is None:
                return
            self._todo.pop(0)
            verb = partial(sent.generate, sent.chunk.requests, self._request_timeout_s)
            self._running[self._calls.start(sent.name, "generate", verb)] = sent

    def completed(self) -> list[tuple[Chunk, Groups]]:
        """Wait a moment. Chunks whose samples have come and are accepted; the others wait to be sent again."""
        if not self._running:
            time.sleep(_POLL_S)
            return []
        accepted: list[tuple[Chunk, Groups]] = []
        for future in wait(self._running, timeout=_POLL_S, return_when=FIRST_COMPLETED).done:
            sent = self._running.pop(future)
            try:
                groups = future.result(timeout=0)
            except EngineRequestError:
                raise
            except EngineError as error:
                if not self._balancer.blames_itself(error):
                    self._failed(sent, str(error))
                self._again(sent, str(error))
                continue
            versions = {sample.policy_version for group in groups for sample in group}
            if self._version is not None and versions - {self._version}:
                words = f"{sent.name} returned samples of version {sorted(versions)}, the current is {self._version}"
                self._is_stale(sent, words)
                self._again(sent, words)
            elif not self.is_aborted and any(s.finish_reason == "abort" for g in groups for s in g):
                self._again(sent, f"{sent.name} ended samples before they were complete")
            else:
                if sent.member is not None:
                    sent.member.num_stale = 0
                accepted.append((sent.chunk, groups))
        return accepted

    def abandon(self) -> None:
        """Make the engines finish at once what nobody will read. Waits for them a moment."""
        members = {sent.member for sent in self._running.values() if sent.member is not None and sent.is_current}
        if any(sent.member is None for sent in self._running.values()):
            members |= set(self._supervisor.of(State.SERVING, State.CHECKED))
        wait([self._calls.start(member.name, "abort", member.engine.abort) for member in members], timeout=_ABORT_S)

    def _failed(self, sent: Sent, words: str) -> None:
        if sent.member is None:
            self._supervisor.suspect(words)
        elif sent.is_current and sent.member.state is State.SERVING:
            self._supervisor.failed(sent.member, words)

    def _is_stale(self, sent: Sent, words: str) -> None:
        if sent.member is None:
            self._supervisor.suspect(words)
        elif sent.is_current and sent.member.state is State.SERVING:
            self._supervisor.stale(sent.member, words)

    def _again(self, sent: Sent, words: str) -> None:
        """Ask for the chunk again, with the same seeds. Raises EngineError when it has used up its retries."""
        chunk = sent.chunk
        chunk.failures[sent.name] = words
        chunk.num_failures += 1
        logger.warning("%s failed with %d samples: %s", sent.name, chunk.num_samples, words.splitlines()[0])
        if chunk.num_failures > self._request_retries:
            raise EngineError(
                f"{chunk.num_samples} samples failed {chunk.num_failures} times (rollout.request_retries is"
                f" {self._request_retries}): {'; '.join(chunk.failures.values())}"
            )
        self._supervisor.counters["rollout/requests_reissued"] += len(chunk.requests)
        self._todo.insert(0, chunk)

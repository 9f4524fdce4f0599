"""Several engines as one: work is spread by what each has outstanding, and a failed piece goes to another engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from rlhf_megatron.rollout.engine import Engine, EngineError, EngineRequestError, GeneratedSample, GenerateRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CHUNK_SAMPLES = 512  # of one HTTP request, at most (a group is never cut)
_CHUNKS_IN_FLIGHT = 2  # per engine, so that its batch stays full while an answer travels
_HEALTH_S = 5.0


@dataclass(eq=False)
class _Chunk:
    """Neighbouring groups that travel together."""

    start: int  # index of the first request
    requests: Sequence[GenerateRequest]
    failures: dict[str, str] = field(default_factory=dict)  # engine name -> what it said last
    num_failures: int = 0

    @property
    def num_samples(self) -> int:
        return sum(len(request.seeds) for request in self.requests)


def cut(requests: Sequence[GenerateRequest], num_engines: int) -> list[_Chunk]:
    """One piece for one engine, two for each of several, none over `_CHUNK_SAMPLES` unless a group alone is."""
    total = sum(len(request.seeds) for request in requests)
    pieces = 1 if num_engines == 1 else _CHUNKS_IN_FLIGHT * num_engines
    target = min(_CHUNK_SAMPLES, -(-total // pieces))
    chunks: list[_Chunk] = []
    start = size = 0
    for index, request in enumerate(requests):
        if size and size + len(request.seeds) > target:
            chunks.append(_Chunk(start, requests[start:index]))
            start, size = index, 0
        size += len(request.seeds)
    return [*chunks, _Chunk(start, requests[start:])] if requests else chunks


class EngineFleet:
    """Engines that serve the same weights. One caller at a time.

    An engine that fails and then does not answer a health check is set aside; `begin_update` takes it back when it
    answers again, since the sync that follows gives it current weights.
    """

    def __init__(self, engines: Sequence[Engine], request_timeout_s: float, request_retries: int) -> None:
        if not engines:
            raise ValueError("a fleet needs at least one engine; set rollout.num_engines.")
        self.engines = tuple(engines)
        self.request_timeout_s = request_timeout_s
        self.request_retries = request_retries
        self._down: dict[str, str] = {}  # engine name -> why
        self._threads = ThreadPoolExecutor(_CHUNKS_IN_FLIGHT * len(engines), thread_name_prefix="fleet")

    @property
    def live(self) -> tuple[Engine, ...]:
        """Engines that are not set aside: the ones that weights go to."""
        return tuple(engine for engine in self.engines if engine.address.name not in self._down)

    def set_aside(self, name: str, reason: str) -> None:
        """Nothing goes to that engine until it takes part in a weight sync again."""
        logger.warning("%s is set aside: %s", name, reason)
        self._down[name] = reason

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[GeneratedSample]]:
        """Per request its samples, in order; each sample exactly once, whatever failed on the way.

        Raises EngineRequestError when a request itself is wrong, EngineError when retries or engines run out.
        """
        results: list[list[GeneratedSample] | None] = [None] * len(requests)
        todo = cut(requests, max(1, len(self.live)))
        running: dict[Future[list[list[GeneratedSample]]], tuple[_Chunk, Engine]] = {}
        try:
            while todo or running:
                self._dispatch(todo, running)
                done, _ = wait(running, return_when=FIRST_COMPLETED)  # every call has its deadline
                for future in done:
                    chunk, engine = running.pop(future)
                    try:
                        groups = future.result()
                    except EngineRequestError:
                        raise
                    except EngineError as error:
                        self._failed(chunk, engine, error)
                        todo.insert(0, chunk)
                        continue
                    results[chunk.start : chunk.start + len(groups)] = groups
        except BaseException:
            self._abandon(running)
            raise
        assert all(group is not None for group in results), "a group was lost"
        return [group for group in results if group is not None]

    def begin_update(self, version: int, full_resync: bool = False) -> None:
        """On all engines. Those set aside that answer again take part; the others stay out."""
        for engine in self.engines:
            if engine.address.name in self._down and self._is_healthy(engine):
                logger.warning("%s answers again and joins the weight sync", engine.address.name)
                del self._down[engine.address.name]
        self._require_live()
        self._on_all(lambda engine: engine.begin_update(version, full_resync))

    def commit_update(self, version: int) -> None:
        """On all engines, then check that each serves `version`."""
        self._on_all(lambda engine: engine.commit_update(version))
        found = self._on_all(lambda engine: engine.version())
        wrong = {name: value for name, value in found.items() if value != version}
        if wrong:
            raise EngineError(f"engines serve other versions than {version} after the sync: {wrong}.")

    def version(self) -> int | None:
        """The version that all engines serve; None: never synced or STALE. Raises EngineError when they differ."""
        self._require_live()
        found = self._on_all(lambda engine: engine.version())
        if len(set(found.values())) > 1:
            raise EngineError(f"engines serve different versions: {found}; sync the weights again.")
        return next(iter(found.values()))

    def weight_digests(self) -> dict[str, dict[str, str] | None]:
        """Per engine name what `Engine.weight_digests` returns."""
        return self._on_all(lambda engine: engine.weight_digests())

    def pause(self) -> None:
        self._on_all(lambda engine: engine.pause())

    def resume(self) -> None:
        self._on_all(lambda engine: engine.resume())

    def abort(self) -> None:
        self._on_all(lambda engine: engine.abort())

    def release_memory(self) -> None:
        self._on_all(lambda engine: engine.release_memory())

    def resume_memory(self) -> None:
        self._on_all(lambda engine: engine.resume_memory())

    def health(self, timeout_s: float = _HEALTH_S) -> None:
        """Raises EngineError naming the engines that do not answer."""
        self._on_all(lambda engine: engine.health(timeout_s))

    def close(self) -> None:
        """Drop all connections. Safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for engine in self.engines:
            engine.close()

    def _dispatch(
        self, todo: list[_Chunk], running: dict[Future[list[list[GeneratedSample]]], tuple[_Chunk, Engine]]
    ) -> None:
        """Give chunks to the engines with the least outstanding samples, until each has enough."""
        self._require_live()
        while todo:
            load = {engine: [0, 0] for engine in self.live}  # chunks, samples
            for chunk, engine in running.values():
                if engine in load:
                    load[engine][0] += 1
                    load[engine][1] += chunk.num_samples
            chunk = todo[0]
            fresh = [engine for engine in load if engine.address.name not in chunk.failures] or list(load)
            engine = min(fresh, key=lambda candidate: load[candidate][1])
            if load[engine][0] >= _CHUNKS_IN_FLIGHT:
                return
            todo.pop(0)
            running[self._threads.submit(engine.generate, chunk.requests, self.request_timeout_s)] = (chunk, engine)

    def _failed(self, chunk: _Chunk, engine: Engine, error: EngineError) -> None:
        """Set the engine aside if it is ill. Raises EngineError when the chunk has used up its retries."""
        chunk.failures[engine.address.name] = str(error)
        chunk.num_failures += 1
        if engine.address.name not in self._down and not self._is_healthy(engine):
            self._down[engine.address.name] = str(error)
        logger.warning("%s failed with %d samples: %s", engine.address.name, chunk.num_samples, error)
        if chunk.num_failures > self.request_retries:
            words = "; ".join(chunk.failures.values())
            raise EngineError(
                f"{chunk.num_samples} samples failed {chunk.num_failures} times (rollout.request_retries is"
                f" {self.request_retries}): {words}"
            ) from error

    def _abandon(self, running: dict[Future[list[list[GeneratedSample]]], tuple[_Chunk, Engine]]) -> None:
        """Make the engines finish at once what nobody will read."""
        for engine in {engine for _, engine in running.values()}:
            if engine.address.name not in self._down:
                self._threads.submit(engine.abort)

    def _is_healthy(self, engine: Engine) -> bool:
        try:
            engine.health(_HEALTH_S)
        except EngineError:
            return False
        return True

    def _require_live(self) -> None:
        if not self.live:
            words = "; ".join(self._down.values())
            raise EngineError(f"no engine is left of {len(self.engines)}: {words}")

    def _on_all(self, verb: Callable[[Engine], T]) -> dict[str, T]:
        """Call every live engine at once; results by engine name. Raises one EngineError with what all said."""
        futures = {engine.address.name: self._threads.submit(verb, engine) for engine in self.live}
        results: dict[str, T] = {}
        failures: list[str] = []
        for name, future in futures.items():
            try:
                results[name] = future.result()
            except EngineError as error:
                failures.append(str(error))
        if failures:
            raise EngineError("; ".join(failures))
        return results

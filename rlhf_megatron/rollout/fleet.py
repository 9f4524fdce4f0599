"""Several engines as one: work is spread by what each has outstanding, and a failed piece goes to another engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TypeVar

from rlhf_megatron.rollout.calls import EngineCall, EngineCalls
from rlhf_megatron.rollout.chunks import CHUNKS_IN_FLIGHT, Chunk, cut, unknown_runs, without_known
from rlhf_megatron.rollout.engine import Engine, EngineError, EngineRequestError, GeneratedSample, GenerateRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_S = 0.2
_HEALTH_S = 5.0
_VERB_S = 3600.0  # of any verb; the clients have deadlines of their own for each HTTP call in it
OnGroups = Callable[[int, list[list[GeneratedSample]]], None]


def _never_stop() -> None:
    pass


class EngineFleet:
    """Engines that serve the same weights. One caller at a time.

    An engine that fails and then does not answer a health check is set aside; `begin_update` takes it back when it
    answers again, since the sync that follows gives it current weights.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        request_timeout_s: float,
        request_retries: int,
        *,
        should_stop: Callable[[], None] = _never_stop,
    ) -> None:
        """`should_stop` is called every moment while samples are awaited: `StopRequest.check`, which raises."""
        if not engines:
            raise ValueError("a fleet needs at least one engine; set rollout.num_engines.")
        self.engines = tuple(engines)
        self.request_timeout_s = request_timeout_s
        self.request_retries = request_retries
        self.should_stop = should_stop
        self._down: dict[str, str] = {}  # engine name -> why
        self._calls = EngineCalls()

    @property
    def live(self) -> tuple[Engine, ...]:
        """Engines that are not set aside: the ones that weights go to."""
        return tuple(engine for engine in self.engines if engine.address.name not in self._down)

    def set_aside(self, name: str, reason: str) -> None:
        """Nothing goes to that engine until it takes part in a weight sync again."""
        logger.warning("%s is set aside: %s", name, reason)
        self._down[name] = reason

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_groups: OnGroups | None = None,
        known: Mapping[int, list[GeneratedSample]] | None = None,
    ) -> list[list[GeneratedSample]]:
        """Per request its samples, in order; each sample exactly once, whatever failed on the way.

        `on_groups(first, groups)` is called with neighbouring groups as they come, once for each group. `known`: groups
        by index that an earlier process got; they are not asked for, nor handed to `on_groups`.
        Raises EngineRequestError when a request itself is wrong, EngineError when retries or engines run out, and what
        `should_stop` raises.
        """
        known = known or {}
        results: list[list[GeneratedSample] | None] = [known.get(index) for index in range(len(requests))]
        todo = without_known(cut(requests, len(self.engines)), known, is_closed=False)
        running: dict[Future[list[list[GeneratedSample]]], tuple[Chunk, Engine]] = {}
        try:
            while todo or running:
                self.should_stop()
                self._dispatch(todo, running)
                done, _ = wait(running, timeout=_POLL_S, return_when=FIRST_COMPLETED)
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
                    for run in unknown_runs(chunk.start, len(groups), known):
                        new = groups[run.start - chunk.start :][: len(run)]
                        results[run.start : run.stop] = new
                        if on_groups is not None:
                            on_groups(run.start, new)
        except BaseException:
            self._abandon(running)
            raise
        assert all(group is not None for group in results), "a group was lost"
        return [group for group in results if group is not None]

    def calls(self) -> list[EngineCall]:
        """The last calls to engines, oldest first; those that still run too."""
        return self._calls.last()

    def begin_update(self, version: int, full_resync: bool = False) -> None:
        """On all engines. Those set aside that answer again take part; the others stay out."""
        for engine in self.engines:
            if engine.address.name in self._down and self._is_healthy(engine):
                logger.warning("%s answers again and joins the weight sync", engine.address.name)
                del self._down[engine.address.name]
        self._require_live()
        self._on_all("begin_update", lambda engine: engine.begin_update(version, full_resync))

    def commit_update(self, version: int) -> None:
        """On all engines, then check that each serves `version`."""
        self._on_all("commit_update", lambda engine: engine.commit_update(version))
        found = self._on_all("version", lambda engine: engine.version())
        wrong = {name: value for name, value in found.items() if value != version}
        if wrong:
            raise EngineError(f"engines serve other versions than {version} after the sync: {wrong}.")

    def version(self) -> int | None:
        """The version that all engines serve; None: never synced or STALE. Raises EngineError when they differ."""
        self._require_live()
        found = self._on_all("version", lambda engine: engine.version())
        if len(set(found.values())) > 1:
            raise EngineError(f"engines serve different versions: {found}; sync the weights again.")
        return next(iter(found.values()))

    def weight_digests(self) -> dict[str, dict[str, str] | None]:
        """Per engine name what `Engine.weight_digests` returns."""
        return self._on_all("weight_digests", lambda engine: engine.weight_digests())

    def pause(self) -> None:
        self._on_all("pause", lambda engine: engine.pause())

    def resume(self) -> None:
        self._on_all("resume", lambda engine: engine.resume())

    def abort(self) -> None:
        self._on_all("abort", lambda engine: engine.abort())

    def release_memory(self) -> None:
        self._on_all("release_memory", lambda engine: engine.release_memory())

    def resume_memory(self) -> None:
        self._on_all("resume_memory", lambda engine: engine.resume_memory())

    def health(self, timeout_s: float = _HEALTH_S) -> None:
        """Raises EngineError naming the engines that do not answer."""
        self._on_all("health", lambda engine: engine.health(timeout_s))

    def close(self) -> None:
        """Drop all connections. Safe to call twice."""
        for engine in self.engines:
            engine.close()

    def _dispatch(
        self, todo: list[Chunk], running: dict[Future[list[list[GeneratedSample]]], tuple[Chunk, Engine]]
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
            if load[engine][0] >= CHUNKS_IN_FLIGHT:
                return
            todo.pop(0)
            running[self._start_generate(engine, chunk)] = (chunk, engine)

    def _start_generate(self, engine: Engine, chunk: Chunk) -> Future[list[list[GeneratedSample]]]:
        return self._calls.start(
            engine.address.name, "generate", lambda: engine.generate(chunk.requests, self.request_timeout_s)
        )

    def _failed(self, chunk: Chunk, engine: Engine, error: EngineError) -> None:
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

    def _abandon(self, running: dict[Future[list[list[GeneratedSample]]], tuple[Chunk, Engine]]) -> None:
        """Make the engines finish at once what nobody will read."""
        for engine in {engine for _, engine in running.values()}:
            if engine.address.name not in self._down:
                self._calls.start(engine.address.name, "abort", engine.abort)

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

    def _on_all(self, what: str, verb: Callable[[Engine], T]) -> dict[str, T]:
        """Call every live engine at once; results by engine name. Raises one EngineError with what all said."""
        futures = {
            engine.address.name: self._calls.start(engine.address.name, what, partial(verb, engine))
            for engine in self.live
        }
        deadline = time.monotonic() + _VERB_S
        results: dict[str, T] = {}
        failures: list[str] = []
        for name, future in futures.items():
            try:
                results[name] = future.result(max(0.0, deadline - time.monotonic()))
            except EngineError as error:
                failures.append(str(error))
            except TimeoutError:
                failures.append(f"{name} has not ended {what} within {_VERB_S:g} s")
        if failures:
            raise EngineError("; ".join(failures))
        return results

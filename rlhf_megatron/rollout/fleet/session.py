"""Generation that goes on over weight syncs: what is submitted comes back once, whoever else uses the fleet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from rlhf_megatron.rollout.engine import EngineError, GenerateRequest, Groups
from rlhf_megatron.rollout.fleet.balancer import Chunk, Load
from rlhf_megatron.rollout.fleet.work import POLL_S, Generation, Means

_PURPOSE = "session"


class Session:
    """Generation that goes on over weight syncs. Made by `EngineFleet.open_session`; a context manager that closes it.

        session.submit(7, requests)             # a key and its requests, which travel together
        for key, groups in session.poll(): ...  # again and again; each key once

    One thread submits, polls and aborts. Another one may, meanwhile, sync weights (`with fleet.exclusive():`), call
    `fleet.generate`, and must call `mend` where engines may have died: nothing else gives them weights between syncs.
    """

    def __init__(
        self,
        means: Means,
        others: Callable[[], Load],
        on_close: Callable[[], None],
        keeps_failures: bool = False,
    ) -> None:
        """`others`: work of the fleet beside the session's. `keeps_failures`: pieces that no engine can do are for
        `take_failures`, and `poll` raises for none of them."""
        self._lock = means.lock
        self._supervisor = means.supervisor
        self._served = means.served
        self._others = others
        self._on_close = on_close
        self._chunks: dict[int, Chunk] = {}  # by key, of what runs
        self._dropped: list[Chunk] = []  # that engines are still to be told of
        self._is_closed = False
        self._work = Generation(means, (), is_named=True, is_open=True, keeps_failures=keeps_failures)
        with self._lock.taken():
            self._supervisor.watch(_PURPOSE)

    @property
    def num_running(self) -> int:
        """Keys that were submitted and neither came back nor were aborted."""
        return len(self._chunks)

    @property
    def load(self) -> Load:
        """The samples on their way to engines. Only the thread that has the lock may read it."""
        return self._work.load

    def submit(self, key: int, requests: Sequence[GenerateRequest]) -> None:
        """A piece of work: all its requests go to one engine, as soon as one has room. Does not wait.

        `key`: none that is running; one that came back or was aborted may be used again.
        """
        assert requests, f"key {key} has no request"
        assert key not in self._chunks, f"key {key} is running"
        assert not self._is_closed, "the session is closed"
        self._chunks[key] = Chunk(key, tuple(requests), is_open=True)
        self._work.add(self._chunks[key])

    def poll(self) -> list[tuple[int, Groups]]:
        """Keys that have finished since the last time, with one list of samples a request. Returns at once when there
        are any, else after at most about 0.1 s; so too while another thread syncs weights.

        Raises EngineError when retries or engines run out, EngineRequestError when a request itself is wrong: the
        session is to be closed then. Work for engines of which all are STALE waits for a sync or for `mend`.
        """
        found = self._look()
        if found == [] and self._work.wait():
            found = self._look()
        return found or []

    def take_failures(self) -> list[tuple[int, EngineError]]:
        """Keys that no engine could do since the last time, and why. To be called by the thread that polls."""
        with self._lock.tried(0.0) as is_mine:
            if not is_mine:
                return []
            failed, self._work.failed = self._work.failed, []
        found = [(chunk.start, error) for chunk, error in failed if self._chunks.get(chunk.start) is chunk]
        for key, _ in found:
            del self._chunks[key]
        return found

    def wake(self) -> None:
        """End a `poll` that waits: there is something to submit. Any thread may call it."""
        self._work.wake()

    def abort(self, keys: Collection[int]) -> None:
        """They never come back; engines are told to end them, at the next `poll` where another thread syncs weights.
        Waits for at most about 0.1 s. Keys that do not run are ignored."""
        self._dropped += [self._chunks.pop(key) for key in keys if key in self._chunks]
        with self._lock.tried(POLL_S) as is_mine:
            if is_mine and not self._is_closed:
                self._drop()

    def mend(self) -> None:
        """Bring engines that were started again, or are STALE, to the current weights. Called by the thread that syncs,
        while the hosts are free. Returns at once where there are none, and after `close`: another thread may have
        closed it because of an error, which is to be heard."""
        with self._lock.taken():
            if self._is_closed:
                return
            self._supervisor.advance(self._served.current)
            self._work.take_back()
            self._supervisor.mend(self._served.current)

    def take_back(self) -> None:
        """Sends pieces of engines that do not serve to others. Only the thread that has the lock may call it."""
        self._work.take_back()

    def close(self) -> None:
        """Engines end what still runs; nothing of it comes back. Safe to call twice."""
        with self._lock.taken():
            if self._is_closed:
                return
            self._is_closed = True
            self._supervisor.unwatch(_PURPOSE)
            self._chunks.clear()
            self._on_close()
        self._work.abandon()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self) -> list[tuple[int, Groups]] | None:
        """Sends work and returns what has come. None: another thread has the lock, or the session is closed."""
        with self._lock.tried(POLL_S) as is_mine:
            if not is_mine or self._is_closed:
                return None
            version = self._served.current
            self._supervisor.advance(version)
            self._work.take_back()
            self._drop()
            self._work.expire()
            finished = [(chunk.start, groups) for chunk, groups in self._work.harvest(version)]
            for key, _ in finished:
                del self._chunks[key]
            try:
                self._work.dispatch(version, self._others())
            except EngineError:
                if not finished:  # else it is raised the next time
                    raise
            return finished

    def _drop(self) -> None:
        """Drop aborted groups. Call it before harvesting, so that none of them comes back."""
        dropped, self._dropped = self._dropped, []
        self._work.drop(dropped)

"""Code of users within a worker: which threads and tasks of the event loop belong to which episode,
so that an episode's end can wait for its code and blocked loops can be blamed on it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

MAX_THREADS = 8192  # of a worker; a thread is made when a call finds no idle one


class EpisodeCode:
    """What runs for one episode: calls in threads, and tasks of the event loop."""

    def __init__(self, attempt: int) -> None:
        """Begin without any. `attempt` is that of the episode's start."""
        self.attempt = attempt
        self.running_calls: set[Future[Any]] = set()
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()

    def add_call(self, call: Future[Any]) -> None:
        """Keep a call in a thread until it has come back. A cancelled await does not end a
        thread.
        """
        self.running_calls.add(call)
        call.add_done_callback(self.running_calls.discard)

    async def wait_for_calls(self, timeout_s: float) -> bool:
        """Wait until all calls in threads have come back, and return whether they have."""
        waits = [asyncio.wrap_future(call) for call in list(self.running_calls)]
        if waits:
            ended, _ = await asyncio.wait(waits, timeout=timeout_s)
            for wait in ended:
                if not wait.cancelled():
                    wait.exception()  # else the loop logs that nobody looked
        return not self.running_calls

    def cancel_tasks(self) -> None:
        """Cancel the tasks that the episode's code has started and left behind."""
        current = asyncio.current_task()
        for task in list(self.tasks):
            if task is not current:
                task.cancel()


CURRENT_CODE: ContextVar[EpisodeCode | None] = ContextVar("episode_code", default=None)
"""The episode that the running code belongs to; tasks inherit the value."""


class UserCodeThreads(ThreadPoolExecutor):
    """Threads for user code that is not async, as many as calls are under way, so that one slow
    call never waits for another.
    """

    def submit(
        self, function: Callable[..., Any], /, *arguments: Any, **keywords: Any
    ) -> Future[Any]:
        """Call the function in a thread, on behalf of the current episode."""
        call = super().submit(_call_in_thread, function, arguments, keywords)
        code = CURRENT_CODE.get()
        if code is not None:
            code.add_call(call)
        return call


def _call_in_thread(
    function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Any:
    """Call a function and return its result. A future cannot hold StopIteration: whoever awaits it
    would wait for ever. A child that the function has forked and let come back ends here.
    """
    pid = os.getpid()
    try:
        return function(*arguments, **keywords)
    except StopIteration as error:
        raise RuntimeError("the environment's code raised StopIteration.") from error
    finally:
        if os.getpid() != pid:
            os._exit(0)


USER_THREADS = UserCodeThreads(max_workers=MAX_THREADS, thread_name_prefix="environment")


async def call_user_code(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the user's: an async one in the event loop, any other in a thread, so that
    a slow call holds up no other episode. Return its result.
    """
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    call = USER_THREADS.submit(function, *arguments)
    result = await asyncio.wrap_future(call)
    return await result if inspect.isawaitable(result) else result


class TaskOwners:
    """Which episode each task of an event loop belongs to."""

    def __init__(self) -> None:
        """Begin with no task."""
        self._code_by_task: WeakKeyDictionary[asyncio.Task[Any], EpisodeCode] = WeakKeyDictionary()

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Note the owner of each task that the loop makes from now on. Threads of
        `asyncio.to_thread` belong to episodes too, and wait for no others.
        """
        loop.set_task_factory(self._make_task)
        loop.set_default_executor(USER_THREADS)

    def find_attempt(self, task: asyncio.Task[Any]) -> int | None:
        """Return the attempt of the episode that a task belongs to, or None. Any thread may call
        it.
        """
        code = self._code_by_task.get(task)
        return None if code is None else code.attempt

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        """Make a task for the loop."""
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        code = CURRENT_CODE.get()
        if code is not None:
            self._code_by_task[task] = code
            code.tasks.add(task)
        return task

"""What stands for engines where episodes are measured or tested: answers are a function of prompt
and seed, and come as fast as they are told to.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlhf_megatron.rollout.engine_interface import EngineError, GeneratedSample, GenerateRequest
from rlhf_megatron.rollout.fleet.generation_session import FinishedCall

EOS = 1  # of the quickstart's tokenizer
DIGITS = range(2, 12)


def answer(request: GenerateRequest) -> GeneratedSample:
    """One to four tokens, digits and the end of the turn."""
    draw = random.Random(f"{request.prompt_ids} {request.seeds}")
    room = request.params.max_new_tokens
    ids = [draw.choice(DIGITS) for _ in range(draw.randint(1, 3))] + [EOS]
    reason = "stop" if len(ids) <= room else "length"
    ids = ids[:room]
    log_probs = [-draw.random() for _ in ids]
    return GeneratedSample(tuple(ids), tuple(log_probs), reason, 0)


@dataclass
class Engines:
    """Stands for a fleet, and for its one session. `turn_s`: until a turn has come. Turns of the
    keys in `failing` fail.
    """

    turn_s: Callable[[int, GenerateRequest], float] = lambda key, request: 0.0
    failing: set[int] = field(default_factory=set)
    num_turns: int = 0
    aborted: list[int] = field(default_factory=list)
    on_poll: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._running: dict[int, tuple[float, float, GenerateRequest]] = {}
        self._calls: dict[int, float] = {}
        self._event = threading.Event()

    def check_stop(self) -> None:
        pass

    def open_session(self, **options: bool) -> Engines:
        return self

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.clear()

    def submit_requests(
        self, key: int, requests: Sequence[GenerateRequest], preference: object = None
    ) -> None:
        assert key not in self._running, f"key {key} is running"
        now = time.monotonic()
        [request] = requests
        self._running[key] = (now, now + self.turn_s(key, request), request)

    def poll_finished(self) -> list[tuple[int, list[list[GeneratedSample]]]]:
        self.on_poll()
        finished = self._harvest()
        if not finished:
            self._event.wait(self._wait_s())
            self._event.clear()
            finished = self._harvest()
        return finished

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[GeneratedSample]]:
        return [[answer(request)] for request in requests]

    def take_finished_call(self, key: int) -> FinishedCall:
        return FinishedCall(None, self._calls.pop(key))

    def take_failures(self) -> list[tuple[int, EngineError]]:
        keys = [key for key in self._running if key in self.failing]
        for key in keys:
            del self._running[key]
        return [(key, EngineError("no engine can")) for key in keys]

    def measure_engine_seconds(self, key: int) -> float:
        started_at = self._running[key][0] if key in self._running else time.monotonic()
        return time.monotonic() - started_at

    def abort_keys(self, keys: Collection[int]) -> None:
        for key in keys:
            self.aborted += [key] if self._running.pop(key, None) else []

    def wake_poll(self) -> None:
        self._event.set()

    def mend_engines(self) -> None:
        pass

    def _wait_s(self) -> float:
        now = time.monotonic()
        times = [ready - now for key, (_, ready, _) in self._running.items()]
        return max(0.0, min([*times, 0.05]))

    def _harvest(self) -> list[tuple[int, list[list[GeneratedSample]]]]:
        now = time.monotonic()
        finished = []
        for key, (started, ready, request) in list(self._running.items()):
            if ready <= now and key not in self.failing:
                del self._running[key]
                self._calls[key] = now - started
                self.num_turns += 1
                finished.append((key, [[answer(request)]]))
        return finished

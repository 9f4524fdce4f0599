"""One attempt at a prompt: an environment's code, the tokens of the talk, and what ends it. Runs in
the event loop of a worker.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlhf_megatron.agents.answer_formats.parsed_answer import make_assistant_message
from rlhf_megatron.agents.answer_reader import AnswerReader
from rlhf_megatron.agents.dialogue import Dialogue, DialogueFormat, JoinRefusedError
from rlhf_megatron.agents.environment import (
    ENVIRONMENTS,
    Environment,
    EpisodeOver,
    Message,
    Outcome,
    Task,
    Turn,
)
from rlhf_megatron.agents.episode_messages import (
    DeliverTurn,
    EpisodeEnd,
    EpisodeLimits,
    ReportEpisode,
    RequestTurn,
    StartEpisode,
)
from rlhf_megatron.agents.user_code import EpisodeCode, call_user_code
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.data.extra_columns import parse_extra
from rlhf_megatron.rewards.service.reward_worker import format_traceback_end

REPORT_S = 0.25  # before the deadline a worker ends an episode, so that its report is in time
LEAVE_S = 1.0  # for code of an episode that is over to come back, before its environment is closed
CLOSE_S = 10.0  # for `close` of an environment
THREADS_S = 5.0  # for threads to come back once it is closed

# Limits of a talk, as JSON. They follow the tokens that the episode may have: text has about 4
# bytes a token, so a talk above the limit could not fit into the tokens.
BYTES_PER_TOKEN = 64
MIN_TALK_BYTES = 1 << 16
MAX_TALK_BYTES = 1 << 23
MAX_TALK_MESSAGES = 10_000
MAX_METRICS = 256
MAX_METRIC_NAME_CHARS = 200
MAX_ERROR_CHARS = 8_000
MAX_CALLS_AFTER_END = 8


class TurnSource(Protocol):
    """The way to the policy."""

    async def __call__(self, request: RequestTurn) -> DeliverTurn:
        """Send the request to the controller, and return its answer."""


class EpisodeStopped(BaseException):
    """Ends code that goes on calling `chat` after the end of its episode. No `except Exception`
    catches it.
    """


class EpisodeChat:
    """What an environment calls to let the policy speak. Keeps the tokens and the limits."""

    def __init__(
        self,
        order: StartEpisode,
        dialogue: Dialogue,
        answer_reader: AnswerReader,
        take_turn: TurnSource,
    ) -> None:
        """Begin the talk of an episode. `take_turn` asks the controller for a turn."""
        self.dialogue = dialogue
        self._answer_reader = answer_reader
        self.num_turns = 0
        # set once a limit, a join that does not hold, or the deadline has ended the talk
        self.end: EpisodeEnd | None = None
        self.refusal = ""
        self._order = order
        self._take_turn = take_turn
        self._num_prompt_tokens = 0
        self._is_speaking = False
        self._num_calls_after_end = 0
        self._content = TalkContent(order.limits)

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Turn:
        """Let the policy answer the whole talk so far; see `environment.Chat`."""
        if self._is_speaking:
            raise RuntimeError(
                "chat was called while a former call of the episode waits for its answer; an"
                " episode has one turn at a time: await the former call first."
            )
        await self._require_open()
        self._is_speaking = True
        try:
            return await self._speak(messages, tools)
        finally:
            self._is_speaking = False

    async def _speak(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> Turn:
        """Join the new messages, take a turn of the policy, and add it to the talk."""
        limits = self._order.limits
        if self.num_turns >= limits.max_turns:
            self._end("max_turns")
        num_tokens = len(self.dialogue.token_ids) - self._num_prompt_tokens
        if self.num_turns and num_tokens >= limits.max_tokens:
            self._end("max_tokens")
        self._content.add_messages(messages, len(self.dialogue.messages), tools)
        if tools and self._answer_reader.tool_problem:
            self.refusal = self._answer_reader.tool_problem
            self._end("refused")
        try:
            new_ids = self.dialogue.append_messages(messages, tools)
        except JoinRefusedError as error:
            self.refusal = str(error)
            self._end("refused")
        if not self.num_turns:
            self._num_prompt_tokens = len(new_ids)
            self._check_prompt_length(len(new_ids), limits)
        num_behind_prompt = len(self.dialogue.token_ids) - self._num_prompt_tokens
        num_left = limits.max_tokens - num_behind_prompt
        if num_left < 1:
            self._end("max_tokens")
        answer = await self._take_turn(
            RequestTurn(
                self._order.key,
                self._order.attempt,
                list(new_ids),
                min(num_left, limits.max_turn_tokens),
            )
        )
        parts = self._answer_reader.read_answer(answer.token_ids, self.dialogue.token_ids, tools)
        message = self.dialogue.append_answer(answer.token_ids, make_assistant_message(parts))
        self._content.add_answer(message)
        turn = Turn(
            self.num_turns,
            message,
            parts.content,
            tuple(answer.token_ids),
            tuple(answer.log_probs),
            answer.finish_reason,
            parts.reasoning,
            parts.calls,
            parts.broken_calls,
        )
        self.num_turns += 1
        return turn

    async def _require_open(self) -> None:
        """Raise EpisodeOver again where the talk has ended already. Code that catches it and calls
        again and again neither blocks the event loop nor goes on for ever.
        """
        if self.end is None:
            return
        await asyncio.sleep(0)
        self._num_calls_after_end += 1
        if self._num_calls_after_end > MAX_CALLS_AFTER_END:
            raise EpisodeStopped(self.end)
        raise EpisodeOver(self.end)

    def _end(self, end: EpisodeEnd) -> None:
        """Note the end, and raise EpisodeOver."""
        self.end = end
        raise EpisodeOver(end)

    @staticmethod
    def _check_prompt_length(num_tokens: int, limits: EpisodeLimits) -> None:
        """Raise ValueError where the environment has made the first prompt longer than a run's
        prompts may be.
        """
        if num_tokens > limits.max_prompt_tokens:
            raise ValueError(
                f"the first prompt of the episode has {num_tokens} tokens, more than"
                f" data.max_prompt_length ({limits.max_prompt_tokens}); raise it, or let the"
                " environment add fewer messages and tools, whose descriptions count."
            )


class TalkContent:
    """Bounds what an environment may put into a talk, before any of it is encoded."""

    def __init__(self, limits: EpisodeLimits) -> None:
        """Derive the limit from the tokens that the episode may have."""
        num_bytes = BYTES_PER_TOKEN * (limits.max_prompt_tokens + limits.max_tokens)
        self.max_bytes = min(MIN_TALK_BYTES + num_bytes, MAX_TALK_BYTES)
        self._num_bytes = 0

    def add_messages(self, messages: object, num_known: int, tools: object) -> None:
        """Count the messages behind the first `num_known`, and with the first of them the tools.
        Raise TypeError or ValueError for what JSON or UTF-8 does not have, and for too much.
        """
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise TypeError(f"chat takes a list of messages, not {type(messages).__name__}.")
        if len(messages) > MAX_TALK_MESSAGES:
            raise ValueError(
                f"the talk has {len(messages)} messages, more than {MAX_TALK_MESSAGES}; send fewer,"
                " longer messages."
            )
        if not num_known:
            self._add_value(tools, "the tools")
        for index in range(num_known, len(messages)):
            self._add_value(messages[index], f"message {index + 1}")

    def add_answer(self, message: Message) -> None:
        """Count what the policy has said."""
        self._num_bytes += len(str(message["content"]))

    def _add_value(self, value: object, name: str) -> None:
        """Count one value. Raise TypeError or ValueError, with its name."""
        content = value.get("content") if isinstance(value, Mapping) else None
        if isinstance(content, str):
            self._check_size(len(content), name)  # before a copy of it is made
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has half a character (a lone surrogate) in its text; replace it, for"
                " example with text.encode('utf-8', 'replace').decode()."
            ) from error
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{name} has a value that JSON does not have: {error}.") from error
        self._check_size(num_bytes, name)
        self._num_bytes += num_bytes

    def _check_size(self, num_bytes: int, name: str) -> None:
        """Raise ValueError where so many bytes are too many for the rest of the talk."""
        if self._num_bytes + num_bytes > self.max_bytes:
            raise ValueError(
                f"{name} has {num_bytes:,} bytes, and the talk {self._num_bytes:,} before it; a"
                f" talk of this run may have {self.max_bytes:,} in all ({BYTES_PER_TOKEN} for each"
                " token of data.max_prompt_length and rollout.environment.max_tokens). Cut the"
                " text, or raise max_tokens."
            )


@dataclass(frozen=True)
class _EpisodeResult:
    """How the environment's code ended."""

    end: EpisodeEnd
    outcome: Outcome = field(default_factory=Outcome)
    error: str = ""


class EpisodeAttempt:
    """One start of an episode in a worker: its talk, its environment, and its code."""

    def __init__(
        self,
        order: StartEpisode,
        dialogue_format: DialogueFormat,
        answer_reader: AnswerReader,
        take_turn: TurnSource,
        code: EpisodeCode,
    ) -> None:
        """Begin the talk. `code` keeps the threads and tasks of the episode's code; it must be that
        of the running context.
        """
        self._order = order
        self._code = code
        self._dialogue = Dialogue(dialogue_format, order.messages, order.prompt_ids)
        self._chat = EpisodeChat(order, self._dialogue, answer_reader, take_turn)
        self._environments: list[Environment] = []  # none before it is made, and at most one
        self._task: asyncio.Task[_EpisodeResult] | None = None

    async def run(self) -> ReportEpisode:
        """Carry out the episode and return its report, whatever its environment does. Raise nothing
        but CancelledError, for an episode that the controller has ended. `leave` must follow.

        The deadline covers everything: making the environment, its turns, and its judgement. Code
        that does not come back at the deadline is left to `leave`.
        """
        task = self._task = asyncio.create_task(self._run_environment())
        remaining_s = self._order.deadline - REPORT_S - time.monotonic()
        await asyncio.wait({task}, timeout=max(0.0, remaining_s))
        if task.done():
            return self._make_report(task.result())
        self._chat.end = self._chat.end or "timeout"
        return self._make_report(_EpisodeResult("timeout"))

    async def leave(self) -> bool:
        """Get the episode's code back, and close its environment. Return whether all of the code
        has come back: a thread, or a task that ignores being cancelled, cannot be ended.
        """
        self._chat.end = self._chat.end or "aborted"
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=LEAVE_S)
        await self._code.wait_for_calls(LEAVE_S)
        await self._close_environments()
        is_clean = await self._code.wait_for_calls(THREADS_S)
        await self._close_environments()  # that a late thread has made
        self._code.cancel_tasks()
        return is_clean and (self._task is None or self._task.done())

    async def _run_environment(self) -> _EpisodeResult:
        """Make the environment, run it, and return how it ended."""
        chat = self._chat
        try:
            await call_user_code(self._make_environment)
            [environment] = self._environments
            outcome = await environment.run(self._make_task(), chat)
            result = _EpisodeResult(chat.end or "done", check_outcome(outcome, chat.num_turns))
        except (EpisodeOver, EpisodeStopped) as over:
            if chat.end is None:  # raised by the environment itself
                error = f"{type(over).__name__} was raised: {over}"
                return _EpisodeResult("environment_failed", error=error)
            result = _EpisodeResult(chat.end)
        except GeneratorExit:
            raise
        except asyncio.CancelledError as error:
            if _is_being_cancelled():  # by the controller, or at the deadline
                raise
            return _EpisodeResult("environment_failed", error=_describe_error(error))
        except BaseException as error:  # code of a user, which may raise anything
            if chat.end != "refused":
                return _EpisodeResult("environment_failed", error=_describe_error(error))
            result = _EpisodeResult("refused")
        if result.end == "refused":
            return _EpisodeResult("refused", error=chat.refusal)
        return result

    def _make_environment(self) -> None:
        """Make the environment. Runs in a thread, and may come back after the episode's end."""
        self._environments.append(make_environment(self._order.environment, self._order.params))

    def _make_task(self) -> Task:
        """Return what the episode is about."""
        order = self._order
        return Task(
            tuple(order.messages),
            order.prompt,
            order.label,
            order.source,
            parse_extra(order.extra),
            order.seed,
        )

    async def _close_environments(self) -> None:
        """Close the environment that was made; an error, or a `close` that does not come back,
        changes nothing.
        """
        while self._environments:
            closing = asyncio.create_task(_close_environment(self._environments.pop()))
            await asyncio.wait({closing}, timeout=CLOSE_S)
            closing.cancel()

    def _make_report(self, result: _EpisodeResult) -> ReportEpisode:
        """Return the report of a result. The talk becomes plain values."""
        return ReportEpisode(
            self._order.key,
            self._order.attempt,
            result.end,
            result.outcome.reward,
            list(result.outcome.turn_rewards),
            dict(result.outcome.metrics),
            json.loads(json.dumps(self._dialogue.messages)),
            result.error,
        )


async def _close_environment(environment: Environment) -> None:
    """Close an environment. An error goes into the log of the workers."""
    try:
        await call_user_code(environment.close)
    except (GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException:
        traceback.print_exc()


def _is_being_cancelled() -> bool:
    """Return whether somebody has cancelled the running task from outside."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _describe_error(error: BaseException) -> str:
    """Return the end of the error's traceback, of bounded length and in characters of UTF-8."""
    text = format_traceback_end(error)
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 2]} ... {text[-MAX_ERROR_CHARS // 2 :]}"
    return text.encode("utf-8", "replace").decode()


def make_environment(name: str, params: Mapping[str, Any]) -> Environment:
    """Return a new environment object of this name. Raise ValueError or ConfigError for an unknown
    name or wrong parameters.
    """
    entry = ENVIRONMENTS.get(name)
    build: Callable[..., Environment] = entry.build
    if entry.params is None:
        return build()
    return build(build_params(entry.params, params, "rollout.environment.params"))


def check_outcome(value: object, num_turns: int) -> Outcome:
    """Return the value as an Outcome of plain numbers. Raise TypeError or ValueError for anything
    that is no valid outcome of an episode of `num_turns` turns.
    """
    if not isinstance(value, Outcome):
        raise TypeError(f"run must return an Outcome, not {type(value).__name__}.")
    num_rewards = len(value.turn_rewards)
    if num_rewards not in (0, num_turns):
        raise ValueError(
            f"Outcome.turn_rewards has {num_rewards} numbers for {num_turns} turns; give one for"
            " each turn, or none."
        )
    if len(value.metrics) > MAX_METRICS:
        raise ValueError(
            f"Outcome.metrics has {len(value.metrics)} numbers, more than {MAX_METRICS}."
        )
    rewards = tuple(float(reward) for reward in value.turn_rewards)
    reward = None if value.reward is None else float(value.reward)
    metrics = {str(name): float(number) for name, number in value.metrics.items()}
    for name, number in (("reward", reward or 0.0), *metrics.items()):
        if len(name) > MAX_METRIC_NAME_CHARS:
            raise ValueError(f"a name in Outcome.metrics has {len(name)} characters.")
        if not math.isfinite(number):
            raise ValueError(f"Outcome.{name} ({number}) must be a finite number.")
    for place, number in enumerate(rewards):
        if not math.isfinite(number):
            raise ValueError(f"the reward of turn {place} ({number}) must be a finite number.")
    return replace(value, reward=reward, turn_rewards=rewards, metrics=metrics)

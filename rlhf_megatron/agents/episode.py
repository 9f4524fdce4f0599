"""One attempt at a prompt: an environment's code, the tokens of the talk, and what ends it. Runs in
the event loop of a worker.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlhf_megatron.agents.dialogue import Dialogue, DialogueFormat, JoinRefusedError
from rlhf_megatron.agents.environment import (
    ENVIRONMENTS,
    Environment,
    EpisodeOver,
    Message,
    Outcome,
    Task,
    Turn,
    call_user_code,
)
from rlhf_megatron.agents.episode_messages import (
    DeliverTurn,
    EpisodeEnd,
    EpisodeLimits,
    ReportEpisode,
    RequestTurn,
    StartEpisode,
)
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.data.extra_columns import parse_extra
from rlhf_megatron.rewards.service.reward_worker import format_traceback_end

CLOSE_S = 10.0  # for `close` of an environment, once its episode is over


class TurnSource(Protocol):
    """The way to the policy."""

    async def __call__(self, request: RequestTurn) -> DeliverTurn:
        """Send the request to the controller, and return its answer."""


class EpisodeChat:
    """What an environment calls to let the policy speak. Keeps the tokens and the limits."""

    def __init__(self, order: StartEpisode, dialogue: Dialogue, take_turn: TurnSource) -> None:
        """Begin the talk of an episode. `take_turn` asks the controller for a turn."""
        self.dialogue = dialogue
        self.num_turns = 0
        # set once a limit, or a join that does not hold, has ended the talk
        self.end: EpisodeEnd | None = None
        self.refusal = ""
        self._order = order
        self._take_turn = take_turn
        self._num_prompt_tokens = 0
        self._is_speaking = False

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Turn:
        """Let the policy answer the whole talk so far; see `environment.Chat`."""
        if self._is_speaking:
            raise RuntimeError(
                "chat was called while a former call of the episode waits for its answer; an"
                " episode has one turn at a time: await the former call first."
            )
        self._require_open()
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
        message = self.dialogue.append_answer(answer.token_ids)
        turn = Turn(
            self.num_turns,
            message,
            str(message["content"]),
            tuple(answer.token_ids),
            tuple(answer.log_probs),
            answer.finish_reason,
        )
        self.num_turns += 1
        return turn

    def _require_open(self) -> None:
        """Raise EpisodeOver again where the talk has ended already."""
        if self.end is not None:
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
                f" data.max_prompt_length ({limits.max_prompt_tokens}); raise it, or let reset"
                " return fewer messages."
            )


@dataclass(frozen=True)
class _EpisodeResult:
    """How the environment's code ended."""

    end: EpisodeEnd
    outcome: Outcome = field(default_factory=Outcome)
    error: str = ""


async def run_episode(
    order: StartEpisode, dialogue_format: DialogueFormat, take_turn: TurnSource
) -> ReportEpisode:
    """Carry out an episode and return its report, whatever its environment does. Raise nothing but
    CancelledError, for an episode that the controller has ended.

    The deadline covers everything: making the environment, its turns, and its judgement.
    """
    dialogue = Dialogue(dialogue_format, order.messages, order.prompt_ids)
    chat = EpisodeChat(order, dialogue, take_turn)
    environments: list[Environment] = []
    try:
        async with asyncio.timeout(order.timeout_s):
            result = await _run_environment(order, chat, environments)
    except TimeoutError:
        result = _EpisodeResult("timeout")
    finally:
        for environment in environments:
            await _close_environment(environment)
    return ReportEpisode(
        order.key,
        order.attempt,
        result.end,
        result.outcome.reward,
        list(result.outcome.turn_rewards),
        dict(result.outcome.metrics),
        [dict(message) for message in dialogue.messages],
        result.error,
    )


async def _run_environment(
    order: StartEpisode, chat: EpisodeChat, environments: list[Environment]
) -> _EpisodeResult:
    """Make the environment, add it to `environments`, run it, and return how it ended."""
    try:
        environment = await call_user_code(make_environment, order.environment, order.params)
        environments.append(environment)
        task = Task(
            tuple(order.messages),
            order.prompt,
            order.label,
            order.source,
            parse_extra(order.extra),
            order.seed,
        )
        outcome = check_outcome(await environment.run(task, chat), chat.num_turns)
    except EpisodeOver as over:
        outcome = Outcome()
        if chat.end is None:  # raised by the environment itself
            return _EpisodeResult("environment_failed", error=f"EpisodeOver was raised: {over}")
    except (Exception, SystemExit) as error:  # code of a user, which may raise anything
        # (the deadline passes here as CancelledError; a TimeoutError is the environment's own)
        if chat.end == "refused":
            return _EpisodeResult("refused", error=chat.refusal)
        return _EpisodeResult("environment_failed", error=format_traceback_end(error))
    if chat.end == "refused":
        return _EpisodeResult("refused", error=chat.refusal)
    return _EpisodeResult(chat.end or "done", outcome)


def make_environment(name: str, params: Mapping[str, Any]) -> Environment:
    """Return a new environment object of this name. Raise ValueError or ConfigError for an unknown
    name or wrong parameters.
    """
    entry = ENVIRONMENTS.get(name)
    build: Callable[..., Environment] = entry.build
    if entry.params is None:
        return build()
    return build(build_params(entry.params, params, "rollout.environment.params"))


async def _close_environment(environment: Environment) -> None:
    """Close an environment; an error or a `close` that does not come back changes nothing."""
    try:
        async with asyncio.timeout(CLOSE_S):
            result: Awaitable[None] | None = await call_user_code(environment.close)
            if inspect.isawaitable(result):
                await result
    except (Exception, SystemExit):
        traceback.print_exc()  # into the log of the workers


def check_outcome(value: object, num_turns: int) -> Outcome:
    """Return the value as an Outcome of plain numbers. Raise TypeError or ValueError for anything
    that is no valid outcome of an episode of `num_turns` turns.
    """
    if not isinstance(value, Outcome):
        raise TypeError(f"run must return an Outcome, not {type(value).__name__}.")
    rewards = tuple(float(reward) for reward in value.turn_rewards)
    if rewards and len(rewards) != num_turns:
        raise ValueError(
            f"Outcome.turn_rewards has {len(rewards)} numbers for {num_turns} turns; give one for"
            " each turn, or none."
        )
    reward = None if value.reward is None else float(value.reward)
    metrics = {str(name): float(number) for name, number in value.metrics.items()}
    for name, number in (("reward", reward or 0.0), *metrics.items()):
        if not math.isfinite(number):
            raise ValueError(f"Outcome.{name} ({number}) must be a finite number.")
    for place, number in enumerate(rewards):
        if not math.isfinite(number):
            raise ValueError(f"the reward of turn {place} ({number}) must be a finite number.")
    return replace(value, reward=reward, turn_rewards=rewards, metrics=metrics)

"""The protocol of environments, which talk with the policy for several turns and reward it.

An environment is a class that is registered under a name. Each episode gets an object of its own,
made from the environment's parameters. A class has either `run`, for any code that calls
`await chat(messages)`, or `reset` and `step`, from which `TurnEnvironment` makes a `run`:

    @ENVIRONMENTS.register("guess_number", params=GuessParams)
    class GuessNumber(TurnEnvironment):
        def __init__(self, params):
            self.params = params

        def reset(self, task):
            self.secret = int(task.label)
            return Observation()  # the row's prompt begins the talk

        def step(self, turn):
            is_right = turn.text == str(self.secret)
            return Observation("higher", reward=float(is_right), is_done=is_right)

User code runs in worker processes, with many episodes in one event loop. `reset`, `step` and
`close` may be plain functions, which run in a thread, or async; async code that computes or waits
without `await` holds up the other episodes of its worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Protocol

from rlhf_megatron.agents.answer_formats.parsed_answer import BrokenCall, ToolCall
from rlhf_megatron.agents.user_code import call_user_code
from rlhf_megatron.part_hooks import required_hook
from rlhf_megatron.registry import Registry

Message = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """The subject of an episode: a row of the data, and the seed of the episode."""

    messages: tuple[Message, ...]  # the row's prompt; a prompt that is text is one user message
    prompt: str  # the same as the model reads it, after all templates
    label: str
    source: str
    columns: Mapping[str, Any]  # the row's other columns
    seed: int  # in [0, 2^31); the same for the same episode of a resumed run


@dataclass(frozen=True)
class Turn:
    """One answer of the policy."""

    number: int  # counts from 0
    # {"role": "assistant", "content": text}, with "reasoning_content" and "tool_calls" where the
    # answer has a thought and calls
    message: Message
    text: str  # without thoughts and calls, and without the stop token
    token_ids: tuple[int, ...]  # as sampled, the stop token included
    log_probs: tuple[float, ...]  # one a token, as the engine reported
    finish_reason: str  # "stop", or "length" where the answer was cut
    reasoning: str = ""  # the thought, as the model's chat template marks it
    calls: tuple[ToolCall, ...] = ()
    broken_calls: tuple[BrokenCall, ...] = ()  # that cannot be read, with the reason


@dataclass(frozen=True)
class Observation:
    """The environment's answer to a turn.

    `messages`: what is added to the talk; a text is a message of the role "user". `reward`: of the
    turn that was just taken; an episode's reward is the sum. `metrics`: numbers of the episode,
    averaged over the episodes of a step under `agents/environment/<name>`.
    """

    messages: str | Sequence[Message] = ()
    reward: float = 0.0
    is_done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How an episode went, as the environment judges it.

    `reward`: of the whole episode, without the rewards of turns; None: the scorers of the section
    `reward` judge it. `turn_rewards`: one for each turn that was taken, or () for none.
    """

    reward: float | None = None
    turn_rewards: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class EpisodeOver(Exception):
    """Raised by `chat` when the episode ends by one of its limits. Code that catches it may return
    an Outcome for what was reached; else the episode is rewarded without one.
    """

    def __init__(self, end: str) -> None:
        """Take the name of the end: one of `EPISODE_ENDS`."""
        super().__init__(end)
        self.end = end


class Chat(Protocol):
    """The way from an environment to the policy."""

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Turn:
        """Send the whole talk so far and return what the policy says. `messages` must go on from
        the former call: its messages, the policy's message, and new ones. Raise EpisodeOver at a
        limit of the episode.
        """


class Environment:
    """The base class of environments. An object serves one episode."""

    is_deterministic: ClassVar[bool] = False
    """True: the episode is a function of its task, its seed and the policy's answers, so that
    `trainer.deterministic` may use the environment."""
    may_be_named_by_rows: ClassVar[bool] = True
    """False: only the settings may choose the environment. Say so where its parameters name code or
    programs, since data comes from strangers."""

    @required_hook
    async def run(self, task: Task, chat: Chat) -> Outcome:
        """Carry out one episode: call `chat` for each turn, and return the outcome."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds. Called once at the end of each episode, whatever ended
        it; may be async.
        """
        return None


class TurnEnvironment(Environment):
    """The base class of environments that answer turn by turn."""

    @required_hook
    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begin an episode, and return the messages that follow the row's prompt; an Observation
        without messages where the prompt says all.
        """
        raise NotImplementedError

    @required_hook
    def step(self, turn: Turn) -> Observation | Awaitable[Observation]:
        """Answer a turn of the policy. Called for each turn, also for the last one."""
        raise NotImplementedError

    async def run(self, task: Task, chat: Chat) -> Outcome:
        """Reset, then take turns until the environment is done or a limit ends the episode."""
        metrics: dict[str, float] = {}
        rewards: list[float] = []
        observation = check_observation(await call_user_code(self.reset, task))
        messages = [*task.messages, *list_observed_messages(observation)]
        metrics.update(observation.metrics)
        while not observation.is_done:
            try:
                turn = await chat(messages)
            except EpisodeOver:
                break
            observation = check_observation(await call_user_code(self.step, turn))
            rewards.append(observation.reward)
            metrics.update(observation.metrics)
            messages += [turn.message, *list_observed_messages(observation)]
        return Outcome(0.0, tuple(rewards), metrics)


ENVIRONMENTS: Registry[type[Environment]] = Registry("environment", interface=Environment)


def check_observation(value: object) -> Observation:
    """Return the value if it is an Observation with messages that a chat can hold. Raise TypeError
    for any other value.
    """
    if not isinstance(value, Observation):
        raise TypeError(f"reset and step must return an Observation, not {type(value).__name__}.")
    messages = value.messages
    if not isinstance(messages, Sequence):
        raise TypeError(
            f"Observation.messages must be a text or a list of messages, not"
            f" {type(messages).__name__}."
        )
    if not isinstance(messages, str):
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise TypeError(
                    f"Observation.messages has {repr(message)[:100]}; each must be a dict with role"
                    " and content."
                )
    if isinstance(value.reward, bool) or not isinstance(value.reward, Real):
        raise TypeError(
            f"Observation.reward ({repr(value.reward)[:50]}) must be a number, not"
            f" {type(value.reward).__name__}."
        )
    if not isinstance(value.metrics, Mapping):
        raise TypeError(
            f"Observation.metrics must be a dict of numbers, not {type(value.metrics).__name__}."
        )
    return value


def list_observed_messages(observation: Observation) -> list[Message]:
    """Return the messages of an observation; a text is one message of the user, an empty text
    none.
    """
    if isinstance(observation.messages, str):
        text = observation.messages
        return [{"role": "user", "content": text}] if text else []
    return [dict(message) for message in observation.messages]

"""The base of environments whose policy calls tools: an episode goes on as long as the policy's
answers have calls, and ends with the first answer without one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlhf_megatron.agents.environment import (
    Chat,
    Environment,
    EpisodeOver,
    Message,
    Outcome,
    Task,
    Turn,
)
from rlhf_megatron.agents.tools import (
    Tool,
    ToolLimits,
    ToolResult,
    call_tool,
    cut_output,
    make_tool,
)
from rlhf_megatron.agents.user_code import call_user_code
from rlhf_megatron.part_hooks import required_hook

ListedTools = Sequence[Tool | Callable[..., Any]]

MAX_FULL_RESULTS = 8  # of the largest size, which the calls of one answer may return together
MAX_COUNTED_TOOLS = 60  # that have metrics of their own in an episode
MAX_NAME_CHARS = 100  # of a tool, in metrics and messages
TOO_MANY_CALLS = "Error: the results of this answer are too long; call fewer tools at once."


class ToolEnvironment(Environment):
    """Offers tools to the policy, and calls them for it. Derive from it, and define `list_tools`;
    without a `judge` of its own the scorers of the section `reward` judge the last answer.
    """

    limits = ToolLimits()
    """What bounds one call."""

    @required_hook
    def list_tools(self, task: Task) -> ListedTools | Awaitable[ListedTools]:
        """Return the tools of an episode: functions, or Tool objects (`make_tool`,
        `list_mcp_tools`). May be async.
        """
        raise NotImplementedError

    def judge(self, task: Task, last_turn: Turn | None) -> float | Awaitable[float | None] | None:
        """Return the reward of the episode, or None to leave it to the scorers. `last_turn`: the
        last answer, which may have calls where a limit ended the episode; None: there was none. May
        be async.
        """
        return None

    async def run(self, task: Task, chat: Chat) -> Outcome:
        """Let the policy speak, call its tools, and go on until an answer has no calls."""
        tools = make_tools(await call_user_code(self.list_tools, task))
        tool_by_name = {tool.name: tool for tool in tools}
        schemas = [tool.schema for tool in tools]
        statistics = _ToolStatistics()
        messages = list(task.messages)
        last_turn: Turn | None = None
        while True:
            try:
                last_turn = await chat(messages, schemas)
            except EpisodeOver:
                break
            messages.append(last_turn.message)
            if not last_turn.calls and not last_turn.broken_calls:
                break
            if last_turn.calls and last_turn.finish_reason == "length":
                break  # nothing can be put behind calls whose end was cut
            messages += await self._answer_calls(last_turn, tool_by_name, statistics)
        reward = await call_user_code(self.judge, task, last_turn)
        return Outcome(reward, metrics=statistics.compute_metrics())

    async def _answer_calls(
        self, turn: Turn, tool_by_name: Mapping[str, Tool], statistics: _ToolStatistics
    ) -> list[Message]:
        """Carry out the calls of an answer one behind the other, and return the messages with their
        results. Results have a common limit of characters: an answer of a hundred calls must not
        fill the talk.
        """
        messages: list[Message] = []
        num_chars_left = MAX_FULL_RESULTS * self.limits.max_output_chars
        for call in turn.calls:
            tool = tool_by_name.get(call.name)
            if num_chars_left <= 0:
                result = ToolResult(TOO_MANY_CALLS, True, 0.0)
            elif tool is None:
                tool_names = ", ".join(tool_by_name) or "none"
                text = f"Error: there is no tool {call.name[:MAX_NAME_CHARS]}; the tools are"
                text = cut_output(f"{text} {tool_names}.", self.limits.max_output_chars)
                result = ToolResult(text, True, 0.0)
            else:
                result = await call_tool(tool, call.arguments, self.limits)
            num_chars_left -= len(result.text)
            statistics.add_result(call.name if tool else "unknown", result)
            messages.append(_make_result_message(call.call_id, call.name, result.text))
        for broken in turn.broken_calls:
            statistics.add_result("unreadable", ToolResult("", True, 0.0))
            text = f"A call of a tool could not be read: {broken.reason}. Write it again."
            messages.append({"role": "user", "content": text})
        return messages


def make_tools(tools: ListedTools) -> list[Tool]:
    """Return the tools, those that are functions made into tools. Raise ValueError for two tools of
    one name, and as `make_tool` does.
    """
    all_tools = [tool if isinstance(tool, Tool) else make_tool(tool) for tool in tools]
    names = [tool.name for tool in all_tools]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"several tools have the name {', '.join(repeated)}; rename all but one.")
    return all_tools


def _make_result_message(call_id: str, name: str, text: str) -> Message:
    """Return the message with the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}


class _ToolStatistics:
    """Counts the calls of an episode by tool."""

    def __init__(self) -> None:
        """Begin without calls."""
        self._results: dict[str, list[ToolResult]] = defaultdict(list)

    def add_result(self, tool_name: str, result: ToolResult) -> None:
        """Count a call. Tools beyond a number count together: an episode has few metrics."""
        name = tool_name[:MAX_NAME_CHARS]
        if name not in self._results and len(self._results) >= MAX_COUNTED_TOOLS:
            name = "other"
        self._results[name].append(result)

    def compute_metrics(self) -> dict[str, float]:
        """Return the calls of each tool in the episode, the share of errors among them, and the
        mean seconds of a call.
        """
        metrics: dict[str, float] = {}
        for name, results in self._results.items():
            num_errors = sum(result.is_error for result in results)
            metrics[f"tool_{name}_calls"] = float(len(results))
            metrics[f"tool_{name}_errors"] = num_errors / len(results)
            metrics[f"tool_{name}_seconds"] = sum(r.seconds for r in results) / len(results)
        return metrics

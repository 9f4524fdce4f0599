"""The base of environments whose policy calls tools: an episode goes on as long as the policy's
answers have calls, and ends with the first answer without one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
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
from rlhf_megatron.agents.tools import Tool, ToolLimits, ToolResult, call_tool, make_tool
from rlhf_megatron.agents.user_code import call_user_code
from rlhf_megatron.part_hooks import required_hook

ListedTools = Sequence[Tool | Callable[..., Any]]


class ToolEnvironment(Environment):
    """Offers tools to the policy, and calls them for it. Derive from it, and define `list_tools`;
    without a `judge` of its own the scorers of the section `reward` judge the last answer.
    """

    limits = ToolLimits()
    """What bounds one call."""

    @required_hook
    def list_tools(self, task: Task) -> ListedTools | Awaitable[ListedTools]:
        """Return the tools of an episode: functions, or tools that were made of them. May be
        async.
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
        tools = _make_tools(await call_user_code(self.list_tools, task))
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
            for call in last_turn.calls:
                tool = tool_by_name.get(call.name)
                if tool is None:
                    known = ", ".join(tool_by_name) or "none"
                    text = f"Error: there is no tool {call.name}; the tools are {known}."
                    result = ToolResult(text, True, 0.0)
                else:
                    result = await call_tool(tool, call.arguments, self.limits)
                statistics.add_result(call.name if tool else "unknown", result)
                messages.append(_make_result_message(call.call_id, call.name, result.text))
            for broken in last_turn.broken_calls:
                statistics.add_result("unreadable", ToolResult("", True, 0.0))
                text = f"A call of a tool could not be read: {broken.reason}. Write it again."
                messages.append({"role": "user", "content": text})
        reward = await call_user_code(self.judge, task, last_turn)
        return Outcome(reward, metrics=statistics.compute_metrics())


def _make_tools(tools: Sequence[Tool | Callable[..., Any]]) -> list[Tool]:
    """Return the tools, those that are functions made into tools. Raise ValueError for two tools of
    one name.
    """
    made = [tool if isinstance(tool, Tool) else make_tool(tool) for tool in tools]
    names = [tool.name for tool in made]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"several tools have the name {', '.join(repeated)}; rename all but one.")
    return made


def _make_result_message(call_id: str, name: str, text: str) -> Message:
    """Return the message with the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}


class _ToolStatistics:
    """Counts the calls of an episode by tool."""

    def __init__(self) -> None:
        """Begin without calls."""
        self._results: dict[str, list[ToolResult]] = defaultdict(list)

    def add_result(self, tool_name: str, result: ToolResult) -> None:
        """Count a call."""
        self._results[tool_name].append(result)

    def compute_metrics(self) -> dict[str, float]:
        """Return the calls of each tool in the episode, the share of errors among them, and the
        mean seconds of a call.
        """
        metrics: dict[str, float] = {}
        for name, results in self._results.items():
            metrics[f"tool_{name}_calls"] = float(len(results))
            metrics[f"tool_{name}_errors"] = sum(one.is_error for one in results) / len(results)
            metrics[f"tool_{name}_seconds"] = sum(one.seconds for one in results) / len(results)
        return metrics

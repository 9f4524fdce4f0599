"""A plugin: an environment whose tools are those of an MCP server. A row's label holds the calls
that are made after each other, {"calls": [[name, arguments], ...], "timeout_s": seconds, "results":
path}, each with a turn of the policy before it. The results are written to the path as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from places import SUPPORT

from rlhf_megatron.agents.environment import ENVIRONMENTS, Chat, Environment, Outcome, Task
from rlhf_megatron.agents.mcp_tools import McpServer, list_mcp_tools
from rlhf_megatron.agents.tools import ToolLimits, call_tool

SERVER = McpServer(command=(sys.executable, str(SUPPORT / "mcp_server.py"), "ignore_eof"))


@ENVIRONMENTS.register("mcp_calls")
class McpCalls(Environment):
    async def run(self, task: Task, chat: Chat) -> Outcome:
        label = json.loads(task.label)
        tool_by_name = {tool.name: tool for tool in await list_mcp_tools(SERVER)}
        limits = ToolLimits(timeout_s=label.get("timeout_s", 30.0), max_output_chars=100)
        messages = list(task.messages)
        results = []
        for name, arguments in label["calls"]:
            turn = await chat(messages)
            messages += [turn.message, {"role": "user", "content": "1"}]
            result = await call_tool(tool_by_name[name], arguments, limits)
            results.append([result.text, result.is_error])
        Path(label["results"]).write_text(json.dumps(results))
        return Outcome(1.0)

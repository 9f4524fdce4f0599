"""Tools that the settings name: functions of a user's files, and MCP servers. The policy calls them
until an answer has no call; the section `reward` judges that answer.

    rollout:
      environment:
        name: tools
        params:
          functions: [my_tools.py:look_up_price, my_package.search:search]
          mcp_servers:
            files: {command: [npx, -y, "@modelcontextprotocol/server-filesystem", /data]}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from rlhf_megatron.agents.calculator import calculate
from rlhf_megatron.agents.environment import ENVIRONMENTS, Task
from rlhf_megatron.agents.mcp_server import McpServer
from rlhf_megatron.agents.mcp_tools import list_mcp_tools
from rlhf_megatron.agents.tool_environment import ListedTools, ToolEnvironment, make_tools
from rlhf_megatron.agents.tools import Tool, ToolLimits, make_tool
from rlhf_megatron.rewards.scorers.user_function import import_user_function

CALCULATOR = "calculator"  # stands for the function that comes with this package


@dataclass(frozen=True)
class ToolsParams:
    """The sources of the tools, and the limits of one call."""

    # "path/to/file.py:function" or "package.module:function", each typed; or "calculator"
    functions: tuple[str, ...] = ()
    mcp_servers: dict[str, McpServer] = field(default_factory=dict)  # by names of your choice
    timeout_s: float = 30.0
    max_output_chars: int = 4000

    def __post_init__(self) -> None:
        """Raise ValueError where there is no tool, and for a limit below its least value."""
        if not self.functions and not self.mcp_servers:
            raise ValueError(
                "functions and mcp_servers are both empty; name a function"
                " (functions: [my_tools.py:look_up]) or a server."
            )
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s ({self.timeout_s}) must be above 0.")
        if self.max_output_chars < 1:
            raise ValueError(f"max_output_chars ({self.max_output_chars}) must be at least 1.")


@cache
def _load_tool(name: str) -> Tool:
    """Return the function of a name as a tool. Raise ValueError where there is none, and where it
    cannot be described to a model.
    """
    if name == CALCULATOR:
        return make_tool(calculate)
    if ":" not in name:
        raise ValueError(
            f"functions has {name!r}; write path/to/file.py:function, package.module:function, or"
            f" {CALCULATOR}."
        )
    return make_tool(import_user_function(name))


@ENVIRONMENTS.register("tools", params=ToolsParams)
class NamedTools(ToolEnvironment):
    """Offers the tools of its parameters. It cannot promise that they are functions of their
    arguments, which `trainer.deterministic` needs; derive from ToolEnvironment where they are.
    """

    may_be_named_by_rows = False

    def __init__(self, params: ToolsParams) -> None:
        """Import the functions. Raise ValueError where there is none of a name, or where it cannot
        be described to a model.
        """
        self.limits = ToolLimits(params.timeout_s, params.max_output_chars)
        self._servers = tuple(params.mcp_servers.values())
        self._functions = make_tools([_load_tool(name) for name in params.functions])

    async def list_tools(self, task: Task) -> ListedTools:
        """Return the functions, and what the servers list."""
        tools = list(self._functions)
        for server in self._servers:
            tools += await list_mcp_tools(server)
        return tools

"""MCP servers as a source of tools: real servers, right and faulty, and what is left of them."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import MARKER, processes_with, wait_for_the_end
from episode_tools import make_pool, run_rows
from places import ROOT, SUPPORT

from rlhf_megatron.agents.answer_formats.parsed_answer import ToolCall
from rlhf_megatron.agents.environment import Message, Outcome, Task, Turn
from rlhf_megatron.agents.mcp_tools import (
    McpServer,
    McpServerError,
    close_mcp_servers,
    list_mcp_tools,
)
from rlhf_megatron.agents.tool_environment import ToolEnvironment
from rlhf_megatron.agents.tools import Tool, ToolLimits, ToolResult, call_tool

SERVER = SUPPORT / "mcp_server.py"
SHORT = ToolLimits(timeout_s=0.5, max_output_chars=200)
LONG = ToolLimits(timeout_s=60.0, max_output_chars=200)
RETRY_S = 5.2  # mcp_connection.RETRY_S and a little more

needs_mcp = pytest.mark.skipif(
    find_spec("mcp") is None, reason="the package mcp (extra agents) is not installed"
)


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """In the environment of each process that a test starts. None may be left after the test."""
    text = f"mcp-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setenv(MARKER, text)
    yield text
    assert wait_for_the_end(text, 10.0) == []


def stdio_server(marker: str, *faults: str, **settings: Any) -> McpServer:
    environment = {MARKER: marker, "OF_THE_SERVER": "yes"}
    return McpServer((sys.executable, str(SERVER), *faults), environment=environment, **settings)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def http_server(request: pytest.FixtureRequest, marker: str) -> Iterator[McpServer]:
    port = find_free_port()
    process = start_http_server(port, request.param)
    yield McpServer(url=f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "Bearer x"})
    process.kill()
    process.wait()


def start_http_server(port: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Returns once the server listens."""
    process = subprocess.Popen([sys.executable, SERVER, "--http", str(port), *options])
    give_up_at = time.monotonic() + 20
    while time.monotonic() < give_up_at and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.02)
    raise AssertionError("the server does not listen")


def run(code: Callable[[], Awaitable[Any]]) -> Any:
    """In an event loop of its own; its servers end with it."""

    async def run_and_close() -> Any:
        try:
            return await code()
        finally:
            await close_mcp_servers()

    return asyncio.run(run_and_close())


async def list_by_name(server: McpServer) -> dict[str, Tool]:
    return {tool.name: tool for tool in await list_mcp_tools(server)}


async def call_right_server(server: McpServer) -> None:
    """All kinds of answers."""
    tools = await list_by_name(server)

    async def call(name: str, limits: ToolLimits = LONG, **arguments: Any) -> ToolResult:
        return await call_tool(tools[name], arguments, limits)

    assert tools["add"].schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    added = await call("add", a=20, b=3)
    assert (added.text, added.is_error) == ("23", False)
    names = {"self": 1, "server": 2, "name": 3, "arguments": 4, "tool": 5, "\u00e4 b": [None]}
    echoed = await call_tool(tools["echo"], names, LONG)
    assert json.loads(echoed.text) == names
    wrong = await call("add", a=1)
    assert wrong.is_error and "missing 1 required positional argument: 'b'" in wrong.text
    failed = await call("fail")
    assert failed.is_error and failed.text.endswith("the disk is full")
    assert (await call("structured")).text == '{"n":1,"text":"\u00e4"}'
    assert (await call("parts")).text.split("\n") == [
        "first",
        "[image of type image/png, which cannot be shown as text]",
        "[link to the resource log: file:///log]",
        "of a file",
        "[resource file:///b, which cannot be shown as text]",
        "last",
    ]
    large, small = await asyncio.gather(call("large", num_bytes=10_000_000), call("add", a=1, b=1))
    assert not large.is_error and small.text == "2"
    assert large.text == "x" * 200 + "\n[cut: the output had 10000000 characters]"
    hanging, small = await asyncio.gather(call("wait", SHORT, seconds=5), call("add", a=1, b=1))
    assert small.text == "2"
    assert hanging.is_error and hanging.text == "Error: wait did not answer within 0.5 s."


@needs_mcp
def test_a_server_of_a_command(marker: str) -> None:
    """It also writes a line that is no message, as many do."""
    run(lambda: call_right_server(stdio_server(marker, "noise")))


@needs_mcp
@pytest.mark.parametrize("http_server", [[], ["--sse"]], indirect=True, ids=["json", "sse"])
def test_a_server_over_http(http_server: McpServer) -> None:
    run(lambda: call_right_server(http_server))


@needs_mcp
@pytest.mark.parametrize("is_http", [False, True], ids=["stdio", "http"])
def test_a_server_of_the_package(marker: str, is_http: bool) -> None:
    command = (sys.executable, str(SUPPORT / "mcp_package_server.py"))
    port = find_free_port()

    async def use_server() -> None:
        server = McpServer(command, environment={MARKER: marker})
        process = None
        if is_http:
            process = subprocess.Popen([*command, str(port)])
            server = McpServer(url=f"http://127.0.0.1:{port}/mcp")
            await wait_for_port(port)
        try:
            tools = await list_by_name(server)
            parameters = tools["add"].schema["function"]["parameters"]
            assert parameters["required"] == ["a", "b"]
            assert (await call_tool(tools["add"], {"a": 1, "b": 2}, LONG)).text == "3"
            assert (await call_tool(tools["divide"], {"a": 1, "b": 4}, LONG)).text == "0.25"
            for arguments in ({"a": 1, "b": 0}, {"a": "x", "b": 1}):
                assert (await call_tool(tools["divide"], arguments, LONG)).is_error
        finally:
            if process is not None:
                process.kill()
                process.wait()

    run(use_server)


async def wait_for_port(port: int) -> None:
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        await asyncio.sleep(0.05)
    raise AssertionError("the server does not listen")


@needs_mcp
def test_five_hundred_tools_and_odd_schemas(marker: str) -> None:
    async def use_servers() -> None:
        many = await list_mcp_tools(stdio_server(marker, "many_tools"))
        assert [tool.name for tool in many] == [f"tool_{number}" for number in range(500)]
        odd = await list_mcp_tools(stdio_server(marker, "odd_schemas", name_prefix="files_"))
        schemas = [tool.schema["function"]["parameters"] for tool in odd]
        assert [tool.name for tool in odd] == [f"files_odd/{number}.x" for number in range(4)]
        assert schemas[0] == {"type": "object", "properties": {}}
        assert schemas[1]["properties"] == {"a": True, "b": {"type": ["string", "null"]}}
        assert schemas[2]["$defs"]["node"]["properties"]["next"] == {"$ref": "#/$defs/node"}
        assert schemas[3]["properties"] == {} and len(schemas[3]["anyOf"]) == 2
        unknown = await call_tool(odd[0], {}, LONG)
        assert unknown.is_error and "there is no tools/call" in unknown.text

    run(use_servers)


@needs_mcp
def test_a_server_that_dies_in_a_call_is_started_again(marker: str) -> None:
    server = stdio_server(marker)

    async def use_server() -> None:
        tools = await list_by_name(server)
        first_pid = (await call_tool(tools["pid"], {}, LONG)).text
        died, waited = await asyncio.gather(
            call_tool(tools["die"], {}, LONG), call_tool(tools["wait"], {"seconds": 30}, LONG)
        )
        for result in (died, waited):
            assert result.is_error
            assert result.text.endswith("the tool's server ended with exit code 3 during the call.")
        second_pid = (await call_tool(tools["pid"], {}, LONG)).text
        assert int(second_pid) != int(first_pid)
        os.kill(int(second_pid), signal.SIGKILL)
        assert wait_for_pids([int(second_pid)]) == []
        third = await call_tool(tools["pid"], {}, LONG)
        # where the end has not been seen yet, the call that shows it is the last one to fail
        if third.is_error:
            assert "ended with exit code 137" in third.text
            third = await call_tool(tools["pid"], {}, LONG)
        assert int(third.text) != int(second_pid)

    run(use_server)


@needs_mcp
def test_a_server_that_writes_without_end_is_ended(marker: str) -> None:
    async def use_server() -> None:
        tools = await list_by_name(stdio_server(marker))
        flooded = await call_tool(tools["flood"], {}, LONG)
        assert "has written a line of more than 64 MiB and was ended" in flooded.text
        assert (await call_tool(tools["add"], {"a": 1, "b": 1}, LONG)).text == "2"

    run(use_server)


def wait_for_pids(pids: Sequence[int], within_s: float = 10.0) -> list[int]:
    """Those that still live after so long."""
    give_up_at = time.monotonic() + within_s
    alive = list(pids)
    while alive and time.monotonic() < give_up_at:
        time.sleep(0.02)
        alive = [pid for pid in alive if is_alive(pid)]
    return alive


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@needs_mcp
def test_a_server_that_hangs_is_started_again(marker: str) -> None:
    server = stdio_server(marker, hang_timeout_s=0.5)

    async def use_server() -> None:
        tools = await list_by_name(server)
        pid = int((await call_tool(tools["pid"], {}, LONG)).text)
        frozen, waited = await asyncio.gather(
            call_tool(tools["freeze"], {}, SHORT), call_tool(tools["wait"], {"seconds": 30}, LONG)
        )
        assert frozen.text == "Error: freeze did not answer within 0.5 s."
        assert "has not answered anything for 0.5 s and was given up during the call" in waited.text
        again = await call_tool(tools["pid"], {}, LONG)
        assert int(again.text) != pid and not is_alive(pid)

    run(use_server)


@needs_mcp
def test_a_server_over_http_dies_and_comes_back(marker: str) -> None:
    port = find_free_port()
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp")
    same = McpServer(url=f"http://127.0.0.1:{port}/mcp?key=secret")

    async def use_server() -> None:
        with pytest.raises(McpServerError, match=r"127.0.0.1:\d+/mcp failed: .*connect") as refused:
            await list_mcp_tools(same)
        assert "secret" not in str(refused.value)
        process = start_http_server(port, [])
        try:
            tools = await list_by_name(server)
            died = await call_tool(tools["die"], {}, LONG)
            assert died.is_error and "the tool's server" in died.text
            process.wait()
            assert (await call_tool(tools["pid"], {}, LONG)).is_error
            process = start_http_server(port, [])
            await asyncio.sleep(RETRY_S)  # of one that could not be reached
            assert int((await call_tool(tools["pid"], {}, LONG)).text) == process.pid
        finally:
            process.kill()
            process.wait()

    run(use_server)


@needs_mcp
def test_servers_that_do_not_start_are_named(
    marker: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def use_servers() -> None:
        dying = stdio_server(marker, "die_at_start")
        for _ in range(20):
            with pytest.raises(McpServerError, match=r"mcp_server\.py ended with exit code 7"):
                await list_mcp_tools(dying)
        began = time.monotonic()
        with pytest.raises(McpServerError, match=r"has not listed its tools within 0\.5 s"):
            await list_mcp_tools(stdio_server(marker, "hang_at_start", start_timeout_s=0.5))
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
            with pytest.raises(McpServerError, match=r"has not listed its tools within 0\.5 s"):
                await list_mcp_tools(McpServer(url=url, start_timeout_s=0.5))
        assert time.monotonic() - began < 20
        with pytest.raises(McpServerError, match="there is no program no-such-server"):
            await list_mcp_tools(McpServer(("no-such-server", "--fast")))
        with pytest.raises(McpServerError, match=r"ended with exit code 126|127|cannot be"):
            await list_mcp_tools(McpServer((str(make_bad_program()),)))

    def make_bad_program() -> Path:
        program = Path(f"/tmp/{marker}")
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        return program

    try:
        run(use_servers)
    finally:
        Path(f"/tmp/{marker}").unlink(missing_ok=True)
    log = capfd.readouterr().err
    assert log.count("begins") == 2, "a server that fails is not started by each episode again"
    assert "cannot be started" in log


@needs_mcp
def test_the_server_has_its_own_environment_only(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def use_server() -> None:
        tools = await list_by_name(stdio_server(marker))
        result = await call_tool(tools["environ"], {}, ToolLimits(60.0, 100_000))
        environment = json.loads(result.text)
        assert environment["OF_THE_SERVER"] == "yes" and environment["PATH"] == os.environ["PATH"]
        assert "HF_TOKEN" not in environment

    run(use_server)


@needs_mcp
def test_the_process_of_connections_dies(marker: str) -> None:
    """Calls under way are errors, its servers end, and the next call starts all of it again."""
    server = stdio_server(marker, "ignore_eof")

    async def use_server() -> None:
        tools = await list_by_name(server)
        pid = int((await call_tool(tools["pid"], {}, LONG)).text)
        [host] = [
            found
            for found in processes_with(marker)
            if b"mcp_host" in Path(f"/proc/{found}/cmdline").read_bytes()
        ]
        waiting = asyncio.create_task(call_tool(tools["wait"], {"seconds": 30}, LONG))
        await asyncio.sleep(0.1)
        os.kill(host, signal.SIGKILL)
        assert "has ended with exit code -9" in (await waiting).text
        assert wait_for_pids([pid]) == []
        assert int((await call_tool(tools["pid"], {}, LONG)).text) != pid

    run(use_server)


PROGRAM = f"""
import asyncio, os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(SUPPORT)!r}]
from rlhf_megatron.agents.mcp_tools import McpServer, list_mcp_tools
async def main():
    command = (sys.executable, {str(SERVER)!r}, "ignore_eof")
    server = McpServer(command, environment={{{MARKER!r}: os.environ[{MARKER!r}]}})
    tools = {{tool.name: tool for tool in await list_mcp_tools(server)}}
    print(await tools["pid"].function(), await tools["leave_child"].function(), flush=True)
    await asyncio.sleep(60)
loop = asyncio.new_event_loop()
loop.run_until_complete(main())
"""


@needs_mcp
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_worker_that_is_killed(marker: str, number: int) -> None:
    """Neither a server that ignores the end of its input, nor a child of it in another session."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        pids = [int(pid) for pid in worker.stdout.readline().split()]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        worker.send_signal(number)
    assert wait_for_pids(pids) == []


class Numbers(ToolEnvironment):
    limits = ToolLimits(timeout_s=0.5, max_output_chars=200)

    def __init__(self, server: McpServer) -> None:
        self.server = server

    async def list_tools(self, task: Task) -> list[Tool]:
        return await list_mcp_tools(self.server)


@needs_mcp
def test_a_tool_environment_with_the_tools_of_a_server(marker: str) -> None:
    calls = [
        [ToolCall("add", {"a": 1, "b": 2}, "first"), ToolCall("fail", {}, "second")],
        [ToolCall("die", {}, "third"), ToolCall("wait", {"seconds": 30}, "fourth")],
        [],
    ]
    shown: list[list[Message]] = []

    async def chat(messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Turn:
        assert tools is not None and "add" in [tool["function"]["name"] for tool in tools]
        shown.append(list(messages))
        number = len(shown) - 1
        message = {"role": "assistant", "content": str(number)}
        return Turn(number, message, "", (), (), "stop", calls=tuple(calls[number]))

    async def run_episode() -> Outcome:
        environment = Numbers(stdio_server(marker))
        task = Task(({"role": "user", "content": "?"},), "?", "", "", {}, 0)
        return await environment.run(task, chat)

    outcome = run(run_episode)
    results = [message for message in shown[-1] if message["role"] == "tool"]
    assert [result["tool_call_id"] for result in results] == ["first", "second", "third", "fourth"]
    assert [result["name"] for result in results] == ["add", "fail", "die", "wait"]
    contents = [result["content"] for result in results]
    assert contents[0] == "3" and contents[1].endswith("the disk is full")
    assert contents[2].endswith("ended with exit code 3 during the call.")
    assert contents[3] == "Error: wait did not answer within 0.5 s."
    assert outcome.reward is None


@needs_mcp
def test_episodes_of_real_workers(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that dies, one that hangs beyond the deadline, one of 10 MB, and those beside them."""
    monkeypatch.setattr(
        "rlhf_megatron.rewards.service.worker_processes.list_loaded_plugins",
        lambda: [str(SUPPORT / "mcp_environment.py")],
    )
    paths = [tmp_path / f"results_{number}" for number in range(5)]

    def make_row(number: int, *calls: Any, timeout_s: float = 60.0) -> dict[str, Any]:
        return {"calls": calls, "timeout_s": timeout_s, "results": str(paths[number])}

    def read_results(number: int) -> list[tuple[str, bool]]:
        return [(text, is_error) for text, is_error in json.loads(paths[number].read_text())]

    wait = ["wait", {"seconds": 600}]
    rows = [
        make_row(0, ["add", {"a": 1, "b": 2}], ["large", {"num_bytes": 10_000_000}]),
        make_row(1, wait, timeout_s=0.5),
        make_row(2, wait, timeout_s=900.0),
    ]
    with make_pool(tmp_path / "log", num_workers=1, environment="mcp_calls") as pool:
        groups = run_rows(pool, rows, environment="mcp_calls", timeout_s=15.0)
        assert [(one.end, one.error) for [one] in groups[:2]] == [("done", "")] * 2
        assert read_results(0) == [
            ("3", False),
            ("x" * 100 + "\n[cut: the output had 10000000 characters]", False),
        ]
        assert read_results(1) == [("Error: wait did not answer within 0.5 s.", True)]
        [late] = groups[2]
        assert late.end == "timeout" and late.seconds < 16.0

        run_rows(pool, [make_row(3, ["die", {}])], environment="mcp_calls")
        [(text, is_error)] = read_results(3)
        assert is_error and "ended with exit code 3 during the call" in text
        run_rows(pool, [make_row(4, ["pid", {}], ["leave_child", {}])], environment="mcp_calls")
        pids = [int(text) for text, _ in read_results(4)]
        assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
        [worker_pid] = pool._workers
        os.kill(worker_pid, signal.SIGKILL)
        assert wait_for_pids(pids) == []


@needs_mcp
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs either a command"),
        ({"command": ("a",), "url": "http://x"}, "needs either a command"),
        ({"command": "npx server /a"}, r"give a tuple .*\('npx', 'server', '/a'\)"),
        ({"url": "127.0.0.1:8000"}, "must begin with http"),
        ({"url": "http://x", "environment": {"A": "1"}}, "a url has headers"),
        ({"command": ("a",), "headers": {"A": "1"}}, "a command has environment"),
        ({"command": ("a",), "start_timeout_s": 0}, "start_timeout_s .0. must be above 0"),
    ],
)
def test_a_server_that_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        McpServer(**settings)


def test_another_version_of_the_package_is_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "mcp-1.30.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mcp\nVersion: 1.30.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.metadata.version("mcp") == "1.30.0"
    with pytest.raises(
        ValueError, match=r"mcp .*2.*, and 1\.30\.0 is installed; pip install .*agents"
    ):
        McpServer(("server",))


@pytest.mark.skipif(find_spec("mcp") is not None, reason="the package mcp is installed")
def test_a_missing_package_is_named_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"need the package mcp; pip install .*agents"):
        McpServer(("server",))

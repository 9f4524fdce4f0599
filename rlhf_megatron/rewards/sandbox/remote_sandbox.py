"""Programs in a sandbox server: SandboxFusion's protocol, or a plain one.

plain: POST {"language": "python", "code", "stdin", "timeout_s", "memory_mib"}; the answer is
{"ending": "exit" | "timeout" | "memory", "code", "stdout", "stderr"}.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint, RewardEndpointError
from rlhf_megatron.rewards.sandbox.harness import PRELUDE, SET_KEY, encode_returned_value
from rlhf_megatron.rewards.sandbox.long_integers import write_long_json
from rlhf_megatron.rewards.sandbox.sandbox_protocol import (
    ProgramResult,
    SandboxProgram,
    SandboxUnavailableError,
)

Protocol = Literal["sandbox_fusion", "plain"]
PROBE = {"code": "print(1)", "stdin": ""}
VALUE_MARK = "\u2407value "  # begins the last line, which holds what a function returned
# Python before 3.11 has no such limit; `sys` is in the prelude.
LIFT_DIGIT_LIMIT = "getattr(sys, 'set_int_max_str_digits', int)(0)"
ENCODER = f"\nSET_KEY = {SET_KEY!r}\n{inspect.getsource(encode_returned_value)}"
CALL = """
import json as _json, sys as _sys
_target = Solution() if "Solution" in globals() and hasattr(Solution, {name!r}) else None
_function = getattr(_target, {name!r}) if _target is not None else globals()[{name!r}]
_value = _json.dumps(_function(*_json.loads(_sys.stdin.read())), default=encode_returned_value)
print("\\n" + {mark!r} + _value)
"""


@dataclass(frozen=True)
class RemoteSandbox:
    """A `ProgramSandbox` whose programs run on a sandbox server."""

    endpoint: RewardEndpoint
    protocol: Protocol
    timeout_s: float
    memory_mib: int

    @contextlib.contextmanager
    def open_session(self, program: SandboxProgram) -> Iterator[RemoteSandboxSession]:
        """Yield a session of the program. Nothing is opened: each run is a request of its own."""
        yield RemoteSandboxSession(self, program)

    def close(self) -> None:
        """Do nothing: no connection stays open."""


@dataclass(frozen=True)
class RemoteSandboxSession:
    """A `SandboxSession` of a `RemoteSandbox`."""

    sandbox: RemoteSandbox
    program: SandboxProgram

    def run_program(self, stdin: str = "", arguments: tuple[Any, ...] = ()) -> ProgramResult:
        """Run the program once on the server; see `SandboxSession.run_program`."""
        code = insert_prelude(self.program.code)
        if self.program.function is not None:
            stdin = write_long_json(arguments)
            code += ENCODER + CALL.format(name=self.program.function, mark=VALUE_MARK)
        ask = (
            run_on_sandbox_fusion
            if self.sandbox.protocol == "sandbox_fusion"
            else run_on_plain_server
        )
        try:
            result = ask(self.sandbox, code, stdin)
        except (RewardEndpointError, msgspec.ValidationError, KeyError, TypeError) as error:
            raise SandboxUnavailableError(f"{type(error).__name__}: {error}") from error
        printed, mark, value = result.stdout.rpartition("\n" + VALUE_MARK)
        if self.program.function is None or not mark:
            return result
        return ProgramResult(
            result.ending, result.exit_code, printed, result.stderr, value.rstrip("\n")
        )


def insert_prelude(code: str) -> str:
    """Return `code` with the prelude before it, which also lifts Python's limit of digits, but
    behind imports from __future__, which must stand first.
    """
    lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the server's to tell
        body = []
    ends = [
        one.end_lineno or 0
        for one in body
        if isinstance(one, ast.ImportFrom) and one.module == "__future__"
    ]
    place = max(ends, default=0)
    return "\n".join([*lines[:place], PRELUDE, LIFT_DIGIT_LIMIT, *lines[place:]])


class SandboxFusionRun(msgspec.Struct):
    status: Literal["Finished", "TimeLimitExceeded", "Error"]
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


def run_on_sandbox_fusion(sandbox: RemoteSandbox, code: str, stdin: str) -> ProgramResult:
    """Run the code on a SandboxFusion server (https://github.com/bytedance/SandboxFusion: POST
    /run_code) and return how the run ended. Raise RewardEndpointError where the server fails.
    """
    body = {
        "compile_timeout": sandbox.timeout_s,
        "run_timeout": sandbox.timeout_s,
        "code": code,
        "stdin": stdin,
        "memory_limit_MB": sandbox.memory_mib,
        "language": "python",
        "files": {},
        "fetch_files": [],
    }
    answer = sandbox.endpoint.post_with_retries(body, body | PROBE).answer
    if answer["status"] == "SandboxError":
        raise RewardEndpointError(f"the sandbox server failed: {answer.get('message')!r}")
    if answer.get("run_result") is None:
        # it did not get to run
        return ProgramResult("exit", 1, stderr=str(answer.get("message") or ""))
    run = msgspec.convert(answer["run_result"], SandboxFusionRun)
    ending: Literal["timeout", "exit"] = "timeout" if run.status == "TimeLimitExceeded" else "exit"
    return ProgramResult(
        ending, run.return_code or int(run.status == "Error"), run.stdout or "", run.stderr or ""
    )


class PlainProtocolRun(msgspec.Struct):
    ending: Literal["exit", "timeout", "memory"]
    code: int = 0
    stdout: str = ""
    stderr: str = ""


def run_on_plain_server(sandbox: RemoteSandbox, code: str, stdin: str) -> ProgramResult:
    """Run the code on a server of the plain protocol (see the module) and return how the run ended.
    Raise RewardEndpointError where the server fails.
    """
    limits = {"timeout_s": sandbox.timeout_s, "memory_mib": sandbox.memory_mib}
    body = {"language": "python", "code": code, "stdin": stdin, **limits}
    answer = sandbox.endpoint.post_with_retries(body, body | PROBE).answer
    run = msgspec.convert(answer, PlainProtocolRun)
    return ProgramResult(run.ending, run.code, run.stdout, run.stderr)

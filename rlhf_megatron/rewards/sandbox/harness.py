"""Runs inside a sandbox: one program, input by input, each in a fork of its own that
starts from nothing.

It is given the program and one input at a time, and hands out what was printed or returned.
Expected outputs never come here, so nothing that a program does to this process can make a
wrong answer right.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from typing import IO, Any

from rlhf_megatron.rewards.sandbox.sandbox_layers import PR_SET_DUMPABLE, invoke_prctl

MODULES = [
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
    "time",
    "decimal",
    "fractions",
    "dataclasses",
]
STARRED = ["typing", "collections", "heapq", "bisect", "math", "itertools", "functools"]
PRELUDE = "\n".join(
    [
        *(f"import {name}" for name in MODULES),
        *(f"from {name} import *" for name in STARRED),
        "pow = __import__('builtins').pow",
    ]
)
"""Names that judges of programming contests have ready,
so that answers use them without an import.
"""
ERROR_CHARS = 2000  # of the end of what was written to stderr
VALUE = 3  # descriptor of the value that a function returned
SET_KEY = "\u2407set"  # the only key of the object that stands for a returned set


def serve_programs(
    connection: socket.socket, output_bytes: int, is_init: bool, is_dumpable: bool
) -> None:
    """Read a program and then its inputs from `connection`, a line each, run the program on each
    input, and answer a line for each run, until the other side closes. `is_init`: this is process 1
    of a PID namespace. `is_dumpable`: other processes of the user may look at the program.
    """
    with (
        connection.makefile("rb") as lines,
        open(connection.fileno(), "wb", 0, closefd=False) as answers,
    ):
        answers.write(b'{"ready": true}\n')  # not `send`, which seccomp refuses
        program = json.loads(lines.readline() or b"null")
        for line in lines:
            try:
                answer = run_in_fork(program, json.loads(line), output_bytes, is_init, is_dumpable)
            except (
                OSError,
                MemoryError,
            ) as error:  # the program has used up room or processes in an earlier run
                answer = make_failure(f"no room for a further run: {error}")
            text = memoryview(json.dumps(answer).encode() + b"\n")
            while text:
                text = text[answers.write(text) :]


def run_in_fork(
    program: dict[str, Any],
    run_input: dict[str, Any],
    output_bytes: int,
    is_init: bool,
    is_dumpable: bool,
) -> dict[str, Any]:
    """Run the program once in a fork and return a dict of exit code, stdout, end of stderr, value
    (JSON, or None), and the wall time and CPU time in seconds. More than `output_bytes` of one
    output count as a failure.

    `run_input` has "stdin" as text, or the "arguments" of the program's function. See
    `serve_programs` for the rest.
    """
    started_at = time.monotonic()
    cpu_s_before = read_reaped_cpu_s()
    with contextlib.ExitStack() as stack:
        stdin, *written = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(VALUE + 1)]
        stdin.write(run_input.get("stdin", "").encode("utf-8", "surrogateescape"))
        stdin.seek(0)
        child = os.fork()
        if child == 0:
            become_program(program, run_input, (stdin, *written), is_dumpable)
        code = wait_for_program(child, is_init)
        times = {
            "took_s": time.monotonic() - started_at,
            "cpu_s": read_reaped_cpu_s() - cpu_s_before,
        }
        texts = [read_output(file, output_bytes) for file in written]
    size = max(len(text) for text in texts)
    if size > output_bytes:
        return make_failure(f"more than {output_bytes} bytes were written") | times
    stdout, stderr, returned = (text.decode("utf-8", "replace") for text in texts)
    return {
        "code": code,
        "stdout": stdout,
        "stderr": stderr[-ERROR_CHARS:],
        "value": returned or None,
        **times,
    }


def make_failure(reason: str) -> dict[str, Any]:
    """Return the answer for a run that failed for this reason and has no output."""
    return {"code": 1, "stdout": "", "stderr": reason, "value": None}


def read_reaped_cpu_s() -> float:
    """Return the CPU seconds of all children that have ended and were waited for, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def wait_for_program(child_pid: int, is_init: bool) -> int:
    """Wait for the program and return its exit code, negative for a signal. With `is_init` kill all
    processes that the program left behind in the namespace.
    """
    code = None
    while code is None:
        pid, status = os.waitpid(-1, 0)
        if pid == child_pid:
            code = os.waitstatus_to_exitcode(status)
    if is_init:
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
                os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                break
    return code


def read_output(file: IO[bytes], output_bytes: int) -> bytes:
    """Return the file's first `output_bytes` + 1 bytes: one more than the limit shows that the
    limit is passed.
    """
    file.seek(0)
    return file.read(output_bytes + 1)


def become_program(
    program: dict[str, Any],
    run_input: dict[str, Any],
    files: tuple[IO[bytes], ...],
    is_dumpable: bool,
) -> None:
    """Run the program in this fork, with `files` as stdin, stdout, stderr and the value, and exit
    with its code. Does not return.
    """
    try:
        for number, file in enumerate([os.dup(file.fileno()) for file in files]):
            os.dup2(file, number)
        os.closerange(VALUE + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        if is_dumpable:
            invoke_prctl(PR_SET_DUMPABLE, 1)
        os._exit(execute_program(program, run_input))
    except BaseException:
        os._exit(1)


def execute_program(program: dict[str, Any], run_input: dict[str, Any]) -> int:
    """Execute the program as `__main__`, and with a function write the JSON of the returned value
    to the descriptor VALUE. Return the exit code.
    """
    main = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.split(".")[0] == "rlhf_megatron"]:
        del sys.modules[name]
    sys.modules["__main__"] = main
    sys.argv = ["program"]
    code = 0
    try:
        exec(PRELUDE, main.__dict__)
        exec(compile(program["code"], "program", "exec", dont_inherit=True), main.__dict__)
        if program["function"] is not None:
            value = find_program_function(main, program["function"])(*run_input["arguments"])
            with open(VALUE, "w", closefd=False) as file:
                json.dump(value, file, default=encode_returned_value)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finish_interpreter()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        try:
            if stream is not None and not stream.closed:  # as at the end of any Python program
                stream.flush()
        except (
            Exception
        ):  # the program has closed the file below it, or put something else in its place
            code = code or 1
    return code & 255


def encode_returned_value(value: object) -> object:
    """Return what JSON has for a value that a function returned and JSON lacks: an object for a
    set, plain numbers and lists for those of numpy, decimal and fractions. Raise TypeError for any
    other value, such as a complex number. A sandbox server runs the text of this function too.
    """
    import decimal
    import fractions

    if isinstance(value, (set, frozenset)):
        return {SET_KEY: list(value)}
    if isinstance(value, fractions.Fraction):
        return value.numerator if value.denominator == 1 else float(value)
    if isinstance(value, decimal.Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"The function returned a {type(value).__name__}, which equals no JSON value.")


def finish_interpreter() -> None:
    """Wait for the threads that the program has not joined, and call its atexit functions."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def find_program_function(main: types.ModuleType, name: str) -> Any:
    """Return the method of this name of the program's class Solution, where there is one, else the
    function of the module. Raise AttributeError where there is neither.
    """
    solution = getattr(main, "Solution", None)
    return (
        getattr(solution(), name)
        if solution is not None and hasattr(solution, name)
        else getattr(main, name)
    )

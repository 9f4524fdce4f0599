"""1 when the program in the response passes all tests of its label, else 0. It runs in a sandbox.

The label is the tests as JSON, in the schema of APPS and TACO ({"inputs", "outputs", "fn_name"?}) or of LiveCodeBench
(a list of {"input", "output", "testtype"}). Expected outputs stay on this side of the sandbox: a program that looks for
them, returns what equals everything, or ends early with exit code 0 has printed the wrong thing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal

from rlhf_megatron.rewards.endpoint import Endpoint
from rlhf_megatron.rewards.sandbox.base import Program, RunResult, Sandbox, SandboxUnavailable
from rlhf_megatron.rewards.sandbox.layers import Limits
from rlhf_megatron.rewards.sandbox.local import LocalSandbox, SandboxSettings
from rlhf_megatron.rewards.sandbox.remote import Protocol, RemoteSandbox
from rlhf_megatron.rewards.scorers.answer import last_block
from rlhf_megatron.rewards.scorers.base import (
    MALFORMED,
    OK,
    OWN_PROCESS,
    REWARDS,
    TIMEOUT,
    RewardResult,
    RewardSample,
    masked,
)

MOST_TESTS = 1000  # that a label has
PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class CodeParams:
    """How programs are tested, and where they run."""

    score: Literal["all", "share"] = "all"  # share: of the tests that pass, which pays for half a solution
    test_timeout_s: float = 6.0  # of one test, CPU time and sleep
    max_tests: int | None = None  # of a label, the first ones; null: all
    memory_mib: int = 1024  # of a program
    readable: tuple[str, ...] = ()  # further folders that programs may read
    preload: tuple[str, ...] = ()  # modules imported ahead, such as numpy
    num_warm: int = 1  # sandboxes that wait in each worker
    allow_open: bool = False  # run programs also where the kernel gives too few layers
    server: Endpoint | None = None  # a sandbox server in place of this machine
    protocol: Protocol = "sandbox_fusion"  # of the server
    allow_truncated: bool = False  # true: also read a response that ended by length

    def __post_init__(self) -> None:
        if not self.test_timeout_s > 0 or (self.max_tests is not None and self.max_tests < 1):
            raise ValueError(
                f"test_timeout_s ({self.test_timeout_s}) must be above 0, and max_tests ({self.max_tests}) at least 1."
            )

    @property
    def needs_s(self) -> float:
        """Seconds of `reward.timeout_s` under which the limit of a test would never be reached."""
        return 0.0 if self.server else self.test_timeout_s

    @property
    def waits_s(self) -> float | None:
        """Seconds that a sample may wait for a server, whose fault it is then. Each test is a request, which ends."""
        return None if self.server is None else self.server.longest_s * (self.max_tests or MOST_TESTS)

    def prepare(self) -> str | None:
        """Return which layers this machine has. Raises ValueError where they are too few."""
        if self.server is not None:
            return None
        sandbox = make_sandbox(self)
        assert isinstance(sandbox, LocalSandbox)
        sandbox.start()
        sandbox.close()
        return sandbox.note


def make_sandbox(params: CodeParams) -> Sandbox:
    """Make a sandbox without starting it."""
    if params.server is not None:
        return RemoteSandbox(params.server, params.protocol, params.test_timeout_s, params.memory_mib)
    limits = Limits(memory_mib=params.memory_mib, cpu_s=int(params.test_timeout_s) + 2)
    settings = SandboxSettings(
        limits, None, params.readable, params.preload, params.num_warm, allow_open=params.allow_open
    )
    return LocalSandbox(settings, params.test_timeout_s)


@lru_cache(maxsize=8)
def sandbox_of(params: CodeParams) -> Sandbox:
    """Return this worker process's sandbox, which ends with the process."""
    return make_sandbox(params)


@dataclass(frozen=True)
class Case:
    """One test: what the program is given, and what it must give."""

    stdin: str
    arguments: tuple[Any, ...]
    expected: Any  # text that is printed, or the value that the function returns
    is_wrapped: bool = False  # the value may also stand alone in a list (APPS)


@dataclass(frozen=True)
class Tests:
    cases: tuple[Case, ...]
    function: str | None


def read_tests(label: str, extra: str) -> Tests:
    """Raises ValueError for a label that is none of the known schemas."""
    found = json.loads(label)
    if isinstance(found, list) and found and all(isinstance(one, dict) for one in found):
        others = json.loads(extra) if extra else {}
        metadata = others.get("metadata", {})
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        name = metadata.get("func_name") if found[0].get("testtype") == "functional" else None
        if name is None and found[0].get("testtype") == "functional":
            raise ValueError("functional tests need the name of the function in metadata.func_name of the row")
        found = {"inputs": [o["input"] for o in found], "outputs": [o["output"] for o in found], "fn_name": name}
    if not isinstance(found, dict) or not isinstance(found.get("inputs"), list):
        raise ValueError('it is no object with "inputs" and "outputs", and no list of tests')
    function = found.get("fn_name") or None
    inputs, outputs = found["inputs"], found.get("outputs", [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    make = _called if function else _printed
    return Tests(tuple(make(given, wanted) for given, wanted in pairs), function)


def _printed(given: Any, wanted: Any) -> Case:
    for one in (given, wanted):
        if isinstance(one, dict | None):
            raise ValueError(f"{one!r:.80} is no text that is read or printed")
    texts = ["\n".join(map(str, one)) if isinstance(one, list) else str(one) for one in (given, wanted)]
    if len(texts[1]) > (most := Limits().output_bytes):
        raise ValueError(f"an output has {len(texts[1])} characters, of which {most} are read")
    return Case(texts[0], (), texts[1])


def _called(given: Any, wanted: Any) -> Case:
    if isinstance(given, str):
        return Case("", tuple(json.loads(line) for line in given.split("\n") if line.strip()), json.loads(wanted))
    if not isinstance(given, list):
        raise ValueError(f"the input {given!r:.80} of a function is neither text nor a list")
    return Case("", tuple(given), wanted, is_wrapped=True)


def same_text(printed: str, expected: str) -> bool:
    """Compare output as LiveCodeBench does: white space around lines and the whole does not count; lines of numbers
    compare as decimals.
    """
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (printed, expected))
    return len(lines) == len(wanted) and all(a == b or _same_numbers(a, b) for a, b in zip(lines, wanted, strict=True))


def _same_numbers(first: str, second: str) -> bool:
    try:
        numbers = [[Decimal(token) for token in line.split()] for line in (first, second)]
        return bool(numbers[0]) and numbers[0] == numbers[1]
    except InvalidOperation:  # no number, or one that signals when it is compared (sNaN)
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Plain JSON values: numbers by value, a boolean equals booleans only, lists and objects item by item."""
    if isinstance(found, bool) or isinstance(expected, bool):
        return isinstance(found, bool) and found is expected
    if isinstance(found, list) and isinstance(expected, list):
        return all(same_value(a, b) for a, b in zip_longest(found, expected, fillvalue=...))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in found)
    kinds = [float if isinstance(one, int) else type(one) for one in (found, expected)]
    return kinds[0] is kinds[1] and bool(found == expected or (found != found and expected != expected))  # NaN


def passes(result: RunResult, case: Case, has_function: bool) -> bool:
    """Whether a run gave what the test expects."""
    if not result.is_good:
        return False
    if not has_function:
        return same_text(result.stdout, case.expected)
    try:
        value = json.loads(result.value or "")
        return same_value(value, case.expected) or (
            case.is_wrapped
            and isinstance(case.expected, list)
            and len(case.expected) == 1
            and same_value(value, case.expected[0])
        )
    except (ValueError, RecursionError):  # no JSON, or endless
        return False


@REWARDS.register("code", CodeParams, needs=(OWN_PROCESS,))
def code(sample: RewardSample, params: CodeParams) -> RewardResult:
    """The part `passed` is the share of tests that passed; with `score: all` the first failure ends them."""
    try:
        tests = read_tests(sample.label, sample.extra)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return masked("bad_label", f"The label holds no tests: {error}.")
    program = last_block(sample.response, PYTHON)
    if program is None or (sample.finish_reason == "length" and not params.allow_truncated):
        return RewardResult(0.0, MALFORMED)
    cases = tests.cases[: params.max_tests]
    try:
        num_passed, endings = _run(sandbox_of(params), Program(program, tests.function), cases, params.score == "all")
    except SandboxUnavailable as error:
        return masked("sandbox", str(error))
    share = num_passed / len(cases)
    if params.score == "share":
        return RewardResult(share, parts={"passed": share})
    is_slow = bool(endings) and endings[-1] == "timeout"
    return RewardResult(float(num_passed == len(cases)), TIMEOUT if is_slow else OK, {"passed": share})


def _run(sandbox: Sandbox, program: Program, cases: Sequence[Case], stops: bool) -> tuple[int, list[str]]:
    """(tests passed, how the runs ended)."""
    num_passed = 0
    endings: list[str] = []
    with sandbox.session(program) as session:
        for case in cases:
            result = session.run(case.stdin, case.arguments)
            endings.append(result.ending)
            if passes(result, case, program.function is not None):
                num_passed += 1
            elif stops:
                break
    return num_passed, endings

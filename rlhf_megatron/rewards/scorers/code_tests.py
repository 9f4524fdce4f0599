"""1 when the program in the response passes all tests of its label, else 0. It runs in a sandbox.

The label is the tests as JSON, in the schema of APPS and TACO ({"inputs", "outputs", "fn_name"?})
or of LiveCodeBench (a list of {"input", "output", "testtype"}). Expected outputs stay on this side
of the sandbox: a program that looks for them, returns what equals everything, or ends early with
exit code 0 has printed the wrong thing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Literal

from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint
from rlhf_megatron.rewards.sandbox.local_sandbox import LocalSandbox, SandboxSettings
from rlhf_megatron.rewards.sandbox.remote_sandbox import Protocol, RemoteSandbox
from rlhf_megatron.rewards.sandbox.sandbox_layers import SandboxLimits
from rlhf_megatron.rewards.sandbox.sandbox_protocol import (
    ProgramResult,
    ProgramSandbox,
    SandboxProgram,
    SandboxUnavailableError,
)
from rlhf_megatron.rewards.scorers.answer_params import find_last_block
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    OK,
    OWN_PROCESS,
    REWARDS,
    TIMEOUT,
    RewardResult,
    RewardSample,
    make_masked_result,
)

MOST_TESTS = 1000  # that a label has
PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class CodeParams:
    """How programs are tested, and where they run."""

    # share: of the tests that pass, which pays for half a solution
    score: Literal["all", "share"] = "all"
    test_timeout_s: float = 6.0  # of one test, CPU time and sleep
    max_tests: int | None = None  # of a label, the first ones; null: all
    memory_mib: int = 1024  # of a program
    readable: tuple[str, ...] = ()  # further folders that programs may read
    preload: tuple[str, ...] = ()  # modules imported ahead, such as numpy
    num_warm: int = 1  # sandboxes that wait in each worker
    allow_open: bool = False  # run programs also where the kernel gives too few layers
    server: RewardEndpoint | None = None  # a sandbox server in place of this machine
    protocol: Protocol = "sandbox_fusion"  # of the server
    allow_truncated: bool = False  # true: also read a response that ended by length

    def __post_init__(self) -> None:
        """Raise ValueError for a time limit or a number of tests out of range."""
        if not self.test_timeout_s > 0 or (self.max_tests is not None and self.max_tests < 1):
            raise ValueError(
                f"test_timeout_s ({self.test_timeout_s}) must be above 0, and max_tests"
                f" ({self.max_tests}) at least 1."
            )

    @property
    def needs_s(self) -> float:
        """Return the least `reward.timeout_s`, in seconds, with which the limit of a test can be
        reached; 0 with a sandbox server. The value is `test_timeout_s`, the limit of one test.
        """
        return 0.0 if self.server else self.test_timeout_s

    @property
    def waits_s(self) -> float | None:
        """Return the seconds that a sample may wait for the sandbox server, one request for each
        test; None without a server. A longer wait masks the sample.
        """
        return (
            None if self.server is None else self.server.max_wait_s * (self.max_tests or MOST_TESTS)
        )

    def prepare(self) -> str | None:
        """Start and end a sandbox, and return a note on which layers are in force on this machine;
        None with a sandbox server. Raise ValueError where they are too few.
        """
        if self.server is not None:
            return None
        sandbox = make_sandbox(self)
        assert isinstance(sandbox, LocalSandbox)
        sandbox.start_guardian()
        sandbox.close()
        return sandbox.layers_note


def make_sandbox(params: CodeParams) -> ProgramSandbox:
    """Return a sandbox of these parameters, local or remote, without starting it."""
    if params.server is not None:
        return RemoteSandbox(
            params.server, params.protocol, params.test_timeout_s, params.memory_mib
        )
    limits = SandboxLimits(memory_mib=params.memory_mib, cpu_s=int(params.test_timeout_s) + 2)
    settings = SandboxSettings(
        limits, None, params.readable, params.preload, params.num_warm, allow_open=params.allow_open
    )
    return LocalSandbox(settings, params.test_timeout_s)


@lru_cache(maxsize=8)
def get_process_sandbox(params: CodeParams) -> ProgramSandbox:
    """Return this worker process's sandbox for the parameters, made at the first call; it ends with
    the process.
    """
    return make_sandbox(params)


@dataclass(frozen=True)
class CodeTestCase:
    """One test: the input of the program, and its expected output or value."""

    stdin: str
    arguments: tuple[Any, ...]
    expected: Any  # text that is printed, or the value that the function returns
    is_wrapped: bool = False  # the value may also stand alone in a list (APPS)


@dataclass(frozen=True)
class CodeTestSuite:
    cases: tuple[CodeTestCase, ...]
    function_name: str | None


def parse_code_tests(label: str, extra: str) -> CodeTestSuite:
    """Return the tests in a label. `extra` is the JSON of the row's other keys, which has the
    function's name for LiveCodeBench. Raise ValueError for a label of no known schema.
    """
    found = json.loads(label)
    if isinstance(found, list) and found and all(isinstance(one, dict) for one in found):
        others = json.loads(extra) if extra else {}
        metadata = others.get("metadata", {})
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        name = metadata.get("func_name") if found[0].get("testtype") == "functional" else None
        if name is None and found[0].get("testtype") == "functional":
            raise ValueError(
                "functional tests need the name of the function in metadata.func_name of the row"
            )
        found = {
            "inputs": [o["input"] for o in found],
            "outputs": [o["output"] for o in found],
            "fn_name": name,
        }
    if not isinstance(found, dict) or not isinstance(found.get("inputs"), list):
        raise ValueError('it is no object with "inputs" and "outputs", and no list of tests')
    function = found.get("fn_name") or None
    inputs = found["inputs"]
    outputs = found.get("outputs", [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    make = _make_function_case if function else _make_stdin_case
    return CodeTestSuite(tuple(make(given, wanted) for given, wanted in pairs), function)


def _make_stdin_case(test_input: Any, expected: Any) -> CodeTestCase:
    """Return a test that gives the program text to read and expects text to be printed. Raise
    ValueError for input or output that is no text, or an output that is too long.
    """
    for one in (test_input, expected):
        if isinstance(one, dict | None):
            raise ValueError(f"{one!r:.80} is no text that is read or printed")
    texts = [
        "\n".join(map(str, one)) if isinstance(one, list) else str(one)
        for one in (test_input, expected)
    ]
    if len(texts[1]) > (most := SandboxLimits().output_bytes):
        raise ValueError(f"an output has {len(texts[1])} characters, of which {most} are read")
    return CodeTestCase(texts[0], (), texts[1])


def _make_function_case(test_input: Any, expected: Any) -> CodeTestCase:
    """Return a test that calls the function: a text has one JSON argument a line, and a JSON
    result; a list has the arguments. Raise ValueError for other input. Where the inputs are a
    list, an expected value that is alone in a list may also be the result itself (APPS).
    """
    if isinstance(test_input, str):
        return CodeTestCase(
            "",
            tuple(json.loads(line) for line in test_input.split("\n") if line.strip()),
            json.loads(expected),
        )
    if not isinstance(test_input, list):
        raise ValueError(f"the input {test_input!r:.80} of a function is neither text nor a list")
    return CodeTestCase("", tuple(test_input), expected, is_wrapped=True)


def is_same_output(printed: str, expected: str) -> bool:
    """Return whether output equals the expected output as LiveCodeBench compares them: white space
    around lines and around the whole does not count; lines of numbers compare as decimals.
    """
    lines, wanted = (
        [line.strip() for line in text.strip().split("\n")] for text in (printed, expected)
    )
    return len(lines) == len(wanted) and all(
        a == b or _are_same_numbers(a, b) for a, b in zip(lines, wanted, strict=True)
    )


def _are_same_numbers(first_line: str, second_line: str) -> bool:
    """Return whether two lines are the same numbers, separated by white space; False where a word
    is no number.
    """
    try:
        numbers = [[Decimal(token) for token in line.split()] for line in (first_line, second_line)]
        return bool(numbers[0]) and numbers[0] == numbers[1]
    except InvalidOperation:  # no number, or one that signals when it is compared (sNaN)
        return False


def is_same_value(returned: Any, expected: Any) -> bool:
    """Return whether two plain JSON values are equal: numbers by value, NaN to NaN, a boolean only
    to the same boolean, lists and objects item by item.
    """
    if isinstance(returned, bool) or isinstance(expected, bool):
        return isinstance(returned, bool) and returned is expected
    if isinstance(returned, list) and isinstance(expected, list):
        return all(is_same_value(a, b) for a, b in zip_longest(returned, expected, fillvalue=...))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(
            is_same_value(returned[key], expected[key]) for key in returned
        )
    kinds = [float if isinstance(one, int) else type(one) for one in (returned, expected)]
    return kinds[0] is kinds[1] and bool(
        returned == expected or (returned != returned and expected != expected)
    )  # NaN


def passes_test_case(result: ProgramResult, case: CodeTestCase, has_function: bool) -> bool:
    """Return whether a run succeeded and gave the output, or the function's value, that the test
    expects.
    """
    if not result.is_success:
        return False
    if not has_function:
        return is_same_output(result.stdout, case.expected)
    try:
        value = json.loads(result.value or "")
        return is_same_value(value, case.expected) or (
            case.is_wrapped
            and isinstance(case.expected, list)
            and len(case.expected) == 1
            and is_same_value(value, case.expected[0])
        )
    except (ValueError, RecursionError):  # no JSON, or endless
        return False


@REWARDS.register("code", CodeParams, needs=(OWN_PROCESS,))
def score_code(sample: RewardSample, params: CodeParams) -> RewardResult:
    """Score 1 where the program in the response passes all tests, else 0; with `score: share` score
    the share of tests that pass. The part `passed` is that share; with `score: all` the first
    failure ends the tests. A label without tests, and a sandbox that fails, mask the sample.
    """
    try:
        tests = parse_code_tests(sample.label, sample.extra)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return make_masked_result("bad_label", f"The label holds no tests: {error}.")
    program = find_last_block(sample.response, PYTHON)
    if program is None or (sample.finish_reason == "length" and not params.allow_truncated):
        return RewardResult(0.0, MALFORMED)
    cases = tests.cases[: params.max_tests]
    try:
        num_passed, endings = _run_test_cases(
            get_process_sandbox(params),
            SandboxProgram(program, tests.function_name),
            cases,
            params.score == "all",
        )
    except SandboxUnavailableError as error:
        return make_masked_result("sandbox", str(error))
    share = num_passed / len(cases)
    if params.score == "share":
        return RewardResult(share, parts={"passed": share})
    is_slow = bool(endings) and endings[-1] == "timeout"
    return RewardResult(
        float(num_passed == len(cases)), TIMEOUT if is_slow else OK, {"passed": share}
    )


def _run_test_cases(
    sandbox: ProgramSandbox,
    program: SandboxProgram,
    cases: Sequence[CodeTestCase],
    stops_at_failure: bool,
) -> tuple[int, list[str]]:
    """Run the tests and return the number of tests that passed and the endings of the runs. With
    `stops_at_failure` end at the first test that fails.
    """
    num_passed = 0
    endings: list[str] = []
    with sandbox.open_session(program) as session:
        for case in cases:
            result = session.run_program(case.stdin, case.arguments)
            endings.append(result.ending)
            if passes_test_case(result, case, program.function is not None):
                num_passed += 1
            elif stops_at_failure:
                break
    return num_passed, endings

"""1 when the program in the response passes all tests of its label, else 0. It runs in a sandbox.

The label is the tests as JSON, in the schema of APPS and TACO ({"inputs", "outputs", "fn_name"?})
or of LiveCodeBench (a list of {"input", "output", "testtype"}). Expected outputs stay on this side
of the sandbox, where `code_comparison` compares: a program that looks for them, returns what equals
everything, or ends early with exit code 0 has printed the wrong thing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from rlhf_megatron.data.extra_columns import parse_extra
from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint
from rlhf_megatron.rewards.sandbox.local_sandbox import LocalSandbox, SandboxSettings
from rlhf_megatron.rewards.sandbox.long_integers import read_long_json
from rlhf_megatron.rewards.sandbox.remote_sandbox import Protocol, RemoteSandbox
from rlhf_megatron.rewards.sandbox.sandbox_layers import SandboxLimits
from rlhf_megatron.rewards.sandbox.sandbox_protocol import (
    ProgramResult,
    ProgramSandbox,
    SandboxProgram,
    SandboxUnavailableError,
)
from rlhf_megatron.rewards.scorers.answer_params import find_last_block
from rlhf_megatron.rewards.scorers.code_comparison import (
    ComparisonRule,
    is_same_output,
    is_same_value,
    read_returned_value,
)
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
# The last line of a traceback, and the module that it names, if it names one.
IMPORT_FAILURE = re.compile(
    r"^(?:ModuleNotFoundError|ImportError): (?:.*No module named '([\w.]{1,100})')?", re.MULTILINE
)
IMPORT_STATEMENT = re.compile(r"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w{0,99})", re.MULTILINE)


@dataclass(frozen=True)
class CodeParams:
    """How programs are tested, and where they run."""

    # share: of the tests that pass, which pays for half a solution
    score: Literal["all", "share"] = "all"
    # close: decimals within 1e-6 x the expected number + 1e-9, sets in any order; exact: as
    # LiveCodeBench; allclose: as verl's prime_code, 1e-5 and 1e-8 for output of a number a line
    compare: ComparisonRule = "close"
    # of one test: wall time without the wait for a processor, or CPU time where that is more
    test_timeout_s: float = 6.0
    max_tests: int | None = None  # of a label, the first ones; null: all
    memory_mib: int = 1024  # of a program
    readable: tuple[str, ...] = ()  # further folders that programs may read
    preload: tuple[str, ...] = ()  # modules that programs may import besides Python's own: numpy
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
    tests = read_long_json(label)
    if isinstance(tests, list) and tests and all(isinstance(test, dict) for test in tests):
        metadata = parse_extra(extra).get("metadata") or {}
        metadata = read_long_json(metadata) if isinstance(metadata, str) else metadata
        name = metadata.get("func_name") if tests[0].get("testtype") == "functional" else None
        if name is None and tests[0].get("testtype") == "functional":
            raise ValueError(
                "functional tests need the name of the function in metadata.func_name of the row"
            )
        tests = {
            "inputs": [test["input"] for test in tests],
            "outputs": [test["output"] for test in tests],
            "fn_name": name,
        }
    if not isinstance(tests, dict) or not isinstance(tests.get("inputs"), list):
        raise ValueError('it is no object with "inputs" and "outputs", and no list of tests')
    function_name = tests.get("fn_name") or None
    inputs = tests["inputs"]
    outputs = tests.get("outputs", [])
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"it has {len(inputs)} inputs and {len(outputs)} outputs")
    make_case = _make_function_case if function_name else _make_stdin_case
    return CodeTestSuite(tuple(map(make_case, inputs, outputs)), function_name)


def _make_stdin_case(test_input: Any, expected: Any) -> CodeTestCase:
    """Return a test that gives the program text to read and expects text to be printed. Raise
    ValueError for input or output that is no text, or an output that is too long.
    """
    for value in (test_input, expected):
        if isinstance(value, dict | None):
            raise ValueError(f"{value!r:.80} is no text that is read or printed")
    stdin, output = (
        "\n".join(map(str, value)) if isinstance(value, list) else str(value)
        for value in (test_input, expected)
    )
    max_chars = SandboxLimits().output_bytes
    if len(output) > max_chars:
        raise ValueError(f"an output has {len(output)} characters, of which {max_chars} are read")
    return CodeTestCase(stdin, (), output)


def _make_function_case(test_input: Any, expected: Any) -> CodeTestCase:
    """Return a test that calls the function: a text has one JSON argument a line, and a JSON
    result; a list has the arguments. Raise ValueError for other input. Where the inputs are a
    list, an expected value that is alone in a list may also be the result itself (APPS).
    """
    if isinstance(test_input, str):
        return CodeTestCase(
            "",
            tuple(read_long_json(line) for line in test_input.split("\n") if line.strip()),
            read_long_json(expected),
        )
    if not isinstance(test_input, list):
        raise ValueError(f"the input {test_input!r:.80} of a function is neither text nor a list")
    return CodeTestCase("", tuple(test_input), expected, is_wrapped=True)


def passes_test_case(
    result: ProgramResult, case: CodeTestCase, has_function: bool, compare: ComparisonRule
) -> bool:
    """Return whether a run succeeded and gave the output, or the function's value, that the test
    expects.
    """
    if not result.is_success:
        return False
    if not has_function:
        return is_same_output(result.stdout, case.expected, compare)
    try:
        value = read_returned_value(result.value or "")
        return is_same_value(value, case.expected, compare) or (
            case.is_wrapped
            and isinstance(case.expected, list)
            and len(case.expected) == 1
            and is_same_value(value, case.expected[0], compare)
        )
    except (ValueError, RecursionError):  # no JSON, or endless
        return False


def describe_import_failure(program: str, stderr: str, params: CodeParams) -> str:
    """Return a hint for a program that failed because its sandbox has not a module that the program
    imports, or "" where the program failed for another reason.

    Both texts are the policy's, so that the hint may be wrong; no score depends on it.
    """
    failures = list(IMPORT_FAILURE.finditer(stderr))
    if not failures:
        return ""
    known_names = {*sys.stdlib_module_names, *params.preload}
    imported_names = [n for n in IMPORT_STATEMENT.findall(program) if n not in known_names]
    module = failures[-1][1] or next(iter(imported_names), None)
    if module is None:
        return ""
    if params.server is not None:
        return (
            f"A program imports {module}, which the sandbox server of reward.params.server cannot"
            " import: install it there."
        )
    return (
        f"A program imports {module}, which is not preloaded: a sandbox has the modules of Python"
        " itself and those of reward.params.preload"
        f" (now {', '.join(params.preload) or 'none'}). Install it and name it there if answers"
        " may use it."
    )


@REWARDS.register("code", CodeParams, needs=(OWN_PROCESS,))
def score_code(sample: RewardSample, params: CodeParams) -> RewardResult:
    """Score 1 where the program in the response passes all tests, else 0; with `score: share` score
    the share of tests that pass. The part `passed` is that share; with `score: all` the first
    failure ends the tests. A label without tests, and a sandbox that fails, mask the sample.
    """
    try:
        tests = parse_code_tests(sample.label, sample.extra)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return make_masked_result("bad_label", f"The label holds no tests: {error}.")
    program = find_last_block(sample.response, PYTHON)
    if program is None or (sample.finish_reason == "length" and not params.allow_truncated):
        return RewardResult(0.0, MALFORMED)
    cases = tests.cases[: params.max_tests]
    try:
        num_passed, last_result = _run_test_cases(
            get_process_sandbox(params),
            SandboxProgram(program, tests.function_name),
            cases,
            params,
        )
    except SandboxUnavailableError as error:
        return make_masked_result("sandbox", str(error))
    share = num_passed / len(cases)
    parts = {"passed": share}
    hint = describe_import_failure(program, last_result.stderr, params) if share < 1 else ""
    if params.score == "share":
        return RewardResult(share, parts=parts, error=hint)
    status = TIMEOUT if last_result.ending == "timeout" else OK
    return RewardResult(float(num_passed == len(cases)), status, parts, hint)


def _run_test_cases(
    sandbox: ProgramSandbox,
    program: SandboxProgram,
    cases: Sequence[CodeTestCase],
    params: CodeParams,
) -> tuple[int, ProgramResult]:
    """Run the tests, at least one, and return the number of tests that passed and the result of the
    last run. With `score: all` end at the first test that fails.
    """
    num_passed = 0
    with sandbox.open_session(program) as session:
        for case in cases:
            result = session.run_program(case.stdin, case.arguments)
            if passes_test_case(result, case, program.function is not None, params.compare):
                num_passed += 1
            elif params.score == "all":
                break
    return num_passed, result

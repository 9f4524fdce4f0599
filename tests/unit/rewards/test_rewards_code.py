"""Programs against tests: both styles and schemas, what counts as equal, and cheats, each of
which scores 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint
from rlhf_megatron.rewards.sandbox.local_sandbox import LocalSandbox, SandboxSettings
from rlhf_megatron.rewards.sandbox.remote_sandbox import insert_prelude
from rlhf_megatron.rewards.sandbox.sandbox_protocol import SandboxProgram
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.answer_params import find_last_block
from rlhf_megatron.rewards.scorers.code_comparison import is_same_output, is_same_value
from rlhf_megatron.rewards.scorers.code_tests import (
    PYTHON,
    CodeParams,
    get_process_sandbox,
    parse_code_tests,
    score_code,
)
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer

PARAMS = CodeParams(test_timeout_s=1.0)
SHARE = CodeParams(test_timeout_s=1.0, score="share")
SUM = json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]})
TWICE = json.dumps({"fn_name": "twice", "inputs": ["[1, 2]", "[]"], "outputs": ["[2, 4]", "[]"]})
ADDS = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
ONE_LINE = ADDS.replace("\n", ";")
DOUBLES = (
    "class Solution:\n    def twice(self, a: List[int]) -> List[int]:\n"
    "        return [2 * x for x in a]"
)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    try:
        get_process_sandbox(PARAMS).start_guardian()
    except ValueError as error:
        pytest.skip(str(error))
    yield
    for params in (PARAMS, SHARE):
        get_process_sandbox(params).close()
    get_process_sandbox.cache_clear()


def sample(program: str, label: str, **row: Any) -> RewardSample:
    return RewardSample(
        "",
        f"So:\n```python\n{program}\n```\n",
        label,
        "s",
        "stop",
        9,
        json.dumps(row) if row else "",
    )


def score(program: str, label: str, params: CodeParams = PARAMS, **row: Any) -> RewardResult:
    return score_code(sample(program, label, **row), params)


@pytest.mark.parametrize(
    ("program", "label"),
    [
        (ADDS, SUM),
        ("print(sum(int(x) for x in open(0).read().split()))", SUM),
        ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())), '')\nsys.exit()", SUM),
        (
            (
                "a, b = map(int, (input() + ' ' + (sys.stdin.read() or '')).split())\n"
                "print(float(a + b))"
            ),
            SUM,
        ),
        (DOUBLES, TWICE),
        ("def twice(a):\n    print('noise')\n    return tuple(2 * x for x in a)", TWICE),
        (
            (
                "import threading\ndef main():\n  time.sleep(0.1)\n"
                f"  {ONE_LINE}\nthreading.Thread(target=main).start()"
            ),
            SUM,
        ),
        (f"{ADDS}\nsys.stdout.close()", SUM),
        (f"{ADDS}\nsys.stdout.flush()\nsys.stdout = None", SUM),
        (f"{ADDS}\nimport os\nsys.stdout.flush()\nos.fsync(1)\nos._exit(0)", SUM),
        (f"import atexit\n@atexit.register\ndef last():\n    {ONE_LINE}", SUM),
        (
            "def f(a: int, b): return a + (f.__annotations__['a'] is int)",
            json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[2]]}),
        ),
        (
            "def f(a, b): return a + b",
            json.dumps({"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}),
        ),
    ],
)
def test_right_programs(program: str, label: str) -> None:
    assert score(program, label) == RewardResult(1.0, parts={"passed": 1.0})


def test_the_program_is_the_last_block_of_python() -> None:
    def block(mark: str, text: str) -> str:
        return f"```{mark}\n{text}\n```\nprose\n"

    shown = (
        block("python", "draft")
        + block("Python", "program")
        + block("text", "3")
        + block("", "3")
        + block("text", "4")
    )
    assert find_last_block(shown, PYTHON) == "program\n"
    assert (
        find_last_block(block("", "draft") + block("", "program") + block("cpp", "int x;"), PYTHON)
        == "program\n"
    )
    assert find_last_block(block("cpp", "int x;"), PYTHON) is None
    assert find_last_block("```python\nprint(3)```\n", PYTHON) == "print(3)"


def test_livecodebench() -> None:
    printed = json.dumps([{"input": "1 2", "output": "3", "testtype": "stdin"}])
    called = json.dumps([{"input": "[1]", "output": "[2]", "testtype": "functional"}])
    metadata = json.dumps({"func_name": "twice"})
    assert score(ADDS, printed).score == 1.0
    assert score(DOUBLES, called, metadata=metadata).score == 1.0
    assert score(DOUBLES, called).status == "masked:bad_label"


FRAMES = """
import gc, sys
frame, texts = sys._getframe(), []
while frame:
    texts += [str(v) for v in frame.f_locals.values()]
    frame = frame.f_back
texts += [str(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) and len(o) < 50]
found = [t for t in texts if "EXPECTED" in t]
print(found[0] if found else "", end="")
print("7391" * bool(found))
"""
FILES = """
import glob, os
places = ["/tmp/**", "/proc/*/fd/*", "/proc/*/environ", "/proc/*/cmdline", "./**", "../**"]
for path in [path for place in places for path in glob.glob(place, recursive=True)]:
    try:
        with open(path, "rb") as file:
            print(b"7391" in file.read(99999) and "7391" or "", end="")
    except OSError:
        pass
"""
LATER = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(0.1)
    os.write(1, b"3")
    os._exit(0)
"""
PATCHES = """
import builtins, json, sys
for name in ("harness", "guardian", "rlhf_megatron", "rlhf_megatron.rewards.sandbox.harness"):
    sys.modules[name] = type(sys)("patched")
passed = lambda *a, **k: {"code": 0, "stdout": "3", "value": "[2, 4]"}
json.loads = json.dumps = builtins.compile = builtins.exec = passed
def twice(a): return json.loads("")
"""
TRACE = """
import os, sys
found = []
def look(frame, event, argument):
    if len(found) < 5000:
        found.extend(str(v) for v in frame.f_locals.values() if isinstance(v, (str, tuple, bytes)))
    return look
frame = sys._getframe()
while frame:
    found.extend(str(v)[:9999] for v in frame.f_locals.values() if v is not found)
    frame.f_trace, frame = look, frame.f_back
sys.addaudithook(lambda name, arguments: found.append(str(arguments)[:999]) if len(found) < 5000 \
else None)
sys.settrace(look), sys.setprofile(look)
def twice(a):
    found.extend([str(sys.argv), str(os.environ), str(sys.modules)])
    return "".join(reversed("DETCEPXE")) * any("".join(reversed("DETCEPXE")) in text for text in \
found)
"""
SCAN = """
import ctypes, re
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
hits, size = 0, 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for begin, end in re.findall("^([0-9a-f]+)-([0-9a-f]+) rw", maps.read(), re.M):
        memory.seek(int(begin, 16))
        text = memory.read(int(end, 16) - int(begin, 16))
        hits, size = hits + len(re.findall(b"EXPECTE[D]-573[9]", text)), size + len(text)
assert size > 1 << 20
print("-".join(["EXPECTED", "5739"]) if hits else "")
"""
CHECKER = """
import builtins, sys
sys.path[:0] = ["/", "/work", "."]
try:
    from rlhf_megatron.rewards.scorers import code_tests as code
    code.passes_test_case = code.is_same_output = code.is_same_value = lambda *a: True
except ImportError:
    pass
builtins.print = builtins.open = builtins.isinstance = builtins.all = builtins.bool = lambda *a, \
**k: True
"""
EQUAL = """
class Any(list):
    __eq__ = lambda self, other: True
    __hash__ = None
def twice(a): return Any()
"""


@pytest.mark.parametrize(
    ("program", "label"),
    [
        (FRAMES, json.dumps({"inputs": ["1"], "outputs": ["EXPECTED 7391"]})),
        (EQUAL, TWICE),
        (
            EQUAL.replace("(list)", "(int)"),
            json.dumps({"fn_name": "twice", "inputs": ["1"], "outputs": ["2"]}),
        ),
        ("import os; os._exit(0)", SUM),
        ("exit(0)", SUM),
        ("def twice(a): raise SystemExit(0)", TWICE),
        (
            "import builtins, sys\nsys.modules['__main__'] = None\nprint(3)",
            SUM,
        ),  # the first test only
        ("print(3)\nprint(7)", SUM),
        (
            "def twice(a): return True",
            json.dumps({"fn_name": "twice", "inputs": ["1"], "outputs": ["1"]}),
        ),
        (
            "def twice(a): return 1",
            json.dumps({"fn_name": "twice", "inputs": ["1"], "outputs": ["[1, 2]"]}),
        ),
        (
            "def twice(a): return float('nan')",
            json.dumps({"fn_name": "twice", "inputs": ["1"], "outputs": ["2"]}),
        ),
        ("def twice(a):\n    x = []\n    for _ in range(9**5): x = [x]\n    return x", TWICE),
        (
            "import json\njson.dump = lambda *a, **k: a[1].write('[2, 4]')\ndef twice(a): return 0",
            TWICE,
        ),
        ("print('3'); raise ValueError", json.dumps({"inputs": ["1 2"], "outputs": ["3"]})),
        ("def other(a): return a", TWICE),
        ("this is no Python", SUM),
        (FILES, json.dumps({"inputs": ["1"], "outputs": ["7391"]})),
        (LATER, SUM),
        (TRACE, json.dumps({"fn_name": "twice", "inputs": ["1"], "outputs": ['"EXPECTED"']})),
        (SCAN, json.dumps({"inputs": ["1"], "outputs": ["EXPECTED-5739"]})),
        (CHECKER, SUM),
        (CHECKER + "def twice(a): return 0", TWICE),
        (PATCHES, SUM),
        (PATCHES, TWICE),
        ("import os\nprint('all tests passed', flush=True)\nos._exit(0)", SUM),
        ("import sys\nsys.stdout.close()", SUM),
        ("import os\nos.close(1)\nos.close(2)", SUM),
        ("import os\nos.dup2(0, 1)", SUM),
        ("import os\nos.write(3, b'[2, 4]')\nos._exit(0)", TWICE),  # the first test only
        ("def twice(a):\n    import os\n    os.write(3, b'[2, 4]')\n    return [2, 4]", TWICE),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", SUM),
        (
            (
                "class twice(dict):\n    __eq__ = __contains__ = lambda *_: True\n"
                "    __init__ = lambda *_: None"
            ),
            TWICE,
        ),
        ("def twice(a): yield from [2, 4]", TWICE),
        ("twice = type('E', (), {'__call__': lambda s, a: s, 'tolist': lambda s: s})()", TWICE),
        ("def twice(a): return 'x' * 3_000_000", TWICE),
        ("print('3' * 3_000_000)", SUM),
        ("print('3\\n7')", SUM),
        ("print(3, 7)", SUM),
        ("print('3\\r\\n\\x0b7')", SUM),
        ("print('\\u0663')\nprint()", json.dumps({"inputs": ["1"], "outputs": ["three"]})),
        (
            (
                "import threading\nthreading.excepthook = None\n"
                "threading.Thread(target=lambda: 1 / 0).start()"
            ),
            SUM,
        ),
    ],
)
def test_cheats_and_mistakes_score_0(program: str, label: str) -> None:
    result = score(program, label)
    assert (result.score, result.status) == (0.0, "ok")


def test_what_is_no_program_or_hangs() -> None:
    assert (
        score_code(RewardSample("", "print(3)", SUM, "s", "stop", 9), PARAMS).status == "malformed"
    )
    cut = RewardSample("", f"```python\n{ADDS}\n```", SUM, "s", "length", 9)
    assert score_code(cut, PARAMS).status == "malformed"
    assert score("while True: pass", SUM) == RewardResult(0.0, "timeout", {"passed": 0.0})
    half = "a = sys.stdin.read().split()\nwhile a[0] == '1': pass\nprint(7)"
    assert score(half, SUM, SHARE) == RewardResult(0.5, parts={"passed": 0.5}), (
        "a fresh sandbox after the first test"
    )


WRONG = [{"inputs": ["1"], "outputs": [one]} for one in (None, {}, "9" * (1 << 20) + "9")]


@pytest.mark.parametrize(
    "label",
    [
        *map(json.dumps, WRONG),
        "",
        "[]",
        "{}",
        '{"inputs": ["1"], "outputs": []}',
        '"x"',
        '[{"input": "1"}]',
    ],
)
def test_labels_that_hold_no_tests(label: str) -> None:
    assert score(ADDS, label).status == "masked:bad_label"


def test_a_label_is_cut_to_max_tests() -> None:
    params = CodeParams(test_timeout_s=1.0, max_tests=1)
    assert score("print(3)", SUM, params).score == 1.0
    get_process_sandbox(params).close()
    assert len(parse_code_tests(SUM, "").cases) == 2


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        (" 3 \n\n", "3", True),
        ("3.0", "3", True),
        ("1e1 2", "10 2.00", True),
        ("3.0000001", "3", False),
        ("3\n4", "4\n3", False),
        ("Yes", "YES", False),
        ("", "", True),
        ("", "0", False),
        ("nan", "nan", True),
        ("sNaN", "3", False),
        ("1 x", "1.0 x", False),
    ],
)
def test_printed_text(printed: str, expected: str, same: bool) -> None:
    """By the rules of LiveCodeBench, worked out by hand."""
    assert is_same_output(printed, expected, "exact") is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (3.0, 3, True),
        (True, 1, False),
        (1, True, False),
        (False, False, True),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ([], [None], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, None, True),
        (None, 0, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 1.0, False),
    ],
)
def test_values(found: object, expected: object, same: bool) -> None:
    assert is_same_value(found, expected, "exact") is same


def test_too_few_layers_are_refused_unless_asked_for() -> None:
    with pytest.raises(
        ValueError, match=r"too few layers .*in force: none.*the network.*allow_open: true"
    ):
        LocalSandbox(SandboxSettings(layers=()), 1.0).start_guardian()
    open_one = LocalSandbox(SandboxSettings(layers=(), allow_open=True), 1.0)
    with open_one.open_session(SandboxProgram("print(input())")) as session:
        assert session.run_program("hello").stdout == "hello\n"
    open_one.close()


def test_in_worker_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Through the pool, which ends what a killed worker's sandbox has started."""
    config = RewardConfig(
        name="code", params={"test_timeout_s": 1.0}, num_workers=2, timeout_s=20.0
    )
    samples = [
        sample(ADDS, SUM),
        sample("while True: pass", SUM),
        sample("print(3)", SUM),
        sample(DOUBLES, TWICE),
        *[sample(f"import no_such_module\n{ADDS}", SUM)] * 2,
    ]
    with make_reward_scorer(config, tmp_path / "log") as scorer:
        results = scorer(samples)
    assert [(r.score, r.status) for r in results] == [
        (1.0, "ok"),
        (0.0, "timeout"),
        (0.0, "ok"),
        (1.0, "ok"),
        (0.0, "ok"),
        (0.0, "ok"),
    ]
    [hint] = [text for text in caplog.messages if "no_such_module" in text]
    assert hint.endswith(
        "(now none). Install it and name it there if answers may use it. (score 0)"
    ), "a hint is logged once"
    assert (
        caplog.messages[0].startswith("sandbox: ") and "limits are in force" in caplog.messages[0]
    )


class Server(BaseHTTPRequestHandler):
    """Both protocols, over a real local sandbox. Every third request is answered by a 503."""

    sandbox: LocalSandbox
    bodies: list[dict[str, Any]] = []  # noqa: RUF012
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.bodies.append(body)
            if len(self.bodies) % 3 == 0:
                self.send_error(503)
                return
            with self.sandbox.open_session(SandboxProgram(body["code"])) as session:
                result = session.run_program(body["stdin"])
        is_slow = result.ending == "timeout"
        run = {"stdout": result.stdout, "stderr": result.stderr}
        fusion = {
            "status": "Success" if result.is_success else "Failed",
            "run_result": {
                "status": "TimeLimitExceeded" if is_slow else "Finished",
                "return_code": result.exit_code,
                **run,
            },
        }
        plain = {"ending": result.ending, "code": result.exit_code, **run}
        answer = json.dumps(fusion if self.path == "/run_code" else plain).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    Server.sandbox = LocalSandbox(SandboxSettings(), 1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    Server.sandbox.close()


@pytest.mark.parametrize(("path", "protocol"), [("/run_code", "sandbox_fusion"), ("/run", "plain")])
def test_a_server(server: str, path: str, protocol: Any) -> None:
    params = CodeParams(server=RewardEndpoint(server + path), protocol=protocol, test_timeout_s=1.0)
    digits = "7" * 6000
    long_label = f'{{"fn_name": "f", "inputs": [[{digits}]], "outputs": [[{digits}, 0.3, [2, 1]]]}}'
    for program, label, right, status in (
        (ADDS, SUM, 1.0, "ok"),
        (DOUBLES, TWICE, 1.0, "ok"),
        ("exit(0)", SUM, 0.0, "ok"),
        ("def f(x): return (x, 0.1 + 0.2, {1, 2})", long_label, 1.0, "ok"),
        ("def f(x): return (x + 1, 0.1 + 0.2, {1, 2})", long_label, 0.0, "ok"),
        ("def f(x): return 1j", long_label, 0.0, "ok"),
        ("while True: pass", SUM, 0.0, "timeout"),
    ):
        result = score(program, label, params)
        assert (result.score, result.status) == (right, status), program
    hint = score("import no_such_module", SUM, params).error
    assert "imports no_such_module, which the sandbox server" in hint
    assert {"run_timeout", "memory_limit_MB", "language"} <= Server.bodies[
        -1
    ].keys() or protocol == "plain"


def test_programs_of_a_server_write_integers_of_any_length() -> None:
    """The prelude lifts Python's limit, wherever the server runs it."""
    code = insert_prelude("from __future__ import annotations\nprint(len(str(2**20000)))")
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "6021\n"


def test_a_server_that_is_down_or_refuses_is_not_the_policys_fault(server: str) -> None:
    down = CodeParams(server=RewardEndpoint("http://127.0.0.1:9/run_code", patience_s=0.3))
    assert score(ADDS, SUM, down).status == "masked:sandbox"
    assert "gave no answer in 0.3 s" in score(ADDS, SUM, down).error

"""Worker processes: whatever a sample does to them, it and all others get the status that
they have earned.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import RewardConfig, RewardTermConfig
from rlhf_megatron.data.data_rows import parse_prompt_row
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.service.reward_scorer import (
    RewardErrorRateError,
    RewardScorer,
    check_rewards_load,
    make_reward_scorer,
)

FUNCTIONS = SUPPORT / "reward_functions.py"


def config(function: str = "behave", **settings: Any) -> RewardConfig:
    params = {"path": f"{FUNCTIONS}:{function}"}
    settings = {"num_workers": 3, "timeout_s": 0.5, "max_error_rate": 1.0, **settings}
    return RewardConfig(name="function", params=params, **settings)


def sample(response: str, label: str = "7", **extra: Any) -> RewardSample:
    return RewardSample("", response, label, "test", "stop", 1, json.dumps(extra) if extra else "")


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardScorer]:
    with make_reward_scorer(config(), tmp_path_factory.mktemp("scorer") / "rewards.log") as scorer:
        yield scorer


def statuses(scorer: RewardScorer, *samples: RewardSample) -> list[str]:
    return [result.status for result in scorer(samples)]


def test_results_are_in_order(scorer: RewardScorer) -> None:
    results = scorer([sample(str(i % 10)) for i in range(400)])
    assert [result.score for result in results] == [float(i % 10 == 7) for i in range(400)]
    assert {result.status for result in results} == {"ok"}


@pytest.mark.parametrize("how", ["sleep", "stubborn sleep", "burn"])
def test_a_hanging_sample_costs_its_limit_and_no_neighbour(scorer: RewardScorer, how: str) -> None:
    start = time.monotonic()
    samples = [sample("7"), sample(how), *(sample("7") for _ in range(40))]
    results = scorer(samples)
    assert results[1] == RewardResult(0.0, "timeout", {"function": 0.0})
    assert all(result.score == 1.0 for i, result in enumerate(results) if i != 1)
    assert time.monotonic() - start < 300, (
        "burning shares the CPU with whatever else runs on this machine"
    )


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("raise", "masked:KeyError"),
        ("recurse", "masked:RecursionError"),
        ("exit", "masked:SystemExit"),
        ("memory", "masked:MemoryError"),
        ("segfault", "masked:worker_died"),
        ("kill", "masked:worker_died"),
    ],
)
def test_what_is_not_the_policys_fault_is_masked(
    scorer: RewardScorer, response: str, status: str
) -> None:
    assert statuses(scorer, sample("7"), sample(response), *[sample("7")] * 30) == [
        "ok",
        status,
        *["ok"] * 30,
    ]


def test_a_pattern_that_searches_for_ever_hangs_nobody(tmp_path: Path) -> None:
    """No pattern of a user runs in the controller, which nothing could end."""
    endless = {"pattern": "((?:a+)+)b"}
    term = RewardTermConfig("format", params=endless)
    rewards = RewardConfig(
        name="exact_match", params=endless, terms=(term,), num_workers=2, timeout_s=0.3
    )
    samples = [sample("a" * 64), sample("ab", "a"), sample("ab", "b")]
    with make_reward_scorer(rewards, tmp_path / "log") as scorer:
        assert [(r.score, r.status) for r in scorer(samples)] == [
            (0.0, "timeout"),
            (2.0, "ok"),
            (1.0, "ok"),
        ]


def test_what_a_worker_leaves_behind_ends_too(scorer: RewardScorer, tmp_path: Path) -> None:
    """A child that would sleep for an hour, and holds the worker's socket open."""
    pids = tmp_path / "pids"
    assert statuses(scorer, sample("child", pids=str(pids)), sample("7")) == [
        "masked:worker_died",
        "ok",
    ]
    left = [int(pid) for pid in pids.read_text().split()]
    assert len(left) == 2, "it was tried once more"
    await_that(lambda: not any(map(is_running, left)), f"of {left} some are left")


def test_a_forked_child_that_comes_back_shifts_no_score(scorer: RewardScorer) -> None:
    samples = [
        sample("fork" if i % 3 == 0 else "garbage", number=i, value=str(i)) for i in range(60)
    ]
    for _ in range(2):  # nothing is left for the next batch
        results = scorer(samples)
        assert [(result.score, result.status) for result in results] == [
            (float(i), "ok") for i in range(60)
        ]


@pytest.mark.parametrize(
    "written",
    [
        "\n",
        "\xff\xfe\n",
        "[]\n",
        "x",
        "[" * 100_000 + "\n",
        '[{"score": 1, "status": "ok"}, false]\n',
    ]
    + ['{"token": "", "number": 0, "result": {"score": 9.0}, "is_last": false}\n'],
)
def test_what_a_reward_writes_into_its_socket_is_no_reply(
    scorer: RewardScorer, written: str
) -> None:
    results = scorer([sample("write", bytes=written), *(sample(str(i % 10)) for i in range(30))])
    assert (
        results[0].status == "masked:worker_died"
        and "something else than its reply" in results[0].error
    )
    assert [(result.score, result.status) for result in results[1:]] == [
        (float(i % 10 == 7), "ok") for i in range(30)
    ]


@pytest.mark.parametrize("end", ["close", "kill the controller"])
def test_a_daemon_of_a_reward_ends_with_the_pool(tmp_path: Path, end: str) -> None:
    pids = tmp_path / "pids"
    if end == "close":
        with make_reward_scorer(config(), tmp_path / "log") as scorer:
            scorer([sample("daemon", pids=str(pids))])
            assert is_running(int(pids.read_text())), "it outlives its sample"
    else:
        code = f"""
import os, sys
sys.path[:0] = [{str(SUPPORT)!r}, {str(Path(__file__).parent)!r}]
from test_rewards_pool import Path, config, make_reward_scorer, sample
with make_reward_scorer(config(), Path({str(tmp_path / "log")!r})) as scorer:
    scorer([sample("daemon", pids={str(pids)!r})])
    os.kill(os.getpid(), 9)
"""
        subprocess.run([sys.executable, "-c", code])
    await_that(lambda: not is_running(int(pids.read_text())), "the daemon is left")


def test_the_log_is_bounded(scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_megatron.rewards.service.worker_processes.MAX_LOG_BYTES", 2000)
    for _ in range(5):
        scorer([sample("print")] * 50)
    scorer([sample("7")])
    log = scorer.log_path.read_text()
    assert 900 < len(log) < 4000 and log.startswith("[what was before is left out]\n")


def test_a_masked_result_tells_why(scorer: RewardScorer) -> None:
    raised, died = scorer([sample("raise"), sample("kill")])
    assert (
        raised.error.endswith("KeyError: 'no such thing'") and "reward_functions.py" in raised.error
    )
    assert died.error == (
        "The worker process was ended by signal 9 at this sample, and one before it died at it too."
    )


@pytest.mark.parametrize(
    "value",
    [
        "float('nan')",
        "float('inf')",
        "1e30",
        "10**5000",
        "None",
        "'1'",
        "[1]",
        "{}",
        "{'score': '1'}",
        "object()",
    ]
    + ["{'score': 1.0, 'depth': object()}", "{'score': 1.0, 'depth': float('nan')}", "b'1'", "1j"],
)
def test_garbage_is_masked(scorer: RewardScorer, value: str) -> None:
    assert statuses(scorer, sample("garbage", value=value), sample("7")) == [
        "masked:bad_result",
        "ok",
    ]


@pytest.mark.parametrize(
    ("value", "score", "parts"),
    [
        ("True", 1.0, {}),
        ("3", 3.0, {}),
        ("-0.25", -0.25, {}),
        ("__import__('numpy').float32(0.5)", 0.5, {}),
        ("__import__('numpy').array([2])", 2.0, {}),
        ("__import__('decimal').Decimal(1) == 1", 1.0, {}),
        ("{'score': 0.5, 'pred': None, 'steps': [1], 'told': {}, 'text': 'x'}", 0.5, {}),
        (
            "{'score': 2, 'depth': 3, 'is_short': True}",
            2.0,
            {"function/depth": 3.0, "function/is_short": 1.0},
        ),
    ],
)
def test_scores_of_all_kinds(
    scorer: RewardScorer, value: str, score: float, parts: dict[str, float]
) -> None:
    [result] = scorer([sample("garbage", value=value)])
    assert (result.score, result.status, result.parts) == (
        score,
        "ok",
        {"function": score, **parts},
    )


# labels of rows, which verl gives to its functions so
VALUES = [{"target": ["a", 1]}, ["a"], '["a"]', 7, "7"]


def test_a_function_that_was_written_for_verl(tmp_path: Path) -> None:
    with make_reward_scorer(config("compute_score", num_workers=1), tmp_path / "log") as scorer:
        right, wrong = scorer([sample("7", extra_info={"index": 3}, ability="x"), sample("7")])
        values = [
            parse_prompt_row({"prompt": "?", "answer": value}, "prompt", "answer", "s", "o")
            for value in VALUES
        ]
        as_they_are = scorer(
            [replace(sample(repr(VALUES)), label=row.label, extra=row.extra) for row in values]
        )
    assert right == RewardResult(1.0, "ok", {"function": 1.0, "function/acc": 1.0})
    assert wrong == RewardResult(-1.0, "ok", {"function": -1.0, "function/acc": 0.0})
    assert [result.parts["function/place"] for result in as_they_are] == [0, 1, 2, 3, 4]


def test_an_async_function(tmp_path: Path) -> None:
    with make_reward_scorer(config("asynchronous", num_workers=1), tmp_path / "log") as scorer:
        found = scorer([sample("1"), sample("raise"), sample("0.5")])
    assert [(r.status, r.score) for r in found] == [
        ("ok", 1.0),
        ("masked:KeyError", 0.0),
        ("ok", 0.5),
    ]


def test_a_function_that_asks_a_server_keeps_to_its_limits_over_all_workers(tmp_path: Path) -> None:
    """And a sample that waits too long for it is not the policy's fault."""
    server = {"url": f"http://reward/{tmp_path.name}", "concurrency": 1}
    one = config("alone")
    with make_reward_scorer(
        replace(one, params=one.params | {"server": server}), tmp_path / "log"
    ) as scorer:
        found = scorer([sample(str(number), label=str(tmp_path / "file")) for number in range(30)])
    assert [result.score for result in found] == [1.0] * 30
    one = config("behave")
    server = {"url": "http://reward", "timeout_s": 0.3, "patience_s": 0.3}
    with make_reward_scorer(
        replace(one, params=one.params | {"server": server}), tmp_path / "log"
    ) as scorer:
        assert [r.status for r in scorer([sample("sleep"), sample("7")])] == [
            "masked:endpoint",
            "ok",
        ]


@pytest.mark.long
def test_who_waits_for_a_turn_is_not_late_while_others_have_theirs(tmp_path: Path) -> None:
    """Ten workers, one at a time: the last waits for 8 s, of 6 that a server may take."""
    server = {
        "url": f"http://reward/{tmp_path.name}",
        "concurrency": 1,
        "timeout_s": 3.0,
        "patience_s": 3.0,
    }
    one = config("alone", num_workers=10)
    params = one.params | {"server": server, "kwargs": {"seconds": 0.9}}
    with make_reward_scorer(replace(one, params=params), tmp_path / "log") as scorer:
        found = scorer([sample(str(number), label=str(tmp_path / "file")) for number in range(10)])
    assert [(result.status, result.score) for result in found] == [("ok", 1.0)] * 10


def test_a_sample_whose_worker_died_is_tried_once_more(
    scorer: RewardScorer, tmp_path: Path
) -> None:
    [result] = scorer([sample("die once", marker=str(tmp_path / "marker"))])
    assert (result.score, result.status) == (1.0, "ok")


def test_all_kinds_at_once(scorer: RewardScorer) -> None:
    """Statuses and scores by position in a batch where one in eight goes wrong."""
    kinds = {
        "sleep": "timeout",
        "raise": "masked:KeyError",
        "kill": "masked:worker_died",
        "memory": "masked:MemoryError",
    }
    samples = [sample((list(kinds)[i // 8 % 4]) if i % 8 == 3 else str(i % 10)) for i in range(160)]
    for one, result in zip(samples, scorer(samples), strict=True):
        expected = kinds.get(one.response, "ok")
        assert result.status == expected and result.score == (1.0 if one.response == "7" else 0.0)


def test_a_worker_inherits_nothing(scorer: RewardScorer) -> None:
    """Not the controller's standard input, and no socket but its own."""
    stdin, files, interrupted = scorer([sample("stdin"), sample("files"), sample("interrupt")])
    assert stdin.score == 1.0 and files.parts["function/sockets"] == 1
    assert (interrupted.score, interrupted.status) == (0.5, "ok"), (
        "Ctrl-C is the controller's business"
    )


def test_what_a_reward_prints_goes_to_the_log(scorer: RewardScorer) -> None:
    scorer([sample("print")])
    assert "a word from the reward" in scorer.log_path.read_text()


def test_workers_stay_between_calls_and_never_exceed_their_number(scorer: RewardScorer) -> None:
    pids = {
        result.parts["function/pid"] for _ in range(3) for result in scorer([sample("pid")] * 50)
    }
    assert 1 <= len(pids) <= 3


def test_idle_workers_that_died_are_replaced(scorer: RewardScorer) -> None:
    for result in scorer([sample("pid")] * 50):
        try:
            os.kill(int(result.parts["function/pid"]), signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert statuses(scorer, *[sample("7")] * 50) == ["ok"] * 50


def test_a_batch_that_was_interrupted_leaves_nothing(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Ctrl-C while all workers sleep; the next batch gets its own results."""
    # a job in the background has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with make_reward_scorer(config(timeout_s=600.0, num_workers=2), tmp_path / "log") as scorer:
        scorer([sample("7")])
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            scorer([sample("sleep"), sample("sleep")])
        assert [result.score for result in scorer([sample("7"), sample("8"), sample("7")])] == [
            1.0,
            0.0,
            1.0,
        ]


def test_parameters_that_are_too_long_to_send() -> None:
    params = {"path": f"{FUNCTIONS}:with_parts", "kwargs": {"scale": "x" * 200_000}}
    with pytest.raises(
        ValueError, match=r"the parameters of the rewards have 200\d\d\d bytes, at most 131072"
    ):
        check_rewards_load(RewardConfig(name="function", params=params))


def test_the_template_is_replaced(scorer: RewardScorer) -> None:
    [result] = scorer([sample("pid")])
    os.kill(int(result.parts["function/parent"]), signal.SIGKILL)
    await_that(
        lambda: not is_running(int(result.parts["function/pid"])), "workers end with the template"
    )
    assert statuses(scorer, *[sample("7")] * 50) == ["ok"] * 50


def await_that(is_so: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_starved_sample_is_not_taken_for_a_hanging_one(tmp_path: Path) -> None:
    """On one CPU with eight busy processes, 0.4 s of work take seconds; the limit is 1 s."""
    cpu = min(os.sched_getaffinity(0))
    burn = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"]
    # a session has one share of a CPU
    burners = [subprocess.Popen(burn, start_new_session=True) for _ in range(8)]
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [cpu])  # of this process and of those that it starts
        with make_reward_scorer(config(timeout_s=1.0, num_workers=1), tmp_path / "log") as scorer:
            os.sched_setaffinity(0, before)
            scorer([sample("7")])
            start = time.monotonic()
            assert statuses(scorer, sample("cpu", seconds=0.4)) == ["ok"]
            if time.monotonic() - start <= 1.0:
                pytest.skip("this machine has not starved it: nothing is shown")
    finally:
        os.sched_setaffinity(0, before)
        for burner in burners:
            burner.kill()
            burner.wait()


def test_everything_ends_with_the_controller(tmp_path: Path) -> None:
    """Killed while one worker sleeps deaf to signals and another burns."""
    code = f"""
import sys, threading, time
sys.path[:0] = [{str(SUPPORT)!r}, {str(Path(__file__).parent)!r}]
from test_rewards_pool import config, make_reward_scorer, sample
from pathlib import Path
with make_reward_scorer(config(timeout_s=600.0), Path({str(tmp_path / "log")!r})) as scorer:
    pool = scorer._worker_pool
    [result] = scorer([sample("pid")])
    def tell():
        while len(pool.workers) < 2 or not all(worker.task_numbers for worker in \
pool.workers.values()):
            time.sleep(0.02)
        print(pool.template_process.pid, *pool.workers, flush=True)
    threading.Thread(target=tell).start()
    scorer([sample("stubborn sleep"), sample("burn")])
"""
    controller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert controller.stdout is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) >= 3 and all(map(is_running, pids))
    controller.kill()
    controller.wait()
    await_that(lambda: not any(map(is_running, pids)), f"of {pids} some are left")


def test_closing_ends_all_processes(tmp_path: Path) -> None:
    with make_reward_scorer(config(), tmp_path / "log") as scorer:
        [result] = scorer([sample("pid")])
        pids = [int(result.parts["function/pid"]), int(result.parts["function/parent"])]
        assert all(map(is_running, pids))
    await_that(lambda: not any(map(is_running, pids)), "workers end with the scorer")


def test_too_many_failures_stop_the_run(tmp_path: Path) -> None:
    with make_reward_scorer(config(max_error_rate=0.1), tmp_path / "rewards.log") as scorer:
        scorer([sample("raise"), *[sample("7")] * 9])
        with pytest.raises(RewardErrorRateError) as error:
            scorer([sample("raise", "1/2"), sample("raise"), sample("kill"), *[sample("7")] * 17])
    told = str(error.value)
    assert "3 of 20 rewards failed (15.0%), more than reward.max_error_rate (0.1)" in told
    assert (
        "Most of them: masked:KeyError (2). One sample, of the source 'test': label '1/2',"
        " response 'raise'."
    ) in told
    assert (
        "KeyError: 'no such thing'" in told
        and f"{tmp_path / 'rewards.log'} has what it printed" in told
    )


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (f"{FUNCTIONS}:absent", "the module has no 'absent'; its functions are is_right, "),
        (f"{FUNCTIONS}:NUMBER", "'NUMBER' is a int, and must be a function"),
        (
            f"{FUNCTIONS}:needs_more",
            "the function needs judge, which a sample does not have; it may take prompt, ",
        ),
        (f"{FUNCTIONS}x.py:is_right", "reward_functions.pyx.py is not a file"),
        ("no_such_package.rewards:f", "there is no module 'no_such_package'"),
        ("json.nothing:f", "there is no module 'json.nothing'"),
    ],
)
def test_paths_are_checked_before_a_run(path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_rewards_load(RewardConfig(name="function", params={"path": path}))
    [told] = error.value.problems
    assert told.startswith("reward.params: path (") and problem in told


def test_a_module_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import a_package_of_nobody\n\ndef score(response):\n    return 0\n"
    )
    with pytest.raises(ConfigError) as error:
        check_rewards_load(
            RewardConfig(name="function", params={"path": f"{tmp_path / 'mine.py'}:score"})
        )
    told = str(error.value)
    assert (
        "reward (function) cannot be loaded" in told
        and "No module named 'a_package_of_nobody'" in told
    )


def test_a_good_path_passes_and_a_dotted_path_does_too() -> None:
    check_rewards_load(config("with_parts"))
    check_rewards_load(
        RewardConfig(name="function", params={"path": "json:dumps", "kwargs": {"obj": 1}})
    )

"""samples.jsonl, mismatch.jsonl, and what a run directory holds when its process is killed."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from places import SUPPORT
from scheduler_samples import train_batch

from rlhf_megatron.algorithms.log_prob_mismatch import HISTOGRAM_EDGES, make_difference_histogram
from rlhf_megatron.controller.observe.line_file import LineFile, replace_non_finite
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    choose_logged_samples,
    make_logged_samples,
)
from rlhf_megatron.controller.observe.metrics.mismatch_check import make_mismatch_step
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def spell(token_ids: Sequence[int]) -> str:
    return "".join(f"<{i}>" for i in token_ids)


def test_best_and_worst_by_reward_and_no_sample_twice() -> None:
    batch = train_batch(10)  # sample i has reward i
    chosen = choose_logged_samples(1, batch, max_samples=6, seed=0)
    assert [(i, kind) for i, kind in chosen if kind != "random"] == [
        (9, "best"),
        (8, "best"),
        (0, "worst"),
        (1, "worst"),
    ]
    assert [kind for _, kind in chosen][4:] == ["random"] * 2
    assert len({i for i, _ in chosen}) == 6


@pytest.mark.parametrize(
    ("count", "kinds"),
    [
        (0, ""),
        (1, "b"),
        (2, "bw"),
        (3, "bwr"),
        (4, "bbwr"),
        (5, "bbwwr"),
        (6, "bbwwrr"),
        (7, "bbbwwrr"),
    ],
)
def test_a_third_of_each_kind(count: int, kinds: str) -> None:
    assert (
        "".join(kind[0] for _, kind in choose_logged_samples(1, train_batch(10), count, seed=0))
        == kinds
    )


def test_the_lot_depends_on_seed_and_step_only() -> None:
    # all alike: everything is chosen by lot
    batch = replace(train_batch(40), rewards=torch.zeros(40))
    assert choose_logged_samples(3, batch, 6, seed=1) == choose_logged_samples(3, batch, 6, seed=1)
    others = [
        choose_logged_samples(4, batch, 6, seed=1),
        choose_logged_samples(3, batch, 6, seed=2),
    ]
    assert all(
        [i for i, _ in other] != [i for i, _ in choose_logged_samples(3, batch, 6, seed=1)]
        for other in others
    )


def test_a_masked_sample_is_neither_best_nor_worst_and_has_no_reward() -> None:
    statuses = tuple("masked:aborted" if i in (0, 5) else "ok" for i in range(6))
    batch = replace(
        train_batch(6), rewards=torch.tensor([-9.0, 1, 2, 3, 4, 99.0]), reward_statuses=statuses
    )
    found = make_logged_samples(2, batch, max_samples=6, seed=0)
    assert [(s.prompt, s.kind) for s in found[:4]] == [
        ("4", "best"),
        ("3", "best"),
        ("1", "worst"),
        ("2", "worst"),
    ]
    masked = {s.prompt: s for s in found[4:]}
    assert set(masked) == {"0", "5"}
    assert all(
        (s.kind, s.reward, s.status) == ("random", None, "masked:aborted") for s in masked.values()
    )


def test_a_sample_as_it_stands_in_the_file(tmp_path: Path) -> None:
    parts = {"format": torch.tensor([1.0, 0.5]), "exact": torch.tensor([0.25, float("nan")])}
    batch = replace(train_batch(2), reward_parts=parts, rewards=torch.tensor([0.0, float("inf")]))
    with (
        RunTracker(tmp_path, ("jsonl",), 1, RunFacts(num_samples_logged=2)) as tracker,
        tracker.track_step(7),
    ):
        tracker.set_step_batch(batch, {})
    best, worst = lines(tmp_path / "samples.jsonl")
    assert best == {
        "step": 7,
        "kind": "best",
        "prompt": "1",
        "response": "1",
        "label": "1",
        "source": "1",
        "reward": None,
        "status": "ok",
        "parts": {"format": 0.5},
        "finish_reason": "stop",
        "num_tokens": 2,
        "policy_version": 1,
        "version_spans": [],
        "num_cached_tokens": None,
        "num_retractions": None,
        "episode_end": None,
        "talk": [],
    }  # a part that this sample has not is left out
    assert (worst["reward"], worst["parts"], worst["num_tokens"]) == (
        0.0,
        {"format": 1.0, "exact": 0.25},
        1,
    )


def test_what_engines_tell_of_a_sample_is_in_the_file(tmp_path: Path) -> None:
    batch = replace(
        train_batch(2),
        version_spans=((), ((1, 0, 1), (2, 1, 2))),
        num_cached_tokens=torch.tensor([0, 1]),
        num_retractions=torch.tensor([0, 3]),
    )
    with (
        RunTracker(tmp_path, ("jsonl",), 1, RunFacts(num_samples_logged=2)) as tracker,
        tracker.track_step(1),
    ):
        tracker.set_step_batch(batch, {})
    found = {row["prompt"]: row for row in lines(tmp_path / "samples.jsonl")}
    assert found["1"]["version_spans"] == [[1, 0, 1], [2, 1, 2]]
    assert (found["1"]["num_cached_tokens"], found["1"]["num_retractions"]) == (1, 3)
    assert (
        found["0"]["version_spans"],
        found["0"]["num_cached_tokens"],
        found["0"]["num_retractions"],
    ) == ([], 0, 0)
    (step,) = lines(tmp_path / "metrics.jsonl")
    assert step["rollout/cached_token_share"] == 0.5 and step["rollout/num_retractions"] == 3.0


def test_no_number_is_null() -> None:
    assert replace_non_finite(
        {"a": (1.5, math.inf, -math.inf), "b": {"c": math.nan, "d": "NaN", "e": True}}
    ) == {
        "a": [1.5, None, None],
        "b": {"c": None, "d": "NaN", "e": True},
    }


def test_edges_are_quarters_of_decades() -> None:
    assert HISTOGRAM_EDGES[0] == 0 and HISTOGRAM_EDGES[1] == 1e-8 and HISTOGRAM_EDGES[-1] == 10.0
    assert (
        list(HISTOGRAM_EDGES) == sorted(set(HISTOGRAM_EDGES))
        and len(HISTOGRAM_EDGES) == 1 + 9 * 4 + 1
    )
    assert HISTOGRAM_EDGES[HISTOGRAM_EDGES.index(1e-3) : HISTOGRAM_EDGES.index(1e-2) + 1] == (
        1e-3,
        1.778e-3,
        3.162e-3,
        5.623e-3,
        1e-2,
    )


def test_every_difference_is_in_the_bin_that_begins_at_or_below_it() -> None:
    values = [0.0, 5e-9, 1e-8, 1.5e-8, 2e-3, 9.99, 10.0, 400.0, math.inf]
    found = make_difference_histogram(torch.tensor(values, dtype=torch.float64))
    filled = {HISTOGRAM_EDGES[i]: count for i, count in enumerate(found.counts) if count}
    assert (
        filled == {0.0: 2, 1e-8: 2, 1.778e-3: 1, 5.623: 4}
        and len(found.counts) == len(HISTOGRAM_EDGES) - 1
    )
    assert (found.num_tokens, found.mean, found.max) == (9, math.inf, math.inf)
    hundred = make_difference_histogram(torch.arange(1, 201, dtype=torch.float64) / 100)
    assert (hundred.p99, hundred.max) == (1.98, 2.0) and hundred.mean == pytest.approx(1.005)


def mismatched():
    """Samples of 2, 3, 4, 5 tokens, the first is the prompt; token t differs by t / 100, but for
    the second's last.
    """
    batch = train_batch(4)
    differences = torch.arange(14) / 100.0
    differences[4] = float("nan")
    return replace(
        batch,
        token_ids=torch.arange(14) + 50,
        old_log_probs=batch.rollout_log_probs + differences * batch.response_mask,
        policy_versions=torch.tensor([1, 1, 2, 2]),
        finish_reasons=("stop", "length", "stop", "stop"),
    )


def test_groups_are_versions_and_finish_reasons() -> None:
    record = make_mismatch_step(5, mismatched(), spell)
    assert record is not None and record.step == 5
    groups = {(g.policy_version, g.finish_reason): g for g in record.groups}
    assert list(groups) == [(1, "length"), (1, "stop"), (2, "stop")]
    assert {key: g.num_tokens for key, g in groups.items()} == {
        (1, "length"): 2,
        (1, "stop"): 1,
        (2, "stop"): 7,
    }
    last = groups[2, "stop"]  # tokens 6, 7, 8 and 10 .. 13
    assert last.mean == pytest.approx((6 + 7 + 8 + 10 + 11 + 12 + 13) / 700, rel=1e-5)
    assert last.max == pytest.approx(0.13, rel=1e-5) and last.p99 == last.max
    assert groups[1, "length"].max == math.inf  # tokens 3 and 4, the second is not a number
    assert (
        sum(last.counts) == 7
        and last.counts[HISTOGRAM_EDGES.index(0.1)] == 3
        and last.counts[HISTOGRAM_EDGES.index(0.05623)] == 4
    )


def test_a_sample_of_several_versions_is_told_apart_by_token() -> None:
    """The last sample, tokens 9 .. 13, went on with version 3 after its second response token."""
    batch = replace(mismatched(), version_spans=((), (), (), ((2, 0, 2), (3, 2, 4))))
    record = make_mismatch_step(5, batch, spell)
    assert record is not None
    assert [(g.policy_version, g.finish_reason, g.num_tokens) for g in record.groups] == [
        *((1, "length", 2), (1, "stop", 1)),
        *((2, "stop", 5), (3, "stop", 2)),  # tokens 6, 7, 8, 10, 11; 12, 13
    ]
    assert record.groups[-1].mean == pytest.approx(0.125, rel=1e-5)
    assert [t.policy_version for t in record.worst[1:4]] == [3, 3, 2]  # tokens 13, 12, 11


def test_worst_tokens_with_their_text() -> None:
    record = make_mismatch_step(5, mismatched(), spell)
    assert record is not None and len(record.worst) == 10
    worst, second = record.worst[:2]
    assert (worst.token, worst.position, worst.context, worst.sample_id) == (
        "<54>",
        1,
        "<52><53>",
        1,
    )
    assert worst.difference == math.inf and worst.finish_reason == "length"
    assert (second.token_id, second.token, second.position, second.sample_id) == (63, "<63>", 3, 3)
    assert second.context == "<59><60><61><62>" and second.policy_version == 2
    assert second.trainer - second.engine == pytest.approx(0.13, abs=1e-6)
    assert [t.token_id for t in record.worst[1:]] == [63, 62, 61, 60, 58, 57, 56, 53, 51]
    row = json.loads(json.dumps(replace_non_finite(asdict(record)), allow_nan=False))
    assert row["edges"] == list(HISTOGRAM_EDGES) and row["worst"][0]["difference"] is None
    assert set(row["groups"][0]) == {
        *("policy_version", "finish_reason", "counts", "num_tokens", "mean", "p99", "max"),
    }


def test_a_token_after_the_same_text_is_listed_once() -> None:
    batch = train_batch(3)
    batch = replace(
        batch,
        token_ids=torch.tensor(
            [7, 8] + [7, 8, 9] + [7, 8, 9, 5]
        ),  # each begins as the one before it
        old_log_probs=batch.rollout_log_probs
        + torch.tensor([0, 0.5] + [0, 0.4, 0.3] + [0, 0.6, 0.2, 0.1]),
    )
    record = make_mismatch_step(1, batch, spell)
    assert record is not None
    assert [(t.token_id, t.sample_id) for t in record.worst] == [(8, 2), (9, 1), (5, 2)]


def test_a_long_context_is_cut_at_its_beginning() -> None:
    batch = train_batch(1)
    batch = replace(
        batch,
        offsets=torch.tensor([0, 200]),
        token_ids=torch.arange(200) + 1000,
        response_mask=torch.arange(200) == 199,
        rollout_log_probs=torch.zeros(200),
        old_log_probs=torch.ones(200),
    )
    record = make_mismatch_step(1, batch, spell)
    assert record is not None
    (token,) = record.worst
    assert (
        token.context.endswith("<1197><1198>") and len(token.context) == 80 and token.position == 0
    )


def test_nothing_is_recorded_without_the_trainers_log_probs() -> None:
    assert make_mismatch_step(1, replace(train_batch(2), old_log_probs=None), spell) is None
    silent = replace(train_batch(2), response_mask=torch.zeros(5, dtype=torch.bool))
    assert make_mismatch_step(1, silent, spell) is None


def test_a_line_that_was_cut_off_is_dropped_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a": ')
    file = LineFile(path)
    file.write_row({"a": 3})
    assert [row["a"] for row in lines(path)] == [1, 2, 3]  # before it is closed
    file.close()
    path.write_bytes(b'{"a": ')
    LineFile(path).close()
    assert path.read_bytes() == b""


KILLED = """
import sys, os
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from scheduler_samples import train_batch
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker
tracker = RunTracker(Path(sys.argv[1]), ("jsonl", "tensorboard"), 10**6, \
RunFacts(decode_tokens=str, \
settings={"a": 1}))
for step in range(1, 10**6):
    with tracker.track_step(step):
        with tracker.time_stage("update"):
            pass
        said = {"actor/num_epochs": 1.0, "rollout/num_samples": 64.0}
        tracker.set_step_batch(train_batch(64), said)
    print(step, flush=True)
"""


def test_files_are_whole_up_to_the_last_line_after_kill_9(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(SUPPORT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        done = 0
        while done < 5:
            done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        done = max([done, *map(int, process.stdout.read().split())])
    assert process.returncode == -signal.SIGKILL
    for name, rows_a_step in (("metrics", 1), ("samples", 6), ("mismatch", 1)):
        text = (tmp_path / f"{name}.jsonl").read_text()
        whole = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        steps = [row["step"] for row in whole]
        expected = [step for step in range(1, done + 2) for _ in range(rows_a_step)]
        assert steps == expected[: len(steps)] and len(steps) >= done * rows_a_step, (
            f"{name}: {len(steps)}"
        )
    trace = (tmp_path / "trace.json").read_text()
    events = json.loads(trace[: trace.rfind("},\n") + 1] + "]")
    found = [event["args"]["step"] for event in events if event["name"] == "update"]
    assert found[:done] == list(range(1, done + 1)) and len(found) <= done + 1
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard" / "run"))
    board.Reload()  # raises nothing, whatever its last record is like
    assert "_hparams_/session_start_info" in board.summary_metadata

"""Whole runs whose engines work beside the trainer: the real program, engine and trainer, in one
process a run.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_tools import write_config, write_rows
from forked_runs import Attempt, ForkServer, asked_seeds

from rlhf_megatron.controller.observe.metrics import metric_catalogue as metric_names
from rlhf_megatron.controller.observe.metrics.batch_metrics import sample_counts
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.data.seeds import derive_seed

pytestmark = pytest.mark.dist
STEPS = 5
SETTINGS: dict[str, Any] = {
    "trainer.deterministic": False,
    "trainer.save_freq": 0,
    "trainer.save_hf": False,
    "trainer.total_training_steps": STEPS,
    "algorithm.rollout_correction.preset": "decoupled_token_is",
    "actor.mini_batch_size": 4,
}
# an untrained policy seldom ends a response
LONG = {"warmup.max_steps": 0, "data.max_response_length": 48}
# an engine with a group at a time: one is always generated when a sync begins
SLOW = {"rollout.max_num_seqs": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("consoles")) as server:
        yield server


def make_config(directory: Path) -> Path:
    """4 prompts x 4 samples a step."""
    directory.mkdir()
    train = write_rows(directory / "train.jsonl", 64, seed=1)
    val = write_rows(directory / "val.jsonl", 20, seed=2)
    return write_config(
        directory, {"task": None, "train_files": [str(train)], "val_files": [str(val)]}
    )


def batches(run: Attempt) -> list[ScoredBatch]:
    recorder = RolloutRecorder(run.run_dir / "record")
    return [recorder.read_step(step) for step in range(1, STEPS + 1)]


def groups(batch: ScoredBatch) -> list[int]:
    return batch.group_ids[::4].tolist()


def steps_of(run: Attempt) -> list[dict[str, Any]]:
    return [row for row in run.rows() if row["kind"] == "step"]


def oldest(batch: ScoredBatch) -> int:
    assert batch.version_spans is not None
    first = batch.policy_versions.tolist()
    return min(
        version
        for spans, v in zip(batch.version_spans, first, strict=True)
        for version in [v, *(s[0] for s in spans)]
    )


def assert_sound(run: Attempt, max_lag: int) -> None:
    """Every prompt once, each step with its version, no sample older than the bound, all
    metrics listed.
    """
    assert run.code == 0, run.console
    rows = steps_of(run)
    found = batches(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    first = rows[0]["policy/version"] - 1
    assert [row["policy/version"] for row in rows] == [first + step for step in range(1, 6)]
    counts = Counter(number for batch in found for number in groups(batch))
    assert len(counts) == 20 and set(counts.values()) == {1}
    for step, (row, batch) in enumerate(zip(rows, found, strict=True), start=1):
        lag = first + step - 1 - oldest(batch)
        assert 0 <= lag <= max_lag and row["training/off_policy/trajectory_staleness/max"] == lag
        assert len(batch) == 16 and row["rollout/num_samples"] == 16
    unlisted = [key for row in rows for key in row if metric_names.find_metric(key) is None]
    assert set(unlisted) <= {"kind", "step"}
    assert rows[0]["training/rollout_log_probs_diff_max"] <= 1e-4


def test_streaming_has_the_log_probs_of_the_whole_batch(server: ForkServer, tmp_path: Path) -> None:
    """The first group is alone for a moment, and gets its log-probs meanwhile. A replay
    computes all at once.
    """
    config = make_config(tmp_path / "run")
    settings = {**SETTINGS, "schedule.name": "streaming"}
    run = server.train(
        config, settings, "--record", faults="delay@rollout.mid_generate:nth=1,seconds=1"
    )
    assert_sound(run, max_lag=0)
    assert [groups(batch) for batch in batches(run)] == [
        list(range(4 * i, 4 * i + 4)) for i in range(5)
    ]
    events = json.loads((run.run_dir / "trace.json").read_text())
    sizes = [
        event["args"]["num_samples"] for event in events if event.get("name") == "actor.log_probs"
    ]
    assert sizes[0] == 4 and sum(sizes) == 5 * 16, "an early piece, and nothing twice"
    again = server.train(
        config, settings, "--replay", str(STEPS), "--replay-from", str(run.run_dir)
    )
    assert again.code == 0, again.console
    replayed = steps_of(replace(again, run_dir=again.run_dir.with_name("tiny-replay")))
    for before, after in zip(steps_of(run), replayed, strict=True):
        for name in ("actor/loss", "actor/grad_norm", "actor/entropy", "training/rollout_kl"):
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name
        assert before["actor/grad_norm"] > 0


def test_one_step_off_is_one_step_off(server: ForkServer, tmp_path: Path) -> None:
    run = server.train(
        make_config(tmp_path / "run"), {**SETTINGS, "schedule.name": "one_step_off"}, "--record"
    )
    assert_sound(run, max_lag=1)
    first = steps_of(run)[0]["policy/version"] - 1
    versions = [set(batch.policy_versions.tolist()) for batch in batches(run)]
    assert versions == [{first}, {first}, {first + 1}, {first + 2}, {first + 3}]
    assert ["training/rollout_kl" in row for row in steps_of(run)] == [True] + [False] * 4


@pytest.mark.long
def test_asynchronous_goes_on_over_syncs(server: ForkServer, tmp_path: Path) -> None:
    """Long responses of an untrained policy: tokens of several versions stand in one sample."""
    settings = {
        **SETTINGS,
        **LONG,
        **SLOW,
        "schedule.name": "asynchronous",
        "schedule.params": {"max_lag": 2},
    }
    run = server.train(make_config(tmp_path / "run"), settings, "--record")
    assert_sound(run, max_lag=2)
    spans = [spans for batch in batches(run) for spans in batch.version_spans or ()]
    assert any(len({version for version, _, _ in of_sample}) > 1 for of_sample in spans)
    assert max(row["rollout/samples_of_several_versions"] for row in steps_of(run)) > 0


def log_probs_by_version(
    server: ForkServer, config: Path, run: Attempt, settings: dict[str, Any]
) -> dict[int, Any]:
    """Version -> transformers' model of its weights. A run from each checkpoint makes a step that
    changes nothing.
    """
    from transformers import AutoModelForCausalLM

    first = int(steps_of(run)[0]["policy/version"]) - 1
    found = {}
    for step in range(STEPS):
        checkpoint = run.run_dir / "checkpoints" / f"step_{step:06d}"
        probe = {
            "trainer.experiment_name": f"probe{step}",
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": str(checkpoint),
            "trainer.total_training_steps": step + 1,
            "trainer.val_before_train": False,
            "trainer.test_freq": 0,
            "trainer.save_hf": True,
            "actor.optim.lr": 1e-30,
            "schedule.name": "one_step_off",
            "schedule.params": {},
        }
        attempt = server.train(config, {**settings, **probe})
        assert attempt.code == 0, attempt.console
        found[first + step] = AutoModelForCausalLM.from_pretrained(
            attempt.run_dir / "hf", dtype=torch.float32
        )
    return found


@pytest.mark.long
def test_each_token_has_the_log_prob_of_its_version(server: ForkServer, tmp_path: Path) -> None:
    """Against transformers with the weights of that version, also where a sample has
    tokens of several.
    """
    config = make_config(tmp_path / "run")
    params = {"schedule.name": "asynchronous", "schedule.params": {"max_lag": 2}}
    saved = {"trainer.save_freq": 1, "trainer.max_ckpt_to_keep": 10, "actor.optim.lr": 5e-3}
    one_warm_up_step = {"warmup.max_steps": 1, "warmup.test_freq": 1}  # whose state is saved
    settings = {**SETTINGS, **LONG, **SLOW, **params, **saved, **one_warm_up_step}
    run = server.train(config, settings, "--record")
    assert_sound(run, max_lag=2)
    models = log_probs_by_version(server, config, run, settings)
    right = 0.0
    wrong = []
    num_mixed = 0
    for batch in batches(run):
        starts = batch.offsets.tolist()
        lengths = sample_counts(batch.response_mask, batch.offsets).tolist()
        for i, spans in enumerate(batch.version_spans or ()):
            ids = batch.token_ids[starts[i] : starts[i + 1]]
            engine = batch.rollout_log_probs[starts[i] : starts[i + 1]][-lengths[i] :]
            spans = spans or ((int(batch.policy_versions[i]), 0, lengths[i]),)
            num_mixed += len({version for version, _, _ in spans}) > 1
            for version, begin, end in spans:
                with torch.no_grad():
                    logits = {
                        v: models[v](ids[None]).logits[0, :-1].log_softmax(-1) for v in models
                    }
                of = {v: x.gather(-1, ids[1:, None])[-lengths[i] :, 0] for v, x in logits.items()}
                right = max(right, (of[version] - engine)[begin:end].abs().max().item())
                wrong += [
                    (of[v] - engine)[begin:end].abs().max().item() for v in models if v != version
                ]
    assert num_mixed > 0, "no sample has tokens of several versions"
    assert right <= 1e-4, right
    assert min(wrong) > 1e-3 or sum(w > 1e-3 for w in wrong) > 0.95 * len(wrong), (
        "the versions hardly differ"
    )


KILLS = [
    "actor.after_optimizer_step:step=2",
    "rollout.mid_generate:step=3",
    "loop.after_score:step=4",
    "sync.before_commit:step=5",
]


def test_a_run_that_is_killed_trains_every_prompt_once(server: ForkServer, tmp_path: Path) -> None:
    """Each process goes on from the checkpoint of the step before,
    with the groups that had come.
    """
    config = make_config(tmp_path / "run")
    settings = {
        **SETTINGS,
        "schedule.name": "asynchronous",
        "trainer.save_freq": 1,
        "trainer.async_save": False,
    }
    plan = "; ".join(f"kill@{point}" for point in KILLS)
    attempts = [server.train(config, settings, "--record", faults=plan)]
    while attempts[-1].code == -signal.SIGKILL:
        attempts.append(server.train(config, settings, "--record", faults=plan))
    run = attempts[-1]
    assert_sound(run, max_lag=2)
    assert 3 <= len(attempts) <= 5, "mid_generate is not reached where all groups had come"
    assert [start["resumed_from_step"] for start in run.starts()][1] == 1
    assert list((run.run_dir / "journal").iterdir()) == []
    versions = {number: oldest(batch) for batch in batches(run) for number in groups(batch)}
    asked = asked_seeds(config)
    once = [n for n, version in versions.items() if asked[derive_seed(1, version, n, 0)] == 1]
    assert len(once) >= 12, "groups that had come are not generated again"


@pytest.mark.long
def test_a_run_that_is_asked_to_stop_goes_on_later(server: ForkServer, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run")
    settings = {**SETTINGS, "schedule.name": "one_step_off", "trainer.save_freq": 10}
    plan = "term@loop.after_score:step=2; term@actor.before_optimizer_step:step=3"
    first = server.train(config, settings, "--record", faults=plan)
    assert first.code == 75 and "the state after step 1 is saved" in first.console, first.console
    second = server.train(config, settings, "--record", faults=plan)
    assert second.code == 75 and "the state after step 3 is saved" in second.console, second.console
    assert_sound(server.train(config, settings, "--record"), max_lag=1)


@pytest.mark.long
def test_groups_without_signal_are_replaced_while_the_trainer_works(
    server: ForkServer, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "schedule.name": "asynchronous", "algorithm.filter_groups.enable": True}
    run = server.train(make_config(tmp_path / "run"), settings, "--record")
    assert run.code == 0, run.console
    numbers = [number for batch in batches(run) for number in groups(batch)]
    assert len(numbers) == len(set(numbers))
    for row, batch in zip(steps_of(run), batches(run), strict=True):
        spread = batch.rewards.view(-1, 4).std(1)
        assert bool((spread > 0).all()) and row["filter_groups/num_groups"] == len(spread) <= 4
    assert sum(row["schedule/dropped_no_signal"] for row in steps_of(run)) > 0


@pytest.mark.long
def test_a_failing_reward_ends_the_run(server: ForkServer, tmp_path: Path) -> None:
    settings = {**SETTINGS, "schedule.name": "one_step_off"}
    run = server.train(
        make_config(tmp_path / "run"), settings, faults="fail@reward.before_score:nth=3"
    )
    assert run.code == 70 and "injected at reward.before_score" in run.console


OTHERS: dict[str, tuple[dict[str, Any], str]] = {  # settings, and a metric that only such a run has
    "greedy samples": (
        {"schedule.name": "asynchronous", "algorithm.adv_estimator": "remax"},
        "greedy/rewards/mean",
    ),
    "a critic, alone at first": (
        {
            "schedule.name": "streaming",
            "algorithm.adv_estimator": "gae",
            "trainer.critic_warmup": 2,
        },
        "critic/grad_norm",
    ),
    "a reference": (
        {"schedule.name": "asynchronous", "algorithm.use_kl_in_reward": True},
        "actor/reward_kl_penalty",
    ),
    "no log-probs of the trainer": (
        {"schedule.name": "one_step_off", "algorithm.rollout_correction.preset": "bypass_ppo_clip"},
        "training/off_policy/trajectory_staleness/max",
    ),
    "spare groups": (
        {"schedule.name": "streaming", "schedule.params": {"tail": "drop", "oversampling": 1.5}},
        "schedule/dropped_tail",
    ),
    "late groups again": (
        {
            "schedule.name": "asynchronous",
            "schedule.params": {"max_lag": 1, "late": "again", "oversampling": 1.5},
        },
        "schedule/started_again",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_train_beside_their_engines(
    server: ForkServer, tmp_path: Path, name: str
) -> None:
    """Killed in step 3, and a piece of log-probs made early where the schedule has any."""
    settings, metric = OTHERS[name]
    settings = {**SETTINGS, **settings, "trainer.save_freq": 1}
    config = make_config(tmp_path / "run")
    faults = "kill@loop.after_advantages:step=3; delay@rollout.mid_generate:nth=1,seconds=0.5"
    assert server.train(config, settings, "--record", faults=faults).code == -signal.SIGKILL
    run = server.train(config, settings, "--record", faults=faults)
    assert run.code == 0, run.console
    rows = steps_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(metric in row and metric_names.find_metric(metric) for row in rows)
    is_new = [True] * 5 if "critic_warmup" not in str(settings) else [False] * 2 + [True] * 3
    versions = [row["policy/version"] for row in rows]
    assert [b - a for a, b in pairwise(versions)] == [float(new) for new in is_new[1:]]
    counts = Counter(number for batch in batches(run) for number in groups(batch))
    assert len(counts) == 20 and set(counts.values()) == {1}


ENGINE_KILLS = [
    (
        "one_step_off",
        "kill_engine@loop.after_advantages:step=2",
    ),  # the sync of that step waits for what it generated
    ("asynchronous", "kill_engine@actor.after_optimizer_step:step=3"),
    ("streaming", "kill_engine@rollout.mid_generate:nth=6"),
    ("asynchronous", "kill_engine@sync.after_begin:step=3"),
]


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "fault"), ENGINE_KILLS)
def test_the_only_engine_is_replaced(
    server: ForkServer, tmp_path: Path, schedule: str, fault: str
) -> None:
    """It gets the current weights while the trainer waits for samples, or by the next sync."""
    settings = {**SETTINGS, **LONG, "schedule.name": schedule, "trainer.save_freq": 1}
    run = server.train(make_config(tmp_path / "run"), settings, "--record", faults=fault)
    assert_sound(run, max_lag={"streaming": 0, "one_step_off": 1, "asynchronous": 2}[schedule])
    assert sum(row["rollout/engine_failures"] for row in steps_of(run)) == 1
    assert (run.run_dir.parent.parent / "faults" / "fired0").exists()

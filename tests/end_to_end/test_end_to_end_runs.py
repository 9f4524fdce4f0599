"""Whole runs through the command line, with real processes: one rank, replays of it, dp2 and tp2
pp2 under torchrun.
"""

import json
from pathlib import Path

import pytest
import torch
from end_to_end_tools import DP2, ONE_RANK, TP2_PP2, Finished, train, write_config
from logger_stores import (
    SERVICES,
    iter_store_differences,
    list_installed_services,
    offline_environment,
    read_metrics_file,
)
from places import MODEL

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.observe.metrics import metric_catalogue as metric_names
from rlhf_megatron.controller.recovery.rollout_recorder import RecordedStart, RolloutRecorder
from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.dist
ENTROPY = {"actor.entropy_coeff": 0.01, "actor.loss_agg_mode": "seq-mean-token-sum"}

SPLIT = {"actor.ppo_epochs": 2, "actor.mini_batch_size": 8, "actor.ppo_max_token_len_per_gpu": 32}


def finished(run: Finished) -> Finished:
    assert run.exit_code == 0, run.console
    return run


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One process, entropy bonus, one optimizer step a step, recorded, with every logger that is
    installed.
    """
    config = write_config(tmp_path_factory.mktemp("one_rank"))
    loggers = {"trainer.logger": ["console", "jsonl", "tensorboard", *list_installed_services()]}
    variables = offline_environment(config.parent)
    return finished(train(config, ONE_RANK | ENTROPY | loggers, "--record", env=variables))


@pytest.fixture(scope="module")
def tp2_pp2(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Four ranks, a reference with its KL term, recorded, weights written after the warm-up
    and at the end.
    """
    config = write_config(tmp_path_factory.mktemp("tp2_pp2"))
    kl = {
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": 0.1,
        "actor.loss_agg_mode": "seq-mean-token-mean",
    }
    return finished(
        train(config, TP2_PP2 | kl | {"warmup.save_hf": True, "trainer.save_hf": True}, "--record")
    )


@pytest.fixture(scope="module")
def dp2(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two replicas; several micro-batches, mini-batches and epochs."""
    config = write_config(tmp_path_factory.mktemp("dp2"))
    return finished(train(config, DP2 | SPLIT, "--record"))


def token_advantages(batch: ScoredBatch) -> torch.Tensor:
    """GRPO by hand, one entry a response token: (reward - mean) / (unbiased deviation + 1e-6) in
    each group of 4.
    """
    rewards = batch.rewards.view(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    return advantages.reshape(-1).repeat_interleave(batch.lengths)[batch.response_mask]


def replay(run: Finished, settings: dict, **launch) -> Finished:
    config = run.directory / "tiny.yaml"
    return finished(
        train(config, settings, "--replay", "2", "--replay-from", str(run.run_dir), **launch)
    )


def test_one_rank_writes_what_it_promises(one_rank: Finished) -> None:
    names = {path.name for path in one_rank.run_dir.iterdir()}
    names -= {*SERVICES, *(f"{name}_run_id" for name in SERVICES)}  # of loggers that are installed
    assert names == {
        *(
            "summary.json",
            "metrics.jsonl",
            "curve.png",
            "tensorboard",
            "config.yaml",
            "engines",
            "logs",
            "record",
        ),
        *(
            "samples.jsonl",
            "held_out_samples.jsonl",
            "mismatch.jsonl",
            "trace.json",
            "run.lock",
            "attempts.jsonl",
            "checkpoints",
        ),
        *("config.lock.yaml", "rewards.log"),
    }
    samples = [
        json.loads(line) for line in (one_rank.run_dir / "samples.jsonl").read_text().splitlines()
    ]
    assert [sample["step"] for sample in samples] == [1] * 6 + [2] * 6
    mismatch = [
        json.loads(line) for line in (one_rank.run_dir / "mismatch.jsonl").read_text().splitlines()
    ]
    for row, step in zip(mismatch, one_rank.rows("step"), strict=True):
        largest = step["training/rollout_log_probs_diff_max"]
        assert (
            max(group["max"] for group in row["groups"]) == row["worst"][0]["difference"] == largest
        )
    events = json.loads((one_rank.run_dir / "trace.json").read_text())
    calls = {event["name"] for event in events if event.get("cat") == "call"}
    calls_of_steps = {"actor.log_probs", "actor.update", "host.send_weights"}
    assert calls_of_steps <= calls
    spent = {
        kind: sum(
            e["dur"]
            for e in events
            if e.get("cat") == kind and e["args"]["step"] and e["name"] in names
        )
        for kind, names in (("step", {"step 1", "step 2"}), ("call", calls_of_steps))
    }
    assert 0 < spent["call"] < spent["step"]
    assert (one_rank.run_dir / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (events,) = (one_rank.run_dir / "tensorboard" / one_rank.run_dir.name).iterdir()
    assert events.stat().st_size > 1000
    found = one_rank.summary()
    assert (
        found["steps"] == 2
        and found["layout"] == "tp1 pp1 dp1"
        and found["accuracy_after_items"] == 40
    )
    assert 0 < found["accuracy_before"] < 1 and 0 < found["accuracy_after"] < 1
    low, high = found["accuracy_after_interval"]
    assert 0 < low < found["accuracy_after"] < high < 1
    steps = one_rank.rows("step")
    evaluations = one_rank.rows("evaluation")
    assert [row["step"] for row in steps] == [1, 2] and [row["step"] for row in evaluations] == [
        0,
        2,
    ]
    assert [row["critic/rewards/mean"] for row in steps] == [
        found["reward_first"],
        found["reward_last"],
    ]
    assert evaluations[0]["val/accuracy"] == found["accuracy_before"]
    assert [(row["training/global_step"], row["training/epoch"]) for row in steps] == [
        (1, 4 / 64),
        (2, 8 / 64),
    ]
    assert len(one_rank.rows("warmup")) == 3
    losses = [row["warmup/loss"] for row in one_rank.rows("warmup")]
    assert losses[2] < losses[0], "the warm-up learns"
    assert "held-out accuracy" in one_rank.console and one_rank.left_over() == []


@pytest.mark.parametrize("logger_name", ["tensorboard", *SERVICES])
def test_every_row_arrives_in_every_logger(
    one_rank: Finished, logger_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if logger_name != "tensorboard":
        pytest.importorskip(logger_name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert "switched off" not in one_rank.console
    assert {key for key, _ in read_metrics_file(one_rank.run_dir)} >= {
        *("warmup/loss", "val/accuracy", "perf/tokens_per_s", "perf/tokens_per_s_update")
    }
    assert list(iter_store_differences(logger_name, one_rank.run_dir)) == []


def test_versions_count_syncs_and_samples_are_fresh(one_rank: Finished) -> None:
    """Sync 1 for the accuracy of the warm-up, sync 2 before the loop, one a step."""
    steps = one_rank.rows("step")
    assert [row["policy/version"] for row in steps] == [3, 4] and [
        row["policy/lag"] for row in steps
    ] == [0, 0]
    recorder = RolloutRecorder(one_rank.run_dir / "record")
    assert recorder.read_start() == RecordedStart(num_warmup_steps=3, policy_version=2)
    assert [set(recorder.read_step(step).policy_versions.tolist()) for step in (1, 2)] == [{2}, {3}]
    assert [row["actor/num_optimizer_steps"] for row in steps] == [1, 1]
    assert all(0 < row["training/rollout_log_probs_diff_max"] <= 1e-4 for row in steps)


def test_the_loss_of_a_sum_over_tokens_with_entropy_bonus_by_hand(one_rank: Finished) -> None:
    """One optimizer step a step, so all ratios are 1: -mean over samples of (advantage x tokens),
    and the bonus.
    """
    for step, row in enumerate(one_rank.rows("step"), start=1):
        batch = RolloutRecorder(one_rank.run_dir / "record").read_step(step)
        num_tokens = batch.response_mask.sum().item()
        policy = -token_advantages(batch).sum().item() / 16
        bonus = 0.01 * row["actor/entropy"] * num_tokens / 16
        assert row["actor/loss"] == pytest.approx(policy - bonus, abs=1e-5) and bonus > 0.01
        assert row["actor/entropy_loss"] == pytest.approx(row["actor/entropy"], abs=1e-5)


def test_the_resolved_configuration_loads_again(one_rank: Finished) -> None:
    text = (one_rank.run_dir / "config.yaml").read_text()
    config = load_run_config(one_rank.run_dir / "config.yaml").config
    assert render_config_yaml(config) == text
    assert config.actor.entropy_coeff == 0.01 and config.warmup.max_steps == 3


@pytest.mark.parametrize("name", ["one_rank", "tp2_pp2", "dp2"])
def test_every_metric_is_listed(name: str, request: pytest.FixtureRequest) -> None:
    run: Finished = request.getfixturevalue(name)
    listed = metric_names.METRIC_CATALOGUE.keys()
    kinds = [row for kind in ("step", "evaluation", "warmup") for row in run.rows(kind)]
    written = {key for row in kinds for key in row} - {"kind", "step", "seconds"}
    unlisted = sorted(key for key in written if metric_names.find_metric(key) is None)
    assert not unlisted, f"not listed: {unlisted}"
    assert len(written & listed) > 40


def test_a_replay_gives_the_same_numbers_bit_for_bit(one_rank: Finished) -> None:
    again = replay(one_rank, ONE_RANK | ENTROPY)
    assert not (again.run_dir / "engines").exists() and again.left_over() == []
    for before, after in zip(one_rank.rows("step"), again.rows("step"), strict=True):
        same = {
            key
            for key in before
            if key.startswith(("actor/", "training/", "critic/", "policy/", "reward/"))
        }
        same -= {"training/epoch"}  # a replay has no prompts
        assert {key: after[key] for key in same} == {key: before[key] for key in same}
        assert before["actor/grad_norm"] > 0 and before["actor/loss"] != 0
    assert again.summary()["steps"] == 2
    assert again.run_dir != one_rank.run_dir and (one_rank.run_dir / "summary.json").exists()


def test_two_replicas_and_one_agree_on_recorded_rollouts(dp2: Finished) -> None:
    assert dp2.summary()["layout"] == "tp1 pp1 dp2" and dp2.left_over() == []
    again = replay(dp2, ONE_RANK | SPLIT)
    for step, (two, one) in enumerate(
        zip(dp2.rows("step"), again.rows("step"), strict=True), start=1
    ):
        scale = (
            token_advantages(RolloutRecorder(dp2.run_dir / "record").read_step(step))
            .abs()
            .mean()
            .item()
        )
        assert scale > 0.1, "the rewards of this step teach nothing: choose other labels"
        assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-4 * scale)
        assert one["actor/pg_loss"] == pytest.approx(two["actor/pg_loss"], abs=1e-4 * scale)
        assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-4)
        assert two["actor/grad_norm"] > 0
        assert two["actor/num_optimizer_steps"] == 4
        assert two["critic/advantages/max"] > 0 > two["critic/advantages/min"]


def test_four_ranks_end_well(tp2_pp2: Finished) -> None:
    assert tp2_pp2.left_over() == []
    assert tp2_pp2.summary()["layout"] == "tp2 pp2 dp1"
    logs = sorted(path.name for path in (tp2_pp2.run_dir / "logs").iterdir())
    assert logs == ["rank0.log", "rank1.log", "rank2.log", "rank3.log"]
    text = "".join((tp2_pp2.run_dir / "logs" / name).read_text() for name in logs)
    assert "Traceback" not in text and "Traceback" not in tp2_pp2.console
    assert list((tp2_pp2.directory / "transfer").iterdir()) == [], "weight buffers are removed"


def test_kl_starts_at_nothing_after_the_warm_up(tp2_pp2: Finished) -> None:
    """The reference is the warmed-up policy; one optimizer step a step, so the first loss is that
    of equal models.
    """
    first, second = tp2_pp2.rows("step")
    assert abs(first["actor/kl_loss"]) <= 1e-6
    assert second["actor/kl_loss"] > 1e-6, "the policy has moved, the reference has not"
    # A mean over sequences, ratios of 1: the advantages of a group add up to nothing, and
    # nothing is left.
    assert abs(first["actor/loss"]) <= 1e-6


def log_probs_of(directory: Path, batch: ScoredBatch) -> torch.Tensor:
    """[T] transformers' log-prob of each token given those before, 0 on the first
    token of a sample.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = []
    with torch.no_grad():
        for ids in batch.token_ids.split(batch.lengths.tolist()):
            logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
            rows.append(torch.cat([torch.zeros(1), logits.gather(-1, ids[1:, None])[:, 0]]))
    return torch.cat(rows)


def test_written_weights_are_those_that_the_engine_sampled_from(tp2_pp2: Finished) -> None:
    """transformers on the warm model against the engine's log-probs of step 1: four ranks, export
    and sync at once.
    """
    batch = RolloutRecorder(tp2_pp2.run_dir / "record").read_step(1)
    expected = log_probs_of(tp2_pp2.run_dir / "warm_model", batch)
    mask = batch.response_mask
    assert (expected - batch.rollout_log_probs)[mask].abs().max().item() <= 1e-4
    moved = log_probs_of(tp2_pp2.run_dir / "hf", batch)
    assert (moved - batch.rollout_log_probs)[mask].abs().max().item() > 1e-3, (
        "two steps of training later"
    )


def test_final_weights_have_the_accuracy_of_the_summary(tp2_pp2: Finished) -> None:
    """Greedy decoding with transformers; the reward reads the first character only."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tp2_pp2.run_dir / "hf", dtype=torch.float32)
    tokenizer = load_tokenizer(tp2_pp2.run_dir / "hf")
    rows = [json.loads(line) for line in (tp2_pp2.directory / "val.jsonl").read_text().splitlines()]
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(row["prompt"]) for row in rows])).logits[
            :, -1
        ]
    answers = [tokenizer.decode([int(i)]) for i in logits.argmax(-1)]
    right = sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True))
    assert right / 40 == pytest.approx(tp2_pp2.summary()["accuracy_after"])
    written = json.loads((tp2_pp2.run_dir / "hf" / "config.json").read_text())
    for key in (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "tie_word_embeddings",
    ):
        assert written[key] == json.loads((MODEL / "config.json").read_text())[key]

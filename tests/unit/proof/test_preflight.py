"""What stops a run: engine against trainer, weights that did not arrive, parts and files
that do not exist.
"""

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from data_samples import scored
from places import MODEL, ROOT

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import read_run_config, run_preflight_check
from rlhf_megatron.config.schema import CheckConfig, ModelConfig, RolloutConfig, RunConfig
from rlhf_megatron.controller.observe.metrics.mismatch_check import MismatchCheck
from rlhf_megatron.controller.preflight import list_preflight_checks
from rlhf_megatron.controller.scheduler.algorithm_setup import load_algorithm_setup
from rlhf_megatron.controller.scheduler.schedules.synchronous import SynchronousSchedule
from rlhf_megatron.controller.sync.weight_sync import verify_engine_digests
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.service.reward_scorer import REWARD_LOG, make_reward_scorer
from rlhf_megatron.rollout.engine_interface import EngineError

QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def trainer_log_probs(*differences: float) -> torch.Tensor:
    """The engine's log-probs plus a difference at each of the three response tokens."""
    log_probs = scored().rollout_log_probs.clone()
    log_probs[scored().response_mask] += torch.tensor(differences)
    return log_probs


def test_float32_is_held_to_the_largest_difference() -> None:
    check = MismatchCheck(CheckConfig(), is_exact=True)
    fine = check(1, scored(), trainer_log_probs(0.0, 9e-5, -9e-5))
    assert fine["training/rollout_log_probs_diff_max"] == pytest.approx(9e-5, rel=0.02)
    with pytest.raises(ValueError) as error:
        check(1, scored(), trainer_log_probs(0.0, 0.0, -2e-3))
    message = str(error.value)
    assert "rollout_log_probs_diff_max = 0.002 (checks.log_prob_max_abs_diff = 0.0001)" in message
    assert "before the first update" in message and "raise the threshold" in message
    assert (
        check(2, scored(), trainer_log_probs(0.0, 0.0, -2e-3))[
            "training/rollout_log_probs_diff_max"
        ]
        > 1e-3
    )


@pytest.mark.parametrize(
    ("trainer", "engine", "quantization"),
    [
        ("bfloat16", None, None),
        ("float32", "bfloat16", None),
        ("bfloat16", "bfloat16", None),
        ("float32", None, "fp8"),
    ],
)
def test_rounded_weights_are_held_to_percentiles_and_kl(
    trainer: Any, engine: Any, quantization: Literal["fp8"] | None
) -> None:
    rollout = RolloutConfig(dtype=engine, quantization=quantization)
    check = MismatchCheck(
        CheckConfig(),
        RunConfig(model=ModelConfig(dtype=trainer), rollout=rollout).is_float32_throughout,
    )
    # median 0.015, p99 0.1, KL about 0.0017
    check(1, scored(), trainer_log_probs(0.01, -0.015, 0.1))
    with pytest.raises(
        ValueError, match=r"diff_p50 = 0.03 \(checks.log_prob_p50_abs_diff = 0.02\)"
    ) as error:
        check(1, scored(), trainer_log_probs(0.03, 0.03, 0.0))
    assert "p99" not in str(error.value) and "kl" not in str(error.value)
    with pytest.raises(ValueError) as error:
        # k3 of 0.5: 0.1487, of 0.03: 0.00045
        check(1, scored(), trainer_log_probs(0.03, 0.03, 0.5))
    message = str(error.value)
    assert (
        "diff_p50 = 0.03" in message
        and "diff_p99 = 0.5 (checks.log_prob_p99_abs_diff = 0.3)" in message
    )
    assert "rollout_kl = 0.0499 (checks.log_prob_mean_kl = 0.01)" in message


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_never_passes(is_exact: bool, bad: float) -> None:
    check = MismatchCheck(CheckConfig(), is_exact)
    with pytest.raises(ValueError, match="disagree on the sampled tokens"):
        check(1, scored(), trainer_log_probs(0.0, 0.0, bad))
    outside = trainer_log_probs(0.0, 0.0, 0.0)
    outside[~scored().response_mask] = bad  # prompts do not count
    check(1, scored(), outside)


def test_verify_names_the_tensor_and_the_engine() -> None:
    sent = {"a.weight": "01", "b.weight": "02", "c.weight": "03"}
    verify_engine_digests("engine0", sent, dict(sent))
    verify_engine_digests("engine0", sent, None)  # cannot tell
    with pytest.raises(EngineError) as error:
        verify_engine_digests(
            "engine1", sent, {"a.weight": "01", "b.weight": "ff", "d.weight": "04"}
        )
    message = str(error.value)
    assert message.startswith("engine1: 3 of 3 tensors") and "a.weight" not in message
    assert "b.weight (sent 02, stands ff)" in message
    assert (
        "c.weight (sent 03, stands nothing)" in message
        and "d.weight (sent nothing, stands 04)" in message
    )
    many = {f"t{i}": "0" for i in range(9)}
    with pytest.raises(EngineError) as error:
        verify_engine_digests("engine0", many, {})
    assert (
        "9 of 9" in str(error.value) and "t4" in str(error.value) and "t5" not in str(error.value)
    )


def quickstart(tmp_path: Path, **sections: dict[str, Any]) -> RunConfig:
    """configs/quickstart.yaml in absolute terms, with `section={field: value}` changed."""
    config = read_run_config(
        QUICKSTART, [f"model.path={MODEL}", f"trainer.default_local_dir={tmp_path / 'runs'}"]
    ).config
    for name, changes in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **changes)})
    return config


def check_run(config: RunConfig, *replay: Any) -> None:
    problems = [
        problem
        for check in list_preflight_checks(*replay)
        for problem in run_preflight_check(check, config, ())
    ]
    if problems:
        raise ConfigError(problems)


def test_parts_of_the_quickstart(tmp_path: Path) -> None:
    config = quickstart(tmp_path)
    parts = load_algorithm_setup(config)
    assert parts.needs_reference is False and isinstance(parts.schedule, SynchronousSchedule)
    with make_reward_scorer(config.reward, tmp_path / REWARD_LOG) as scorer:
        results = scorer(
            [
                RewardSample("", response, "052", "addition", reason, 3)
                for response, reason in (
                    ("052", "stop"),
                    ("52", "stop"),
                    ("05", "length"),
                    ("052", "abort"),
                )
            ]
        )
    assert [(r.score, r.status) for r in results] == [
        (1.0, "ok"),
        (0.0, "ok"),
        (0.0, "malformed"),
        (0.0, "masked:aborted"),
    ]
    assert parts.estimator_params.norm_adv_by_std_in_grpo is True


def test_all_that_is_wrong_with_the_parts_is_told_at_once(tmp_path: Path) -> None:
    config = quickstart(
        tmp_path,
        reward={"name": "exact_mach"},
        algorithm={"params": {"epsilom": 1}},
        data={"task_params": {"num_digits": 9}},
        schedule={"name": "asynchronous", "params": {"max_lag": 0}},
    )
    config = replace(
        config,
        actor=replace(
            config.actor,
            policy_loss=replace(config.actor.policy_loss, params={"clip_ratio_low": -1}),
        ),
    )
    with pytest.raises(ConfigError) as error:
        load_algorithm_setup(config)
    told = "\n".join(error.value.problems)
    assert "unknown reward 'exact_mach'. Did you mean 'exact_match'?" in told
    assert "algorithm.params.epsilom" in told and "algorithm.params.epsilon" in told
    assert "num_digits (9) must be 1, 2 or 3" in told and "clip_ratio_low" in told
    assert "schedule.params: max_lag (0) must be at least 1" in told
    assert len(error.value.problems) == 5


def test_preflight_passes_the_quickstart_and_starts_nothing(tmp_path: Path) -> None:
    check_run(quickstart(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_preflight_tells_of_data_weights_engine_and_directory_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x00" * 3)
    config = quickstart(
        tmp_path,
        data={"max_prompt_length": 3},
        model={"path": str(tmp_path / "model"), "init_seed": None},
        trainer={"default_local_dir": str(tmp_path / "file" / "runs")},
        rollout={"engine": "sglang"},
    )
    config = replace(
        config,
        rollout=replace(config.rollout, sglang=replace(config.rollout.sglang, python="/no/python")),
    )
    with pytest.raises(ConfigError) as error:
        check_run(config)
    data, weights, output, engine = error.value.problems
    assert "6 tokens, over data.max_prompt_length (3)" in data and "raise it to 6" in data
    assert "model.safetensors (3 bytes) is truncated or corrupt" in weights
    assert "default_local_dir" in output and "Not a directory" in output
    assert "rollout.sglang.python (/no/python) must be an executable" in engine


def test_preflight_of_stop_strings_and_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'12' is 2 tokens"):
        check_run(quickstart(tmp_path, rollout={"stop": ("12",)}))
    shutil.copytree(MODEL, tmp_path / "model")
    hf_config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**hf_config, "vocab_size": 10}))
    with pytest.raises(ConfigError, match=r"has a vocabulary of 10; set model.tokenizer_path"):
        check_run(quickstart(tmp_path, model={"path": str(tmp_path / "model")}))


def test_preflight_of_a_teacher(tmp_path: Path) -> None:
    """It tells ids: they must stand for the student's tokens."""
    teacher = tmp_path / "teacher"
    shutil.copytree(MODEL, teacher)

    def problems() -> str:
        config = quickstart(tmp_path, reference={"path": str(teacher)})
        term = replace(config.actor.distillation, loss_mode="reverse_kl")
        with pytest.raises(ConfigError) as error:  # its weights are not there
            check_run(replace(config, actor=replace(config.actor, distillation=term)))
        return str(error.value)

    assert "has other tokens" not in problems()
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["1"], vocab["2"] = vocab["2"], vocab["1"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the teacher at reference.path" in problems() and "has other tokens than" in problems()


def test_preflight_of_an_environment_without_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    config = quickstart(tmp_path, rollout={"engine": "sglang"})
    with pytest.raises(
        ConfigError, match=r"rollout.engine \(sglang\) needs sglang in this environment"
    ):
        check_run(config)


def test_preflight_of_a_replay(tmp_path: Path) -> None:
    # no engine is started, so none is looked for
    config = quickstart(tmp_path, rollout={"engine": "sglang"})
    with pytest.raises(
        ConfigError, match=r"no recorded step under .*gone/record; run with --record first"
    ) as error:
        check_run(config, tmp_path / "gone", 1)
    assert len(error.value.problems) == 1

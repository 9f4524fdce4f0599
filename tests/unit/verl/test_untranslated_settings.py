"""What `config from-verl` cannot translate and what changes training stays in the file, and every
command refuses the file until the user removes the line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rlhf_megatron
from rlhf_megatron.api import load_config
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.unsupported_features import FEATURES_BY_NAME, UNSUPPORTED_FEATURES
from rlhf_megatron.config.untranslated_settings import format_untranslated_entry
from rlhf_megatron.config.verl_names import VERL_NAMES

BASE = """
data.train_files=train.jsonl
data.val_files=val.jsonl
data.train_batch_size=64
actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.rollout.n=4
actor_rollout_ref.model.path=/models/Qwen2.5-7B
algorithm.adv_estimator=grpo
trainer.total_training_steps=50
custom_reward_function.path=score.py
"""
TURNS = "actor_rollout_ref.rollout.multi_turn.enable"
LORA = "actor_rollout_ref.model.lora.rank"
MODEL = "actor_rollout_ref.model.path"


def translate(tmp_path: Path, *settings: str) -> Path:
    verl = tmp_path / "verl.txt"
    verl.write_text(BASE)
    ours = tmp_path / "run.yaml"
    main(["config", "from-verl", str(verl), *settings, "--out", str(ours)])
    return ours


def find_problems(path: Path, *overrides: str) -> list[str]:
    try:
        load_run_config(path, overrides, with_files=False)
    except ConfigError as error:
        return error.problems
    return []


def remove_refused_lines(path: Path) -> None:
    text = path.read_text()
    path.write_text(re.sub(r"(?m)^  \S+: \{.*feature: .*\n", "", text))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (
            f"{TURNS}=True",
            f"untranslated: {TURNS} (true): verl's rollouts of several turns and its tools are not"
            " supported yet: each prompt gets one response; write an environment by hand"
            " (rollout.environment) and remove this line, or only remove this line to train on"
            " single responses.",
        ),
        (f"{LORA}=16", f"untranslated: {LORA} (16): LoRA under Megatron is not supported yet"),
        (
            f"{MODEL}=Qwen/Qwen2.5-VL-7B-Instruct",
            f"untranslated: {MODEL} (Qwen/Qwen2.5-VL-7B-Instruct): it is a job with images",
        ),
        (
            "algorithm.adv_estimater=gae",
            "did you mean algorithm.adv_estimator? Correct the name and translate again",
        ),
    ],
    ids=["multi-turn", "lora", "images", "misspelt"],
)
def test_the_file_is_refused_until_the_line_is_removed(
    setting: str, expected: str, tmp_path: Path
) -> None:
    path = translate(tmp_path, setting)
    (problem,) = find_problems(path)
    assert expected in problem
    line = int(problem.rpartition(":")[2].rstrip("]"))
    assert setting.partition("=")[0] in path.read_text().splitlines()[line - 1]
    remove_refused_lines(path)
    assert find_problems(path) == []


@pytest.mark.parametrize(
    "command",
    [
        ["config", "check", "--no-files"],
        ["config", "show"],
        ["train"],
        ["sft"],
        ["generate"],
        ["plan", "memory"],
        ["plan", "placement"],
        ["simulate", "--gpu", "h100-80g"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_every_command_refuses_the_file(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = translate(tmp_path, f"{TURNS}=True")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    code = main([*command, str(path)])
    captured = capsys.readouterr()
    assert code != 0
    assert f"untranslated: {TURNS} (true)" in captured.out + captured.err
    with pytest.raises(ConfigError, match="untranslated: "):
        load_config(path, with_files=False)


def test_no_other_file_and_no_override_lifts_a_refusal(tmp_path: Path) -> None:
    path = translate(tmp_path, f"{TURNS}=True")
    child = tmp_path / "child.yaml"
    child.write_text("extends: run.yaml\nuntranslated: {}\ntrainer: {seed: 3}\n")
    assert [problem.partition(" (")[0] for problem in find_problems(child)] == [
        f"untranslated: {TURNS}"
    ]
    first, second = find_problems(path, "untranslated=null")
    assert first.startswith(f"untranslated: {TURNS}")
    assert "An override lifts no refusal" in second


def test_problems_of_other_settings_are_reported_beside_refusals(tmp_path: Path) -> None:
    path = translate(tmp_path, f"{TURNS}=True")
    problems = find_problems(path, "trainer.save_freq=-5")
    assert len(problems) == 2
    assert any("trainer.save_freq" in problem for problem in problems)


def test_missing_facts_are_refused_too(tmp_path: Path) -> None:
    verl = tmp_path / "verl.txt"
    verl.write_text(
        BASE.replace("trainer.total_training_steps=50", "").replace(
            "custom_reward_function.path=score.py", ""
        )
    )
    ours = tmp_path / "run.yaml"
    assert main(["config", "from-verl", str(verl), "--lenient", "--out", str(ours)]) == 0
    steps, reward = sorted(find_problems(ours), reverse=True)
    assert steps.startswith("untranslated: trainer.total_training_steps: 30 epochs")
    assert reward.startswith("untranslated: reward.name: verl chooses a scorer")
    assert "write the setting into this file, and remove this line" in reward


def test_values_that_cannot_be_known_are_refused_too(tmp_path: Path) -> None:
    """They would train at the default."""
    script = tmp_path / "run.sh"
    settings = BASE.strip().replace("\n", " ").replace("train_batch_size=64", "train_batch_size=$1")
    script.write_text(f"python3 -m verl.trainer.main_ppo {settings} trainer.nnodes=two\n")
    ours = tmp_path / "run.yaml"
    assert main(["config", "from-verl", str(script), "--lenient", "--out", str(ours)]) == 1
    batch, nodes = find_problems(ours)[:2]
    assert batch.startswith("untranslated: data.train_batch_size: data.train_batch_size=...: its")
    assert "translate again with another value" in batch
    assert nodes.startswith("untranslated: trainer.nnodes: trainer.nnodes ('two') must be a whole")


def test_lines_in_other_forms(tmp_path: Path) -> None:
    path = translate(tmp_path)
    text = path.read_text()
    for section, expected in (
        ("untranslated:\n", []),
        ("untranslated: {}\n", []),
        (
            "untranslated: {a.b: 3}\n",
            ["untranslated: a.b (3): it has no counterpart; remove this line to train without it."],
        ),
        (
            "untranslated: {a.b: {value: 3, feature: warp, reason: not yet}}\n",
            [
                "untranslated: a.b (3) had no counterpart when the file was written, and warp is"
                " supported now; translate verl's file again, or remove this line to train without"
                " it."
            ],
        ),
        (
            "untranslated: yes\n",
            [
                "untranslated must be a mapping of settings of verl, as `config from-verl` writes"
                " it; remove it to train without them."
            ],
        ),
    ):
        path.write_text(text + section)
        assert [problem.rpartition(" [")[0] for problem in find_problems(path)] == expected


@pytest.mark.parametrize(
    "value", [True, 3, "a: b, {c} # d", "two\nlines", ["x, y", 1], {"a": {"b": "it's"}}, "", 1e-6]
)
def test_values_survive_in_one_line(value: object, tmp_path: Path) -> None:
    line = format_untranslated_entry("a.b", value, "images", "why: it's {so} # and, so")
    assert "\n" not in line
    path = translate(tmp_path)
    path.write_text(f"{path.read_text()}untranslated:\n  {line}\n")
    (problem,) = find_problems(path)
    assert ": why: it's {so} # and, so; " in problem


def test_every_setting_that_changes_training_belongs_to_a_feature_of_the_list() -> None:
    assert len(FEATURES_BY_NAME) == len(UNSUPPORTED_FEATURES)
    used = set()
    for entry in VERL_NAMES:
        if entry.feature:
            assert entry.feature in FEATURES_BY_NAME, entry
            assert entry.target or entry.feature != "set_by_hand", f"{entry} needs a feature"
        used.add(entry.feature)
    translation = Path(rlhf_megatron.__file__).parent / "jobs" / "from_verl"
    code = "".join(path.read_text() for path in translation.glob("*.py"))
    for name in FEATURES_BY_NAME:
        assert name in used or f'"{name}"' in code, f"no setting asks for the feature {name}"


def test_dropped_settings_are_listed_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verl = tmp_path / "verl.txt"
    verl.write_text(
        f"{BASE}\n{LORA}=0\n{TURNS}=False\nactor_rollout_ref.rollout.mode=async\n"
        "trainer.critic_warmup=0\nactor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8\n"
        "algorithm.lam=0.9\n"
    )
    assert main(["config", "from-verl", str(verl), "--show-dropped"]) == 0
    said = capsys.readouterr().err
    _, dropped = said.split("dropped (", 1)
    for line in (
        f"{LORA}=0: off",
        f"{TURNS}=false: off",
        "actor_rollout_ref.rollout.mode=async: what happens here anyway",
        "trainer.critic_warmup=0: the estimator needs no critic",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8: how verl computes: it"
        " changes nothing of what is learnt",
        "algorithm.lam=0.9: the estimator grpo does not read it, in verl either",
    ):
        assert f"  {line}\n" in dropped
    assert main(["config", "from-verl", str(verl)]) == 0
    assert "dropped (" not in capsys.readouterr().err


def test_a_null_of_a_former_layout_yields_to_the_value(tmp_path: Path) -> None:
    """verl's generated files have the present and the former name, one of them null."""
    for settings in (
        ("reward_model.reward_loop_class_name=null", "reward_manager.module.name=mine"),
        ("reward_manager.module.name=mine", "reward_model.reward_loop_class_name=null"),
    ):
        path = translate(tmp_path, *settings)
        assert find_problems(path) == []
        path.unlink()

"""`config from-verl`: whole configurations of verl, every value worked out by hand, and what has
no counterpart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from verl_samples import GRPO_BY_HAND, GRPO_SCRIPT, PPO_BY_HAND, PPO_YAML

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.key_paths import get_config_value
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.jobs.from_verl.config_draft import UserFacts
from rlhf_megatron.jobs.from_verl.settings_reader import (
    add_command_line_overrides,
    read_verl_settings,
)
from rlhf_megatron.jobs.from_verl.translate_config import ConfigTranslation, translate_verl_config

ENVIRONMENT = {"HOME": "/home/me"}
NOTHING = UserFacts(home_directory="/home/me")
BASE = """
data.train_files=train.jsonl
data.val_files=val.jsonl
data.train_batch_size=64
actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.rollout.n=4
actor_rollout_ref.model.path=/model
algorithm.adv_estimator=grpo
trainer.total_training_steps=50
custom_reward_function.path=score.py
"""


def translated(
    text: str,
    *overrides: str,
    told: UserFacts = NOTHING,
    ours: Sequence[str] = (),
    source: str = "run.txt",
) -> ConfigTranslation:
    written = read_verl_settings(text, source, ENVIRONMENT)
    add_command_line_overrides(written, overrides)
    return translate_verl_config(written, source, told, ENVIRONMENT, ours)


def values(result: ConfigTranslation) -> dict[str, Any]:
    return {key: value.value for key, value in result.values.items()}


def learning(result: ConfigTranslation) -> list[str]:
    return [f"{one.name}: {one.reason}" for one in result.untranslated if one.affects_learning]


def loads(result: ConfigTranslation, path: Path) -> None:
    """The text is a configuration that runs, and it says what the translation says."""
    path.write_text(result.yaml_text)
    config = load_run_config(path, with_files=False).config
    for key, value in values(result).items():
        if key != "reward.terms":
            found = get_config_value(config, key)
            entries = list(found) if isinstance(found, tuple) else [found]
            short = [
                one.removeprefix(f"{path.parent}/") if isinstance(one, str) else one
                for one in entries
            ]
            assert (short if isinstance(found, tuple) else short[0]) == value, key


@pytest.mark.parametrize(
    ("text", "source", "ours", "by_hand"),
    [
        (PPO_YAML, "ppo.yaml", (), PPO_BY_HAND),
        (GRPO_SCRIPT, "grpo.sh", ("reward.name=math_verify",), GRPO_BY_HAND),
    ],
    ids=["ppo", "grpo"],
)
def test_whole_configurations(
    text: str, source: str, ours: Sequence[str], by_hand: dict[str, Any], tmp_path: Path
) -> None:
    told = UserFacts(num_train_rows=7473, response_length=800, home_directory="/home/me")
    result = translated(text, told=told, ours=ours, source=source)
    assert values(result) == by_hand
    assert result.is_complete and not result.problems
    loads(result, tmp_path / "run.yaml")


def test_ppo_without_counterpart_and_without_effect() -> None:
    result = translated(PPO_YAML, told=UserFacts(response_length=800), source="ppo.yaml")
    assert [one.name.rpartition(".")[2] for one in result.untranslated] == [
        "logger",
        "attention_backend",
    ]
    assert [key for key, _ in result.dropped_settings][:2] == [
        "actor.kl_loss_coef",
        "actor.kl_loss_type",
    ]
    assert any("`defaults:` list is not followed" in note for note in result.notes)


@pytest.mark.parametrize("job", ["main_ppo", "sft_trainer"])
def test_fewer_rows_than_a_batch_are_named_as_such(job: str) -> None:
    text = f"python3 -m verl.trainer.{job} data.train_batch_size=1024 trainer.total_epochs=15"
    result = translated(text, told=UserFacts(num_train_rows=64), source="run.sh")
    (reason,) = [one for one in learning(result) if one.startswith("trainer.total_training_steps")]
    assert "data.train_batch_size (1024) is more than the 64 rows" in reason
    assert "not known" not in reason and "trainer.total_training_steps" not in result.values


def test_what_must_be_told_is_asked_for() -> None:
    result = translated(GRPO_SCRIPT, source="grpo.sh")
    assert (
        "trainer.total_training_steps" not in result.values and "reward.name" not in result.values
    )
    asked = "\n".join(learning(result))
    assert "15 epochs of a file whose rows are not known; tell them with --train-rows N" in asked
    assert "--set reward.name=NAME (character_share, code, exact_match" in asked
    adaptive = (
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.1",
    )
    result = translated(BASE, *adaptive)
    (line,) = learning(result)
    assert line.startswith("algorithm.kl_ctrl.target_kl: nats a token there, nats a response here")
    assert "algorithm.kl_ctrl.target_kl" not in result.values
    result = translated(BASE, *adaptive, told=UserFacts(response_length=300))
    assert (
        result.values["algorithm.kl_ctrl.target_kl"].value == pytest.approx(30.0)
        and result.is_complete
    )


def test_verl_defaults_are_written_where_ours_differ() -> None:
    result = translated("actor_rollout_ref.model.path=/model")
    found = values(result)
    # 1.0 in both
    assert found["algorithm.adv_estimator"] == "gae" and "algorithm.params.gamma" not in found
    assert found["data.train_batch_size"] == 1024 and found["rollout.n"] == 1
    assert found["actor.mini_batch_size"] == 256 and found["actor.shuffle"] is False
    assert found["actor.optim.betas"] == found["critic.optim.betas"] == [0.9, 0.999]
    assert found["trainer.test_freq"] == 0 and "trainer.save_freq" not in found  # never, in both
    assert (
        "betas: [0.9, 0.999]" in result.yaml_text
        and "actor_rollout_ref.actor.optim.betas (default)" in result.yaml_text
    )
    assert any("30 epochs (verl's default)" in line for line in learning(result))


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_losses_are_those_that_are_registered(name: str) -> None:
    verl = {"ppo_clip": "vanilla"}.get(name, name)
    result = translated(
        BASE,
        f"actor_rollout_ref.actor.policy_loss.loss_mode={verl}",
        "actor_rollout_ref.actor.clip_ratio_high=0.3",
    )
    assert values(result)["actor.policy_loss.loss_mode"] == name and result.is_complete
    kind = POLICY_LOSSES.get(name).params
    has_clip = kind is not None and "clip_ratio_high" in kind.__dataclass_fields__
    params = {
        key.rpartition(".")[2]: value
        for key, value in values(result).items()
        if ".policy_loss.params." in key
    }
    assert params.get("clip_ratio_high") == (0.3 if has_clip else None)
    if has_clip and kind.__dataclass_fields__["clip_ratio_low"].default != 0.2:
        assert params["clip_ratio_low"] == 0.2  # verl's default, not the paper's
    if name == "gspo":  # verl 0.9.1 obeys
        assert values(result)["actor.loss_agg_mode"] == "token-mean"
    if name in ("sapo", "geo_mean"):
        assert values(result)["actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert not result.problems


@pytest.mark.parametrize("name", sorted(set(ADV_ESTIMATORS) - {"gdpo"}))
def test_estimators_are_those_that_are_registered(name: str) -> None:
    result = translated(
        BASE, f"algorithm.adv_estimator={name}", "algorithm.gamma=0.9", "algorithm.lam=0.8"
    )
    kind = ADV_ESTIMATORS.get(name).params
    known = set(kind.__dataclass_fields__) if kind is not None else set()
    params = {
        key.rpartition(".")[2]: value
        for key, value in values(result).items()
        if "algorithm.params." in key
    }
    expected = {key: value for key, value in {"gamma": 0.9, "lam": 0.8}.items() if key in known}
    assert (
        params == expected
        and values(result)["algorithm.adv_estimator"] == name
        and result.is_complete
    )


def test_names_of_variants() -> None:
    assert (
        values(translated(BASE, "algorithm.adv_estimator=rloo_vectorized"))[
            "algorithm.adv_estimator"
        ]
        == "rloo"
    )
    dr_grpo = translated(BASE, "algorithm.norm_adv_by_std_in_grpo=False")
    assert values(dr_grpo)["algorithm.params.norm_adv_by_std_in_grpo"] is False
    result = translated(
        BASE, "algorithm.adv_estimator=grp", "actor_rollout_ref.actor.policy_loss.loss_mode=gsp"
    )
    found = learning(result)
    assert "no advantage estimator of that name is registered; did you mean grpo?" in found[0]
    assert "no policy loss of that name is registered; did you mean gspo?" in found[1]


def test_one_clip_ratio_for_both_sides() -> None:
    result = translated(
        BASE, "actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio_low=0.1"
    )
    params = {
        side: result.values[f"actor.policy_loss.params.clip_ratio_{side}"]
        for side in ("low", "high")
    }
    assert params["low"].value == 0.1 and params["high"].value == 0.3
    assert "verl's default clip_ratio_high (0.2) hides it" in params["high"].note


def test_group_filter() -> None:
    section = "algorithm.filter_groups"
    settings = (
        f"{section}.enable=True",
        f"{section}.metric=acc",
        f"{section}.max_num_gen_batches=0",
    )
    found = values(translated(BASE, *settings))
    assert (
        found[f"{section}.metric"] == "function/acc"
        and found[f"{section}.max_num_gen_batches"] == 1000
    )
    by_scorer = values(translated(BASE, *settings, ours=["reward.name=math_verify"]))
    assert by_scorer[f"{section}.metric"] == "math_verify", "without the penalty for length"
    whole = values(translated(BASE, *settings, f"{section}.metric=seq_final_reward"))
    assert whole[f"{section}.metric"] == "reward"
    kept = values(
        translated(BASE, f"{section}.enable=True", f"{section}.metric=format", settings[2])
    )
    assert kept[f"{section}.metric"] == "format", "the name of a term"
    assert (
        values(translated(BASE, f"{section}.max_num_gen_batches=7", settings[0]))[
            f"{section}.max_num_gen_batches"
        ]
        == 7
    )


def test_algorithms_correction() -> None:
    section = "algorithm.rollout_correction"
    result = translated(
        BASE,
        f"{section}.rollout_is=token",
        f"{section}.rollout_is_threshold=2.5",
        f"{section}.rollout_rs='seq_mean_k1,token_k3'",
        f"{section}.rollout_rs_threshold='0.5_4.0,0.01'",
    )
    found = {
        key.rpartition(".")[2]: value
        for key, value in values(result).items()
        if key.startswith(section)
    }
    assert found == {
        "mode": "decoupled",
        "rollout_is": "token",
        "rollout_is_threshold": "2.5",
        "rollout_rs": ["seq_mean_k1", "token_k3"],
        "rollout_rs_threshold": ["0.5_4.0", "0.01"],
    }
    note = result.values[f"{section}.rollout_rs_threshold"].note
    assert (
        note
        == "seq_mean_k1: bounds of the ratio itself; verl's code turns them over and keeps 0.25_2"
    )
    assert not result.problems
    result = translated(
        BASE,
        f"{section}.bypass_mode=true",
        f"{section}.loss_type=reinforce",
        f"{section}.rollout_is=sequence",
    )
    found = values(result)
    assert (
        found[f"{section}.mode"] == "bypass" and found["actor.policy_loss.loss_mode"] == "reinforce"
    )
    assert found[f"{section}.rollout_is_threshold"] == "2.0" and not result.problems
    off = translated(BASE, f"{section}.rollout_is=null", f"{section}.rollout_is_threshold=3.0")
    assert not any(key.startswith(section) for key in off.values) and off.is_complete


def test_micro_batches_as_token_budgets() -> None:
    lengths = ("data.max_prompt_length=100", "data.max_response_length=401")
    layout = ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",)
    of_all = translated(BASE, *lengths, *layout, "actor_rollout_ref.actor.ppo_micro_batch_size=16")
    # 16 samples over 8 / 2 replicas
    assert values(of_all)["actor.ppo_max_token_len_per_gpu"] == 4 * 501
    shared = translated(
        BASE,
        *lengths,
        "actor_rollout_ref.actor.megatron.context_parallel_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    )
    assert values(shared)["actor.ppo_max_token_len_per_gpu"] == 752  # 3 x 501 / 2, rounded up
    dynamic = translated(
        BASE,
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000",
    )
    assert values(dynamic)["actor.ppo_max_token_len_per_gpu"] == 9000


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "actor_rollout_ref.rollout.top_p=0.9",
            "the trainer's log-probs are those of the full distribution",
        ),
        ("actor_rollout_ref.model.lora.rank=32", "not supported yet"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "not supported yet"),
        (
            "+actor_rollout_ref.actor.optim.override_optimizer_config.adam_eps=1e-6",
            "of these options those listed above are there",
        ),
        (
            "actor_rollout_ref.actor.optim.lr_decay_style=WSD",
            "warm-up, stable and decay phases are not there",
        ),
        (
            "reward_model.enable=True",
            "a model beside a function of your own is not served by the run yet",
        ),
        ("data.train_max_samples=1000", "name a file with so many rows"),
        ("actor_rollout_ref.actor.kl_loss_type=full", ""),
        ("algorithm.adv_estimater=gae", "did you mean algorithm.adv_estimator?"),
        ("actor_rollout_ref.actor.ppo_minibatch_size=8", "did you mean actor.ppo_mini_batch_size?"),
    ],
)
def test_what_changes_learning_and_has_no_counterpart(override: str, text: str) -> None:
    result = translated(BASE, "actor_rollout_ref.actor.use_kl_loss=True", override)
    (line,) = learning(result)
    assert line.startswith(override.lstrip("+").partition("=")[0] + ": ") and text in line
    # the file says it, too, as a line that is refused
    name, reason = line.split(": ", 1)
    entry = yaml.safe_load(result.yaml_text)["untranslated"][name]
    assert entry["reason"] == reason and entry["feature"]


def test_switches_that_are_off_ask_for_nothing() -> None:
    section = "actor_rollout_ref.model.lora"
    result = translated(
        BASE, f"{section}.rank=0", f"{section}.alpha=32", f"{section}.target_modules=[linear_qkv]"
    )
    assert result.is_complete and not result.untranslated
    assert any(
        note == "settings that ask for nothing here: 3 (--show-dropped lists them)."
        for note in result.notes
    )


def test_contradictions_and_wrong_values_are_told() -> None:
    result = translated(BASE, "algorithm.adv_estimator=gae", "critic.enable=False")
    assert any(
        "critic.enable (false) and algorithm.adv_estimator (gae) contradict" in p
        for p in result.problems
    )
    both = "actor_rollout_ref: {rollout: {n: 4}}\nrollout: {n: 8}\n"
    (problem,) = translated(both, source="run.yaml").problems
    assert (
        "actor_rollout_ref.rollout.n (4) [run.yaml:1] and rollout.n (8) [run.yaml:2] are the"
        " same setting"
    ) in problem
    result = translated(BASE, "actor_rollout_ref.actor.ppo_mini_batch_size=many")
    (problem,) = result.problems
    assert (
        "actor_rollout_ref.actor.ppo_mini_batch_size ('many') must be a whole number from 1"
        in problem
    )
    result = translated(BASE, "data.train_batch_size=40")
    assert any(
        "actor.mini_batch_size (64 samples) must divide" in problem for problem in result.problems
    )


def test_secrets_are_not_written() -> None:
    result = translated(
        BASE, "custom_reward_function.reward_kwargs.api_key=sk-123", "+trainer.auth_token=sk-123"
    )
    assert "sk-123" not in result.yaml_text and "<redacted>" in result.yaml_text


def test_several_machines_and_other_shapes() -> None:
    result = translated(
        BASE, "trainer.nnodes=2", "critic.enable=True", "actor_rollout_ref.actor.strategy=fsdp2"
    )
    found = values(result)
    assert "rollout.colocated" not in found and found["rollout.weight_transport"] == "process_group"
    assert found["rollout.transfer_dir"] == "runs/transfer"
    assert "rollout.transfer_dir" not in values(translated(BASE)), "one machine"
    assert any("2 machines: engines get devices of their own" in note for note in result.notes)
    assert (
        found["actor.backend"] == "fsdp"
        and "actor.megatron.tensor_model_parallel_size" not in found
    )
    assert any(
        one.name == "critic.enable" and not one.affects_learning for one in result.untranslated
    )


@pytest.mark.parametrize(("tp", "is_shared"), [(2, True), (16, False)])
def test_engines_take_turns_on_machines_that_hold_the_actor(tp: int, is_shared: bool) -> None:
    """As verl's hybrid engine does; an engine on each device group of every machine."""
    actor = "actor_rollout_ref.actor"
    words = [f"{actor}.strategy=megatron", f"{actor}.megatron.tensor_model_parallel_size={tp}"]
    found = values(translated(BASE, "trainer.nnodes=2", "trainer.n_gpus_per_node=8", *words))
    assert found.get("rollout.colocated", False) is is_shared
    assert ("rollout.weight_transport" in found) is not is_shared
    per_engine = found.get("rollout.sglang.args.tp_size", 1)
    assert found["rollout.num_engines"] == (16 if is_shared else 8) // per_engine


def test_fsdp_and_its_adapters() -> None:
    """By name only, and not where samples are split; LoRA always. Engines do not take
    turns with it.
    """
    fsdp = "actor_rollout_ref.actor.strategy=fsdp"
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    split = translated(BASE, fsdp, ulysses)
    assert (
        "actor.backend" not in values(split)
        and values(split)["actor.megatron.context_parallel_size"] == 2
    )
    assert any("splits samples" in note for note in split.notes)
    model = "actor_rollout_ref.model"
    adapters = [
        f"{model}.lora_rank=32",
        f"{model}.lora_alpha=64",
        f"{model}.target_modules=all-linear",
    ]
    result = translated(BASE, *adapters, f"{model}.enable_gradient_checkpointing=True")
    found = values(result)
    assert not result.problems and result.is_complete and found["actor.backend"] == "fsdp"
    assert (found["actor.lora.rank"], found["actor.lora.alpha"]) == (32, 64)
    assert found["actor.fsdp.activation_checkpointing"] is True and "rollout.colocated" not in found
    assert any("they need devices of their own" in note for note in result.notes)


def run(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["config", "from-verl", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.txt"
    out = tmp_path / "ours.yaml"
    file.write_text(BASE)
    code, text, told = run(
        [str(file), "actor_rollout_ref.rollout.n=2", "--set", "trainer.seed=9"], capsys
    )
    assert code == 0 and "settings taken over" in told
    tree = yaml.safe_load(text)
    assert (
        tree["rollout"]["n"] == 2
        and tree["actor"]["mini_batch_size"] == 32
        and tree["trainer"]["seed"] == 9
    )
    assert run([str(file), "--out", str(out)], capsys)[:2] == (0, "")
    assert main(["config", "check", "--no-files", str(out)]) == 0
    assert "is not overwritten" in run([str(file), "--out", str(out)], capsys)[2]
    arguments = [str(file), "actor_rollout_ref.rollout.top_p=0.5"]
    code, text, told = run(arguments, capsys)
    assert (
        code == 1
        and "below `untranslated` is removed (exit code 1; --lenient: 0):" in told
        and "top_p=0.5" in told
    )
    assert run([*arguments, "--lenient"], capsys)[:2] == (0, text)
    monkeypatch.setattr(sys, "stdin", StringIO(BASE))
    code, text, told = run(["-"], capsys)
    assert (
        code == 0
        and told.startswith("standard input: ")
        and text.startswith("# From standard input by")
    )
    file.write_text("[1, 2]")
    assert run([str(file)], capsys)[0] == 2
    assert run([str(tmp_path / "gone.yaml")], capsys)[0] == 2
    assert run([str(out), "nonsense"], capsys)[0] == 2


def test_loggers_that_are_registered_are_kept() -> None:
    result = translated(PPO_YAML, "trainer.logger=[console,wandb,clearml]")
    found = result.values["trainer.logger"]
    assert found.value == ["console", "wandb", "jsonl"]
    (told,) = [one.reason for one in result.untranslated if one.name == "trainer.logger"]
    assert told.startswith("'clearml': there are ")


def test_router_replay() -> None:
    mode = "actor_rollout_ref.actor.router_replay.mode"
    switch = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
    assert "actor.router_replay" not in values(translated(BASE, f"{mode}=disabled"))
    assert values(translated(BASE, f"{mode}=R2"))["actor.router_replay"] == "r2"
    engines = translated(BASE, f"{mode}=R3", f"{switch}=true")
    assert values(engines)["actor.router_replay"] == "r3" and not any(
        "replay" in one for one in learning(engines)
    )
    assert values(engines)["rollout.sglang.args.enable_return_routed_experts"] is True


def test_a_sandbox_server_becomes_the_reward_code(tmp_path: Path) -> None:
    text = BASE.replace("custom_reward_function.path=score.py\n", "")
    url = "http://10.0.0.1:8080/run_code"
    result = translated(
        text,
        f"reward_model.sandbox_fusion.url={url}",
        "reward_model.sandbox_fusion.max_concurrent=64",
    )
    found = {key: value for key, value in values(result).items() if key.startswith("reward.")}
    assert found == {
        "reward.name": "code",
        "reward.params.compare": "allclose",
        "reward.params.server.url": url,
        "reward.params.server.concurrency": 64,
    }
    assert learning(result) == []
    loads(result, tmp_path / "run.yaml")


def test_the_reward_code_compares_as_verls_scorer_of_programs() -> None:
    plain = BASE.replace("custom_reward_function.path=score.py\n", "")
    compare = "reward.params.compare"
    assert values(translated(plain, ours=["reward.name=code"]))[compare] == "allclose"
    told = translated(plain, ours=["reward.name=code", f"{compare}=close"])
    assert values(told)[compare] == "close"
    assert compare not in values(translated(plain, ours=["reward.name=math_verify"]))
    assert compare not in values(translated(BASE))
    assert "code with reward.params.compare allclose for apps" in str(
        translated(plain).untranslated
    )


def test_fp8_rollouts_are_those_of_the_engine() -> None:
    key = "actor_rollout_ref.rollout.quantization"
    assert (
        values(translated(BASE, f"{key}=fp8", "actor_rollout_ref.rollout.name=vllm"))[
            "rollout.quantization"
        ]
        == "fp8"
    )
    other = translated(BASE, f"{key}=torchao")
    assert any(
        "rollout.quantization (torchao) must be fp8" in str(problem) for problem in other.problems
    )


def test_settings_of_rewards_by_former_names_and_managers() -> None:
    plain = BASE.replace("custom_reward_function.path=score.py\n", "")
    sandbox = ("sandbox_fusion.url=http://h/run_code", "sandbox_fusion.max_concurrent=32")
    found = translated(
        plain, *sandbox, "reward.timeout=30", ours=["reward.params.test_timeout_s=5"]
    )
    assert values(found)["reward.params.server.url"] == "http://h/run_code"
    assert (
        values(found)["reward.params.server.concurrency"] == 32
        and values(found)["reward.timeout_s"] == 30
    )
    own = ("reward_model.reward_loop_source=importlib", "reward_model.reward_loop_class_name=Mine")
    [left] = [
        one
        for one in translated(plain, *own, ours=["reward.name=code"]).untranslated
        if one.affects_learning
    ]
    assert "a reward is a function of one sample" in left.reason
    lists = ("custom_reward_function.path=my.py", "reward_manager.name=batch")
    [left] = [one for one in translated(plain, *lists).untranslated if one.affects_learning]
    assert "takes lists there" in left.reason

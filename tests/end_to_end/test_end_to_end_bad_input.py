"""What a user can get wrong, through the command line: exit code, value, rule and fix, and nothing
started for it.
"""

import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_tools import DP2, ONE_RANK, Finished, train, write_config
from places import MODEL, ROOT
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.dist
LAUNCH = (str(ROOT / "launch" / "torchrun.sh"),)
AGENT = (
    sys.executable,
    "-m",
    "rlhf_megatron.runtime.torchrun.agent",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
)
TWO_RANKS = (
    *AGENT,
    "--nproc-per-node",
    "2",
    "-m",
    "rlhf_megatron",
    "train",
)  # as that script starts them
WARM_MODEL = ROOT / "examples" / "quickstart" / "warm_model"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def refused(run: Finished, exit_code: int = 2) -> str:
    """The message of a run that ended before anything was started or written."""
    assert run.exit_code == exit_code, run.console
    assert "Traceback" not in run.console
    assert not run.run_dir.exists() and run.left_over() == []
    return run.console


def refused_settings(config: Path, settings: dict[str, Any]) -> str:
    return refused(train(config, ONE_RANK | settings))


def test_unknown_keys_wrong_values_and_contradictions_at_once(config: Path) -> None:
    settings = {
        "actor.ppo_epoch": 2,
        "trainer.seed": "x",
        "actor.mini_batch_size": 5,
        "rollout.top_p": 0.5,
    }
    message = refused_settings(config, settings)
    assert f"configuration {config}: 4 problem(s)" in message
    assert (
        "unknown key actor.ppo_epoch (2). Did you mean actor.ppo_epochs? [command line]" in message
    )
    assert "trainer.seed ('x') must be a whole number" in message
    assert (
        "actor.mini_batch_size (5 samples) must divide" in message
        and "rollout.top_p (0.5) must be 1.0" in message
    )


def test_heads_that_do_not_divide(config: Path) -> None:
    message = refused(train(config, {"trainer.n_gpus_per_node": 3, "tp": 3, "pp": 1}))
    assert (
        "num_attention_heads (4) must be a multiple of"
        " actor.megatron.tensor_model_parallel_size (3)"
    ) in message
    assert "use 1 or 2" in message


def test_a_model_without_weights(config: Path) -> None:
    message = refused_settings(config, {"model.init_seed": None})
    assert (
        f"model.path ({MODEL}) has no *.safetensors" in message and "set model.init_seed" in message
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the trained quickstart model that a test may spoil."""
    return Path(shutil.copytree(WARM_MODEL, tmp_path / "model"))


def use_weights(model: Path) -> dict[str, Any]:
    return {"model.path": str(model), "model.init_seed": None}


def test_missing_and_mis_shaped_tensors_and_long_prompts_at_once(config: Path, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    name = "model.layers.0.mlp.gate_proj.weight"
    rows, columns = tensors[name].shape
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, model / "model.safetensors")
    message = refused_settings(config, use_weights(model) | {"data.max_prompt_length": 5})
    assert "2 problem(s)" in message
    assert (
        f"{model} does not fit its config.json" in message
        and "Fetch the directory again" in message
    )
    assert f"tensor model.norm.weight ({len(norm)},) is missing" in message
    assert (
        name in message and str((rows - 1, columns)) in message and str((rows, columns)) in message
    )
    assert (
        "the prompt has 6 tokens, over data.max_prompt_length (5), as have 64 of 64 prompts"
        in message
    )
    assert "raise it to 6, or set data.filter_overlong_prompts=true" in message


def test_truncated_weights_an_unwritable_directory_and_no_engine_at_once(
    config: Path, model: Path
) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    taken = config.parent / "taken"
    taken.write_text("a file")
    engine = {"rollout.engine": "sglang", "rollout.sglang.python": "/no/such/python"}
    settings = use_weights(model) | engine | {"trainer.default_local_dir": str(taken / "runs")}
    message = refused_settings(config, settings)
    assert "3 problem(s)" in message
    assert (
        f"{path} (100000 bytes) is truncated or corrupt" in message and "Fetch it again" in message
    )
    assert (
        f"trainer.default_local_dir ({taken / 'runs'}) must be a directory that can be written"
        in message
    )
    assert "rollout.sglang.python (/no/such/python) must be an executable" in message
    assert taken.read_text() == "a file"


def test_unknown_parts_and_wrong_parameters_at_once(config: Path) -> None:
    settings = {
        "reward.name": "exact_mach",
        "reward.params": {},
        "algorithm.params": {"epsilon": "tiny"},
    }
    message = refused_settings(
        config, settings | {"actor.policy_loss.params": {"clip_ratio_hihg": 0.3}}
    )
    assert "3 problem(s)" in message
    assert "unknown reward 'exact_mach'. Did you mean 'exact_match'?" in message
    assert "algorithm.params.epsilon ('tiny') must be" in message
    assert "actor.policy_loss.params.clip_ratio_hihg" in message and "clip_ratio_high?" in message


def test_a_critic_that_does_not_fit_and_kl_without_weight_at_once(config: Path) -> None:
    settings = {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0,
        "critic.num_ranks": 3,
        "critic.megatron.tensor_model_parallel_size": 2,
        "critic.mini_batch_size": 5,
        "trainer.critic_warmup": 2,
        "trainer.n_gpus_per_node": 5,
    }
    message = refused(train(config, settings | {"tp": 2, "pp": 1}))
    assert "4 problem(s)" in message
    assert (
        "critic.num_ranks (3) must be a multiple of critic.megatron.tensor_model_parallel_size"
        in message
    )
    assert (
        "algorithm.kl_ctrl.kl_coef (0) must be above 0 with algorithm.use_kl_in_reward" in message
    )
    assert "critic.mini_batch_size (5 samples) must divide" in message
    assert "trainer.critic_warmup (2) must be below trainer.total_training_steps (2)" in message


def test_settings_of_a_critic_that_the_run_has_not(config: Path) -> None:
    message = refused_settings(config, {"trainer.critic_warmup": 1, "critic.optim.lr": 1e-4})
    assert "2 problem(s)" in message
    for key in ("trainer.critic_warmup (1)", "critic.optim.lr (0.0001)"):
        assert f"{key} would be ignored because algorithm.adv_estimator is grpo" in message
    assert "set algorithm.adv_estimator to one that needs values: gae" in message


def test_a_critic_with_a_head_of_two_labels(config: Path, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "score.weight": torch.zeros(2, 128)}, model / "model.safetensors")
    message = refused_settings(
        config, {"algorithm.adv_estimator": "gae", "critic.path": str(model)}
    )
    assert f"{model} has a head of 2 labels (score.weight)" in message and "num_labels 1" in message


def test_bad_rows_are_listed_with_their_lines(config: Path) -> None:
    bad = [
        '{"prompt": "01+02="}',
        "not json",
        '{"prompt": 3, "answer": "0"}',
        '{"prompt": "01+02=", "answer": "0"}',
    ]
    (config.parent / "train.jsonl").write_text("\n".join(bad) + "\n")
    message = refused_settings(config, {})
    assert "3 of 4 rows cannot be used" in message and "set data.skip_bad_rows=true" in message
    assert "train.jsonl:1: no key 'answer' (set data.label_key); it has 'prompt'" in message
    assert "train.jsonl:2: not JSON" in message
    assert (
        "train.jsonl:3: 'prompt' must be a string or a list of messages, not a JSON number"
        in message
    )
    assert "train.jsonl:4" not in message


def test_an_empty_dataset(config: Path) -> None:
    (config.parent / "train.jsonl").write_text("\n\n")
    message = refused_settings(config, {})
    assert (
        "the dataset is empty: no rows in" in message
        and "each line must be a JSON object" in message
    )


def test_a_replay_without_records(config: Path) -> None:
    message = refused(train(config, ONE_RANK, "--replay", "1", "--replay-from", "gone"))
    assert "no recorded step under gone/record; run with --record first" in message
    message = refused(train(config, ONE_RANK, "--replay", "1"))
    assert "--replay STEP and --replay-from RUN_DIR" in message


def test_another_number_of_ranks_than_the_configuration_has(config: Path) -> None:
    run = train(config, {"trainer.n_gpus_per_node": 4}, launcher=TWO_RANKS)
    message = refused(run)
    assert message.count("WORLD_SIZE") == 1, "one rank speaks for all"
    assert "the launcher started 2 processes" in message and "1 x 4 = 4" in message
    assert "start it with NNODES=1 NPROC_PER_NODE=4 launch/torchrun.sh" in message


def test_data_are_looked_at_before_hosts_start_under_torchrun_too(config: Path) -> None:
    (config.parent / "runs" / "tiny").mkdir(parents=True)
    (config.parent / "runs" / "tiny" / "summary.json").write_text("{}")
    (config.parent / "val.jsonl").write_text("[]\n")
    run = train(config, DP2, launcher=TWO_RANKS)
    assert run.exit_code == 2 and "Traceback" not in run.console and run.left_over() == []
    assert "val.jsonl:1: a JSON array, not an object" in run.console
    assert [p.name for p in run.run_dir.iterdir()] == ["summary.json"], (
        "the former run stays where it is"
    )


def test_a_port_in_use(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {
            "NNODES": "2",
            "NPROC_PER_NODE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        message = refused(train(config, DP2 | {"trainer.nnodes": 2}, launcher=LAUNCH, env=env))
    assert f"no rendezvous at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)" in message
    assert "address already in use" in message and "Set MASTER_PORT to another port" in message


def test_an_engine_that_dies_at_its_start_ends_all_ranks(config: Path) -> None:
    """The fault: a sitecustomize that ends the server's process, and no other,
    before it listens.
    """
    faults = config.parent / "faults"
    faults.mkdir()
    (faults / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'rlhf_megatron.rollout.local.local_server' in sys.orig_argv:\n"
        "    os.write(2, b'the device is on fire\\n')\n"
        "    os._exit(7)\n"
    )
    run = train(config, DP2, env={"PYTHONPATH": f"{faults}:{ROOT}"})
    assert run.exit_code == 1, run.console
    assert "Traceback" not in run.console and run.left_over() == []
    log = run.run_dir / "engines" / "engine0.log"
    assert f"engine0 exited with code 7 before it was ready; the end of {log}:" in run.console
    assert "the device is on fire" in run.console and log.read_text() == "the device is on fire\n"

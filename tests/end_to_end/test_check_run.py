"""`rlhf-megatron check` as users run it: shipped configurations pass; what is wrong is found, said
and cleaned up.
"""

from __future__ import annotations

import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm
from check_tools import Checked, check, start
from end_to_end_tools import processes_with, wait_for_the_end
from places import ROOT, SUPPORT

from rlhf_megatron.planning.check.layout_proof import ProofRunError, run_train_command

SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"
needs_smollm2 = pytest.mark.skipif(
    not (SMOLLM2 / "config.json").is_file(), reason="run: rlhf-megatron fetch smollm2"
)
needs_library = pytest.mark.skipif(
    not find_spec("reasoning_gym"), reason="the extra reasoning-gym is not installed"
)
ONE_PROCESS = ("configs/quickstart.yaml", "--max-processes", "1")
CONFIGS = {
    "quickstart": ("4", ["tp2 pp2 dp1"]),
    "quickstart_async": ("1", ["tp1 pp1 dp1"]),
    "quickstart_warm": ("2", ["tp1 pp2 dp1"]),
    "quickstart_ppo": ("2", ["tp1 pp2 dp1"]),
    "quickstart_ppo_pool": ("4", ["tp1 pp2 dp1, critic tp2 pp1 dp1"]),
    "quickstart_colocated": ("1", ["tp1 pp1 dp1"]),
    "quickstart_game": ("1", ["tp1 pp1 dp1"]),
    "quickstart_sglang": ("1", ["tp1 pp1 dp1"]),
    "quickstart_sglang_full": ("1", ["tp1 pp1 dp1"]),
    "qwen3_64_ranks": ("4", ["tp2 sequence pp2 vpp2 dp1", "tp1 pp2 vpp2 dp2"]),
    "quickstart_moe": ("8", ["tp2 sequence pp2 ep2 etp1 dp1"]),
    "quickstart_mla": ("4", ["tp2 sequence pp2 ep2 etp1 dp1"]),
    "qwen3_8b": ("4", ["tp2 sequence pp1 dp2"]),
    "smollm2_grpo": ("2", ["tp1 pp2 dp1"]),
    "smollm2_grpo_tp3": ("3", ["tp3 pp1 dp1"]),
    "smollm2_ppo": ("2", ["tp1 pp2 dp1"]),
    "smollm2_reasoning_gym": ("2", ["tp1 pp2 dp1"]),
    "smollm2_sglang": ("2", ["tp1 pp2 dp1"]),
}
"""Processes, and the layouts that are run on them."""

LONG = (  # near to others: left out of make test
    *(
        "quickstart",
        "quickstart_async",
        "quickstart_warm",
        "quickstart_game",
        "quickstart_ppo_pool",
        "quickstart_colocated",
        "quickstart_sglang",
        "quickstart_sglang_full",
        "quickstart_ppo",
        "quickstart_moe",
        "quickstart_mla",
        "qwen3_8b",
        "qwen3_64_ranks",
        "smollm2_sglang",
        "smollm2_grpo_tp3",
        "smollm2_ppo",
    ),
)


# Not an RL run; not Megatron; and one that is folded to 8 processes, below.
OTHERS = ("quickstart_sft", "quickstart_fsdp", "qwen3_235b_512_ranks")


def passed(result: Checked, layouts: list[str]) -> None:
    assert result.exit_code == 0, result.console
    found = result.certificate
    assert found["verdict"] == "passed" and "# Check of configs/" in result.report
    assert [layout["layout"] for layout in found["proof"]["layouts"]] == layouts
    for layout in found["proof"]["layouts"]:
        rows = {row["quantity"] for row in layout["rows"]}
        assert {
            "update",
            "actor/loss",
            "actor/grad_norm",
            "actor/entropy",
            "engine_against_trainer",
        } <= rows
        assert all(row["is_ok"] for row in layout["rows"]) and not layout["problems"]
        steps = {row["where"] for row in layout["rows"] if row["quantity"] == "actor/loss"}
        assert steps == {"step 1", "step 2"}
    assert found["proof"]["num_syncs"] >= 3 and found["memory"]["total_bytes"] > 0
    assert not result.left


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.smollm2, needs_smollm2] if "smollm2" in name else []
    marks = [*marks, pytest.mark.long] if name in LONG else marks
    return [*marks, needs_library] if "reasoning_gym" in name else marks


def test_every_shipped_configuration_is_listed_here() -> None:
    """But for the recipes, which tests/unit/proof/test_check_fold.py folds."""
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {*CONFIGS, *OTHERS}


@pytest.mark.parametrize(
    ("name", "reason"),
    [("quickstart_sft", "this file has job: sft"), ("quickstart_fsdp", "actor.backend fsdp")],
)
def test_what_is_not_proven_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    result = check(tmp_path / "out", f"configs/{name}.yaml", "--no-files")
    assert result.exit_code != 0 and reason in result.console


@pytest.mark.dist
@pytest.mark.parametrize("name", [pytest.param(n, marks=marks_of(n)) for n in CONFIGS])
def test_every_shipped_configuration_passes(name: str, tmp_path: Path) -> None:
    processes, layouts = CONFIGS[name]
    words = (f"configs/{name}.yaml", "--no-files", "--max-processes", processes)
    result = check(tmp_path / "out", *words)
    passed(result, layouts)
    if "ppo" in name:
        passed_with_a_critic(result)
    assert result.certificate["memory"]["has_critic_pool"] == name.endswith("_pool")


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_replayed_routing_passes(mode: str, tmp_path: Path) -> None:
    """Every layout trains on the files that the engine of the recorded run wrote."""
    words = (
        "configs/quickstart_moe.yaml",
        "--no-files",
        "--max-processes",
        CONFIGS["quickstart_moe"][0],
    )
    passed(
        check(tmp_path / "out", *words, f"actor.router_replay={mode}"), CONFIGS["quickstart_moe"][1]
    )


def passed_with_a_critic(result: Checked) -> None:
    for layout in result.certificate["proof"]["layouts"]:
        rows = {row["quantity"] for row in layout["rows"]}
        assert {
            "critic/values/mean",
            "critic/returns/mean",
            "critic/vf_loss",
            "critic/grad_norm",
        } <= rows
        learned = {
            row["where"]
            for row in layout["rows"]
            if row["quantity"] == "update" and row["value"] > 0
        }
        head = {"critic: score.weight", "critic: score.bias", "critic: model.embed_tokens.weight"}
        assert head | {"model.embed_tokens.weight"} <= learned
    assert result.certificate["memory"]["critic_stages"]


@pytest.mark.dist
def test_a_planted_mistake_fails_and_names_the_tensors(tmp_path: Path) -> None:
    """One rank trains with another weight decay: matrices differ, norms (which have none) and step
    1's start do not.

    With a reference of other weights than the actor's, which the check makes itself.
    """
    settings = ["warmup.max_steps=0", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"]
    settings.append("reference.path=examples/quickstart/warm_model")
    result = check(tmp_path / "out", *ONE_PROCESS, *settings, script=SUPPORT / "check_tools.py")
    assert result.exit_code == 1, result.console
    assert "verdict        failed" in result.console and "over the bar" in result.console
    (layout,) = result.certificate["proof"]["layouts"]
    over = {
        row["where"] for row in layout["rows"] if row["quantity"] == "update" and not row["is_ok"]
    }
    assert "model.layers.0.mlp.down_proj.weight" in over and not [
        name for name in over if "norm" in name
    ]
    assert "OVER THE BAR" in result.report and "FAILED" in result.report
    first = {row["quantity"]: row for row in layout["rows"] if row["where"] == "step 1"}
    assert first["actor/entropy"]["is_ok"], "before the first update nothing differs"
    assert first["actor/kl_loss"]["value"] > 1e-3


@pytest.mark.dist
@pytest.mark.long
def test_context_parallelism_with_transformer_engines_names(tmp_path: Path) -> None:
    """What no shipped configuration has."""
    settings = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 2,
        "sequence_parallel": "true",
        "use_distributed_optimizer": "true",
        "transformer_impl": "transformer_engine",
        "recompute_granularity": "selective",
    }
    words = [f"actor.megatron.{name}={value}" for name, value in settings.items()]
    result = check(
        tmp_path / "out",
        "configs/quickstart_warm.yaml",
        *words,
        "actor.loss_agg_mode=seq-mean-token-mean",
    )
    passed(result, ["tp2 sequence pp1 cp2 dp1"])


@pytest.mark.dist
@pytest.mark.long
def test_a_critic_with_its_own_pool_directory_and_phases(tmp_path: Path) -> None:
    """What no shipped configuration has: a warm-up before it, KL in the reward, other batches, two
    stages; a copy of the policy at the end of the warm-up, and a critic from another directory.
    """
    words = [
        *(
            "configs/quickstart.yaml",
            "trainer.n_gpus_per_node=3",
            "actor.megatron.tensor_model_parallel_size=1",
        ),
        *(
            "actor.megatron.pipeline_model_parallel_size=1",
            "algorithm.adv_estimator=gae",
            "critic.num_ranks=2",
        ),
        *(
            "critic.megatron.pipeline_model_parallel_size=2",
            "critic.mini_batch_size=64",
            "critic.ppo_epochs=2",
        ),
        *(
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive",
            "trainer.critic_warmup=1",
        ),
    ]
    result = check(tmp_path / "copy", *words)
    passed(result, ["tp1 pp1 dp1, critic tp1 pp2 dp1"])
    passed_with_a_critic(result)
    assert (
        result.certificate["memory"]["has_critic_pool"]
        and result.certificate["memory"]["reference_bytes"]
    )
    kl = {row["quantity"] for row in result.certificate["proof"]["layouts"][0]["rows"]}
    assert {"actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff", "warmup/loss"} <= kl

    result = check(
        tmp_path / "other",
        *words,
        "critic.path=examples/quickstart/warm_model",
        "warmup.max_steps=0",
    )
    passed(result, ["tp1 pp1 dp1, critic tp1 pp2 dp1"])
    passed_with_a_critic(result)


@pytest.mark.dist
def test_an_interrupted_check_leaves_no_process(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # a job in the background has it ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    process, marker = start(tmp_path / "out", ["configs/quickstart.yaml", "--max-processes", "4"])
    deadline = time.monotonic() + 300
    while (
        len(processes_with(marker)) < 7 and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.2)  # the check, the agent, 4 ranks, the controller, an engine
    assert process.poll() is None and len(processes_with(marker)) >= 7
    process.send_signal(signal.SIGINT)
    console, _ = process.communicate(timeout=60)
    left = wait_for_the_end(marker, within_s=20)
    assert process.returncode == 130 and "interrupted" in console and not left


@pytest.mark.dist
def test_without_a_run_memory_is_told(tmp_path: Path) -> None:
    """64 ranks of 32 billion parameters: 16 bytes a parameter a shard, less where optimizer
    state is shared.
    """
    result = check(tmp_path / "out", "configs/qwen3_64_ranks.yaml", "--no-files", "--no-run")
    assert result.exit_code == 0, result.console
    found = result.certificate
    assert (found["verdict"], found["proof"], found["layout"]) == (
        "not run",
        None,
        "tp4 sequence pp4 vpp2 dp4",
    )
    stages = found["memory"]["stages"]
    assert [stage["num_ranks"] for stage in stages] == [16] * 4
    layer = 5120 * (64 + 2 * 8) * 128 + 64 * 128 * 5120 + 3 * 5120 * 25600
    norms = 2 * 5120 + 2 * 128
    assert stages[1]["num_parameters"] == 16 * (layer // 4 + norms), (
        "16 of 64 layers, a quarter of every matrix"
    )
    assert stages[0]["num_parameters"] == stages[1]["num_parameters"] + 151936 // 4 * 5120
    assert stages[3]["num_parameters"] == stages[0]["num_parameters"] + 5120
    assert sum(stages[1]["moments"]) == 8 * stages[1]["num_parameters"]
    assert found["memory"]["reference_bytes"] == [2 * stage["num_parameters"] for stage in stages]
    head = found["memory"]["head"]
    assert head["tile"] == 8192 * 8192 * (4 + 2), "logits in float32 and their gradient in bfloat16"
    assert head["hidden_gradient"] == 16384 * 5120 * 4 + 16384 // 4 * 5120 * 2, (
        "of all tokens, then of this part"
    )
    assert sum(head[part] for part in ("tile", "hidden_gradient", "stash")) < head["peak"] < 2**31
    # Full recompute: inputs of 16 layers, 11 chunks under way; a whole layer and, where no head is,
    # its gradients.
    kept = found["memory"]["activations"]
    inputs = 16 * 6 * 16384 * 5120 * 2 // 4
    assert inputs < kept[0] < inputs + 2 * 1.2e9 and kept == sorted(kept, reverse=True)
    assert found["memory"]["peaks"][3] == max(stages[3]["totals"]) + kept[3] + head["peak"]
    assert "Not included: temporary tensors" in result.report
    assert "nothing is said about the layout's results" in result.report


@pytest.mark.long
@pytest.mark.dist
def test_memory_of_512_ranks_with_experts_is_told(tmp_path: Path) -> None:
    """A Qwen3 of 235 billion parameters: a rank has a quarter of its stage's attention and 8 of 128
    experts a layer.
    """
    result = check(tmp_path / "out", "configs/qwen3_235b_512_ranks.yaml", "--no-files", "--no-run")
    assert result.exit_code == 0, result.console
    found = result.certificate
    assert found["layout"] == "tp4 sequence pp8 ep16 etp1 dp16"
    attention = (4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096) // 4
    whole = 2 * 4096 + 2 * 128 + 128 * 4096  # norms and router
    layer = attention + whole + 8 * 3 * 4096 * 1536
    ends = 11 * layer + 151936 // 4 * 4096
    counts = [stage["num_parameters"] for stage in found["memory"]["stages"]]
    assert counts == [ends, *[12 * layer] * 6, ends + 4096]
    assert found["memory"]["stages"][1]["gradients"] == 4 * 12 * layer


@pytest.mark.long
@pytest.mark.dist
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("configs/qwen3_235b_512_ranks.yaml", ()),
        (
            "configs/recipes/deepseek_v3_grpo.yaml",
            (
                *("algorithm.adv_estimator=gae", "actor.loss_agg_mode=token-mean"),
                *("trainer.nnodes=64", "actor.megatron.expert_model_parallel_size=32"),
            ),
        ),
    ],
    ids=("qwen3_235b", "deepseek_v3"),
)
def test_runs_of_512_ranks_with_experts_pass_folded_to_8(
    config: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Actor, critic, reference, weight sync, checkpoint and export of two steps, against one
    unsharded rank.
    """
    result = check(tmp_path / "out", config, *words, "--no-files", "--max-processes", "8")
    layouts = [layout["layout"] for layout in result.certificate["proof"]["layouts"]]
    passed(result, layouts)
    assert len(layouts) == 2 and all("ep" in layout for layout in layouts)
    rows = {
        row["where"] for layout in result.certificate["proof"]["layouts"] for row in layout["rows"]
    }
    assert any(".experts." in where for where in rows) and any(
        where.startswith("critic: ") for where in rows
    )


@pytest.mark.long
@pytest.mark.dist
def test_a_run_whose_engines_hold_fp8_passes(tmp_path: Path) -> None:
    """Ranks of the tiny model hold whole blocks; the engine's receipts are of blocks and scales."""
    words = (
        "configs/recipes/qwen3_8b_dapo.yaml",
        "rollout.quantization=fp8",
        "--no-files",
        "--max-processes",
        "2",
    )
    passed(check(tmp_path / "out", *words), ["tp2 sequence pp1 dp1", "tp1 pp1 dp2"])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ("configs/quickstart.yaml", "--max-processes", "0"),
            1,
            "--max-processes is 0; it must be at least 1.",
        ),
        (
            ("configs/quickstart.yaml", "actor.mini_batch_size=7", "rollout.top_p=0.5"),
            2,
            "2 problem(s)",
        ),
        (
            ("configs/quickstart.yaml", "model.path=gone", "--no-files"),
            1,
            "gone/config.json does not exist",
        ),
        (
            ("configs/quickstart.yaml", "actor.policy_loss.loss_mode=ppo"),
            2,
            "unknown policy loss 'ppo'",
        ),
        (("configs/qwen3_64_ranks.yaml",), 2, "has no *.safetensors"),
        (("configs/gone.yaml",), 2, "cannot read configs/gone.yaml"),
        (
            (
                *("configs/recipes/qwen3_30b_a3b_gspo.yaml", "rollout.quantization=fp8"),
                *("rollout.sglang.args={tp_size: 8}", "--no-files"),
            ),
            1,
            (
                "the engine's tp_size cuts 768 rows of"
                " model.layers.0.mlp.experts.0.gate_proj.weight into 8 parts of 96"
            ),
        ),
    ],
)
def test_bad_input(words: tuple[str, ...], code: int, message: str, tmp_path: Path) -> None:
    result = check(tmp_path / "out", *words)
    assert (result.exit_code, result.out.exists()) == (code, False), result.console
    assert message in result.console and "Traceback" not in result.console


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    result = check(tmp_path / "out", "configs/quickstart.yaml", "--no-run")
    assert result.exit_code == 1 and "has files that no check wrote; name another" in result.console
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def test_a_run_that_fails_is_told_with_its_last_words_and_its_logs(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: {path: gone}\n")
    with pytest.raises(ProofRunError) as error:
        run_train_command(tmp_path / "bad.yaml", [], tmp_path / "shape", 120.0)
    text = str(error.value)
    assert (
        text.startswith("shape: exit code 2. It ended with:\n")
        and "gone) is not a directory" in text
    )
    assert f"Logs: {tmp_path / 'shape'}.log, {tmp_path / 'shape' / 'logs'}" in text


def test_a_run_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = tmp_path / "sleeper"
    sleeper.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(600)\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    with warm.cold(), pytest.raises(ProofRunError, match="shape: no end within 1 s"):
        run_train_command(tmp_path / "any.yaml", [], tmp_path / "shape", 1.0)

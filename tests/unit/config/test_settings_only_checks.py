"""`config check --no-files` makes every check that needs only settings, and each message names the
setting to change.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import rlhf_megatron
from rlhf_megatron.cli.main import main
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules import IDLE_RULES
from rlhf_megatron.config.rules.validate import validate_config, validate_model_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.registry import PACKAGES

RULES_DIRECTORY = Path(rlhf_megatron.__file__).parent / "config" / "rules"
RUN = """
model: {path: /models/gone}
data: {train_files: [train.jsonl], val_files: [val.jsonl]}
reward: {name: exact_match}
trainer: {nnodes: 1, n_gpus_per_node: 8, runtime: torchrun}
actor: {megatron: {use_distributed_optimizer: true}}
"""
TWO_NODES = (
    "trainer.nnodes=2",
    "rollout.engine=sglang",
    "rollout.num_engines=2",
    "rollout.colocated=true",
)
MEGATRON = "actor.megatron"


def check_without_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *overrides: str
) -> tuple[int, str]:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    code = main(["config", "check", "--no-files", str(path), *overrides])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.parametrize(
    ("wrong", "expected", "right"),
    [
        (
            (f"{MEGATRON}.expert_model_parallel_size=3",),
            "expert_model_parallel_size x expert_tensor_parallel_size (3 x 1 = 3) must divide the"
            " ranks of a pipeline stage (8 over all replicas)",
            (f"{MEGATRON}.expert_model_parallel_size=4",),
        ),
        (
            (f"{MEGATRON}.moe_token_dispatcher_type=flex",),
            "(flex) needs experts that several ranks share out",
            (
                f"{MEGATRON}.moe_token_dispatcher_type=flex",
                f"{MEGATRON}.expert_model_parallel_size=2",
            ),
        ),
        (
            (
                f"{MEGATRON}.moe_token_dispatcher_type=flex",
                f"{MEGATRON}.expert_model_parallel_size=2",
                "model.dtype=float32",
            ),
            "actor.megatron.moe_token_dispatcher_type (flex) sends bfloat16 only, and model.dtype"
            " is float32; use alltoall, or model.dtype bfloat16.",
            (f"{MEGATRON}.expert_model_parallel_size=2", "model.dtype=float32"),
        ),
        (
            (f"{MEGATRON}.moe_permute_fusion=true", "trainer.device=cpu"),
            "actor.megatron.moe_permute_fusion (true) has kernels for CUDA only, and trainer.device"
            " is cpu; set actor.megatron.moe_permute_fusion to false.",
            (f"{MEGATRON}.moe_permute_fusion=true", "trainer.device=cuda"),
        ),
        (
            (f"{MEGATRON}.moe_aux_loss_coeff=0.01",),
            "moe_aux_loss_coeff (0.01) needs moe_router_load_balancing_type",
            (
                f"{MEGATRON}.moe_aux_loss_coeff=0.01",
                f"{MEGATRON}.moe_router_load_balancing_type=seq_aux_loss",
            ),
        ),
        (
            ("actor.router_replay=r3", "rollout.engine=sglang"),
            "actor.router_replay (r3) needs servers that tell which experts tokens met",
            (
                "actor.router_replay=r3",
                "rollout.engine=sglang",
                "rollout.sglang.args.enable_return_routed_experts=true",
            ),
        ),
        (
            ("actor.router_replay=r2", "rollout.routes_gb=2"),
            "rollout.routes_gb (2) is of files that actor.router_replay r3 alone writes, not r2;"
            " remove rollout.routes_gb.",
            ("actor.router_replay=r2",),
        ),
        (
            TWO_NODES,
            "rollout.transfer_dir (null) must name a directory that all machines see: engines of"
            " sglang can be on machines [0, 1]",
            (*TWO_NODES, "rollout.transfer_dir=/shared"),
        ),
        (
            ("trainer.save_freq=5", "trainer.keep_best=val/acurracy"),
            "trainer.keep_best (val/acurracy) is no metric of a run",
            ("trainer.save_freq=5", "trainer.keep_best=val/accuracy"),
        ),
    ],
    ids=[
        "ep",
        "flex",
        "flex-float32",
        "fusion-cpu",
        "aux-loss",
        "replay",
        "routes",
        "transfer-dir",
        "keep-best",
    ],
)
def test_settings_are_checked_without_files(
    wrong: tuple[str, ...],
    expected: str,
    right: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = check_without_files(tmp_path, capsys, *wrong)
    assert code != 0
    assert expected in said
    code, said = check_without_files(tmp_path, capsys, *right)
    assert code == 0, said


@pytest.mark.parametrize(
    ("settings", "machines"),
    [
        (("rollout.weight_transport=process_group", "rollout.engine_machines=[2]"), "[2]"),
        (("rollout.weight_transport=process_group", "trainer.runtime=ray"), "[0, 1]"),
        (("rollout.weight_transport=disk", "rollout.engine_machines=[2]"), ""),
        (("rollout.weight_transport=process_group", "rollout.engine_machines=[0]"), ""),
        (("rollout.endpoints=[http://10.0.0.1:30000]", "rollout.weight_transport=disk"), ""),
        (("rollout.engine=local",), ""),
    ],
)
def test_engines_on_other_machines_need_a_shared_directory(
    settings: tuple[str, ...], machines: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    loaded = read_run_config(path, ["trainer.nnodes=2", "rollout.engine=sglang", *settings])
    problems = [text for text in validate_config(loaded) if "rollout.transfer_dir" in text]
    assert len(problems) == bool(machines)
    assert all(f"machines {machines}, and" in text for text in problems)


def test_checks_of_settings_import_no_torch() -> None:
    """They keep `config check --no-files` fast. Another test may have imported torch here."""
    module = sys.modules["rlhf_megatron.cli.config_command"].__file__
    assert module is not None
    imported = {
        node.module
        for node in ast.walk(ast.parse(Path(module).read_text()))
        if isinstance(node, ast.ImportFrom) and node.col_offset == 0
    }
    assert "rlhf_megatron.controller.settings_checks" in imported
    assert "rlhf_megatron.controller.preflight" not in imported


def test_an_ignored_setting_and_its_switch_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    (problem,) = validate_config(read_run_config(path, ["actor.lora.rank=16"]))
    assert problem.startswith(
        "actor.lora.rank (16) would be ignored because actor.backend is megatron; remove"
        " actor.lora.rank, or set actor.backend to fsdp."
    )


UNKNOWN_PARTS = {
    "advantage estimator": ("algorithm.adv_estimator=mine",),
    "policy loss": ("actor.policy_loss.loss_mode=mine",),
    "aggregation": ("actor.loss_agg_mode=mine",),
    "distillation loss": ("actor.distillation.loss_mode=mine",),
    "preference loss": ("job=sft", "sft.loss_mode=mine"),
    "reward": ("reward.name=mine",),
    "engine": ("rollout.engine=mine",),
    "balancer": ("rollout.router=mine",),
    "schedule": ("schedule.name=mine",),
    "logger": ("trainer.logger=[mine]",),
    "task": ("data.task=mine", "data.train_files=[]", "data.val_files=[]"),
    "environment": ("rollout.environment.name=mine",),
}


@pytest.mark.parametrize("kind", sorted(PACKAGES))
def test_an_unknown_part_is_answered_with_plugins(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    if kind == "model family":
        problems = validate_model_config(read_run_config(path), {"model_type": "mine"})
        expected = "model_type ('mine') must be one of "
    else:
        problems = validate_config(read_run_config(path, UNKNOWN_PARTS[kind]))
        expected = f"unknown {kind} 'mine'. Known: "
    (problem,) = [text for text in problems if expected in text]
    assert "of your own" in problem and "in plugins:" in problem


PRONOUN = re.compile(
    r"\b(remove|rename) (it|that|them)\b|\bset (it|that) to\b|\bgive (it|that)\b"
    r"|\bleave it out\b|\bor (it|that) to\b"
)


def test_advice_on_idle_settings_has_no_pronoun() -> None:
    fixes = [fix for rule in IDLE_RULES for _, _, _, fix in rule(RunConfig())]
    assert len(fixes) > 40
    assert [fix for fix in fixes if PRONOUN.search(fix)] == []


def test_messages_of_rules_have_no_pronoun_for_a_setting() -> None:
    """A message names two settings or more; "it" could be any of them."""
    paths = [*RULES_DIRECTORY.glob("*.py"), RULES_DIRECTORY.parent / "rollout_correction_rules.py"]
    found = [
        f"{path.name}:{line}: {text}"
        for path in paths
        for line, text in list_strings(path)
        if PRONOUN.search(text)
    ]
    assert found == []


def list_strings(path: Path) -> list[tuple[int, str]]:
    """Return (line, text) of each string in a file that is no docstring; an f-string in parts."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]

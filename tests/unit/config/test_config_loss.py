"""Rules of the policy loss and its aggregation."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config

LOSS = "actor.policy_loss.loss_mode"
MODE = "actor.loss_agg_mode"
FACTOR = "actor.loss_scale_factor"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    return path


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{LOSS}=gspo", f"{MODE}=seq-mean-token-mean"],
        [f"{LOSS}=gspo", f"{MODE}=token-mean"],  # written down: it is meant
        [f"{LOSS}=cispo"],
        [f"{MODE}=seq-mean-token-sum-norm", f"{FACTOR}=4.5"],
        [f"{MODE}=seq-mean-token-sum-norm"],
        [f"{MODE}=token-sum"],
        [
            "algorithm.adv_estimator=gae",
            "critic.loss_agg_mode=seq-mean-token-sum-norm",
            f"{FACTOR}=4",
        ],
        ["actor.use_kl_loss=true", "actor.kl_loss_type=k3+"],
    ],
)
def test_what_may_stand_together(run_file: Path, overrides: list[str]) -> None:
    assert validate_config(read_run_config(run_file, overrides)) == []


@pytest.mark.parametrize(
    "loss", [name for name in POLICY_LOSSES if POLICY_LOSSES.get(name).aggregation]
)
def test_an_aggregation_that_nobody_chose_is_refused(run_file: Path, loss: str) -> None:
    (problem,) = validate_config(read_run_config(run_file, [f"{LOSS}={loss}"]))
    assert (
        f"actor.loss_agg_mode (token-mean, the default) must be chosen for {LOSS} {loss}" in problem
    )
    assert (
        "set actor.loss_agg_mode: seq-mean-token-mean, or write token-mean where that is meant."
        in problem
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([f"{FACTOR}=4"], "would be ignored because actor.loss_agg_mode is token-mean"),
        (
            [f"{MODE}=seq-mean-token-sum-norm", f"{FACTOR}=0"],
            "actor.loss_scale_factor (0.0) must be at least 1e-12",
        ),
        (
            ["critic.loss_agg_mode=seq-mean-token-sum-norm", f"{FACTOR}=4"],
            "actor.loss_scale_factor (4.0) would be ignored",
        ),
    ],
)
def test_factors_that_do_nothing_are_refused(
    run_file: Path, overrides: list[str], expected: str
) -> None:
    assert any(
        expected in problem for problem in validate_config(read_run_config(run_file, overrides))
    )

"""Three steps from recorded rollouts in each mode, with real roles on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rollout_correction_jobs as jobs
import torch
import workers_reference as reference
from dist_pool import DistPool

from rlhf_megatron.algorithms.rollout_correction.correction_params import (
    CorrectionParams,
    ImportanceWeightParams,
    RejectionFilter,
)
from rlhf_megatron.config import rollout_correction_rules as settings
from rlhf_megatron.config.schema import RolloutCorrectionConfig
from rlhf_megatron.ranks.workers.actor_losses import parse_correction_params

pytestmark = pytest.mark.dist

Cases = dict[str, tuple[dict[str, Any], str]]


def loss_of(preset: str) -> str:
    resolved = settings.resolve_rollout_correction(RolloutCorrectionConfig(preset))
    return str(resolved.loss_type) if resolved.mode == "bypass" else "ppo_clip"


def check(found: dict[str, Any], cases: Cases) -> None:
    for name, (section, _) in cases.items():
        config = RolloutCorrectionConfig(**section)
        params = parse_correction_params(config)
        is_bypass = settings.is_bypass_mode(config)
        for number, step in enumerate(found[name], 1):
            metrics = step["metrics"]
            where = f"{name}, step {number}"
            assert not step["unlisted"] and not step["not_finite"], (where, step)
            expected = (
                {"old_log_probs", "entropies"}
                if not is_bypass or number == 1 or params.use_batch_norm
                else set()
            )
            if params.importance is not None and (not is_bypass or params.use_batch_norm):
                expected.add("correction_weights")
            if params.has_rejection and not is_bypass:
                expected.add("is_kept")
            assert step["columns"] == expected, where
            assert ("rollout_corr/k3_kl" in metrics) == ("old_log_probs" in expected), where
            is_moving = is_bypass and params.importance is not None
            assert ("actor/rollout_is_mean" in metrics) == is_moving, where
            rejected = metrics.get(
                "actor/rollout_rs_masked_fraction"
                if is_bypass
                else "rollout_corr/rollout_rs_masked_fraction"
            )
            assert (rejected is not None) == params.has_rejection, where
            assert (
                metrics["actor/num_optimizer_steps"] == 1
                and metrics["actor/num_skipped_steps"] == 0
            )
            assert (metrics["actor/grad_norm"] > 0) == (rejected != 1), where
        assert found[name][0]["metrics"]["actor/grad_norm"] > 1e-3, name


FEW: Cases = {
    "decoupled": ({"preset": "decoupled_geo_rs_token_tis"}, "reinforce"),
    "bypass": ({"preset": "bypass_pg_geo_rs_token_tis"}, "reinforce"),
    "again": ({"preset": "bypass_pg_geo_rs_token_tis"}, "reinforce"),
    "sequences": ({"preset": "bypass_pg_is", "rollout_is_batch_normalize": True}, "reinforce"),
}


def test_three_steps_in_each_mode(dist_pool: DistPool, tmp_path: Path) -> None:
    """The first update is the same in both, where the policy has not moved; a run again is the
    same bit for bit.
    """
    found = dist_pool.run(jobs.three_steps, timeout_s=300, cases=FEW, directory=tmp_path)[0]
    check(found, FEW)
    first = {name: steps[0]["metrics"] for name, steps in found.items()}
    for key in ("actor/grad_norm", "actor/pg_loss", "actor/loss"):
        assert first["bypass"][key] == pytest.approx(first["decoupled"][key], rel=1e-5), key
    decoupled = first["decoupled"]
    bypass = first["bypass"]
    assert bypass["actor/rollout_rs_masked_fraction"] == pytest.approx(
        bypass["rollout_corr/rollout_rs_masked_fraction"],
        abs=0.05,  # with and without the sample of masked status
    )
    assert (
        decoupled["rollout_corr/rollout_rs_masked_fraction"]
        == bypass["rollout_corr/rollout_rs_masked_fraction"]
        > 0.2
    )
    timed = ("timing", "perf", "memory")
    for one, other in zip(found["bypass"], found["again"], strict=True):
        same = {key: value for key, value in one["metrics"].items() if not key.startswith(timed)}
        assert same == {key: other["metrics"][key] for key in same}


LAYOUTS: list[Any] = [
    pytest.param({"cp": 2}, id="cp2"),
    *(
        pytest.param(axes, id="".join(axes), marks=pytest.mark.long)
        for axes in ({"dp": 2}, {"tp": 2, "pp": 2})
    ),
    pytest.param({"pp": 2, "cp": 2}, id="ppcp", marks=pytest.mark.long),
]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_moving_weights_and_rejection_do_not_depend_on_the_layout(
    dist_pool: DistPool, axes: dict[str, int]
) -> None:
    """Context-parallel ranks have a part of each sequence, data-parallel ones some sequences."""
    model = reference.make_model("llama")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    batch = reference.make_batch()
    with torch.no_grad():
        log_probs, _ = reference.token_log_probs(model, batch)
    batch = reference.with_past(batch, log_probs)
    filters = (
        RejectionFilter("seq_mean_k1", 1.2, 0.85),
        RejectionFilter("seq_max_k2", 0.18),
        RejectionFilter("token_k3", 0.04),
    )
    params = CorrectionParams(ImportanceWeightParams("sequence", 1.5), filters=filters, veto=0.5)
    job: dict[str, Any] = {"state": state, "batch": batch, "params": params}
    alone = dist_pool.run(jobs.corrected_update, timeout_s=300, **job)[0]
    leaders = [
        part
        for part in dist_pool.run(jobs.corrected_update, timeout_s=300, **axes, **job)
        if part is not None
    ]
    assert 0.2 < alone.sums["actor/rollout_rs_masked_fraction"] < 0.8
    for name, value in alone.sums.items():
        assert sum(part.sums[name] for part in leaders) == pytest.approx(
            value, rel=5e-6, abs=1e-6
        ), name  # terms are about 1
    assert (
        leaders[0].grad_norm == pytest.approx(alone.grad_norm, rel=5e-6) and alone.grad_norm > 1e-3
    )


@pytest.mark.long
def test_three_steps_with_every_preset(dist_pool: DistPool, tmp_path: Path) -> None:
    cases: Cases = {name: ({"preset": name}, loss_of(name)) for name in settings.PRESETS}
    check(dist_pool.run(jobs.three_steps, timeout_s=600, cases=cases, directory=tmp_path)[0], cases)


@pytest.mark.long
def test_a_kl_in_the_reward_has_the_trainers_log_probs_in_bypass_mode_too(
    dist_pool: DistPool, tmp_path: Path
) -> None:
    found = dist_pool.run(jobs.with_kl_in_reward, timeout_s=300, directory=tmp_path)[0]
    assert all("old_log_probs" in columns for columns in found) and len(found) == jobs.NUM_STEPS

"""The correction in the loss: against plain formulas, over micro-batches, and what both modes
have in common.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rlhf_megatron.algorithms.rollout_correction.correction_params import (
    CorrectionParams,
    ImportanceWeightParams,
    RejectionFilter,
)
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.config.schema import ActorConfig, KernelsConfig, PolicyLossConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import make_valid_sample_mask
from rlhf_megatron.controller.scheduler.advantage_stage import compute_correction_columns
from rlhf_megatron.controller.scheduler.mini_batches import make_actor_mini_batch
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    MiniBatch,
    TrainBatch,
    add_columns,
    select_samples,
)
from rlhf_megatron.data.codec import decode_message, encode_message
from rlhf_megatron.ranks.workers.actor_losses import CorrectedRowLoss, RowLoss, make_row_losses

COLUMNS = (
    "loss_weights",
    "metric_weights",
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "correction_weights",
)
IMPORTANCES = {
    "none": None,
    "token": ImportanceWeightParams("token", 1.6),
    "sequence": ImportanceWeightParams("sequence", 1.8),
    "icepop": ImportanceWeightParams("token", 2.5, 0.6),
    "sequence icepop": ImportanceWeightParams("sequence", 2.5, 0.3),
}
FILTERS = {
    "none": (),
    "token": (RejectionFilter("token_k1", 2.0, 0.6), RejectionFilter("token_k3", 0.4)),
    "sequence": (RejectionFilter("seq_mean_k1", 1.6, 0.7), RejectionFilter("seq_max_k2", 1.2)),
}


@dataclass(frozen=True)
class Case:
    batch: AnnotatedBatch  # of the policy before the update
    advantages: Tensor

    def mini_batch(
        self, params: CorrectionParams, is_bypass: bool, mode: str = "token-mean"
    ) -> MiniBatch:
        """Of the whole step, as the controller makes it."""
        columns, _ = compute_correction_columns(
            self.batch, make_valid_sample_mask(self.batch), params, is_bypass
        )
        train = add_columns(TrainBatch, self.batch, advantages=self.advantages, **columns)
        return make_actor_mini_batch(
            decode_message(encode_message(train)), mode, is_bypass=is_bypass
        )  # as a journal gives it back


def make_case(seed: int = 0, num_samples: int = 9, scale: float = 0.4) -> Case:
    rng = random.Random(seed)
    lengths = torch.tensor([1 + rng.choice((1, 2, 4, 7)) for _ in range(num_samples)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count = int(offsets[-1])
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(count, dtype=torch.bool)
    mask[offsets[:-1]] = False
    engine = -2 * torch.rand(count, generator=generator) - 0.5
    trainer = engine + scale * torch.randn(count, generator=generator)
    names = ("",) * num_samples
    batch = AnnotatedBatch(
        offsets=offsets,
        token_ids=torch.zeros(count, dtype=torch.int64),
        response_mask=mask,
        rollout_log_probs=engine.masked_fill(~mask, 0.0),
        group_ids=torch.arange(num_samples),
        sample_ids=torch.arange(num_samples),
        policy_versions=torch.zeros(num_samples, dtype=torch.int64),
        finish_reasons=names,
        prompts=names,
        responses=names,
        labels=names,
        sources=names,
        extras=names,
        rewards=torch.zeros(num_samples),
        reward_statuses=("ok",) * num_samples,
        old_log_probs=trainer.masked_fill(~mask, 0.0),
    )
    return Case(batch, torch.randn(count, generator=generator).masked_fill(~mask, 0.0))


def row_loss_of(
    loss: str, correction: CorrectionParams | None, **kernels: bool
) -> RowLoss | CorrectedRowLoss:
    params = (
        {"clip_ratio_low": 0.9, "clip_ratio_high": 9.0, "clip_ratio_c": 20.0}
        if loss == "ppo_clip"
        else {}
    )
    config = ActorConfig(
        policy_loss=PolicyLossConfig(loss, params), kernels=KernelsConfig(**kernels)
    )
    plain = make_row_losses(config)["policy"]
    return plain if correction is None else CorrectedRowLoss(plain, correction)


def gradient(
    row_loss: RowLoss | CorrectedRowLoss,
    batch: MiniBatch,
    log_probs: Tensor,
    parts: list[list[int]] | None = None,
) -> tuple[float, Tensor, dict[str, float]]:
    """(loss, d loss / d log-probs [T], metrics) over micro-batches of these samples."""
    leaf = log_probs.clone().requires_grad_()
    total = 0.0
    metrics = {}
    token_of = torch.arange(batch.num_tokens)
    for part in parts or [list(range(len(batch)))]:
        chosen = select_samples(batch, part)
        picked = torch.cat([token_of[batch.offsets[i] : batch.offsets[i + 1]] for i in part])
        mask = chosen.response_mask
        ids = torch.arange(len(part)).repeat_interleave(chosen.lengths)[mask]
        columns = {
            name: getattr(chosen, name)[mask]
            for name in COLUMNS
            if getattr(chosen, name) is not None
        }
        rows = leaf[picked][mask]
        dtype = rows.dtype
        columns = {name: column.to(dtype) for name, column in columns.items()}
        sequences = RowSequences(ids, len(part)) if row_loss.needs_sequences else None
        value, shares = row_loss(rows, None, columns, sequences)
        value.backward()
        total += value.item()
        metrics = {name: metrics.get(name, 0.0) + share.item() for name, share in shares.items()}
    assert leaf.grad is not None
    return total, leaf.grad, metrics


def all_params() -> list[CorrectionParams]:
    found = []
    for importance in IMPORTANCES.values():
        for filters in FILTERS.values():
            if importance is not None or filters:
                found.append(CorrectionParams(importance, filters=filters))
                found.append(
                    CorrectionParams(importance, importance is not None, filters, veto=0.35)
                )
    return found


def names(params: CorrectionParams) -> str:
    importance = (
        "none"
        if params.importance is None
        else f"{params.importance.level}{params.importance.low or ''}"
    )
    return f"{importance}-{'+'.join(one.name for one in params.filters)}-{params.veto}"


@pytest.mark.parametrize("params", all_params(), ids=names)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_both_modes_have_one_gradient_where_the_policy_has_not_moved(
    params: CorrectionParams, mode: str
) -> None:
    """Reinforce with the same weights, rejection and denominators, whoever makes them."""
    case = make_case(3)
    start = case.batch.old_log_probs
    assert start is not None
    decoupled = gradient(
        row_loss_of("reinforce", None), case.mini_batch(params, False, mode), start.double()
    )
    moving = row_loss_of("reinforce", params)
    batch = case.mini_batch(params, True, mode)
    bypass = gradient(moving, batch, start.double())
    assert bypass[0] == pytest.approx(decoupled[0], rel=1e-6)
    assert decoupled[1].abs().max() > 0
    torch.testing.assert_close(bypass[1], decoupled[1], rtol=3e-7, atol=1e-12)
    cut = gradient(moving, batch, start.double(), [[4, 0], [8, 7, 1], [2], [3, 5, 6]])
    # whatever the micro-batches
    torch.testing.assert_close(cut[1], bypass[1], rtol=1e-13, atol=1e-16)
    assert cut[2] == pytest.approx(bypass[2], rel=1e-12)
    single = gradient(moving, batch, start)
    torch.testing.assert_close(single[1].double(), bypass[1], rtol=2e-5, atol=1e-8)


def test_the_ratio_of_bypass_is_the_weight_of_decoupled_where_nothing_is_clipped() -> None:
    """r = current / engine = (current / old) (old / engine):
    clip and truncation are far away here.
    """
    case = make_case(1, scale=0.1)
    start = case.batch.old_log_probs
    assert start is not None
    weights = CorrectionParams(ImportanceWeightParams("token", 50.0))
    decoupled = gradient(
        row_loss_of("ppo_clip", None), case.mini_batch(weights, False), start.double()
    )
    bypass = gradient(
        row_loss_of("ppo_clip", None), case.mini_batch(CorrectionParams(), True), start.double()
    )
    torch.testing.assert_close(bypass[1], decoupled[1], rtol=1e-6, atol=1e-12)
    moved = start.double() + 0.05
    decoupled = gradient(row_loss_of("ppo_clip", None), case.mini_batch(weights, False), moved)
    bypass = gradient(
        row_loss_of("ppo_clip", None), case.mini_batch(CorrectionParams(), True), moved
    )
    torch.testing.assert_close(bypass[1], decoupled[1], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("importance", ["token", "sequence", "icepop"])
def test_moving_weights_by_a_plain_loop(importance: str) -> None:
    """-A w / N for tokens that the moving ratio keeps, N all response tokens; w has no gradient."""
    case = make_case(7, num_samples=30)
    params = CorrectionParams(IMPORTANCES[importance], filters=FILTERS["sequence"], veto=0.3)
    batch = case.mini_batch(params, True)
    generator = torch.Generator().manual_seed(5)
    moved = batch.rollout_log_probs.double() + 0.6 * torch.randn(  # type: ignore[union-attr]
        batch.num_tokens, generator=generator, dtype=torch.float64
    )
    _, grad, metrics = gradient(row_loss_of("reinforce", params), batch, moved)
    expected = torch.zeros_like(moved)
    num_rejected = 0
    num_tokens = int(batch.response_mask.sum())
    for i in range(len(batch)):
        tokens = range(int(batch.offsets[i]) + 1, int(batch.offsets[i + 1]))
        log = [(moved[t] - batch.rollout_log_probs[t]).item() for t in tokens]  # type: ignore[index]
        ratio = [torch.tensor(x).exp().item() for x in log]
        mean = torch.tensor(sum(log) / len(log)).exp().item()
        keep = 0.7 <= mean <= 1.6 and all(x * x / 2 <= 1.2 for x in log) and min(ratio) >= 0.3
        num_rejected += 0 if keep else len(log)
        product = torch.tensor(sum(log)).exp().item()
        for t, r in zip(tokens, ratio, strict=True):
            w = {
                "token": min(r, 1.6),
                "sequence": min(product, 1.8),
                "icepop": r if 0.6 <= r <= 2.5 else 0.0,
            }[importance]
            expected[t] = -case.advantages[t] * w * keep / num_tokens
    assert 0 < num_rejected < num_tokens
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-9)
    assert metrics["actor/rollout_rs_masked_fraction"] == pytest.approx(num_rejected / num_tokens)


@pytest.mark.parametrize("is_bypass", [False, True])
def test_rejection_changes_no_denominator_and_leaves_out_kl_and_entropy_too(
    is_bypass: bool,
) -> None:
    case = make_case(2)
    start = case.batch.old_log_probs
    assert start is not None
    filters = CorrectionParams(filters=FILTERS["sequence"])
    plain = case.mini_batch(CorrectionParams(), is_bypass)
    corrected = case.mini_batch(filters, is_bypass)
    row_loss = row_loss_of("reinforce", filters if is_bypass else None)
    _, grad, _ = gradient(row_loss, corrected, start.double())
    _, all_grad, _ = gradient(row_loss_of("reinforce", None), plain, start.double())
    kept = grad != 0
    assert 0 < int(kept.sum()) < int((all_grad != 0).sum())
    assert torch.equal(grad[kept], all_grad[kept])
    if not is_bypass:
        assert torch.equal(
            corrected.loss_weights != 0,
            kept | (corrected.loss_weights != 0) & (case.advantages == 0),
        )
    assert torch.equal(corrected.metric_weights, plain.metric_weights)


@pytest.mark.parametrize(
    "params",
    [
        CorrectionParams(
            ImportanceWeightParams("token", 2.0), True, (RejectionFilter("token_k2", 1e-9),), 0.9
        )
    ],
)
def test_a_batch_of_which_all_is_rejected_has_loss_and_gradient_0(params: CorrectionParams) -> None:
    case = make_case(4)
    start = case.batch.old_log_probs
    assert start is not None
    for is_bypass in (False, True):
        row_loss = row_loss_of("reinforce", params if is_bypass else None)
        value, grad, metrics = gradient(row_loss, case.mini_batch(params, is_bypass), start)
        assert (
            value == 0
            and torch.equal(grad, torch.zeros_like(grad))
            and all(x == x for x in metrics.values())
        )


def test_a_rank_without_rows_has_loss_0() -> None:
    params = CorrectionParams(
        ImportanceWeightParams("sequence"), filters=FILTERS["token"], veto=0.1
    )
    row_loss = row_loss_of("reinforce", params)
    empty = torch.zeros(0)
    columns = dict.fromkeys(COLUMNS[:-1], empty)
    value, _ = row_loss(
        empty.clone().requires_grad_(),
        None,
        columns,
        RowSequences(torch.zeros(0, dtype=torch.int64), 3),
    )
    assert value.item() == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_mean_of_batch_norm_is_of_the_step_in_both_modes(level: str) -> None:
    """Not of the mini-batch that a weight is in, and of the policy before the update."""
    case = make_case(6)
    params = CorrectionParams(replace(IMPORTANCES[level], high=3.0), True)  # type: ignore[arg-type, type-var]
    plain = replace(params, use_batch_norm=False)
    normed = case.mini_batch(params, False)
    raw = case.mini_batch(plain, False)
    mask = normed.response_mask
    assert normed.correction_weights is not None and raw.correction_weights is not None
    weights = normed.correction_weights[mask].double()
    owners = torch.arange(len(normed)).repeat_interleave(normed.lengths)[mask]
    firsts = torch.tensor([(owners == i).nonzero()[0].item() for i in range(len(normed))])
    mean = weights.mean() if level == "token" else weights[firsts].mean()
    assert mean.item() == pytest.approx(1.0, rel=1e-6)
    bypass = case.mini_batch(params, True)
    assert bypass.correction_weights is not None
    factor = raw.correction_weights[mask] / normed.correction_weights[mask]
    assert bypass.correction_weights[mask].tolist() == pytest.approx(
        (1 / factor).tolist(), rel=1e-6
    )


def test_without_the_trainers_log_probs_there_is_nothing_to_correct_on_the_controller() -> None:
    case = make_case()
    batch = replace(case.batch, old_log_probs=None)
    assert compute_correction_columns(
        batch, make_valid_sample_mask(batch), CorrectionParams(), True
    ) == ({}, {})
    train = add_columns(TrainBatch, batch, advantages=case.advantages)
    assert torch.equal(
        make_actor_mini_batch(train, "token-mean", is_bypass=True).old_log_probs,
        batch.rollout_log_probs,
    )  # type: ignore[arg-type]

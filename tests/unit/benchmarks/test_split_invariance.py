"""The gradient does not depend on how a mini-batch was cut; and where it does, the
comparison says so.

A part of benchmarks/split_invariance.py, which has every combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
import torch
from dist_pool import DistPool
from torch import Tensor

from benchmarks import split_correction, split_invariance, split_mcore, split_pure
from benchmarks.parity.cases import Recipe
from benchmarks.parity.layouts import Axes
from benchmarks.parity.run import Case, make_case
from benchmarks.parity.sharded import run_on_rank
from benchmarks.split_invariance import (
    MEGATRON_BAR,
    PURE_BAR,
    Row,
    compare,
    corrected_rows,
    pure_rows,
    worst_rows,
)
from benchmarks.split_pure import SPLITS, Split, loss_cases
from rlhf_megatron.algorithms.loss_aggregation import AGGREGATIONS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.algorithms.losses.kl_estimators import KLType
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.config.rollout_correction_rules import (
    FILTERS,
    PRESETS,
    is_bypass_mode,
    resolve_rollout_correction,
)
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.controller.scheduler.mini_batches import compute_token_weights
from rlhf_megatron.data.batch import MiniBatch, TokenBatch
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.parallel_layout import ParallelLayout

CASES = list(loss_cases())
PPO = {case.config.loss_agg_mode: case for case in CASES if case.name == "ppo_clip + entropy + k3"}


def test_error_is_relative_over_all_tensors_and_the_worst_alone_is_named() -> None:
    truth = {"large": torch.tensor([30.0, 40.0]), "small": torch.tensor([0.3])}
    value = {"large": torch.tensor([30.0, 40.5]), "small": torch.tensor([0.6])}
    # Differences 0.5 and 0.3, norms 50 and 0.3.
    whole, worst, alone = compare(value, truth)
    assert whole == pytest.approx((0.25 + 0.09) ** 0.5 / (2500 + 0.09) ** 0.5, rel=1e-5)
    assert (worst, alone) == ("small", pytest.approx(1.0, rel=1e-5))


def test_not_a_number_is_over_the_bar() -> None:
    value = {"a": torch.tensor([1.0]), "b": torch.tensor([float("nan")])}
    truth = {k: torch.ones(1) for k in "ab"}
    whole, worst, _ = compare(value, truth)
    row = Row("pure", "loss", "mode", "split", whole, 1e9)
    assert worst == "b" and not row.is_ok
    assert worst_rows([replace(row, error=1.0), row, replace(row, error=2.0)], "kind")[0] is row


@pytest.mark.parametrize(
    ("layout", "parts", "budget"),
    [
        (ParallelLayout(1), 1, 18),  # documents of 11, 4 and 3 tokens are forwarded
        (ParallelLayout(1), 2, 11),  # not 9: the longest sample must fit
        (
            ParallelLayout(2, cp=2),
            1,
            10,
        ),  # 12 + 4 + 4 after padding to multiples of 4, on two ranks
        (ParallelLayout(4, tp=2, cp=2, sequence_parallel=True), 1, 12),  # 20 is padded to 24
    ],
)
def test_token_budgets_by_hand(layout: ParallelLayout, parts: int, budget: int) -> None:
    assert split_pure.token_budget(torch.tensor([12, 5, 4]), layout, parts) == budget


def test_every_registered_loss_is_compared() -> None:
    assert {(case.name, case.config.loss_agg_mode) for case in CASES} >= {
        (name, mode) for name in ("sft", *POLICY_LOSSES) for mode in AGGREGATIONS
    }
    assert {case.config.kl_loss_type for case in CASES if case.config.use_kl_loss} == set(
        get_args(KLType)
    )
    assert {(s.layout.dp, s.layout.cp, s.layout.pp, s.parts, s.is_shuffled) for s in SPLITS} == {
        (dp, cp, pp, parts, shuffled)
        for dp in (1, 2)
        for cp in (1, 2)
        for pp in (1, 2)
        for parts in (1, 2, 7)
        for shuffled in (False, True)
    }


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.name}, {case.config.loss_agg_mode}"
)
def test_pure_losses(case: split_pure.LossCase) -> None:
    rows = list(pure_rows([case], splits_of(case)))
    assert len(rows) == 1 + 2 * 2
    assert [row for row in rows if not row.is_ok] == []


CORRECTED = list(split_pure.corrected_cases())


def test_every_correction_meets_every_loss_and_aggregation() -> None:
    """Decoupled modes stand with any loss; bypass modes with the one that they name."""
    found = {
        (case.correction, case.config.policy_loss.loss_mode, case.config.loss_agg_mode)
        for case in CORRECTED
    }
    sections = {case.correction for case in CORRECTED}
    of_decoupled = {
        section for section in sections if section is not None and not is_bypass_mode(section)
    }
    assert found >= set(itertools.product(of_decoupled, POLICY_LOSSES, AGGREGATIONS))
    of_bypass = [
        resolve_rollout_correction(section)
        for section in sections - of_decoupled
        if section is not None
    ]
    assert {section.loss_type for section in of_bypass} == {"ppo_clip", "reinforce"}
    for modes in (
        of_bypass,
        [resolve_rollout_correction(section) for section in of_decoupled if section is not None],
    ):
        assert {section.rollout_is for section in modes} == {None, "token", "sequence"}
        assert {name for section in modes for name in section.rollout_rs or ()} == set(FILTERS)
        assert any(section.rollout_token_veto_threshold for section in modes)
        of_weights = {
            (s.rollout_is, bool(s.rollout_is_batch_normalize), "_" in str(s.rollout_is_threshold))
            for s in modes
        }
        for level in ("token", "sequence"):
            assert of_weights >= {(level, False, False), (level, False, True), (level, True, False)}
    assert {section.preset for section in sections if section is not None} == set(PRESETS)


def test_every_correction_bites() -> None:
    """Some weights are cut or 0, and some tokens are rejected and others not: nothing is
    compared with itself.
    """
    for mode in split_correction.modes():
        case = split_pure.LossCase(mode.name, "policy", ActorConfig(), mode.section)
        batch = split_pure.batch_of(case)
        settings = resolve_rollout_correction(mode.section)
        assert batch.old_log_probs is not None
        before = (
            split_pure.moving_log_probs(batch)
            if is_bypass_mode(mode.section)
            else batch.old_log_probs
        )
        logs = [
            (before - batch.rollout_log_probs)[span][batch.response_mask[span]].tolist()
            for span in map(slice, batch.offsets.tolist(), batch.offsets[1:].tolist())
        ]
        kept = [
            is_kept
            for of_sample in logs
            for is_kept in split_correction.plain_kept(of_sample, mode.section)
        ]
        rejects = bool(settings.rollout_rs) or settings.rollout_token_veto_threshold is not None
        assert (0.05 < sum(kept) / len(kept) < 0.95) == rejects, mode.name
        if settings.rollout_is is not None:
            weights = [
                w
                for of_sample in logs
                for w in split_correction.plain_weights(of_sample, mode.section)
            ]
            edge = (
                0.0
                if "_" in str(settings.rollout_is_threshold)
                else float(str(settings.rollout_is_threshold))
            )
            assert 0 < weights.count(edge) < len(weights) / 2, mode.name


def few_corrected() -> list[split_pure.LossCase]:
    """Every mode once, with the losses and aggregations in turn."""
    found = []
    for number, name in enumerate(dict.fromkeys(case.correction_name for case in CORRECTED)):
        cases = [case for case in CORRECTED if case.correction_name == name]
        found.append(cases[number * 19 % len(cases)])
    return found


def test_corrected_losses() -> None:
    cases = few_corrected()
    assert {case.config.policy_loss.loss_mode for case in cases} == set(POLICY_LOSSES)
    assert {case.config.loss_agg_mode for case in cases} == set(AGGREGATIONS)
    rows = list(corrected_rows(cases, num_splits=1))
    assert len(rows) == 3 * len(cases)
    assert [row for row in rows if not row.is_ok] == []


@pytest.mark.parametrize("name", ["bypass, seq_mean_k3", "bypass_pg_is", "bypass, veto"])
def test_a_correction_that_sees_parts_of_sequences_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Context-parallel ranks that do not add up what they have of a sequence."""
    case = next(case for case in CORRECTED if case.correction_name == name)
    assert [row for row in corrected_rows([case], num_splits=1) if not row.is_ok] == []
    monkeypatch.setattr(
        split_pure,
        "RowSequences",
        lambda ids_T, num_sequences, reduce: RowSequences(ids_T, num_sequences),
    )
    rows = [row for row in corrected_rows([case], num_splits=1) if row.kind == "corrected"]
    assert len(rows) == 1 and rows[0].error > 1e9 * PURE_BAR


def test_budgets_make_the_micro_batches_that_they_are_called_after() -> None:
    batch = split_pure.make_batch()
    case = PPO["token-mean"]
    counts = {
        parts: split_pure.split_gradient(batch, case, Split(parts=parts)).num_micro_batches
        for parts in (1, 2, 7)
    }
    assert counts == {1: 1, 2: 2, 7: 8}  # in seven, each would have to be full to the last token
    virtual = Split(ParallelLayout(2, pp=2, vpp=2))
    assert split_pure.split_gradient(batch, case, virtual).num_micro_batches == 2, (
        "a multiple of the stages"
    )


def splits_of(case: split_pure.LossCase) -> list[Split]:
    """One that cuts every way but stages, and one that no other case of the loss has."""
    number = CASES.index(case)
    return [
        Split(ParallelLayout(4, cp=2), parts=7, is_shuffled=True),
        SPLITS[(5 + 7 * number) % len(SPLITS)],
    ]


def local_denominator(mode: str) -> Callable[[MiniBatch], MiniBatch]:
    """Weights of a replica that divides by its own counts, as if every replica had that many."""

    def spoil(shard: MiniBatch) -> MiniBatch:
        return replace(
            shard, loss_weights=compute_token_weights(shard, mode, split_pure.LONGEST)[0] / 2
        )

    return spoil


def dropped_sample(shard: MiniBatch) -> MiniBatch:
    """The first sample with a response weighs nothing."""
    weights = shard.loss_weights.clone()
    spans = zip(shard.offsets.tolist(), shard.offsets[1:].tolist(), strict=False)
    start, stop = next((start, stop) for start, stop in spans if weights[start:stop].any())
    weights[start:stop] = 0
    return replace(shard, loss_weights=weights)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_mistakes_in_the_weights_are_caught(mode: str) -> None:
    split = Split(ParallelLayout(2), parts=7, is_shuffled=True)
    for spoil in (local_denominator(mode), dropped_sample):
        rows = [row for row in pure_rows([PPO[mode]], [split], spoil) if row.kind == "pure"]
        assert len(rows) == 1 and not rows[0].is_ok and rows[0].error > 1e9 * PURE_BAR


def test_a_wrong_denominator_everywhere_is_caught_by_the_plain_means() -> None:
    """The whole mini-batch divided by all its tokens is the same however it is cut: invariance
    does not see it.
    """
    batch = split_pure.make_batch()
    case = PPO["token-mean"]
    share = float(batch.response_mask.sum()) / batch.num_tokens

    def all_tokens(shard: MiniBatch) -> MiniBatch:
        return replace(shard, loss_weights=shard.loss_weights * share)

    whole, cut = (
        split_pure.split_gradient(batch, case, split, all_tokens).gradients
        for split in (Split(), Split(parts=7))
    )
    assert compare(cut, whole)[0] <= PURE_BAR
    assert compare(whole, split_pure.plain_gradient(batch, case))[0] == pytest.approx(
        1 - share, rel=1e-5
    )


def test_shuffled_samples_are_the_same_samples() -> None:
    batch = {"offsets": torch.tensor([0, 2, 3, 6]), "token_ids": torch.arange(6)}
    other = split_mcore.shuffled(batch)
    samples = [
        other["token_ids"][a:b].tolist()
        for a, b in zip(other["offsets"], other["offsets"][1:], strict=False)
    ]
    assert sorted(samples) == [[0, 1], [2], [3, 4, 5]] and samples != sorted(samples)


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case("qwen3_tied", Recipe(), cuts=())


@pytest.fixture(scope="module")
def baseline(dist_pool: DistPool, case: Case) -> dict[str, dict[str, Tensor]]:
    """mode -> gradient on one rank in one micro-batch."""
    return {
        cell.mode: cell.gradients
        for cell in split_mcore.run_layout(dist_pool, case, Axes(), parts=(1,))
    }


@pytest.mark.dist
@pytest.mark.parametrize(
    ("axes", "mode"),
    [
        (Axes(), "seq-mean-token-sum"),
        (Axes(dp=2), "token-mean"),
        (Axes(cp=2), "seq-mean-token-mean"),
        (Axes(pp=2, vpp=2), "token-mean"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_through_megatron(
    dist_pool: DistPool, case: Case, baseline: dict[str, dict[str, Tensor]], axes: Axes, mode: str
) -> None:
    (cell,) = split_mcore.run_layout(dist_pool, case, axes, [mode], parts=(7,), is_shuffled=True)
    error, worst, alone = compare(cell.gradients, baseline[mode])
    assert error <= MEGATRON_BAR, f"{error:.1e}; worst alone {worst}: {alone:.1e}"
    assert not torch.equal(
        cell.gradients["model.norm.weight"], baseline[mode]["model.norm.weight"]
    ), "nothing was cut"


@pytest.mark.dist
def test_losses_of_sequences_picks_and_corrections_through_megatron(
    dist_pool: DistPool, case: Case
) -> None:
    """Two ranks share each sequence: their ratio is one, whatever rows a rank has."""
    losses = ("gspo", "clip_cov")
    asked = (losses, ("reinforce, bypass_pg_is, three filters, veto",))
    whole = {
        cell.mode: cell.gradients
        for cell in split_mcore.run_losses(dist_pool, case, Axes(), 1, *asked)
    }
    for cell in split_mcore.run_losses(dist_pool, case, Axes(cp=2), 7, *asked):
        error, worst, alone = compare(cell.gradients, whole[cell.mode])
        assert error <= MEGATRON_BAR, f"{cell.mode}: {error:.1e}; worst alone {worst}: {alone:.1e}"
    for one, other in itertools.combinations(whole, 2):
        assert compare(whole[one], whole[other])[0] > 0.01, "one loss twice"


@pytest.mark.dist
def test_a_critic_through_megatron(dist_pool: DistPool) -> None:
    case = make_case("qwen3_tied", Recipe(), cuts=(), role="critic")
    (whole,) = split_mcore.run_layout(dist_pool, case, Axes(), ["seq-mean-token-mean"], parts=(1,))
    (cell,) = split_mcore.run_layout(
        dist_pool, case, Axes(dp=2), ["seq-mean-token-mean"], parts=(7,), is_shuffled=True
    )
    error, worst, alone = compare(cell.gradients, whole.gradients)
    assert error <= MEGATRON_BAR, f"{error:.1e}; worst alone {worst}: {alone:.1e}"
    assert not torch.equal(cell.gradients["score.weight"], whole.gradients["score.weight"]), (
        "nothing was cut"
    )


def run_with_local_denominators(world: World, **arguments: Any) -> Any:
    """The benchmark's job on replicas that weigh their own shards."""
    from benchmarks.parity import sharded

    take = sharded.take_replica_shard

    def take_and_weigh(batch: TokenBatch, plan: Any) -> TokenBatch:
        shard = take(batch, plan)
        return local_denominator("token-mean")(shard) if isinstance(shard, MiniBatch) else shard

    sharded.take_replica_shard = take_and_weigh  # type: ignore[assignment]
    try:
        return run_on_rank(world, **arguments)
    finally:
        sharded.take_replica_shard = take  # type: ignore[assignment]


@pytest.mark.dist
def test_a_local_denominator_is_caught_through_megatron(
    dist_pool: DistPool, case: Case, baseline: dict[str, dict[str, Tensor]]
) -> None:
    """In three parts: in seven, both replicas have as many response tokens, and the mistake
    shows nothing.
    """
    (cell,) = split_mcore.run_layout(
        dist_pool, case, Axes(dp=2), ["token-mean"], parts=(3,), job=run_with_local_denominators
    )
    assert compare(cell.gradients, baseline["token-mean"])[0] > 100 * MEGATRON_BAR


def test_the_program_exits_with_1_on_a_miss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [PPO["token-mean"]]
    monkeypatch.setattr(split_pure, "loss_cases", lambda: few)
    monkeypatch.setattr(split_invariance, "pure_rows", partial(pure_rows, splits=SPLITS[:2]))
    arguments = ["--only", "pure", "--out", str(tmp_path / "split.json")]
    assert split_invariance.main(arguments) == 0
    assert "0 over the bar" in capsys.readouterr().out and (tmp_path / "split.json").is_file()
    monkeypatch.setattr(split_invariance, "PURE_BAR", 0.0)
    assert split_invariance.main(arguments) == 1
    assert "OVER THE BAR" in capsys.readouterr().out

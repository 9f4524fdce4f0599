"""The losses alone, in float64 and one process: the gradient of a mini-batch that is cut, and of
the same one uncut. With every mode of the rollout correction, too (split_correction.py).

Between samples and loss everything is the package's: weights, plans, packing, losses. The model is
a small causal one that reads whole documents: what context-parallel ranks hold is put together
before it and cut out again after it. `plain_gradient` knows of none of this: one sample at a time,
and means written as means.
"""

# T tokens of a micro-batch, R rows, B samples, H hidden, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from benchmarks import split_correction
from benchmarks.kernels.eager import eager_policy
from benchmarks.parity.sharded import train_batch
from rlhf_megatron.algorithms.loss_aggregation import AGGREGATIONS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.algorithms.losses.kl_estimators import KLType
from rlhf_megatron.algorithms.losses.policy_loss import LOSSES_WITH_GRADIENT
from rlhf_megatron.algorithms.losses.supervised_loss import compute_sft_loss
from rlhf_megatron.algorithms.losses.total_token_loss import compute_total_token_loss
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.config.rollout_correction_rules import is_bypass_mode
from rlhf_megatron.config.schema import ActorConfig, PolicyLossConfig, RolloutCorrectionConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import make_valid_sample_mask
from rlhf_megatron.controller.scheduler.advantage_stage import compute_correction_columns
from rlhf_megatron.controller.scheduler.mini_batches import (
    iterate_mini_batch_indices,
    make_actor_mini_batch,
    make_token_selection_mask,
)
from rlhf_megatron.data.batch import MiniBatch, TrainBatch, select_samples
from rlhf_megatron.data.replica_plan import take_replica_shard
from rlhf_megatron.ranks.workers.actor_losses import (
    CorrectedRowLoss,
    LossAndMetricSums,
    RowLoss,
    SupervisedRowLoss,
    make_row_losses,
    parse_correction_params,
    parse_loss_side_correction,
)
from rlhf_megatron.ranks.workers.forwarded_documents import count_forwarded_tokens
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, list_token_columns, pack_batch
from rlhf_megatron.runtime.call_dispatch import make_scattered_call
from rlhf_megatron.weights.parallel_layout import ParallelLayout

VOCAB = 29
HIDDEN = 8
LONGEST = 40
TEMPERATURE = 0.8
COLUMNS = list_token_columns(MiniBatch)
Spoil = Callable[[MiniBatch], MiniBatch]
"""A planted mistake: what it does to a replica's shard."""


@dataclass(frozen=True)
class Split:
    """A way to cut one mini-batch."""

    layout: ParallelLayout = ParallelLayout(1)  # noqa: RUF009, frozen
    parts: int = 1  # the token budget is 1 / parts of what the whole mini-batch needs
    is_shuffled: bool = False

    def __str__(self) -> str:
        """ "tp1 pp1 dp2, budget 1/7, shuffled"."""
        return f"{self.layout}, budget 1/{self.parts}{', shuffled' if self.is_shuffled else ''}"


@dataclass(frozen=True)
class LossCase:
    """A loss with its regularizers. `loss`: as `update` takes it."""

    name: str
    loss: str
    config: ActorConfig
    correction: RolloutCorrectionConfig | None = None  # None: the loss without any
    correction_name: str = ""


@dataclass(frozen=True)
class Outcome:
    """Gradients by parameter name and summed metrics of one mini-batch."""

    gradients: dict[str, Tensor]
    metrics: dict[str, float]
    num_micro_batches: int  # of each replica


SPLITS = tuple(
    Split(
        ParallelLayout(tp * pp * cp * dp, tp, pp, cp, vpp, sequence_parallel=tp > 1),
        parts,
        is_shuffled,
    )
    for tp, pp, vpp in ((1, 1, 1), (1, 2, 1), (1, 2, 2), (2, 1, 1))
    for cp in (1, 2)
    for dp in (1, 2)
    for parts in (1, 2, 7)
    for is_shuffled in (False, True)
)
"""Every combination of token budget, dp, cp, order and stages; tp has sequence parallelism,
for its padding.
"""
EVERY_CUT = Split(ParallelLayout(4, cp=2), parts=7, is_shuffled=True)
"""Every way but stages."""


PARAMS: dict[str, dict[str, float]] = {
    # So that the random columns below lie on both sides of every bound, and more than one
    # token is picked.
    "gspo": {"clip_ratio_low": 0.5, "clip_ratio_high": 0.5},
    "clip_cov": {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.1},
    "kl_cov": {"kl_cov_ratio": 0.1},
    "cispo": {"clip_ratio_low": 0.8, "clip_ratio_high": 0.5},
}


def loss_cases() -> Iterator[LossCase]:
    """Supervised; every registered policy loss; one with entropy, and with each KL
    estimate and entropy.

    Those terms are added to any loss in one place (algorithms/losses/total_token_loss.py), so one
    loss shows them.
    """
    for mode in AGGREGATIONS:
        base = ActorConfig(loss_agg_mode=mode, loss_scale_factor=LONGEST)
        yield LossCase("sft", "sft", base)
        for name in POLICY_LOSSES:
            yield LossCase(
                name,
                "policy",
                replace(base, policy_loss=PolicyLossConfig(name, PARAMS.get(name, {}))),
            )
        with_entropy = replace(base, entropy_coeff=0.03)
        yield LossCase("ppo_clip + entropy", "policy", with_entropy)
        for kl in get_args(KLType):
            config = replace(with_entropy, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type=kl)
            yield LossCase(f"ppo_clip + entropy + {kl}", "policy", config)


def corrected_cases() -> Iterator[LossCase]:
    """Every mode of the correction with every loss that it may stand with and every aggregation;
    and with KL and entropy terms, of which what is rejected has no share, either.
    """
    for mode in AGGREGATIONS:
        plain = ActorConfig(loss_agg_mode=mode, loss_scale_factor=LONGEST)
        with_terms = replace(
            plain, entropy_coeff=0.03, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3"
        )
        for correction in split_correction.modes():
            of_mode = correction.losses or tuple(POLICY_LOSSES)
            cases = [(name, plain) for name in of_mode]
            cases += [(name, with_terms) for name in of_mode if name in ("ppo_clip", "reinforce")]
            for name, base in cases:
                config = replace(base, policy_loss=PolicyLossConfig(name, PARAMS.get(name, {})))
                suffix = " + entropy + k3" if base is with_terms else ""
                yield LossCase(name + suffix, "policy", config, correction.section, correction.name)


def token_budget(lengths: Tensor, layout: ParallelLayout, parts: int) -> int:
    """Tokens of a rank's micro-batch so that samples of these lengths fill about `parts` of them,
    or fit in one.
    """
    multiple = layout.packed_multiple
    padded = (
        -(-count_forwarded_tokens(lengths) // layout.document_multiple) * layout.document_multiple
    )
    needed = max(-(-int(padded.sum()) // parts), int(padded.max()))
    return -(-needed // multiple) * multiple // layout.cp


class TinyModel(torch.nn.Module):
    """One layer of causal attention and a nonlinear one, over documents that are packed; float64,
    random weights.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {
            "embedding": (VOCAB, HIDDEN),
            "position": (LONGEST, HIDDEN),
            "query": (HIDDEN, HIDDEN),
            "key": (HIDDEN, HIDDEN),
            "value": (HIDDEN, HIDDEN),
            "up": (HIDDEN, HIDDEN),
            "head": (HIDDEN, VOCAB),
        }
        for name, shape in shapes.items():
            weight = 0.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, token_ids_T: Tensor, document_T: Tensor, positions_T: Tensor) -> Tensor:
        """[T, H]."""
        hidden_TH = self.embedding[token_ids_T] + self.position[positions_T]
        scores_TT = (hidden_TH @ self.query) @ (hidden_TH @ self.key).T / math.sqrt(HIDDEN)
        is_seen_TT = (document_T[:, None] == document_T) & (positions_T[:, None] >= positions_T)
        attention_TT = scores_TT.masked_fill(~is_seen_TT, -torch.inf).softmax(-1)
        hidden_TH = hidden_TH + attention_TT @ (hidden_TH @ self.value)
        return hidden_TH + (hidden_TH @ self.up).tanh()

    def log_probs(self, hidden_RH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs of the targets [R], entropies [R])."""
        log_p_RV = (hidden_RH @ self.head / TEMPERATURE).log_softmax(-1)
        return log_p_RV.gather(1, targets_R[:, None])[:, 0], -(log_p_RV.exp() * log_p_RV).sum(-1)


def make_batch(num_samples: int = 31) -> TrainBatch:
    """Ragged samples, random columns. One has a single token and one no response: both
    count as sequences.

    Two replicas cannot have equally many, so that no local count is right.
    """
    generator = torch.Generator().manual_seed(17)
    lengths = torch.randint(2, LONGEST, (num_samples,), generator=generator)
    lengths[3] = 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    num_tokens = int(offsets[-1])
    mask = torch.zeros(num_tokens, dtype=torch.bool)
    for i in range(num_samples):
        prompt = 1 + i % max(1, int(lengths[i]) - 1)
        mask[int(offsets[i]) + prompt : int(offsets[i + 1])] = i != 5
    old = -3 * torch.rand(num_tokens, generator=generator)
    ref, rollout = old + 0.3 * torch.randn(2, num_tokens, generator=generator)
    columns = {
        "offsets": offsets,
        "token_ids": torch.randint(0, VOCAB, (num_tokens,), generator=generator),
        "response_mask": mask,
        "old_log_probs": old * mask,
        "ref_log_probs": ref * mask,
        "advantages": torch.randn(num_tokens, generator=generator) * mask,
    }
    return replace(train_batch(columns), rollout_log_probs=rollout * mask)


def batch_of(case: LossCase) -> TrainBatch:
    """What the case trains on."""
    batch = make_batch()
    if case.correction is None:
        return batch
    return split_correction.with_engine(batch, moving_log_probs(batch), case.correction)


@torch.no_grad()
def moving_log_probs(batch: TrainBatch) -> Tensor:
    """[T] float64, of the model; of a sample's first token, which is of the prompt, anything."""
    model = TinyModel()
    document = torch.repeat_interleave(batch.lengths)
    hidden = model(
        batch.token_ids, document, torch.arange(batch.num_tokens) - batch.offsets[document]
    )
    return torch.nn.functional.pad(model.log_probs(hidden[:-1], batch.token_ids[1:])[0], (1, 0))


def make_row_loss(case: LossCase) -> RowLoss | CorrectedRowLoss:
    """As the actor makes it."""
    row_loss = make_row_losses(case.config)[case.loss]
    moving = None if case.correction is None else parse_loss_side_correction(case.correction)
    return row_loss if moving is None else CorrectedRowLoss(row_loss, moving)


def _corrected(batch: TrainBatch, case: LossCase) -> TrainBatch:
    """With the columns that the controller makes."""
    if case.correction is None:
        return batch
    params = parse_correction_params(case.correction)
    columns, _ = compute_correction_columns(
        batch, make_valid_sample_mask(batch), params, is_bypass_mode(case.correction)
    )
    return replace(batch, **columns)


def split_gradient(
    batch: TrainBatch, case: LossCase, split: Split, spoil: Spoil | None = None
) -> Outcome:
    """The gradients of all micro-batches of all replicas, added up: what ranks and stages add
    up between them.
    """
    model = TinyModel()
    row_loss = make_row_loss(case)
    (order,) = iterate_mini_batch_indices(
        len(batch), 1, len(batch), use_shuffle=split.is_shuffled, seed=1, step=0
    )
    part = select_samples(_corrected(batch, case), order)
    is_moving = case.correction is not None and is_bypass_mode(case.correction)
    whole = make_actor_mini_batch(
        part, case.config.loss_agg_mode, case.config.loss_scale_factor, picks(part, case), is_moving
    )
    layout = split.layout
    budget = token_budget(whole.lengths, layout, split.parts)
    plans = make_scattered_call(0, "update", whole, layout, budget, {}).replica_plans
    metrics: dict[str, float] = {}
    for plan in plans:
        shard = take_replica_shard(whole, plan)
        shard = _in_float64(shard if spoil is None else spoil(shard))
        shares = [
            pack_batch(shard, plan, layout, cp_rank, COLUMNS).micro_batches
            for cp_rank in range(layout.cp)
        ]
        for micros in zip(*shares, strict=True):
            results = _at_once(row_loss, list(_rows(model, micros)))
            torch.stack([value for value, _ in results]).sum().backward()
            for name, share in (
                (name, share) for _, sums in results for name, share in sums.items()
            ):
                metrics[name] = metrics.get(name, 0.0) + float(share)
    return Outcome(_gradients(model), metrics, len(plans[0].micro_batches))


def picks(part: TrainBatch, case: LossCase) -> Tensor | None:
    """What the loss chooses of the whole mini-batch."""
    return (
        make_token_selection_mask(
            part, case.config.policy_loss, seed=1, step=0, mini_batch_number=0
        )
        if case.loss == "policy"
        else None
    )


def _at_once(
    row_loss: RowLoss | CorrectedRowLoss, ranks: Sequence[tuple[Tensor, Tensor, MicroBatch]]
) -> list[LossAndMetricSums]:
    """`row_loss` on context-parallel ranks that add up sums between them.

    In one process a rank cannot wait for the next: all are run until their next exchange, which is
    added up, and then again from the start, with what is known of the exchanges so far.
    """
    known: list[Tensor] = []
    while True:
        new: list[Tensor] = []
        results = [_on_rank(row_loss, *rank, known, new) for rank in ranks]
        if not new:
            return results
        assert len(new) == len(ranks), f"{len(new)} of {len(ranks)} ranks take part in an exchange"
        known.append(torch.stack(new).sum(0))


def _on_rank(
    row_loss: RowLoss | CorrectedRowLoss,
    log_probs_R: Tensor,
    entropies_R: Tensor,
    micro: MicroBatch,
    known: Sequence[Tensor],
    new: list[Tensor],
) -> LossAndMetricSums:
    num_exchanges = 0

    def reduce(sums: Tensor) -> Tensor:
        nonlocal num_exchanges
        num_exchanges += 1
        if num_exchanges <= len(known):
            return known[num_exchanges - 1]
        if num_exchanges == len(known) + 1:
            new.append(sums)
        return sums

    sequences = (
        RowSequences(micro.sequence_ids, micro.num_sequences, reduce)
        if row_loss.needs_sequences
        else None
    )
    return row_loss(
        log_probs_R, entropies_R if row_loss.needs_entropy else None, micro.columns, sequences
    )


def plain_gradient(batch: TrainBatch, case: LossCase) -> dict[str, Tensor]:
    """The gradient as a textbook has it: each sample by itself, then the means that the mode
    is called after.
    """
    model = TinyModel()
    row_loss = make_row_losses(case.config)[case.loss]
    is_picked = picks(batch, case)
    correct = None if case.correction is None else _PlainCorrection(batch, case.correction)
    losses = []
    for i in range(len(batch)):
        span = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        ids = batch.token_ids[span]
        mask = batch.response_mask[span][1:]
        hidden = model(ids, torch.zeros_like(ids), torch.arange(len(ids)))[:-1][mask]
        log_probs, entropies = model.log_probs(hidden, ids[1:][mask])
        columns = {
            name: getattr(batch, name)[span][1:][mask].double()
            for name in ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
        }
        if is_picked is not None:
            columns["is_picked"] = is_picked[span][1:][mask]
        kept: Tensor | float = 1.0
        if correct is not None:
            columns, kept = correct(columns, log_probs)
        sequences = (
            RowSequences(torch.zeros_like(ids[1:][mask]), 1) if row_loss.needs_sequences else None
        )
        losses.append(_token_losses(row_loss, log_probs, entropies, columns, sequences) * kept)
    _aggregated(losses, case.config).backward()
    return _gradients(model)


def _token_losses(
    row_loss: RowLoss,
    log_probs_T: Tensor,
    entropies_T: Tensor,
    columns: dict[str, Tensor],
    sequences: RowSequences | None,
) -> Tensor:
    """[T] losses whose gradient autograd makes, also of a loss that tells its own."""
    if isinstance(row_loss, SupervisedRowLoss):
        return compute_sft_loss(log_probs_T).token_loss_T
    inputs = row_loss.collect_loss_inputs(log_probs_T, entropies_T, columns, sequences)
    if row_loss.loss in LOSSES_WITH_GRADIENT:
        assert row_loss.name == "ppo_clip", "no other loss tells its gradient"
        return eager_policy(inputs, row_loss.params, row_loss.regularizers).token_loss_T
    return compute_total_token_loss(
        row_loss.loss, row_loss.params, inputs, row_loss.regularizers
    ).token_loss_T


class _PlainCorrection:
    """Columns of one sample -> (those with its weights, 1.0 a token that is kept, 0.0 a
    rejected one).
    """

    def __init__(self, batch: TrainBatch, section: RolloutCorrectionConfig) -> None:
        self.section = section
        self.is_bypass = is_bypass_mode(section)
        before = batch.old_log_probs
        engine = batch.rollout_log_probs
        assert before is not None
        spans = zip(batch.offsets.tolist(), batch.offsets[1:].tolist(), strict=False)
        masks = [(slice(a, b), batch.response_mask[a:b]) for a, b in spans]
        logs = [
            (before[span].double() - engine[span].double())[mask].tolist() for span, mask in masks
        ]
        self.mean = split_correction.plain_mean(logs, section)

    def __call__(
        self, columns: dict[str, Tensor], log_probs: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        engine = columns["rollout_log_probs"]
        policy = log_probs.detach() if self.is_bypass else columns["old_log_probs"]
        logs = (policy - engine).tolist()
        weights = (
            torch.tensor(split_correction.plain_weights(logs, self.section), dtype=torch.float64)
            / self.mean
        )
        kept = torch.tensor(split_correction.plain_kept(logs, self.section), dtype=torch.float64)
        old = engine if self.is_bypass else columns["old_log_probs"]
        return {**columns, "old_log_probs": old, "correction_weights": weights}, kept


def _aggregated(losses: Sequence[Tensor], config: ActorConfig) -> Tensor:
    """Token losses of each sample -> what the mode is called after."""
    if config.loss_agg_mode == "token-mean":
        return torch.cat(list(losses)).mean()
    sums = torch.stack([loss.sum() for loss in losses])
    if config.loss_agg_mode == "token-sum":
        return sums.sum()
    if config.loss_agg_mode == "seq-mean-token-sum-norm":
        assert config.loss_scale_factor is not None
        return sums.mean() / config.loss_scale_factor
    counts = [
        max(len(loss), 1) if config.loss_agg_mode == "seq-mean-token-mean" else 1 for loss in losses
    ]
    return (sums / torch.tensor(counts)).mean()


def _rows(
    model: TinyModel, micros: Sequence[MicroBatch]
) -> Iterator[tuple[Tensor, Tensor, MicroBatch]]:
    """(log-probs, entropies, micro-batch) of each cp rank; `micros`:
    the shares of one micro-batch.
    """
    borders = micros[0].cu_seqlens.to(torch.int64)
    lengths = borders.diff()
    owner = torch.repeat_interleave(lengths // len(micros))
    places = [borders[owner] + micro.position_ids[0] for micro in micros]
    every = torch.cat(places)
    assert torch.equal(every.sort().values, torch.arange(int(borders[-1]))), (
        "each token is on one cp rank"
    )
    token_ids = torch.empty_like(every)
    token_ids[every] = torch.cat([micro.token_ids[0] for micro in micros])
    document = torch.repeat_interleave(lengths)
    hidden = model(token_ids, document, torch.arange(len(every)) - borders[document])
    for place, micro in zip(places, micros, strict=True):
        yield *model.log_probs(hidden[place[micro.rows]], micro.targets), micro


def _in_float64(shard: MiniBatch) -> MiniBatch:
    columns = {name: getattr(shard, name) for name in COLUMNS}
    given = {
        name: column
        for name, column in columns.items()
        if column is not None and column.dtype != torch.bool
    }
    return replace(shard, **{name: column.double() for name, column in given.items()})


def _gradients(model: TinyModel) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }

"""The losses of the actor's rows by name: supervised, and the configured policy loss with its
rollout correction.

In bypass mode the correction's weights and rejection follow the policy as it moves, and
are made here.
"""

# R rows

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.distillation import DISTILLATION_LOSSES
from rlhf_megatron.algorithms.distillation.distillation_loss import (
    DistillationLoss,
    DistillationParams,
    normalize_top_k_log_probs,
)
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossOutputs
from rlhf_megatron.algorithms.losses.supervised_loss import compute_sft_loss
from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams
from rlhf_megatron.algorithms.rollout_correction.correction_params import (
    CorrectionParams,
    ImportanceWeightParams,
    RejectionFilter,
)
from rlhf_megatron.algorithms.rollout_correction.row_correction import (
    compute_log_mismatch,
    correct_rows,
)
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.config.rollout_correction_rules import (
    is_bypass_mode,
    parse_filter_bounds,
    parse_importance_bounds,
    resolve_rollout_correction,
)
from rlhf_megatron.config.schema import ActorConfig, RolloutCorrectionConfig, TeacherTermConfig
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.ranks.kernels.policy_row_loss import PolicyRowLoss
from rlhf_megatron.ranks.kernels.weighted_row_loss import (
    ColumnsByName,
    LossAndMetricSums,
    weigh_loss_terms,
)


class SupervisedRowLoss:
    """The loss of supervised jobs: the negative log-prob of the rows' tokens."""

    needs_entropy = needs_sequences = False

    def __call__(
        self,
        log_probs_R: Tensor,
        entropies_R: Tensor | None,
        columns: ColumnsByName,
        sequences: RowSequences | None = None,
    ) -> LossAndMetricSums:
        """Return (the weighted loss, metric sums) of the rows: the negative log-prob of their
        tokens.
        """
        value, shares = weigh_loss_terms(compute_sft_loss(log_probs_R), columns)
        return value, {"actor/loss": value.detach(), **shares}


@dataclass(frozen=True)
class DistillationRowLoss:
    """The divergence from the teacher over the rows' most likely tokens. For `has_tail` see
    `DistillationParams`.
    """

    divergence: DistillationLoss
    has_tail: bool
    needs_entropy = needs_sequences = False

    def __call__(
        self,
        log_probs_R: Tensor,
        entropies_R: Tensor | None,
        columns: ColumnsByName,
        sequences: RowSequences | None = None,
    ) -> LossAndMetricSums:
        """Return (the weighted loss, metric sums) of the rows: the divergence from the teacher.
        `columns` also holds student_log_probs [R, K], with grad.
        """
        student, teacher = (
            normalize_top_k_log_probs(columns[name], self.has_tail)
            for name in ("student_log_probs", "teacher_log_probs")
        )
        loss_R = self.divergence(student, teacher)
        value, shares = weigh_loss_terms(
            PolicyLossOutputs(loss_R, {"actor/distillation_loss": loss_R.detach()}), columns
        )
        return value, {"actor/loss": value.detach(), **shares}


@dataclass(frozen=True)
class DistilledPolicyRowLoss:
    """The weighted sum of a regularized policy loss and a divergence from the teacher."""

    policy_loss: PolicyRowLoss
    distillation_loss: DistillationRowLoss
    policy_coef: float
    distillation_coef: float

    @property
    def needs_entropy(self) -> bool:
        """Return whether the policy loss needs entropies."""
        return self.policy_loss.needs_entropy

    @property
    def needs_sequences(self) -> bool:
        """Return whether the policy loss needs to know the sequence of each row."""
        return self.policy_loss.needs_sequences

    def __call__(
        self,
        log_probs_R: Tensor,
        entropies_R: Tensor | None,
        columns: ColumnsByName,
        sequences: RowSequences | None = None,
    ) -> LossAndMetricSums:
        """Return (the weighted sum of the policy loss and the distillation loss, the metric sums of
        both). `columns` must hold the columns that `PolicyRowLoss` and `DistillationRowLoss` need.
        """
        others, metrics = self.policy_loss(log_probs_R, entropies_R, columns, sequences)
        taught, of_teacher = self.distillation_loss(log_probs_R, None, columns)
        value = self.policy_coef * others + self.distillation_coef * taught
        return value, {**metrics, **of_teacher, "actor/loss": value.detach()}


RowLoss = PolicyRowLoss | SupervisedRowLoss | DistillationRowLoss | DistilledPolicyRowLoss


def make_row_losses(config: ActorConfig) -> dict[str, RowLoss]:
    """Return the losses that `update` accepts by name: "policy" and "sft". Raise ValueError for an
    unknown policy loss or wrong parameters.
    """
    return {"policy": make_policy_row_loss(config), "sft": SupervisedRowLoss()}


def make_policy_row_loss(config: ActorConfig) -> PolicyRowLoss:
    """Return the policy loss that the configuration names. Raise ValueError for an unknown loss or
    wrong parameters.
    """
    entry = POLICY_LOSSES.get(config.policy_loss.loss_mode)
    params: Any = None
    if entry.params is not None:
        params = build_params(entry.params, config.policy_loss.params, "actor.policy_loss.params")
    regularizers = RegularizerParams(
        kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        kl_loss_type=config.kl_loss_type,
        entropy_coeff=config.entropy_coeff,
    )
    use_triton = config.kernels.fused_loss and config.kernels.backend in ("auto", "triton")
    return PolicyRowLoss(entry.name, entry.build, params, regularizers, entry.needs, use_triton)


def parse_distillation_params(
    section_name: str, term_config: TeacherTermConfig
) -> DistillationParams:
    """Return the parameters of the loss towards a teacher. Raise ValueError for unknown parameters,
    with the section's name.
    """
    return build_params(DistillationParams, term_config.params, f"{section_name}.params")


def make_distillation_row_loss(
    section_name: str, term_config: TeacherTermConfig
) -> DistillationRowLoss:
    """Return the loss towards a teacher that the section selects. Raise ValueError for unknown
    parameters, with the section's name.
    """
    has_tail = parse_distillation_params(section_name, term_config).has_tail
    return DistillationRowLoss(DISTILLATION_LOSSES.get(str(term_config.loss_mode)).build, has_tail)


def parse_correction_params(correction_config: RolloutCorrectionConfig) -> CorrectionParams:
    """Return the correction's parameters of a section that `config.rollout_correction_rules`
    accepted. Raise ValueError for a section that the rules refuse.
    """
    settings = resolve_rollout_correction(correction_config)
    importance = None
    if settings.rollout_is is not None:
        low, high = parse_importance_bounds(settings.rollout_is_threshold or "")
        importance = ImportanceWeightParams(settings.rollout_is, high, low)
    filters = []
    for name, text in zip(
        settings.rollout_rs or (), settings.rollout_rs_threshold or (), strict=True
    ):
        low, high = parse_filter_bounds(name, text)
        filters.append(RejectionFilter(name, high, low))
    return CorrectionParams(
        importance,
        use_batch_norm=importance is not None and bool(settings.rollout_is_batch_normalize),
        filters=tuple(filters),
        veto=settings.rollout_token_veto_threshold,
    )


def parse_loss_side_correction(
    correction_config: RolloutCorrectionConfig,
) -> CorrectionParams | None:
    """Return the parameters of the correction that the loss makes itself, in bypass mode; None
    where the controller makes the correction, or there is no importance weight and no rejection.
    """
    params = parse_correction_params(correction_config)
    return (
        params
        if is_bypass_mode(correction_config)
        and (params.importance is not None or params.has_rejection)
        else None
    )


@dataclass(frozen=True)
class CorrectedRowLoss:
    """A policy loss of rows with importance weights and rejection made from their own log-probs.
    Neither has a gradient.

    Weights multiply the policy loss; rejected rows have loss weight 0, also in KL and entropy
    terms. Denominators were counted before, with every response token. The old log-probs of these
    rows are the engine's.
    """

    row_loss: PolicyRowLoss | DistilledPolicyRowLoss
    params: CorrectionParams

    @property
    def needs_entropy(self) -> bool:
        """Return whether the corrected loss needs entropies."""
        return self.row_loss.needs_entropy

    @property
    def needs_sequences(self) -> bool:
        """Return whether the loss or the correction (weights or filters of sequences, or a veto)
        needs the sequence of each row.
        """
        importance = self.params.importance
        of_sequences = importance is not None and importance.level == "sequence"
        filters = any(one.level != "token" for one in self.params.filters)
        return (
            self.row_loss.needs_sequences or of_sequences or filters or self.params.veto is not None
        )

    def __call__(
        self,
        log_probs_R: Tensor,
        entropies_R: Tensor | None,
        columns: ColumnsByName,
        sequences: RowSequences | None = None,
    ) -> LossAndMetricSums:
        """Return the loss and metric sums of `row_loss` with corrected weights, and add the metrics
        actor/rollout_is_mean and actor/rollout_rs_masked_fraction where they apply. `sequences`
        must be passed exactly where `needs_sequences` holds.
        """
        assert (sequences is not None) == self.needs_sequences, (
            "sequences are given where they are needed"
        )
        corrected_columns, shares = self._correct_columns(log_probs_R, columns, sequences)
        of_loss = sequences if self.row_loss.needs_sequences else None
        value, metrics = self.row_loss(log_probs_R, entropies_R, corrected_columns, of_loss)
        return value, {**metrics, **shares}

    @torch.no_grad()
    def _correct_columns(
        self, log_probs_R: Tensor, columns: ColumnsByName, sequences: RowSequences | None
    ) -> tuple[ColumnsByName, dict[str, Tensor]]:
        """Return (`columns` with the importance weights multiplied into correction_weights, and
        loss_weights zero for rejected rows; the sums of the correction's metrics).
        """
        log_ratio_R = compute_log_mismatch(log_probs_R, columns["rollout_log_probs"])
        # no sequence is looked at
        rows = sequences or RowSequences(torch.zeros_like(log_ratio_R, dtype=torch.int64), 1)
        found = correct_rows(log_ratio_R, rows, self.params)
        changed: dict[str, Tensor] = dict(columns)
        means_R: dict[str, Tensor] = {}
        if found.weights_N is not None and found.importance_measure is not None:
            weights_R = found.weights_N.to(columns["loss_weights"].dtype)
            given_R = columns.get("correction_weights")
            changed["correction_weights"] = weights_R if given_R is None else weights_R * given_R
            means_R["actor/rollout_is_mean"] = found.importance_measure.repeat_per_row(
                found.importance_measure.ratios, rows
            )
        if found.keep_N is not None:
            changed["loss_weights"] = columns["loss_weights"] * found.keep_N
            means_R["actor/rollout_rs_masked_fraction"] = ~found.keep_N
        weights_R = columns["metric_weights"]
        return changed, {
            name: torch.dot(mean_R.to(weights_R.dtype), weights_R)
            for name, mean_R in means_R.items()
        }

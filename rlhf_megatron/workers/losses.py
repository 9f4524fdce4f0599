"""What a row of the batch costs: the supervised loss, the policy loss that the configuration names, the value loss."""

# R rows

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses import EXPLICIT_LOSSES, POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.compose import RegularizerParams, total_token_loss
from rlhf_megatron.algorithms.losses.sft import sft_loss
from rlhf_megatron.algorithms.losses.value_loss import value_loss
from rlhf_megatron.algorithms.sequences import Sequences
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.config.typed import params_from_mapping
from rlhf_megatron.kernels.policy_loss import FusedPolicyLoss
from rlhf_megatron.kernels.value_loss import fused_value_loss

Columns = Mapping[str, Tensor]
"""Name of a MiniBatch column -> its values at the rows' target tokens, [R]."""


Sums = tuple[Tensor, dict[str, Tensor]]
"""(the rows' share of the loss, with grad; their share of each metric)."""
FUSED_DTYPES = (torch.float32,)  # of the log-probs; float64 is for comparisons, which want the specification itself


@dataclass(frozen=True)
class RowLoss:
    """A loss of rows. `function`: (log-probs [R], entropies [R] or None, columns, sequences or None) -> loss and
    metrics a row.

    `fused`: from the first three, the weighted sums of what `function` returns; of losses that need no sequences.
    """

    function: Callable[[Tensor, Tensor | None, Columns, Sequences | None], PolicyLossOutputs]
    needs_entropy: bool
    fused: Callable[[Tensor, Tensor | None, Columns], Sums] | None = None
    needs_sequences: bool = False

    def __call__(
        self, log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns, sequences: Sequences | None = None
    ) -> Sums:
        """`sequences`: where `needs_sequences`; all ranks that share them call at once, those without rows too."""
        if self.fused is not None and log_probs_R.dtype in FUSED_DTYPES:
            value, shares = self.fused(log_probs_R, entropies_R, columns)
        else:
            value, shares = weighted(self.function(log_probs_R, entropies_R, columns, sequences), columns)
        return value, {"actor/loss": value.detach(), **shares}


def weighted(terms: PolicyLossOutputs, columns: Columns) -> Sums:
    """Sums with the weights of the columns."""
    value = (terms.token_loss_T * columns["loss_weights"]).sum()
    weights_R = columns["metric_weights"]
    return value, {name: torch.dot(metric_R.to(weights_R.dtype), weights_R) for name, metric_R in terms.metrics.items()}


def value_sums(values_R: Tensor, columns: Columns, cliprange_value: float) -> Sums:
    """Of the critic's loss."""
    old_R, returns_R = columns["old_values"], columns["returns"]
    if values_R.dtype in FUSED_DTYPES:
        return fused_value_loss(
            values_R, old_R, returns_R, cliprange_value, columns["loss_weights"], columns["metric_weights"]
        )
    return weighted(value_loss(values_R, old_R, returns_R, cliprange_value), columns)


def make_row_losses(config: ActorConfig) -> dict[str, RowLoss]:
    """The losses that `update` takes by name. Raises ValueError for an unknown policy loss or wrong parameters."""
    name = config.policy_loss.loss_mode
    entry = POLICY_LOSSES.get(name)
    params: Any = None
    if entry.params is not None:
        params = params_from_mapping(entry.params, config.policy_loss.params, "actor.policy_loss.params")
    regularizers = RegularizerParams(
        kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        kl_loss_type=config.kl_loss_type,
        entropy_coeff=config.entropy_coeff,
    )
    needs_entropy = config.entropy_coeff != 0 or "entropies" in entry.needs
    needs_sequences = "sequences" in entry.needs

    def inputs(log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns) -> PolicyLossInputs:
        return _inputs(log_probs_R, entropies_R, columns, name, entry.needs)

    def policy(
        log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns, sequences: Sequences | None
    ) -> PolicyLossOutputs:
        assert (sequences is not None) == needs_sequences, f"{name} takes sequences: {needs_sequences}"
        read = replace(inputs(log_probs_R, entropies_R, columns), sequences=sequences)
        return total_token_loss(entry.build, params, read, regularizers)

    explicit = EXPLICIT_LOSSES.get(name).build if config.kernels.fused_loss and name in EXPLICIT_LOSSES else None
    assert explicit is None or not needs_sequences, f"{name}: an explicit gradient is of each token by itself"
    use_triton = config.kernels.backend in ("auto", "triton")
    fused = None if explicit is None else FusedPolicyLoss(explicit, params, regularizers, use_triton)

    def fused_policy(log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns) -> Sums:
        assert fused is not None, f"{name} has no fused form"
        read = inputs(log_probs_R, entropies_R, columns)
        return fused(read, columns["loss_weights"], columns["metric_weights"])

    def supervised(
        log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns, sequences: Sequences | None
    ) -> PolicyLossOutputs:
        return sft_loss(log_probs_R)

    return {
        "policy": RowLoss(policy, needs_entropy, fused_policy if fused is not None else None, needs_sequences),
        "sft": RowLoss(supervised, needs_entropy=False),
    }


def _inputs(
    log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns, name: str, needs: tuple[str, ...]
) -> PolicyLossInputs:
    """What the policy loss `name` reads. Raises ValueError for a column that it `needs` and the mini-batch lacks."""
    needed = ("advantages", "old_log_probs", *needs)
    missing = [column for column in needed if column not in (*columns, "entropies", "sequences")]
    if missing:
        raise ValueError(f"policy loss {name!r} needs the columns {missing}, which the mini-batch lacks.")
    return PolicyLossInputs(
        log_probs_T=log_probs_R,
        old_log_probs_T=columns["old_log_probs"],
        advantages_T=columns["advantages"],
        response_mask_T=_true(log_probs_R.device).expand(log_probs_R.shape),  # rows are response tokens
        entropies_T=entropies_R,
        ref_log_probs_T=columns.get("ref_log_probs"),
        rollout_log_probs_T=columns.get("rollout_log_probs"),
        correction_weights_T=columns.get("correction_weights"),
        is_picked_T=columns.get("is_picked"),
    )


@functools.cache
def _true(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=device)

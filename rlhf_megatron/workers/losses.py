"""What a row of the batch costs: the supervised loss, or the policy loss that the configuration names. Built once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.compose import RegularizerParams, total_token_loss
from rlhf_megatron.algorithms.losses.sft import sft_loss
from rlhf_megatron.config.params import params_from_mapping
from rlhf_megatron.config.schema import ActorConfig

Columns = Mapping[str, Tensor]
"""Name of a MiniBatch column -> its values at the rows' target tokens, [R]."""


@dataclass(frozen=True)
class RowLoss:
    """A loss of rows. `function`: (log-probs [R], entropies [R] or None, columns) -> loss and metrics a row."""

    function: Callable[[Tensor, Tensor | None, Columns], PolicyLossOutputs]
    needs_entropy: bool

    def __call__(
        self, log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(the rows' share of the loss, with grad; their share of each metric)."""
        value, shares = weighted(self.function(log_probs_R, entropies_R, columns), columns)
        return value, {"actor/loss": value.detach(), **shares}


def weighted(terms: PolicyLossOutputs, columns: Columns) -> tuple[Tensor, dict[str, Tensor]]:
    """(the rows' share of the loss, with grad; their share of each metric): sums with the weights of the columns."""
    value = (terms.token_loss_T * columns["loss_weights"]).sum()
    shares = torch.stack(list(terms.metrics.values())) @ columns["metric_weights"]
    return value, dict(zip(terms.metrics, shares, strict=True))


def make_row_losses(config: ActorConfig) -> dict[str, RowLoss]:
    """The losses that `update` takes by name. Raises ValueError for an unknown policy loss or wrong parameters."""
    entry = POLICY_LOSSES.get(config.policy_loss.loss_mode)
    params: Any = None
    if entry.params is not None:
        params = params_from_mapping(entry.params, config.policy_loss.params, "actor.policy_loss.params")
    regularizers = RegularizerParams(
        kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        kl_loss_type=config.kl_loss_type,
        entropy_coeff=config.entropy_coeff,
    )
    needs_entropy = config.entropy_coeff != 0 or "entropies" in entry.needs

    def policy(log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns) -> PolicyLossOutputs:
        missing = [
            name for name in ("advantages", "old_log_probs", *entry.needs) if name not in (*columns, "entropies")
        ]
        if missing:
            raise ValueError(f"policy loss {entry.name!r} needs the columns {missing}, which the mini-batch lacks.")
        inputs = PolicyLossInputs(
            log_probs_T=log_probs_R,
            old_log_probs_T=columns["old_log_probs"],
            advantages_T=columns["advantages"],
            response_mask_T=torch.ones_like(log_probs_R, dtype=torch.bool),  # rows are response tokens
            entropies_T=entropies_R,
            ref_log_probs_T=columns.get("ref_log_probs"),
            rollout_log_probs_T=columns.get("rollout_log_probs"),
        )
        return total_token_loss(entry.build, params, inputs, regularizers)

    def supervised(log_probs_R: Tensor, entropies_R: Tensor | None, columns: Columns) -> PolicyLossOutputs:
        return sft_loss(log_probs_R)

    return {"policy": RowLoss(policy, needs_entropy), "sft": RowLoss(supervised, needs_entropy=False)}

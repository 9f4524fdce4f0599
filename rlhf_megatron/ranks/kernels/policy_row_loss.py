"""The policy loss of a micro-batch's rows: loss with grad and metrics, as sums with the weights
of the columns.

A loss that computes its own gradient takes one pass over blocks of rows (`weighted_row_loss`), or
its Triton kernel on a GPU. Autograd differentiates any other loss.
"""

# R rows, T rows of a block

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses.policy_loss import (
    LOSSES_WITH_GRADIENT,
    PolicyLoss,
    PolicyLossInputs,
)
from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams, ppo_clip
from rlhf_megatron.algorithms.losses.total_token_loss import (
    RegularizerParams,
    add_regularizers,
    check_regularizer_columns,
    compute_total_token_loss,
)
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.ranks.kernels.triton_support import try_triton_kernel
from rlhf_megatron.ranks.kernels.weighted_row_loss import (
    ColumnsByName,
    LossAndMetricSums,
    RowLossAccumulator,
    RowLossSums,
    attach_gradients,
    weigh_loss_terms,
)

logger = logging.getLogger(__name__)

MAX_ERROR = 1e-4  # of losses and gradients of about 1

TritonLoss = Callable[[PolicyLossInputs, Any, RegularizerParams, Tensor, Tensor], RowLossSums]


@dataclass(frozen=True)
class PolicyRowLoss:
    """A policy loss with its parameters and regularizers. `use_triton` selects the loss's Triton
    kernel on a GPU, where there is one and it runs.
    """

    name: str
    loss: PolicyLoss
    params: Any
    regularizers: RegularizerParams
    needed_columns: tuple[str, ...] = ()  # columns that the loss reads beside log-probs
    use_triton: bool = False

    @property
    def needs_entropy(self) -> bool:
        """Return whether the loss or a regularizer reads entropies."""
        return self.regularizers.entropy_coeff != 0 or "entropies" in self.needed_columns

    @property
    def needs_sequences(self) -> bool:
        """Return whether the loss reads the sequence of each row."""
        return "sequences" in self.needed_columns

    def __call__(
        self,
        log_probs_R: Tensor,
        entropies_R: Tensor | None,
        columns: ColumnsByName,
        sequences: RowSequences | None = None,
    ) -> LossAndMetricSums:
        """Return (the rows' share of the loss, with grad; their share of each metric). `sequences`
        must be passed exactly where `needs_sequences` holds; then all ranks that share the
        sequences must call at once, also those without rows.

        Raise ValueError for a column that the loss needs and the mini-batch lacks, and for
        log-probs of half precision where the loss computes its own gradient.
        """
        assert (sequences is not None) == self.needs_sequences, (
            "sequences are given to a loss that needs them, alone"
        )
        inputs = self.collect_loss_inputs(log_probs_R, entropies_R, columns, sequences)
        if self.loss not in LOSSES_WITH_GRADIENT:
            value, shares = weigh_loss_terms(
                compute_total_token_loss(self.loss, self.params, inputs, self.regularizers), columns
            )
            return value, {"actor/loss": value.detach(), **shares}
        dtype = log_probs_R.dtype
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"log-probs are {dtype}: rounded, they differ from the old ones by more than an"
                " update changes them. Compute them in float32."
            )
        check_regularizer_columns(inputs, self.regularizers)
        weights_R = columns["loss_weights"].to(dtype)
        metric_weights_R = columns["metric_weights"].to(dtype)
        with torch.no_grad():
            plain = _map_loss_inputs(
                lambda column_R: column_R.to(dtype) if column_R.is_floating_point() else column_R,
                inputs,
            )
            sums = self.compute_row_sums(plain, weights_R, metric_weights_R)
        known_gradients = [(log_probs_R, sums.grad_R, 1.0)]
        if entropies_R is not None and self.regularizers.entropy_coeff != 0:
            known_gradients.append((entropies_R, weights_R, -self.regularizers.entropy_coeff))
        value = attach_gradients(sums.loss_sum, known_gradients)
        return value, {"actor/loss": value.detach(), **sums.metric_sums}

    def compute_row_sums(
        self, inputs: PolicyLossInputs, loss_weights_R: Tensor, metric_weights_R: Tensor
    ) -> RowLossSums:
        """Return the weighted sums and the gradient of a loss that computes its own gradient, by
        the Triton kernel where it can run. All columns must have one type. Call it without
        autograd.
        """
        is_float32 = loss_weights_R.dtype == torch.float32
        triton_loss = (
            _find_triton_loss(self.loss, loss_weights_R.device)
            if self.use_triton and is_float32
            else None
        )
        if triton_loss is not None:
            return triton_loss(
                inputs, self.params, self.regularizers, loss_weights_R, metric_weights_R
            )
        summing = RowLossAccumulator(loss_weights_R, metric_weights_R)
        for block in summing.split_row_blocks():
            part = inputs if block is None else _map_loss_inputs(itemgetter(block), inputs)
            summing.add_block(
                block, add_regularizers(self.loss(part, self.params), part, self.regularizers)
            )
        return summing.finish_sums()

    def collect_loss_inputs(
        self,
        log_probs_R: Tensor,
        entropies_R: Tensor | None,
        columns: ColumnsByName,
        sequences: RowSequences | None,
    ) -> PolicyLossInputs:
        """Return the loss's inputs from the columns of the mini-batch. Raise ValueError for a
        missing column.
        """
        needed = ("advantages", "old_log_probs", *self.needed_columns)
        missing = [
            column for column in needed if column not in (*columns, "entropies", "sequences")
        ]
        if missing:
            raise ValueError(
                f"policy loss {self.name!r} needs the columns {missing}, which the"
                " mini-batch lacks."
            )
        return PolicyLossInputs(
            log_probs_T=log_probs_R,
            old_log_probs_T=columns["old_log_probs"],
            advantages_T=columns["advantages"],
            response_mask_T=_make_true_scalar(log_probs_R.device).expand(
                log_probs_R.shape
            ),  # rows are response tokens
            entropies_T=entropies_R,
            ref_log_probs_T=columns.get("ref_log_probs"),
            rollout_log_probs_T=columns.get("rollout_log_probs"),
            sequences=sequences,
            correction_weights_T=columns.get("correction_weights"),
            is_picked_T=columns.get("is_picked"),
        )


@functools.cache
def _make_true_scalar(device: torch.device) -> Tensor:
    """Return a boolean True tensor on the device, made once."""
    return torch.ones((), dtype=torch.bool, device=device)


def _map_loss_inputs(
    transform: Callable[[Tensor], Tensor], inputs: PolicyLossInputs
) -> PolicyLossInputs:
    """Return the inputs with `transform` applied to each tensor."""
    columns = {name: getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__}
    changed: dict[str, Any] = {
        name: transform(column) if isinstance(column, Tensor) else column
        for name, column in columns.items()
    }
    return PolicyLossInputs(**changed)


def _find_triton_loss(loss: PolicyLoss, device: torch.device) -> TritonLoss | None:
    """Return the Triton kernel that computes `loss` with the regularizers; None where there is none
    or it does not run on `device`.
    """
    if loss is not ppo_clip or device.type != "cuda" or not _can_run_triton_loss(device):
        return None
    from rlhf_megatron.ranks.kernels.policy_row_loss_triton import compute_ppo_clip_row_sums

    return compute_ppo_clip_row_sums


@functools.cache
def _can_run_triton_loss(device: torch.device) -> bool:
    """Return whether the Triton kernel of the loss works on the device; warn where not. Checked
    once.
    """
    why_not = try_triton_kernel(device) or _describe_kernel_problem(device)
    if why_not:
        logger.warning("the policy loss runs in plain torch: %s", why_not)
    return not why_not


def _describe_kernel_problem(device: torch.device) -> str:
    """Return the problem of the kernel on `device`, or "" where it works. Wait for the device."""
    try:
        error = measure_loss_kernel_error(device)
    except (
        Exception
    ) as problem:  # whatever a compiler or a driver raises: it is reported, not handled
        lines = f"{type(problem).__name__}: {problem}".splitlines()
        return f"its Triton kernel failed: {lines[0]}"
    return "" if error < MAX_ERROR else f"its Triton kernel is off by {error:g}."


def measure_loss_kernel_error(device: torch.device) -> float:
    """Return the largest difference between the Triton kernel and plain torch, on rows inside and
    outside of the clip ranges.
    """
    from rlhf_megatron.ranks.kernels.policy_row_loss_triton import compute_ppo_clip_row_sums

    count_R = torch.arange(67, dtype=torch.float32, device=device)
    log_probs_R = -1 - (0.7 * count_R).sin()
    inputs = PolicyLossInputs(
        log_probs_T=log_probs_R,
        old_log_probs_T=-1 + (1.1 * count_R).cos(),
        advantages_T=(1.3 * count_R).sin(),
        response_mask_T=count_R >= 0,
        entropies_T=1 + count_R.cos(),
        ref_log_probs_T=log_probs_R + 0.3 * (1.7 * count_R).cos(),
        correction_weights_T=1 + count_R.sin(),
    )
    regularizers = RegularizerParams(kl_loss_coef=0.1, entropy_coeff=0.1)
    weights_R = torch.full_like(count_R, 1 / 67)
    plain = PolicyRowLoss("ppo_clip", ppo_clip, PPOClipParams(), regularizers)
    expected = plain.compute_row_sums(inputs, weights_R, weights_R)
    found = compute_ppo_clip_row_sums(inputs, PPOClipParams(), regularizers, weights_R, weights_R)
    pairs = [(found.loss_sum, expected.loss_sum), (67 * found.grad_R, 67 * expected.grad_R)]
    pairs += [(metric, expected.metric_sums[name]) for name, metric in found.metric_sums.items()]
    return max(float((one - other).abs().max()) for one, other in pairs)

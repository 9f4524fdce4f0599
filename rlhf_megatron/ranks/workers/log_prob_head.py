"""The head of a policy on one rank: hidden states become log-probs and entropies of rows, by the
backend in use.

The head's gradient goes straight into megatron's float32 main_grad: no tensor of the weight's
size in between.
"""
# S tokens of this rank (its part of the sequence under sequence parallelism), R rows, V vocabulary
# shard, H hidden, K other tokens than the target, N those and the target

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.ranks.kernels.chosen_token_logits import (
    HeadShard,
    apply_softcap,
    compute_chosen_logits,
    find_likeliest_tokens,
)
from rlhf_megatron.ranks.kernels.head_self_check import SelfCheckResult, check_log_prob_backend
from rlhf_megatron.ranks.kernels.log_prob import (
    HeadOutputs,
    LogProbBackend,
    compute_linear_log_probs,
)
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.head_backend import CheckedHeadBackend, choose_head_backend
from rlhf_megatron.ranks.workers.rank_reports import HeadReport
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch


class MainGradSink:
    """A `ranks.kernels.log_prob.WeightGradSink`."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight: Any = weight  # with megatron's attributes

    def get_buffer_VH(self) -> Tensor:
        """Return megatron's float32 gradient buffer of the weight."""
        buffer: Tensor = self._weight.main_grad
        return buffer

    def make_autograd_gradient(self) -> Tensor | None:
        """Return the gradient that autograd receives in place of the real one: the weight itself,
        which costs no memory, as autograd takes it over as it is. Mark the weight's gradient as
        already added.

        Return None where the weight is also the embedding of this stage (megatron marks it with
        `zero_out_wgrad`): autograd would add the stand-in to the embedding's gradient, and the hook
        would add that sum.
        """
        if getattr(self._weight, "zero_out_wgrad", False):
            return None
        self._weight.grad_added_to_main_grad = True
        return self._weight.detach()


def make_main_grad_sink(weight: nn.Parameter) -> MainGradSink | None:
    """Return the sink of a weight's gradient; None for the weight of a frozen model, which has no
    gradient buffer.
    """
    return MainGradSink(weight) if hasattr(weight, "main_grad") else None


logger = logging.getLogger(__name__)


class LogProbHead:
    """The policy's head of one role, for the whole run. Make it on all ranks; use it on the last
    stage.

    `get_weight_shard` returns this rank's rows of the head, of which the first belongs to the token
    `vocab_start`. `softcap` caps the logits, as in `compute_linear_log_probs`.

    Raise ValueError for a backend that cannot run.
    """

    def __init__(
        self,
        role: str,
        get_weight_shard: Callable[[], nn.Parameter],
        vocab_start: int,
        vocab_size: int,
        world: World,
        dtype: torch.dtype,
        chunk_size: int,
        kernels: KernelsConfig,
        softcap: float | None = None,
    ) -> None:
        self._get_weight_shard = get_weight_shard
        self._vocab_range = (vocab_start, vocab_size)
        self.world = world
        self.chunk_size = chunk_size
        self.softcap = softcap
        choice = choose_head_backend(kernels, world.device, dtype)
        if softcap is not None:
            choice = replace(
                choice, reason=f"{choice.reason}; logits capped at {softcap:g}", stash_bytes=0
            )
        self.checked_backend = CheckedHeadBackend(choice, kernels.num_self_checks, role, world)
        if world.is_leader and world.coordinates.dp == 0:
            logger.info("head of the %s: %s", role, choice)

    def make_report(self) -> HeadReport | None:
        """Return the report on the head; None off the last stage."""
        return self.checked_backend.make_report() if self.world.is_last_stage else None

    def compute_outputs(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        with_entropy: bool,
        with_sum_squares: bool,
    ) -> HeadOutputs:
        """Return log-probs, and entropies and sums of squared probabilities where requested, of the
        micro-batch's target tokens. The first calls check the backend, and may fall back to a
        simpler one. Call it on the last stage, on all tp ranks.
        """
        world = self.world
        weight_VH = self._get_weight_shard()
        vocab_start, vocab_size = self._vocab_range
        sink = make_main_grad_sink(weight_VH)
        stash_bytes = self.checked_backend.choice.stash_bytes

        def check_candidate_backend(backend: LogProbBackend) -> SelfCheckResult:
            """Run the self-check of a backend on this call's hidden states."""
            return check_log_prob_backend(
                backend,
                hidden_SH,
                weight_VH,
                temperature=temperature,
                num_columns=min(max(vocab_size - vocab_start, 0), weight_VH.shape[0]),
                chunk_size=self.chunk_size,
                has_sink=sink is not None,
                stash_bytes=stash_bytes,
                softcap=self.softcap,
            )

        self.checked_backend.check_and_fall_back(check_candidate_backend)
        return compute_linear_log_probs(
            hidden_SH,
            weight_VH,
            micro_batch.targets,
            temperature=temperature,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            tp_group=world.tp_group,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            with_sum_squares=with_sum_squares,
            rows_R=micro_batch.rows,
            has_repeated_rows=micro_batch.prompts is not None,
            is_sequence_split=world.layout.sequence_parallel,
            weight_grad_sink=sink if torch.is_grad_enabled() else None,
            stash_bytes=stash_bytes if torch.is_grad_enabled() else 0,
            softcap=self.softcap,
            backend=self.checked_backend.backend,
        )

    def compute_log_probs_of(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        log_probs_R: Tensor,
        token_ids_RK: Tensor,
    ) -> Tensor:
        """Return the log-probs [R, K] of the tokens `token_ids_RK`, with grad: the target's
        log-prob plus the difference between the token's and the target's logit.
        """
        ids_RN = torch.cat([micro_batch.targets[:, None], token_ids_RK.long()], -1)
        weight_VH = self._get_weight_shard()
        logits_RN = compute_chosen_logits(
            hidden_SH, weight_VH, ids_RN, micro_batch.rows, self._make_head_shard(weight_VH)
        )
        logits_RN = apply_softcap(logits_RN, self.softcap) / temperature
        return logits_RN[:, 1:] + (log_probs_R - logits_RN[:, 0])[:, None]

    def find_likeliest_tokens(
        self, hidden_SH: Tensor, micro_batch: MicroBatch, temperature: float, num_top: int
    ) -> tuple[Tensor, Tensor]:
        """Return ([R, K] ids, [R, K] log-probs) of the `num_top` likeliest tokens, the likeliest
        first. Call it on all tp ranks.
        """
        weight_VH = self._get_weight_shard()
        return find_likeliest_tokens(
            hidden_SH,
            weight_VH,
            num_top,
            micro_batch.rows,
            self._make_head_shard(weight_VH),
            temperature,
            self.chunk_size,
            self.softcap,
        )

    def _make_head_shard(self, weight_VH: nn.Parameter) -> HeadShard:
        """Return the description of this rank's vocabulary shard, with a gradient sink where
        gradients are recorded.
        """
        sink = make_main_grad_sink(weight_VH) if torch.is_grad_enabled() else None
        return HeadShard(
            *self._vocab_range, self.world.tp_group, self.world.layout.sequence_parallel, sink
        )

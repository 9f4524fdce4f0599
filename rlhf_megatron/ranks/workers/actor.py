"""The policy on one rank: log-probs, updates, export, checkpoints. A `PolicyWorker` on any
trainer backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.algorithms.rollout_correction.correction_params import CorrectionParams
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.data.batch import MiniBatch, TokenBatch, TokenLogProbs
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.workers.actor_losses import (
    CorrectedRowLoss,
    DistillationRowLoss,
    DistilledPolicyRowLoss,
    RowLoss,
    make_policy_row_loss,
    make_row_losses,
)
from rlhf_megatron.ranks.workers.backend_protocols import TrainedBackend
from rlhf_megatron.ranks.workers.forward_passes import (
    RowLogProbs,
    compute_log_probs,
    gather_token_columns,
)
from rlhf_megatron.ranks.workers.pipeline_passes import sum_over_cp
from rlhf_megatron.ranks.workers.rank_reports import HeadReport
from rlhf_megatron.ranks.workers.sequence_packing import (
    MicroBatch,
    PackedBatch,
    list_token_columns,
    pack_batch,
)
from rlhf_megatron.ranks.workers.trained_model import RowLossFunction, TrainedModel, TrainingPhase
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult

COLUMNS = list_token_columns(MiniBatch)


class ActorModel(TrainedModel):
    """The policy that learns. Make it on all ranks of the pool at once, each with the same
    arguments but `backend`.

    `phases` maps a name ("warmup", "rl") to optimizer and length; the first phase is entered at
    once. `correction` holds the rollout correction that the policy loss makes itself.
    `distillation` is the loss towards a teacher, where there is one.

    Raise ValueError for a loss, kernel or schedule that is not supported.
    """

    def __init__(
        self,
        backend: TrainedBackend,
        config: ActorConfig,
        phases: Mapping[str, TrainingPhase],
        correction: CorrectionParams | None = None,
        distillation: DistillationRowLoss | None = None,
    ) -> None:
        super().__init__(backend, phases, "actor")
        self.config = config
        self.row_losses: dict[str, RowLoss | CorrectedRowLoss] = {**make_row_losses(config)}
        policy = make_policy_row_loss(config)
        term = config.distillation
        taught = (
            policy
            if distillation is None
            else DistilledPolicyRowLoss(policy, distillation, term.others_coef, term.coef)
        )
        self.row_losses["policy"] = (
            taught if correction is None else CorrectedRowLoss(taught, correction)
        )
        if distillation is not None:
            self.row_losses["distillation"] = distillation
        self.head = backend.make_head("actor", config.log_prob_chunk_size, config.kernels)

    def log_probs(
        self,
        batch: TokenBatch,
        plan: ReplicaPlan,
        temperature: float,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
    ) -> TokenLogProbs | None:
        """Return the log-probs of the current policy, and entropies and sums of squared
        probabilities where requested, on leaders; None elsewhere. See `PolicyWorker.log_probs`.
        """
        faults.reach_fault_point("actor.before_log_probs")
        self.offloadable_memory.require_parts(["parameters"])
        rows = RowLogProbs(self.head, temperature, with_entropy, with_sum_squares)
        return compute_log_probs(self.backend, rows, batch, plan)

    def update(
        self,
        batch: MiniBatch,
        plan: ReplicaPlan,
        temperature: float,
        loss: str = "policy",
        capsule: Path | None = None,
    ) -> UpdateResult | None:
        """Run a training pass with the named loss and take one optimizer step. Return the metric
        sums and the step's result on leaders; None elsewhere. See `PolicyWorker.update`. Raise
        ValueError for an unknown loss or a missing column.
        """
        packed, row_loss, own = self._prepare_update(batch, plan, temperature, loss)
        result = self._run_optimizer_step(
            self._run_training_pass(packed, row_loss), packed, capsule
        )
        columns = None if own is None else gather_token_columns(own, packed, self.world)
        if result is None or columns is None:
            return result
        log_probs_T, entropies_T = columns
        return replace(result, old_log_probs=TokenLogProbs(log_probs_T, entropies_T))

    def rerun_forward_backward(
        self, batch: MiniBatch, plan: ReplicaPlan, temperature: float, loss: str = "policy"
    ) -> UpdateResult | None:
        """Run the training pass of `update` without the optimizer step, and watch for numbers that
        are not finite.
        """
        packed, row_loss, _ = self._prepare_update(batch, plan, temperature, loss)
        return self._rerun_pass(packed, row_loss)

    def head_report(self) -> HeadReport | None:
        """Return the report on the backend that computes the log-probs and on its self-checks; None
        off the last stage.
        """
        return self.head.make_report()

    def _prepare_update(
        self, batch: MiniBatch, plan: ReplicaPlan, temperature: float, loss: str
    ) -> tuple[PackedBatch, RowLossFunction, list[Tensor] | None]:
        """Return (the packed batch, the function that computes the loss of its rows, a list). The
        list is None unless the batch lacks the old log-probs of the policy loss: then the loss uses
        the pass's own log-probs as old log-probs, and the pass appends log-probs and entropies, [2,
        R], of each micro-batch to the list. Raise ValueError for an unknown loss.
        """
        if loss not in self.row_losses:
            raise ValueError(f"unknown loss {loss!r}; known: {', '.join(self.row_losses)}.")
        row_loss = self.row_losses[loss]
        world = self.world
        routes = self.backend.routes
        packed = pack_batch(
            batch,
            plan,
            world.layout,
            world.coordinates.cp,
            COLUMNS,
            world.device,
            self.backend.has_router_terms,
            with_source_tokens=routes is not None,
        )
        if routes is not None:
            packed = routes.prepare_update_pass(batch, packed)
        own: list[Tensor] | None = [] if loss == "policy" and batch.old_log_probs is None else None
        rows = RowLogProbs(self.head, temperature, row_loss.needs_entropy or own is not None)

        def compute_row_loss(
            hidden_SH: Tensor, micro_batch: MicroBatch
        ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            """Return (this rank's share of the loss, its share of each metric, the rows' log-probs
            [R]) of a micro-batch.
            """
            log_probs_R, entropies_R = rows(hidden_SH, micro_batch)
            sequences = None
            if row_loss.needs_sequences:  # alike on all cp ranks of the stage, with rows or without
                sequences = RowSequences(
                    micro_batch.sequence_ids,
                    micro_batch.num_sequences,
                    partial(sum_over_cp, world=world),
                )
            columns = micro_batch.columns
            if own is not None and entropies_R is not None:
                own.append(torch.stack([log_probs_R.detach(), entropies_R.detach()]))
                columns = {**columns, "old_log_probs": own[-1][0]}
            if "teacher_ids" in columns:
                found = self.head.compute_log_probs_of(
                    hidden_SH, micro_batch, temperature, log_probs_R, columns["teacher_ids"]
                )
                columns = {**columns, "student_log_probs": found}
            needed_R = entropies_R if row_loss.needs_entropy else None
            return *row_loss(log_probs_R, needed_R, columns, sequences), log_probs_R

        return packed, compute_row_loss, own

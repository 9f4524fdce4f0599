"""The policy on one rank: log-probs, updates, export, checkpoints. A `TrainWorker` on any trainer backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.algorithms.rollout_correction.params import CorrectionParams
from rlhf_megatron.algorithms.sequences import Sequences
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.data.batch import LogProbs, MiniBatch, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.workers.backend import TrainedBackend
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.findings import HeadReport
from rlhf_megatron.workers.forward import RowLogProbs, columns_of_rows, forward_log_probs
from rlhf_megatron.workers.losses import (
    CorrectedRowLoss,
    DistillationRowLoss,
    RowLoss,
    TaughtRowLoss,
    make_row_losses,
    policy_row_loss,
)
from rlhf_megatron.workers.pack import MicroBatch, Packed, pack, token_columns
from rlhf_megatron.workers.pipeline import sum_over_cp
from rlhf_megatron.workers.trained_model import Phase, RowLossFunction, TrainedModel

COLUMNS = token_columns(MiniBatch)


class Actor(TrainedModel):
    """Made on all ranks of the pool at once, each with the same arguments but `backend`.

    `phases`: name -> optimizer and length ("warmup", "rl"); the first one is entered at once. `correction`: what the
    policy loss makes from the policy as it moves. `distillation`: the loss towards a teacher, where there is one.

    Raises ValueError for a loss, kernel or schedule that is not supported.
    """

    def __init__(
        self,
        backend: TrainedBackend,
        config: ActorConfig,
        phases: Mapping[str, Phase],
        correction: CorrectionParams | None = None,
        distillation: DistillationRowLoss | None = None,
    ) -> None:
        super().__init__(backend, phases, "actor")
        self.config = config
        self.losses: dict[str, RowLoss | CorrectedRowLoss] = {**make_row_losses(config)}
        policy, term = policy_row_loss(config), config.distillation
        taught = policy if distillation is None else TaughtRowLoss(policy, distillation, term.others_coef, term.coef)
        self.losses["policy"] = taught if correction is None else CorrectedRowLoss(taught, correction)
        if distillation is not None:
            self.losses["distillation"] = distillation
        self.head = backend.make_head("actor", config.log_prob_chunk_size, config.kernels)

    def log_probs(
        self,
        batch: TokenBatch,
        plan: ReplicaPlan,
        temperature: float,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
    ) -> LogProbs | None:
        """Log-probs of the current policy, as `TrainWorker.log_probs`."""
        faults.reach("actor.before_log_probs")
        self.memory.require("parameters")
        rows = RowLogProbs(self.head, temperature, with_entropy, with_sum_squares)
        return forward_log_probs(self.backend, rows, batch, plan)

    def update(
        self, batch: MiniBatch, plan: ReplicaPlan, temperature: float, loss: str = "policy", capsule: Path | None = None
    ) -> UpdateResult | None:
        """One optimizer step, as `TrainWorker.update`. Raises ValueError: unknown loss, missing column."""
        packed, row_loss, own = self._work(batch, plan, temperature, loss)
        result = self._step(self._pass(packed, row_loss), packed, capsule)
        columns = None if own is None else columns_of_rows(own, packed, self.world)
        return result if result is None or columns is None else replace(result, own=LogProbs(*columns))

    def look_again(
        self, batch: MiniBatch, plan: ReplicaPlan, temperature: float, loss: str = "policy"
    ) -> UpdateResult | None:
        """`update` without the optimizer step."""
        packed, row_loss, _ = self._work(batch, plan, temperature, loss)
        return self._look(packed, row_loss)

    def head_report(self) -> HeadReport | None:
        """How its log-probs are computed, and what was found out about that; None off the last stage."""
        return self.head.report()

    def _work(
        self, batch: MiniBatch, plan: ReplicaPlan, temperature: float, loss: str
    ) -> tuple[Packed, RowLossFunction, list[Tensor] | None]:
        """The third, where the old log-probs of a policy loss are those of its own pass: it gets them and entropies,
        [2, R] of each micro-batch.
        """
        if loss not in self.losses:
            raise ValueError(f"unknown loss {loss!r}; known: {', '.join(self.losses)}.")
        row_loss = self.losses[loss]
        world, routes = self.world, self.backend.routes
        place = (world.layout, world.coordinates.cp, COLUMNS, world.device)
        packed = pack(batch, plan, *place, self.backend.has_router_terms, with_sources=routes is not None)
        if routes is not None:
            packed = routes.before_update(batch, packed)
        own: list[Tensor] | None = [] if loss == "policy" and batch.old_log_probs is None else None
        rows = RowLogProbs(self.head, temperature, row_loss.needs_entropy or own is not None)

        def of_rows(hidden_SH: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            log_probs_R, entropies_R = rows(hidden_SH, micro)
            sequences = None
            if row_loss.needs_sequences:  # alike on all cp ranks of the stage, with rows or without
                sequences = Sequences(micro.sequence_ids, micro.num_sequences, partial(sum_over_cp, world=world))
            columns = micro.columns
            if own is not None and entropies_R is not None:
                own.append(torch.stack([log_probs_R.detach(), entropies_R.detach()]))
                columns = {**columns, "old_log_probs": own[-1][0]}
            if "teacher_ids" in columns:
                found = self.head.log_probs_at(hidden_SH, micro, temperature, log_probs_R, columns["teacher_ids"])
                columns = {**columns, "student_log_probs": found}
            needed_R = entropies_R if row_loss.needs_entropy else None
            return *row_loss(log_probs_R, needed_R, columns, sequences), log_probs_R

        return packed, of_rows, own

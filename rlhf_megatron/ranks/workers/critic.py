"""The value model on one rank: values, updates, export, checkpoints. A `ValueWorker` on any
trainer backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_megatron.config.schema import CriticConfig
from rlhf_megatron.data.batch import CriticValues, TokenBatch, ValueMiniBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.kernels.weighted_row_loss import compute_value_loss_sums
from rlhf_megatron.ranks.workers.backend_protocols import TrainedBackend
from rlhf_megatron.ranks.workers.forward_passes import compute_values
from rlhf_megatron.ranks.workers.sequence_packing import (
    MicroBatch,
    PackedBatch,
    list_token_columns,
    pack_batch,
)
from rlhf_megatron.ranks.workers.trained_model import RowLossFunction, TrainedModel, TrainingPhase
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.weights.value_model import (
    add_value_head,
    make_value_model_config,
    open_value_model,
)

COLUMNS = list_token_columns(ValueMiniBatch)


class CriticModel(TrainedModel):
    """The value model that learns. Make it on all ranks of the pool at once, each with the same
    arguments but `backend`, whose model has a value head.

    `phases` maps a name ("rl") to optimizer and length; the first phase is entered at once. `seed`
    is the seed of the value head's first weights, where a model that is loaded has no value head.

    Raise ValueError for a schedule that is not supported.
    """

    def __init__(
        self,
        backend: TrainedBackend,
        config: CriticConfig,
        phases: Mapping[str, TrainingPhase],
        seed: int,
    ) -> None:
        super().__init__(backend, phases, "critic")
        self.config = config
        self.seed = seed

    @property
    def exported_config(self) -> dict[str, Any]:
        """Return the config.json that belongs to the exported weights, of a
        ...ForTokenClassification model.
        """
        return make_value_model_config(self.backend.hf_config)

    def values(self, batch: TokenBatch, plan: ReplicaPlan) -> CriticValues | None:
        """Return the values of the current model on leaders; None elsewhere. See
        `ValueWorker.values`.
        """
        self.offloadable_memory.require_parts(["parameters"])
        return compute_values(self.backend, batch, plan)

    def update(
        self,
        batch: ValueMiniBatch,
        plan: ReplicaPlan,
        loss: str = "value",
        capsule: Path | None = None,
    ) -> UpdateResult | None:
        """Run a training pass with the loss "value" or "linear" and take one optimizer step. Return
        the metric sums and the step's result on leaders; None elsewhere. See `ValueWorker.update`.
        """
        packed, row_loss = self._prepare_update(batch, plan, loss)
        return self._run_optimizer_step(self._run_training_pass(packed, row_loss), packed, capsule)

    def rerun_forward_backward(
        self, batch: ValueMiniBatch, plan: ReplicaPlan, loss: str = "value"
    ) -> UpdateResult | None:
        """Run the training pass of `update` without the optimizer step, and watch for numbers that
        are not finite.
        """
        return self._rerun_pass(*self._prepare_update(batch, plan, loss))

    def _prepare_update(
        self, batch: ValueMiniBatch, plan: ReplicaPlan, loss: str
    ) -> tuple[PackedBatch, RowLossFunction]:
        """Return (the packed batch, the function that computes the loss of its rows)."""
        world = self.world
        packed = pack_batch(
            batch,
            plan,
            world.layout,
            world.coordinates.cp,
            COLUMNS,
            world.device,
            self.backend.has_router_terms,
        )

        def compute_row_loss(
            hidden_SH: Tensor, micro_batch: MicroBatch
        ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            """Return (this rank's share of the loss, its share of each metric, the rows' values
            [R]) of a micro-batch.
            """
            values_R = self.backend.compute_values(hidden_SH, micro_batch.rows)
            if loss == "linear":
                sum_ = (values_R * micro_batch.columns["loss_weights"].to(values_R.dtype)).sum()
                return sum_, {"actor/loss": sum_.detach()}, values_R
            return *compute_value_loss_sums(
                values_R, micro_batch.columns, self.config.cliprange_value
            ), values_R

        return packed, compute_row_loss

    def load_hf(self, directory: Path) -> None:
        """Load the model of a Hugging Face directory, with a new value head where it has none, and
        start a fresh optimizer. Raise ValueError where the directory does not fit.
        """
        body = open_value_model(directory, self.backend.table)
        self.replace_weights(add_value_head(body, self.config.value_head_init_std, self.seed))

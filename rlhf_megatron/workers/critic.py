"""The value model on one rank: values, updates, export, checkpoints. A `ValueWorker` on any trainer backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_megatron.checkpoint.value_model import read_value_model, value_model_config, with_value_head
from rlhf_megatron.config.schema import CriticConfig
from rlhf_megatron.data.batch import TokenBatch, ValueMiniBatch, Values
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.kernels.row_loss import value_sums
from rlhf_megatron.workers.backend import TrainedBackend
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.forward import forward_values
from rlhf_megatron.workers.pack import MicroBatch, Packed, pack, token_columns
from rlhf_megatron.workers.trained_model import Phase, RowLossFunction, TrainedModel

COLUMNS = token_columns(ValueMiniBatch)


class Critic(TrainedModel):
    """Made on all ranks of the pool at once, each with the same arguments but `backend`, whose model has a value head.

    `phases`: name -> optimizer and length ("rl"); the first one is entered at once. `seed`: of the value head's first
    weights, where a model that is loaded has none.

    Raises ValueError for a schedule that is not supported.
    """

    def __init__(self, backend: TrainedBackend, config: CriticConfig, phases: Mapping[str, Phase], seed: int) -> None:
        super().__init__(backend, phases, "critic")
        self.config = config
        self.seed = seed

    @property
    def exported_config(self) -> dict[str, Any]:
        """config.json of what `export` gives, which is a ...ForTokenClassification."""
        return value_model_config(self.backend.hf_config)

    def values(self, batch: TokenBatch, plan: ReplicaPlan) -> Values | None:
        """Values of the current model, as `ValueWorker.values`."""
        self.memory.require("parameters")
        return forward_values(self.backend, batch, plan)

    def update(
        self, batch: ValueMiniBatch, plan: ReplicaPlan, loss: str = "value", capsule: Path | None = None
    ) -> UpdateResult | None:
        """One optimizer step, as `ValueWorker.update`."""
        packed, row_loss = self._work(batch, plan, loss)
        return self._step(self._pass(packed, row_loss), packed, capsule)

    def look_again(self, batch: ValueMiniBatch, plan: ReplicaPlan, loss: str = "value") -> UpdateResult | None:
        """`update` without the optimizer step."""
        return self._look(*self._work(batch, plan, loss))

    def _work(self, batch: ValueMiniBatch, plan: ReplicaPlan, loss: str) -> tuple[Packed, RowLossFunction]:
        world = self.world
        packed = pack(
            batch, plan, world.layout, world.coordinates.cp, COLUMNS, world.device, self.backend.has_router_terms
        )

        def of_rows(hidden_SH: Tensor, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
            values_R = self.backend.values(hidden_SH, micro.rows)
            if loss == "linear":
                sum_ = (values_R * micro.columns["loss_weights"].to(values_R.dtype)).sum()
                return sum_, {"actor/loss": sum_.detach()}, values_R
            return *value_sums(values_R, micro.columns, self.config.cliprange_value), values_R

        return packed, of_rows

    def load_hf(self, directory: Path) -> None:
        """Become the model of a Hugging Face directory, with a fresh optimizer. Raises ValueError."""
        body = read_value_model(directory, self.backend.table)
        self.start_again(with_value_head(body, self.config.value_head_init_std, self.seed))

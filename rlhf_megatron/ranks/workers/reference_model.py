"""The frozen reference on one rank. A `ForwardWorker`."""

from __future__ import annotations

from pathlib import Path

from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.data.batch import TokenBatch, TokenLogProbs, TopLogProbs
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.workers.backend_protocols import ModelBackend
from rlhf_megatron.ranks.workers.forward_passes import (
    RowLogProbs,
    compute_log_probs,
    compute_top_log_probs,
)
from rlhf_megatron.ranks.workers.frozen_model import FrozenModel
from rlhf_megatron.ranks.workers.rank_reports import HeadReport
from rlhf_megatron.weights.hf_reader import HFReader


class ReferenceModel(FrozenModel):
    """`chunk_size`: vocabulary columns that the head handles at a time, and `kernels`: how. Others:
    see `FrozenModel`.
    """

    def __init__(
        self,
        backend: ModelBackend,
        chunk_size: int,
        kernels: KernelsConfig,
        is_offloaded: bool = False,
    ) -> None:
        self.head = backend.make_head("reference", chunk_size, kernels)
        super().__init__(backend, "reference", is_offloaded)

    def log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, with_entropy: bool = False
    ) -> TokenLogProbs | None:
        """Log-probs of the frozen policy, as `ForwardWorker.log_probs`."""
        with self._weights_on_device():
            rows = RowLogProbs(self.head, temperature, with_entropy)
            return compute_log_probs(self.backend, rows, batch, plan)

    def top_log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, count: int
    ) -> TopLogProbs | None:
        """The tokens that the frozen policy finds likeliest, as `ForwardWorker.top_log_probs`."""
        with self._weights_on_device():
            return compute_top_log_probs(self.backend, self.head, batch, plan, temperature, count)

    def head_report(self) -> HeadReport | None:
        """How its log-probs are computed, and what was found out about that; None off
        the last stage.
        """
        return self.head.make_report()

    def copy_weights_from(self, source_backend: ModelBackend) -> None:
        """Become the model of `source_backend` (the actor's, after a warm-up), which has the same
        layout and configuration.
        """
        with self._weights_on_device(will_change_weights=True):
            self.backend.copy_weights_from(source_backend)

    def load_hf(self, directory: Path) -> None:
        """Become the model of a Hugging Face directory of the same architecture.
        Raises ValueError.
        """
        reader = HFReader(directory)
        reader.check_against_table(self.backend.table)
        with self._weights_on_device(will_change_weights=True):
            self.backend.load_weights(reader)

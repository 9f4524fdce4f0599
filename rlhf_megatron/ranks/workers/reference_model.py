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
    """The frozen reference policy. `chunk_size` is the number of vocabulary columns that the head
    handles at a time, and `kernels` selects the head's backend. For the other arguments see
    `FrozenModel`.
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
        """Return the log-probs of the frozen policy on leaders; None elsewhere. See
        `ForwardWorker.log_probs`.
        """
        with self._weights_on_device():
            rows = RowLogProbs(self.head, temperature, with_entropy)
            return compute_log_probs(self.backend, rows, batch, plan)

    def top_log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, count: int
    ) -> TopLogProbs | None:
        """Return the `count` likeliest tokens of the frozen policy and their log-probs on leaders;
        None elsewhere. See `TeacherWorker.top_log_probs`.
        """
        with self._weights_on_device():
            return compute_top_log_probs(self.backend, self.head, batch, plan, temperature, count)

    def head_report(self) -> HeadReport | None:
        """Return the report on the backend that computes the log-probs and on its self-checks; None
        off the last stage.
        """
        return self.head.make_report()

    def copy_weights_from(self, source_backend: ModelBackend) -> None:
        """Copy the weights of `source_backend` (the actor's, after a warm-up), which has the same
        layout and configuration.
        """
        with self._weights_on_device(will_change_weights=True):
            self.backend.copy_weights_from(source_backend)

    def load_adapter(self, directory: Path) -> None:
        """Load the adapter of a directory in peft's format. Raise ValueError where the directory
        does not fit, or the reference was built without an adapter.
        """
        adapter = self.backend.adapter
        if adapter is None:
            raise ValueError(
                f"{directory} is the adapter of a reference that was copied after a warm-up, but"
                " the reference of this run has no adapter; restore the settings of warmup,"
                " actor.lora and reference.path that the run began with."
            )
        with self._weights_on_device(will_change_weights=True):
            adapter.load(directory)

    def load_hf(self, directory: Path) -> None:
        """Load the weights of a Hugging Face directory of the same architecture, as they are: an
        adapter has no effect then. Raise ValueError where the directory does not fit.
        """
        reader = HFReader(directory)
        reader.check_against_table(self.backend.table)
        with self._weights_on_device(will_change_weights=True):
            self.backend.load_weights(reader)
            if self.backend.adapter is not None:
                self.backend.adapter.clear()

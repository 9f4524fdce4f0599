"""The frozen reference on one rank. A `ForwardWorker`."""

from __future__ import annotations

from pathlib import Path

from rlhf_megatron.checkpoint.hf_reader import HFReader
from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.data.batch import LogProbs, TokenBatch, TopLogProbs
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.workers.backend import Backend
from rlhf_megatron.workers.findings import HeadReport
from rlhf_megatron.workers.forward import RowLogProbs, forward_log_probs, forward_top
from rlhf_megatron.workers.frozen import Frozen


class Reference(Frozen):
    """`chunk_size`: vocabulary columns that the head handles at a time, and `kernels`: how. Others: see `Frozen`."""

    def __init__(self, backend: Backend, chunk_size: int, kernels: KernelsConfig, is_offloaded: bool = False) -> None:
        self.head = backend.make_head("reference", chunk_size, kernels)
        super().__init__(backend, "reference", is_offloaded)

    def log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, with_entropy: bool = False
    ) -> LogProbs | None:
        """Log-probs of the frozen policy, as `ForwardWorker.log_probs`."""
        with self._on_device():
            rows = RowLogProbs(self.head, temperature, with_entropy)
            return forward_log_probs(self.backend, rows, batch, plan)

    def top_log_probs(self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, count: int) -> TopLogProbs | None:
        """The tokens that the frozen policy finds likeliest, as `ForwardWorker.top_log_probs`."""
        with self._on_device():
            return forward_top(self.backend, self.head, batch, plan, temperature, count)

    def head_report(self) -> HeadReport | None:
        """How its log-probs are computed, and what was found out about that; None off the last stage."""
        return self.head.report()

    def copy_weights(self, backend: Backend) -> None:
        """Become the model of `backend` (the actor's, after a warm-up), which has the same layout and configuration."""
        with self._on_device(is_changed=True):
            self.backend.copy_from(backend)

    def load_hf(self, directory: Path) -> None:
        """Become the model of a Hugging Face directory of the same architecture. Raises ValueError."""
        reader = HFReader(directory)
        reader.check(self.backend.table)
        with self._on_device(is_changed=True):
            self.backend.load(reader)

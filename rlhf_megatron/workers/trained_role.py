"""What actor and critic answer in the same words: the verbs of their model, optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

from rlhf_megatron.checkpoint.manifest import SaveResult
from rlhf_megatron.models.table import Rule
from rlhf_megatron.workers.findings import Findings, ReplicaReport
from rlhf_megatron.workers.memory import MemoryReport
from rlhf_megatron.workers.offload import TRAINER_PARTS, TrainerPart
from rlhf_megatron.workers.trained_model import TrainedModel


class TrainedRole:
    """Base of the roles that learn."""

    trained: TrainedModel

    def take_skips(self) -> list[Findings]:
        """See `contract.TrainedWorker`."""
        return self.trained.take_skips()

    def check_replicas(self) -> ReplicaReport:
        """See `contract.TrainedWorker`."""
        return self.trained.check_replicas()

    def save_weights(self, directory: Path) -> str:
        """See `contract.TrainedWorker`."""
        return self.trained.save_weights(directory)

    def load_weights(self, directory: Path) -> None:
        """See `contract.TrainedWorker`."""
        self.trained.load_weights(directory)

    def reset_optimizer(self, phase: str) -> None:
        """See `contract.TrainedWorker`."""
        self.trained.reset_optimizer(phase)

    def synced_chunks(self) -> list[nn.Module]:
        """The model's chunks with all parameters as the last optimizer step left them. All ranks of the pool."""
        return self.trained.synced_chunks()

    def export(self) -> Iterator[tuple[Rule, Tensor]]:
        """See `contract.Worker`."""
        return self.trained.export()

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """See `contract.TrainedWorker`."""
        self.trained.offload(parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False) -> None:
        """See `contract.TrainedWorker`."""
        self.trained.onload(parts, is_read_only)

    def memory_report(self) -> MemoryReport:
        """See `contract.Worker`."""
        return self.trained.memory_report()

    def num_save_bytes(self) -> int:
        """See `contract.TrainedWorker`."""
        return self.trained.num_save_bytes()

    def begin_save(self, directory: Path) -> None:
        """See `contract.TrainedWorker`."""
        self.trained.begin_save(directory)

    def is_save_done(self) -> bool:
        """See `contract.TrainedWorker`."""
        return self.trained.is_save_done()

    def finish_save(self, timeout_s: float) -> SaveResult:
        """See `contract.TrainedWorker`."""
        return self.trained.finish_save(timeout_s)

    def save(self, directory: Path) -> None:
        """See `contract.TrainedWorker`."""
        self.trained.save(directory)

    def load(self, directory: Path) -> None:
        """See `contract.TrainedWorker`."""
        self.trained.load(directory)

"""The LoRA matrices of a model on FSDP2: their first values, and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.lora import UP, is_lora_matrix, make_initial_lora_matrix
from rlhf_megatron.weights.lora_adapter import read_peft_adapter, write_peft_adapter
from rlhf_megatron.weights.weight_table import slice_piece


class FSDPAdapter:
    """A `ModelAdapter`. `collect_tensors` returns the model's tensors by name, the sharded ones as
    DTensors; `seed` is that of the first values.
    """

    def __init__(
        self,
        lora: LoRAConfig,
        collect_tensors: Callable[[], Mapping[str, Tensor]],
        world: World,
        seed: int,
    ) -> None:
        self.lora = lora
        self._collect_tensors = collect_tensors
        self._world = world
        self._seed = seed

    def fill_first_values(self) -> None:
        """Fill the matrices from the adapter at `lora.path` or, without a path, from their seeded
        first values, which have no effect. Raise ValueError for an adapter that does not fit.
        """
        if self.lora.path is not None:
            self.load(Path(self.lora.path))
            return
        self._fill_matrices(
            {
                name: make_initial_lora_matrix(name, matrix.shape, self._seed)
                for name, matrix in self._collect_matrices().items()
            }
        )

    def load(self, directory: Path) -> None:
        """Load an adapter in peft's format. Raise ValueError where it does not fit."""
        shapes = {name: matrix.shape for name, matrix in self._collect_matrices().items()}
        self._fill_matrices(read_peft_adapter(directory, self.lora, shapes))

    @torch.no_grad()
    def clear(self) -> None:
        """Make B zero, so that B A has no effect."""
        for name, matrix in self._collect_matrices().items():
            if name.endswith(UP):
                matrix.to_local().zero_()

    @torch.no_grad()
    def gather_matrices(self) -> dict[str, Tensor]:
        """Return all matrices, whole, by name, in host memory. All ranks must call it."""
        return {
            name: matrix.full_tensor().cpu() for name, matrix in self._collect_matrices().items()
        }

    def save(self, directory: Path, matrices: Mapping[str, Tensor], base_model_name: str) -> None:
        """Write these matrices into a new directory in peft's format, in float32."""
        write_peft_adapter(directory, self.lora, iter(matrices.items()), base_model_name)

    @torch.no_grad()
    def _fill_matrices(self, values: Mapping[str, Tensor]) -> None:
        """Copy this rank's rows of the whole matrices `values` into its pieces."""
        rank = self._world.rank
        num_ranks = self._world.layout.world_size
        for name, matrix in self._collect_matrices().items():
            rows = slice_piece(len(values[name]), rank, num_ranks)
            matrix.to_local().copy_(values[name][rows])

    def _collect_matrices(self) -> dict[str, Any]:
        """Return the LoRA matrices of the model, DTensors, by name."""
        return {
            name: tensor for name, tensor in self._collect_tensors().items() if is_lora_matrix(name)
        }

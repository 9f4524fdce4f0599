"""The tensors of a comparison on disk: raw results, and beside them all rows that
were made of them.

    DUMPS/run.json                               families, cuts, layouts with the families that were
                                                 run in each (as
                                                 actor and as critic), cells that failed, and the
                                                     settings of the run
    DUMPS/rows.json                              every row; nothing is computed from it
    DUMPS/<family>/start.safetensors             weights before the first step, float32
    DUMPS/<family>/batch.safetensors             the batch
    DUMPS/<family>/<cut>/<result>.safetensors    <result>: float64, float32_0 and so on
                                                 (transformers), or a layout,
                                                 and with .order_1 and so on behind its name
                                                     further runs of it

What a family's critic has stands under DUMPS/<family>/critic instead, in the same order.

A result holds `log_probs`, `entropies`, `log_probs_after` [T]; `grad_norms` [optimizer steps],
before clipping; `routes` [T, layers with experts, experts a token], sorted, -1 of a sample's last
token; of a critic `values` and `values_after` in place of the first three;
`gradient/<step>/<tensor>`, before clipping, and `weights/<tensor>`, after the last step, by Hugging
Face name. Of a layout only the gradients of step 0 are kept; it also holds
`copies/<copy>/<tensor>`: what other ranks hold of the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from benchmarks.parity.cases import FAMILIES, Role

EXACT = "float64"
RUN = "run.json"
ROWS = "rows.json"


def single_name(number: int) -> str:
    """The name of a draw of float32's error: transformers with its hidden units in one order."""
    return f"float32_{number}"


def run_name(layout: str, number: int) -> str:
    """The name of a layout's run: 0 is its own,
    others are with its hidden units in another order.
    """
    return f"{layout}.order_{number}" if number else layout


def other_than_dumps(directory: Path) -> str | None:
    """Names something in `directory` that no run has written, one that was ended before it was
    done included.
    """
    return min({entry.name for entry in directory.iterdir()} - {RUN, ROWS, *FAMILIES}, default=None)


class Dumps:
    """Writes one run's tensors under `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def describe(self, description: Mapping[str, Any]) -> None:
        """What the run consists of. Written last: a directory without it is incomplete."""
        (self.directory / RUN).write_text(json.dumps(description, indent=1) + "\n")

    def inputs(
        self, family: str, role: Role, state: dict[str, Tensor], batch: dict[str, Tensor]
    ) -> None:
        self._write(self._place(family, role) / "start.safetensors", state)
        self._write(self._place(family, role) / "batch.safetensors", batch)

    def result(
        self, family: str, role: Role, cut: str, name: str, tensors: dict[str, Tensor]
    ) -> None:
        self._write(self._place(family, role) / cut / f"{name}.safetensors", tensors)

    def _place(self, family: str, role: Role) -> Path:
        return self.directory / family / ("critic" if role == "critic" else "")

    @staticmethod
    def _write(path: Path, tensors: dict[str, Tensor]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

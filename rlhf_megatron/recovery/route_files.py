"""How long the files of data.routes stay: until a checkpoint has what was trained on them, where a run makes any, since
a run that goes on from an earlier one trains on its journal's samples again; else until they were trained on.

A recorded run keeps all, for its replays. What a killed process has left and no journal names goes at the start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from rlhf_megatron.data.routes import place_of, remove_routes


class RouteFiles:
    """`directory`: None where no engine writes any. `is_kept`: the run has a journal."""

    def __init__(self, directory: Path | None = None, is_kept: bool = False, is_recorded: bool = False) -> None:
        self.directory = "" if directory is None else str(directory.absolute())
        self._is_kept = is_kept
        self._is_recorded = is_recorded
        self._trained: list[tuple[int, tuple[str, ...]]] = []

    def trained(self, step: int, names: Iterable[str] | None) -> None:
        """A step's update is over that trained on these, or left them out."""
        if self.directory and names is not None and not self._is_recorded:
            self._trained.append((step, tuple(names)))
            if not self._is_kept:
                self.saved(step)

    def sweep(self, needed: Collection[str]) -> None:
        """Remove the files that a former process has left and that are not in `needed`, as the run begins."""
        if self.directory and not self._is_recorded:
            paths = {place_of(handle)[1] for handle in needed}
            for path in Path(self.directory).glob("*"):
                if str(path) not in paths:
                    path.unlink(missing_ok=True)

    def saved(self, step: int) -> None:
        """A checkpoint has the run up to this step."""
        for done, names in self._trained:
            if done <= step:
                remove_routes(names, are_trained=True)
        self._trained = [(done, names) for done, names in self._trained if done > step]

"""How long the files of data.routes stay: until a checkpoint has what was trained on them, where a
run makes any, since a run that goes on from an earlier one trains on its journal's samples again;
else until they were trained on.

A recorded run keeps all, for its replays. What a killed process has left and no journal names goes
at the start. How much stands where is told each step, and once where little more may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from rlhf_megatron.data import expert_route_files
from rlhf_megatron.data.expert_route_files import (
    RouteStorageUsage,
    group_paths_by_address,
    remove_route_files,
    split_route_handle,
)

_NEARLY = 0.8  # of what may stand on a machine


class RouteFileRetention:
    """`directory`: None where no engine writes any. `is_kept`: the run has a journal. `most_bytes`:
    of all files of a machine; 0: what its disk has room for. `note`: takes a line for whoever
    watches the run.
    """

    def __init__(
        self,
        directory: Path | None = None,
        has_journal: bool = False,
        is_recorded: bool = False,
        max_bytes: int = 0,
        note: Callable[[str], None] = print,
    ) -> None:
        """Make the keeper; no file is touched yet. `directory`: None where no engine writes route
        files. `has_journal`: files stay until a checkpoint has their step. `is_recorded`: no file
        is ever removed. `max_bytes`: of all files of a machine; 0: as many as its disk has room
        for. `note` shows a line to the person who watches.
        """
        self.directory = "" if directory is None else str(directory.absolute())
        # where engines write, and how much may stand there
        self.directory_and_max_bytes = self.directory, max_bytes
        self._note = note
        self._warned_addresses: set[str] = set()  # HOST:PORT of other machines; "": this one
        self._has_journal = has_journal
        self._is_recorded = is_recorded
        self._trained_steps: list[tuple[int, tuple[str, ...]]] = []

    def record_trained_step(self, step: int, route_names: Iterable[str] | None) -> None:
        """Record that a step is over which trained on these route files, or left them out. Remove
        the files at once where the run has no journal. Do nothing in a recorded run.
        """
        if self.directory and route_names is not None and not self._is_recorded:
            self._trained_steps.append((step, tuple(route_names)))
            if not self._has_journal:
                self.remove_files_through_step(step)

    def remove_unneeded_files(self, needed_handles: Collection[str]) -> None:
        """Remove the files that a former process left and that are not in `needed_handles`, and
        note how many bytes may be used. A recorded run removes none.
        """
        if not self.directory:
            return
        paths = {split_route_handle(handle)[1] for handle in needed_handles}
        for path in () if self._is_recorded else Path(self.directory).glob("*"):
            if str(path) not in paths:
                path.unlink(missing_ok=True)
        most = self._get_max_bytes(self._measure_held_files(""))
        self._note(
            f"files of routes: at most {most / 1e9:.3g} GB in {self.directory} (rollout.routes_gb)"
        )

    def measure_storage(self, route_names: Iterable[str] | None) -> dict[str, float]:
        """Return metrics of the route files in memory and spilled, in GB, over this machine and the
        machines that hold `route_names`. Note once for each machine when its room is nearly used
        up. Call it before the files of the step are removed.
        """
        if not self.directory:
            return {}
        found = {
            store: self._measure_held_files(store)
            for store in {"", *group_paths_by_address(route_names or ())}
        }
        for store, held in found.items():
            most = self._get_max_bytes(held)
            if held.num_bytes > _NEARLY * most and store not in self._warned_addresses:
                self._warned_addresses.add(store)
                self._note(
                    f"files of routes{store and ' at '}{store} have {held.num_bytes / 1e9:.3g} GB"
                    f" of the {most / 1e9:.3g} that may stand there, and beyond these the run"
                    " ends: save more often (trainer.save_freq), since what was saved goes, raise"
                    " rollout.routes_gb, or make room"
                )
        in_memory = sum(held.num_resident_bytes for held in found.values())
        spilled = sum(held.num_bytes for held in found.values()) - in_memory
        return {
            "rollout/routes_memory_gb": in_memory / 1e9,
            "rollout/routes_spilled_gb": spilled / 1e9,
        }

    def _measure_held_files(self, address: str) -> RouteStorageUsage:
        """Return the usage of route files at a machine (HOST:PORT, "" for this one)."""
        return (
            expert_route_files.remote_route_stores.measure_storage(address)
            if address and expert_route_files.remote_route_stores
            else expert_route_files.measure_route_storage(Path(self.directory))
        )

    def _get_max_bytes(self, held_files: RouteStorageUsage) -> int:
        """Return how many bytes may be used on a machine: its room, or the run's limit where that
        is lower.
        """
        return min(held_files.max_bytes, self.directory_and_max_bytes[1] or held_files.max_bytes)

    def remove_files_through_step(self, step: int) -> None:
        """Remove the files of the steps up to this one, which a checkpoint has."""
        for done, names in self._trained_steps:
            if done <= step:
                remove_route_files(names, is_step_trained=True)
        self._trained_steps = [(done, names) for done, names in self._trained_steps if done > step]

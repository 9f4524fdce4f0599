"""How long the files of data.routes stay: until a checkpoint has what was trained on them, where a run makes any, since
a run that goes on from an earlier one trains on its journal's samples again; else until they were trained on.

A recorded run keeps all, for its replays. What a killed process has left and no journal names goes at the start. How
much stands where is told each step, and once where little more may.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from rlhf_megatron.data import routes
from rlhf_megatron.data.routes import Held, by_address, place_of, remove_routes

_NEARLY = 0.8  # of what may stand on a machine


class RouteFiles:
    """`directory`: None where no engine writes any. `is_kept`: the run has a journal. `most_bytes`: of all files of a
    machine; 0: what its disk has room for. `note`: takes a line for whoever watches the run."""

    def __init__(
        self,
        directory: Path | None = None,
        is_kept: bool = False,
        is_recorded: bool = False,
        most_bytes: int = 0,
        note: Callable[[str], None] = print,
    ) -> None:
        self.directory = "" if directory is None else str(directory.absolute())
        self.place = self.directory, most_bytes  # where engines write, and how much may stand there
        self._note = note
        self._told: set[str] = set()  # HOST:PORT of other machines; "": this one
        self._is_kept = is_kept
        self._is_recorded = is_recorded
        self._trained: list[tuple[int, tuple[str, ...]]] = []

    def trained(self, step: int, names: Iterable[str] | None) -> None:
        """A step's update is over that trained on these, or left them out."""
        if self.directory and names is not None and not self._is_recorded:
            self._trained.append((step, tuple(names)))
            if not self._is_kept:
                self.saved(step)

    def begin(self, needed: Collection[str]) -> None:
        """Remove the files that a former process has left and that are not in `needed`, and say how much may come."""
        if not self.directory:
            return
        paths = {place_of(handle)[1] for handle in needed}
        for path in () if self._is_recorded else Path(self.directory).glob("*"):
            if str(path) not in paths:
                path.unlink(missing_ok=True)
        most = self._most(self._held(""))
        self._note(f"files of routes: at most {most / 1e9:.3g} GB in {self.directory} (rollout.routes_gb)")

    def metrics(self, names: Iterable[str] | None) -> dict[str, float]:
        """Return what stands on the machines of these, which a step has trained on, before they may go."""
        if not self.directory:
            return {}
        found = {store: self._held(store) for store in {"", *by_address(names or ())}}
        for store, held in found.items():
            most = self._most(held)
            if held.num_bytes > _NEARLY * most and store not in self._told:
                self._told.add(store)
                self._note(
                    f"files of routes{store and ' at '}{store} have {held.num_bytes / 1e9:.3g} GB of the"
                    f" {most / 1e9:.3g} that may stand there, and beyond these the run ends: save more often"
                    " (trainer.save_freq), since what was saved goes, raise rollout.routes_gb, or make room"
                )
        in_memory = sum(held.in_memory for held in found.values())
        spilled = sum(held.num_bytes for held in found.values()) - in_memory
        return {"rollout/routes_memory_gb": in_memory / 1e9, "rollout/routes_spilled_gb": spilled / 1e9}

    def _held(self, store: str) -> Held:
        return routes.elsewhere.held(store) if store and routes.elsewhere else routes.held(Path(self.directory))

    def _most(self, held: Held) -> int:
        return min(held.most, self.place[1] or held.most)

    def saved(self, step: int) -> None:
        """A checkpoint has the run up to this step."""
        for done, names in self._trained:
            if done <= step:
                remove_routes(names, are_trained=True)
        self._trained = [(done, names) for done, names in self._trained if done > step]

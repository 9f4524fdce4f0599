"""What a run does about numbers that are not finite: it counts skipped steps, keeps capsules of them, and ends.

A skip is an optimizer step that changed nothing on any rank, or a whole step of the loop that was not trained on, since
a log-prob, value or advantage of it is not finite. The limit is on those that come one after the other in one role.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.observe.metrics.batch import BadColumn, describe
from rlhf_megatron.recovery.capsule import Capsules
from rlhf_megatron.recovery.skip_facts import RoleSkips, of_batch, of_update, summary
from rlhf_megatron.runtime.proxies import TrainedProxy, Workers
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.findings import Findings

NONFINITE_EXIT_CODE = 17  # of a run that ended because of them


class NonFiniteNumbers(Exception):
    """trainer.max_consecutive_skips is reached. The message says what was seen and names the capsule."""


@dataclass
class Skips:
    """Owned by the controller, for the whole run. Without `capsules` none are kept."""

    trainer: TrainerConfig
    capsules: Capsules | None = None
    note: Callable[[str], None] = lambda text: None
    in_a_row: dict[str, int] = field(default_factory=dict)  # role -> skips since its last step that was made
    _before: int = 0  # in a row, before this process
    _last_capsule: Path | None = None

    @property
    def num_consecutive(self) -> int:
        """For the state of the run: the most that a role has in a row."""
        return max(self.in_a_row.values(), default=self._before)

    def restore(self, num_consecutive: int) -> None:
        """Undo `num_consecutive`: every role counts on from there until it makes a step."""
        self._before = num_consecutive
        self.in_a_row.clear()

    @property
    def is_over(self) -> bool:
        """The limit is reached; `settle` will raise."""
        return self.num_consecutive >= self.trainer.max_consecutive_skips

    def begin(self, step: int, worker: TrainedProxy, token_budget: int, arguments: dict[str, object]) -> RoleSkips:
        """Before the updates of a role in a step."""
        place = self.capsules.place(step, worker.role) if self.capsules is not None else None
        return RoleSkips(worker, token_budget, arguments, place)

    def count(self, role: str, is_skipped: bool) -> None:
        """The outcome of one more optimizer step."""
        self.in_a_row[role] = self.in_a_row.get(role, self._before) + 1 if is_skipped else 0

    def count_warmup(self, is_skipped: bool) -> None:
        """The outcome of a supervised step of the actor. Raises NonFiniteNumbers at the limit."""
        self.count("actor", is_skipped)
        self._end_at_limit(0, ["In the warm-up: look at its learning rate and at the weights that it starts from."])

    def seen(self, of_role: RoleSkips, number: int, mini_batch: TokenBatch, result: UpdateResult) -> None:
        """The outcome of mini-batch `number` of a role in a step."""
        self.count(of_role.role, result.is_skipped)
        if not result.is_skipped:
            return
        of_role.count += 1
        if of_role.first is None:
            of_role.first, of_role.first_number = mini_batch, number

    def settle(self, step: int, skips: Sequence[tuple[RoleSkips, Callable[[int], TrainBatch]]]) -> None:
        """After the updates of a step: say what was skipped, complete capsules, end the run at the limit.

        `skips`: of each role, with its samples by number of the mini-batch. Raises NonFiniteNumbers.
        """
        said = []
        for of_role, samples_of in skips:
            if of_role.first is None:
                continue
            findings: list[Findings] = []
            for of_rank in of_role.worker.take_skips().result():
                findings.append(of_rank[-of_role.count])
            samples = samples_of(of_role.first_number)
            facts = of_update(step, of_role, samples, findings)
            said.append(f"{of_role.role}: {summary(facts)}")
            if of_role.place is not None:
                self._keep(of_role.place, facts, samples, of_role.first)
            self.note(f"step {step}: {of_role.count} optimizer steps skipped; {said[-1]}")
        self._end_at_limit(step, said)

    def leave_out(
        self, workers: Workers, step: int, roles: Sequence[str], batch: TrainBatch, columns: Sequence[BadColumn]
    ) -> None:
        """A whole step is not trained on: one skip for each of `roles`. Raises NonFiniteNumbers at the limit."""
        text = f"not finite: {describe(columns, batch)}"
        self.note(f"step {step} is not trained on: {text}")
        is_of_critic = all(column.name in ("values", "returns") for column in columns)
        worker = workers.critic if is_of_critic else workers.actor
        place = self.capsules.place(step, worker.role) if self.capsules is not None else None
        if place is not None:
            errors = [error for error in worker.save_weights(directory=place).result() if error]
            self._keep(place, of_batch(step, worker, batch, columns, errors), batch, None)
        for each in roles:
            self.count(each, is_skipped=True)
        self._end_at_limit(step, [text])

    def _keep(self, place: Path, facts: dict[str, object], samples: TrainBatch, mini_batch: TokenBatch | None) -> None:
        assert self.capsules is not None
        path = self.capsules.write(place, facts, samples, mini_batch)
        if path is None:
            return
        self._last_capsule = path
        error = f" without weights: {facts['weights_error']}" if facts["weights_error"] else ""
        self.note(f"capsule: {path}{error}; rlhf-megatron train {path / 'config.yaml'} --replay {path}")

    def _end_at_limit(self, step: int, said: Sequence[str]) -> None:
        if not self.is_over:
            return
        capsule = self._last_capsule or (self.capsules.newest() if self.capsules is not None else None)
        kept = (
            f"The capsule {capsule} has what was skipped: rlhf-megatron train CONFIG --replay {capsule}"
            if capsule is not None
            else "No capsule was kept (trainer.capsules_kept, or the disk)."
        )
        raise NonFiniteNumbers(
            f"numbers are not finite: {self.num_consecutive} skips in a row (trainer.max_consecutive_skips ="
            f" {self.trainer.max_consecutive_skips}), the last in step {step}. {' '.join(said)}\n{kept}"
        )

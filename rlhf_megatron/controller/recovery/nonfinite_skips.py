"""Numbers that are not finite: a run counts skipped steps, describes them, keeps capsules of them,
and ends at a limit.

A skip is an optimizer step that changed nothing on any rank, or a step of the loop that was not
trained on because a log-prob, value or advantage is not finite. The limit counts skips in a
row of one role.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    NonFiniteColumn,
    describe_non_finite_columns,
    describe_sample,
)
from rlhf_megatron.controller.recovery.skip_capsule import CapsuleStore
from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.data.replica_plan import NO_OP, NO_OP_LENGTH, ReplicaPlan
from rlhf_megatron.ranks.workers.rank_reports import NonFiniteReport
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.call_dispatch import plan_scattered_call
from rlhf_megatron.runtime.role_proxies import RoleProxies, TrainedProxy
from rlhf_megatron.weights.parallel_layout import ParallelLayout

NUM_SHOWN = 4  # of each list in a summary
NONFINITE_EXIT_CODE = 17  # of a run that ended because of them


class NonFiniteNumbers(Exception):
    """trainer.max_consecutive_skips is reached. The message says what was seen and
    names the capsule.
    """


SamplesOf = Callable[[int], TrainBatch]
MiniBatchOf = Callable[[int], TokenBatch]


@dataclass
class NonFiniteSkips:
    """The skips of a run, counted by the controller. Without `capsules` none are kept."""

    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    capsules: CapsuleStore | None = None
    note: Callable[[str], None] = lambda text: None
    # role -> skips since its last step that was made
    consecutive_by_role: dict[str, int] = field(default_factory=dict)
    _num_before_restart: int = 0  # in a row, before this process
    _last_capsule: Path | None = None

    @property
    def num_consecutive(self) -> int:
        """Return the largest number of skips in a row over roles; part of the run's state."""
        return max(self.consecutive_by_role.values(), default=self._num_before_restart)

    def restore_count(self, num_consecutive: int) -> None:
        """Go on from a stored `num_consecutive`: every role counts from there until it makes a step
        that is not skipped.
        """
        self._num_before_restart = num_consecutive
        self.consecutive_by_role.clear()

    @property
    def is_limit_reached(self) -> bool:
        """Return whether the limit is reached, so that `report_skipped_updates` will raise."""
        return self.num_consecutive >= self.trainer.max_consecutive_skips

    def begin_role(
        self,
        step: int,
        worker: TrainedProxy,
        token_budget: int,
        update_arguments: dict[str, object],
    ) -> RoleSkips:
        """Return a record for the skips of a role in a step, with the directory where its hosts
        write a capsule. Call it before the updates of the role.
        """
        place = (
            self.capsules.choose_partial_directory(step, worker.role)
            if self.capsules is not None
            else None
        )
        return RoleSkips(worker, token_budget, update_arguments, place)

    def count_optimizer_step(self, role: str, is_skipped: bool) -> None:
        """Count one more optimizer step of a role: a skip adds to its skips in a row, a step that
        was made resets them to 0.
        """
        self.consecutive_by_role[role] = (
            self.consecutive_by_role.get(role, self._num_before_restart) + 1 if is_skipped else 0
        )

    def count_supervised_step(self, is_skipped: bool, step: int = 0) -> None:
        """Count a supervised step of the actor; `step` 0 is a step of a warm-up. Raise
        NonFiniteNumbers at the limit.
        """
        self.count_optimizer_step("actor", is_skipped)
        self._raise_at_limit(
            step, ["Look at the learning rate and at the weights that the run starts from."]
        )

    def count_update(
        self, role_skips: RoleSkips, mini_batch_index: int, result: UpdateResult
    ) -> None:
        """Count the outcome of mini-batch `mini_batch_index` of a role in a step, and note the
        first that was skipped.
        """
        self.count_optimizer_step(role_skips.role, result.is_skipped)
        if not result.is_skipped:
            return
        role_skips.num_skips += 1
        if role_skips.first_mini_batch_index is None:
            role_skips.first_mini_batch_index = mini_batch_index

    def report_skipped_updates(
        self, step: int, skips: Sequence[tuple[RoleSkips, SamplesOf, MiniBatchOf]]
    ) -> None:
        """Report the skipped updates of a step, complete their capsules, and raise NonFiniteNumbers
        at the limit.

        `skips`: for each role its record, and functions that return the samples and the mini-batch
        of a number.
        """
        said = []
        for of_role, samples_of, mini_batch_of in skips:
            if of_role.first_mini_batch_index is None:
                continue
            findings: list[NonFiniteReport] = []
            for of_rank in of_role.worker.take_skip_reports().result():
                findings.append(of_rank[-of_role.num_skips])
            samples = samples_of(of_role.first_mini_batch_index)
            facts = describe_skipped_update(step, of_role, samples, findings)
            said.append(f"{of_role.role}: {summarise_skipped_update(facts)}")
            if of_role.capsule_directory is not None:
                self._write_capsule(
                    of_role.capsule_directory,
                    facts,
                    samples,
                    mini_batch_of(of_role.first_mini_batch_index),
                )
            self.note(f"step {step}: {of_role.num_skips} optimizer steps skipped; {said[-1]}")
        self._raise_at_limit(step, said)

    def skip_whole_step(
        self,
        workers: RoleProxies,
        step: int,
        roles: Sequence[str],
        batch: TrainBatch,
        columns: Sequence[NonFiniteColumn],
    ) -> None:
        """Record that a whole step is not trained on, because `columns` of its batch are not
        finite: one skip for each of `roles`, and a capsule. Raise NonFiniteNumbers at the limit.
        """
        text = f"not finite: {describe_non_finite_columns(columns, batch)}"
        self.note(f"step {step} is not trained on: {text}")
        is_of_critic = all(column.name in ("values", "returns") for column in columns)
        worker = workers.critic if is_of_critic else workers.actor
        place = (
            self.capsules.choose_partial_directory(step, worker.role)
            if self.capsules is not None
            else None
        )
        if place is not None:
            errors = [error for error in worker.save_weights(directory=place).result() if error]
            self._write_capsule(
                place, describe_skipped_batch(step, worker, batch, columns, errors), batch, None
            )
        for each in roles:
            self.count_optimizer_step(each, is_skipped=True)
        self._raise_at_limit(step, [text])

    def _write_capsule(
        self,
        partial_directory: Path,
        facts: dict[str, object],
        samples: TrainBatch,
        mini_batch: TokenBatch | None,
    ) -> None:
        """Complete a capsule, and note how to replay it."""
        assert self.capsules is not None
        path = self.capsules.complete_capsule(partial_directory, facts, samples, mini_batch)
        if path is None:
            return
        self._last_capsule = path
        error = f" without weights: {facts['weights_error']}" if facts["weights_error"] else ""
        self.note(
            f"capsule: {path}{error}; rlhf-megatron train {path / 'config.yaml'} --replay {path}"
        )

    def _raise_at_limit(self, step: int, descriptions: Sequence[str]) -> None:
        """Raise NonFiniteNumbers, with these descriptions and the last capsule, where the limit is
        reached.
        """
        if not self.is_limit_reached:
            return
        capsule = self._last_capsule or (
            self.capsules.find_newest() if self.capsules is not None else None
        )
        kept = (
            (
                f"The capsule {capsule} has what was skipped: rlhf-megatron train CONFIG"
                f" --replay {capsule}"
            )
            if capsule is not None
            else "No capsule was kept (trainer.capsules_kept, or the disk)."
        )
        raise NonFiniteNumbers(
            f"numbers are not finite: {self.num_consecutive} skips in a row"
            f" (trainer.max_consecutive_skips = {self.trainer.max_consecutive_skips}), the last in"
            f" step {step}. {' '.join(descriptions)}\n{kept}"
        )


@dataclass
class RoleSkips:
    """The skips of one role in one step of the loop. A capsule holds the first of them."""

    worker: TrainedProxy
    token_budget: int
    update_arguments: dict[str, object]  # of its update
    capsule_directory: Path | None  # where its hosts write; None: no capsule
    num_skips: int = 0
    first_mini_batch_index: int | None = None  # of the mini-batch, counted over the step

    @property
    def role(self) -> str:
        """Return the name of the role, such as "actor"."""
        return self.worker.role


def describe_skipped_update(
    step: int, role_skips: RoleSkips, samples: TrainBatch, findings: Sequence[NonFiniteReport]
) -> dict[str, Any]:
    """Return the facts of a skipped mini-batch, for its capsule. `findings`: the reports of all
    ranks of the role's pool, in rank order.
    """
    layout = role_skips.worker.layout
    plans = plan_scattered_call(samples, layout, role_skips.token_budget)
    errors = sorted({found.error for found in findings if found.error})
    return {
        "kind": "update",
        "step": step,
        "role": role_skips.role,
        "mini_batch": role_skips.first_mini_batch_index,
        "num_skipped": role_skips.num_skips,
        "layout": str(layout),
        "token_budget": role_skips.token_budget,
        "arguments": role_skips.update_arguments,
        "plan": [asdict(plan) for plan in plans],
        "weights_error": "; ".join(errors),
        **merge_rank_findings(samples, layout, plans, findings),
    }


def describe_skipped_batch(
    step: int,
    worker: TrainedProxy,
    batch: TrainBatch,
    columns: Sequence[NonFiniteColumn],
    weights_errors: Sequence[str],
) -> dict[str, Any]:
    """Return the facts of a whole step that was not trained on, for its capsule."""
    return {
        "kind": "batch",
        "step": step,
        "role": worker.role,
        "layout": str(worker.layout),
        "columns": [
            {
                "name": column.name,
                "num_tokens": column.num_tokens,
                "samples": _list_sample_ids(batch, column.sample_indices),
            }
            for column in columns
        ],
        "what": describe_non_finite_columns(columns, batch),
        "weights_error": "; ".join(sorted(set(weights_errors))),
    }


def merge_rank_findings(
    samples: TrainBatch,
    layout: ParallelLayout,
    plans: Sequence[ReplicaPlan],
    findings: Sequence[NonFiniteReport],
) -> dict[str, Any]:
    """Merge the reports of all ranks into facts: losses, gradients, parameters and tokens that are
    not finite. Micro-batches and tokens are numbered as in `samples`.
    """
    losses: dict[tuple[int, int], float] = {}  # (replica, micro-batch) -> sum over the cp ranks
    tokens: dict[int, set[int]] = {}  # sample -> positions
    for rank, found in enumerate(findings):
        place = layout.locate_rank(rank)
        for micro_batch, loss in enumerate(found.losses if place.tp == 0 else ()):
            losses[place.dp, micro_batch] = losses.get((place.dp, micro_batch), 0.0) + loss
        for sample, position in _locate_shard_tokens(samples, plans[place.dp], found.bad_tokens):
            tokens.setdefault(sample, set()).add(position)
    micro_batches = [
        {
            "replica": dp,
            "micro_batch": number,
            "loss": _encode_json_number(loss),
            "samples": _list_micro_batch_samples(samples, plans[dp], number),
        }
        for (dp, number), loss in sorted(losses.items())
    ]
    return {
        "grad_norm": _encode_json_number(findings[0].grad_norm),
        "ranks": [
            {
                "where": found.rank_name,
                "gradients": [str(bad) for bad in found.gradients],
                "parameters": [str(bad) for bad in found.parameters],
            }
            for found in findings
            if found.gradients or found.parameters
        ],
        "first": _find_first_nonfinite(layout, findings),
        "micro_batches": micro_batches,
        "tokens": [
            {
                "sample": int(samples.sample_ids[sample]),
                "prompt": samples.prompts[sample],
                "positions": sorted(found),
            }
            for sample, found in sorted(tokens.items())
        ],
        "num_bad_tokens": sum(
            f.num_bad_tokens for rank, f in enumerate(findings) if layout.locate_rank(rank).tp == 0
        ),
        "samples": [describe_sample(samples, sample) for sample in range(len(samples))],
    }


def summarise_skipped_update(facts: Mapping[str, Any]) -> str:
    """Return the facts of a skipped update as one line of text."""
    parts = [f"gradient norm {facts['grad_norm']}"]
    for kind in ("parameters", "gradients"):
        named = [f"[{rank['where']}] {bad}" for rank in facts["ranks"] for bad in rank[kind]]
        if named:
            parts.append(f"{kind} not finite: {_join_first_names(named)}")
    losses = [entry for entry in facts["micro_batches"] if isinstance(entry["loss"], str)]
    if losses:
        ids = sorted({sample for entry in losses for sample in entry["samples"]})
        parts.append(
            f"{len(losses)} micro-batches with such a loss"
            f" (samples {_join_first_names(list(map(str, ids)))})"
        )
    if facts["tokens"]:
        ids = [str(entry["sample"]) for entry in facts["tokens"]]
        parts.append(
            f"log-probs or values of {facts['num_bad_tokens']} tokens"
            f" (samples {_join_first_names(ids)})"
        )
    return "; ".join(parts)


def _find_first_nonfinite(layout: ParallelLayout, findings: Sequence[NonFiniteReport]) -> str:
    """Return the rank and the tensor that first was not finite, "" where no rank reports one.
    Forward passes come first, from the first stage to the last; then gradients, from the last stage
    to the first.
    """
    seen_first: list[tuple[bool, int, int, str]] = []
    for rank, found in enumerate(findings):
        if found.first_bad_tensor:
            is_gradient = found.first_bad_tensor.startswith("gradient")
            stage = layout.locate_rank(rank).pp
            seen_first.append(
                (
                    is_gradient,
                    -stage if is_gradient else stage,
                    rank,
                    f"[{found.rank_name}] {found.first_bad_tensor}",
                )
            )
    return min(seen_first)[3] if seen_first else ""


def _locate_shard_tokens(
    batch: TokenBatch, plan: ReplicaPlan, tokens: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (sample of the batch, position in the sample) for tokens numbered within a replica's
    shard.
    """
    lengths = [
        NO_OP_LENGTH if sample == NO_OP else int(batch.lengths[sample]) for sample in plan.samples
    ]
    ends = torch.tensor(lengths).cumsum(0)
    placed = []
    for token in tokens:
        index = int(torch.searchsorted(ends, token, right=True))
        placed.append((plan.samples[index], token - int(ends[index]) + lengths[index]))
    return placed


def _list_micro_batch_samples(batch: TrainBatch, plan: ReplicaPlan, micro_batch: int) -> list[int]:
    """Return the sample ids of a micro-batch of a replica, without no-op samples."""
    held = [plan.samples[index] for index in plan.micro_batches[micro_batch]]
    return _list_sample_ids(batch, [sample for sample in held if sample != NO_OP])


def _list_sample_ids(batch: TrainBatch, samples: Sequence[int]) -> list[int]:
    """Return the sample ids at these indices of the batch."""
    return [int(batch.sample_ids[sample]) for sample in samples]


def _encode_json_number(value: float) -> float | str:
    """Return the number, or its text where it is nan or infinite: JSON has no such numbers."""
    return value if math.isfinite(value) else repr(value)


def _join_first_names(names: list[str]) -> str:
    """Return the first NUM_SHOWN names, separated by commas, and how many more there are."""
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more

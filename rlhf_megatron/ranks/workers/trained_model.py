"""A model that learns, on one rank: the base of actor and critic, which bring the loss of a row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron import faults
from rlhf_megatron.config.schema import OptimConfig
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import (
    SAVE_TIMEOUT_S,
    BackgroundSave,
    load_plain_values,
)
from rlhf_megatron.ranks.parallel.world import free_scratch_buffers
from rlhf_megatron.ranks.workers.backend_protocols import (
    OptimizerStepResult,
    RowsResult,
    TrainedBackend,
)
from rlhf_megatron.ranks.workers.capsule_weights import write_capsule_weights
from rlhf_megatron.ranks.workers.lost_update import CastRounding, EngineExport, measure_merge
from rlhf_megatron.ranks.workers.nonfinite import (
    NonFiniteWatch,
    check_parameters_finite,
    find_bad_positions,
    find_bad_tensors,
)
from rlhf_megatron.ranks.workers.offload import TRAINER_PARTS, OffloadableMemory, TrainerPart
from rlhf_megatron.ranks.workers.pipeline_passes import sum_over_cp
from rlhf_megatron.ranks.workers.rank_reports import (
    WEIGHTS,
    MemoryReport,
    NonFiniteReport,
    ReplicaReport,
)
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, PackedBatch
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.weights.checkpoint_manifest import SaveResult
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import WeightRule

MAX_SKIP_REPORTS = 1000  # skipped steps of which findings are kept until somebody asks
RowLossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor], Tensor]]
"""(hidden_SH, micro-batch) -> (this rank's share of the loss, with grad; its share of each metric;
the rows' log-probs or values, [R]).
"""


@dataclass(frozen=True)
class TrainingPhase:
    """A stretch of training with an optimizer of its own."""

    optim: OptimConfig
    num_steps: int  # optimizer steps in all; the length of schedules that name none


@dataclass(frozen=True)
class _PassResult:
    """The results of all micro-batches of a pass; empty except on the last stage, but for
    `router_sums`.
    """

    metric_names: tuple[str, ...]
    losses: Tensor | None  # [micro-batches], this rank's shares
    metric_sums: Tensor | None  # [names]
    row_values: tuple[Tensor, ...]  # of each micro-batch: log-probs or values
    router_sums: dict[str, float]  # on every stage: the replica's share of the terms of its routers


class TrainedModel:
    """A model with weights, gradients and optimizer. Make it on all ranks of the pool at once, and
    call all methods on all of them.

    `phases` maps a name to optimizer and length; the first phase is entered at once. `role` is
    "actor" or "critic".

    Raise ValueError for a schedule that is not supported.
    """

    def __init__(
        self, backend: TrainedBackend, phases: Mapping[str, TrainingPhase], role: str
    ) -> None:
        self.backend = backend
        self.world = backend.world
        self.dtype = backend.dtype
        self.phases = dict(phases)
        self.phase_name = next(iter(self.phases))
        self.role = role
        self._begin_current_phase()
        self.offloadable_memory = OffloadableMemory(
            role,
            self.world.device,
            {part: partial(backend.list_part_tensors, part) for part in TRAINER_PARTS},
        )
        self._cast_rounding = CastRounding(backend, self._has_optimizer)
        self.skip_reports: deque[NonFiniteReport] = deque(maxlen=MAX_SKIP_REPORTS)
        self._last_capsule: Path | None = None
        self._background_save: BackgroundSave | None = None  # that was begun and not finished

    def _run_optimizer_step(
        self, pass_result: _PassResult, packed_batch: PackedBatch, capsule_dir: Path | None
    ) -> UpdateResult | None:
        """Take the optimizer step after a pass over `packed_batch`, and return the update's result
        on leaders; None elsewhere. A skipped step adds a report to `skip_reports`.

        `capsule_dir` receives the weights when the step is skipped, but only for the first skipped
        step in a row with this directory.
        """
        if self.role == "actor" and faults.reach_fault_point("actor.before_optimizer_step"):
            _inject_fault(self.backend.named_gradients(), math.nan)
        step = self.backend.optimizer.step(pass_result.losses)
        if step.is_skipped:
            self.skip_reports.append(
                self._write_capsule(
                    self._make_nonfinite_report(pass_result, packed_batch, step.grad_norm),
                    capsule_dir,
                )
            )
        else:
            self.backend.update_router_biases()
            if self.role == "actor" and faults.reach_fault_point("actor.after_optimizer_step"):
                _inject_fault(self.backend.named_parameters(), 1e-3)
        return self._make_update_result(pass_result, step)

    def _rerun_pass(
        self, packed_batch: PackedBatch, row_loss: RowLossFunction
    ) -> UpdateResult | None:
        """Run a watched training pass without the optimizer step, add a report to `skip_reports`
        (also where all numbers are finite), and return the result on leaders; None elsewhere.
        """
        with NonFiniteWatch(self.backend.watched_modules) as watch:
            done = self._run_training_pass(packed_batch, row_loss, watch)
        _, grad_norm = self.backend.optimizer.check_finiteness(done.losses)
        self.skip_reports.append(
            replace(
                self._make_nonfinite_report(done, packed_batch, grad_norm),
                first_bad_tensor=watch.first_bad_tensor,
            )
        )
        is_finite = math.isfinite(grad_norm)
        return self._make_update_result(
            done,
            OptimizerStepResult(grad_norm, self.backend.optimizer.lr, is_skipped=not is_finite),
        )

    def take_skip_reports(self) -> list[NonFiniteReport]:
        """Return this rank's reports on the steps that were skipped since the last call, in order,
        and clear them. `rerun_forward_backward` adds a report, too.
        """
        taken = list(self.skip_reports)
        self.skip_reports.clear()
        return taken

    def check_replicas(self) -> ReplicaReport:
        """Compare the tensors that this rank holds alike with other ranks, and return the report.
        All ranks must call it.
        """
        self.offloadable_memory.require_parts(["parameters", "optimizer"])
        self.backend.gather_parameters()
        return self.backend.check_replicas()

    def save_weights(self, directory: Path) -> str:
        """Write model and random states into a capsule; return "" or the reason why they could not
        be written. See `ranks.workers.capsule_weights`.
        """
        self.offloadable_memory.require_parts(["parameters"])
        self.backend.gather_parameters()
        return write_capsule_weights(
            directory, lambda: self.backend.stage_state_for_save(None), self.world
        )

    def load_weights(self, directory: Path) -> None:
        """Load the model of a capsule, which may come from another layout. The optimizer stays as
        it is. Raise ValueError as `load`.
        """
        self.offloadable_memory.require_parts(["parameters"], will_change=True)
        self.backend.restore_state(directory / WEIGHTS, None)

    def _run_training_pass(
        self,
        packed_batch: PackedBatch,
        row_loss: RowLossFunction,
        nonfinite_watch: NonFiniteWatch | None = None,
    ) -> _PassResult:
        """Run the loss forward and backward over all micro-batches from zero gradients, and return
        the losses, metric sums and row values of this rank.
        """
        self.offloadable_memory.require_parts(TRAINER_PARTS, will_change=True)
        names: list[str] = []

        def collect_rows(micro_batch: MicroBatch, hidden_states: Tensor) -> RowsResult:
            """Return (the loss of a micro-batch, 0, its loss, metrics and row values in one flat
            tensor).
            """
            value, sums, rows_R = row_loss(hidden_states[0], micro_batch)
            if nonfinite_watch is not None:
                nonfinite_watch.record_tensor(
                    rows_R, "log-probs" if self.role == "actor" else "values"
                )
                nonfinite_watch.record_tensor(value, "loss")
            names[:] = sums
            return (
                value,
                0,
                torch.cat([torch.stack([value.detach(), *sums.values()]), rows_R.detach().float()]),
            )

        self.backend.begin_training_pass(packed_batch)
        collected = self.backend.run_training_passes(packed_batch, collect_rows)
        of_routers = self.backend.end_training_pass()
        if not collected:
            return _PassResult((), None, None, (), of_routers)
        heads = torch.stack([part[: 1 + len(names)] for part in collected])
        rows = tuple(part[1 + len(names) :] for part in collected)
        return _PassResult(tuple(names), heads[:, 0], heads[:, 1:].sum(0), rows, of_routers)

    def _make_update_result(
        self, pass_result: _PassResult, step_result: OptimizerStepResult
    ) -> UpdateResult | None:
        """Return the metric sums, summed over cp ranks, and the step's result on leaders; None
        elsewhere.
        """
        if pass_result.metric_sums is None:  # not on the last stage
            return None
        totals = sum_over_cp(pass_result.metric_sums, self.world)
        if not self.world.is_leader:
            return None
        sums = dict(zip(pass_result.metric_names, totals.tolist(), strict=True))
        sums |= {f"{self.role}/{name}": value for name, value in pass_result.router_sums.items()}
        return UpdateResult(sums, step_result.grad_norm, step_result.lr, step_result.is_skipped)

    def _make_nonfinite_report(
        self, pass_result: _PassResult, packed_batch: PackedBatch, grad_norm: float
    ) -> NonFiniteReport:
        """Return the report on numbers of this rank that are not finite: gradients, parameters,
        losses and row values.
        """
        values = (
            torch.cat(pass_result.row_values).cpu() if pass_result.row_values else torch.zeros(0)
        )
        tokens, num_tokens = find_bad_positions(values, packed_batch.token_index[: values.numel()])
        return NonFiniteReport(
            rank_name=str(self.world),
            grad_norm=grad_norm,
            gradients=find_bad_tensors(self.backend.named_gradients()),
            parameters=find_bad_tensors(self.backend.named_parameters()),
            losses=tuple(pass_result.losses.tolist()) if pass_result.losses is not None else (),
            bad_tokens=tokens,
            num_bad_tokens=num_tokens,
        )

    def _write_capsule(self, report: NonFiniteReport, capsule_dir: Path | None) -> NonFiniteReport:
        """Write the weights into `capsule_dir`, unless it is None or was written last, and return
        the report with the outcome. All ranks decide alike.
        """
        if capsule_dir is None or capsule_dir == self._last_capsule:
            return report
        self._last_capsule = capsule_dir
        error = self.save_weights(capsule_dir)
        return replace(report, has_weights=not error, error=error)

    def reset_optimizer(self, phase: str) -> None:
        """Enter a phase with a fresh optimizer; float32 main parameters are kept. Raise ValueError
        for an unknown phase.
        """
        self.offloadable_memory.require_parts(TRAINER_PARTS, will_change=True)
        if phase not in self.phases:
            raise ValueError(f"unknown phase {phase!r}; known: {', '.join(self.phases)}.")
        self.phase_name = phase
        self._begin_current_phase(keeps_main_params=True)

    def replace_weights(self, weight_source: WeightSource) -> None:
        """Load the weights of `weight_source`, with a fresh optimizer of the current phase."""
        self.offloadable_memory.require_parts(TRAINER_PARTS, will_change=True)
        self.backend.gather_parameters()
        self.backend.load_weights(weight_source)
        self._begin_current_phase()

    def export_shards(self) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Gather updated parameters, and return an iterator over the table's rules with this rank's
        shards; iterating communicates nothing. Raise ValueError on all ranks where a weight is not
        finite.
        """
        self._prepare_export()
        return self.backend.export_shards()

    def export_for_engines(self, policy_version: int, engine_dtype: torch.dtype) -> EngineExport:
        """Return `export_shards` for a weight sync to engines with weights of `engine_dtype`, which
        also measures what rounding loses of the updates.
        """
        if self.backend.adapter is not None:
            self._prepare_export()
            return measure_merge(self.backend, engine_dtype)
        rounding = self._cast_rounding
        return EngineExport(
            self.export_shards(), partial(rounding.finish_send, policy_version, engine_dtype)
        )

    def _prepare_export(self) -> None:
        """Gather updated parameters. Raise ValueError on all ranks where a weight is not finite."""
        self.offloadable_memory.require_parts(["parameters"])
        self.backend.gather_parameters()
        check_parameters_finite(self.backend.named_weights(), self.world)

    def _has_optimizer(self) -> bool:
        """Return whether the optimizer's state is on the device; wait for its bytes."""
        if self.offloadable_memory.is_dropped("optimizer"):
            return False
        self.offloadable_memory.require_parts(["optimizer"])
        return True

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Free the device memory of these parts, after gathering updated parameters."""
        has_parameters = not self.offloadable_memory.is_dropped("parameters")
        if "parameters" in parts:
            self._cast_rounding.forget_offloaded_values()
        elif "optimizer" in parts and self.role == "actor" and has_parameters:
            self._read_rounding_before_offload()
        if "parameters" in parts and has_parameters:
            self.offloadable_memory.require_parts(["parameters"])
            self.backend.gather_parameters()
        free_scratch_buffers()
        self.offloadable_memory.drop_parts(parts)

    def _read_rounding_before_offload(self) -> None:
        """Read what a weight sync without the optimizer on the device needs to measure its
        rounding; do nothing where the optimizer is off the device already.
        """
        if self._has_optimizer():
            self.offloadable_memory.require_parts(["parameters"])
            self._cast_rounding.read_before_offload()

    def onload(
        self, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False
    ) -> None:
        """Give these parts their device memory and bytes back; `is_read_only` promises that nothing
        changes them before the next `offload`.
        """
        self.offloadable_memory.restore_parts(parts, is_read_only)

    def memory_report(self) -> MemoryReport:
        """Report the memory that this rank holds now."""
        return self.offloadable_memory.make_report()

    def estimate_save_bytes(self) -> int:
        """Return about the bytes that this rank will write in a save."""
        return self.backend.estimate_save_bytes()

    def begin_save(self, directory: Path) -> None:
        """Copy model, optimizer and phase to host memory, and begin to write them in the
        background. One save may run at a time.
        """
        self.offloadable_memory.require_parts(["parameters", "optimizer"])
        assert self._background_save is None, "one save at a time"
        self.backend.gather_parameters()
        self._background_save = BackgroundSave(
            self.backend.stage_state_for_save({"phase": self.phase_name}),
            directory,
            str(self.world),
        )

    def is_save_done(self) -> bool:
        """Return whether this rank has no files left to write: there is no save, or its files are
        written or failed.
        """
        return self._background_save is None or self._background_save.is_done

    def finish_save(self, timeout_s: float) -> SaveResult:
        """Wait for the save that `begin_save` began, and return its files or error."""
        assert self._background_save is not None, "no save was begun"
        save = self._background_save
        self._background_save = None
        return save.finish(timeout_s)

    def save(self, directory: Path) -> None:
        """Save model, optimizer and phase, and wait for the files. Raise OSError."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.begin_save(directory)
        result = self.finish_save(SAVE_TIMEOUT_S)
        if result.error is not None:
            raise OSError(result.error)

    def load(self, directory: Path) -> None:
        """Load a saved model with its optimizer, and enter its phase. Raise ValueError where it
        does not fit.
        """
        self.offloadable_memory.require_parts(TRAINER_PARTS, will_change=True)
        plain = load_plain_values(directory)
        if plain["phase"] != self.phase_name:
            self.reset_optimizer(plain["phase"])
        self.backend.restore_state(directory, plain)

    def _begin_current_phase(self, keeps_main_params: bool = False) -> None:
        """Start the optimizer and schedules of the current phase."""
        phase = self.phases[self.phase_name]
        self.backend.begin_phase(phase.optim, phase.num_steps, keeps_main_params)


def _inject_fault(tensors: Mapping[str, Tensor], added_value: float) -> None:
    """Add `added_value` to one element of a rank's first tensor: the damage that a fault plan
    requests.
    """
    next(iter(tensors.values())).data.view(-1)[0] += added_value

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
from rlhf_megatron.checkpoint.dist_checkpoint import SAVE_TIMEOUT_S, BackgroundSave, load_plain
from rlhf_megatron.checkpoint.manifest import SaveResult
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import OptimConfig
from rlhf_megatron.models.table import Rule
from rlhf_megatron.parallel.world import free_scratch
from rlhf_megatron.workers.backend import RowsResult, StepResult, TrainedBackend
from rlhf_megatron.workers.capsule import save_weights
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.findings import WEIGHTS, Findings, MemoryReport, ReplicaReport
from rlhf_megatron.workers.nonfinite import Watch, bad_positions, bad_tensors, check_finite
from rlhf_megatron.workers.offload import TRAINER_PARTS, Offload, TrainerPart
from rlhf_megatron.workers.pack import MicroBatch, Packed
from rlhf_megatron.workers.pipeline import sum_over_cp

SKIPS_KEPT = 1000  # skipped steps of which findings are kept until somebody asks
RowLossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor], Tensor]]
"""(hidden_SH, micro-batch) -> (this rank's share of the loss, with grad; its share of each metric; the rows' log-probs
or values, [R])."""


@dataclass(frozen=True)
class Phase:
    """A stretch of training with an optimizer of its own."""

    optim: OptimConfig
    num_steps: int  # optimizer steps in all; the length of schedules that name none


@dataclass(frozen=True)
class _Pass:
    """The results of all micro-batches; empty but on the last stage."""

    names: tuple[str, ...]
    losses: Tensor | None  # [micro-batches], this rank's shares
    sums: Tensor | None  # [names]
    rows: tuple[Tensor, ...]  # of each micro-batch: log-probs or values
    of_routers: dict[str, float]  # on every stage: the replica's share of the terms of its routers


class TrainedModel:
    """Weights, gradients and optimizer. Made on all ranks of the pool at once, and so are all calls.

    `phases`: name -> optimizer and length; the first one is entered at once. `role`: "actor" or "critic".

    Raises ValueError for a schedule that is not supported.
    """

    def __init__(self, backend: TrainedBackend, phases: Mapping[str, Phase], role: str) -> None:
        self.backend = backend
        self.world = backend.world
        self.dtype = backend.dtype
        self.phases = dict(phases)
        self.phase = next(iter(self.phases))
        self.role = role
        self._begin_phase()
        self.memory = Offload(role, self.world.device, {part: partial(backend.tensors, part) for part in TRAINER_PARTS})
        self.skips: deque[Findings] = deque(maxlen=SKIPS_KEPT)
        self._last_capsule: Path | None = None
        self._save: BackgroundSave | None = None  # that was begun and not finished

    def _step(self, done: _Pass, packed: Packed, capsule: Path | None) -> UpdateResult | None:
        """The optimizer step after a pass over `packed`. The result on leaders; None elsewhere.

        `capsule`: where the weights go when the step is skipped; only those of the first such step with this name do.
        """
        if self.role == "actor" and faults.reach("actor.before_optimizer_step"):
            _plant(self.backend.named_gradients(), math.nan)
        step = self.backend.optimizer.step(done.losses)
        if step.is_skipped:
            self.skips.append(self._kept(self._findings(done, packed, step.grad_norm), capsule))
        else:
            self.backend.after_step()
            if self.role == "actor" and faults.reach("actor.after_optimizer_step"):
                _plant(self.backend.named_parameters(), 1e-3)
        return self._result(done, step)

    def _look(self, packed: Packed, row_loss: RowLossFunction) -> UpdateResult | None:
        """A pass without the optimizer step, watched; `take_skips` tells what was seen, of a finite pass too."""
        with Watch(self.backend.watched) as watch:
            done = self._pass(packed, row_loss, watch)
        _, grad_norm = self.backend.optimizer.judge(done.losses)
        self.skips.append(replace(self._findings(done, packed, grad_norm), first=watch.first))
        is_finite = math.isfinite(grad_norm)
        return self._result(done, StepResult(grad_norm, self.backend.optimizer.lr, is_skipped=not is_finite))

    def take_skips(self) -> list[Findings]:
        """Take what this rank saw in the steps that were skipped since the last call, in their order."""
        taken = list(self.skips)
        self.skips.clear()
        return taken

    def check_replicas(self) -> ReplicaReport:
        """Compare what this rank holds alike with others."""
        self.memory.require("parameters", "optimizer")
        self.backend.sync()
        return self.backend.check_replicas()

    def save_weights(self, directory: Path) -> str:
        """Model and random states into a capsule; "" or why they could not be written. See `workers.capsule`."""
        self.memory.require("parameters")
        self.backend.sync()
        return save_weights(directory, lambda: self.backend.stage(None), self.world)

    def load_weights(self, directory: Path) -> None:
        """The model of a capsule, under any layout. The optimizer stays as it is. Raises ValueError as `load`."""
        self.memory.require("parameters", is_changed=True)
        self.backend.restore(directory / WEIGHTS, None)

    def _pass(self, packed: Packed, row_loss: RowLossFunction, watch: Watch | None = None) -> _Pass:
        self.memory.require(*TRAINER_PARTS, is_changed=True)
        names: list[str] = []

        def on_rows(micro: MicroBatch, hidden: Tensor) -> RowsResult:
            value, sums, rows_R = row_loss(hidden[0], micro)
            if watch is not None:
                watch.see(rows_R, "log-probs" if self.role == "actor" else "values")
                watch.see(value, "loss")
            names[:] = sums
            return value, 0, torch.cat([torch.stack([value.detach(), *sums.values()]), rows_R.detach().float()])

        self.backend.begin_pass(packed)
        collected = self.backend.train(packed, on_rows)
        of_routers = self.backend.end_pass()
        if not collected:
            return _Pass((), None, None, (), of_routers)
        heads = torch.stack([part[: 1 + len(names)] for part in collected])
        rows = tuple(part[1 + len(names) :] for part in collected)
        return _Pass(tuple(names), heads[:, 0], heads[:, 1:].sum(0), rows, of_routers)

    def _result(self, done: _Pass, step: StepResult) -> UpdateResult | None:
        if done.sums is None:  # not on the last stage
            return None
        totals = sum_over_cp(done.sums, self.world)
        if not self.world.is_leader:
            return None
        sums = dict(zip(done.names, totals.tolist(), strict=True))
        sums |= {f"{self.role}/{name}": value for name, value in done.of_routers.items()}
        return UpdateResult(sums, step.grad_norm, step.lr, step.is_skipped)

    def _findings(self, done: _Pass, packed: Packed, grad_norm: float) -> Findings:
        values = torch.cat(done.rows).cpu() if done.rows else torch.zeros(0)
        tokens, num_tokens = bad_positions(values, packed.token_index[: values.numel()])
        return Findings(
            where=str(self.world),
            grad_norm=grad_norm,
            gradients=bad_tensors(self.backend.named_gradients()),
            parameters=bad_tensors(self.backend.named_parameters()),
            losses=tuple(done.losses.tolist()) if done.losses is not None else (),
            tokens=tokens,
            num_tokens=num_tokens,
        )

    def _kept(self, findings: Findings, capsule: Path | None) -> Findings:
        """`findings`, once the weights have been written where they are wanted. All ranks decide alike."""
        if capsule is None or capsule == self._last_capsule:
            return findings
        self._last_capsule = capsule
        error = self.save_weights(capsule)
        return replace(findings, has_weights=not error, error=error)

    def reset_optimizer(self, phase: str) -> None:
        """Enter a phase with a fresh optimizer. Raises ValueError for an unknown one."""
        self.memory.require(*TRAINER_PARTS, is_changed=True)
        if phase not in self.phases:
            raise ValueError(f"unknown phase {phase!r}; known: {', '.join(self.phases)}.")
        self.phase = phase
        self._begin_phase(is_model_kept=True)

    def start_again(self, weights: WeightSource) -> None:
        """Become the model of `weights`, with a fresh optimizer of the current phase."""
        self.memory.require(*TRAINER_PARTS, is_changed=True)
        self.backend.sync()
        self.backend.load(weights)
        self._begin_phase()

    def export(self) -> Iterator[tuple[Rule, Tensor | None]]:
        """This rank's shards with their table rules, all gathered. Raises on numbers that are not finite."""
        self.memory.require("parameters")
        self.backend.sync()
        check_finite(self.backend.named_weights(), self.world)
        return self.backend.export()

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Free the device's memory of these parts."""
        if "parameters" in parts and not self.memory.is_dropped("parameters"):
            self.memory.require("parameters")
            self.backend.sync()
        free_scratch()
        self.memory.drop(parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False) -> None:
        """Undo `offload`."""
        self.memory.restore(parts, is_read_only)

    def memory_report(self) -> MemoryReport:
        """Report what this rank holds now."""
        return self.memory.report()

    def num_save_bytes(self) -> int:
        """Return about the bytes that this rank will write in a save."""
        return self.backend.num_save_bytes()

    def begin_save(self, directory: Path) -> None:
        """Copy what is saved to host memory, and begin to write it."""
        self.memory.require("parameters", "optimizer")
        assert self._save is None, "one save at a time"
        self.backend.sync()
        self._save = BackgroundSave(self.backend.stage({"phase": self.phase}), directory, str(self.world))

    def is_save_done(self) -> bool:
        """This rank writes nothing any more."""
        return self._save is None or self._save.is_done

    def finish_save(self, timeout_s: float) -> SaveResult:
        """End what `begin_save` began."""
        assert self._save is not None, "no save was begun"
        save, self._save = self._save, None
        return save.finish(timeout_s)

    def save(self, directory: Path) -> None:
        """`begin_save` and `finish_save`. Raises OSError."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.begin_save(directory)
        result = self.finish_save(SAVE_TIMEOUT_S)
        if result.error is not None:
            raise OSError(result.error)

    def load(self, directory: Path) -> None:
        """Become what was saved. Raises ValueError."""
        self.memory.require(*TRAINER_PARTS, is_changed=True)
        plain = load_plain(directory)
        if plain["phase"] != self.phase:
            self.reset_optimizer(plain["phase"])
        self.backend.restore(directory, plain)

    def _begin_phase(self, is_model_kept: bool = False) -> None:
        phase = self.phases[self.phase]
        self.backend.begin_phase(phase.optim, phase.num_steps, is_model_kept)


def _plant(tensors: Mapping[str, Tensor], value: float) -> None:
    """The damage that a fault plan asks for: `value` added to one element of the first of a rank's tensors."""
    next(iter(tensors.values())).data.view(-1)[0] += value

"""A model that learns, on one rank: the base of actor and critic, which bring the loss of a row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_megatron import faults
from rlhf_megatron.checkpoint.dist_checkpoint import (
    EXTRA_STATE,
    SAVE_TIMEOUT_S,
    BackgroundSave,
    load_plain,
    load_sharded,
    stage_sharded,
    without_extra_state,
)
from rlhf_megatron.checkpoint.load_model import load_on_rank, local_shards, named_parameters, named_weights
from rlhf_megatron.checkpoint.manifest import SaveResult
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import MegatronConfig, OptimConfig
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.router import RouterTerms, make_router_terms
from rlhf_megatron.models.table import Head, Rule
from rlhf_megatron.parallel.mcore_fixes import is_of_expert
from rlhf_megatron.parallel.world import World, free_scratch
from rlhf_megatron.workers.capsule import save_weights
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.data_parallel import gradient_tensors, parameter_tensors, sync_parameters, wrap
from rlhf_megatron.workers.findings import WEIGHTS, Findings, MemoryReport, ReplicaReport
from rlhf_megatron.workers.nonfinite import Watch, bad_positions, bad_tensors, check_finite
from rlhf_megatron.workers.offload import TRAINER_PARTS, Offload, TrainerPart
from rlhf_megatron.workers.optimizer import Optimizer, StepResult, reset
from rlhf_megatron.workers.pack import MicroBatch, Packed
from rlhf_megatron.workers.pipeline import RowsResult, run_micro_batches, sum_over_cp
from rlhf_megatron.workers.replicas import check_replicas

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
    """What came out of all micro-batches; nothing but on the last stage."""

    names: tuple[str, ...]
    losses: Tensor | None  # [micro-batches], this rank's shares
    sums: Tensor | None  # [names]
    rows: tuple[Tensor, ...]  # of each micro-batch: log-probs or values
    of_routers: dict[str, float]  # on every stage: the replica's share of the terms of its routers


class TrainedModel:
    """Weights, gradient buffers and optimizer. Made on all ranks of the pool at once, and so are all calls.

    `phases`: name -> optimizer and length; the first one is entered at once.

    Raises ValueError for an architecture, layout or schedule that is not supported.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        dtype: torch.dtype,
        megatron: MegatronConfig,
        phases: Mapping[str, Phase],
        head: Head = "vocabulary",
    ) -> None:
        self.world = world
        self.dtype = dtype
        self.megatron = megatron
        self.phases = dict(phases)
        self.phase = next(iter(self.phases))
        self.model = build_model(hf_config, world, dtype, megatron, head)
        self.table = table_for(hf_config, world.layout.tp, self.model.impl, head)
        load_on_rank(self.model.chunks, self.table, weights, world)
        self.router_terms = make_router_terms(self.model.chunks, megatron, self.model.transformer_config, world)
        self.chunks = wrap(self.model.chunks, self.model.transformer_config, megatron, world)
        self.model.chunks = list(self.chunks)
        self.optimizer = self._fresh_optimizer()
        self.role = "actor" if head == "vocabulary" else "critic"
        self.memory = Offload(
            self.role,
            world.device,
            {
                "parameters": lambda: parameter_tensors(self.chunks),
                "gradients": lambda: gradient_tensors(self.chunks),
                "optimizer": lambda: self.optimizer.state_tensors(),
            },
        )
        self.skips: deque[Findings] = deque(maxlen=SKIPS_KEPT)
        self._last_capsule: Path | None = None
        self._save: BackgroundSave | None = None  # that was begun and not finished

    def _step(self, done: _Pass, packed: Packed, capsule: Path | None) -> UpdateResult | None:
        """The optimizer step after a pass over `packed`. The result on leaders; None elsewhere.

        `capsule`: where the weights go when the step is skipped; only those of the first such step with this name do.
        """
        if self.role == "actor" and faults.reach("actor.before_optimizer_step"):
            _plant(self.chunks, "main_grad", math.nan)
        step = self.optimizer.step(done.losses)
        if step.is_skipped:
            self.skips.append(self._kept(self._findings(done, packed, step.grad_norm), capsule))
        else:
            if self.router_terms is not None:
                self.router_terms.move_biases()
            if self.role == "actor" and faults.reach("actor.after_optimizer_step"):
                _plant(self.chunks, "data", 1e-3)
        return self._result(done, step)

    def _look(self, packed: Packed, row_loss: RowLossFunction) -> UpdateResult | None:
        """A pass without the optimizer step, watched; `take_skips` tells what was seen, of a finite pass too."""
        with Watch(self.chunks) as watch:
            done = self._pass(packed, row_loss, watch)
        _, grad_norm = self.optimizer.judge(done.losses)
        self.skips.append(replace(self._findings(done, packed, grad_norm), first=watch.first))
        is_finite = math.isfinite(grad_norm)
        return self._result(done, StepResult(grad_norm, self.optimizer.lr, is_skipped=not is_finite))

    @property
    def has_router_terms(self) -> bool:
        """Whether a training pass needs to know of which document each token is."""
        return self.router_terms is not None

    def take_skips(self) -> list[Findings]:
        """What this rank saw in the steps that were skipped since it was last asked, in their order."""
        taken = list(self.skips)
        self.skips.clear()
        return taken

    def check_replicas(self) -> ReplicaReport:
        """Compare what this rank holds alike with others."""
        self.memory.require("parameters", "optimizer")
        return check_replicas(self.synced_chunks(), self.optimizer, self.world)

    def save_weights(self, directory: Path) -> str:
        """Model and random states into a capsule; "" or why they could not be written. See `workers.capsule`."""
        self.memory.require("parameters")
        sync_parameters(self.chunks)
        return save_weights(directory, self._model_state(), self.world)

    def load_weights(self, directory: Path) -> None:
        """The model of a capsule, under any layout. The optimizer stays as it is. Raises ValueError as `load`."""
        self.memory.require("parameters", is_changed=True)
        self._load_model(load_sharded(directory / WEIGHTS, self._model_state()))

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

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.router_terms is not None:
            self._begin_terms(self.router_terms, packed)
        collected = run_micro_batches(
            self.chunks, self.world, packed, on_rows, forward_only=False, routers=self.router_terms
        )
        of_routers = {} if self.router_terms is None else self.router_terms.end()
        if not collected:
            return _Pass((), None, None, (), of_routers)
        heads = torch.stack([part[: 1 + len(names)] for part in collected])
        rows = tuple(part[1 + len(names) :] for part in collected)
        return _Pass(tuple(names), heads[:, 0], heads[:, 1:].sum(0), rows, of_routers)

    def _begin_terms(self, terms: RouterTerms, packed: Packed) -> None:
        """Start the terms of the routers; loads that must be known before cost a forward pass."""
        if terms.needs_counting:

            def nothing(micro: MicroBatch, hidden: Tensor) -> RowsResult:
                return hidden.new_zeros(()), 0, hidden.new_zeros(1)

            terms.begin(*packed.num_forwarded, is_counting=True)
            with torch.no_grad():
                run_micro_batches(self.chunks, self.world, packed, nothing, forward_only=True, routers=terms)
            terms.end()
        terms.begin(*packed.num_forwarded)

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
        parameters = named_parameters(self.chunks)
        values = torch.cat(done.rows).cpu() if done.rows else torch.zeros(0)
        tokens, num_tokens = bad_positions(values, packed.token_index[: values.numel()])
        return Findings(
            where=str(self.world),
            grad_norm=grad_norm,
            gradients=bad_tensors({name: _main_grad(parameter) for name, parameter in parameters.items()}),
            parameters=bad_tensors(parameters),
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
        new = self.phases[phase]
        self.optimizer = reset(self.optimizer, self.chunks, new.optim, new.num_steps, self.dtype, self.world)

    def start_again(self, weights: WeightSource) -> None:
        """Become the model of `weights`, with a fresh optimizer of the current phase."""
        self.memory.require(*TRAINER_PARTS, is_changed=True)
        sync_parameters(self.chunks)
        load_on_rank(self.chunks, self.table, weights, self.world)
        self.optimizer = self._fresh_optimizer()

    def synced_chunks(self) -> list[nn.Module]:
        """The model's chunks with all parameters as the last optimizer step left them."""
        self.memory.require("parameters")
        sync_parameters(self.chunks)
        return self.model.chunks

    def export(self) -> Iterator[tuple[Rule, Tensor | None]]:
        """This rank's shards with their table rules, all gathered. Raises on numbers that are not finite."""
        chunks = self.synced_chunks()
        check_finite(named_weights(chunks), self.world)
        return local_shards(chunks, self.table)

    def offload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Free the device's memory of these parts."""
        if "parameters" in parts and not self.memory.is_dropped("parameters"):
            self.memory.require("parameters")
            sync_parameters(self.chunks)
        free_scratch()
        self.memory.drop(parts)

    def onload(self, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False) -> None:
        """Undo `offload`."""
        self.memory.restore(parts, is_read_only)

    def memory_report(self) -> MemoryReport:
        """What this rank holds now."""
        return self.memory.report()

    def num_save_bytes(self) -> int:
        """What this rank will about write in a save. Copies hold the same; the first one counts."""
        place = self.world.coordinates
        counts = {False: place.dp == 0 and place.cp == 0, True: dist.get_rank(self.world.expert_dp_group) == 0}
        num_moments = 2 if self.dtype == torch.float32 else 3  # and the float32 parameters
        a_parameter = self.dtype.itemsize + 4 * num_moments
        held = [p.numel() for name, p in named_parameters(self.chunks).items() if counts[is_of_expert(name)]]
        return sum(held) * a_parameter

    def begin_save(self, directory: Path) -> None:
        """Copy what is saved to host memory, and begin to write it."""
        self.memory.require("parameters", "optimizer")
        assert self._save is None, "one save at a time"
        sync_parameters(self.chunks)
        plain = {"scheduler": self.optimizer.scheduler.state_dict(), "phase": self.phase}
        staged = stage_sharded({**self._state(is_loading=False), **plain})
        self._save = BackgroundSave(staged, directory, str(self.world))

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
        loaded = load_sharded(directory, self._state(is_loading=True))
        self._load_model(loaded)
        self.optimizer.load_state_dict(loaded["optimizer"], plain["scheduler"])

    def _load_model(self, loaded: dict[str, Any]) -> None:
        for index, chunk in enumerate(self.chunks):
            mismatch = chunk.module.load_state_dict(loaded[f"model{index}"], strict=False)
            missing = [name for name in mismatch.missing_keys if not name.endswith(EXTRA_STATE)]
            assert not missing and not mismatch.unexpected_keys, f"missing {missing}, {mismatch.unexpected_keys}"

    def _fresh_optimizer(self) -> Optimizer:
        phase = self.phases[self.phase]
        return Optimizer(self.chunks, phase.optim, phase.num_steps, self.dtype, self.world)

    def _state(self, is_loading: bool) -> dict[str, Any]:
        """Sharded tensors under names that do not depend on the layout; how they are grouped here is not stored."""
        model = self._model_state()
        return {**model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading)}

    def _model_state(self) -> dict[str, Any]:
        metadata = {"dp_cp_group": self.world.dp_cp_group}
        return {
            f"model{index}": without_extra_state(chunk.module.sharded_state_dict(metadata=metadata))
            for index, chunk in enumerate(self.chunks)
        }


def _main_grad(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad  # set by megatron
    return gradient


def _plant(chunks: Sequence[nn.Module], name: str, value: float) -> None:
    """The damage that a fault plan asks for: `value` added to one element of this rank's first parameter."""
    parameter = next(iter(named_parameters(chunks).values()))
    getattr(parameter, name).view(-1)[0] += value

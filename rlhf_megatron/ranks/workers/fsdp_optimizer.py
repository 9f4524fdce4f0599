"""AdamW over FSDP2's shards, with the schedules, clipping and skipped steps of the
Megatron optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce

from rlhf_megatron.config.schema import OptimConfig
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.backend_protocols import OptimizerStepResult
from rlhf_megatron.ranks.workers.megatron_optimizer import make_lr_and_decay_schedules
from rlhf_megatron.ranks.workers.nonfinite import (
    FINITE,
    all_reduce_verdict,
    choose_reported_grad_norm,
    compute_verdict,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


class FSDPStepOptimizer:
    """A `StepOptimizer` over sharded float32 parameters (DTensors) by name. Make it on all ranks at
    once.

    Norms and biases have no weight decay. Raise ValueError when the schedules of `optim` cannot be
    met.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optim: OptimConfig,
        num_steps: int,
        world: World,
    ) -> None:
        self.parameters = dict(parameters)
        self.world = world
        self.max_norm = optim.clip_grad
        exempt = [p for name, p in parameters.items() if p.dim() < 2 or name.endswith(".bias")]
        others = [p for p in parameters.values() if all(p is not other for other in exempt)]
        groups = [{"params": others, "wd_mult": 1.0}, {"params": exempt, "wd_mult": 0.0}]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]], optim.lr, optim.betas, optim.eps
        )
        for parameter in parameters.values():  # so that a save before the first step has them
            moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
            self.adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        self.scheduler = make_lr_and_decay_schedules(self.adam, optim, num_steps)

    def step(self, losses: Tensor | None = None) -> OptimizerStepResult:
        """Clip the gradients and take one optimizer step, unless a gradient, the norm or a loss is
        not finite on some rank: then change nothing and report a skipped step. All ranks must call
        it.
        """
        verdict, grad_norm = self.check_finiteness(losses)
        if verdict != FINITE:
            return OptimizerStepResult(grad_norm, self.lr, is_skipped=True)
        self.scheduler.step(1)
        factor = self.max_norm / (grad_norm + 1e-6) if self.max_norm > 0 else 1.0  # megatron-core's
        if factor < 1.0:
            for gradient in self.get_local_gradients().values():
                gradient.mul_(factor)
        self.adam.step()
        return OptimizerStepResult(grad_norm, self.lr, is_skipped=False)

    def check_finiteness(self, losses: Tensor | None) -> tuple[int, float]:
        """Return (verdict, gradient norm), the same on all ranks: `nonfinite.FINITE`, INFINITE or
        NAN over gradients and `losses`, and the global norm before clipping. All ranks must call
        it.
        """
        gradients = list(self.get_local_gradients().values())
        device = self.world.device
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32).to(device)
            for gradient in gradients
        ]
        total = torch.stack([torch.zeros((), device=device), *norms]).square().sum()
        all_reduce(total, group=self.world.dp_group)
        grad_norm = float(total.sqrt())
        verdict = all_reduce_verdict(
            compute_verdict(gradients, grad_norm, losses).to(device), self.world
        )
        return verdict, choose_reported_grad_norm(verdict, grad_norm)

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters."""
        self.adam.zero_grad()

    @property
    def lr(self) -> float:
        """Return the current learning rate."""
        return float(self.adam.param_groups[0]["lr"])

    def get_local_gradients(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the gradients by parameter name, without parameters that
        have no gradient.
        """
        named: dict[str, Any] = {
            name: parameter.grad for name, parameter in self.parameters.items()
        }
        return {
            name: gradient.to_local() for name, gradient in named.items() if gradient is not None
        }

    def get_moment_tensors(self) -> dict[str, Tensor]:
        """Return the two Adam moments of each parameter as DTensors, by their names in a checkpoint
        (`optimizer.exp_avg.<parameter>`).
        """
        held = {name: self.adam.state[parameter] for name, parameter in self.parameters.items()}
        return {
            f"optimizer.{kind}.{name}": state[kind]
            for name, state in held.items()
            for kind in MOMENTS
        }

    def list_state_tensors(self) -> list[Tensor]:
        """Return this rank's local pieces of the Adam moments."""
        moments: list[Any] = list(self.get_moment_tensors().values())
        return [moment.to_local() for moment in moments]

    def load_scheduler_state(self, scheduler_state: dict[str, Any]) -> None:
        """Set the number of steps taken from a saved schedule state, for the schedule and for Adam;
        the schedule's settings stay those of the configuration. Moments are loaded elsewhere.
        """
        self.scheduler.num_steps = 0
        self.scheduler.override_opt_param_scheduler = True
        self.scheduler.load_state_dict(scheduler_state)
        for state in self.adam.state.values():
            state["step"].fill_(self.scheduler.num_steps)  # a skipped step counts for neither

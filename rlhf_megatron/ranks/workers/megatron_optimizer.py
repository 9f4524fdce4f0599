"""AdamW and its schedules through Megatron's optimizer: clipping, float32 main parameters,
skipped steps.
"""

from __future__ import annotations

import importlib
from itertools import chain
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rlhf_megatron.config.schema import OptimConfig
from rlhf_megatron.ranks.models.fused_kernel_choice import AdamKernel
from rlhf_megatron.ranks.parallel.optional_packages import (
    APEX,
    INSTALL,
    TRANSFORMER_ENGINE,
    OptionalPackage,
    find_apex,
)
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.backend_protocols import OptimizerStepResult
from rlhf_megatron.ranks.workers.nonfinite import (
    FINITE,
    all_reduce_verdict,
    choose_reported_grad_norm,
    compute_local_verdict,
)
from rlhf_megatron.ranks.workers.optimizer_state import (
    load_optimizer_state,
    make_sharded_optimizer_state,
)
from rlhf_megatron.ranks.workers.optimizer_state_format import MAIN, MOMENTS, OptimizerStateFormat
from rlhf_megatron.ranks.workers.streamed_adam import replace_with_streamed_adam


class MegatronStepOptimizer:
    """Megatron's optimizer and its learning-rate and weight-decay schedules.

    Make it on all ranks at once, of chunks that are wrapped for data parallelism and hold their
    weights already. `num_steps` is the number of optimizer steps of the run, and the length of
    schedules without a length of their own. `state_format` says where and in which types moments
    and float32 parameters are kept between steps; None means float32 on the device.

    Raise ValueError when the schedules of `optim` cannot be met, and for an Apex that cannot make a
    step.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optim: OptimConfig,
        num_steps: int,
        dtype: torch.dtype,
        world: World,
        state_format: OptimizerStateFormat | None = None,
    ) -> None:
        self.chunks = chunks
        self.world = world
        self.state_format = state_format or OptimizerStateFormat()
        refuse_broken_adam(detect_megatron_adam(), find_apex())
        self.megatron_optimizer = _build_megatron_optimizer(chunks, optim, dtype, world)
        self.scheduler = make_lr_and_decay_schedules(self.megatron_optimizer, optim, num_steps)
        for part in self.megatron_optimizer.chained_optimizers:
            if not self.state_format.is_default:
                replace_with_streamed_adam(part, world.device, self.state_format)
            else:
                _initialize_adam_state(part.optimizer)

    def step(self, losses: torch.Tensor | None = None) -> OptimizerStepResult:
        """Clip the gradients in the main-gradient buffers and take one step. All ranks must call
        it.

        `losses` holds the losses of this rank's micro-batches, where the rank has any. A gradient,
        gradient norm or loss that is not finite, on any rank, skips the step on all ranks: neither
        parameters, nor moments, nor schedules change.
        """
        verdict, grad_norm = self.check_finiteness(losses)
        if verdict != FINITE:
            return OptimizerStepResult(grad_norm, self.lr, is_skipped=True)
        self.scheduler.step(1)
        max_norm = self.megatron_optimizer.config.clip_grad
        if max_norm > 0:
            for part in self.megatron_optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, grad_norm)
        self.megatron_optimizer.step_with_ready_grads()
        return OptimizerStepResult(grad_norm, self.lr, is_skipped=False)

    def check_finiteness(self, losses: torch.Tensor | None) -> tuple[int, float]:
        """Return (`nonfinite.FINITE`, INFINITE or NAN; the global gradient norm before clipping),
        the same on all ranks. All ranks must call it.
        """
        self.megatron_optimizer.prepare_grads()
        grad_norm = float(self.megatron_optimizer.get_grad_norm())
        verdict = all_reduce_verdict(
            compute_local_verdict(self.chunks, grad_norm, losses), self.world
        )
        return verdict, choose_reported_grad_norm(verdict, grad_norm)

    def zero_grad(self) -> None:
        """Clear the gradients of the optimizer's parameters."""
        self.megatron_optimizer.zero_grad()

    @property
    def lr(self) -> float:
        """Return the current learning rate."""
        return float(self.megatron_optimizer.param_groups[0]["lr"])

    def list_state_tensors(self) -> list[torch.Tensor]:
        """Return the optimizer's tensors on the device beside model parameters and gradients:
        moments, step counts and float32 main parameters; [] where the state is in host memory.
        """
        if self.state_format.is_on_host:
            return []
        states = [
            state
            for part in self.megatron_optimizer.chained_optimizers
            for state in part.optimizer.state.values()
        ]
        tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
        # has the main parameters, and counts steps in host memory
        if not self.state_format.is_default:
            return [tensor for tensor in tensors if tensor.dim()]
        return [*tensors, *self.list_main_parameters()]

    def list_main_parameters(self) -> list[torch.Tensor]:
        """Return the float32 copies of half-precision parameters, or this rank's shards of the
        copies, as they are stored between steps; [] for a float32 model.
        """
        names = ("fp32_from_float16_groups", "shard_fp32_from_float16_groups")
        parts = [
            (part, chain(*chain(*(getattr(part, name, []) for name in names))))
            for part in self.megatron_optimizer.chained_optimizers
        ]
        return [
            part.optimizer.state[main].get(MAIN, main) for part, mains in parts for main in mains
        ]

    def sharded_state_dict(self, model_state: dict[str, Any], is_loading: bool) -> dict[int, Any]:
        """Return moments and main parameters for megatron's distributed checkpoint. All ranks must
        call it.
        """
        return make_sharded_optimizer_state(self.megatron_optimizer, model_state, is_loading)

    def load_state_dict(
        self, optimizer_state: dict[int, Any], scheduler_state: dict[str, Any]
    ) -> None:
        """Load moments and main parameters from `sharded_state_dict`, and the number of steps from
        `scheduler.state_dict`.

        The schedules take only the number of steps: their settings are those of the configuration.
        """
        self.scheduler.num_steps = 0
        self.scheduler.override_opt_param_scheduler = True
        self.scheduler.load_state_dict(scheduler_state)
        # a skipped step counts for neither
        load_optimizer_state(self.megatron_optimizer, optimizer_state, self.scheduler.num_steps)


def reset_optimizer(
    old_optimizer: MegatronStepOptimizer,
    chunks: list[DistributedDataParallel],
    optim: OptimConfig,
    num_steps: int,
    dtype: torch.dtype,
    world: World,
) -> MegatronStepOptimizer:
    """Return a fresh optimizer that keeps the float32 main parameters of `old_optimizer`, which are
    more precise than the model's.
    """
    kept = old_optimizer.list_main_parameters()
    new = MegatronStepOptimizer(chunks, optim, num_steps, dtype, world, old_optimizer.state_format)
    for target, source in zip(new.list_main_parameters(), kept, strict=True):
        target.data.copy_(source)
    return new


def _build_megatron_optimizer(
    chunks: list[DistributedDataParallel], optim: OptimConfig, dtype: torch.dtype, world: World
) -> Any:
    """Return megatron's optimizer for the chunks, without weight decay on norms and biases."""
    data_parallel = chunks[0].ddp_config
    config = OptimizerConfig(
        optimizer=optim.optimizer,
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        use_distributed_optimizer=data_parallel.use_distributed_optimizer,
        overlap_param_gather=data_parallel.overlap_param_gather,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    return get_megatron_optimizer(
        config,
        chunks,
        config_overrides=get_standard_config_overrides(config),  # norms and biases: wd_mult 0
        use_gloo_process_groups=False,
        pg_collection=world.pg_collection,
    )


def make_lr_and_decay_schedules(
    optimizer: Any, optim: OptimConfig, num_steps: int
) -> OptimizerParamScheduler:
    """Return the schedules of learning rate and weight decay over the groups of any optimizer.

    With N decay steps, w of them warm-up, step i (from 1) has i / w of the rate up to w, and after
    that the decay at (i - w) / (N - w + 1); where optim.lr_decay_ends is at_last_step, at
    (i - w) / (N - w). Raise ValueError for a decay that ends within the warm-up, or a weight decay
    that falls.
    """
    decay_steps = optim.lr_decay_steps if optim.lr_decay_steps is not None else num_steps
    if optim.lr_decay_style != "constant" and decay_steps <= optim.lr_warmup_steps:
        raise ValueError(
            f"lr_decay_steps ({decay_steps}) must be over lr_warmup_steps"
            f" ({optim.lr_warmup_steps}) for lr_decay_style {optim.lr_decay_style!r}; warm up"
            " shorter or decay longer."
        )
    end_step = max(decay_steps, optim.lr_warmup_steps + 1)
    # Megatron evaluates a step's rate at the step's own number, and an inverse square root falls to
    # min_lr only behind the end of the decay.
    falls_to_end = optim.lr_decay_style in ("linear", "cosine")
    if falls_to_end and optim.lr_decay_ends == "after_last_step":
        end_step += 1
    end_decay = optim.weight_decay if optim.weight_decay_end is None else optim.weight_decay_end
    if end_decay < optim.weight_decay:
        raise ValueError(
            f"weight_decay_end ({end_decay}) must be at least weight_decay ({optim.weight_decay}):"
            " the schedule only rises."
        )
    # The groups get their weight decay here and not from the optimizer's default: only this
    # schedule heeds wd_mult.
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if optim.lr_warmup_steps > 0 else optim.lr,
        max_lr=optim.lr,
        min_lr=optim.min_lr,
        lr_warmup_steps=optim.lr_warmup_steps,
        lr_decay_steps=end_step,
        lr_decay_style=optim.lr_decay_style,
        start_wd=optim.weight_decay,
        end_wd=end_decay,
        wd_incr_steps=max(num_steps, 1),
        wd_incr_style="constant" if optim.weight_decay_end is None else "linear",
    )


def detect_megatron_adam() -> AdamKernel:
    """Return the package of the Adam that megatron-core picked at its import; on a CPU torch's
    (`ranks.parallel.cpu_platform`).
    """
    home = importlib.import_module("megatron.core.optimizer").Adam.__module__.partition(".")[0]
    if home == TRANSFORMER_ENGINE:
        return "transformer_engine"
    return "apex" if home == APEX else "torch"


def refuse_broken_adam(adam_source: AdamKernel, apex_package: OptionalPackage) -> None:
    """Raise ValueError where megatron-core picked Apex's FusedAdam and Apex cannot run:
    megatron-core takes FusedAdam wherever it can be imported.
    """
    if adam_source == "apex" and not apex_package.is_usable:
        raise ValueError(
            "megatron-core takes the FusedAdam of Apex, which is installed and cannot run:"
            f" {apex_package.why_not}; pip uninstall apex, or build it again: {INSTALL[APEX]}."
        )


def _initialize_adam_state(adam: torch.optim.Optimizer) -> None:
    """Create the moments before the first step, and make torch's AdamW run its fused kernel.

    The fused Adams of Transformer Engine and Apex need nothing else: they count steps in their
    parameter groups, which `optimizer_state.load_optimizer_state` sets. torch's AdamW counts in
    tensors; each parameter gets its own, because torch would count a shared tensor up once for each
    parameter.
    """
    is_torch = isinstance(adam, torch.optim.AdamW)
    for group in adam.param_groups:
        if is_torch:
            group["fused"] = True
            group["foreach"] = False
        for parameter in group["params"]:
            state = adam.state[parameter]
            if is_torch:
                state.setdefault(
                    "step", torch.zeros((), dtype=torch.float32, device=parameter.device)
                )
            for name in MOMENTS:
                state.setdefault(name, torch.zeros_like(parameter.data))

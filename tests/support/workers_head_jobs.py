"""What runs on every rank in the tests of the head: gradients by either way, and backends
that are wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import workers_reference as reference
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from workers_jobs import CONFIG, make_actor, share

from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.data.batch import MiniBatch, TokenLogProbs
from rlhf_megatron.ranks.kernels.head_memory import HeadCallShape
from rlhf_megatron.ranks.kernels.log_prob import compute_linear_log_probs
from rlhf_megatron.ranks.kernels.logit_tile_ops import TorchTileOps
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.log_prob_head import MainGradSink
from rlhf_megatron.ranks.workers.rank_reports import HeadReport


class WrongGradient(TorchTileOps):
    """The entropy's part of the gradient has the other sign."""

    def compute_logit_gradient(
        self,
        logits_RC: Tensor,
        columns_R: Tensor,
        gradient_inputs: Any,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        flipped = type(gradient_inputs)(
            **{**vars(gradient_inputs), "grad_entropies_R": -gradient_inputs.grad_entropies_R}
        )
        return super().compute_logit_gradient(logits_RC, columns_R, flipped, dtype, first_column)


class WrongStatistics(TorchTileOps):
    """The entropy's sum has the other sign."""

    def update_statistics(
        self, logits_RC: Tensor, inv_R: Any, columns_R: Tensor, statistics: Any, *stash: Any
    ) -> None:
        super().update_statistics(logits_RC, inv_R, columns_R, statistics, *stash)
        if statistics.weighted_R is not None:
            statistics.weighted_R.neg_()


class WrongStash(TorchTileOps):
    """What was stashed is taken for e^(max - z)."""

    def compute_logit_gradient_from_stash(
        self,
        stash_RC: Tensor,
        max_R: Tensor,
        columns_R: Tensor,
        gradient_inputs: Any,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        return super().compute_logit_gradient_from_stash(
            stash_RC, -max_R, columns_R, gradient_inputs, dtype, first_column
        )


class Crashing(TorchTileOps):
    """As a compiler that gives up."""

    def compute_logit_gradient(self, *arguments: Any) -> Tensor:
        raise RuntimeError("PassManager::run failed\nat line 7")


@dataclass(frozen=True)
class Gradients:
    """Of one rank, after forward and backward of a mini-batch and before any optimizer step."""

    main_grads: dict[str, Tensor]  # by name
    num_micro_batches: int
    num_without_rows: int
    num_hooks: int  # times that the head's weight came to its gradient hook; 0 off the last stage
    num_allocated: int  # tensors of the weight's size, of any type
    is_weight_kept: bool  # bit for bit
    is_flag_set: bool | None  # grad_added_to_main_grad; None off the last stage
    grad_norm: float | None


class Allocations(TorchDispatchMode):
    """Counts the tensors with `numel` elements that come into being, views left out."""

    def __init__(self, numel: int, known: list[Tensor]) -> None:
        super().__init__()
        self.count = 0
        self._numel = numel
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._kept: list[Tensor] = []  # so that no address is used again

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() == self._numel:
                address = tensor.untyped_storage().data_ptr()
                if address not in self._known:
                    self._known.add(address)
                    self._kept.append(tensor)
                    self.count += 1
        return out


@contextmanager
def way(kind: str) -> Iterator[None]:
    """ "sink": as it is. "autograd": as without main_grad.
    "poisoned": the stand-in is full of NaN.
    """
    from rlhf_megatron.ranks.workers import log_prob_head
    from rlhf_megatron.ranks.workers import log_prob_head as main_grad

    gradient = main_grad.MainGradSink.make_autograd_gradient

    def poisoned(self: Any) -> Tensor | None:
        stand_in = gradient(self)
        return None if stand_in is None else torch.full_like(stand_in, torch.nan)

    with pytest.MonkeyPatch.context() as patch:
        if kind == "autograd":
            patch.setattr(log_prob_head, "make_main_grad_sink", lambda weight: None)
        if kind == "poisoned":
            patch.setattr(main_grad.MainGradSink, "make_autograd_gradient", poisoned)
        yield


def gradients(
    world: World,
    name: str,
    state: dict[str, Tensor],
    batch: MiniBatch,
    kinds: tuple[str, ...],
    token_budget: int = 40,
    dtype: torch.dtype = torch.float32,
    kernels: dict[str, Any] | None = None,
    megatron: dict[str, Any] | None = None,
    bucket_size: int | None = None,
    num_passes: int = 1,
) -> list[Gradients]:
    """One entry for each of `kinds`, see `way`. All of one actor, whose weights do not change."""
    config = replace(CONFIG, kernels=KernelsConfig(**{"num_self_checks": 0, **(kernels or {})}))
    actor = make_actor(
        world, name, state, config, dtype, megatron=megatron, bucket_size=bucket_size
    )
    return [_pass(actor, batch, token_budget, kind, num_passes) for kind in kinds]


def _pass(actor: Any, batch: MiniBatch, token_budget: int, kind: str, num_passes: int) -> Gradients:
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
    from rlhf_megatron.ranks.models.output_heads import get_head_weight
    from rlhf_megatron.ranks.workers.sequence_packing import pack_batch

    world = actor.world
    shard, plan = share(world, batch, token_budget)
    packed = pack_batch(shard, plan, world.layout, world.coordinates.cp)
    parameters = collect_named_parameters(actor.backend.model.chunks)
    weight = get_head_weight(actor.backend.model.chunks[-1]) if world.is_last_stage else None
    known = [tensor for p in parameters.values() for tensor in (p.data, p.main_grad)]
    before = {key: p.detach().clone() for key, p in parameters.items()}
    hooks: list[int] = []
    result = None
    if weight is not None:
        accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        handle = accumulator.register_hook(lambda *unused: hooks.append(1))
    with way(kind), Allocations(-1 if weight is None else weight.numel(), known) as allocations:
        for _ in range(num_passes):
            result = actor.rerun_forward_backward(shard, plan, reference.TEMPERATURE)
    if weight is not None:
        handle.remove()
    return Gradients(
        main_grads={key: p.main_grad.clone() for key, p in parameters.items()},
        num_micro_batches=len(packed.micro_batches),
        num_without_rows=sum(micro.rows.numel() == 0 for micro in packed.micro_batches),
        num_hooks=len(hooks),
        num_allocated=allocations.count,
        is_weight_kept=all(torch.equal(before[key], p) for key, p in parameters.items()),
        is_flag_set=None if weight is None else weight.grad_added_to_main_grad,  # type: ignore[attr-defined]
        grad_norm=None if result is None else result.grad_norm,
    )


@dataclass(frozen=True)
class CheckedRun:
    """What a rank did with a backend that may be wrong."""

    log_probs: TokenLogProbs | None
    main_grads: dict[str, Tensor]
    report: HeadReport | None
    warnings: list[str]


def run_checked(
    world: World,
    name: str,
    state: dict[str, Tensor],
    batch: MiniBatch,
    kernels: dict[str, Any],
    mistake: type[TorchTileOps] | None = None,
    on_tp_rank: int = 0,
    is_triton_taken: bool = False,
) -> CheckedRun:
    """Log-probs, then forward and backward. `mistake`: in place of the tile operations
    of that tp rank.

    `is_triton_taken`: triton is chosen although it does not run on this device.
    """
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
    from rlhf_megatron.ranks.kernels import log_prob
    from rlhf_megatron.ranks.workers import head_backend

    config = replace(CONFIG, kernels=KernelsConfig(**kernels))
    records = _Records()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_backend.logger, "handlers", [records])
        if mistake is not None and world.coordinates.tp == on_tp_rank:
            patch.setattr(log_prob, "TorchTileOps", mistake)
        if is_triton_taken:
            patch.setattr(head_backend, "try_triton_kernel", lambda device: "")
        actor = make_actor(world, name, state, config)
        shard, plan = share(world, batch, 40)
        log_probs = actor.log_probs(shard, plan, reference.TEMPERATURE, with_entropy=True)
        actor.rerun_forward_backward(shard, plan, reference.TEMPERATURE)
    grads = {
        key: p.main_grad.clone()
        for key, p in collect_named_parameters(actor.backend.model.chunks).items()
    }
    return CheckedRun(log_probs, grads, actor.head_report(), records.messages)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def head_peak(world: World | None, shape: HeadCallShape, num_parts: int) -> int:
    """Bytes that the allocator had out at most in a forward and backward pass of the head, its
    inputs not counted.

    `world`: whose tensor-parallel ranks share the vocabulary, and the sequence where
    `num_parts` is above 1.
    """
    generator = torch.Generator().manual_seed(0)
    num_tokens = shape.num_tokens // num_parts
    hidden_size = shape.hidden_size
    hidden = (
        torch.randn(num_tokens, hidden_size, generator=generator).to(shape.dtype).requires_grad_()
    )
    weight = torch.nn.Parameter(
        torch.randn(shape.num_columns, hidden_size, generator=generator).to(shape.dtype)
    )
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    rank, tp = (0, 1) if world is None else (world.coordinates.tp, world.layout.tp)
    rows = torch.randperm(shape.num_tokens, generator=generator)[: shape.num_rows].sort().values
    targets = torch.randint(tp * shape.num_columns, (shape.num_rows,), generator=generator)

    def run() -> None:
        outputs = compute_linear_log_probs(
            hidden,
            weight,
            targets,
            temperature=0.8,
            vocab_start=rank * shape.num_columns,
            vocab_size=tp * shape.num_columns,
            tp_group=None if world is None else world.tp_group,
            chunk_size=shape.chunk_size,
            with_entropy=True,
            rows_R=rows,
            is_sequence_split=num_parts > 1,
            weight_grad_sink=MainGradSink(weight),
            stash_bytes=shape.stash_bytes,
            backend="chunked",
        )
        assert outputs.entropies_R is not None
        (outputs.log_probs_R.sum() + outputs.entropies_R.sum()).backward()
        hidden.grad = weight.grad = None

    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = [
        event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    # Threads of a process group give back what they held whenever they come to it.
    assert sizes and (world is not None or sum(sizes) == 0), "all that is taken is given back"
    return max(accumulate(sizes))

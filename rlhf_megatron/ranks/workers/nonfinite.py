"""Numbers that are not finite: one verdict on all ranks of a pool, and where they
stand on this one.

A verdict needs more than the gradient norm: Megatron's is of one copy of each parameter. A NaN that
only the second tensor-parallel rank has in its copy of a norm's gradient, or one replica after its
gradients were summed, is not in it.

`NonFiniteWatch` finds the first tensor of a forward and backward pass that is not finite, and waits
for the device at every module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce

from rlhf_megatron.ranks.checkpoint.model_weights import make_global_name, unwrap_model_chunk
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.rank_reports import MAX_REPORTED_ENTRIES, BadTensor

FINITE = 0
INFINITE = 1
NAN = 2


def compute_local_verdict(
    chunks: Sequence[DistributedDataParallel], grad_norm: float, losses: Tensor | None
) -> Tensor:
    """Return FINITE, INFINITE or NAN, int32 on the device, over this rank's gradient buffers, the
    gradient norm and the losses.

    A finite sum proves that all its terms are finite; finite terms whose sum overflows have a norm
    that is not finite either.
    """
    buffers = [
        buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
    ]
    return compute_verdict([buffer.grad_data for buffer in buffers], grad_norm, losses)


def compute_verdict(gradients: Sequence[Tensor], grad_norm: float, losses: Tensor | None) -> Tensor:
    """Return FINITE, INFINITE or NAN, int32 on the gradients' device, over the sums of the
    gradients, the gradient norm and the losses.
    """
    sums = [gradient.sum(dtype=torch.float32) for gradient in gradients]
    if losses is not None and losses.numel():
        sums.append(losses.float().sum())
    device = sums[0].device
    found = torch.stack(
        [part.to(device) for part in [*sums, torch.tensor(grad_norm, dtype=torch.float32)]]
    )
    return (
        torch.where(found.isnan(), NAN, torch.where(found.isinf(), INFINITE, FINITE))
        .max()
        .to(torch.int32)
    )


def all_reduce_verdict(verdict: Tensor, world: World) -> int:
    """Return the worst verdict of all ranks (NAN over INFINITE over FINITE), on all of them. All
    ranks of the pool must call it.
    """
    verdict = verdict.reshape(1).clone()
    all_reduce(verdict, ReduceOp.MAX, group=world.model_parallel_group)
    all_reduce(verdict, ReduceOp.MAX, group=world.dp_cp_group)
    return int(verdict)


def choose_reported_grad_norm(verdict: int, grad_norm: float) -> float:
    """Return the gradient norm that all ranks report: `grad_norm` where the verdict is FINITE, else
    inf or nan, because ranks may have seen different norms.
    """
    return {FINITE: grad_norm, INFINITE: math.inf, NAN: math.nan}[verdict]


def find_bad_tensors(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> tuple[BadTensor, ...]:
    """Return the tensors that are not finite, in order, with their counts of NaN and Inf; at most
    MAX_REPORTED_ENTRIES suspects are counted. Where all are finite, this takes one pass and one
    wait for the device.
    """
    items = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    if not items:
        return ()
    sums = torch.stack([tensor.detach().sum(dtype=torch.float32) for _, tensor in items]).tolist()
    suspects = [item for item, total in zip(items, sums, strict=True) if not math.isfinite(total)]
    found = []
    for name, tensor in suspects[:MAX_REPORTED_ENTRIES]:
        num_nan = int(tensor.isnan().sum())
        num_inf = int(tensor.isinf().sum())
        if num_nan or num_inf:  # else large terms, whose sum is out of range
            found.append(BadTensor(name, num_nan, num_inf, tensor.numel()))
    return tuple(found)


def find_bad_positions(values: Tensor, positions: Tensor) -> tuple[tuple[int, ...], int]:
    """Return (the `positions` whose `values` are not finite, at most MAX_REPORTED_ENTRIES; the
    number of all such positions).
    """
    found = positions[~values.isfinite()]
    return tuple(found[:MAX_REPORTED_ENTRIES].tolist()), found.numel()


def check_parameters_finite(parameters: Mapping[str, Tensor], world: World) -> None:
    """Raise ValueError on all ranks of the pool when a parameter on one of them is not finite. All
    ranks must call it.
    """
    found = find_bad_tensors(parameters)
    verdict = torch.tensor(NAN if found else FINITE, dtype=torch.int32, device=world.device)
    if all_reduce_verdict(verdict, world) == FINITE:
        return
    names = "; ".join(map(str, found[:8])) + (
        f"; and {len(found) - 8} more" if len(found) > 8 else ""
    )
    raise ValueError(
        f"parameters are not finite: {names or 'those of another rank'}. They are sent nowhere:"
        " the engines keep the weights before. The last optimizer step was finite and overflowed"
        " them: lower the learning rate or clip_grad, and start again from a checkpoint before it."
    )


class NonFiniteWatch:
    """A context manager: within it `first_bad_tensor` becomes the name of the first tensor that is
    not finite; it is "" until then.

    The outputs of a module are checked when the module returns, inner modules first, and their
    gradients when these are computed: in the order of the pass, over all micro-batches.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.first_bad_tensor = ""
        self._chunks = chunks
        self._hooks: list[Any] = []

    def __enter__(self) -> NonFiniteWatch:
        """Attach a hook to each module and return the watch."""
        for chunk in self._chunks:
            model = unwrap_model_chunk(chunk)
            for name, module in model.named_modules():
                hook = self._make_output_hook(
                    make_global_name(model, name) if name else "the model"
                )
                self._hooks.append(module.register_forward_hook(hook))
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the hooks from the modules."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def record_tensor(self, tensor: Tensor, tensor_name: str) -> None:
        """Check the next tensor in the order of the pass; its name becomes `first_bad_tensor` if it
        is the first that is not finite.
        """
        if not self.first_bad_tensor and not bool(tensor.detach().isfinite().all()):
            self.first_bad_tensor = tensor_name

    def _make_output_hook(self, module_name: str) -> Any:
        """Return a forward hook that checks the module's outputs, and later the gradients of the
        outputs.
        """

        def record_outputs(module: nn.Module, inputs: Any, outputs: Any) -> None:
            """Check the module's outputs, and hook their gradients."""
            for output in _iterate_floating_tensors(outputs):
                self.record_tensor(output, f"output of {module_name}")
                if output.requires_grad:
                    output.register_hook(
                        lambda grad: self.record_tensor(
                            grad, f"gradient of the output of {module_name}"
                        )
                    )

        return record_outputs


def _iterate_floating_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in a tensor or in nested tuples and lists."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _iterate_floating_tensors(item)

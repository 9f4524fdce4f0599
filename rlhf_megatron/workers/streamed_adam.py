"""AdamW whose moments and float32 parameters stand in host memory (`actor.megatron.optimizer_cpu_offload`), or in
fewer bits (`use_precision_aware_optimizer`), or both.

In a step they pass in pieces through float32 on the device, two at a time: one is computed on while another one is
copied. Small parameters are joined to pieces, so that experts do not cost launches each. megatron-core's
HybridDeviceOptimizer computes on the host instead, and for fewer bits it needs Transformer Engine's FusedAdam: neither
can be run, nor compared, without CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.optim.adamw import adamw

from rlhf_megatron.parallel.device import CopyQueue, page_lock, page_unlock
from rlhf_megatron.workers.kept_state import MAIN, MOMENTS, Kept, restored, store

PIECE = 16 << 20  # elements: a piece and its moments are 192 MiB, of which there are two on the device
IN_CACHE = 1 << 16  # elements of a piece of small parameters on a CPU


def stream_states(part: Any, device: torch.device, kept: Kept) -> None:
    """Put a StreamedAdam in place of the Adam of `part`, one of megatron's optimizers that has made no step yet."""
    names = ("shard_float16_groups", "shard_fp32_from_float16_groups")
    if not isinstance(part, DistributedOptimizer):
        names = ("float16_groups", "fp32_from_float16_groups")
    models, mains = (list(chain(*getattr(part, name, ()))) for name in names)
    part.optimizer = StreamedAdam(part.optimizer.param_groups, dict(zip(mains, models, strict=True)), device, kept)
    part._copy_main_params_to_model_params = _is_done  # in the step itself, piece by piece


class StreamedAdam:
    """Has what megatron's optimizers ask of an Adam: `param_groups`, `state` and `step`.

    `models`: float32 parameter -> that of the model in half precision. The former lose their bytes on the device;
    theirs stand in `state`, beside the moments. Parameters of a float32 model stay where they are.
    """

    def __init__(
        self, param_groups: list[dict[str, Any]], models: Mapping[Tensor, Tensor], device: torch.device, kept: Kept
    ) -> None:
        self.param_groups = param_groups
        self._models = models
        self._device = device
        mains: list[Tensor] = [main for group in param_groups for main in group["params"]]
        self.state: dict[Tensor, dict[str, Tensor]] = {main: {"step": torch.zeros(())} for main in mains}
        for kind, dtype in kept.dtypes().items():
            having = [main for main in mains if kind != MAIN or main in models]
            sizes = [main.numel() for main in having]
            room = torch.zeros(sum(sizes), dtype=dtype, device="cpu" if kept.is_on_host else device)
            if kept.is_on_host and page_lock(room, device):
                weakref.finalize(self, page_unlock, room)
            for main, part in zip(having, room.split(sizes), strict=True):
                self.state[main][kind] = part.view(main.shape)
        for main, model in models.items():
            store(self.state[main][MAIN], main.detach(), model)
            main.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self) -> None:
        """One step with the gradients of the parameters. Returns when the new state stands in host memory."""
        queue = CopyQueue(self._device)
        pieces = list(_joined(self._parts(), PIECE if queue.is_beside else IN_CACHE))
        size = max((piece.size for piece in pieces), default=0)
        rooms = [torch.empty(3, size, device=self._device) for _ in range(2)]

        def bring(number: int) -> Any:
            piece = pieces[number]
            with queue.after_computation():
                for here, kept in zip(rooms[number % 2], piece.kept, strict=False):
                    here[: len(kept)].copy_(restored(kept, piece.beside(kept)), non_blocking=True)
                return queue.mark()

        marks = [bring(0)] if pieces else []
        for number, piece in enumerate(pieces):
            if number + 1 < len(pieces):
                marks.append(bring(number + 1))
            if marks[number] is not None:
                queue.wait(marks[number])
            here = [room[: piece.size] for room in rooms[number % 2]]
            piece.update(here)
            with queue.after_computation():
                for kept, new in zip(piece.kept, here, strict=False):
                    store(kept, new, piece.beside(kept))
        queue.synchronize()

    def _parts(self) -> Iterator[_Piece]:
        for group in self.param_groups:
            for main in group["params"]:
                if main.grad is None:
                    continue
                state = self.state[main]
                state["step"] += 1
                model = self._models.get(main, main).detach().view(-1)
                kept = [state[kind].view(-1) for kind in (*MOMENTS, MAIN) if kind in state]
                whole = [main.grad.view(-1), model, *kept]
                for grad, target, *of_state in zip(*(tensor.split(PIECE) for tensor in whole), strict=True):
                    yield _Piece([grad], [target], of_state, group, float(state["step"]))


def _joined(parts: Iterable[_Piece], most: int) -> Iterator[_Piece]:
    """Join parts whose states lie one behind the other, up to `most` elements."""
    waiting: list[_Piece] = []
    size = 0
    for part in parts:
        if waiting and not (part.follows(waiting[-1]) and size + part.size <= most):
            yield _together(waiting)
            waiting, size = [], 0
        waiting.append(part)
        size += part.size
    if waiting:
        yield _together(waiting)


def _together(parts: Sequence[_Piece]) -> _Piece:
    kept = [tensor.as_strided((sum(part.size for part in parts),), (1,)) for tensor in parts[0].kept]
    grads, models = ([tensor for part in parts for tensor in getattr(part, name)] for name in ("grads", "models"))
    return replace(parts[0], grads=grads, models=models, kept=kept)


@dataclass(frozen=True)
class _Piece:
    """Some elements of a parameter, or of several parameters that have made as many steps; all tensors are flat."""

    grads: list[Tensor]
    models: list[Tensor]  # what the forward pass reads
    kept: list[Tensor]  # the moments, and the float32 parameters where `models` are in half precision
    group: Mapping[str, Any]
    num_steps: float  # this one included

    @property
    def size(self) -> int:
        return sum(map(len, self.grads))

    def follows(self, other: _Piece) -> bool:
        """Tell whether both can be one piece, this one behind `other`."""
        kinds = ((one.num_steps, len(one.kept), id(one.group)) for one in (self, other))
        place, end = self.kept[0].storage_offset(), other.kept[0].storage_offset() + other.size
        return len(set(kinds)) == 1 and place == end

    def beside(self, kept: Tensor) -> Tensor:
        """Return what one of `kept` is read beside: see `kept_state.restored`. On the stream that copies."""
        return torch.cat(self.models) if kept.dtype == torch.int16 else self.models[0]

    def update(self, here: list[Tensor]) -> None:
        """Change `models`, and `here`: `kept` in float32 on the device."""
        sizes = [len(grad) for grad in self.grads]
        first, second, mains = (room.split(sizes) for room in here)
        is_copied = len(self.kept) == 3
        beta1, beta2 = self.group["betas"]
        adamw(
            list(mains) if is_copied else self.models,
            self.grads,
            list(first),
            list(second),
            [],
            list(torch.full((len(sizes),), self.num_steps - 1, device=here[0].device).unbind()),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self.group["lr"],
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            maximize=False,
        )
        if is_copied:
            torch._foreach_copy_(self.models, here[2].to(self.models[0].dtype).split(sizes))


def _is_done() -> None:
    """Stands for a copy that has been made."""

"""AdamW whose moments and float32 parameters stand in host memory
(`actor.megatron.optimizer_cpu_offload`), or in fewer bits
(`use_precision_aware_optimizer`), or both.

In a step they pass in pieces through float32 on the device, two at a time: one is computed on while
another one is copied. Small parameters are joined to pieces, so that experts do not cost launches
each. megatron-core's HybridDeviceOptimizer computes on the host instead, and for fewer bits it
needs Transformer Engine's FusedAdam: neither can be run, nor compared, without CUDA.
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

from rlhf_megatron.device import CopyQueue, page_lock_memory, page_unlock_memory
from rlhf_megatron.ranks.workers.optimizer_state_format import (
    MAIN,
    MOMENTS,
    OptimizerStateFormat,
    decode_float32_state,
    encode_float32_state,
)

# elements: a piece and its moments are 192 MiB, of which there are two on the device
MAX_PIECE_ELEMENTS = 16 << 20
CPU_PIECE_ELEMENTS = 1 << 16  # elements of a piece of small parameters on a CPU


def replace_with_streamed_adam(
    chained_optimizer: Any, device: torch.device, state_format: OptimizerStateFormat
) -> None:
    """Put a StreamedAdam in place of the Adam of `chained_optimizer`, one of megatron's optimizers
    that has made no step yet.
    """
    names = ("shard_float16_groups", "shard_fp32_from_float16_groups")
    if not isinstance(chained_optimizer, DistributedOptimizer):
        names = ("float16_groups", "fp32_from_float16_groups")
    models, mains = (list(chain(*getattr(chained_optimizer, name, ()))) for name in names)
    chained_optimizer.optimizer = StreamedAdam(
        chained_optimizer.optimizer.param_groups,
        dict(zip(mains, models, strict=True)),
        device,
        state_format,
    )
    # in the step itself, piece by piece
    chained_optimizer._copy_main_params_to_model_params = _skip_parameter_copy


class StreamedAdam:
    """An AdamW with the interface that megatron's optimizers need: `param_groups`, `state` and
    `step`.

    `model_params` maps a float32 parameter to the model's parameter in half precision. The float32
    parameters lose their bytes on the device; their values are kept in `state`, beside the moments.
    Parameters of a float32 model stay where they are.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        model_params: Mapping[Tensor, Tensor],
        device: torch.device,
        state_format: OptimizerStateFormat,
    ) -> None:
        self.param_groups = param_groups
        self._model_params = model_params
        self._device = device
        mains: list[Tensor] = [main for group in param_groups for main in group["params"]]
        self.state: dict[Tensor, dict[str, Tensor]] = {
            main: {"step": torch.zeros(())} for main in mains
        }
        for kind, dtype in state_format.get_state_dtypes().items():
            having = [main for main in mains if kind != MAIN or main in model_params]
            sizes = [main.numel() for main in having]
            room = torch.zeros(
                sum(sizes), dtype=dtype, device="cpu" if state_format.is_on_host else device
            )
            if state_format.is_on_host and page_lock_memory(room, device):
                weakref.finalize(self, page_unlock_memory, room)
            for main, part in zip(having, room.split(sizes), strict=True):
                self.state[main][kind] = part.view(main.shape)
        for main, model in model_params.items():
            encode_float32_state(self.state[main][MAIN], main.detach(), model)
            main.untyped_storage().resize_(0)

    @torch.no_grad()
    def step(self) -> None:
        """Take one step with the gradients of the parameters, and return when the new state is in
        place (in host memory, where it is stored there).
        """
        queue = CopyQueue(self._device)
        pieces = list(
            _join_adjacent_pieces(
                self._split_into_pieces(),
                MAX_PIECE_ELEMENTS if queue.is_asynchronous else CPU_PIECE_ELEMENTS,
            )
        )
        size = max((piece.size for piece in pieces), default=0)
        rooms = [torch.empty(3, size, device=self._device) for _ in range(2)]

        def load_piece(piece_number: int) -> Any:
            """Begin to copy the state of a piece to the device, as float32, and return the mark to
            wait for.
            """
            piece = pieces[piece_number]
            with queue.copy_after_computation():
                for here, kept in zip(rooms[piece_number % 2], piece.stored_states, strict=False):
                    here[: len(kept)].copy_(
                        decode_float32_state(kept, piece.decoding_params(kept)), non_blocking=True
                    )
                return queue.record_mark()

        marks = [load_piece(0)] if pieces else []
        for number, piece in enumerate(pieces):
            if number + 1 < len(pieces):
                marks.append(load_piece(number + 1))
            if marks[number] is not None:
                queue.wait_for_mark(marks[number])
            here = [room[: piece.size] for room in rooms[number % 2]]
            piece.apply_adamw(here)
            with queue.copy_after_computation():
                for kept, new in zip(piece.stored_states, here, strict=False):
                    encode_float32_state(kept, new, piece.decoding_params(kept))
        queue.wait_for_copies()

    def _split_into_pieces(self) -> Iterator[_OptimizerPiece]:
        """Yield the parameters with a gradient in pieces of at most MAX_PIECE_ELEMENTS elements,
        and count up their steps.
        """
        for group in self.param_groups:
            for main in group["params"]:
                if main.grad is None:
                    continue
                state = self.state[main]
                state["step"] += 1
                model = self._model_params.get(main, main).detach().view(-1)
                kept = [state[kind].view(-1) for kind in (*MOMENTS, MAIN) if kind in state]
                whole = [main.grad.view(-1), model, *kept]
                for grad, target, *of_state in zip(
                    *(tensor.split(MAX_PIECE_ELEMENTS) for tensor in whole), strict=True
                ):
                    yield _OptimizerPiece([grad], [target], of_state, group, float(state["step"]))


def _join_adjacent_pieces(
    pieces: Iterable[_OptimizerPiece], max_elements: int
) -> Iterator[_OptimizerPiece]:
    """Join pieces whose states are adjacent in memory, up to `max_elements` elements."""
    waiting: list[_OptimizerPiece] = []
    size = 0
    for part in pieces:
        if waiting and not (part.is_adjacent_to(waiting[-1]) and size + part.size <= max_elements):
            yield _merge_pieces(waiting)
            waiting = []
            size = 0
        waiting.append(part)
        size += part.size
    if waiting:
        yield _merge_pieces(waiting)


def _merge_pieces(pieces: Sequence[_OptimizerPiece]) -> _OptimizerPiece:
    """Return one piece of several adjacent pieces; their states become one view."""
    kept = [
        tensor.as_strided((sum(part.size for part in pieces),), (1,))
        for tensor in pieces[0].stored_states
    ]
    grads, models = (
        [tensor for part in pieces for tensor in getattr(part, name)]
        for name in ("grads", "models")
    )
    return replace(pieces[0], grads=grads, models=models, stored_states=kept)


@dataclass(frozen=True)
class _OptimizerPiece:
    """Some elements of a parameter, or of several parameters with the same number of steps; all
    tensors are flat.
    """

    grads: list[Tensor]
    models: list[Tensor]  # what the forward pass reads
    # the moments, and the float32 parameters where `models` are in half precision
    stored_states: list[Tensor]
    param_group: Mapping[str, Any]
    num_steps: float  # this one included

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return sum(map(len, self.grads))

    def is_adjacent_to(self, previous_piece: _OptimizerPiece) -> bool:
        """Return whether this piece can follow `previous_piece` in one joined piece: same group and
        step count, and states next to each other.
        """
        kinds = (
            (one.num_steps, len(one.stored_states), id(one.param_group))
            for one in (self, previous_piece)
        )
        place = self.stored_states[0].storage_offset()
        end = previous_piece.stored_states[0].storage_offset() + previous_piece.size
        return len(set(kinds)) == 1 and place == end

    def decoding_params(self, stored_state: Tensor) -> Tensor:
        """Return the model parameters that are needed to decode or encode `stored_state`: see
        `optimizer_state_format.decode_float32_state`. Call it on the stream that copies.
        """
        return torch.cat(self.models) if stored_state.dtype == torch.int16 else self.models[0]

    def apply_adamw(self, float32_states: list[Tensor]) -> None:
        """Run AdamW on the piece: change `models` and `float32_states` (the piece's `stored_states`
        in float32 on the device) in place.
        """
        sizes = [len(grad) for grad in self.grads]
        first, second, mains = (room.split(sizes) for room in float32_states)
        is_copied = len(self.stored_states) == 3
        beta1, beta2 = self.param_group["betas"]
        adamw(
            list(mains) if is_copied else self.models,
            self.grads,
            list(first),
            list(second),
            [],
            list(
                torch.full(
                    (len(sizes),), self.num_steps - 1, device=float32_states[0].device
                ).unbind()
            ),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=self.param_group["lr"],
            weight_decay=self.param_group["weight_decay"],
            eps=self.param_group["eps"],
            maximize=False,
        )
        if is_copied:
            torch._foreach_copy_(
                self.models, float32_states[2].to(self.models[0].dtype).split(sizes)
            )


def _skip_parameter_copy() -> None:
    """Do nothing: the step has copied the parameters already."""

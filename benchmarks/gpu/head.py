"""The head under measurement: inputs of a shape, and our kernel on them, forward and
backward apart.
"""

# T tokens, V vocabulary rows, H hidden

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.gpu.arithmetic import HeadShape
from benchmarks.gpu.timing import Spread, time_parts
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.ranks.kernels.log_prob import (
    HeadOutputs,
    LogProbBackend,
    compute_linear_log_probs,
)
from rlhf_megatron.ranks.kernels.triton_support import query_interpreter_support, try_triton_kernel

FULL = HeadShape(8192, 4096, 151936)
SHARD = HeadShape(8192, 4096, 18992)  # one of eight tp ranks of the same
QUICK = HeadShape(48, 32, 320)
QUICK_SHARD = HeadShape(48, 32, 40)
CHUNK_SIZES = (4096, 8192, 16384)
QUICK_CHUNK_SIZES = (64, 128)
DEFAULT_CHUNK_SIZE = ActorConfig().log_prob_chunk_size
LOGIT_STD = 3.0  # neither flat nor certain


@dataclass(frozen=True)
class HeadInputs:
    """Leaves that take gradients, targets, and what comes down from the loss:
    no row of it is zero.
    """

    hidden_TH: Tensor
    weight_VH: Tensor
    targets_T: Tensor
    grad_log_probs_T: Tensor
    grad_entropies_T: Tensor

    @classmethod
    def make(
        cls,
        shape: HeadShape,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> HeadInputs:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int, std: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=kind).mul_(std)

        return cls(
            hidden_TH=normal(shape.num_tokens, shape.hidden).requires_grad_(),
            weight_VH=normal(
                shape.vocab, shape.hidden, std=LOGIT_STD * shape.hidden**-0.5
            ).requires_grad_(),
            targets_T=torch.randint(
                0, shape.vocab, (shape.num_tokens,), generator=generator, device=device
            ),
            grad_log_probs_T=normal(shape.num_tokens, kind=torch.float32),
            grad_entropies_T=normal(shape.num_tokens, std=0.01, kind=torch.float32),
        )

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.hidden_TH.shape[0], self.hidden_TH.shape[1], self.weight_VH.shape[0])

    def forget_gradients(self) -> None:
        self.hidden_TH.grad = self.weight_VH.grad = None


class MainGrad:
    """A `WeightGradSink` with a float32 buffer of the weight's shape, as a model under data
    parallelism has it.
    """

    def __init__(self, weight_VH: Tensor) -> None:
        self.weight_VH = weight_VH
        self.total_VH = torch.zeros_like(weight_VH, dtype=torch.float32, requires_grad=False)

    def get_buffer_VH(self) -> Tensor:
        return self.total_VH

    def make_autograd_gradient(self) -> Tensor:
        return self.weight_VH.detach()  # costs no memory, and nobody reads it


class OurHead:
    """Log-probs and entropies of `inputs` with one backend and chunk size. `main_grad` None: no
    backward pass.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        backend: LogProbBackend,
        chunk_size: int,
        main_grad: MainGrad | None = None,
        stash_bytes: int = 0,
        rows_R: Tensor | None = None,
        with_entropy: bool = True,
    ) -> None:
        self.inputs = inputs
        self.backend: LogProbBackend = backend
        self.chunk_size = chunk_size
        self.main_grad = main_grad
        self.stash_bytes = stash_bytes
        self.rows_R = rows_R
        self.with_entropy = with_entropy
        self.outputs: HeadOutputs | None = None

    def forward(self) -> None:
        inputs = self.inputs
        with torch.set_grad_enabled(self.main_grad is not None):
            self.outputs = compute_linear_log_probs(
                inputs.hidden_TH,
                inputs.weight_VH,
                self._rows(inputs.targets_T),
                temperature=1.0,
                vocab_start=0,
                vocab_size=inputs.shape.vocab,
                tp_group=None,
                chunk_size=self.chunk_size,
                with_entropy=self.with_entropy,
                rows_R=self.rows_R,
                weight_grad_sink=self.main_grad,
                stash_bytes=self.stash_bytes,
                backend=self.backend,
            )

    def backward(self) -> None:
        assert self.outputs is not None, "forward comes first"
        outputs = [self.outputs.log_probs_R]
        grads = [self._rows(self.inputs.grad_log_probs_T)]
        if self.outputs.entropies_R is not None:
            outputs.append(self.outputs.entropies_R)
            grads.append(self._rows(self.inputs.grad_entropies_T))
        torch.autograd.backward(outputs, grads)

    def both(self) -> None:
        self.forward()
        self.backward()
        self.forget()

    def forget(self) -> None:
        self.outputs = None
        self.inputs.forget_gradients()

    def time_forward(self, device: torch.device, limit_s: float) -> Spread:
        return time_parts([self.forward], device, limit_s)[0]

    def time_parts(self, device: torch.device, limit_s: float) -> tuple[Spread, Spread]:
        """(forward, backward)"""
        forward, backward = time_parts(
            [self.forward, self.backward], device, limit_s, before=self.forget
        )
        self.forget()
        return forward, backward

    def time_both(self, device: torch.device, limit_s: float) -> Spread:
        """Of the two together."""
        return time_parts([self.both], device, limit_s)[0]

    def _rows(self, column_T: Tensor) -> Tensor:
        return column_T if self.rows_R is None else column_T[self.rows_R]


@cache
def why_no_triton(device: torch.device) -> str:
    """Empty where the Triton backend runs: on a GPU, or in Triton's interpreter where the
    environment asks for it.
    """
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return query_interpreter_support().why_not
    return try_triton_kernel(device)


def backends(device: torch.device) -> tuple[LogProbBackend, ...]:
    """Those that can run here; the last one is what `auto` takes."""
    return ("chunked",) if why_no_triton(device) else ("chunked", "triton")


def name_of(backend: LogProbBackend, chunk_size: int) -> str:
    return f"{backend} by {chunk_size}"

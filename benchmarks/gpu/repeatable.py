"""G8: the same inputs give the same bits, run after run; eight tp ranks agree bit for bit, and with
one rank to 1e-5.

The eight ranks are simulated one after the other on this device: the exchange between them is
replaced by one that hands out what each of them sent in a first round; the combination of it is
the kernels' own.
"""

# T tokens, V vocabulary rows, H hidden, G ranks, K statistics

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu.arithmetic import HeadShape
from benchmarks.gpu.head import (
    DEFAULT_CHUNK_SIZE,
    QUICK_CHUNK_SIZES,
    HeadInputs,
    MainGrad,
    OurHead,
    backends,
)
from benchmarks.gpu.recorder import Recorder
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.ranks.kernels import head_exchange
from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend, compute_linear_log_probs

SHAPE = HeadShape(8192, 4096, 151936)
QUICK_SHAPE = HeadShape(40, 32, 320)
NUM_RUNS = 5
NUM_RANKS = 8
TP_BAR = 1e-5  # of a value, or of 1 nat where it is smaller
STASH_BYTES = int(2.5e9)


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    shape = QUICK_SHAPE if is_quick else SHAPE
    inputs = HeadInputs.make(shape, recorder.device)
    chunk_size = QUICK_CHUNK_SIZES[0] if is_quick else DEFAULT_CHUNK_SIZE
    for backend in reversed(backends(recorder.device)):
        for name, stash_bytes in (("recompute", 0), ("stash", STASH_BYTES)):
            what = f"{NUM_RUNS} runs, {name}, {backend}"
            recorder.attempt(
                what,
                lambda what=what, backend=backend, stash_bytes=stash_bytes: _repeat(
                    recorder, what, inputs, backend, chunk_size, stash_bytes
                ),
            )
        recorder.attempt(
            f"tp {NUM_RANKS}, {backend}",
            lambda backend=backend: _shards(recorder, inputs, backend, chunk_size),
        )
    return recorder.result()


def _repeat(
    recorder: Recorder,
    what: str,
    inputs: HeadInputs,
    backend: LogProbBackend,
    chunk_size: int,
    stash_bytes: int,
) -> None:
    first = results(inputs, backend, chunk_size, stash_bytes)
    num_different = 0
    for _ in range(NUM_RUNS - 1):
        again = results(inputs, backend, chunk_size, stash_bytes)
        num_different += sum(int((a != b).sum()) for a, b in zip(first, again, strict=True))
    recorder.add(
        f"{what}: elements that differ",
        num_different,
        "",
        "log-probs, entropies, both gradients",
        0.0,
    )


def results(
    inputs: HeadInputs, backend: LogProbBackend, chunk_size: int, stash_bytes: int
) -> list[Tensor]:
    """Log-probs, entropies, gradient of the hidden states, main_grad from zero."""
    main_grad = MainGrad(inputs.weight_VH)
    head = OurHead(inputs, backend, chunk_size, main_grad, stash_bytes)
    head.forward()
    head.backward()
    assert (
        head.outputs is not None
        and head.outputs.entropies_R is not None
        and inputs.hidden_TH.grad is not None
    )
    found = [
        head.outputs.log_probs_R.detach(),
        head.outputs.entropies_R.detach(),
        inputs.hidden_TH.grad,
    ]
    head.forget()
    return [*found, main_grad.total_VH]


class SimulatedGroup:
    """Stands for a tp group of `size()` ranks of which this process is one at a time."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.current = 0
        self.sent: dict[int, Tensor] = {}

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.current

    def all_gather_into_tensor(self, out: Tensor, part: Tensor, group: Any = None) -> None:
        self.sent[self.current] = part.clone()
        parts = [self.sent.get(rank, part) for rank in range(self.num_ranks)]
        out.copy_(torch.cat(parts).view_as(out))

    @contextmanager
    def in_place_of_torch(self) -> Iterator[None]:
        with patch.object(
            head_exchange.dist, "all_gather_into_tensor", self.all_gather_into_tensor
        ):
            yield


def simulate_ranks(
    inputs: HeadInputs, num_ranks: int, backend: LogProbBackend, chunk_size: int
) -> list[list[Tensor]]:
    """(log-probs, entropies) of each rank."""
    shape = inputs.shape
    group = SimulatedGroup(num_ranks)
    shards = inputs.weight_VH.detach().split(-(-shape.vocab // num_ranks))
    found: list[list[Tensor]] = []
    with group.in_place_of_torch(), torch.no_grad():
        # in the first round each has only what those before it have sent
        for is_complete in (False, True):
            for rank, shard_VH in enumerate(shards):
                group.current = rank
                outputs = compute_linear_log_probs(
                    inputs.hidden_TH,
                    shard_VH,
                    inputs.targets_T,
                    temperature=1.0,
                    vocab_start=rank * shards[0].shape[0],
                    vocab_size=shape.vocab,
                    tp_group=group,
                    chunk_size=chunk_size,
                    with_entropy=True,
                    backend=backend,
                )
                if is_complete:
                    assert outputs.entropies_R is not None
                    found.append([outputs.log_probs_R, outputs.entropies_R])
    return found


def _shards(
    recorder: Recorder, inputs: HeadInputs, backend: LogProbBackend, chunk_size: int
) -> None:
    of_one = results(inputs, backend, chunk_size, 0)[:2]
    ranks = simulate_ranks(inputs, NUM_RANKS, backend, chunk_size)
    differences = [
        relative_difference(b, a) for rank in ranks for a, b in zip(of_one, rank, strict=True)
    ]
    num_different = sum(
        int((a != b).sum()) for rank in ranks[1:] for a, b in zip(ranks[0], rank, strict=True)
    )
    recorder.add(
        f"tp {NUM_RANKS} against tp 1, {backend}: largest difference",
        max(differences),
        "",
        "relative",
        TP_BAR,
    )
    recorder.add(
        f"tp {NUM_RANKS}, {backend}: elements that differ between ranks", num_different, "", "", 0.0
    )


def relative_difference(value: Tensor, truth: Tensor) -> float:
    """The largest one; of values below 1, the absolute one."""
    return float(((value - truth).abs() / truth.abs().clamp(min=1.0)).max())


CASE = Case("G8", "repeatable bit for bit", run)

"""The head of a policy on one rank: hidden states become log-probs and entropies of rows, by the backend in use.

Also: The head's gradient goes straight into megatron's float32 main_grad: no tensor of the weight's size in between.
"""
# S tokens of this rank (its part of the sequence under sequence parallelism), R rows, V vocabulary shard, H hidden,
# K other tokens than the target, N those and the target

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.kernels.log_prob import Backend, HeadOutputs, linear_log_prob
from rlhf_megatron.kernels.other_tokens import HeadShard, capped, chosen_logits, likeliest
from rlhf_megatron.kernels.self_check import SelfCheck, check_backend
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.findings import HeadReport
from rlhf_megatron.workers.head_backend import CheckedBackend, choose_backend
from rlhf_megatron.workers.pack import MicroBatch


class MainGradSink:
    """A `kernels.log_prob.WeightGradSink`."""

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight: Any = weight  # with megatron's attributes

    def buffer_VH(self) -> Tensor:
        buffer: Tensor = self._weight.main_grad
        return buffer

    def gradient(self) -> Tensor | None:
        """The weight itself as the stand-in, which costs no memory: autograd takes it over as it is.

        None where the weight is also the embedding of this stage (megatron marks it with `zero_out_wgrad`): autograd
        would add the stand-in to the embedding's gradient, which is what the hook gets there, and adds.
        """
        if getattr(self._weight, "zero_out_wgrad", False):
            return None
        self._weight.grad_added_to_main_grad = True
        return self._weight.detach()


def sink_of(weight: nn.Parameter) -> MainGradSink | None:
    """Return the sink of a weight's gradient; None for the weight of a frozen model, which collects none."""
    return MainGradSink(weight) if hasattr(weight, "main_grad") else None


logger = logging.getLogger(__name__)


class LogProbHead:
    """One a role, for the whole run. Made on all ranks; used on the last stage.

    `weight`: gives this rank's rows of the head, the first of which stands for the token `vocab_start`. `softcap`: of
    the logits, as in `linear_log_prob`.

    Raises ValueError for a backend that cannot run.
    """

    def __init__(
        self,
        role: str,
        weight: Callable[[], nn.Parameter],
        vocab_start: int,
        vocab_size: int,
        world: World,
        dtype: torch.dtype,
        chunk_size: int,
        kernels: KernelsConfig,
        softcap: float | None = None,
    ) -> None:
        self._weight = weight
        self._vocab = (vocab_start, vocab_size)
        self.world = world
        self.chunk_size = chunk_size
        self.softcap = softcap
        choice = choose_backend(kernels, world.device, dtype)
        if softcap is not None:
            choice = replace(choice, why=f"{choice.why}; logits capped at {softcap:g}", stash_bytes=0)
        self.checked = CheckedBackend(choice, kernels.num_self_checks, role, world)
        if world.is_leader and world.coordinates.dp == 0:
            logger.info("head of the %s: %s", role, choice)

    def report(self) -> HeadReport | None:
        """Report on the head; None off the last stage."""
        return self.checked.report() if self.world.is_last_stage else None

    def outputs(
        self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, with_entropy: bool, with_sum_squares: bool
    ) -> HeadOutputs:
        """Statistics of the target tokens. Last stage, all tp ranks."""
        world, weight_VH = self.world, self._weight()
        vocab_start, vocab_size = self._vocab
        sink, stash_bytes = sink_of(weight_VH), self.checked.choice.stash_bytes

        def check(backend: Backend) -> SelfCheck:
            return check_backend(
                backend,
                hidden_SH,
                weight_VH,
                temperature=temperature,
                num_columns=min(max(vocab_size - vocab_start, 0), weight_VH.shape[0]),
                chunk_size=self.chunk_size,
                has_sink=sink is not None,
                stash_bytes=stash_bytes,
                softcap=self.softcap,
            )

        self.checked.examine(check)
        return linear_log_prob(
            hidden_SH,
            weight_VH,
            micro.targets,
            temperature=temperature,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            tp_group=world.tp_group,
            chunk_size=self.chunk_size,
            with_entropy=with_entropy,
            with_sum_squares=with_sum_squares,
            rows_R=micro.rows,
            has_repeats=micro.prompts is not None,
            is_sequence_split=world.layout.sequence_parallel,
            sink=sink if torch.is_grad_enabled() else None,
            stash_bytes=stash_bytes if torch.is_grad_enabled() else 0,
            softcap=self.softcap,
            backend=self.checked.backend,
        )

    def log_probs_at(
        self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, log_probs_R: Tensor, ids_RK: Tensor
    ) -> Tensor:
        """The kernel's log-prob of the target, and how much larger the logits of the others are."""
        ids_RN = torch.cat([micro.targets[:, None], ids_RK.long()], -1)
        weight_VH = self._weight()
        logits_RN = chosen_logits(hidden_SH, weight_VH, ids_RN, micro.rows, self._shard(weight_VH))
        logits_RN = capped(logits_RN, self.softcap) / temperature
        return logits_RN[:, 1:] + (log_probs_R - logits_RN[:, 0])[:, None]

    def top(self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, count: int) -> tuple[Tensor, Tensor]:
        """See `backend.Head`."""
        weight_VH = self._weight()
        of = (count, micro.rows, self._shard(weight_VH))
        return likeliest(hidden_SH, weight_VH, *of, temperature, self.chunk_size, self.softcap)

    def _shard(self, weight_VH: nn.Parameter) -> HeadShard:
        sink = sink_of(weight_VH) if torch.is_grad_enabled() else None
        return HeadShard(*self._vocab, self.world.tp_group, self.world.layout.sequence_parallel, sink)

"""Which backend computes a role's log-probs, and what happens where it turns out to be wrong: a
simpler one does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp, all_reduce

from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.ranks.kernels.head_self_check import SelfCheckResult
from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend
from rlhf_megatron.ranks.kernels.triton_support import try_triton_kernel
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.rank_reports import HeadReport

FALLBACK_BACKENDS: dict[LogProbBackend, LogProbBackend] = {
    "triton": "chunked",
    "chunked": "reference",
}
STASH_MEGABYTES_16 = 512  # where the configuration leaves it to us and the model has half precision
MIB = 1 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadBackendChoice:
    """The backend of a role's head and its stash, chosen once, when the role is built."""

    backend: LogProbBackend
    reason: str
    stash_bytes: int  # of a micro-batch

    def __str__(self) -> str:
        stash = (
            f"stash of {self.stash_bytes // MIB} MiB a micro-batch"
            if self.stash_bytes
            else "no stash"
        )
        return f"{self.backend} ({self.reason}), {stash}"


def choose_head_backend(
    kernels: KernelsConfig, device: torch.device, dtype: torch.dtype
) -> HeadBackendChoice:
    """Return the backend that the configuration names, or for "auto" triton where it runs on
    `device`, else chunked. Raise ValueError where the configuration names triton and it cannot run
    on `device`.
    """
    stash_bytes = get_stash_bytes(kernels, dtype)
    if kernels.backend in ("reference", "chunked"):
        return HeadBackendChoice(kernels.backend, "as configured", stash_bytes)
    why_not = try_triton_kernel(device)
    if kernels.backend == "triton":
        if why_not:
            raise ValueError(
                f"actor.kernels.backend (triton) must be one that runs here: {why_not} Use auto,"
                " which takes triton where it runs, or chunked."
            )
        return HeadBackendChoice("triton", "as configured", stash_bytes)
    if why_not:
        return HeadBackendChoice("chunked", f"auto: {why_not.rstrip('.')}", stash_bytes)
    return HeadBackendChoice("triton", "auto: its kernels run on this device", stash_bytes)


def get_stash_bytes(kernels: KernelsConfig, dtype: torch.dtype) -> int:
    """Return the bytes of logits that a micro-batch of a model in `dtype` may keep for the backward
    pass.
    """
    if kernels.stash_megabytes is not None:
        return kernels.stash_megabytes * MIB
    return STASH_MEGABYTES_16 * MIB if dtype.itemsize == 2 else 0


class CheckedHeadBackend:
    """The head's backend in use, of one role on one rank. The first calls of the role check the
    backend against the reference.
    """

    def __init__(self, choice: HeadBackendChoice, num_checks: int, role: str, world: World) -> None:
        self.choice = choice
        self.backend = choice.backend
        self.num_checks_left = num_checks
        self._rank_name = f"{role} {world}"
        self._world = world
        self._notices: list[str] = []

    def check_and_fall_back(
        self, run_self_check: Callable[[LogProbBackend], SelfCheckResult]
    ) -> None:
        """Check the backend by `run_self_check`, and fall back to simpler ones until a check passes
        on all tp ranks. Call it before each use, on all tp ranks.

        Nothing is done, and nothing exchanged, after the first `num_checks` calls. The reference
        backend is the measure, and is not checked.
        """
        if not self.num_checks_left:
            return
        self.num_checks_left -= 1
        while self.backend in FALLBACK_BACKENDS:
            problem = _find_backend_problem(self.backend, run_self_check)
            if not self._has_any_rank_problem(problem):
                return
            self._use_simpler_backend(problem)

    def make_report(self) -> HeadReport:
        """Return the report: choice, backend in use, checks left, notices of fall-backs."""
        left = self.num_checks_left if self.backend in FALLBACK_BACKENDS else 0
        return HeadReport(
            self._rank_name, str(self.choice), self.backend, left, tuple(self._notices)
        )

    def _has_any_rank_problem(self, problem: str) -> bool:
        """Return whether a tp rank has a problem: all tp ranks must use the same backend, because
        backends communicate differently.
        """
        if self._world.layout.tp == 1:
            return bool(problem)
        flag = torch.tensor([bool(problem)], dtype=torch.int32, device=self._world.device)
        all_reduce(flag, ReduceOp.MAX, group=self._world.tp_group)
        return bool(flag.item())

    def _use_simpler_backend(self, problem: str) -> None:
        """Fall back to the next simpler backend; a rank with a problem of its own logs and records
        a notice.
        """
        failed = self.backend
        self.backend = FALLBACK_BACKENDS[self.backend]
        if not problem:  # the rank that has one tells it
            return
        notice = (
            f"the {failed} backend of the head failed its self-check and is not used any more:"
            f" {problem}. The run goes on with {self.backend}, on all tensor-parallel ranks."
        )
        logger.warning("[%s] %s", self._rank_name, notice)
        self._notices.append(notice)


def _find_backend_problem(
    backend: LogProbBackend, run_self_check: Callable[[LogProbBackend], SelfCheckResult]
) -> str:
    """Return the reason why `backend` must not be used (a failed check or an exception), or "".
    Running out of memory is raised.
    """
    try:
        found = run_self_check(backend)
    except torch.OutOfMemoryError:  # says nothing about the backend, and simpler ones need more
        raise
    except Exception as error:  # whatever a compiler or a driver raises: another backend takes over
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return "" if found.is_passed else str(found)

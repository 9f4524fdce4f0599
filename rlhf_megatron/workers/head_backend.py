"""Which backend computes a role's log-probs, and what happens where it turns out to be wrong: a simpler one does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp, all_reduce

from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.kernels.log_prob import Backend
from rlhf_megatron.kernels.self_check import SelfCheck
from rlhf_megatron.kernels.triton_support import try_triton
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.findings import HeadReport

SIMPLER: dict[Backend, Backend] = {"triton": "chunked", "chunked": "reference"}
STASH_MEGABYTES_16 = 512  # where the configuration leaves it to us and the model has half precision
MIB = 1 << 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadChoice:
    """Made once, when a role is built."""

    backend: Backend
    why: str
    stash_bytes: int  # of a micro-batch

    def __str__(self) -> str:
        stash = f"stash of {self.stash_bytes // MIB} MiB a micro-batch" if self.stash_bytes else "no stash"
        return f"{self.backend} ({self.why}), {stash}"


def choose_backend(kernels: KernelsConfig, device: torch.device, dtype: torch.dtype) -> HeadChoice:
    """Raises ValueError where the configuration names triton and it cannot run on `device`."""
    stash_bytes = stash_bytes_of(kernels, dtype)
    if kernels.backend in ("reference", "chunked"):
        return HeadChoice(kernels.backend, "as configured", stash_bytes)
    why_not = try_triton(device)
    if kernels.backend == "triton":
        if why_not:
            raise ValueError(
                f"actor.kernels.backend (triton) must be one that runs here: {why_not} Use auto, which takes triton"
                " where it runs, or chunked."
            )
        return HeadChoice("triton", "as configured", stash_bytes)
    if why_not:
        return HeadChoice("chunked", f"auto: {why_not.rstrip('.')}", stash_bytes)
    return HeadChoice("triton", "auto: its kernels run on this device", stash_bytes)


def stash_bytes_of(kernels: KernelsConfig, dtype: torch.dtype) -> int:
    """Return the bytes that a micro-batch of a model in `dtype` may keep of its logits."""
    if kernels.stash_megabytes is not None:
        return kernels.stash_megabytes * MIB
    return STASH_MEGABYTES_16 * MIB if dtype.itemsize == 2 else 0


class CheckedBackend:
    """The backend in use, of one role on one rank. The first calls of the role try it against the reference."""

    def __init__(self, choice: HeadChoice, num_checks: int, role: str, world: World) -> None:
        self.choice = choice
        self.backend = choice.backend
        self.num_checks_left = num_checks
        self._where = f"{role} {world}"
        self._world = world
        self._notices: list[str] = []

    def examine(self, check: Callable[[Backend], SelfCheck]) -> None:
        """Check the backend, and fall back until a check passes on all tp ranks. Call it before each use, on all of
        them.

        Nothing is done, and nothing exchanged, after the first checks. The reference is what others are held to, and
        is not checked.
        """
        if not self.num_checks_left:
            return
        self.num_checks_left -= 1
        while self.backend in SIMPLER:
            problem = _problem(self.backend, check)
            if not self._is_on_any_rank(problem):
                return
            self._fall_back(problem)

    def report(self) -> HeadReport:
        left = self.num_checks_left if self.backend in SIMPLER else 0
        return HeadReport(self._where, str(self.choice), self.backend, left, tuple(self._notices))

    def _is_on_any_rank(self, problem: str) -> bool:
        """Backends exchange different things: the tp ranks must use the same."""
        if self._world.layout.tp == 1:
            return bool(problem)
        flag = torch.tensor([bool(problem)], dtype=torch.int32, device=self._world.device)
        all_reduce(flag, ReduceOp.MAX, group=self._world.tp_group)
        return bool(flag.item())

    def _fall_back(self, problem: str) -> None:
        failed, self.backend = self.backend, SIMPLER[self.backend]
        if not problem:  # the rank that has one tells it
            return
        notice = (
            f"the {failed} backend of the head failed its self-check and is not used any more: {problem}. The run goes"
            f" on with {self.backend}, on all tensor-parallel ranks."
        )
        logger.warning("[%s] %s", self._where, notice)
        self._notices.append(notice)


def _problem(backend: Backend, check: Callable[[Backend], SelfCheck]) -> str:
    """Why `backend` must not be used; "" where nothing speaks against it."""
    try:
        found = check(backend)
    except torch.OutOfMemoryError:  # says nothing about the backend, and simpler ones need more
        raise
    except Exception as error:  # whatever a compiler or a driver raises: another backend takes over
        lines = str(error).splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"
    return "" if found.is_passed else str(found)

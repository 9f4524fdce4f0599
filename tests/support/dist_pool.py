"""Warm worker processes for tests with several ranks. Importing megatron-core costs seconds a
process: pay it once.

    # tests/dist/test_something.py
    def job(world: World, scale: float) -> float:      # runs on every rank, in a worker; a plain
                                                       module-level function
        ...
        return value                                    # anything that pickles; tensors on
                                                        the CPU are fine

    @pytest.mark.dist
    def test_something(dist_pool: DistPool) -> None:
        results = dist_pool.run(job, tp=2, pp=2, dp=1, scale=0.5)     # one result a
            rank, in rank order

Each job gets a fresh world: all process groups are made anew, torch's default one too, and ended
after it. What a job leaves in module globals stays in its worker, so leave nothing. An exception on
a rank becomes a `JobError` that names the rank's coordinates and carries its traceback; ranks that
hang are asked for their stacks and killed at `timeout_s`. Workers write to files, live in sessions
of their own, die with the test process, and are replaced every 12 jobs.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from places import SUPPORT

from rlhf_megatron.weights.parallel_layout import ParallelLayout

JOBS_PER_WORKER = 12
GRACE_S = 10.0  # for the other ranks, once one has failed
START_S = 180.0  # for a worker to import everything on a busy machine


class JobError(RuntimeError):
    """A job failed, died or ran past its deadline on some rank. `is_clean`: all ranks answered
    and can work on.
    """

    is_clean = False


class _Worker:
    """A process that runs jobs one at a time. Messages: 8 bytes of length, then a pickle."""

    def __init__(self, log: Path) -> None:
        job_in, self._to_worker = os.pipe()
        self._from_worker, result_out = os.pipe()
        self.log = log
        self.jobs = 0
        command = [sys.executable, str(SUPPORT / "dist_worker.py"), str(job_in), str(result_out)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONFAULTHANDLER": "1",
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(job_in, result_out),
                env=environment,
                start_new_session=True,
            )
        os.close(job_in)
        os.close(result_out)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        _write(self._to_worker, struct.pack("!Q", len(data)) + data)

    def receive(self) -> Any:
        """The next message, whose first bytes have arrived. Raises EOFError when the
        worker is gone.
        """
        (size,) = struct.unpack("!Q", _read(self._from_worker, 8))
        return pickle.loads(_read(self._from_worker, size))

    def fileno(self) -> int:
        return self._from_worker

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def dump_stacks(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for descriptor in (self._to_worker, self._from_worker):
            with contextlib.suppress(OSError):
                os.close(descriptor)


class DistPool:
    """Runs jobs on as many warm workers as their layout has ranks. Workers are started when first
    needed. A worker has one rank all its life: torch keeps what it worked out for a mesh, which
    does not name the process's rank.
    """

    def __init__(self, device: Literal["cpu", "cuda"] = "cpu") -> None:
        self._device = device
        self._directory = Path(tempfile.mkdtemp(prefix="dist_pool_"))
        self._workers: dict[int, _Worker] = {}  # by rank
        self._started = 0
        self._jobs = 0

    def run(
        self,
        job: Callable[..., Any],
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        vpp: int = 1,
        sequence_parallel: bool = False,
        ep: int = 1,
        etp: int = 0,
        first_layers: int = 0,
        chunk_layers: tuple[int, ...] = (),
        shares_prompts: bool = False,
        timeout_s: float = 120.0,
        **arguments: Any,
    ) -> list[Any]:
        """`job(world, **arguments)` on tp * pp * cp * dp ranks: its results in rank order.
        Raises JobError.
        """
        sizes = (tp, pp, cp, vpp, sequence_parallel, ep, etp)
        layers = (first_layers, 0, chunk_layers)
        layout = ParallelLayout(tp * pp * cp * dp, *sizes, *layers, shares_prompts)
        world_size = layout.world_size
        workers = self._take(world_size)
        self._jobs += 1
        message = {
            "module": job.__module__,
            "function": job.__qualname__,
            "arguments": arguments,
            "layout": asdict(layout),
            "device": self._device,
            "init_file": str(self._directory / f"init_{self._jobs}"),
        }
        try:
            for rank, worker in enumerate(workers):
                worker.send((sys.path, pickle.dumps({**message, "rank": rank})))
                worker.jobs += 1
            return self._collect(workers, f"{job.__qualname__} at {layout}", timeout_s)
        except BaseException as error:
            if not (isinstance(error, JobError) and error.is_clean):
                self._end(workers)
            raise

    def close(self) -> None:
        """End all workers."""
        self._end(list(self._workers.values()))
        shutil.rmtree(self._directory, ignore_errors=True)

    def _take(self, count: int) -> list[_Worker]:
        self._end([worker for worker in self._workers.values() if worker.jobs >= JOBS_PER_WORKER])
        fresh = []
        for rank in [rank for rank in range(count) if rank not in self._workers]:
            self._started += 1
            fresh.append(_Worker(self._directory / f"worker_{self._started}.log"))
            self._workers[rank] = fresh[-1]
        try:
            self._collect(fresh, "start of workers", START_S)
        except BaseException:
            self._end(fresh)
            raise
        return [self._workers[rank] for rank in range(count)]

    def _end(self, workers: Sequence[_Worker]) -> None:
        for rank, worker in list(self._workers.items()):
            if worker in workers:
                del self._workers[rank]
                worker.kill()

    def _collect(self, workers: list[_Worker], what: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        errors: list[str] = []
        is_clean = True
        waiting = dict(enumerate(workers))
        while waiting:
            left = deadline - time.monotonic()
            ready = select.select(list(waiting.values()), [], [], max(left, 0))[0]
            if not ready:
                break
            for rank in [rank for rank, worker in waiting.items() if worker in ready]:
                worker = waiting.pop(rank)
                try:
                    answer = worker.receive()
                except EOFError:
                    is_clean = False
                    answer = {"error": f"rank {rank} died; its output ends with:\n{worker.tail()}"}
                if "error" in answer:
                    errors.append(answer["error"])
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    results[rank] = answer["result"]
        for rank, worker in waiting.items():
            worker.dump_stacks()
            time.sleep(0.3)
            late = (
                f"rank {rank} hung"
                if errors
                else f"rank {rank} did not answer within {timeout_s:.0f} s"
            )
            errors.append(f"{late}; its output ends with:\n{worker.tail()}")
        if errors:
            failure = JobError(f"{what}:\n" + "\n".join(errors))
            failure.is_clean = is_clean and not waiting
            raise failure
        return [results[rank] for rank in range(len(workers))]


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)

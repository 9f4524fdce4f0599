"""A warm process in which Triton kernels run on the CPU: `TRITON_INTERPRET=1` before anything
imports triton.

    # tests/unit/kernels/test_something.py
    def job(num_rows: int) -> float:                    # runs in the process; a plain
                                                        module-level function
        from rlhf_megatron.ranks.kernels import some_triton   # here, not at the top
            of the test file
        ...
        return value                                    # anything that pickles; checks may also
                                                        be made in here

    def test_something(triton_interpreter: TritonInterpreter) -> None:
        assert triton_interpreter.run(job, num_rows=3) == ...

The variable must not be set in the process of the tests: it is read when a kernel is made, and what
else imports triton there (megatron-core) would get interpreted kernels, on CUDA too. The process
ends with the one that started it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

START_S = 120.0  # for the process to import torch and the first job's modules on a busy machine


class TritonInterpreter:
    """Starts its process with the first job. Jobs run one at a time."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None

    def run(
        self, job: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any
    ) -> Any:
        """What `job` returns in the process. Raises AssertionError with the job's traceback
        where it raised.
        """
        if self._process is None:
            self._start()
            timeout_s += START_S
        self._connection.send_bytes(pickle.dumps((job, args, kwargs)))
        if not self._connection.poll(timeout_s):
            self.close()
            raise TimeoutError(
                f"{job.__name__} took more than {timeout_s:.0f} s under Triton's interpreter"
            )
        is_done, value = pickle.loads(self._connection.recv_bytes())
        if not is_done:
            raise AssertionError(f"{job.__name__} under Triton's interpreter:\n{value}")
        return value

    def close(self) -> None:
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join(10.0)
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()  # so that the end of this process is an end of file over there


def _serve(connection: Connection) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            job, args, kwargs = pickle.loads(message)
            answer = pickle.dumps((True, job(*args, **kwargs)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)

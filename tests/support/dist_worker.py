"""The process behind `dist_pool`: reads jobs, makes the world of each, answers with a
result or an error.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

PR_SET_PDEATHSIG = 1


def main(job_in: int, result_out: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    from dist_pool import _read, _write

    from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron

    torch.set_num_threads(1)
    prepare_megatron()

    def answer(message: dict[str, Any]) -> None:
        data = pickle.dumps(message)
        _write(result_out, struct.pack("!Q", len(data)) + data)

    answer({"result": "ready"})
    while True:
        try:
            (size,) = struct.unpack("!Q", _read(job_in, 8))
        except EOFError:
            return
        # the job's own modules lie on the caller's path
        sys.path[:], packed = pickle.loads(_read(job_in, size))
        job = pickle.loads(packed)
        try:
            answer({"result": run(job)})
        except BaseException:
            answer(
                {"error": f"rank {job['rank']} [{place(job)}] failed:\n{traceback.format_exc()}"}
            )
        finally:
            sys.stdout.flush()
            sys.stderr.flush()


def run(job: dict[str, Any]) -> Any:
    import torch.distributed as dist

    from rlhf_megatron.device import choose_distributed_backend, select_rank_device
    from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
    from rlhf_megatron.weights.parallel_layout import ParallelLayout

    layout = ParallelLayout(**job["layout"])
    device = select_rank_device(job["device"], job["rank"])
    dist.init_process_group(
        choose_distributed_backend(device),
        init_method=f"file://{job['init_file']}",
        rank=job["rank"],
        world_size=layout.world_size,
    )
    try:
        world = create_world(layout, device)
        result = importlib.import_module(job["module"])
        for name in job["function"].split("."):
            result = getattr(result, name)
        value = result(world, **job["arguments"])
        dist.barrier()
        return value
    finally:
        destroy_world()


def place(job: dict[str, Any]) -> str:
    from rlhf_megatron.weights.parallel_layout import ParallelLayout

    return str(ParallelLayout(**job["layout"]).locate_rank(job["rank"]))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))

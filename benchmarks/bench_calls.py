"""What a call to all ranks costs the controller: CPU time, by number of ranks, through its own
group and channels.

    python -m benchmarks.bench_calls [--ranks 256 1024 4096] [--repeats 5]

Ranks are ends of socket pairs in another process, which decodes each call and answers it at once
with nothing. The group, its threads, messages and channels are the run's own. The least of the
repeats counts; the exponent says how the cost grows between neighbouring numbers of ranks (1:
in proportion).
"""

from __future__ import annotations

import argparse
import math
import os
import selectors
import socket
import time
from collections.abc import Sequence

from benchmarks.common import significant, write_result
from rlhf_megatron.data import codec
from rlhf_megatron.rollout.socket_limits import raise_open_file_limit
from rlhf_megatron.runtime.control_messages import BUILD, LeaveRequest, RoleCallReply
from rlhf_megatron.runtime.message_channel import MessageChannel
from rlhf_megatron.runtime.process_control import read_machine_id
from rlhf_megatron.runtime.remote_worker_group import HostLink, RemoteWorkerGroup
from rlhf_megatron.weights.parallel_layout import ParallelLayout


def answer(sockets: Sequence[socket.socket]) -> None:
    """Stand for all ranks until they are told to leave."""
    selector = selectors.DefaultSelector()
    for sock in sockets:
        channel = MessageChannel(sock)
        channel.send(RoleCallReply(BUILD))
        selector.register(sock, selectors.EVENT_READ, channel)
    while selector.get_map():
        for key, _ in selector.select():
            message = key.data.receive()
            if isinstance(message, LeaveRequest):
                selector.unregister(key.fileobj)
                key.data.close()
            else:
                key.data.send(RoleCallReply(message.id))


def measure(num_ranks: int, repeats: int) -> dict[str, float]:
    """One number of ranks. The process that stands for them is forked before the
    group has threads.
    """
    pairs = [socket.socketpair() for _ in range(num_ranks)]
    child = os.fork()
    if child == 0:
        for ours, _ in pairs:
            ours.close()
        answer([theirs for _, theirs in pairs])
        os._exit(0)
    for _, theirs in pairs:
        theirs.close()
    links = [
        HostLink(rank, f"[rank {rank}]", MessageChannel(ours), child, read_machine_id())
        for rank, (ours, _) in enumerate(pairs)
    ]
    group = RemoteWorkerGroup(
        ParallelLayout(num_ranks), links, 600.0, 600.0, lambda where, message: None
    )
    group.wait_until_built()
    found = []
    for _ in range(repeats):
        began = time.monotonic()
        cpu = time.process_time()
        assert group.broadcast_call("host.nothing", step=1).result() == [None] * num_ranks
        found.append((time.process_time() - cpu, time.monotonic() - began))
    group.close()
    os.waitpid(child, 0)
    return {"cpu_s": min(cpu for cpu, _ in found), "wall_s": min(wall for _, wall in found)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="keep the result in benchmarks/results/calls.json"
    )
    args = parser.parse_args()
    raise_open_file_limit()
    codec.encode_message(RoleCallReply(BUILD))
    rows = []
    for num_ranks in args.ranks:
        row = {"ranks": num_ranks} | measure(num_ranks, args.repeats)
        if rows:
            row["exponent"] = math.log(
                row["cpu_s"] / rows[-1]["cpu_s"], num_ranks / rows[-1]["ranks"]
            )
        rows.append({name: significant(value) for name, value in row.items()})
        print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    if args.write:
        print(write_result("calls", "python -m benchmarks.bench_calls", {"rows": rows}))


if __name__ == "__main__":
    main()

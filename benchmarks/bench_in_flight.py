"""What a group in flight costs the controller: threads, memory and CPU time, over real HTTP to
servers that stand for engines.

    python -m benchmarks.bench_in_flight [--groups 20000] [--engines 64] [--samples 8] [--soft-limit
        1024] [--drivers N]
    python -m benchmarks.bench_in_flight --tokens    # long answers of SGLang through drivers:
                                                     what a token costs

The servers speak the bundled engine's part, or stock SGLang's (`--tokens`), in processes of their
own. They answer nobody before all groups that may have connections have come to them; so all are on
their way at one moment, which is what is measured. The session, the clients, the drivers and the
parsing are the run's own. The process begins with `--soft-limit` files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import resource
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from aiohttp import web

from benchmarks.common import significant, write_result
from rlhf_megatron.rollout import http_client
from rlhf_megatron.rollout.drivers.driver_pool import DriverPool
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    GenerateRequest,
    InferenceEngine,
    SamplingParams,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.socket_limits import raise_open_file_limit

NUM_PROCESSES = 4  # of servers: each may open as many files as the controller
PROMPT = 64  # tokens
VOCABULARY = 150_000
ROOM = 1 << 20  # samples that an engine says it decodes at once


def sample_of(length: int, is_sglang: bool) -> bytes:
    """A sample as the server says it, with numbers as long as they are."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, VOCABULARY, length).tolist()
    log_probs = -rng.exponential(0.5, length).astype(np.float32)
    values = [float(value) for value in log_probs]
    if not is_sglang:
        sample = {
            "token_ids": ids,
            "log_probs": values,
            "finish_reason": "length",
            "policy_version": -1,
        }
        return json.dumps(sample).encode()
    meta = {
        "finish_reason": {"type": "length", "length": length},
        "output_token_logprobs": [
            [value, token, None] for value, token in zip(values, ids, strict=True)
        ],
        "completion_tokens": length,
        "weight_version": "default",
    }
    return json.dumps(
        {"text": "", "output_ids": ids, "meta_info": meta}, separators=(",", ":")
    ).encode()


def serve(num_engines: int, length: int, is_sglang: bool, parent: Connection) -> None:
    """Tell the ports, then answer `count` with the calls that wait and `go` by letting all end."""
    raise_open_file_limit()
    sample = sample_of(length, is_sglang)
    waiting = [0]
    go = asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if "token_ids_logprob" in body:  # how a client of SGLang asks for the vocabulary
            text = f"valid range is [0, {VOCABULARY})"
            return web.json_response({"error": {"message": text}}, status=400)
        counts = (
            [len(body["input_ids"])]
            if is_sglang
            else [len(one["seeds"]) for one in body["requests"]]
        )
        waiting[0] += 1
        await go.wait()
        groups = b",".join(b"[%b]" % b",".join([sample] * count) for count in counts)
        return web.Response(
            body=groups if is_sglang else b'{"groups":[%b]}' % groups,
            content_type="application/json",
        )

    async def info(request: web.Request) -> web.Response:
        state = {"effective_max_running_requests_per_dp": ROOM}
        return web.json_response(
            {"max_num_seqs": ROOM, "version": None, "internal_states": [state]}
        )

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [web.post("/generate", generate), web.get("/info", info), web.get("/health", health)]
        )
        app.router.add_get("/server_info", info)
        app.router.add_post("/abort", health)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        sites = [web.TCPSite(runner, "127.0.0.1", 0, backlog=4096) for _ in range(num_engines)]
        for site in sites:
            await site.start()
        parent.send([site._server.sockets[0].getsockname()[1] for site in sites])
        while (word := await asyncio.to_thread(parent.recv)) != "end":
            if word == "go":
                go.set()
            parent.send(waiting[0])

    asyncio.run(main())


class Servers:
    """The processes of all engines."""

    def __init__(self, num_engines: int, length: int, is_sglang: bool) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(NUM_PROCESSES)]
        counts = [len(range(i, num_engines, NUM_PROCESSES)) for i in range(NUM_PROCESSES)]
        self._processes = [
            context.Process(target=serve, args=(count, length, is_sglang, theirs), daemon=True)
            for count, (_, theirs) in zip(counts, pipes, strict=True)
        ]
        for process in self._processes:
            process.start()
        self._pipes = [ours for ours, _ in pipes]
        self.ports = [port for pipe in self._pipes for port in pipe.recv()]

    def ask(self, word: str) -> int:
        """Calls that have come to them."""
        for pipe in self._pipes:
            pipe.send(word)
        return sum(pipe.recv() for pipe in self._pipes)

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        for process in self._processes:
            process.join(30)


def resident(process: int | str = "self") -> int:
    """Bytes of a process that are its own; no page of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def cpu_of(processes: Sequence[int]) -> float:
    """Return the seconds of CPU that these have taken, by their own clocks (/proc counts in
    ticks of 10 ms).
    """
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in processes)


def requests_of(num_groups: int, num_samples: int, length: int) -> list[GenerateRequest]:
    params = SamplingParams(length)
    return [
        GenerateRequest(tuple(range(i, i + PROMPT)), tuple(range(num_samples)), params)
        for i in range(num_groups)
    ]


def measure(servers: Servers, args: argparse.Namespace) -> dict[str, float]:
    """All groups in flight at once, and then their answers."""
    drivers = DriverPool(args.drivers) if args.drivers else None
    num_groups = args.groups
    num_tokens = args.groups * args.samples * args.response
    engines: list[InferenceEngine] = []
    for i, port in enumerate(servers.ports):
        url = f"http://127.0.0.1:{port}"
        if args.tokens:
            engines.append(
                SGLangEngine(EngineAddress(f"engine{i}", "sglang", url, "t" * 32), Path("/nowhere"))
            )
        else:
            engines.append(LocalEngine(EngineAddress(f"engine{i}", "local", url, "t" * 32)))
    fleet = EngineFleet(engines, 3600.0, 0, driver_pool=drivers)
    pids = drivers.pids if drivers is not None else []
    while drivers is not None and not drivers.are_all_ready:
        time.sleep(0.1)
    # a run has its prompts, in flight or not
    requests = requests_of(num_groups, args.samples, args.response)
    with fleet.open_session() as session:
        threads = threading.active_count()
        stood = resident()
        cpu = time.process_time()
        began = time.monotonic()
        stood_there = sum(map(resident, pids))
        cpu_there = cpu_of(pids)
        for key, request in enumerate(requests):
            session.submit_requests(key, [request])
        most = http_client.run_in_event_loop(_most(), 60.0)
        while servers.ask("count") < min(num_groups, most):
            session.poll_finished()
        sent_s = time.monotonic() - began
        sent_cpu = time.process_time() - cpu
        found = {
            "on_their_way": len(session._generation._task_by_call),
            "connections": len(os.listdir("/proc/self/fd"))
            + sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            "threads_more": threading.active_count() - threads,
            "bytes_a_group": (resident() - stood) / num_groups,
            "bytes_a_group_in_drivers": (sum(map(resident, pids)) - stood_there) / num_groups,
        }
        servers.ask("go")
        cpu = time.process_time()
        began = time.monotonic()
        num_done = 0
        sent_cpu_there = cpu_of(pids) - cpu_there
        cpu_there = cpu_of(pids)
        while num_done < num_groups:
            num_done += len(session.poll_finished())
        answer_cpu = time.process_time() - cpu
        answer_cpu_there = cpu_of(pids) - cpu_there
        found |= {
            "send_cpu_ms_a_group": sent_cpu / num_groups * 1e3,
            "send_cpu_ms_a_group_in_drivers": sent_cpu_there / num_groups * 1e3,
            "answer_cpu_ms_a_group": answer_cpu / num_groups * 1e3,
            "answer_cpu_us_a_token": answer_cpu / num_tokens * 1e6,
            "answer_cpu_us_a_token_in_drivers": answer_cpu_there / num_tokens * 1e6,
            "send_s": sent_s,
            "answer_s": time.monotonic() - began,
        }
    fleet.close()
    return {name: significant(value) for name, value in found.items()}


async def _most() -> int:
    return http_client.get_connection_slots()._value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, help="tokens")
    parser.add_argument("--drivers", type=int, help="0: this process asks and reads")
    parser.add_argument(
        "--tokens", action="store_true", help="256 groups of 8,192 tokens and 2 drivers, as SGLang"
    )
    parser.add_argument(
        "--soft-limit", type=int, default=1024, help="of open files, as the process begins"
    )
    parser.add_argument(
        "--write", action="store_true", help="keep the result in benchmarks/results/in_flight*.json"
    )
    args = parser.parse_args()
    usual = (
        {"groups": 256, "response": 8192, "drivers": 2}
        if args.tokens
        else {"groups": 20000, "response": 16}
    )
    for name, value in ({"drivers": 0} | usual).items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.soft_limit, hard))
    servers = Servers(args.engines, args.response, args.tokens)
    try:
        found = measure(servers, args)
    finally:
        servers.end()
    limits = f"{args.soft_limit} files, at most {hard}"
    print(
        f"{args.groups} groups of {args.samples} samples to {args.engines} engines; {limits};"
        f" {args.drivers} drivers"
    )
    for name, value in found.items():
        print(f"{value:12.5g}  {name}")
    if args.write:
        shape = {**vars(args), "hard_limit": hard}
        name = (
            "in_flight_tokens"
            if args.tokens
            else "in_flight_drivers"
            if args.drivers
            else "in_flight"
        )
        command = f"python -m benchmarks.bench_in_flight{' --tokens' if args.tokens else ''}"
        command += f" --drivers {args.drivers}" if args.drivers and not args.tokens else ""
        print(write_result(name, command, {"shape": shape, "found": found}))


if __name__ == "__main__":
    main()

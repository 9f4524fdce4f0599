"""What a group in flight costs the controller: threads, memory and CPU time, over real HTTP to servers that stand for
engines.

    python -m benchmarks.bench_in_flight [--groups 20000] [--engines 64] [--samples 8] [--soft-limit 1024]

The servers speak the bundled engine's part in processes of their own. They answer nobody before all groups that the
process may have connections for have come to them; so all are on their way at one moment, which is what is measured.
The session, the clients and the parsing are the run's own. The process begins with `--soft-limit` files.
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

from aiohttp import web

from benchmarks.common import significant, write_result
from rlhf_megatron.rollout import http
from rlhf_megatron.rollout.engine import EngineAddress, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.local.client import LocalEngine
from rlhf_megatron.rollout.sockets import allow_open_files

NUM_PROCESSES = 4  # of servers: each may open as many files as the controller
PROMPT = 64  # tokens
RESPONSE = 16
ROOM = 1 << 20  # samples that an engine says it decodes at once


def serve(num_engines: int, parent: Connection) -> None:
    """Tell the ports, then answer `count` with the calls that wait and `go` by letting all end."""
    allow_open_files()
    answers = {}  # by number of samples
    waiting = [0]
    go = asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        num_samples = [len(one["seeds"]) for one in body["requests"]]
        waiting[0] += 1
        await go.wait()
        key = tuple(num_samples)
        if key not in answers:
            sample = {
                "token_ids": list(range(RESPONSE)),
                "log_probs": [-0.5] * RESPONSE,
                "finish_reason": "length",
                "policy_version": -1,
            }
            answers[key] = json.dumps({"groups": [[sample] * count for count in num_samples]}).encode()
        return web.Response(body=answers[key], content_type="application/json")

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"max_num_seqs": ROOM, "version": None})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post("/generate", generate), web.get("/info", info), web.get("/health", health)])
        app.router.add_post("/abort", health)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        sites = [web.TCPSite(runner, "127.0.0.1", 0, backlog=4096) for _ in range(num_engines)]
        for site in sites:
            await site.start()
        parent.send([site._server.sockets[0].getsockname()[1] for site in sites])  # type: ignore[union-attr]
        while (word := await asyncio.to_thread(parent.recv)) != "end":
            if word == "go":
                go.set()
            parent.send(waiting[0])

    asyncio.run(main())


class Servers:
    """The processes of all engines."""

    def __init__(self, num_engines: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(NUM_PROCESSES)]
        counts = [len(range(i, num_engines, NUM_PROCESSES)) for i in range(NUM_PROCESSES)]
        self._processes = [
            context.Process(target=serve, args=(count, theirs), daemon=True)
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


def resident() -> int:
    """Bytes of this process that are its own; no page of a file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def requests_of(num_groups: int, num_samples: int) -> list[GenerateRequest]:
    params = SamplingParams(RESPONSE)
    return [GenerateRequest(tuple(range(i, i + PROMPT)), tuple(range(num_samples)), params) for i in range(num_groups)]


def measure(ports: Sequence[int], servers: Servers, num_groups: int, num_samples: int) -> dict[str, float]:
    """All groups in flight at once, and then their answers."""
    engines = [
        LocalEngine(EngineAddress(f"engine{i}", "local", f"http://127.0.0.1:{port}", "t" * 32))
        for i, port in enumerate(ports)
    ]
    fleet = EngineFleet(engines, 3600.0, 0)
    requests = requests_of(num_groups, num_samples)  # a run has its prompts, in flight or not
    with fleet.open_session() as session:
        threads, stood, cpu, began = threading.active_count(), resident(), time.process_time(), time.monotonic()
        for key, request in enumerate(requests):
            session.submit(key, [request])
        most = http.run(_most(), 60.0)
        while servers.ask("count") < min(num_groups, most):
            session.poll()
        sent_s, sent_cpu = time.monotonic() - began, time.process_time() - cpu
        found = {
            "on_their_way": len(session._work._running),
            "connections": len(os.listdir("/proc/self/fd")),
            "threads_more": threading.active_count() - threads,
            "bytes_a_group": (resident() - stood) / num_groups,
        }
        servers.ask("go")
        cpu, began, num_done = time.process_time(), time.monotonic(), 0
        while num_done < num_groups:
            num_done += len(session.poll())
        found |= {
            "send_cpu_ms_a_group": sent_cpu / num_groups * 1e3,
            "answer_cpu_ms_a_group": (time.process_time() - cpu) / num_groups * 1e3,
            "send_s": sent_s,
            "answer_s": time.monotonic() - began,
        }
    fleet.close()
    return {name: significant(value) for name, value in found.items()}


async def _most() -> int:
    return http.connections()._value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=20000)
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--soft-limit", type=int, default=1024, help="of open files, as the process begins")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results/in_flight.json")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (args.soft_limit, hard))
    servers = Servers(args.engines)
    try:
        found = measure(servers.ports, servers, args.groups, args.samples)
    finally:
        servers.end()
    limits = f"{args.soft_limit} files, at most {hard}"
    print(f"{args.groups} groups of {args.samples} samples to {args.engines} engines; {limits}")
    for name, value in found.items():
        print(f"{value:12.5g}  {name}")
    if args.write:
        shape = {**vars(args), "hard_limit": hard}
        print(write_result("in_flight", "python -m benchmarks.bench_in_flight", {"shape": shape, "found": found}))


if __name__ == "__main__":
    main()

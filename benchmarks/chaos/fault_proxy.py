"""An HTTP proxy on loopback between clients and one engine, that does what networks and engines do
wrong. For tests.

    with FaultProxy(address, transfer_dir, [ProxyFault("reset", "/generate", nth=2)]) as proxy:
        engine = connect(proxy.address, transfer_dir)

It speaks for the bundled engine and for stock SGLang. Tokens pass through; neither they nor
bodies are logged.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from benchmarks.chaos.bucket_faults import (
    BUCKET_KINDS,
    UPDATE_PATHS,
    BucketKind,
    KeptBucket,
    damaged,
    keep,
    read_manifest,
    write_manifest,
)
from rlhf_megatron.rollout.engine_interface import EngineAddress

logger = logging.getLogger(__name__)

RequestKind = Literal[
    "delay",
    "drop",
    "duplicate",
    "reset",
    "cut",
    "error",
    "kill_engine",
    "hang_engine",
    "old_version",
    "no_digests",
]
REQUEST_KINDS: tuple[str, ...] = get_args(RequestKind)
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MAX_BODY_BYTES = 256 << 20
_PASSED_ON = ("authorization", "content-type", "accept")
_START_S = 30.0


@dataclass(frozen=True)
class ProxyFault:
    """What is done to the requests number `nth` .. `nth + times - 1` of a path, counted from 1.

    delay: held for `seconds`; drop: never answered; duplicate: sent twice; reset: the connection
    breaks, nothing is sent; cut: it is sent, and the connection breaks in the middle of the answer;
    error: it is sent, and 500 answered; kill_engine, hang_engine: the engine is killed or stopped,
    then the request is sent; old_version: the samples say that they come from the version before;
    no_digests: the engine says that it cannot tell its digests. Those of BUCKET_KINDS act on the
    buckets of weights, whatever their path: drop_bucket: success is answered, nothing was loaded;
    half_bucket: half of its tensors; swap_names, swap_rows, flip_byte: of tensors in it;
    old_bucket: one of an earlier sync in its place.
    """

    kind: RequestKind | BucketKind
    path: str = ""  # "": those of buckets
    nth: int = 1
    times: int = 1
    seconds: float = 1.0  # of delay
    is_hidden: bool = False  # of buckets: the manifest is made to agree with the damage


class FaultProxy:
    """A context manager: it listens while the block runs. One engine each; `faults` may be
    replaced at any time.
    """

    def __init__(
        self,
        target: EngineAddress,
        transfer_dir: Path,
        faults: Sequence[ProxyFault] = (),
        *,
        kill_engine: Callable[[], None] | None = None,
        hang_engine: Callable[[], None] | None = None,
        seed: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        """`kill_engine`, `hang_engine`: needed for faults of that kind. `timeout_s`: limit of a
        request that is passed on or dropped. Raises ValueError where the engine is not
        on this machine.
        """
        if urlsplit(target.url).hostname not in _LOOPBACK:
            raise ValueError(
                f"the fault proxy is for engines on loopback; {target.name} is at {target.url}."
            )
        self.target = target
        self.faults = tuple(faults)
        self.fired: list[tuple[ProxyFault, str]] = []  # and the path it acted on
        self.passed: Counter[str] = Counter()  # requests by path
        self.damaged: set[str] = set()  # tensors that the engine did not get as they were sent
        self._transfer_dir = transfer_dir
        self._acts = {"kill_engine": kill_engine, "hang_engine": hang_engine}
        self._random = Random(seed)
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self.num_buckets = 0  # that came by
        self._version: int | None = None  # of the buckets that pass
        # number, and a bucket to come again as an old one
        self._kept: tuple[int, KeptBucket] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fault-proxy", daemon=True
        )

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        try:
            port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.address = replace(self.target, url=f"http://127.0.0.1:{port}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if hasattr(self, "_runner"):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_S)
        self._loop.close()

    async def _start(self) -> int:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._session = aiohttp.ClientSession(timeout=self._timeout)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.passed[request.path] += 1
        fault = self._fault_of(request.path, self.passed[request.path], REQUEST_KINDS)
        if request.path == UPDATE_PATHS[self.target.kind]:
            return await self._answer(request, fault, lambda: self._pass_bucket(request, body))
        return await self._answer(request, fault, lambda: self._pass(request, body))

    def _fault_of(self, path: str, number: int, kinds: Sequence[str]) -> ProxyFault | None:
        for fault in self.faults:
            if (
                fault.kind in kinds
                and fault.path in (path, "")
                and fault.nth <= number < fault.nth + fault.times
            ):
                self.fired.append((fault, path))
                logger.warning(
                    "%s: %s on request %d of %s", self.target.name, fault.kind, number, path
                )
                return fault
        return None

    async def _answer(
        self, request: web.Request, fault: ProxyFault | None, send: Callable[[], Awaitable[_Answer]]
    ) -> web.StreamResponse:
        kind = fault.kind if fault else ""
        if kind == "reset":
            return _broken(request)
        if kind == "drop":
            await asyncio.sleep(self._timeout.total or 0.0)  # ends when the client gives up
            return _broken(request)
        if kind == "delay":
            assert fault is not None
            await asyncio.sleep(fault.seconds)
        if kind in self._acts:
            act = self._acts[kind]
            assert act is not None, f"{kind} was not given"
            act()
        try:
            if kind == "duplicate":
                await send()
            answer = await send()
        except (
            aiohttp.ClientError,
            OSError,
        ):  # the engine is gone: the client sees what it would see without us
            return _broken(request)
        if kind == "old_version":
            answer = replace(answer, body=_with_older_version(self.target.kind, answer.body))
        if kind == "no_digests":
            answer = replace(answer, body=b"null")
        if kind == "cut":
            return await _half(request, answer)
        if kind == "error":
            return web.json_response({"error": {"message": "a fault of the proxy"}}, status=500)
        return web.Response(
            status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type}
        )

    async def _pass(self, request: web.Request, body: bytes) -> _Answer:
        # sglang-router sends two keys, the engine's first; servers read the first
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        url = self.target.url + request.path_qs
        async with self._session.request(
            request.method, url, data=body or None, headers=headers
        ) as response:
            content_type = response.headers.get("Content-Type", "application/octet-stream")
            return _Answer(response.status, await response.read(), content_type)

    async def _pass_bucket(self, request: web.Request, body: bytes) -> _Answer:
        """An update request, damaged where a fault waits for its bucket."""
        manifest = read_manifest(self.target.kind, body)
        if manifest is None:
            return await self._pass(request, body)
        self.num_buckets += 1
        fault = self._fault_of("", self.num_buckets, BUCKET_KINDS)
        replays = any(f.kind == "old_bucket" for f in self.faults)
        if replays and self._kept is None:
            self._kept = (manifest.version, keep(self._transfer_dir, manifest))
        if fault is None:
            return await self._pass(request, body)
        old = self._kept[1] if self._kept and self._kept[0] < manifest.version else None
        how = (fault.kind, fault.is_hidden, self._transfer_dir, manifest, old, self._random)
        with damaged(*how) as (changed, names):
            self.damaged.update(names)
            return await self._pass(request, write_manifest(self.target.kind, body, changed))


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    content_type: str


def _broken(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


async def _half(request: web.Request, answer: _Answer) -> web.StreamResponse:
    """The length is promised, half of it comes, and the connection breaks."""
    headers = {"Content-Type": answer.content_type, "Content-Length": str(max(2, len(answer.body)))}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    await response.write(answer.body[: len(answer.body) // 2] or b"{")
    if request.transport is not None:
        request.transport.close()  # what was written goes out first
    return response


def _with_older_version(kind: str, body: bytes) -> bytes:
    """A generate answer whose samples say that they come from the version before."""
    answer: Any = json.loads(body)
    if kind == "local":
        for sample in (sample for group in answer["groups"] for sample in group):
            for span in sample["version_spans"]:
                span["version"] -= 1
            sample["policy_version"] -= 1
    else:
        samples = answer if isinstance(answer, list) else [answer]
        for meta in (sample["meta_info"] for sample in samples if "meta_info" in sample):
            for span in [meta, *meta.get("weight_versions", [])]:
                for key in {"version", "weight_version"} & span.keys():
                    prefix, _, version = span[key].rpartition("-")
                    span[key] = f"{prefix}-{int(version) - 1}"
    return json.dumps(answer).encode()

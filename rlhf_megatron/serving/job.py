"""`rlhf-megatron serve`: engines with a model or a run's newest checkpoint, behind one HTTP address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.generation.job import serving
from rlhf_megatron.generation.source import Served as Weights
from rlhf_megatron.generation.source import weights_of
from rlhf_megatron.recovery.resume import CHECKPOINTS
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.rollout.local.server import LOOPBACK_NAMES
from rlhf_megatron.serving.backend import Backend
from rlhf_megatron.serving.bodies import Served
from rlhf_megatron.serving.follow import EVERY_S, Follower, Pinned
from rlhf_megatron.serving.front import Front
from rlhf_megatron.stop import StopRequest

GRACE_S = 30.0  # that requests under way have to end when the server is told to
_POLL_S = 0.1
WEIGHTS = "weights"  # folder of the checkpoint that is served


@dataclass(frozen=True)
class ServeJob:
    """A checked job: `run` does it."""

    setup: EngineSetup  # of its engines
    data: DataConfig
    source: Path  # RUN.yaml, the directory of a run, or of a model
    follow: Path | None  # the directory of a run
    folder: Path  # of logs, keys of engines and the checkpoint that is served
    name: str  # of the model, in requests
    host: str
    port: int  # 0: any free one
    key: str | None

    def __post_init__(self) -> None:
        """Raises ValueError; starts nothing."""
        if self.host not in LOOPBACK_NAMES and not self.key:
            raise ValueError(
                f"--host {self.host} is reached from other machines: give an API key (--api-key-file, or"
                " RLHF_MEGATRON_API_KEY), which clients send."
            )
        self.setup.check()

    def run(self, stop: StopRequest, report: Callable[[str], None]) -> None:
        """Serve until `stop` asks for the end; requests under way have 30 seconds then. Raises EngineError where no
        engine is left, RunStopped where it is asked before it serves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run_dir = self.follow or (self.source if (self.source / CHECKPOINTS).is_dir() else None)
        pinned = Pinned(run_dir, self.folder / WEIGHTS) if run_dir is not None else None
        weights = self._weights(pinned, stop, report)
        version = weights.step or 0
        with ExitStack() as stack:
            sync = stack.enter_context(serving(self.setup, weights, self.folder, stop, report, version))
            follower = Follower(pinned, sync, report) if pinned is not None and self.follow is not None else None
            backend = stack.enter_context(Backend(sync, follower))
            asyncio.run(self._serve(backend, self._served(weights), stop, report))

    def _weights(self, pinned: Pinned | None, stop: StopRequest, report: Callable[[str], None]) -> Weights:
        step = pinned.newest() if pinned is not None else None
        if pinned is not None and step is None and self.follow is not None:
            report(f"{self.follow} has no checkpoint yet; the server waits for the first one")
            while step is None:
                stop.check()
                time.sleep(EVERY_S)
                step = pinned.newest()
        if pinned is None or step is None:
            return weights_of(self.source, Path(self.setup.model.path))
        found = pinned.take(step)
        pinned.keep_only(found.checkpoint)
        return Weights(found.model, f"{pinned.store.path_of(step)}", "", found.step)

    def _served(self, weights: Weights) -> Served:
        model, rollout = self.setup.model, self.setup.rollout
        tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.path)
        data, hf_config = self.data, weights.model.hf_config
        chat = None
        if tokenizer.chat_template is not None:
            chat = make_chat_format(tokenizer, None, data.apply_chat_template_kwargs)
        limits: list[Any] = [hf_config.get("max_position_embeddings")]
        limits += [rollout.max_num_batched_tokens] if rollout.engine == "local" else []
        limits += [rollout.sglang.args.get(name) for name in ("context_length", "context-length", "max_total_tokens")]
        room = min((limit for limit in limits if isinstance(limit, int)), default=data.max_response_length)
        stops = tokenizer.stop_ids(rollout.stop)
        return Served(self.name, tokenizer, chat, stops, room, int(hf_config["vocab_size"]))

    async def _serve(self, backend: Backend, served: Served, stop: StopRequest, report: Callable[[str], None]) -> None:
        front = Front(backend, served, self.key, self.host in LOOPBACK_NAMES)
        runner = web.AppRunner(
            front.application(), handle_signals=False, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port).start()
            host, port = runner.addresses[0][:2]
            shown = f"[{host}]" if ":" in host else host
            report(f"{served.name} (version {backend.version}) is served at http://{shown}:{port}/v1; Ctrl-C ends it")
            while not stop.is_requested and not backend.ended.done():
                await asyncio.sleep(_POLL_S)
            front.is_stopping = True
            while front.num_open and stop.seconds < GRACE_S and not backend.ended.done():
                await asyncio.sleep(_POLL_S)
        finally:
            await runner.cleanup()
        if backend.ended.done():
            backend.ended.result()

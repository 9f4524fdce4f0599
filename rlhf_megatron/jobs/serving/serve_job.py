"""`rlhf-megatron serve`: engines with a model or a run's newest checkpoint, behind
one HTTP address.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.controller.recovery.resume_point import CHECKPOINTS
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.http_guard import LOOPBACK_NAMES, GuardedServer
from rlhf_megatron.jobs.generation.answer_generation_job import serve_weights
from rlhf_megatron.jobs.generation.context_limit import find_context_limit
from rlhf_megatron.jobs.generation.model_source import ServedWeights as Weights
from rlhf_megatron.jobs.generation.model_source import find_served_weights, load_job_tokenizer
from rlhf_megatron.jobs.serving.checkpoint_follower import (
    EVERY_S,
    CheckpointFollower,
    PinnedCheckpoint,
)
from rlhf_megatron.jobs.serving.http_front import ServingFront, ServingLimits
from rlhf_megatron.jobs.serving.openai_requests import ServedModel
from rlhf_megatron.jobs.serving.serving_backend import ServingBackend
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.socket_limits import raise_open_file_limit
from rlhf_megatron.stop import StopRequest

GRACE_S = 30.0  # that requests under way have to end when the server is told to
_POLL_S = 0.1
WEIGHTS = "weights"  # folder of the checkpoint that is served


@dataclass(frozen=True)
class ServeJob:
    """A checked job that serves a model over HTTP; `run_server` does the work."""

    setup: EngineSetup  # of its engines
    data: DataConfig
    model_source: Path  # RUN.yaml, the directory of a run, or of a model
    followed_run_dir: Path | None  # the directory of a run
    server_dir: Path  # of logs, keys of engines and the checkpoint that is served
    model_name: str  # of the model, in requests
    host: str
    port: int  # 0: any free one
    api_key: str | None
    limits: ServingLimits = ServingLimits()  # noqa: RUF009  (frozen)

    def __post_init__(self) -> None:
        """Check the job, and start nothing. Raise ValueError for an address that other machines
        reach without an API key, and for engines that cannot be started here.
        """
        if self.host not in LOOPBACK_NAMES and not self.api_key:
            raise ValueError(
                f"--host {self.host} is reached from other machines: give an API key"
                " (--api-key-file, or RLHF_MEGATRON_API_KEY), which clients send."
            )
        self.setup.check_servers()

    def run_server(self, stop_request: StopRequest, report: Callable[[str], None]) -> None:
        """Serve until `stop_request` is made; open requests then have 30 seconds to end. Raise
        EngineError where no engine is left, RunStopped where the stop is requested before serving
        begins.
        """
        self.server_dir.mkdir(parents=True, exist_ok=True)
        run_dir = self.followed_run_dir or (
            self.model_source if (self.model_source / CHECKPOINTS).is_dir() else None
        )
        pinned = (
            PinnedCheckpoint(run_dir, self.server_dir / WEIGHTS) if run_dir is not None else None
        )
        weights = self._choose_weights(pinned, stop_request, report)
        served_model = self._make_served_model(weights)  # its errors come before engines start
        version = weights.step or 0
        with ExitStack() as stack:
            sync = stack.enter_context(
                serve_weights(self.setup, weights, self.server_dir, stop_request, report, version)
            )
            follower = (
                CheckpointFollower(pinned, sync, report)
                if pinned is not None and self.followed_run_dir is not None
                else None
            )
            backend = stack.enter_context(ServingBackend(sync, follower))
            asyncio.run(self._serve_until_stopped(backend, served_model, stop_request, report))

    def _choose_weights(
        self,
        pinned_checkpoint: PinnedCheckpoint | None,
        stop_request: StopRequest,
        report: Callable[[str], None],
    ) -> Weights:
        """Return the weights to begin with: the newest checkpoint of the run, which is pinned, or
        else the weights of the model. For a followed run without a checkpoint, wait for the first
        one.
        """
        step = pinned_checkpoint.find_newest_step() if pinned_checkpoint is not None else None
        if pinned_checkpoint is not None and step is None and self.followed_run_dir is not None:
            report(
                f"{self.followed_run_dir} has no checkpoint yet; the server waits for the first one"
            )
            while step is None:
                stop_request.raise_if_requested()
                time.sleep(EVERY_S)
                step = pinned_checkpoint.find_newest_step()
        if pinned_checkpoint is None or step is None:
            return find_served_weights(self.model_source, Path(self.setup.model.path))
        found = pinned_checkpoint.pin_checkpoint(step)
        pinned_checkpoint.remove_others(found.checkpoint_path)
        return Weights(
            found.model,
            f"{pinned_checkpoint.checkpoint_store.get_checkpoint_path(step)}",
            "",
            found.step,
        )

    def _make_served_model(self, weights: Weights) -> ServedModel:
        """Return the name, tokenizer, chat format and limits of the model that answers. The longest
        text is the smallest limit of the model and its engines.
        """
        model = self.setup.model
        rollout = self.setup.rollout
        tokenizer = load_job_tokenizer(model, weights)
        data = self.data
        hf_config = weights.model.hf_config
        chat = None
        if tokenizer.chat_template is not None:
            chat = make_chat_format(tokenizer, None, data.apply_chat_template_kwargs)
        limit = find_context_limit(hf_config, rollout)
        max_tokens = data.max_response_length if limit is None else limit.num_tokens
        stops = tokenizer.make_stop_token_ids(rollout.stop)
        return ServedModel(
            self.model_name,
            tokenizer,
            chat,
            stops,
            max_tokens,
            int(hf_config["vocab_size"]),
            data.add_special_tokens,
        )

    async def _serve_until_stopped(
        self,
        backend: ServingBackend,
        served_model: ServedModel,
        stop_request: StopRequest,
        report: Callable[[str], None],
    ) -> None:
        """Run the HTTP server until a stop is requested or the backend ends. Then refuse new
        requests, and wait up to 30 seconds for open ones. Raise the error that ended the backend.
        """
        raise_open_file_limit()
        front = ServingFront(
            backend, served_model, self.api_key, self.host in LOOPBACK_NAMES, self.limits
        )
        server = GuardedServer(front.make_application(), front.guard)
        try:
            host, port = await server.listen(self.host, self.port)
            shown = f"[{host}]" if ":" in host else host
            report(_describe_completion_prompts(served_model))
            report(
                f"{served_model.name} (version {backend.policy_version}) is served at"
                f" http://{shown}:{port}/v1; Ctrl-C ends it"
            )
            while not stop_request.is_requested and not backend.end_future.done():
                await asyncio.sleep(_POLL_S)
            front.is_stopping = True
            while (
                front.num_open_requests
                and stop_request.seconds_since_request < GRACE_S
                and not backend.end_future.done()
            ):
                await asyncio.sleep(_POLL_S)
        finally:
            await server.close()
        if backend.end_future.done():
            backend.end_future.result()


def _describe_completion_prompts(served_model: ServedModel) -> str:
    """Return a phrase on what the prompts of /v1/completions begin with."""
    tokenizer = served_model.tokenizer
    if not tokenizer.opening_ids:
        return "text prompts of /v1/completions begin with their own text"
    opening = tokenizer.decode_with_special_tokens(tokenizer.opening_ids)
    if served_model.add_special_tokens:
        return f"text prompts of /v1/completions begin with {opening!r}, as the tokenizer writes"
    return (
        f"text prompts of /v1/completions begin without {opening!r}:"
        " data.add_special_tokens is false"
    )

"""The bundled inference server: HTTP in the main thread, decoding in another.

    python -m rlhf_megatron.rollout.local.local_server --model DIR --port 0 --ready-file F
        --token-file T --transfer-dir D

Every verb but GET /health needs the bearer token of --token-file. Answers are JSON; an error is
{"error": "..."} with 400 (the request is wrong), 401 (token), 403 (a web page sent it), 408 (the
body did not arrive in time), 413 (too large), 415 (packed), 503 (STALE, memory released, shutting
down) or 500.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from rlhf_megatron.device import (
    list_device_ids,
    make_deterministic,
    measure_device_memory,
    read_own_resident_bytes,
)
from rlhf_megatron.http_guard import (
    LOOPBACK_NAMES,
    GuardedServer,
    GuardRules,
    Refusal,
    RequestGuard,
    make_plain_error_response,
)
from rlhf_megatron.parent_process import exit_if_orphaned_on_signal
from rlhf_megatron.rollout.engine_interface import MEMORY_PARTS, PauseMode
from rlhf_megatron.rollout.local import local_bodies
from rlhf_megatron.rollout.local.decode_service import (
    DecodeService,
    ReleasedCacheError,
    StaleWeightsError,
)
from rlhf_megatron.rollout.socket_limits import raise_open_file_limit
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.write_errors import write_text_file

logger = logging.getLogger("rlhf_megatron.local_engine")
_MAX_BODY_BYTES = 64 << 20
_MAX_HELD_BYTES = 2 * _MAX_BODY_BYTES
RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def read_token_file(path: Path) -> str:
    """Return the token in the file. Raise ValueError when other users may read the file, or the
    token is shorter than 16 characters.
    """
    if path.stat().st_mode & 0o077:
        raise ValueError(
            f"token file {path} has mode {path.stat().st_mode & 0o777:o}; it must be 600."
        )
    token = path.read_text().strip()
    if len(token) < 16:
        raise ValueError(f"token file {path} must hold a token of at least 16 characters.")
    return token


def _describe_engine_error(error: Exception) -> Refusal | None:
    """Return the answer to an error of the decoding service; None for others."""
    if isinstance(error, StaleWeightsError):
        return Refusal(503, f"STALE: {error}")
    if isinstance(error, ReleasedCacheError):
        return Refusal(503, str(error))
    return None


class EngineVerbHandlers:
    """The HTTP handlers of the server's verbs."""

    def __init__(self, service: DecodeService, description: dict[str, Any]) -> None:
        """Answer verbs with `service`. `description` is the constant part of the answer to
        /info.
        """
        self.service = service
        self.description = description

    def make_route_table(self) -> list[web.RouteDef]:
        """Return the routes of all verbs, with their paths and methods."""
        service = self.service
        verbs: dict[str, tuple[type[local_bodies.VerbBody], Callable[[Any], Any]]] = {
            "abort": (local_bodies.AbortBody, lambda body: service.abort_calls(body.names)),
            "begin_weight_update": (
                local_bodies.BeginUpdateBody,
                lambda body: service.begin_weight_update(body.version, body.full_resync),
            ),
            "open_weights": (
                local_bodies.LentBucketBody,
                lambda body: service.update_weights(body.parse_manifest(), body.memory),
            ),
            "join_link": (
                local_bodies.JoinLinkBody,
                lambda b: service.weights.join_link(b.invitation, b.sender, b.num_senders),
            ),
            "take_weights": (
                local_bodies.ExchangedBucketBody,
                lambda body: service.update_weights(body.parse_manifest(), exchange=body.exchange),
            ),
            "leave_link": (
                local_bodies.LeaveLinkBody,
                lambda body: service.weights.links.close_link(body.name),
            ),
            "commit_weight_update": (
                local_bodies.CommitUpdateBody,
                lambda body: service.commit_weight_update(body.version),
            ),
            "pause": (local_bodies.PauseBody, lambda body: service.pause_decoding(body.mode)),
            "resume": (local_bodies.VerbBody, lambda body: service.resume_decoding()),
            "weight_digests": (
                local_bodies.VerbBody,
                lambda body: service.weights.compute_digests(),
            ),
            "release_memory": (
                local_bodies.MemoryPartsBody,
                lambda body: service.release_memory(body.parts),
            ),
            "resume_memory": (
                local_bodies.MemoryPartsBody,
                lambda body: service.resume_memory(body.parts),
            ),
        }
        return [
            web.get("/health", self.handle_health),
            web.get("/info", self.handle_info),
            web.post("/generate", self.handle_generate),
            web.post("/update_weights", self.handle_update_weights),
            *(
                web.post(f"/{name}", self._make_verb_handler(body_class, call_service))
                for name, (body_class, call_service) in verbs.items()
            ),
        ]

    def _make_verb_handler(
        self, body_class: type[local_bodies.VerbBody], call_service: Callable[[Any], Any]
    ) -> RequestHandler:
        """Return a handler that parses the body as `body_class` and calls `call_service` with it in
        the decoding loop's thread.
        """

        async def handle_verb(request: web.Request) -> web.Response:
            """Handle one request of the verb."""
            body = local_bodies.parse_verb_body(await request.read(), body_class)
            return await self._run_in_decode_loop(lambda: call_service(body))

        return handle_verb

    async def _run_in_decode_loop(self, function: Callable[[], Any]) -> web.Response:
        """Run the function in the decoding loop's thread and answer with its result as JSON, {"ok":
        true} for None.
        """
        result = await asyncio.wrap_future(self.service.run_in_decode_loop(function))
        return web.json_response({"ok": True} if result is None else result)

    async def handle_generate(self, request: web.Request) -> web.Response:
        """Generate the samples of the request's body; drop the call where the client goes away."""
        body = local_bodies.parse_verb_body(await request.read(), local_bodies.GenerateBody)
        job, admitted = self.service.submit_generate(body.to_requests(), body.name)
        try:
            await asyncio.wrap_future(admitted)
            groups = await asyncio.shield(asyncio.wrap_future(job.future))
        except asyncio.CancelledError:  # the client went away
            self.service.run_in_decode_loop(lambda: self.service.drop_job(job))
            raise
        logger.info("generated %d samples of %d prompts", sum(map(len, groups)), len(groups))
        data = await asyncio.to_thread(local_bodies.encode_samples, groups)
        return web.Response(body=data, content_type="application/json")

    async def handle_update_weights(self, request: web.Request) -> web.Response:
        """Load the bucket whose manifest is the request's body, from its file."""
        manifest = BucketManifest.parse_json(await request.text())
        return await self._run_in_decode_loop(lambda: self.service.update_weights(manifest))

    async def handle_health(self, request: web.Request) -> web.Response:
        """Answer at once how the decoding loop gets on: a long step is no illness, and whoever asks
        decides how long is too long.
        """
        return web.json_response(asdict(self.service.measure_progress()))

    async def handle_info(self, request: web.Request) -> web.Response:
        """Answer with the description of the server, its version, its pause, and its memory."""
        weights = self.service.weights
        generator = self.service.generator
        released = {"weights": weights.is_released, "kv_cache": generator.is_cache_released}
        state = {
            "version": None if weights.stale_reason else weights.version,
            "stale": weights.stale_reason is not None,
            "stale_reason": weights.stale_reason,
            "is_paused": self.service.pause_mode is not None,
            "pause_mode": self.service.pause_mode,
            "released": [part for part in MEMORY_PARTS if released[part]],
            "memory": {
                "weights_bytes": weights.num_bytes,
                "kv_cache_bytes": generator.cache_bytes,
                "resident_bytes": read_own_resident_bytes(),
                "device_bytes": measure_device_memory(generator.model.device).reserved_bytes,
            },
        }
        return web.json_response({**self.description, **state})


def _parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; exit with a message for a host that is not loopback without
    --allow-remote.
    """
    parser = argparse.ArgumentParser(
        prog="rlhf_megatron.rollout.local.local_server", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="directory in Hugging Face layout"
    )
    parser.add_argument(
        "--plugin",
        action="append",
        default=[],
        help="to run first: it may teach transformers a model",
    )
    parser.add_argument(
        "--token-file", type=Path, required=True, help="file of mode 600 with the bearer token"
    )
    parser.add_argument(
        "--transfer-dir", type=Path, help="directory of weight buckets; none: no weight sync"
    )
    parser.add_argument(
        "--ready-file", type=Path, help='written when the server listens: {"port": N, "pid": N}'
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument(
        "--allow-remote",
        action="store_true",
        help="needed to listen on another than the loopback address",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--quantization", choices=("fp8",), help="takes weight syncs in FP8 blocks")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load-weights", choices=("true", "false"), default="true")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=131072)
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help=(
            "decode each generate call by itself with deterministic algorithms: the same bits"
            " whatever else runs"
        ),
    )
    parser.add_argument(
        "--parent-pid", type=int, help="exit when this process, our parent, is gone"
    )
    args = parser.parse_args(argv)
    if args.host not in LOOPBACK_NAMES and not args.allow_remote:
        parser.error(
            f"--host {args.host} is reachable from other machines; add --allow-remote if"
            " that is meant."
        )
    return args


def _build_service(args: argparse.Namespace) -> tuple[DecodeService, dict[str, Any]]:
    """Load the model and return the decoding service, which runs, and the constant part of the
    answer to /info.
    """
    from rlhf_megatron.plugins import load_plugins
    from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
    from rlhf_megatron.rollout.local.local_model import load_local_model
    from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver

    load_plugins(args.plugin)
    if args.deterministic:
        # On CUDA torch lists no deterministic cumsum and would raise. Ours sum rows of at most a
        # few hundred numbers, each in one thread block, in the same order every time.
        make_deterministic(warn_only=args.device != "cpu")
    is_loaded = args.load_weights == "true"
    if is_loaded and args.quantization is not None:
        raise ValueError(
            f"--quantization {args.quantization} is of weight syncs; use --load-weights"
            " false with it."
        )
    model = load_local_model(args.model, args.dtype, args.device, is_loaded)
    generator = BatchGenerator(model, args.max_num_seqs, args.max_num_batched_tokens)
    weights = WeightReceiver(
        model.module, args.transfer_dir, is_loaded, is_fp8=args.quantization == "fp8"
    )
    description = {
        "kind": "local",
        "dtype": args.dtype,
        "quantization": args.quantization,
        "device": args.device,
        "deterministic": args.deterministic,
        "devices": list_device_ids()
        if model.device.type != "cpu"
        else [],  # whose memory it can open
        "max_num_seqs": args.max_num_seqs,
        "max_positions": model.max_positions,
        "vocab_size": model.vocab_size,
        "capabilities": ["abort", "pause", "digests", "release_memory", "seeds"],
        "pause_modes": get_args(PauseMode),
        "memory_parts": MEMORY_PARTS,
    }
    return DecodeService(generator, weights, is_isolated=args.deterministic), description


async def _serve_until_stopped(
    args: argparse.Namespace, token: str, service: DecodeService, description: dict[str, Any]
) -> None:
    """Serve HTTP, write the ready file, and return after SIGTERM or SIGINT with everything closed.
    Raise ValueError where the port cannot be had.
    """
    rules = GuardRules(
        bearer_key=token,
        is_loopback=args.host in LOOPBACK_NAMES,
        max_body_bytes=_MAX_BODY_BYTES,
        max_held_bytes=_MAX_HELD_BYTES,
        key_hint="the engine's token file has it",
    )
    guard = RequestGuard(rules, make_plain_error_response, _describe_engine_error)
    application = guard.make_application()
    application.add_routes(EngineVerbHandlers(service, description).make_route_table())
    server = GuardedServer(application, guard, shutdown_timeout_s=0.2)
    _, port = await server.listen(args.host, args.port)
    logger.info("listening on %s:%d", args.host, port)
    if args.ready_file:
        draft = args.ready_file.with_suffix(".draft")
        write_text_file(draft, json.dumps({"port": port, "pid": os.getpid()}))
        draft.rename(args.ready_file)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    logger.info("stopping")
    await asyncio.to_thread(service.close)
    await server.close()


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT and return 0. Return 2, with one line in the log, where the
    settings or the model are wrong.
    """
    args = _parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    if args.parent_pid is not None:
        # a thread may have started this process, and end before its own process does
        exit_if_orphaned_on_signal(signal.SIGUSR2, args.parent_pid)
    raise_open_file_limit()
    try:
        token = read_token_file(args.token_file)
        service, description = _build_service(args)
        logger.info("model %s is ready", args.model)
        asyncio.run(_serve_until_stopped(args, token, service, description))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # all is closed; taking torch's modules apart would only cost seconds

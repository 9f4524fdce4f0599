"""`rlhf-megatron load-test URL`: the load that an OpenAI-compatible server carries, measured
with one number of clients after another.

Closed loop: each client sends its next request as soon as its answer has arrived. The client takes
the times: from the request to the last byte, and for streams to the first text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.retry import may_pass
from rlhf_megatron.write_errors import explain_write_errors

QUANTILES = (50, 90, 99)
NUM_REASONS = 3  # of failures that are shown
_NO_USAGE = (
    "the stream ended without a count of its tokens (usage); the address must be that of an"
    " OpenAI-compatible server with stream_options.include_usage, or use --no-stream"
)

HEADER = (
    (
        "          requests             /s           latency, s              first token, s"
        "       token, ms"
    ),
    "clients  good failed   requests   tokens    p50    p90    p99       p50    p90    p99    p50",
)


@dataclass(frozen=True)
class LoadTestPlan:
    url: str  # with /v1
    model: str
    prompts: tuple[str | list[dict[str, str]], ...]  # texts, or chats; asked by turns
    clients: tuple[int, ...]  # of each level
    num_requests: int | None  # of a level; None: ten a client
    max_tokens: int
    is_stream: bool
    is_chat: bool
    key: str | None
    timeout_s: float


@dataclass(frozen=True)
class RequestOutcome:
    """The result of one request of a load test; `error` is "" for a success."""

    seconds: float
    first_text_s: float | None = None  # to the first text of a stream
    num_tokens: int = 0  # of the answer
    error: str = ""
    is_refused: bool = False  # with a status that the same request would get again


@dataclass(frozen=True)
class LoadLevel:
    """Figures of one number of clients. Quantiles by name, p50 and so on; of requests
    that succeeded.
    """

    clients: int
    requests: int
    failed: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    latency_s: dict[str, float]
    first_token_s: dict[str, float]  # {}: nothing was streamed
    token_s: dict[str, float]  # a token after the first, of streams
    reasons: tuple[str, ...]  # of the first failures
    is_refused: bool = False  # every request, and so it would be with more clients


async def run_load_test(plan: LoadTestPlan, print_line: Callable[[str], None]) -> list[LoadLevel]:
    """Ask the server at one number of clients after another, print a row for each, and return the
    figures. A request that fails is counted and not asked again. The level at which the server
    refuses every request is the last.
    """
    limits = aiohttp.ClientTimeout(plan.timeout_s)
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    connector = aiohttp.TCPConnector(limit=0)
    levels = []
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, headers=headers
    ) as session:
        for line in HEADER:
            print_line(line)
        for clients in plan.clients:
            levels.append(await _run_load_level(session, plan, clients))
            print_line(format_level_row(levels[-1]))
            if levels[-1].is_refused:
                break
    return levels


async def _run_load_level(
    session: aiohttp.ClientSession, plan: LoadTestPlan, num_clients: int
) -> LoadLevel:
    """Let `num_clients` clients ask, each again as soon as it has its answer, until all requests of
    the level are made. Return the figures of the level.
    """
    numbers = iter(range(plan.num_requests or 10 * num_clients))
    prompts = itertools.cycle(plan.prompts)
    outcomes: list[RequestOutcome] = []

    async def run_client() -> None:
        """Send one request after another until all requests of the level are made."""
        for _ in numbers:
            outcomes.append(await _send_request(session, plan, next(prompts)))

    clock = asyncio.get_running_loop().time
    start = clock()
    await asyncio.gather(*(run_client() for _ in range(num_clients)))
    return summarize_load_level(num_clients, outcomes, clock() - start)


def summarize_load_level(
    num_clients: int, outcomes: Sequence[RequestOutcome], seconds: float
) -> LoadLevel:
    """Return the figures of a level from the outcomes of its requests and its whole duration in
    seconds.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    paces = [
        (o.seconds - o.first_text_s) / (o.num_tokens - 1)
        for o in good
        if o.first_text_s is not None and o.num_tokens > 1
    ]
    return LoadLevel(
        num_clients,
        len(outcomes),
        len(outcomes) - len(good),
        seconds,
        len(good) / seconds,
        sum(o.num_tokens for o in good) / seconds,
        compute_quantiles([o.seconds for o in good]),
        compute_quantiles([o.first_text_s for o in good if o.first_text_s is not None]),
        compute_quantiles(paces),
        tuple(dict.fromkeys(o.error for o in outcomes if o.error))[:NUM_REASONS],
        is_refused=all(outcome.is_refused for outcome in outcomes),
    )


def compute_quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p90 and p99, with linear interpolation, and the mean by name; {}
    without values.
    """
    if not values:
        return {}
    return {f"p{q}": float(np.quantile(values, q / 100)) for q in QUANTILES} | {
        "mean": float(np.mean(values))
    }


async def _send_request(
    session: aiohttp.ClientSession, plan: LoadTestPlan, prompt: Any
) -> RequestOutcome:
    """Send one request and return its outcome, also for a failure; only cancellation is raised."""
    body: dict[str, Any] = {"model": plan.model, "max_tokens": plan.max_tokens}
    if plan.is_chat:
        body["messages"] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
    else:
        body["prompt"] = prompt
    if plan.is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    clock = asyncio.get_running_loop().time
    start = clock()
    first_s = None
    num_tokens: int | None = None
    try:
        async with session.post(
            f"{plan.url}/{'chat/' if plan.is_chat else ''}completions", json=body
        ) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                return RequestOutcome(
                    clock() - start,
                    error=f"{response.status}: {text}",
                    is_refused=not may_pass(response.status),
                )
            if not plan.is_stream:
                num_tokens = (await response.json())["usage"]["completion_tokens"]
            else:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return RequestOutcome(clock() - start, error=str(chunk["error"]))
                    if first_s is None and _has_text(chunk):
                        first_s = clock() - start
                    num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        return RequestOutcome(clock() - start, error=f"{type(error).__name__}: {error}")
    # A web page with status 200 and a server without include_usage both end here: counted as
    # answers, they would show as a fast server that makes no tokens.
    if num_tokens is None:
        return RequestOutcome(clock() - start, error=_NO_USAGE)
    return RequestOutcome(clock() - start, first_s, num_tokens)


def _has_text(chunk: dict[str, Any]) -> bool:
    """Return whether a chunk of a stream brings text, be it of the answer or of its reasoning."""
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


def format_level_row(level: LoadLevel) -> str:
    """Return the row of a level, in the columns of HEADER."""

    def format_quantiles(values: dict[str, float], scale: float = 1.0) -> str:
        """Return the three quantiles in columns, multiplied by `scale`; dashes without values."""
        found = [f"{values[f'p{q}'] * scale:6.3f}" if values else "     -" for q in QUANTILES]
        return " ".join(found)

    pace = f"{level.token_s['p50'] * 1e3:6.1f}" if level.token_s else "     -"
    return (
        f"{level.clients:7d} {level.requests - level.failed:5d} {level.failed:6d}"
        f" {level.requests_per_s:10.2f} {level.tokens_per_s:8.1f}"
        f" {format_quantiles(level.latency_s)}    {format_quantiles(level.first_token_s)} {pace}"
    )


def load_test_to_json(plan: LoadTestPlan, load_levels: Sequence[LoadLevel]) -> dict[str, Any]:
    """Return all figures and the plan of the test, without the key and the prompts."""
    asked = {name: value for name, value in asdict(plan).items() if name not in ("key", "prompts")}
    return {
        "plan": asked | {"num_prompts": len(plan.prompts)},
        "levels": [asdict(level) for level in load_levels],
    }


def plot_load_levels(load_levels: Sequence[LoadLevel], path: Path) -> None:
    """Draw tokens a second, latency and time to the first token over the number of clients, into
    the file `path`. Raise ValueError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"a picture needs matplotlib; install the extra ({format_install_command('demo')})."
        ) from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    clients = [level.clients for level in load_levels]
    panels = {
        "tokens a second": {"": [level.tokens_per_s for level in load_levels]},
        "latency, s": {
            f"p{q}": [level.latency_s.get(f"p{q}", np.nan) for level in load_levels]
            for q in QUANTILES
        },
        "first token, s": {
            f"p{q}": [level.first_token_s.get(f"p{q}", np.nan) for level in load_levels]
            for q in QUANTILES
        },
    }
    for axes, (title, lines) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for name, values in lines.items():
            axes.plot(clients, values, marker="o", label=name)
        axes.set(title=title, xlabel="clients", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, map(str, clients))
        if len(lines) > 1:
            axes.legend()
    with explain_write_errors(path):
        figure.savefig(path, dpi=120)

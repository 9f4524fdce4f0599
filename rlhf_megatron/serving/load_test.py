"""`rlhf-megatron load-test URL`: what an OpenAI-compatible server bears, at one number of clients after another.

Closed loop: each client asks again as soon as it has its answer. Durations are those of the client: from the request to
the last byte, and for streams to the first text.
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

QUANTILES = (50, 90, 99)
NUM_REASONS = 3  # of failures that are shown


@dataclass(frozen=True)
class Plan:
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
class Outcome:
    """One request."""

    seconds: float
    first_s: float | None = None  # to the first text of a stream
    num_tokens: int = 0  # of the answer
    error: str = ""


@dataclass(frozen=True)
class Level:
    """Figures of one number of clients. Quantiles by name, p50 and so on; of requests that succeeded."""

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


async def run(plan: Plan, report: Callable[[str], None]) -> list[Level]:
    """Ask, level by level. A request that fails is counted; nothing is asked twice."""
    limits = aiohttp.ClientTimeout(plan.timeout_s)
    headers = {"Authorization": f"Bearer {plan.key}"} if plan.key else {}
    connector = aiohttp.TCPConnector(limit=0)
    levels = []
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        for line in HEADER:
            report(line)
        for clients in plan.clients:
            levels.append(await _level(session, plan, clients))
            report(row_of(levels[-1]))
    return levels


async def _level(session: aiohttp.ClientSession, plan: Plan, clients: int) -> Level:
    numbers = iter(range(plan.num_requests or 10 * clients))
    prompts = itertools.cycle(plan.prompts)
    outcomes: list[Outcome] = []

    async def client() -> None:
        for _ in numbers:
            outcomes.append(await _ask(session, plan, next(prompts)))

    clock = asyncio.get_running_loop().time
    start = clock()
    await asyncio.gather(*(client() for _ in range(clients)))
    return figures(clients, outcomes, clock() - start)


def figures(clients: int, outcomes: Sequence[Outcome], seconds: float) -> Level:
    """Compute the figures of all outcomes of a level that took so long."""
    good = [outcome for outcome in outcomes if not outcome.error]
    paces = [(o.seconds - o.first_s) / (o.num_tokens - 1) for o in good if o.first_s is not None and o.num_tokens > 1]
    return Level(
        clients,
        len(outcomes),
        len(outcomes) - len(good),
        seconds,
        len(good) / seconds,
        sum(o.num_tokens for o in good) / seconds,
        quantiles([o.seconds for o in good]),
        quantiles([o.first_s for o in good if o.first_s is not None]),
        quantiles(paces),
        tuple(dict.fromkeys(o.error for o in outcomes if o.error))[:NUM_REASONS],
    )


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 with linear interpolation, and the mean."""
    if not values:
        return {}
    return {f"p{q}": float(np.quantile(values, q / 100)) for q in QUANTILES} | {"mean": float(np.mean(values))}


async def _ask(session: aiohttp.ClientSession, plan: Plan, prompt: Any) -> Outcome:
    body: dict[str, Any] = {"model": plan.model, "max_tokens": plan.max_tokens}
    if plan.is_chat:
        body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    else:
        body["prompt"] = prompt
    if plan.is_stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    clock = asyncio.get_running_loop().time
    start, first_s, num_tokens = clock(), None, 0
    try:
        async with session.post(f"{plan.url}/{'chat/' if plan.is_chat else ''}completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                return Outcome(clock() - start, error=f"{response.status}: {text}")
            if not plan.is_stream:
                num_tokens = (await response.json())["usage"]["completion_tokens"]
            else:
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return Outcome(clock() - start, error=str(chunk["error"]))
                    if first_s is None and _has_text(chunk):
                        first_s = clock() - start
                    num_tokens = (chunk.get("usage") or {}).get("completion_tokens", num_tokens)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as error:
        return Outcome(clock() - start, error=f"{type(error).__name__}: {error}")
    return Outcome(clock() - start, first_s, num_tokens)


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(c.get("text") or (c.get("delta") or {}).get("content") for c in chunk.get("choices", ()))


HEADER = (
    "          requests             /s           latency, s              first token, s       token, ms",
    "clients  good failed   requests   tokens    p50    p90    p99       p50    p90    p99    p50",
)


def row_of(level: Level) -> str:
    """A row under HEADER."""

    def shown(values: dict[str, float], scale: float = 1.0) -> str:
        found = [f"{values[f'p{q}'] * scale:6.3f}" if values else "     -" for q in QUANTILES]
        return " ".join(found)

    pace = f"{level.token_s['p50'] * 1e3:6.1f}" if level.token_s else "     -"
    return (
        f"{level.clients:7d} {level.requests - level.failed:5d} {level.failed:6d} {level.requests_per_s:10.2f}"
        f" {level.tokens_per_s:8.1f} {shown(level.latency_s)}    {shown(level.first_token_s)} {pace}"
    )


def as_json(plan: Plan, levels: Sequence[Level]) -> dict[str, Any]:
    """All figures and what was asked, without the key."""
    asked = {name: value for name, value in asdict(plan).items() if name not in ("key", "prompts")}
    return {"plan": asked | {"num_prompts": len(plan.prompts)}, "levels": [asdict(level) for level in levels]}


def plot(levels: Sequence[Level], path: Path) -> None:
    """Tokens a second, latency and first token over the number of clients. Raises ValueError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a picture needs matplotlib; install the extra (pip install '.[demo]').") from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    clients = [level.clients for level in levels]
    panels = {
        "tokens a second": {"": [level.tokens_per_s for level in levels]},
        "latency, s": {f"p{q}": [level.latency_s.get(f"p{q}", np.nan) for level in levels] for q in QUANTILES},
        "first token, s": {f"p{q}": [level.first_token_s.get(f"p{q}", np.nan) for level in levels] for q in QUANTILES},
    }
    for axes, (title, lines) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for name, values in lines.items():
            axes.plot(clients, values, marker="o", label=name)
        axes.set(title=title, xlabel="clients", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.set_xticks(clients, map(str, clients))
        if len(lines) > 1:
            axes.legend()
    figure.savefig(path, dpi=120)

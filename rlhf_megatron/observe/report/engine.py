"""What the engines did over a whole run, in a few lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.observe.report.catalogue import pattern
from rlhf_megatron.observe.report.charts import NUM_SAMPLES, keys_of
from rlhf_megatron.observe.report.facts import Fact, setting
from rlhf_megatron.observe.report.records import Row, RunFiles

FINISH_REASON = "rollout/finish_reason/<reason>"
ONLY_WITH_ENGINES = "sync/seconds", "rollout/engine_failures"
LENGTHS = "response_length/mean", "prompt_length/mean"
TROUBLE = (
    ("rollout/engine_failures", "failures"),
    ("rollout/engine_restarts", "restarts"),
    ("rollout/requests_reissued", "prompts asked for again"),
)


def engine_facts(run: RunFiles) -> list[Fact]:
    """A line each; what the rows do not tell is left out. Empty for a replay, which has no engine."""
    rows = run.steps
    if not any(key in row.metrics for row in rows for key in ONLY_WITH_ENGINES):
        return []
    kind, count = setting(run, "rollout.engine"), setting(run, "rollout.num_engines")
    found = [
        Fact("Engine", f"{count} × {kind}" if kind and count else str(kind or "")),
        Fact("Generation", _generation(rows), "response tokens over the time of `generate`"),
        Fact("Samples ended by", _finish_reasons(rows)),
        Fact("Prompt tokens from the prefix cache", _cached(rows)),
        Fact("Retractions", _total(rows, "rollout/num_retractions"), "key-value caches dropped and computed again"),
        Fact("Samples of several policy versions", _of_several_versions(rows)),
        Fact("Trouble", _trouble(rows)),
        Fact("Weight sync", _syncs(rows)),
        Fact("Bytes moved / needed", _moved(rows), "what the senders sent over what the engines had to get"),
    ]
    return [fact for fact in found if fact.value]


PHASES = ("training", "sync", "generation")
MEMORY = (  # of a phase: key, heading
    ("device_bytes", "trainer on its device"),
    ("offloaded_bytes", "trainer in host memory"),
    ("engine_bytes", "engine"),
    ("used_bytes", "device, all processes"),
    ("host_bytes", "a rank's process in host memory"),
)


def memory_rows(run: RunFiles) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row a phase of a colocated run: the most that any step had. No rows where nothing was told."""
    known = set(keys_of(run.steps))
    columns = [(key, name) for key, name in MEMORY if any(f"memory/{phase}_{key}" in known for phase in PHASES)]
    rows = []
    for phase in PHASES:
        cells = []
        for key, _ in columns:
            values = [row.metrics[name] for row in run.steps if (name := f"memory/{phase}_{key}") in row.metrics]
            cells.append(as_bytes(max(values)) if values else "–")
        if any(cell != "–" for cell in cells):
            rows.append([phase, *cells])
    return ["phase", *(name for _, name in columns)], rows


def _sum(rows: Sequence[Row], key: str, weight: str = "") -> float:
    """Of the rows that have it, each times its `weight`."""
    return sum(row.metrics[key] * (row.metrics.get(weight, 0.0) if weight else 1) for row in rows if key in row.metrics)


def _with(rows: Sequence[Row], *keys: str) -> list[Row]:
    return [row for row in rows if all(key in row.metrics for key in keys)]


def _generation(rows: Sequence[Row]) -> str:
    rows = _with(rows, "timing_s/generate", "timing_s/step", LENGTHS[0], NUM_SAMPLES)
    seconds, steps = _sum(rows, "timing_s/generate"), _sum(rows, "timing_s/step")
    if not seconds or not steps:
        return ""
    tokens = _sum(rows, LENGTHS[0], weight=NUM_SAMPLES)
    share = 100 * seconds / steps
    return f"{tokens / seconds:,.0f} tokens/s; {tokens:,.0f} tokens in {share:.0f} % of the time of steps"


def _finish_reasons(rows: Sequence[Row]) -> str:
    names = [(match["name"], key) for key in keys_of(rows) if (match := pattern(FINISH_REASON).match(key))]
    samples = _sum(rows, NUM_SAMPLES)
    if not names or not samples:
        return ""
    shares = sorted(((_sum(rows, key, weight=NUM_SAMPLES) / samples, name) for name, key in names), reverse=True)
    return ", ".join(f"{name} {_percent(share)}" for share, name in shares if share)


def _cached(rows: Sequence[Row]) -> str:
    """Steps count by their prompt tokens."""
    rows = _with(rows, "rollout/cached_token_share", LENGTHS[1], NUM_SAMPLES)
    tokens = [row.metrics[LENGTHS[1]] * row.metrics[NUM_SAMPLES] for row in rows]
    if not sum(tokens):
        return ""
    hits = [count * row.metrics["rollout/cached_token_share"] for count, row in zip(tokens, rows, strict=True)]
    return _percent(sum(hits) / sum(tokens))


def _of_several_versions(rows: Sequence[Row]) -> str:
    rows = _with(rows, "rollout/samples_of_several_versions", NUM_SAMPLES)
    if not rows:
        return ""
    return f"{_sum(rows, 'rollout/samples_of_several_versions', weight=NUM_SAMPLES):,.0f}"


def _trouble(rows: Sequence[Row]) -> str:
    known = [(_sum(rows, key), name) for key, name in TROUBLE if _with(rows, key)]
    if not known:
        return ""
    return ", ".join(f"{count:,.0f} {name}" for count, name in known if count) or "none"


def _total(rows: Sequence[Row], key: str) -> str:
    return f"{_sum(rows, key):,.0f}" if _with(rows, key) else ""


def _syncs(rows: Sequence[Row]) -> str:
    syncs = _with(rows, "sync/seconds")
    if not syncs:
        return ""
    seconds, steps = _sum(syncs, "sync/seconds"), _sum(syncs, "timing_s/step")
    share = f", {100 * seconds / steps:.1f} % of the time of steps" if steps else ""
    size = max((row.metrics.get("sync/num_bytes", 0.0) for row in syncs), default=0.0)
    return f"{seconds / len(syncs):.3g} s each{share}{f', {as_bytes(size)}' if size else ''}"


def _moved(rows: Sequence[Row]) -> str:
    syncs = _with(rows, "sync/bytes_moved", "sync/bytes_needed")
    moved, needed = _sum(syncs, "sync/bytes_moved"), _sum(syncs, "sync/bytes_needed")
    return f"{moved / needed:.2f} ({as_bytes(moved)} / {as_bytes(needed)})" if needed else ""


def _percent(share: float) -> str:
    """ "12.3 %"; what is little is not nothing."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def as_bytes(count: float) -> str:
    """ "1.5 GB", in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

"""A certificate says what was checked and what came out, as Markdown for people and JSON for scripts."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_megatron.observe.run_dir import write_json
from rlhf_megatron.observe.run_facts import versions
from rlhf_megatron.proof.check import compare, memory_table
from rlhf_megatron.proof.check.fold_config import CHANGED, NUM_STEPS
from rlhf_megatron.proof.check.memory_table import Memory
from rlhf_megatron.proof.check.proof import LayoutResult, Proof

PACKAGES = ("rlhf-megatron", "megatron-core", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Certificate:
    """The result of one `rlhf-megatron check`."""

    command: str
    config: str  # the file
    overrides: tuple[str, ...]
    layout: str  # the run's own; of both pools where the critic has one
    num_ranks: int
    has_files: bool  # weights, tokenizer and data on disk were checked as well
    notes: tuple[str, ...]
    memory: Memory
    proof: Proof | None  # None: --no-run

    @property
    def verdict(self) -> str:
        if self.proof is None:
            return "not run"
        return "passed" if self.proof.is_ok else "failed"


def over_the_bar(result: LayoutResult) -> list[compare.Row]:
    return [row for row in result.rows if not row.is_ok]


def write(certificate: Certificate, directory: Path) -> Path:
    """certificate.json and certificate.md; returns the latter."""
    write_json(directory / "certificate.json", as_json(certificate))
    path = directory / "certificate.md"
    path.write_text(as_markdown(certificate), encoding="utf-8")
    return path


def as_json(certificate: Certificate) -> dict[str, Any]:
    """Plain values; a bar or error that is not finite is text."""
    c = certificate
    as_they_are = ("command", "config", "overrides", "layout", "num_ranks", "has_files", "notes")
    return {
        "verdict": c.verdict,
        **{name: getattr(c, name) for name in as_they_are},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": versions(PACKAGES),
        "memory": {
            "total_bytes": c.memory.total,
            "stages": [asdict(stage) | {"totals": stage.totals} for stage in c.memory.stages],
            "critic_stages": [asdict(stage) | {"totals": stage.totals} for stage in c.memory.critic],
            "has_critic_pool": c.memory.has_critic_pool,
            "reference_bytes": list(c.memory.reference),
            "weight_sync": [asdict(traffic) for traffic in c.memory.traffic],
            "head": None if c.memory.head is None else asdict(c.memory.head),
            "activations": list(c.memory.activations),
            "critic_activations": list(c.memory.critic_activations),
            "peaks": [c.memory.peak(stage) for stage in range(len(c.memory.stages))],
        },
        "proof": None if c.proof is None else _proof_json(c.proof),
    }


def as_markdown(certificate: Certificate) -> str:
    c = certificate
    lines = [f"# Check of {c.config}: {c.verdict}", "", f"    {c.command}", ""]
    lines += [f"Layout: {c.layout}, {c.num_ranks} ranks. Versions: {_listing(versions(PACKAGES))}."]
    files = (
        "model, tokenizer and data on disk" if c.has_files else "config.json only; weights, tokenizer and data were not"
    )
    lines += ["", "## Configuration", "", f"No rule is broken. Looked at: all settings; {files}.", *_bullets(c.notes)]
    lines += ["", "## Memory", "", *_table(memory_table.HEADER, memory_table.rows(c.memory)), ""]
    lines += memory_table.notes(c.memory)
    lines += ["", "## Two steps against one rank", ""]
    if c.proof is None:
        return "\n".join([*lines, "Not run (--no-run): nothing is said about the layout's results.", ""])
    return "\n".join([*lines, *_proof_markdown(c.proof), ""])


def _proof_markdown(proof: Proof) -> list[str]:
    lines = [
        f"{NUM_STEPS} steps of the real loop: launcher, controller, hosts, engine, weight syncs. The first layout"
        " records its rollouts; one unsharded rank and the other layouts train on them again from the same weights.",
        "",
        "Other than in the run itself:",
        *_bullets(CHANGED),
        "- the model: " + _listing({key: value for key, value in proof.model.items() if key in _SIZES}) + ".",
        "",
        f"{proof.num_syncs} weight syncs, each committed only after the digests of all tensors that stood in the engine"
        " were those of what was exported.",
    ]
    for result in proof.layouts:
        lines += ["", *_layout_markdown(result)]
    return lines


def _layout_markdown(result: LayoutResult) -> list[str]:
    lines = [f"### {result.folded}: {'passed' if result.is_ok else 'FAILED'}", ""]
    lines.append(f"{result.folded.num_ranks} processes, {result.seconds:.0f} s. Other than the run's own layout:")
    lines += _bullets(result.folded.differences or ("nothing",))
    if result.problems:
        lines += ["", *(f"    {line}" for problem in result.problems for line in problem.splitlines())]
    over = over_the_bar(result)
    if result.rows:
        equal = sum(row.bar == 0 and row.is_ok for row in result.rows)
        found = [_cells(row) for row in compare.worst([row for row in result.rows if row.bar])]
        lines += [
            "",
            f"{len(result.rows)} figures, {len(over)} over the bar. {equal} that must not differ at all (rewards,",
        ]
        lines += ["lengths, rates, bytes of a weight sync) do not. Of the others the worst of each kind:", ""]
        lines += _table(_COLUMNS, found)
    if over:
        lines += ["", "All figures over the bar:", "", *_table(_COLUMNS, [_cells(row) for row in over])]
    return lines


_SIZES = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads") + (
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_COLUMNS = ("figure", "where", "layout", "one rank", "error", "bar", "")


def _cells(row: compare.Row) -> Sequence[str]:
    figures = (f"{row.value:.6g}", f"{row.one_rank:.6g}", f"{row.error:.2g}", f"{row.bar:.2g}")
    return (row.quantity, row.where, *figures, "" if row.is_ok else "OVER THE BAR")


def _proof_json(proof: Proof) -> dict[str, Any]:
    return {
        "changed": list(CHANGED),
        "model": dict(proof.model),
        "num_syncs": proof.num_syncs,
        "one_rank_seconds": round(proof.one_rank_seconds, 1),
        "layouts": [
            {
                "name": result.folded.name,
                "layout": str(result.folded),
                "num_ranks": result.folded.num_ranks,
                "megatron": asdict(result.folded.actor.megatron),
                "critic_megatron": None if result.folded.critic is None else asdict(result.folded.critic.megatron),
                "differences": list(result.folded.differences),
                "is_ok": result.is_ok,
                "seconds": round(result.seconds, 1),
                "problems": list(result.problems),
                "rows": [_row_json(row) for row in result.rows],
            }
            for result in proof.layouts
        ],
    }


def _row_json(row: compare.Row) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    values = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in asdict(row).items()}
    return values | {"is_ok": row.is_ok}


def _listing(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _bullets(items: Sequence[str]) -> list[str]:
    return [f"- {item}." for item in items]


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [header, ["---"] * len(header), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]

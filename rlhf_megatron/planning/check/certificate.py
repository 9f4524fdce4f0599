"""A certificate says what was checked and what came out, as Markdown for people and
JSON for scripts.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.observe.run_dir import write_json_atomically
from rlhf_megatron.controller.observe.run_facts import read_package_versions
from rlhf_megatron.planning.check import memory_table, run_comparison
from rlhf_megatron.planning.check.fold_config import CHANGES_IN_EVERY_FOLD, NUM_STEPS
from rlhf_megatron.planning.check.layout_proof import LayoutProof, LayoutProofResult
from rlhf_megatron.planning.check.memory_table import RunMemory
from rlhf_megatron.ranks.kernels.head_memory import HeadMemoryBound
from rlhf_megatron.weights.bucket_plan import StageTraffic
from rlhf_megatron.write_errors import write_text_file

REPORTED_PACKAGES = ("rlhf-megatron", "megatron-core", "torch", "transformers", "numpy")

_SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
) + (
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_COLUMNS = ("figure", "where", "layout", "one rank", "error", "bar", "")


@dataclass(frozen=True)
class LayoutCertificate:
    """The result of one `rlhf-megatron check`."""

    command: str
    config: str  # the file
    overrides: tuple[str, ...]
    layout: str  # the run's own; of both pools where the critic has one
    num_ranks: int
    has_files: bool  # weights, tokenizer and data on disk were checked as well
    notes: tuple[str, ...]
    memory: RunMemory
    proof: LayoutProof | None  # None: --no-run

    @property
    def verdict(self) -> str:
        """Return "passed" or "failed", or "not run" where there is no proof."""
        if self.proof is None:
            return "not run"
        return "passed" if self.proof.is_ok else "failed"


def list_rows_over_bar(layout_result: LayoutProofResult) -> list[run_comparison.ComparisonRow]:
    """Return the figures of a layout whose error is over the bar."""
    return [row for row in layout_result.rows if not row.is_ok]


def write_certificate(certificate: LayoutCertificate, directory: Path) -> Path:
    """Write certificate.json and certificate.md, and return the path of certificate.md."""
    write_json_atomically(directory / "certificate.json", certificate_to_json(certificate))
    path = directory / "certificate.md"
    write_text_file(path, certificate_to_markdown(certificate))
    return path


def certificate_to_json(certificate: LayoutCertificate) -> dict[str, Any]:
    """Return the certificate as plain values; a bar or error that is not finite is text."""
    c = certificate
    as_they_are = ("command", "config", "overrides", "layout", "num_ranks", "has_files", "notes")
    return {
        "verdict": c.verdict,
        **{name: getattr(c, name) for name in as_they_are},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": read_package_versions(REPORTED_PACKAGES),
        "memory": {
            "total_bytes": c.memory.total_bytes,
            "stages": [asdict(stage) | {"totals": stage.totals} for stage in c.memory.stages],
            "critic_stages": [
                asdict(stage) | {"totals": stage.totals} for stage in c.memory.critic_stages
            ],
            "has_critic_pool": c.memory.has_critic_pool,
            "reference_bytes": list(c.memory.reference_bytes),
            "weight_sync": [_traffic_to_json(traffic) for traffic in c.memory.sync_traffic],
            "head": None if c.memory.head_memory is None else _head_to_json(c.memory.head_memory),
            "activations": list(c.memory.activation_bytes),
            "critic_activations": list(c.memory.critic_activation_bytes),
            "peaks": [c.memory.compute_peak_bytes(stage) for stage in range(len(c.memory.stages))],
        },
        "proof": None if c.proof is None else _proof_to_json(c.proof),
    }


def certificate_to_markdown(certificate: LayoutCertificate) -> str:
    """Return the certificate as Markdown."""
    c = certificate
    lines = [f"# Check of {c.config}: {c.verdict}", "", f"    {c.command}", ""]
    lines += [
        f"Layout: {c.layout}, {c.num_ranks} ranks."
        f" Versions: {_join_key_values(read_package_versions(REPORTED_PACKAGES))}."
    ]
    files = (
        "model, tokenizer and data on disk"
        if c.has_files
        else "config.json only; weights, tokenizer and data were not"
    )
    lines += [
        "",
        "## Configuration",
        "",
        f"No rule is broken. Looked at: all settings; {files}.",
        *_make_bullet_lines(c.notes),
    ]
    lines += [
        "",
        "## Memory",
        "",
        *_make_markdown_table(memory_table.HEADER, memory_table.make_memory_rows(c.memory)),
        "",
    ]
    lines += memory_table.make_memory_notes(c.memory)
    lines += ["", "## Two steps against one rank", ""]
    if c.proof is None:
        return "\n".join(
            [*lines, "Not run (--no-run): nothing is said about the layout's results.", ""]
        )
    return "\n".join([*lines, *_proof_to_markdown(c.proof), ""])


def _proof_to_markdown(proof: LayoutProof) -> list[str]:
    """Return the lines on the proof and each of its layouts."""
    lines = [
        (
            f"{NUM_STEPS} steps of the real loop: launcher, controller, hosts, engine, weight"
            " syncs. The first layout records its rollouts; one unsharded rank and the other"
            " layouts train on them again from the same weights."
        ),
        "",
        "Other than in the run itself:",
        *_make_bullet_lines(CHANGES_IN_EVERY_FOLD),
        "- the model: "
        + _join_key_values({key: value for key, value in proof.model.items() if key in _SIZES})
        + ".",
        "",
        (
            f"{proof.num_syncs} weight syncs, each committed only after the digests of all tensors"
            " that stood in the engine were those of what was exported."
        ),
    ]
    for result in proof.layouts:
        lines += ["", *_layout_to_markdown(result)]
    return lines


def _layout_to_markdown(layout_result: LayoutProofResult) -> list[str]:
    """Return the lines on one layout: its differences, problems, worst figures, and figures over
    the bar.
    """
    lines = [f"### {layout_result.folded_run}: {'passed' if layout_result.is_ok else 'FAILED'}", ""]
    lines.append(
        f"{layout_result.folded_run.num_ranks} processes, {layout_result.seconds:.0f} s. Other"
        " than the run's own layout:"
    )
    lines += _make_bullet_lines(layout_result.folded_run.differences or ("nothing",))
    if layout_result.problems:
        lines += [
            "",
            *(f"    {line}" for problem in layout_result.problems for line in problem.splitlines()),
        ]
    over = list_rows_over_bar(layout_result)
    if layout_result.rows:
        equal = sum(row.bar == 0 and row.is_ok for row in layout_result.rows)
        found = [
            _make_row_cells(row)
            for row in run_comparison.select_worst_rows(
                [row for row in layout_result.rows if row.bar]
            )
        ]
        lines += [
            "",
            (
                f"{len(layout_result.rows)} figures, {len(over)} over the bar. {equal} that must"
                " not differ at all (rewards,"
            ),
        ]
        lines += [
            "lengths, rates, bytes of a weight sync) do not. Of the others the worst of each kind:",
            "",
        ]
        lines += _make_markdown_table(_COLUMNS, found)
    if over:
        lines += [
            "",
            "All figures over the bar:",
            "",
            *_make_markdown_table(_COLUMNS, [_make_row_cells(row) for row in over]),
        ]
    return lines


def _make_row_cells(row: run_comparison.ComparisonRow) -> Sequence[str]:
    """Return the table cells of a figure."""
    figures = (f"{row.value:.6g}", f"{row.one_rank:.6g}", f"{row.error:.2g}", f"{row.bar:.2g}")
    return (row.quantity, row.where, *figures, "" if row.is_ok else "OVER THE BAR")


def _traffic_to_json(traffic: StageTraffic) -> dict[str, int]:
    """Return bytes and buckets under the keys that certificates have had from the first on."""
    return {
        "stage": traffic.stage,
        "num_buckets": traffic.num_buckets,
        "gathered": traffic.gathered_bytes,
        "sent": traffic.sent_bytes,
        "peak_buffer": traffic.peak_buffer_bytes,
    }


def _head_to_json(head: HeadMemoryBound) -> dict[str, int]:
    """Return bytes under the keys that certificates have had from the first on."""
    return {
        "tile": head.tile_bytes,
        "hidden_gradient": head.hidden_gradient_bytes,
        "stash": head.stash_bytes,
        "peak": head.peak_bytes,
    }


def _proof_to_json(proof: LayoutProof) -> dict[str, Any]:
    """Return the proof as plain values."""
    return {
        "changed": list(CHANGES_IN_EVERY_FOLD),
        "model": dict(proof.model),
        "num_syncs": proof.num_syncs,
        "one_rank_seconds": round(proof.one_rank_seconds, 1),
        "layouts": [
            {
                "name": result.folded_run.name,
                "layout": str(result.folded_run),
                "num_ranks": result.folded_run.num_ranks,
                "megatron": asdict(result.folded_run.actor.megatron),
                "critic_megatron": None
                if result.folded_run.critic is None
                else asdict(result.folded_run.critic.megatron),
                "differences": list(result.folded_run.differences),
                "is_ok": result.is_ok,
                "seconds": round(result.seconds, 1),
                "problems": list(result.problems),
                "rows": [_row_to_json(row) for row in result.rows],
            }
            for result in proof.layouts
        ],
    }


def _row_to_json(row: run_comparison.ComparisonRow) -> dict[str, Any]:
    """Return a figure as plain values; NaN and infinity become text, which JSON does not have as
    numbers.
    """
    values = {
        key: str(v) if isinstance(v, float) and not math.isfinite(v) else v
        for key, v in asdict(row).items()
    }
    return values | {"is_ok": row.is_ok}


def _join_key_values(values: dict[str, Any]) -> str:
    """Return the entries as text, such as "torch 2.4, numpy 2.0"."""
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _make_bullet_lines(sentences: Sequence[str]) -> list[str]:
    """Return each sentence as a Markdown bullet with a full stop."""
    return [f"- {item}." for item in sentences]


def _make_markdown_table(header: Sequence[str], body_rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    rows = [header, ["---"] * len(header), *body_rows]
    return ["| " + " | ".join(row) + " |" for row in rows]

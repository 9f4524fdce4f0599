"""What is known of a skip, as the JSON object that a capsule holds: where which numbers were not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.data.plan import NO_OP, NO_OP_LENGTH, ReplicaPlan
from rlhf_megatron.observe.metrics.batch import BadColumn, describe, sample_name
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.dispatch import plan_call
from rlhf_megatron.runtime.proxies import TrainedProxy
from rlhf_megatron.workers.findings import Findings

NUM_SHOWN = 4  # of each list in a summary


@dataclass
class RoleSkips:
    """Of one role in one step of the loop. The first one is the one that a capsule is made of."""

    worker: TrainedProxy
    token_budget: int
    arguments: dict[str, object]  # of its update
    place: Path | None  # where its hosts write; None: no capsule
    count: int = 0
    first_number: int = 0  # of the mini-batch, counted over the step
    first: TokenBatch | None = None

    @property
    def role(self) -> str:
        return self.worker.role


def of_update(step: int, skips: RoleSkips, samples: TrainBatch, findings: Sequence[Findings]) -> dict[str, Any]:
    """Of a mini-batch that was skipped. `findings`: of all ranks of the role's pool, in rank order."""
    layout = skips.worker.layout
    plans = plan_call(samples, layout, skips.token_budget)
    errors = sorted({found.error for found in findings if found.error})
    return {
        "kind": "update",
        "step": step,
        "role": skips.role,
        "mini_batch": skips.first_number,
        "num_skipped": skips.count,
        "layout": str(layout),
        "token_budget": skips.token_budget,
        "arguments": skips.arguments,
        "plan": [asdict(plan) for plan in plans],
        "weights_error": "; ".join(errors),
        **seen(samples, layout, plans, findings),
    }


def of_batch(
    step: int, worker: TrainedProxy, batch: TrainBatch, columns: Sequence[BadColumn], errors: Sequence[str]
) -> dict[str, Any]:
    """Of a whole step that was not trained on."""
    return {
        "kind": "batch",
        "step": step,
        "role": worker.role,
        "layout": str(worker.layout),
        "columns": [
            {"name": column.name, "num_tokens": column.num_tokens, "samples": _ids(batch, column.samples)}
            for column in columns
        ],
        "what": describe(columns, batch),
        "weights_error": "; ".join(sorted(set(errors))),
    }


def seen(
    samples: TrainBatch, layout: Layout, plans: Sequence[ReplicaPlan], findings: Sequence[Findings]
) -> dict[str, Any]:
    """What the ranks saw, with micro-batches and tokens as those of `samples`."""
    losses: dict[tuple[int, int], float] = {}  # (replica, micro-batch) -> sum over the cp ranks
    tokens: dict[int, set[int]] = {}  # sample -> positions
    for rank, found in enumerate(findings):
        place = layout.coordinates(rank)
        for micro_batch, loss in enumerate(found.losses if place.tp == 0 else ()):
            losses[place.dp, micro_batch] = losses.get((place.dp, micro_batch), 0.0) + loss
        for sample, position in _placed(samples, plans[place.dp], found.tokens):
            tokens.setdefault(sample, set()).add(position)
    micro_batches = [
        {"replica": dp, "micro_batch": number, "loss": _number(loss), "samples": _samples(samples, plans[dp], number)}
        for (dp, number), loss in sorted(losses.items())
    ]
    return {
        "grad_norm": _number(findings[0].grad_norm),
        "ranks": [
            {
                "where": found.where,
                "gradients": [str(bad) for bad in found.gradients],
                "parameters": [str(bad) for bad in found.parameters],
            }
            for found in findings
            if found.gradients or found.parameters
        ],
        "first": _first(layout, findings),
        "micro_batches": micro_batches,
        "tokens": [
            {"sample": int(samples.sample_ids[sample]), "prompt": samples.prompts[sample], "positions": sorted(found)}
            for sample, found in sorted(tokens.items())
        ],
        "num_bad_tokens": sum(found.num_tokens for found, tp in _with_tp(findings, layout) if tp == 0),
        "samples": [sample_name(samples, sample) for sample in range(len(samples))],
    }


def summary(facts: Mapping[str, Any]) -> str:
    """One line of the facts of an update."""
    parts = [f"gradient norm {facts['grad_norm']}"]
    for kind, words in (("parameters", "parameters"), ("gradients", "gradients")):
        named = [f"[{rank['where']}] {bad}" for rank in facts["ranks"] for bad in rank[kind]]
        if named:
            parts.append(f"{words} not finite: {_some(named)}")
    losses = [entry for entry in facts["micro_batches"] if isinstance(entry["loss"], str)]
    if losses:
        ids = sorted({sample for entry in losses for sample in entry["samples"]})
        parts.append(f"{len(losses)} micro-batches with such a loss (samples {_some(list(map(str, ids)))})")
    if facts["tokens"]:
        ids = [str(entry["sample"]) for entry in facts["tokens"]]
        parts.append(f"log-probs or values of {facts['num_bad_tokens']} tokens (samples {_some(ids)})")
    return "; ".join(parts)


def _first(layout: Layout, findings: Sequence[Findings]) -> str:
    """Forward passes come first, from the first stage to the last; gradients then, from the last to the first."""
    seen_first: list[tuple[bool, int, int, str]] = []
    for rank, found in enumerate(findings):
        if found.first:
            is_gradient, stage = found.first.startswith("gradient"), layout.coordinates(rank).pp
            seen_first.append((is_gradient, -stage if is_gradient else stage, rank, f"[{found.where}] {found.first}"))
    return min(seen_first)[3] if seen_first else ""


def _with_tp(findings: Sequence[Findings], layout: Layout) -> list[tuple[Findings, int]]:
    return [(found, layout.coordinates(rank).tp) for rank, found in enumerate(findings)]


def _placed(batch: TokenBatch, plan: ReplicaPlan, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Tokens of a replica's shard as (sample of the batch, position in it)."""
    lengths = [NO_OP_LENGTH if sample == NO_OP else int(batch.lengths[sample]) for sample in plan.samples]
    ends = torch.tensor(lengths).cumsum(0)
    placed = []
    for token in tokens:
        index = int(torch.searchsorted(ends, token, right=True))
        placed.append((plan.samples[index], token - int(ends[index]) + lengths[index]))
    return placed


def _samples(batch: TrainBatch, plan: ReplicaPlan, micro_batch: int) -> list[int]:
    held = [plan.samples[index] for index in plan.micro_batches[micro_batch]]
    return _ids(batch, [sample for sample in held if sample != NO_OP])


def _ids(batch: TrainBatch, samples: Sequence[int]) -> list[int]:
    return [int(batch.sample_ids[sample]) for sample in samples]


def _number(value: float) -> float | str:
    """JSON has no word for nan and inf."""
    return value if math.isfinite(value) else repr(value)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more

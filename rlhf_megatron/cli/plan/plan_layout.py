"""`rlhf-megatron plan layout MODEL_DIR --gpus N --gpu NAME --seq N`: layouts that fit,
and their cost.
"""

from __future__ import annotations

import argparse

import torch

from rlhf_megatron.planning.plan.gpu_memory import GB, GIB, GPU_MEMORY_GB
from rlhf_megatron.planning.plan.layout_search import (
    LayoutPlan,
    LayoutRequest,
    explain_no_fit,
    iterate_layout_plans,
    select_fitting_plans,
)
from rlhf_megatron.ranks.workers.peak_memory import ModelElementCounts, TrainedModelSpec
from rlhf_megatron.weights.hf_reader import read_hf_config


def run_plan_layout_command(args: argparse.Namespace) -> None:
    """Print a table of the layouts of a model that fit into the GPUs, with memory and
    communication. Raise ValueError if none fits, with the nearest one.
    """
    hf_config = {k: v for k, v in read_hf_config(args.model).items() if k != "quantization_config"}
    model = TrainedModelSpec(hf_config, getattr(torch, args.dtype), args.seq)
    question = LayoutRequest(
        model,
        ModelElementCounts.from_model(model),
        args.gpus,
        GPU_MEMORY_GB[args.gpu] * GB,
        args.samples,
    )
    found = list(iterate_layout_plans(question))
    fits = select_fitting_plans(found, question.max_rank_bytes)
    if not fits:
        raise ValueError(explain_no_fit(question, found))
    print(
        f"{len(fits)} of {len({str(plan.layout) for plan in found})} layouts fit into"
        f" {question.max_rank_bytes / GIB:.1f} GiB of {args.gpu} with samples of {args.seq} tokens,"
        f" {args.samples} an optimizer step; fewest ranks a copy first"
    )
    header = (
        "layout",
        "recompute",
        "states",
        "activations",
        "head",
        "peak GiB",
        "bubble",
        "tp",
        "ep",
        "pp",
        "dp GB",
    )
    rows = [header, *(_format_layout_row(plan) for plan in fits[: args.most])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print(
        "tp, ep, pp: what a rank sends for one sample, GB of 10^9 bytes, as networks count; dp:"
        " what it sends for an optimizer step. Times need a GPU: gpu-check."
    )


def _format_layout_row(plan: LayoutPlan) -> tuple[str, ...]:
    """Return the cells of a layout's table row: memory, bubble, and bytes sent."""
    own = plan.layout
    ends = (
        f" first {own.num_first_stage_layers} last {own.num_last_stage_layers}"
        if own.num_first_stage_layers
        else ""
    )
    sizes = (plan.state_bytes, plan.activation_bytes, plan.head_bytes, plan.peak_bytes)
    sent = (plan.tp_bytes, plan.ep_bytes, plan.pp_bytes, plan.dp_bytes)
    cells = [
        f"{own}{ends}",
        "full" if plan.is_recomputed else "none",
        *(f"{size / GIB:.1f}" for size in sizes),
    ]
    return (*cells, f"{plan.bubble_fraction:.1%}", *(f"{size / GB:.2f}" for size in sent))

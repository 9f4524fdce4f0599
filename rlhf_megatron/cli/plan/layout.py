"""`rlhf-megatron plan layout MODEL_DIR --gpus N --gpu NAME --seq N`: layouts that fit, and their cost."""

from __future__ import annotations

import argparse

import torch

from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.proof.plan.gpus import GB, GPUS
from rlhf_megatron.proof.plan.layouts import Plan, Question, best, plans, refusal
from rlhf_megatron.workers.activations import Sizes, Trained


def layout(args: argparse.Namespace) -> None:
    """Print a table. Raises ValueError where nothing fits, with the nearest that does not."""
    hf_config = {k: v for k, v in read_hf_config(args.model).items() if k != "quantization_config"}
    model = Trained(hf_config, getattr(torch, args.dtype), args.seq)
    question = Question(model, Sizes.of(model), args.gpus, GPUS[args.gpu] * GB, args.samples)
    found = list(plans(question))
    fits = best(found, question.limit)
    if not fits:
        raise ValueError(refusal(question, found))
    print(
        f"{len(fits)} of {len({str(plan.layout) for plan in found})} layouts fit into {question.limit / GB:.1f} GB of"
        f" {args.gpu} with samples of {args.seq} tokens, {args.samples} an optimizer step; fewest ranks a copy first"
    )
    header = ("layout", "recompute", "states", "activations", "head", "peak GB", "bubble", "tp", "ep", "pp", "dp GB")
    rows = [header, *(_row(plan) for plan in fits[: args.most])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print("tp, ep, pp: that a rank sends for one sample, GB; dp: of an optimizer step. Times need a GPU: gpu-check.")


def _row(plan: Plan) -> tuple[str, ...]:
    own = plan.layout
    ends = f" first {own.first_layers} last {own.last_layers}" if own.first_layers else ""
    sizes = (plan.states, plan.activations, plan.head, plan.peak)
    sent = (plan.tp_bytes, plan.ep_bytes, plan.pp_bytes, plan.dp_bytes)
    cells = [f"{own}{ends}", "full" if plan.is_recomputed else "none", *(f"{size / GB:.1f}" for size in sizes)]
    return (*cells, f"{plan.bubble:.1%}", *(f"{size / GB:.2f}" for size in sent))

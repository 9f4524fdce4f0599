"""C4: the LM head with its vocabulary over 2 and 4 ranks equals the whole one, and how many
collectives that takes.

Ranks are processes over gloo. Every rank does the whole problem too and compares: log-prob and
entropy in nats, gradients by the L2 norm of the difference. Collectives are counted by the group
itself, so none is overlooked. `split`: hidden states come in parts of the sequence, which must be
gathered (again in the backward pass) and summed in parts: one collective more in each direction.
"""

# T tokens, V vocabulary (with padding), H hidden

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.head_problem import (
    Problem,
    Shape,
    fused_outputs,
    make_problem,
    relative_error,
)
from benchmarks.kernels.measure import in_children

BAR = 1e-5
TIMEOUT_S = 120
SHAPE = Shape(256, 128, 20008)
QUICK_SHAPE = Shape(32, 16, 504)
NUM_PADDED = 5
# In the forward pass: verl 3, slime 3 or 4 a chunk of the sequence, NeMo-RL 2 or 3 a chunk,
# Megatron's fused loss 2.
ANCHOR = "others: 2 to 4, some a chunk of the sequence"


def num_collectives(group: Any) -> int:
    """How many the group has done since it was made: gloo numbers them."""
    return 0 if group is None else group._get_sequence_number_for_group()


def gradients(problem: Problem, **arguments: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Log-probs, entropies, gradients, and the number of collectives of each direction."""
    group = arguments.get("tp_group")
    start = num_collectives(group)
    outputs = fused_outputs(problem, chunk_size=1024, **arguments)
    middle = num_collectives(group)
    assert outputs.entropies_R is not None
    generator = torch.Generator().manual_seed(5)
    upstream_2T = torch.randn(2, len(problem.targets_T), generator=generator)
    loss = (outputs.log_probs_R * upstream_2T[0] + outputs.entropies_R * upstream_2T[1]).sum()
    grads = torch.autograd.grad(loss, [problem.hidden_TH, problem.weight_VH])
    end = num_collectives(group)
    names = ("log_probs", "entropies", "grad_hidden", "grad_weight")
    found = dict(
        zip(
            names, (outputs.log_probs_R.detach(), outputs.entropies_R.detach(), *grads), strict=True
        )
    )
    return found, {"forward": middle - start, "backward": end - middle}


def compare(rank: int, size: int, store: str, shape: Shape, is_split: bool) -> dict[str, Any]:
    """On one rank: errors against the whole problem, counts, and whether its results are rank
    0's bit for bit.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        whole = make_problem(shape)
        vocab = shape.vocab - NUM_PADDED
        whole = Problem(whole.hidden_TH, whole.weight_VH, whole.targets_T.clamp(max=vocab - 1))
        expected, _ = gradients(whole, vocab_size=vocab)
        rows = shape.vocab // size
        tokens = shape.num_tokens // size
        mine_V = slice(rank * rows, (rank + 1) * rows)
        mine_T = slice(rank * tokens, (rank + 1) * tokens) if is_split else slice(None)
        shard = Problem(
            whole.hidden_TH.detach()[mine_T].clone().requires_grad_(),
            whole.weight_VH.detach()[mine_V].clone().requires_grad_(),
            whole.targets_T,
        )
        arguments = {
            "vocab_start": rank * rows,
            "tp_group": dist.group.WORLD,
            "is_sequence_split": is_split,
        }
        found, counts = gradients(shard, vocab_size=vocab, **arguments)
        parts = {
            **expected,
            "grad_hidden": expected["grad_hidden"][mine_T],
            "grad_weight": expected["grad_weight"][mine_V],
        }
        first = torch.stack([found["log_probs"], found["entropies"]])
        of_rank_0 = first.clone()
        dist.broadcast(of_rank_0, 0)
        return {
            "log_prob": (found["log_probs"] - parts["log_probs"]).abs().max().item(),
            "entropy": (found["entropies"] - parts["entropies"]).abs().max().item(),
            "grad_hidden": relative_error(found["grad_hidden"], parts["grad_hidden"]),
            "grad_weight": relative_error(found["grad_weight"], parts["grad_weight"]),
            "is_equal": torch.equal(first, of_rank_0),
            **counts,
        }
    finally:
        dist.destroy_process_group()


def run_ranks(size: int, shape: Shape, is_split: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        job = {
            "size": size,
            "store": str(Path(folder) / "store"),
            "shape": shape,
            "is_split": is_split,
        }
        ranks: list[dict[str, Any]] = in_children(
            compare, [{"rank": rank, **job} for rank in range(size)], TIMEOUT_S
        )
        return ranks


def figures_of(size: int, is_split: bool, ranks: list[dict[str, Any]]) -> list[Figure]:
    label = f"tp {size}{', split' if is_split else ''}"
    most = 2.0 if is_split else 1.0
    errors = {"log-prob": "log_prob", "entropy": "entropy"}
    figures = [
        Figure(f"{label}: {what} against tp 1", max(rank[key] for rank in ranks), "nat", "", BAR)
        for what, key in errors.items()
    ]
    gradient = max(max(rank["grad_hidden"], rank["grad_weight"]) for rank in ranks)
    figures.append(Figure(f"{label}: gradients against tp 1", gradient, "relative", "", BAR))
    other = sum(not rank["is_equal"] for rank in ranks)
    figures.append(Figure(f"{label}: ranks with other bits", float(other), "ranks", "", 0.0))
    for direction in ("forward", "backward"):
        count = float(max(rank[direction] for rank in ranks))
        anchor = ANCHOR if direction == "forward" else ""
        figures.append(Figure(f"{label}: collectives, {direction}", count, "", anchor, most))
    return figures


def run(is_quick: bool) -> CaseResult:
    shape = QUICK_SHAPE if is_quick else SHAPE
    figures: list[Figure] = []
    details: dict[str, Any] = {"shape": str(shape), "padded_rows": NUM_PADDED}
    for size in (2,) if is_quick else (2, 4):
        for is_split in (False, True):
            ranks = run_ranks(size, shape, is_split)
            figures += figures_of(size, is_split, ranks)
            details[f"tp {size}{', split' if is_split else ''}"] = ranks
    return CaseResult(tuple(figures), details)


CASE = Case("C4", "LM head over tensor-parallel ranks: equality and collectives", run)

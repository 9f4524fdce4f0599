"""The same through megatron-core in float32: actor and critic on worker processes, gradients before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity.cases import NUM_SAMPLES, Cut, Recipe, Role
from benchmarks.parity.layouts import Axes
from benchmarks.parity.run import Case, DistPool, make_case, run_cell
from benchmarks.parity.sharded import run_on_rank
from benchmarks.split_pure import PARAMS, token_budget
from rlhf_megatron.algorithms.aggregate import LOSS_AGG_MODES
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.schema import PolicyLossConfig
from rlhf_megatron.data.batch import token_index
from rlhf_megatron.parallel.layout import layout_of

FAMILIES: dict[str, tuple[str, Role]] = {
    "qwen3_tied": ("qwen3_tied", "actor"),
    "llama_untied": ("llama_untied", "actor"),
    "qwen3_critic": ("qwen3_tied", "critic"),
}
LOSS_FAMILY, LOSS_PARTS = "qwen3_tied", 7
LOSS_LAYOUTS = (Axes(dp=2), Axes(cp=2), Axes(pp=2, vpp=2), Axes(dp=2, cp=2))
"""Of the policy losses one by one."""
LAYOUTS = (
    Axes(),
    Axes(dp=2),
    Axes(cp=2),
    Axes(pp=2),
    Axes(pp=2, vpp=2),
    Axes(tp=2, sequence_parallel=True),
    Axes(dp=2, cp=2),
    Axes(dp=2, pp=2),
    Axes(cp=2, pp=2),
)
PARTS = (1, 2, 7)
GRADIENT = "gradient/0/"


@dataclass(frozen=True)
class Cell:
    """What was run: how the mini-batch was cut, and its gradient by Hugging Face name."""

    layout: str
    mode: str
    parts: int
    is_shuffled: bool
    gradients: dict[str, Tensor]


def cut_of(batch: dict[str, Tensor], axes: Axes, mode: str, parts: int) -> Cut:
    """One optimizer step on all samples."""
    layout = layout_of(axes.megatron, axes.num_ranks)
    budget = token_budget(batch["offsets"].diff(), layout, parts)
    return Cut(f"{mode}, budget 1/{parts}", ((0, NUM_SAMPLES),), budget, mode)


def shuffled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same samples in another order."""
    order = torch.randperm(batch["offsets"].numel() - 1, generator=torch.Generator().manual_seed(13)).tolist()
    tokens = token_index(batch["offsets"], order)
    lengths = batch["offsets"].diff()[order]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {name: offsets if name == "offsets" else column[tokens] for name, column in batch.items()}


def run_layout(
    pool: DistPool,
    case: Case,
    axes: Axes,
    modes: Sequence[str] = LOSS_AGG_MODES,
    parts: Sequence[int] = PARTS,
    is_shuffled: bool = False,
    job: Callable[..., Any] = run_on_rank,
) -> Iterator[Cell]:
    """Every mode with every token budget in one layout. Raises JobError."""
    batch = shuffled(case.batch) if is_shuffled else case.batch
    asked = [(mode, share) for mode in modes for share in parts]
    cuts = [cut_of(batch, axes, mode, share) for mode, share in asked]
    results = run_cell(pool, replace(case, batch=batch, references={}), axes, Recipe(), cuts, job)
    for (mode, share), cut in zip(asked, cuts, strict=True):
        found = results[cut.name]
        gradients = {name.removeprefix(GRADIENT): x for name, x in found.items() if name.startswith(GRADIENT)}
        yield Cell(axes.name, mode, share, is_shuffled, gradients)


def run_losses(
    pool: DistPool, case: Case, axes: Axes, parts: int, losses: Sequence[str] = tuple(POLICY_LOSSES)
) -> Iterator[Cell]:
    """Every policy loss in one layout; `Cell.mode` is its name. A mean over sequences of their means, as the losses of
    sequences have it; in the order of the batch, by which its samples are known to a loss that picks tokens."""
    cuts = []
    for name in losses:
        cut = cut_of(case.batch, axes, "seq-mean-token-mean", parts)
        cuts.append(replace(cut, name=name, policy_loss=PolicyLossConfig(name, PARAMS.get(name, {}))))
    results = run_cell(pool, replace(case, references={}), axes, Recipe(), cuts, run_on_rank)
    for cut in cuts:
        found = results[cut.name]
        gradients = {name.removeprefix(GRADIENT): x for name, x in found.items() if name.startswith(GRADIENT)}
        yield Cell(axes.name, cut.name, parts, False, gradients)


def run_family(
    pool: DistPool, family: str, layouts: Sequence[Axes], report: Callable[[str], None]
) -> tuple[dict[str, dict[str, Tensor]], list[Cell]]:
    """(mode -> gradient on one rank in one micro-batch; every other cell). `family`: of FAMILIES."""
    name, role = FAMILIES[family]
    case = make_case(name, Recipe(), cuts=(), role=role)
    baseline = {cell.mode: cell.gradients for cell in run_layout(pool, case, Axes(), parts=(1,))}
    cells = []
    for axes in layouts:
        for is_shuffled in (False, True):
            found = run_layout(pool, case, axes, is_shuffled=is_shuffled)
            is_baseline = axes == Axes() and not is_shuffled
            cells += [cell for cell in found if not (is_baseline and cell.parts == 1)]
        report(f"{family}, {axes.name}")
    return baseline, cells

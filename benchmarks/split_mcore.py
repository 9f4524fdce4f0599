"""The same through megatron-core in float32: actor and critic on worker processes, gradients before
the first step.
"""

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
from benchmarks.split_correction import SCALES
from benchmarks.split_pure import PARAMS, token_budget
from rlhf_megatron.algorithms.loss_aggregation import AGGREGATIONS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.schema import PolicyLossConfig, RolloutCorrectionConfig
from rlhf_megatron.data.batch import make_token_index
from rlhf_megatron.weights.parallel_layout import make_parallel_layout

FAMILIES: dict[str, tuple[str, Role]] = {
    "qwen3_tied": ("qwen3_tied", "actor"),
    "llama_untied": ("llama_untied", "actor"),
    "qwen3_critic": ("qwen3_tied", "critic"),
}
LOSS_FAMILY = "qwen3_tied"
LOSS_PARTS = 7
LOSS_LAYOUTS = (Axes(dp=2), Axes(cp=2), Axes(pp=2, vpp=2), Axes(dp=2, cp=2))
"""Of the policy losses one by one."""
CORRECTIONS: dict[str, tuple[str, RolloutCorrectionConfig]] = {
    "gspo, decoupled_geo_rs_seq_tis, batch norm, veto": (
        "gspo",
        RolloutCorrectionConfig(
            "decoupled_geo_rs_seq_tis",
            rollout_is_batch_normalize=True,
            rollout_token_veto_threshold=0.5,
        ),
    ),
    "ppo_clip, decoupled_token_icepop": (
        "ppo_clip",
        RolloutCorrectionConfig("decoupled_token_icepop", rollout_is_threshold="0.8_1.4"),
    ),
    "reinforce, bypass_pg_token_icepop, token_k3": (
        "reinforce",
        RolloutCorrectionConfig(
            "bypass_pg_token_icepop", rollout_rs=("token_k3",), rollout_rs_threshold=("0.1",)
        ),
    ),
    "reinforce, bypass_pg_is, three filters, veto": (
        "reinforce",
        RolloutCorrectionConfig(
            "bypass_pg_is",
            rollout_is_batch_normalize=True,
            rollout_rs=("seq_mean_k1", "seq_max_k2", "seq_sum_k3"),
            rollout_rs_threshold=("0.8_1.25", "0.6", "2.0"),
            rollout_token_veto_threshold=0.3,
        ),
    ),
    "ppo_clip, bypass_ppo_clip_k3_rs": (
        "ppo_clip",
        RolloutCorrectionConfig(
            "bypass_ppo_clip_k3_rs", rollout_rs=("seq_mean_k3",), rollout_rs_threshold=("0.06",)
        ),
    ),
}
"""Name -> (policy loss, correction); sequences are weighed and rejected that
context-parallel ranks share.
"""
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
    layout = make_parallel_layout(axes.megatron, axes.num_ranks)
    budget = token_budget(batch["offsets"].diff(), layout, parts)
    return Cut(f"{mode}, budget 1/{parts}", ((0, NUM_SAMPLES),), budget, mode)


def shuffled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same samples in another order."""
    order = torch.randperm(
        batch["offsets"].numel() - 1, generator=torch.Generator().manual_seed(13)
    ).tolist()
    tokens = make_token_index(batch["offsets"], order)
    lengths = batch["offsets"].diff()[order]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {
        name: offsets if name == "offsets" else column[tokens] for name, column in batch.items()
    }


def run_layout(
    pool: DistPool,
    case: Case,
    axes: Axes,
    modes: Sequence[str] = AGGREGATIONS,
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
        gradients = {
            name.removeprefix(GRADIENT): x for name, x in found.items() if name.startswith(GRADIENT)
        }
        yield Cell(axes.name, mode, share, is_shuffled, gradients)


def run_losses(
    pool: DistPool,
    case: Case,
    axes: Axes,
    parts: int,
    losses: Sequence[str] = tuple(POLICY_LOSSES),
    corrections: Sequence[str] = tuple(CORRECTIONS),
) -> Iterator[Cell]:
    """Every policy loss in one layout, and every correction of CORRECTIONS; `Cell.mode` is its
    name. A mean over sequences of their means, as the losses of sequences have it; in the order of
    the batch, by which its samples are known to a loss that picks tokens.
    """
    batch = with_engine(case.batch)
    plain = cut_of(batch, axes, "seq-mean-token-mean", parts)
    cuts = [replace(plain, name=name, policy_loss=_loss(name)) for name in losses]
    for name in corrections:
        loss, section = CORRECTIONS[name]
        cuts.append(replace(plain, name=name, policy_loss=_loss(loss), correction=section))
    results = run_cell(
        pool, replace(case, batch=batch, references={}), axes, Recipe(), cuts, run_on_rank
    )
    for cut in cuts:
        found = results[cut.name]
        gradients = {
            name.removeprefix(GRADIENT): x for name, x in found.items() if name.startswith(GRADIENT)
        }
        yield Cell(axes.name, cut.name, parts, False, gradients)


def _loss(name: str) -> PolicyLossConfig:
    return PolicyLossConfig(name, PARAMS.get(name, {}))


def with_engine(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """With an engine that is off from the old policy, a sample in turn by the factors
    of `split_correction`.
    """
    generator = torch.Generator().manual_seed(29)
    old = batch["old_log_probs"]
    lengths = batch["offsets"].diff()
    scale_T = torch.tensor(SCALES)[torch.arange(lengths.numel()) % len(SCALES)].repeat_interleave(
        lengths
    )
    engine = old + scale_T * torch.randn(old.numel(), generator=generator)
    return {**batch, "rollout_log_probs": engine * batch["response_mask"]}


def run_family(
    pool: DistPool, family: str, layouts: Sequence[Axes], report: Callable[[str], None]
) -> tuple[dict[str, dict[str, Tensor]], list[Cell]]:
    """(mode -> gradient on one rank in one micro-batch; every other cell).
    `family`: of FAMILIES.
    """
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

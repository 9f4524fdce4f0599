"""C8: policy and value loss of rows with metrics, forward and backward, against autograd over the
same formulas.

Measured is what the workers call (`PolicyRowLoss`), the eager forms of `eager`, as published
trainers write them, and these under torch.compile where a C++ compiler is found, which takes a
minute: loss, gradients and metric sums of ppo_clip alone, and with a k3 KL term and an entropy
bonus. All must agree before anything is timed. Kernels that packages have for these losses
(liger-kernel's `triton_grpo_loss`) need a GPU: `benchmarks/gpu` has those.
"""

# R rows

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.case import Case, CaseResult, Figure
from benchmarks.kernels.eager import eager_policy, eager_value
from benchmarks.kernels.measure import Parts, Turns, compile_problem, cpu_seconds, take_turns
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.ranks.kernels.policy_row_loss import PolicyRowLoss
from rlhf_megatron.ranks.kernels.weighted_row_loss import (
    LossAndMetricSums,
    compute_value_loss_sums,
    weigh_loss_terms,
)
from rlhf_megatron.ranks.workers.actor_losses import make_policy_row_loss

SIZES = (32768, 1 << 20)
QUICK_SIZES = (500,)
# small problems are called several times, for the clock
ROWS_OF_A_TURN = 1 << 21
MOST_CALLS = 64
BAR = 0.45
BAR_OF_COMPILED = 1.0
AGREEMENT = 1e-5
CLIPRANGE_VALUE = 0.5
CONFIGS = {
    "ppo_clip": ActorConfig(),
    "ppo_clip + KL + entropy": ActorConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01),
}


@dataclass(frozen=True)
class Found:
    value: Tensor
    sums: dict[str, Tensor]
    grads: tuple[Tensor, ...]


Call = Callable[[], Found]


def make_columns(num_rows: int) -> dict[str, Tensor]:
    """A late update of a mini-batch: some tokens are outside of the range, a few far outside."""
    generator = torch.Generator().manual_seed(num_rows)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_rows, generator=generator)

    old = -normal(1.0).abs()
    mean = torch.full((num_rows,), 1 / num_rows)
    return {
        "log_probs": old + normal(0.2),
        "entropies": normal(1.0).abs(),
        "old_log_probs": old,
        "ref_log_probs": old + normal(0.2),
        "advantages": normal(1.0),
        "values": normal(1.0),
        "old_values": normal(1.0),
        "returns": normal(1.0),
        "loss_weights": mean,
        "metric_weights": mean.clone(),
    }


def policy_call(
    name: str, columns: dict[str, Tensor], is_fused: bool, is_compiled: bool = False
) -> Call:
    row_loss = make_policy_row_loss(CONFIGS[name])
    has_all = row_loss.needs_entropy
    given = {key: column for key, column in columns.items() if has_all or key != "ref_log_probs"}
    leaves = [
        columns[key].clone().requires_grad_()
        for key in ("log_probs", *(["entropies"] if has_all else []))
    ]
    forward: Any = row_loss if is_fused else partial(eager_sums, row_loss)
    if is_compiled:
        forward = torch.compile(forward)

    def call() -> Found:
        value, sums = forward(leaves[0], leaves[1] if has_all else None, given)
        return Found(value, sums, torch.autograd.grad(value, leaves))

    return call


def eager_sums(
    row_loss: PolicyRowLoss,
    log_probs_R: Tensor,
    entropies_R: Tensor | None,
    columns: dict[str, Tensor],
) -> LossAndMetricSums:
    """What `row_loss` returns, by autograd."""
    inputs = row_loss.collect_loss_inputs(log_probs_R, entropies_R, columns, None)
    value, sums = weigh_loss_terms(
        eager_policy(inputs, row_loss.params, row_loss.regularizers), columns
    )
    return value, {"actor/loss": value.detach(), **sums}


def value_call(columns: dict[str, Tensor], is_fused: bool, is_compiled: bool = False) -> Call:
    values = columns["values"].clone().requires_grad_()
    forward: Any = compute_value_loss_sums if is_fused else eager_value_sums
    if is_compiled:
        forward = torch.compile(forward)

    def call() -> Found:
        value, sums = forward(values, columns, CLIPRANGE_VALUE)
        return Found(value, sums, torch.autograd.grad(value, [values]))

    return call


def eager_value_sums(
    values_R: Tensor, columns: dict[str, Tensor], cliprange_value: float
) -> LossAndMetricSums:
    return weigh_loss_terms(
        eager_value(values_R, columns["old_values"], columns["returns"], cliprange_value), columns
    )


def difference(found: Found, expected: Found) -> float:
    """Largest: of gradients relative to their largest entry;
    of sums, which may cancel, as it is.
    """
    assert list(found.sums) == list(expected.sums), "other metrics"
    sums = zip(
        [found.value, *found.sums.values()], [expected.value, *expected.sums.values()], strict=True
    )
    differences = [(one - other).abs().item() for one, other in sums]
    for one, other in zip(found.grads, expected.grads, strict=True):
        differences.append(((one - other).abs().max() / other.abs().max()).item())
    return max(differences)


def repeated(call: Call, num_rows: int) -> Callable[[], Parts]:
    """CPU seconds of one call, of several in a row."""
    count = min(max(ROWS_OF_A_TURN // num_rows, 1), MOST_CALLS)

    def several() -> None:
        for _ in range(count):
            call()

    def run() -> Parts:
        call()
        return {"total": cpu_seconds(several) / count}

    return run


def measure(
    what: str, calls: dict[str, Call], num_rows: int, is_quick: bool
) -> tuple[list[Figure], Turns]:
    eager = calls["eager"]()
    figures = [
        Figure(
            f"{what}, {name}: difference",
            difference(call(), eager),
            "of the largest",
            "eager",
            AGREEMENT,
        )
        for name, call in calls.items()
        if name != "eager"
    ]
    pairs = [("fused", name) for name in calls if name != "fused"]
    turns = take_turns({name: repeated(call, num_rows) for name, call in calls.items()}, pairs)
    ratio = turns.ratio("fused", "eager")
    spread = f"eager, {1e3 * min(turns.seconds('eager')):.2f} ms; spread {100 * ratio.spread:.1f} %"
    figures.append(Figure(f"{what}, time", ratio.value, "x", spread, None if is_quick else BAR))
    if "compiled" in calls:
        ratio = turns.ratio("fused", "compiled")
        spread = (
            f"torch.compile, {1e3 * min(turns.seconds('compiled')):.2f} ms; spread"
            f" {100 * ratio.spread:.1f} %"
        )
        figures.append(Figure(f"{what}, time", ratio.value, "x", spread, BAR_OF_COMPILED))
    return figures, turns


def run(is_quick: bool) -> CaseResult:
    figures: list[Figure] = []
    cpu_s: dict[str, Any] = {}
    problem = "a quick run" if is_quick else compile_problem()
    for num_rows in QUICK_SIZES if is_quick else SIZES:
        columns = make_columns(num_rows)
        problems = {
            name: {k: policy_call(name, columns, k == "fused") for k in ("fused", "eager")}
            for name in CONFIGS
        }
        problems["value loss"] = {
            kind: value_call(columns, kind == "fused") for kind in ("fused", "eager")
        }
        if not problem:
            for name in CONFIGS:
                problems[name]["compiled"] = policy_call(
                    name, columns, is_fused=False, is_compiled=True
                )
            problems["value loss"]["compiled"] = value_call(
                columns, is_fused=False, is_compiled=True
            )
        for name, calls in problems.items():
            what = f"{name}, {num_rows} rows"
            found, turns = measure(what, calls, num_rows, is_quick)
            figures += found
            cpu_s[what] = turns.summary()
    return CaseResult(
        tuple(figures), {"cpu_s": cpu_s, "absent": {"torch.compile": problem} if problem else {}}
    )


CASE = Case("C8", "policy and value loss, forward and backward", run)

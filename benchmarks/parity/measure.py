"""Figures of one result against the float64 reference, and the bar that float32 transformers sets.

    quantity           error of a tensor x against the exact one y
    log_probs          max |x - y| over response tokens, before the first optimizer step; nats
    entropies          the same
    log_probs_after    the same after the last optimizer step
    gradient           ||x - y|| / ||y|| a tensor, before the first step, not clipped
    update             ||x - y|| / ||y|| a tensor, of weights after the last step minus weights before the first
    grad_norm          |x - y| / y, the worst of the steps
    copies             max |x - x'| between ranks that hold the same weights, after the last step; must be 0

Of a critic: values, values_after as log_probs, in the unit of rewards; value_gradient and so on for the others. Weight
and bias of its head are one tensor, "score": a bias of one element can be right by luck in float32, and its bar near 0.

The bar is BAR times the same error of transformers in float32. A single number can be right by luck, so the bar of
grad_norm is BAR times ||x - y|| / ||y|| of the whole float32 gradient of that step, which bounds the norm's own error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.parity.cases import Role

BAR = 3.0
Result = dict[str, Tensor]
TOKEN_QUANTITIES: dict[Role, tuple[str, ...]] = {
    "actor": ("log_probs", "entropies", "log_probs_after"),
    "critic": ("values", "values_after"),
}
HEAD = "score"  # of a critic
PREFIX: dict[Role, str] = {"actor": "", "critic": "value_"}  # of the other quantities


@dataclass(frozen=True)
class Row:
    """The tensor of a quantity that is nearest to its bar, or farthest over it."""

    family: str
    layout: str
    cut: str
    quantity: str
    tensor: str
    error: float
    float32_error: float
    bar: float
    ok: bool


def measure(
    family: str,
    layout: str,
    cut: str,
    start: Result,
    mask: Tensor,
    exact: Result,
    single: Result,
    result: Result,
    role: Role = "actor",
) -> list[Row]:
    """One row a quantity. `start`: weights before the first step; `mask` [T]: response tokens."""
    prefix = PREFIX[role]
    found = {
        **_token_figures(TOKEN_QUANTITIES[role], mask, exact, single, result),
        f"{prefix}gradient": list(_tensor_figures("gradient/0/", None, exact, single, result)),
        f"{prefix}update": list(_tensor_figures("weights/", start, exact, single, result)),
        f"{prefix}grad_norm": list(_norm_figures(exact, single, result)),
        f"{prefix}copies": list(_copy_figures(result)),
    }
    rows = []
    for quantity, figures in found.items():
        if not figures:
            continue
        tensor, error, float32_error = max(figures, key=_closeness)
        bar = BAR * float32_error
        # not (a <= b): a NaN is a miss
        rows.append(Row(family, layout, cut, quantity, tensor, error, float32_error, bar, bool(error <= bar)))
    return rows


Figure = tuple[str, float, float]  # tensor, error, float32 error


def _closeness(figure: Figure) -> float:
    """Error over bar. NaN counts as infinitely far over it."""
    _, error, float32_error = figure
    if error != error:
        return float("inf")
    return error / (BAR * float32_error) if float32_error else (float("inf") if error else 0.0)


def _token_figures(
    names: tuple[str, ...], mask: Tensor, exact: Result, single: Result, result: Result
) -> dict[str, list[Figure]]:
    def error(name: str, x: Result) -> float:
        return float((x[name].double() - exact[name].double())[mask].abs().max())

    return {name: [(name, error(name, result), error(name, single))] for name in names}


def _tensor_figures(
    prefix: str, start: Result | None, exact: Result, single: Result, result: Result
) -> Iterator[Figure]:
    names = [key.removeprefix(prefix) for key in exact if key.startswith(prefix)]
    others = {key.removeprefix(prefix) for key in result if key.startswith(prefix)}
    assert set(names) == others, f"tensors that one side lacks: {sorted(set(names) ^ others)}"
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(HEAD if name.startswith(f"{HEAD}.") else name, []).append(name)

    def whole(x: Result, parts: list[str]) -> Tensor:
        tensors = [x[prefix + part].double() - (start[part].double() if start else 0.0) for part in parts]
        return torch.cat([tensor.flatten() for tensor in tensors])

    for name, parts in groups.items():
        truth, value, alone = (whole(x, parts) for x in (exact, result, single))
        yield name, _relative(value, truth), _relative(alone, truth)


def _norm_figures(exact: Result, single: Result, result: Result) -> Iterator[Figure]:
    for step, (truth, value) in enumerate(zip(exact["grad_norms"], result["grad_norms"], strict=True)):
        keys = [key for key in exact if key.startswith(f"gradient/{step}/")]
        whole, alone = (torch.cat([x[key].double().flatten() for key in keys]) for x in (exact, single))
        yield f"step {step}", float((value.double() - truth).abs() / truth), _relative(alone, whole)


def _copy_figures(result: Result) -> Iterator[Figure]:
    for key, value in result.items():
        if key.startswith("copies/"):
            _, copy, name = key.split("/")
            yield f"{name} ({copy})", float((value.double() - result[f"weights/{name}"].double()).abs().max()), 0.0


def _relative(value: Tensor, truth: Tensor) -> float:
    return float((value - truth).norm() / truth.norm())

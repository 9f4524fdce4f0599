"""Figures of one result against the float64 reference, and the bar that float32 transformers sets.

    quantity           error of a tensor x against the exact one y
    log_probs          max |x - y| over response tokens, before the first optimizer step; nats
    entropies          the same
    log_probs_after    the same after the last optimizer step
    gradient           ||x - y|| / ||y|| a tensor, before the first step, not clipped
    update             ||x - y|| / ||y|| a tensor, of weights after the last step minus weights
                       before the first
    grad_norm          |x - y| / y, the worst of the steps
    routes             tokens x layers whose set of experts is another one, before the first step
    copies             max |x - x'| between ranks that hold the same weights, after the last
                       step; must be 0

Of a critic: values, values_after as log_probs, in the unit of rewards; value_gradient and so on for
the others. Weight and bias of its head are one tensor, "score": a bias of one element can be right
by luck in float32, and its bar near 0.

The bar is BAR times float32's own error: that of transformers in float32, a root mean square over
some orders of summation (`rounding`). Where a layout's own run is over it, the layout runs in the
same orders, and the root mean square counts: one run is one draw of its rounding, a mistake is in
all of them. A single number can be right by luck, so the bar of grad_norm is BAR times ||x - y|| /
||y|| of the whole float32 gradient of that step, which bounds the norm's own error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.parity.cases import Role
from benchmarks.parity.rounding import Figure, relative_error, scale, share_of_bar, tensor_figures

BAR = 3.0
Result = dict[str, Tensor]
TOKEN_QUANTITIES: dict[Role, tuple[str, ...]] = {
    "actor": ("log_probs", "entropies", "log_probs_after"),
    "critic": ("values", "values_after"),
}
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
    num_runs: int = 1  # of the layout; of several `error` is the root mean square


def measure(
    family: str,
    layout: str,
    cut: str,
    start: Result,
    mask: Tensor,
    exact: Result,
    draws: Sequence[Result],
    results: Sequence[Result],
    role: Role = "actor",
) -> list[Row]:
    """One row a quantity. `start`: weights before the first step; `mask` [T]: response tokens;
    `draws`: in float32; `results`: of each run of the layout.
    """
    runs = [_figures(start, mask, exact, draws, result, role) for result in results]
    rows = []
    for quantity, figures in runs[0].items():
        if not figures:
            continue
        errors = zip(*([error for _, error, _ in run[quantity]] for run in runs), strict=True)
        settled = [
            (name, scale(found), own) for (name, _, own), found in zip(figures, errors, strict=True)
        ]
        tensor, error, float32_error = max(settled, key=lambda figure: share_of_bar(figure, BAR))
        bar = BAR * float32_error
        # not (a <= b): a NaN is a miss
        row = Row(
            family,
            layout,
            cut,
            quantity,
            tensor,
            error,
            float32_error,
            bar,
            bool(error <= bar),
            len(runs),
        )
        rows.append(row)
    return rows


def _figures(
    start: Result, mask: Tensor, exact: Result, draws: Sequence[Result], result: Result, role: Role
) -> dict[str, list[Figure]]:
    prefix = PREFIX[role]
    gradients = [_part(draw, "gradient/0/") for draw in draws]
    updates = [_update(draw, start) for draw in draws]
    return {
        **_token_figures(TOKEN_QUANTITIES[role], mask, exact, draws, result),
        f"{prefix}gradient": list(
            tensor_figures(_part(result, "gradient/0/"), _part(exact, "gradient/0/"), gradients)
        ),
        f"{prefix}update": list(
            tensor_figures(_update(result, start), _update(exact, start), updates)
        ),
        f"{prefix}grad_norm": list(_norm_figures(exact, draws, result)),
        f"{prefix}copies": list(_copy_figures(result)),
        f"{prefix}routes": list(_route_figures(exact, draws, result)),
    }


def _token_figures(
    names: tuple[str, ...], mask: Tensor, exact: Result, draws: Sequence[Result], result: Result
) -> dict[str, list[Figure]]:
    def error(name: str, x: Result) -> float:
        return float((x[name].double() - exact[name].double())[mask].abs().max())

    return {
        name: [(name, error(name, result), scale(error(name, draw) for draw in draws))]
        for name in names
    }


def _update(x: Result, start: Result) -> Result:
    """Weights after the last step minus weights before the first, in float64."""
    return {
        name: tensor.double() - start[name].double()
        for name, tensor in _part(x, "weights/").items()
    }


def _part(x: Result, prefix: str) -> Result:
    return {key.removeprefix(prefix): tensor for key, tensor in x.items() if key.startswith(prefix)}


def _norm_figures(exact: Result, draws: Sequence[Result], result: Result) -> Iterator[Figure]:
    def whole(x: Result, step: int) -> Tensor:
        return torch.cat(
            [x[key].double().flatten() for key in exact if key.startswith(f"gradient/{step}/")]
        )

    for step, (truth, value) in enumerate(
        zip(exact["grad_norms"], result["grad_norms"], strict=True)
    ):
        own = scale(relative_error(whole(draw, step), whole(exact, step)) for draw in draws)
        yield f"step {step}", float((value.double() - truth).abs() / truth), own


def _route_figures(exact: Result, draws: Sequence[Result], result: Result) -> Iterator[Figure]:
    if "routes" in exact:

        def num_others(x: Result, layer: int) -> float:
            return float((x["routes"] != exact["routes"])[:, layer].any(-1).sum())

        for layer in range(exact["routes"].shape[1]):
            yield (
                f"router {layer}",
                num_others(result, layer),
                scale(num_others(draw, layer) for draw in draws),
            )


def _copy_figures(result: Result) -> Iterator[Figure]:
    for key, value in result.items():
        if key.startswith("copies/"):
            _, copy, name = key.split("/")
            yield (
                f"{name} ({copy})",
                float((value.double() - result[f"weights/{name}"].double()).abs().max()),
                0.0,
            )

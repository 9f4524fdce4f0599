"""How large float32's own error is: the root mean square over some orders of summation.

One run in float32 is one draw of its rounding error, and a bar that rests on one draw holds by luck
of the processor. Here the hidden units of a model are renumbered, by which the model stays what it
is: each order of them sums in another order in every matrix product and norm, and so rounds anew.
Nothing of the package is used.

Models with experts take more orders: an expert's gradient comes from a few tokens, of which one may
weigh most. Its error is then that of one number, and four draws of one number tell its size to a
factor of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

NUM_ORDERS = 4  # more of them would move the root mean square of a dense model by a few per cent
NUM_ORDERS_OF_EXPERTS = 8
HEAD = "score"  # a critic's: a linear layer of one output
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_ROWS = ("o_proj", "down_proj", "w2", "norm", *_NORMS)  # what writes hidden units
_ATTENTION = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
_MLP = ("gate_proj", "up_proj", "gate", "router", "w1", "w3")
_COLUMNS = ("embed_tokens", "lm_head", "score", *_ATTENTION, *_MLP)  # what reads them

Tensors = Mapping[str, Tensor]
Figure = tuple[str, float, float]  # tensor, error, float32's own error


def orders(hidden_size: int, has_experts: bool = False) -> list[Tensor]:
    """Some orders of the hidden units. The first is the one that they have."""
    generator = torch.Generator().manual_seed(23)
    num = NUM_ORDERS_OF_EXPERTS if has_experts else NUM_ORDERS
    return [
        torch.arange(hidden_size),
        *(torch.randperm(hidden_size, generator=generator) for _ in range(num - 1)),
    ]


def renumbered(tensors: Tensors, order: Tensor) -> dict[str, Tensor]:
    """Weights, gradients or updates by Hugging Face name, their hidden units in `order`;
    `order.argsort()` undoes it.

    Names may have a prefix that ends in "/". Tensors without hidden units stay as they are.
    """
    return {
        name: tensor if (axis := _axis(name)) is None else tensor.index_select(axis, order)
        for name, tensor in tensors.items()
    }


def _axis(name: str) -> int | None:
    """The dimension of a tensor that is counted in hidden units."""
    module, kind = name.rpartition("/")[2].split(".")[-2:] if "." in name else ("", "")
    if module.isdecimal():  # an expert of GPT-OSS, whose matrices have their input first
        return {"gate_up_proj": 0, "down_proj": 1, "down_proj_bias": 0}.get(kind)
    if module in _ROWS:
        return 0
    return 1 if module in _COLUMNS and kind == "weight" else None


def scale(errors: Iterable[float]) -> float:
    """The root mean square. NaN where one of them is."""
    squares = [error * error for error in errors]
    return (sum(squares) / len(squares)) ** 0.5


def relative_error(value: Tensor, exact: Tensor) -> float:
    """||x - y|| / ||y||, in float64."""
    exact = exact.double()
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def tensor_figures(values: Tensors, exact: Tensors, draws: Sequence[Tensors]) -> Iterator[Figure]:
    """The relative error of every tensor, and the scale of that of `draws`, in float32.

    Weight and bias of a critic's head are one tensor, HEAD: a bias of one element can be right by
    luck in all draws. Raises AssertionError for a tensor that one side lacks.
    """
    assert values.keys() == exact.keys(), (
        f"tensors that one side lacks: {sorted(values.keys() ^ exact.keys())}"
    )
    groups: dict[str, list[str]] = {}
    for name in exact:
        groups.setdefault(HEAD if name.startswith(f"{HEAD}.") else name, []).append(name)
    for group, names in groups.items():
        truth = _joined(exact, names)
        error, *errors = (relative_error(_joined(side, names), truth) for side in (values, *draws))
        yield group, error, scale(errors)


def share_of_bar(figure: Figure, bar: float) -> float:
    """Error over `bar` times float32's own. A NaN is infinitely far over it."""
    _, error, own = figure
    if error != error or own != own:
        return float("inf")
    return error / (bar * own) if own else (float("inf") if error else 0.0)


def _joined(tensors: Tensors, names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].double().flatten() for name in names])

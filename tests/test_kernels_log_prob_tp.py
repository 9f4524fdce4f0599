"""linear_log_prob over a sharded vocabulary equals the whole one, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import DistPool
from torch import Tensor

from rlhf_megatron.kernels.log_prob import linear_log_prob
from rlhf_megatron.parallel.world import World

NUM_TOKENS, HIDDEN = 45, 12


def tensors(num_rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, whole (padded) weight, targets, token weights: the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    hidden_TH = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(num_rows, HIDDEN, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator)
    token_weights_T = torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    return hidden_TH.to(dtype), weight_VH.to(dtype), targets_T, token_weights_T


def backward_of(log_probs_T: Tensor, entropies_T: Tensor | None, token_weights_T: Tensor) -> None:
    assert entropies_T is not None
    token_weights_T = token_weights_T.to(log_probs_T.dtype)
    ((log_probs_T - 0.3 * entropies_T) * token_weights_T).sum().backward()


def sharded(
    world: World, bounds: list[int], vocab_size: int, dtype: torch.dtype, num_tokens: int = NUM_TOKENS
) -> dict[str, Any]:
    """Rank r owns rows bounds[r] : bounds[r + 1] of the weight."""
    hidden_TH, weight_VH, targets_T, token_weights_T = tensors(bounds[-1], vocab_size, dtype)
    hidden_TH = hidden_TH[:num_tokens].requires_grad_()
    first, last = bounds[world.coordinates.tp], bounds[world.coordinates.tp + 1]
    shard_VH = weight_VH[first:last].clone().requires_grad_()

    calls = {"all_gather_into_tensor": 0, "all_reduce": 0}
    originals = {name: getattr(dist, name) for name in calls}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in calls:
            setattr(dist, name, counted(name))
        log_probs_T, entropies_T, _ = linear_log_prob(
            hidden_TH,
            shard_VH,
            targets_T[:num_tokens],
            temperature=0.9,
            vocab_start=first,
            vocab_size=vocab_size,
            tp_group=world.tp_group,
            chunk_size=7,
            with_entropy=True,
        )
        backward_of(log_probs_T, entropies_T, token_weights_T[:num_tokens])
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert entropies_T is not None
    return {
        "log_probs": log_probs_T.detach(),
        "entropies": entropies_T.detach(),
        "grad_hidden": hidden_TH.grad,
        "grad_weight": shard_VH.grad,
        "calls": calls,
    }


def whole(num_rows: int, vocab_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    hidden_TH, weight_VH, targets_T, token_weights_T = tensors(num_rows, vocab_size, dtype)
    leaves = [hidden_TH.double().requires_grad_(), weight_VH.double().requires_grad_()]
    log_probs_T, entropies_T, _ = linear_log_prob(
        *leaves,
        targets_T,
        temperature=0.9,
        vocab_start=0,
        vocab_size=vocab_size,
        tp_group=None,
        chunk_size=64,
        with_entropy=True,
        backend="reference",
    )
    backward_of(log_probs_T, entropies_T, token_weights_T)
    assert entropies_T is not None and leaves[0].grad is not None and leaves[1].grad is not None
    return {
        "log_probs": log_probs_T.detach(),
        "entropies": entropies_T.detach(),
        "grad_hidden": leaves[0].grad,
        "grad_weight": leaves[1].grad,
    }


CASES = {
    "even": ([0, 16, 32], 32),
    "padded": ([0, 16, 32], 27),
    "unequal": ([0, 19, 29], 29),
    "one rank has padding only": ([0, 16, 32], 16),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 4e-3)])
def test_two_shards_equal_the_whole(dist_pool: DistPool, name: str, dtype: torch.dtype, bound: float) -> None:
    bounds, vocab_size = CASES[name]
    ranks = dist_pool.run(sharded, tp=2, bounds=bounds, vocab_size=vocab_size, dtype=dtype)
    expected = whole(bounds[-1], vocab_size, dtype)
    for key in ("log_probs", "entropies", "grad_hidden"):
        assert torch.equal(ranks[0][key], ranks[1][key]), f"{key} must have the same bits on all ranks"
    found = {**ranks[0], "grad_weight": torch.cat([rank["grad_weight"] for rank in ranks])}
    for key in ("log_probs", "entropies"):
        assert (found[key].double() - expected[key]).abs().max() < min(bound, 5e-6), key
    for key in ("grad_hidden", "grad_weight"):
        assert found[key].dtype == dtype
        assert (found[key].double() - expected[key]).norm() < bound * expected[key].norm(), key
    assert torch.equal(found["grad_weight"][vocab_size:], torch.zeros_like(found["grad_weight"][vocab_size:]))
    assert [rank["calls"] for rank in ranks] == [{"all_gather_into_tensor": 1, "all_reduce": 1}] * 2


@pytest.mark.dist
def test_no_rows_need_no_exchange(dist_pool: DistPool) -> None:
    ranks = dist_pool.run(sharded, tp=2, bounds=[0, 5, 9], vocab_size=9, dtype=torch.float32, num_tokens=0)
    for rank, num_rows in zip(ranks, (5, 4), strict=True):
        assert rank["log_probs"].shape == rank["entropies"].shape == (0,)
        assert torch.equal(rank["grad_weight"], torch.zeros(num_rows, HIDDEN))
        assert rank["calls"] == {"all_gather_into_tensor": 0, "all_reduce": 0}

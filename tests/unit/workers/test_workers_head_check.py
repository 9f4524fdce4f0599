"""The head's self-check: right backends pass, planted mistakes are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from workers_head_jobs import WrongGradient, WrongStash, WrongStatistics

from rlhf_megatron.ranks.kernels import log_prob
from rlhf_megatron.ranks.kernels.head_self_check import SelfCheckResult, check_log_prob_backend
from rlhf_megatron.ranks.kernels.logit_tile_ops import TorchTileOps
from rlhf_megatron.ranks.kernels.matrix_products import WeightGradientAccumulator

HIDDEN = 24


def problem(dtype: torch.dtype, num_tokens: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN, generator=generator)
    weight = 0.5 * torch.randn(vocab, HIDDEN, generator=generator)
    return hidden.to(dtype), weight.to(dtype)


def check(
    dtype: torch.dtype = torch.float32,
    num_tokens: int = 100,
    vocab: int = 400,
    num_columns: int = 389,
    chunk_size: int = 128,
    **options: Any,
) -> SelfCheckResult:
    settings = {
        "temperature": 0.8,
        "has_sink": False,
        "stash_bytes": 0,
        "backend": "chunked",
        **options,
    }
    backend = settings.pop("backend")
    tensors = problem(dtype, num_tokens, vocab)
    return check_log_prob_backend(
        backend, *tensors, num_columns=num_columns, chunk_size=chunk_size, **settings
    )


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("stash_bytes", [0, 1 << 20])
def test_the_chunked_backend_passes(dtype: torch.dtype, has_sink: bool, stash_bytes: int) -> None:
    found = check(dtype, has_sink=has_sink, stash_bytes=stash_bytes)
    assert found.is_passed, str(found)
    assert (found.num_rows, found.num_columns) == (64, 2 * 128 + 61)
    assert list(found.errors) == ["log_probs", "entropies", "hidden gradient", "weight gradient"]
    if dtype != torch.float64 or has_sink or stash_bytes:
        assert max(found.errors.values()) > 0, "nothing was compared"


@pytest.mark.parametrize(
    ("num_tokens", "vocab", "num_columns", "seen"),
    [
        (1, 400, 400, (1, 317)),
        (3, 20, 17, (3, 17)),
        (64, 1000, 2, (64, 2)),
        (5, 8, 1, (5, 1)),
        (5, 8, 0, (5, 0)),
    ],
)
def test_slices_of_small_shards(
    num_tokens: int, vocab: int, num_columns: int, seen: tuple[int, int]
) -> None:
    """A shard of padding, or with one token, has nothing to be wrong about."""
    found = check(num_tokens=num_tokens, vocab=vocab, num_columns=num_columns)
    assert (found.num_rows, found.num_columns) == seen and found.is_passed
    assert bool(found.errors) == (num_columns > 1)


def test_the_slice_of_a_large_head_is_bounded() -> None:
    """1 GiB of weights, of which 64 MiB are looked at;
    the weight's storage is never copied whole.
    """
    weight = torch.zeros(2**14, 1).expand(2**14, 2**14)
    found = check_log_prob_backend(
        "chunked",
        torch.ones(4, 2**14),
        weight,
        temperature=1.0,
        num_columns=2**14,
        chunk_size=8192,
        has_sink=True,
        stash_bytes=0,
    )
    assert found.is_passed and found.num_columns * 2**14 <= 2**24


def test_hidden_states_that_are_not_finite_prove_nothing() -> None:
    hidden, weight = problem(torch.float32, 8, 50)
    hidden[3, 3] = float("nan")
    found = check_log_prob_backend(
        "chunked",
        hidden,
        weight,
        temperature=1.0,
        num_columns=50,
        chunk_size=16,
        has_sink=False,
        stash_bytes=0,
    )
    assert found.is_passed and not found.errors


def test_a_model_that_is_sure_passes() -> None:
    """Gradients of a row whose target has all the probability cancel to nothing; what rounding
    leaves is no mistake.
    """
    weight = torch.eye(HIDDEN)
    hidden = 80.0 * weight[(torch.arange(64) * (HIDDEN - 1)) // 63]
    found = check_log_prob_backend(
        "chunked",
        hidden,
        weight,
        temperature=1.0,
        num_columns=HIDDEN,
        chunk_size=8,
        has_sink=True,
        stash_bytes=0,
    )
    assert found.is_passed, str(found)


@pytest.mark.parametrize(
    ("mistake", "stash_bytes", "quantity"),
    [
        (WrongGradient, 0, "hidden gradient"),
        (WrongGradient, 0, "weight gradient"),
        (WrongStatistics, 0, "entropies"),
        (WrongStash, 1 << 20, "hidden gradient"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_planted_mistakes_are_found(
    monkeypatch: pytest.MonkeyPatch,
    mistake: type[TorchTileOps],
    stash_bytes: int,
    quantity: str,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(log_prob, "TorchTileOps", mistake)
    found = check(dtype, stash_bytes=stash_bytes, has_sink=True)
    assert not found.is_passed
    assert found.errors[quantity] > found.bounds[quantity]
    assert f"{quantity} {found.errors[quantity]:.2g} (at most" in str(found)


def test_a_sink_that_is_written_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    result = WeightGradientAccumulator.finish_gradient

    def doubling(self: Any) -> Tensor | None:
        if self._weight_grad_sink is not None:
            self._weight_grad_sink.get_buffer_VH().mul_(2)
        return result(self)

    monkeypatch.setattr(WeightGradientAccumulator, "finish_gradient", doubling)
    assert check().is_passed
    found = check(has_sink=True)
    assert found.errors["weight gradient"] == pytest.approx(1.0, abs=0.5)
    assert not found.is_passed

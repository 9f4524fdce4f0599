"""linear_log_prob over a sharded vocabulary equals the whole one, forward and backward, and how
much its ranks talk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import DistPool
from head_tools import Sink
from torch import Tensor

from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend, compute_linear_log_probs
from rlhf_megatron.ranks.kernels.matrix_products import WeightGradientAccumulator
from rlhf_megatron.ranks.parallel.world import World

NUM_TOKENS = 44
HIDDEN = 12
TALK = (
    "all_gather_into_tensor",
    "all_gather",
    "all_reduce",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "broadcast",
    "all_to_all_single",
    "all_gather_object",
    "barrier",
)


@dataclass(frozen=True)
class Shape:
    """`bounds[tp]`: rank r owns rows bounds[r] : bounds[r + 1] of the weight."""

    bounds: dict[int, tuple[int, ...]]
    vocab_size: int


SHAPES = {
    "even": Shape({2: (0, 16, 32), 4: (0, 8, 16, 24, 32)}, 32),
    "padded": Shape({2: (0, 16, 32), 4: (0, 8, 16, 24, 32)}, 27),
    "unequal": Shape({2: (0, 19, 29), 4: (0, 3, 19, 20, 29)}, 29),
    "half of it is padding": Shape({2: (0, 16, 32), 4: (0, 8, 16, 24, 32)}, 16),
}
BOUNDS = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Options:
    num_rows: int | None = None
    has_repeats: bool = False
    is_split: bool = False
    has_sink: bool = False
    stash_bytes: int = 0
    backend: LogProbBackend = "chunked"
    without: int = 0  # the first so many rows have no gradient


OPTIONS = {
    "all tokens": Options(),
    "rows, some without a gradient": Options(num_rows=13, without=6),
    "split": Options(is_split=True),
    "split, rows, sink": Options(num_rows=13, is_split=True, has_sink=True, without=2),
    "rows of one token": Options(num_rows=24, has_repeats=True, without=6),
    "split, rows of one token": Options(
        num_rows=24, has_repeats=True, is_split=True, has_sink=True
    ),
    "split, no gradient": Options(num_rows=13, is_split=True, has_sink=True, without=13),
    "stash": Options(num_rows=13, stash_bytes=10**6, without=2),
    "no rows": Options(num_rows=0, is_split=True, has_sink=True),
    "reference": Options(num_rows=13, backend="reference", has_sink=True),
    "reference, split": Options(num_rows=13, is_split=True, backend="reference"),
}


@dataclass(frozen=True)
class Problem:
    """The same on every rank."""

    hidden_SH: Tensor
    weight_VH: Tensor
    targets_R: Tensor
    rows_R: Tensor | None
    temperature_R: Tensor
    grads_R: Tensor


def make_problem(
    num_vocab_rows: int, vocab_size: int, dtype: torch.dtype, options: Options
) -> Problem:
    generator = torch.Generator().manual_seed(5)
    hidden_SH = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VH = torch.randn(num_vocab_rows, HIDDEN, generator=generator, dtype=torch.float64)
    rows_R = (
        None
        if options.num_rows is None
        else torch.randperm(NUM_TOKENS, generator=generator)[: options.num_rows]
    )
    if options.has_repeats:
        rows_R = torch.randint(0, NUM_TOKENS // 4, (options.num_rows or 0,), generator=generator)
    num_rows = NUM_TOKENS if rows_R is None else len(rows_R)
    targets_R = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    grads_R = torch.randn(num_rows, generator=generator, dtype=torch.float64)
    grads_R[: options.without] = 0.0
    temperature_R = 0.5 + torch.rand(num_rows, generator=generator)
    return Problem(
        hidden_SH.to(dtype), weight_VH.to(dtype), targets_R, rows_R, temperature_R, grads_R
    )


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often each function of torch.distributed is called inside; those never
    called are left out.
    """
    calls: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in TALK}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    try:
        for name in TALK:
            setattr(dist, name, counting(name))
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def of_this_rank(
    world: World, bounds: tuple[int, ...], problem: Problem, is_split: bool
) -> tuple[Tensor, Tensor]:
    """Leaves: the hidden states, or this rank's part of them, and its shard of the weight."""
    rank = world.coordinates.tp
    num_ranks = len(bounds) - 1
    hidden_SH = problem.hidden_SH.chunk(num_ranks)[rank] if is_split else problem.hidden_SH
    shard_VH = problem.weight_VH[bounds[rank] : bounds[rank + 1]]
    return hidden_SH.clone().requires_grad_(), shard_VH.clone().requires_grad_()


def sharded(
    world: World, bounds: tuple[int, ...], vocab_size: int, problem: Problem, options: Options
) -> dict[str, Any]:
    hidden_SH, shard_VH = of_this_rank(world, bounds, problem, options.is_split)
    sink_dtype = torch.promote_types(shard_VH.dtype, torch.float32)
    sink = Sink(shard_VH, sink_dtype) if options.has_sink else None
    with counted() as forward:
        outputs = compute_linear_log_probs(
            hidden_SH,
            shard_VH,
            problem.targets_R,
            temperature=problem.temperature_R,
            vocab_start=bounds[world.coordinates.tp],
            vocab_size=vocab_size,
            tp_group=world.tp_group,
            chunk_size=7,
            with_entropy=True,
            with_sum_squares=True,
            rows_R=problem.rows_R,
            has_repeated_rows=options.has_repeats,
            is_sequence_split=options.is_split,
            weight_grad_sink=sink,
            stash_bytes=options.stash_bytes,
            backend=options.backend,
        )
    with counted() as backward:
        loss_of(*outputs[:2], problem.grads_R).backward()
    return {
        "log_probs": outputs.log_probs_R.detach(),
        "entropies": outputs.entropies_R.detach(),
        "sum_squares": outputs.sum_squares_R,
        "grad_hidden": hidden_SH.grad,
        "grad_weight": shard_VH.grad if sink is None else sink.buffer,
        "num_asked": None if sink is None else sink.num_asked,
        "calls": (forward, backward),
    }


def loss_of(log_probs_R: Tensor, entropies_R: Tensor | None, grads_R: Tensor) -> Tensor:
    assert entropies_R is not None
    return ((log_probs_R - 0.3 * entropies_R) * grads_R.to(log_probs_R.dtype)).sum()


def whole(vocab_size: int, problem: Problem) -> dict[str, Tensor]:
    """By the reference, in float64."""
    leaves = [x.double().requires_grad_() for x in (problem.hidden_SH, problem.weight_VH)]
    outputs = compute_linear_log_probs(
        *leaves,
        problem.targets_R,
        temperature=problem.temperature_R,
        vocab_start=0,
        vocab_size=vocab_size,
        tp_group=None,
        chunk_size=64,
        with_entropy=True,
        with_sum_squares=True,
        rows_R=problem.rows_R,
        backend="reference",
    )
    grads = torch.autograd.grad(loss_of(*outputs[:2], problem.grads_R), leaves)
    names = ("log_probs", "entropies", "sum_squares", "grad_hidden", "grad_weight")
    return dict(zip(names, (*outputs, *grads), strict=True))


def all_sharded(world: World, cases: list[tuple[str, str, torch.dtype]]) -> list[dict[str, Any]]:
    """One job for all cases: starting one costs more than they do."""
    results = []
    for shape_name, options_name, dtype in cases:
        shape = SHAPES[shape_name]
        options = OPTIONS[options_name]
        bounds = shape.bounds[world.layout.tp]
        problem = make_problem(bounds[-1], shape.vocab_size, dtype, options)
        results.append(sharded(world, bounds, shape.vocab_size, problem, options))
    return results


def expected_calls(options: Options) -> tuple[dict[str, int], dict[str, int]]:
    """One exchange forward and one backward; a split sequence is gathered before each."""
    if options.num_rows == 0:
        return {}, {}
    if options.is_split:
        return {"all_gather_into_tensor": 2}, {
            "all_gather_into_tensor": 1,
            "reduce_scatter_tensor": 1,
        }
    return {"all_gather_into_tensor": 1}, {"all_reduce": 1}


@pytest.mark.dist
@pytest.mark.parametrize("tp", [2, 4])
def test_shards_equal_the_whole(dist_pool: DistPool, tp: int) -> None:
    cases = list(product(SHAPES, OPTIONS, BOUNDS))
    results = dist_pool.run(all_sharded, tp=tp, cases=cases, timeout_s=300)
    for (shape_name, options_name, dtype), ranks in zip(
        cases, zip(*results, strict=True), strict=True
    ):
        shape = SHAPES[shape_name]
        options = OPTIONS[options_name]
        bound = BOUNDS[dtype]
        place = f"{shape_name}, {options_name}, {dtype}: "
        expected = whole(
            shape.vocab_size, make_problem(shape.bounds[tp][-1], shape.vocab_size, dtype, options)
        )
        for key in (
            "log_probs",
            "entropies",
            "sum_squares",
            *(() if options.is_split else ("grad_hidden",)),
        ):
            assert all(torch.equal(ranks[0][key], rank[key]) for rank in ranks), (
                f"{place}{key}: all ranks, equal bits"
            )
        found = {**ranks[0], "grad_weight": torch.cat([rank["grad_weight"] for rank in ranks])}
        if options.is_split:
            found["grad_hidden"] = torch.cat([rank["grad_hidden"] for rank in ranks])
        for key in ("log_probs", "entropies", "sum_squares"):
            assert found[key].shape == expected[key].shape
            errors_R = (found[key].double() - expected[key]).abs().tolist()
            assert max(errors_R, default=0.0) < min(bound, 5e-6), place + key
        gradient_bound = max(bound, 5e-4) if options.stash_bytes else bound
        for key in ("grad_hidden", "grad_weight"):
            assert (found[key].double() - expected[key]).norm() <= gradient_bound * expected[
                key
            ].norm(), place + key
        assert found["grad_hidden"].dtype == dtype
        padding_VH = found["grad_weight"][shape.vocab_size :]
        assert torch.equal(padding_VH, torch.zeros_like(padding_VH)), place
        if options.backend != "reference":
            assert [rank["calls"] for rank in ranks] == [expected_calls(options)] * tp, place
        assert {rank["num_asked"] for rank in ranks} == {1 if options.has_sink else None}, place


def order_of_events(world: World) -> list[str]:
    """What the backward pass does, in order, on a rank with two chunks of columns."""
    events: list[str] = []
    bounds = (0, 14, 28)
    problem = make_problem(28, 28, torch.float32, Options())
    hidden_SH, shard_VH = of_this_rank(world, bounds, problem, is_split=False)
    outputs = compute_linear_log_probs(
        hidden_SH,
        shard_VH,
        problem.targets_R,
        temperature=1.0,
        vocab_start=bounds[world.coordinates.tp],
        vocab_size=28,
        tp_group=world.tp_group,
        chunk_size=7,
        with_entropy=True,
    )
    all_reduce = dist.all_reduce
    add = WeightGradientAccumulator.add_tile_product

    def watched_all_reduce(*args: Any, **kwargs: Any) -> Any:
        events.append("sum starts" if kwargs.get("async_op") else "sum")
        return all_reduce(*args, **kwargs)

    def watched_add(*args: Any) -> None:
        events.append("weight gradient")
        add(*args)

    try:
        dist.all_reduce = watched_all_reduce  # type: ignore[method-assign]
        WeightGradientAccumulator.add_tile_product = watched_add  # type: ignore[method-assign]
        loss_of(*outputs[:2], problem.grads_R).backward()
    finally:
        dist.all_reduce = all_reduce  # type: ignore[method-assign]
        WeightGradientAccumulator.add_tile_product = add  # type: ignore[method-assign]
    return events


@pytest.mark.dist
def test_the_sum_of_hidden_gradients_runs_beside_the_last_weight_gradient(
    dist_pool: DistPool,
) -> None:
    for events in dist_pool.run(order_of_events, tp=2):
        assert events == ["weight gradient", "sum starts", "weight gradient"]


def kept_tensors(world: World, is_split: bool) -> list[int]:
    """Elements of the float tensors that autograd keeps for the backward pass and that the caller
    does not have.
    """
    bounds = (0, 14, 28)
    problem = make_problem(28, 28, torch.float32, Options())
    hidden_SH, shard_VH = of_this_rank(world, bounds, problem, is_split)
    known = {x.untyped_storage().data_ptr() for x in (hidden_SH, shard_VH)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage().data_ptr()
        if memory not in known and tensor.is_floating_point():
            kept[memory] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute_linear_log_probs(
            hidden_SH,
            shard_VH,
            problem.targets_R,
            temperature=1.0,
            vocab_start=bounds[world.coordinates.tp],
            vocab_size=28,
            tp_group=world.tp_group,
            chunk_size=7,
            with_entropy=True,
            is_sequence_split=is_split,
        )
    return sorted(kept.values())


@pytest.mark.dist
def test_of_a_split_sequence_only_the_part_is_kept(dist_pool: DistPool) -> None:
    """log Z, its rest, the entropies: three numbers a row."""
    for kept in dist_pool.run(kept_tensors, tp=2, is_split=True):
        assert kept == [NUM_TOKENS] * 3

"""The head's gradient in main_grad: as by way of autograd, once a micro-batch, without a
tensor of its size.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_head_jobs import Gradients, gradients
from workers_jobs import OVERLAPPED, SHARDED

from benchmarks.parity.rounding import relative_error
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.ranks.kernels.log_prob import compute_linear_log_probs
from rlhf_megatron.ranks.workers.log_prob_head import MainGradSink, make_main_grad_sink

ROUNDING = 3e-7  # relative, of sums in float32 that are added in another order
BUCKETS = {"bucket_size": 20_000}
HEAD = {"llama": "output_layer.weight", "qwen3_tied": "embedding.word_embeddings.weight"}


@cache
def problem(name: str) -> tuple[dict[str, Tensor], MiniBatch]:
    model = reference.make_model(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    batch = reference.make_batch()
    with torch.no_grad():
        log_probs, _ = reference.token_log_probs(model, batch)
    return state, reference.with_past(batch, log_probs)


def run(
    dist_pool: DistPool, name: str, layout: dict[str, Any], **options: Any
) -> list[list[Gradients]]:
    """Of each rank: by the sink, by autograd, and by a sink whose stand-in is full of NaN."""
    state, batch = problem(name)
    arguments = {
        "name": name,
        "state": state,
        "batch": batch,
        "kinds": ("sink", "autograd", "poisoned"),
        **options,
    }
    return dist_pool.run(gradients, timeout_s=300, **layout, **arguments)


def differences(found: Gradients, wanted: Gradients) -> dict[str, float]:
    """Relative L2, of each parameter's main_grad."""
    assert found.main_grads.keys() == wanted.main_grads.keys()
    return {
        key: relative_error(found.main_grads[key], grad) for key, grad in wanted.main_grads.items()
    }


def check(results: list[list[Gradients]], num_passes: int = 1, bound: float = ROUNDING) -> None:
    for sink, autograd, poisoned in results:
        assert max(differences(sink, autograd).values()) <= bound
        assert all(
            torch.equal(poisoned.main_grads[key], grad) for key, grad in sink.main_grads.items()
        ), "it was read"
        assert sink.is_weight_kept and autograd.is_weight_kept and poisoned.is_weight_kept
        assert sink.num_micro_batches > 1
        if sink.is_flag_set is not None:
            assert sink.num_hooks == autograd.num_hooks == num_passes * sink.num_micro_batches


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3_tied", {}),
    ("llama", {"dp": 2, "megatron": OVERLAPPED, **BUCKETS}),
    ("qwen3_tied", {"dp": 2, "megatron": {"overlap_grad_reduce": True}, **BUCKETS}),
    ("llama", {"tp": 2, "pp": 2, "sequence_parallel": True, "megatron": SHARDED}),
]
LONG_LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_tied", {"dp": 2, "megatron": OVERLAPPED, **BUCKETS}),
    ("qwen3_tied", {"cp": 2, "megatron": SHARDED}),
    ("qwen3_tied", {"tp": 2, "sequence_parallel": True}),
    ("llama", {"pp": 2, "dp": 2, "megatron": OVERLAPPED}),
    ("qwen3_tied", {"pp": 2, "vpp": 2, "dp": 2, "megatron": OVERLAPPED}),
    ("llama", {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True, "megatron": OVERLAPPED}),
]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"),
    [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_LAYOUTS)],
    ids=str,
)
def test_it_is_the_gradient_that_autograd_and_the_hook_would_have_added(
    dist_pool: DistPool, name: str, layout: dict[str, Any]
) -> None:
    """Twice in a row: with overlapped reductions megatron learns in the first pass what is to
    be waited for.
    """
    results = run(dist_pool, name, layout, num_passes=2)
    check(results, num_passes=2)
    is_tied_here = name == "qwen3_tied" and layout.get("pp", 1) == 1
    flags = [sink.is_flag_set for sink, _, _ in results if sink.is_flag_set is not None]
    assert flags and set(flags) == {not is_tied_here}, (
        "the hook adds the embedding's gradient, and only that"
    )


@pytest.mark.dist
@pytest.mark.parametrize("name", HEAD)
def test_a_stage_without_embedding_allocates_nothing_of_the_weights_size(
    dist_pool: DistPool, name: str
) -> None:
    """And the last stage's copy of a tied embedding is no exception. By way of autograd: once
    a micro-batch.
    """
    first, last = run(dist_pool, name, {"pp": 2})
    check([first, last])
    sink, autograd, _ = last
    assert sink.num_allocated == 0
    assert autograd.num_allocated == autograd.num_micro_batches
    assert first[0].is_flag_set is None and sink.is_flag_set


@pytest.mark.dist
def test_tied_weights_get_both_gradients(dist_pool: DistPool) -> None:
    """In one stage, and on either side of two, equal to the gradient of transformers in float64."""
    _, batch = problem("qwen3_tied")
    model = reference.make_model("qwen3_tied").double()
    log_probs, entropies = reference.token_log_probs(model, batch)
    loss = (
        reference.policy_token_loss(log_probs, entropies, batch) * batch.loss_weights.double()
    ).sum()
    (wanted,) = torch.autograd.grad(loss, [model.get_input_embeddings().weight])
    (one,) = run(dist_pool, "qwen3_tied", {})
    two = run(dist_pool, "qwen3_tied", {"pp": 2})
    found = [one[0].main_grads[HEAD["qwen3_tied"]], two[0][0].main_grads[HEAD["qwen3_tied"]]]
    found.append(two[1][0].main_grads[HEAD["llama"]])  # the copy's name
    assert max(relative_error(grad, wanted) for grad in found) < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", {"tp": 2, "sequence_parallel": True}), ("qwen3_tied", {})],
    ids=str,
)
def test_a_micro_batch_without_rows(dist_pool: DistPool, name: str, layout: dict[str, Any]) -> None:
    """Its sample trains nothing; the hook fires all the same."""
    _, batch = problem(name)
    longest = int(batch.lengths.argmax())
    mask = batch.response_mask.clone()
    mask[int(batch.offsets[longest]) : int(batch.offsets[longest + 1])] = False
    silent = replace(batch, response_mask=mask)
    results = run(dist_pool, name, layout, batch=silent, token_budget=int(batch.lengths.max()))
    assert all(sink.num_without_rows == 1 for sink, _, _ in results)
    check(results)


@pytest.mark.dist
def test_half_precision_keeps_float32_gradients(dist_pool: DistPool) -> None:
    """With the stash that is on by default. By way of autograd the head's gradient is rounded to 8
    bits; the others' are the same bit for bit.
    """
    (of_rank,) = run(dist_pool, "llama", {}, dtype=torch.bfloat16)
    found = differences(of_rank[0], of_rank[1])
    assert 2.0**-12 < found.pop(HEAD["llama"]) < 2.0**-8
    assert set(found.values()) == {0.0}


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("name", HEAD)
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_the_reference_backend_adds_to_it_too(
    dist_pool: DistPool, name: str, layout: dict[str, Any]
) -> None:
    check(run(dist_pool, name, layout, kernels={"backend": "reference"}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_any_type_are_added_to_what_stands_there(dtype: torch.dtype) -> None:
    """A weight of two micro-batches by hand: main_grad starts at 1, the stand-in is the
    weight's own memory.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(40, 8, generator=generator, dtype=dtype))
    assert make_main_grad_sink(weight) is None, "nothing collects its gradient"
    weight.main_grad = torch.ones(40, 8)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    sink = make_main_grad_sink(weight)
    assert isinstance(sink, MainGradSink)
    before = weight.detach().clone()
    wanted = torch.ones(40, 8, dtype=torch.float64)
    for _ in range(2):
        hidden = torch.randn(5, 8, generator=generator, dtype=dtype)
        targets = torch.randint(40, (5,), generator=generator)
        call: dict[str, Any] = {
            "temperature": 1.0,
            "vocab_start": 0,
            "vocab_size": 40,
            "tp_group": None,
        }
        outputs = compute_linear_log_probs(
            hidden,
            weight,
            targets,
            **call,
            chunk_size=16,
            with_entropy=False,
            weight_grad_sink=sink,
            backend="chunked",
        )
        outputs.log_probs_R.sum().backward()
        assert weight.grad is not None and weight.grad.data_ptr() == weight.data_ptr()
        weight.grad = None  # as megatron's hook does
        p = (hidden.double() @ before.double().T).softmax(1)
        wanted += (torch.nn.functional.one_hot(targets, 40) - p).T @ hidden.double()
    torch.testing.assert_close(weight.main_grad.double(), wanted, rtol=1e-5, atol=1e-5)  # type: ignore[attr-defined]
    assert weight.grad_added_to_main_grad and torch.equal(weight, before)  # type: ignore[attr-defined]

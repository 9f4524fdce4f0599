"""What the kernels must do right on a device, as functions like those of gpu_checks.py: head, loss,
GAE, main_grad.

Every check compares with float64 on the host, of the same (rounded) inputs.
"""

# T tokens, R rows, V vocabulary (with padding), H hidden

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_checks import CONFIG, Figures, MissingPackageError, need, one_rank_actor
from gpu_samples import make_batch, reference_log_probs, relative_error, rounded_weights, share
from torch import Tensor

from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend, compute_linear_log_probs
from rlhf_megatron.ranks.kernels.triton_support import query_interpreter_support, try_triton_kernel

STASH_BYTES = 1 << 30
UNTIED = {**CONFIG, "tie_word_embeddings": False}


def need_triton(device: torch.device) -> None:
    """Its interpreter counts where the environment asks for it."""
    is_interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    reason = query_interpreter_support().why_not if is_interpreted else try_triton_kernel(device)
    if reason:
        raise MissingPackageError(f"needs Triton: {reason}")


@dataclass(frozen=True)
class HeadProblem:
    """All that the head takes at once: rows, a temperature a row, padding of the vocabulary."""

    hidden_TH: Tensor
    weight_VH: Tensor
    rows_R: Tensor
    targets_R: Tensor
    temperature_R: Tensor
    grad_log_probs_R: Tensor
    grad_entropies_R: Tensor
    vocab_size: int

    @classmethod
    def make(
        cls, num_tokens: int, hidden: int, vocab_size: int, padding: int, dtype: torch.dtype
    ) -> HeadProblem:
        generator = torch.Generator().manual_seed(0)
        rows_R = torch.randperm(num_tokens, generator=generator)[: num_tokens * 3 // 4]
        weight_VH = torch.randn(vocab_size + padding, hidden, generator=generator) * (
            4 / math.sqrt(hidden)
        )
        weight_VH[vocab_size:] *= 30.0  # would win if it counted
        return cls(
            torch.randn(num_tokens, hidden, generator=generator).to(dtype),
            weight_VH.to(dtype),
            rows_R,
            torch.randint(0, vocab_size, rows_R.shape, generator=generator),
            torch.linspace(0.5, 2.0, len(rows_R)),
            torch.linspace(-1.0, 2.0, len(rows_R)),
            torch.linspace(0.5, -0.5, len(rows_R)),
            vocab_size,
        )


class Sink:
    """A weight's float32 gradient, as megatron's main_grad."""

    def __init__(self, weight_VH: Tensor) -> None:
        self.weight_VH = weight_VH
        self.total_VH = torch.zeros_like(weight_VH, dtype=torch.float32, requires_grad=False)

    def get_buffer_VH(self) -> Tensor:
        return self.total_VH

    def make_autograd_gradient(self) -> Tensor:
        return self.weight_VH.detach()


def run_head(
    problem: HeadProblem,
    device: torch.device,
    backend: LogProbBackend,
    stash_bytes: int = 0,
    chunk_size: int = 1024,
) -> list[Tensor]:
    """Log-probs, entropies, sums of squares, gradient of the hidden states, main_grad."""
    hidden_TH, weight_VH = (
        x.to(device).requires_grad_() for x in (problem.hidden_TH, problem.weight_VH)
    )
    sink = Sink(weight_VH)
    outputs = compute_linear_log_probs(
        hidden_TH,
        weight_VH,
        problem.targets_R.to(device),
        temperature=problem.temperature_R.to(device),
        vocab_start=0,
        vocab_size=problem.vocab_size,
        tp_group=None,
        chunk_size=chunk_size,
        with_entropy=True,
        with_sum_squares=True,
        rows_R=problem.rows_R.to(device),
        weight_grad_sink=sink,
        stash_bytes=stash_bytes,
        backend=backend,
    )
    upstream = [problem.grad_log_probs_R.to(device), problem.grad_entropies_R.to(device)]
    torch.autograd.backward([outputs.log_probs_R, outputs.entropies_R], upstream)  # type: ignore[list-item]
    assert (
        outputs.entropies_R is not None
        and outputs.sum_squares_R is not None
        and hidden_TH.grad is not None
    )
    assert (
        outputs.log_probs_R.dtype == torch.float32
        and hidden_TH.grad.dtype == problem.hidden_TH.dtype
    )
    return [
        outputs.log_probs_R,
        outputs.entropies_R,
        outputs.sum_squares_R,
        hidden_TH.grad,
        sink.total_VH,
    ]


def exact_head(problem: HeadProblem) -> list[Tensor]:
    """The same in float64, written out."""
    hidden_TH, weight_VH = (
        x.double().requires_grad_() for x in (problem.hidden_TH, problem.weight_VH)
    )
    logits_RV = (
        hidden_TH[problem.rows_R]
        @ weight_VH[: problem.vocab_size].T
        / problem.temperature_R.double()[:, None]
    )
    log_p_RV = logits_RV.log_softmax(-1)
    log_probs_R = log_p_RV.gather(1, problem.targets_R[:, None])[:, 0]
    entropies_R = -(log_p_RV.exp() * log_p_RV).sum(1)
    loss = (problem.grad_log_probs_R * log_probs_R + problem.grad_entropies_R * entropies_R).sum()
    grads = torch.autograd.grad(loss, [hidden_TH, weight_VH])
    return [log_probs_R, entropies_R, log_p_RV.exp().square().sum(1), *grads]


def check_head(
    device: torch.device,
    dtype: torch.dtype,
    backend: LogProbBackend = "chunked",
    stash: int = 0,
    sizes: tuple[int, int, int, int] = (300, 256, 5003, 13),
    chunk_size: int = 1024,
) -> Figures:
    """A backend of the head with everything that it takes, against float64. `sizes`:
    of `HeadProblem.make`.
    """
    if backend == "triton":
        need_triton(device)
    problem = HeadProblem.make(*sizes, dtype)
    found = run_head(problem, device, backend, stash, chunk_size)
    exact = exact_head(problem)
    names = ("log_prob", "entropy", "sum_squares", "grad_hidden", "grad_weight")
    figures = {
        f"{name}_error": max_error(value, truth) if index < 3 else relative_error(value, truth)
        for index, (name, value, truth) in enumerate(zip(names, found, exact, strict=True))
    }
    assert float(found[4][problem.vocab_size :].abs().max()) == 0, (
        "the padding of the vocabulary has a gradient"
    )
    # Logits up to 40 with float32 sums, whatever the inputs; each logit's gradient is rounded to
    # the inputs' type.
    backward = 1e-5 if dtype == torch.float32 else 6e-3
    assert (
        max(figures["log_prob_error"], figures["entropy_error"], figures["sum_squares_error"])
        <= 5e-5
    ), figures
    assert max(figures["grad_hidden_error"], figures["grad_weight_error"]) <= max(
        backward, 1e-4 if stash else 0
    ), figures
    again = run_head(problem, device, backend, stash, chunk_size)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "two runs differ"
    return figures


def check_large_vocabulary(
    device: torch.device, dtype: torch.dtype, backend: LogProbBackend = "chunked"
) -> Figures:
    """A tile of more than 2^31 elements; on a CPU of a few thousand."""
    if backend == "triton":
        need_triton(device)
    vocab, num_tokens = (270336, 12000) if device.type == "cuda" else (5000, 40)
    problem = HeadProblem.make(num_tokens, 64, vocab, 0, dtype)
    found = run_head(problem, device, backend, stash_bytes=6 << 30, chunk_size=vocab)
    some = torch.arange(0, len(problem.rows_R), max(1, len(problem.rows_R) // 100))
    rows_R = problem.rows_R[some]
    z_RV = (
        problem.hidden_TH[rows_R].double()
        @ problem.weight_VH.double().T
        / problem.temperature_R[some, None].double()
    )
    log_p_RV = z_RV.log_softmax(-1)
    log_probs_R = log_p_RV.gather(1, problem.targets_R[some, None])[:, 0]
    entropies_R = -(log_p_RV.exp() * log_p_RV).sum(1)
    of_log_probs_R1 = problem.grad_log_probs_R[some, None]
    of_entropies_R1 = problem.grad_entropies_R[some, None]
    one_hot_RV = torch.zeros_like(log_p_RV).scatter_(1, problem.targets_R[some, None], 1.0)
    p_RV = log_p_RV.exp()
    grad_RV = of_log_probs_R1 * (one_hot_RV - p_RV) - of_entropies_R1 * p_RV * (
        log_p_RV + entropies_R[:, None]
    )
    grad_RH = grad_RV / problem.temperature_R[some, None] @ problem.weight_VH.double()
    figures = {
        "log_prob_error": max_error(found[0].cpu()[some], log_probs_R),
        "entropy_error": max_error(found[1].cpu()[some], entropies_R),
        "grad_hidden_error": relative_error(found[3].cpu()[rows_R], grad_RH),
    }
    assert max(figures["log_prob_error"], figures["entropy_error"]) <= 5e-5, figures
    assert figures["grad_hidden_error"] <= (1e-4 if dtype == torch.float32 else 8e-3), figures
    return figures


def check_self_check(device: torch.device, dtype: torch.dtype) -> Figures:
    """What a run does in its first calls: the backend that it chooses passes, with the
    default stash.
    """
    from rlhf_megatron.config.schema import KernelsConfig
    from rlhf_megatron.ranks.kernels.head_self_check import check_log_prob_backend
    from rlhf_megatron.ranks.workers.head_backend import choose_head_backend

    choice = choose_head_backend(KernelsConfig(), device, dtype)
    problem = HeadProblem.make(300, 256, 5003, 13, dtype)
    found = check_log_prob_backend(
        choice.backend,
        problem.hidden_TH.to(device),
        problem.weight_VH.to(device),
        temperature=0.8,
        num_columns=5003,
        chunk_size=1024,
        has_sink=True,
        stash_bytes=choice.stash_bytes,
    )
    assert found.is_passed and found.errors, str(found)
    return found.errors


def check_policy_loss(device: torch.device, dtype: torch.dtype) -> Figures:
    """The fused loss, in the kernel where there is one, against the specification in float64."""
    from benchmarks.kernels.eager import eager_policy
    from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossInputs
    from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams, ppo_clip
    from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams
    from rlhf_megatron.ranks.kernels.policy_row_loss import PolicyRowLoss

    params = PPOClipParams()
    regularizers = RegularizerParams(0.1, "k3", 0.03)
    generator = torch.Generator().manual_seed(0)
    normal_7R = torch.randn(7, 5000, generator=generator)
    log_probs_R = normal_7R[0] - 2.0
    columns = {
        "log_probs_T": log_probs_R,
        "old_log_probs_T": log_probs_R + 0.4 * normal_7R[1],
        "advantages_T": normal_7R[2],
        "response_mask_T": torch.ones(5000, dtype=torch.bool),
        "entropies_T": normal_7R[3].abs(),
        "ref_log_probs_T": log_probs_R + 0.4 * normal_7R[4],
    }
    weights_R = (normal_7R[5].abs() + 0.1) / 5000

    def read(place: torch.device, kind: torch.dtype) -> PolicyLossInputs:
        moved = {
            name: x.to(place) if x.dtype == torch.bool else x.to(place, kind)
            for name, x in columns.items()
        }
        return PolicyLossInputs(
            **{
                k: v.requires_grad_() if k in ("log_probs_T", "entropies_T") else v
                for k, v in moved.items()
            }
        )

    def gradients(value: Tensor, inputs: PolicyLossInputs) -> tuple[Tensor, ...]:
        assert inputs.entropies_T is not None
        return torch.autograd.grad(value, [inputs.log_probs_T, inputs.entropies_T])

    here = read(torch.device("cpu"), torch.float64)
    there = read(device, torch.float32)
    terms = eager_policy(here, params, regularizers)
    expected = (terms.token_loss_T * weights_R.double()).sum()
    fused = PolicyRowLoss("ppo_clip", ppo_clip, params, regularizers, use_triton=True)
    weights = dict.fromkeys(("loss_weights", "metric_weights"), weights_R.to(device))
    given = {name.removesuffix("_T"): getattr(there, name) for name in columns}
    value, metrics = fused(there.log_probs_T, there.entropies_T, given | weights)
    del metrics["actor/loss"]
    figures = {"loss_error": abs(value.item() / expected.item() - 1)}
    names = ("grad_log_probs", "grad_entropies")
    for name, found, truth in zip(
        names, gradients(value, there), gradients(expected, here), strict=True
    ):
        figures[f"{name}_error"] = relative_error(found, truth)
    for name, column in terms.metrics.items():
        figures[f"{name}_error"] = abs(
            float(metrics[name]) - float((column * weights_R.double()).sum())
        )
    assert set(metrics) == set(terms.metrics) and max(figures.values()) <= 1e-5, figures
    return figures


def check_main_grad(
    device: torch.device, dtype: torch.dtype, is_tied: bool = True, **megatron: bool
) -> Figures:
    """The head's gradient in megatron's buffers after a supervised pass, under its data
    parallelism, by float32.
    """
    need("megatron")
    from rlhf_megatron.ranks.models.output_heads import get_head_weight

    hf_config = CONFIG if is_tied else UNTIED
    batch = make_batch()
    weights = {
        name: x.requires_grad_() for name, x in rounded_weights(dtype, hf_config=hf_config).items()
    }
    loss = -(reference_log_probs(weights, batch) * batch.loss_weights).sum()
    name = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    gradient = torch.autograd.grad(loss, weights[name])[0]
    with one_rank_actor(device, dtype, hf_config, **megatron) as (actor, _):
        shard, plan = share(batch)  # several micro-batches add up
        assert len(plan.micro_batches) > 1
        actor.rerun_forward_backward(shard, plan, 1.0, "sft")
        weight: Any = get_head_weight(actor.backend.model.chunks[-1])
        assert weight.main_grad.dtype == torch.float32
        assert weight.grad is None or weight.grad.data_ptr() == weight.main_grad.data_ptr(), (
            "a second gradient"
        )
        found = weight.main_grad.detach().clone()
        backend = actor.head.make_report().backend
    figures = {"main_grad_error": relative_error(found[: gradient.shape[0]], gradient)}
    assert figures["main_grad_error"] <= (1e-4 if dtype == torch.float32 else 0.06), (
        figures,
        backend,
    )
    return figures


def check_grouped_experts(device: torch.device, dtype: torch.dtype) -> Figures:
    """Grouped products of experts and their gradients, against float64; some experts have few
    tokens or none.
    """
    from rlhf_megatron.ranks.models.grouped_experts import apply_grouped_linear, pad_expert_groups

    counts = (33, 0, 5, 90)
    columns = (64, 96)
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    tokens = draw(sum(counts), columns[0])
    weights = [draw(columns[1], columns[0]) for _ in counts]
    places, ends = pad_expert_groups(torch.tensor(counts, device=device), sum(counts))
    rows = tokens.new_zeros(sum(counts) + 16 * len(counts), columns[0]).index_copy(
        0, places, tokens
    )
    found = apply_grouped_linear(rows, ends, weights).index_select(0, places)
    exact = [x.detach().double().cpu().requires_grad_() for x in (tokens, *weights)]
    expected = torch.cat(
        [x @ w.t() for x, w in zip(exact[0].split(counts), exact[1:], strict=True)]
    )
    cotangent = draw(*found.shape).detach()
    grads = torch.autograd.grad(found, [tokens, *weights], cotangent)
    truths = torch.autograd.grad(expected, exact, cotangent.double().cpu())
    assert not grads[2].any(), "an expert without tokens has a gradient of zeros"
    pairs = zip((found, *grads), (expected, *truths), strict=True)
    errors = [relative_error(one.double().cpu(), other) for one, other in pairs if other.any()]
    figures = {"output_error": errors[0], "gradient_error": max(errors[1:])}
    assert max(figures.values()) <= (1e-2 if dtype == torch.bfloat16 else 1e-3), figures
    return figures


def check_deterministic(device: torch.device, dtype: torch.dtype) -> Figures:
    """With torch's deterministic algorithms, as `trainer.deterministic` asks for them, two runs
    give the same bits.
    """
    need("megatron")
    batch = make_batch()

    def run() -> list[Tensor]:
        with one_rank_actor(device, dtype) as (actor, _):
            shard, plan = share(batch)
            updates = [actor.update(shard, plan, 1.0) for _ in range(2)]
            assert not any(update.is_skipped for update in updates)
            weights = [tensor.detach().cpu().clone() for _, tensor in actor.export_shards()]
            return [*weights, actor.log_probs(shard, plan, 1.0, with_entropy=True).log_probs]

    with deterministic():
        first = run()
        second = run()
    num_different = sum(int((a != b).sum()) for a, b in zip(first, second, strict=True))
    assert num_different == 0, f"{num_different} numbers differ"
    return {"num_numbers": sum(tensor.numel() for tensor in first)}


@contextmanager
def deterministic() -> Iterator[None]:
    from rlhf_megatron.config.cuda_environment import DETERMINISM
    from rlhf_megatron.device import make_deterministic

    before = {name: os.environ.get(name) for name in DETERMINISM}
    os.environ |= DETERMINISM
    benchmark = torch.backends.cudnn.benchmark
    make_deterministic()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
        for name, value in before.items():
            os.environ.pop(name)
            os.environ |= {} if value is None else {name: value}


def max_error(value: Tensor, truth: Tensor) -> float:
    return float((value.detach().double().cpu() - truth.detach().double()).abs().max())


CHECKS: dict[str, Callable[[torch.device, torch.dtype], Figures]] = {
    "head_chunked": check_head,
    "head_chunked_stash": partial(check_head, stash=STASH_BYTES),
    "head_triton": partial(check_head, backend="triton"),
    "head_triton_stash": partial(check_head, backend="triton", stash=STASH_BYTES),
    "large_vocabulary_chunked": check_large_vocabulary,
    "large_vocabulary_triton": partial(check_large_vocabulary, backend="triton"),
    "self_check": check_self_check,
    "policy_loss": check_policy_loss,
    "main_grad": check_main_grad,
    "main_grad_untied": partial(check_main_grad, is_tied=False),
    "main_grad_distributed_optimizer": partial(check_main_grad, use_distributed_optimizer=True),
    "main_grad_untied_overlapped": partial(
        check_main_grad, is_tied=False, use_distributed_optimizer=True, overlap_grad_reduce=True
    ),
    "deterministic": check_deterministic,
    "grouped_experts": check_grouped_experts,
}

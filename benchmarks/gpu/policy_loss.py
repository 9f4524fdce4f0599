"""G9: the policy loss of 32k tokens with its gradient.

It is small; what counts is how often the host must start something. The loss is measured on the
device alone (in a CUDA graph) and as the trainer calls it; beside it what autograd makes of the
same loss, plain and compiled.
"""

# R rows

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.recorder import MissingError, Recorder
from benchmarks.gpu.timing import time_captured, time_run
from benchmarks.kernels.case import Case, CaseResult
from benchmarks.kernels.policy_loss import eager_sums
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.ranks.workers.actor_losses import make_policy_row_loss

NUM_ROWS = 32768
QUICK_ROWS = 100
LOSS_BAR_US = 15.0


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    recorder.attempt("policy loss", lambda: _loss(recorder))
    return recorder.result()


def _loss(recorder: Recorder) -> None:
    """ppo_clip with a k3 KL term and an entropy bonus: loss, gradient, metrics."""
    num_rows = QUICK_ROWS if recorder.is_quick else NUM_ROWS
    log_probs_R, entropies_R, columns = loss_problem(num_rows, recorder.device)
    calls = {
        name: loss_and_gradient(log_probs_R, entropies_R, columns, name == "fused")
        for name in ("fused", "eager")
    }
    fused, eager = (call() for call in calls.values())
    recorder.add(
        "fused and eager loss, relative difference", relative(fused[0], eager[0]), "", "", 1e-5
    )
    recorder.add(
        "fused and eager gradient, relative difference", relative(fused[1], eager[1]), "", "", 1e-5
    )
    for name, call in calls.items():
        times = time_run(call, recorder.device, recorder.limit_s)
        recorder.add(
            f"{name} loss, {num_rows} rows, as called",
            times.median * 1e6,
            "us",
            "forward and backward",
        )
        bar = LOSS_BAR_US if name == "fused" else None
        what = f"{name} loss, {num_rows} rows, on the device"
        recorder.attempt(
            what, lambda what=what, call=call, bar=bar: _on_device(recorder, what, call, bar)
        )
    recorder.attempt("compiled loss", lambda: _compiled(recorder, calls["eager"], num_rows))


def _on_device(
    recorder: Recorder, what: str, call: Callable[[], object], bar: float | None
) -> None:
    recorder.add(
        what, time_captured(call, recorder.device).median * 1e6, "us", "in a CUDA graph", bar
    )


def _compiled(recorder: Recorder, call: Callable[[], object], num_rows: int) -> None:
    if recorder.device.type != "cuda":
        raise MissingError("a GPU: compiling for a CPU takes a minute")
    times = time_run(torch.compile(call), recorder.device, recorder.limit_s)
    recorder.add(
        f"compiled loss, {num_rows} rows, as called",
        times.median * 1e6,
        "us",
        "torch.compile of eager",
    )


def loss_problem(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(log-probs, entropies, both leaves; columns). Some ratios are clipped on either side."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(num_rows, generator=generator, device=device) * std + mean

    log_probs_R = normal(0.5, -2.0)
    entropies_R = normal(0.2, 1.5)
    weights_R = torch.full((num_rows,), 1.0 / num_rows, device=device)
    columns = {
        "old_log_probs": log_probs_R + normal(0.3),
        "ref_log_probs": log_probs_R + normal(0.3),
        "advantages": normal(1.0),
        "loss_weights": weights_R,
        "metric_weights": weights_R,
    }
    return log_probs_R.requires_grad_(), entropies_R.requires_grad_(), columns


def loss_and_gradient(
    log_probs_R: Tensor, entropies_R: Tensor, columns: dict[str, Tensor], is_fused: bool
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that gives the loss and its gradient by the log-probs, as the trainer's row
    loss makes them.
    """
    config = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="k3")
    row_loss = make_policy_row_loss(config)
    forward = row_loss if is_fused else partial(eager_sums, row_loss)

    def call() -> tuple[Tensor, Tensor]:
        value, _ = forward(log_probs_R, entropies_R, columns)
        return value.detach(), torch.autograd.grad(value, [log_probs_R, entropies_R])[0]

    return call


def relative(value: Tensor, truth: Tensor) -> float:
    """L2 norm of the difference over that of `truth`, in float64."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())


CASE = Case("G9", "fused policy loss", run)

"""G9: the policy loss of 32k tokens with its gradient, and GAE over 1024 samples of 32768 tokens.

Both are small; what counts is how often the host must start something. The loss is measured on the device alone (in a
CUDA graph) and as the trainer calls it; beside it what autograd makes of the same loss, plain and compiled.
"""

# R rows, B samples, T packed tokens

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.head import why_no_triton
from benchmarks.gpu.recorder import MissingError, Recorder
from benchmarks.gpu.timing import time_captured, time_run
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.algorithms.advantages.base import AdvantageInputs
from rlhf_megatron.config.schema import ActorConfig, KernelsConfig
from rlhf_megatron.workers.losses import make_row_losses

NUM_ROWS, QUICK_ROWS = 32768, 100
GAE_SIZE, QUICK_GAE_SIZE = (1024, 32768), (5, 40)
LOSS_BAR_US, GAE_BAR_MS = 15.0, 0.6
GAMMA, LAM = 0.99, 0.95


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    recorder.attempt("gae", lambda: _gae(recorder))  # a CUDA graph that cannot be made would spoil what follows
    recorder.attempt("policy loss", lambda: _loss(recorder))
    return recorder.result()


def _loss(recorder: Recorder) -> None:
    """ppo_clip with a k3 KL term and an entropy bonus: loss, gradient, metrics."""
    num_rows = QUICK_ROWS if recorder.is_quick else NUM_ROWS
    log_probs_R, entropies_R, columns = loss_problem(num_rows, recorder.device)
    calls = {name: loss_and_gradient(log_probs_R, entropies_R, columns, name == "fused") for name in ("fused", "eager")}
    fused, eager = (call() for call in calls.values())
    recorder.add("fused and eager loss, relative difference", relative(fused[0], eager[0]), "", "", 1e-5)
    recorder.add("fused and eager gradient, relative difference", relative(fused[1], eager[1]), "", "", 1e-5)
    for name, call in calls.items():
        times = time_run(call, recorder.device, recorder.limit_s)
        recorder.add(f"{name} loss, {num_rows} rows, as called", times.median * 1e6, "us", "forward and backward")
        bar = LOSS_BAR_US if name == "fused" else None
        what = f"{name} loss, {num_rows} rows, on the device"
        recorder.attempt(what, lambda what=what, call=call, bar=bar: _on_device(recorder, what, call, bar))  # type: ignore[misc]
    recorder.attempt("compiled loss", lambda: _compiled(recorder, calls["eager"], num_rows))


def _on_device(recorder: Recorder, what: str, call: Callable[[], object], bar: float | None) -> None:
    recorder.add(what, time_captured(call, recorder.device).median * 1e6, "us", "in a CUDA graph", bar)


def _compiled(recorder: Recorder, call: Callable[[], object], num_rows: int) -> None:
    if recorder.device.type != "cuda":
        raise MissingError("a GPU: compiling for a CPU takes a minute")
    times = time_run(torch.compile(call), recorder.device, recorder.limit_s)
    recorder.add(f"compiled loss, {num_rows} rows, as called", times.median * 1e6, "us", "torch.compile of eager")


def loss_problem(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(log-probs, entropies, both leaves; columns). Some ratios are clipped on either side."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(std: float, mean: float = 0.0) -> Tensor:
        return torch.randn(num_rows, generator=generator, device=device) * std + mean

    log_probs_R, entropies_R = normal(0.5, -2.0), normal(0.2, 1.5)
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
    """A call that gives the loss and its gradient by the log-probs, as the trainer's row loss makes them."""
    kernels = KernelsConfig(fused_loss=is_fused)
    config = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_type="k3", kernels=kernels)
    row_loss = make_row_losses(config)["policy"]

    def call() -> tuple[Tensor, Tensor]:
        value, _ = row_loss(log_probs_R, entropies_R, columns)
        return value.detach(), torch.autograd.grad(value, [log_probs_R, entropies_R])[0]

    return call


def relative(value: Tensor, truth: Tensor) -> float:
    """L2 norm of the difference over that of `truth`, in float64."""
    return float((value.double() - truth.double()).norm() / truth.double().norm())


def _gae(recorder: Recorder) -> None:
    if reason := why_no_triton(recorder.device):
        raise MissingError(f"the Triton kernel: {reason}")
    from rlhf_megatron.kernels.gae_triton import advantages_and_returns

    num_samples, num_steps = QUICK_GAE_SIZE if recorder.is_quick else GAE_SIZE
    inputs = gae_problem(num_samples, num_steps, recorder.device)
    assert inputs.token_rewards_T is not None and inputs.values_T is not None
    rewards_BT, values_BT = (x.view(num_samples, num_steps) for x in (inputs.token_rewards_T, inputs.values_T))
    found_BT = advantages_and_returns(inputs, GAMMA, LAM)[0].view_as(rewards_BT)
    expected_BT = loop(rewards_BT, values_BT)
    recorder.add("gae and the loop over steps, relative difference", relative(found_BT, expected_BT), "", "", 1e-5)
    del found_BT, expected_BT
    size = f"{num_samples} x {num_steps}"
    times = time_run(lambda: advantages_and_returns(inputs, GAMMA, LAM), recorder.device, recorder.limit_s)
    recorder.add_times(f"gae, {size}", times, GAE_BAR_MS)
    recorder.add(f"gae, {size}, rate", 17 * rewards_BT.numel() / times.median / 1e9, "GB/s", "9 bytes read, 8 written")
    of_loop = time_run(lambda: loop(rewards_BT, values_BT), recorder.device, 0.0)
    recorder.add_times(f"loop over steps, {size}", of_loop)


def gae_problem(num_samples: int, num_steps: int, device: torch.device) -> AdvantageInputs:
    """Every token is a response token."""
    generator = torch.Generator(device).manual_seed(0)
    num_tokens = num_samples * num_steps
    return AdvantageInputs(
        rewards_B=torch.zeros(num_samples, device=device),
        group_ids_B=torch.arange(num_samples, device=device),
        is_valid_B=torch.ones(num_samples, dtype=torch.bool, device=device),
        response_mask_T=torch.ones(num_tokens, dtype=torch.bool, device=device),
        offsets=torch.arange(num_samples + 1, device=device) * num_steps,
        token_rewards_T=torch.randn(num_tokens, generator=generator, device=device),
        values_T=torch.randn(num_tokens, generator=generator, device=device),
    )


def loop(rewards_BT: Tensor, values_BT: Tensor) -> Tensor:
    """[B, T]: the recurrence as it is written down, a column at a time."""
    advantages_TB = torch.empty_like(rewards_BT.T)
    after_B = next_values_B = torch.zeros_like(rewards_BT[:, 0])
    for step in reversed(range(rewards_BT.shape[1])):
        values_B = values_BT[:, step]
        after_B = rewards_BT[:, step] + GAMMA * next_values_B - values_B + GAMMA * LAM * after_B
        advantages_TB[step], next_values_B = after_B, values_B
    return advantages_TB.T


CASE = Case("G9", "fused policy loss, and GAE", run)

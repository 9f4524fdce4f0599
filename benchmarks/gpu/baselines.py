"""What the head is compared with, in the same process: the naive one, the same compiled, and
published kernels.

    naive, naive compiled     16-bit logits, float32 log_softmax, log-prob and entropy; autograd
    liger-kernel              fused linear cross entropy: mean of the log-probs, no entropy;
                              gradients in its forward
    cut-cross-entropy         log-probs, no entropy; its backward leaves out what it takes
                              for negligible

None of them knows a main_grad: each returns the weight's gradient in the weight's type. A package
that is missing is skipped by name. Figures that others have published stand in
`published`, as text.
"""

# T tokens, V vocabulary rows, H hidden

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu.head import HeadInputs
from benchmarks.gpu.recorder import MissingError, Recorder
from benchmarks.gpu.timing import time_parts, time_run

MAX_NAIVE_TOKENS = 8192  # of a whole vocabulary: 20 bytes a logit


class Baseline:
    """`function`: (hidden, weight, targets) -> what gets gradients. `note`: what it leaves out."""

    def __init__(
        self, inputs: HeadInputs, function: Callable[..., tuple[Tensor, ...]], note: str = ""
    ) -> None:
        self.inputs = inputs
        self.function = function
        self.note = note
        self.outputs: tuple[Tensor, ...] = ()

    def forward(self) -> None:
        inputs = self.inputs
        self.outputs = self.function(inputs.hidden_TH, inputs.weight_VH, inputs.targets_T)

    def forward_only(self) -> None:
        # detached: some form gradients in their forward pass where an input asks for them
        inputs = self.inputs
        with torch.no_grad():
            self.function(inputs.hidden_TH.detach(), inputs.weight_VH.detach(), inputs.targets_T)

    def backward(self) -> None:
        grads = (self.inputs.grad_log_probs_T, self.inputs.grad_entropies_T)
        upstream = [
            grad.to(out.dtype) if out.dim() else None
            for out, grad in zip(self.outputs, grads, strict=False)
        ]
        torch.autograd.backward(list(self.outputs), upstream)

    def both(self) -> None:
        self.forward()
        self.backward()
        self.forget()

    def forget(self) -> None:
        self.outputs = ()
        self.inputs.forget_gradients()


def naive_outputs(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [T] in float32, of logits that were rounded to the inputs' type."""
    log_p_TV = (hidden_TH @ weight_VH.T).float().log_softmax(-1)
    log_probs_T = log_p_TV.gather(-1, targets_T[:, None])[:, 0]
    return log_probs_T, -(log_p_TV.exp() * log_p_TV).sum(-1)


def naive(inputs: HeadInputs) -> Baseline:
    return Baseline(inputs, naive_outputs, "16-bit logits")


def compiled(inputs: HeadInputs) -> Baseline:
    if inputs.hidden_TH.device.type != "cuda":
        raise MissingError("a GPU: compiling for a CPU takes a minute")
    return Baseline(inputs, torch.compile(naive_outputs, dynamic=False), "torch.compile of naive")


def liger(inputs: HeadInputs) -> Baseline:
    need("liger_kernel", inputs)
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def function(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> tuple[Tensor]:
        return (liger_fused_linear_cross_entropy(hidden_TH, weight_VH, targets_T),)

    return Baseline(inputs, function, "mean of log-probs only, no entropy")


def cut_cross_entropy(inputs: HeadInputs) -> Baseline:
    need("cut_cross_entropy", inputs)
    from cut_cross_entropy import linear_cross_entropy

    def function(hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor) -> tuple[Tensor]:
        return (linear_cross_entropy(hidden_TH, weight_VH, targets_T, reduction="none"),)

    return Baseline(inputs, function, "log-probs only, no entropy")


BASELINES: dict[str, Callable[[HeadInputs], Baseline]] = {
    "naive": naive,
    "naive compiled": compiled,
    "liger-kernel": liger,
    "cut-cross-entropy": cut_cross_entropy,
}


def need(package: str, inputs: HeadInputs) -> None:
    """Raises MissingError where the package is not installed, or has kernels for GPUs alone and
    there is none.
    """
    if importlib.util.find_spec(package) is None:
        raise MissingError(f"the package {package}")
    if inputs.hidden_TH.device.type != "cuda":
        raise MissingError(f"a GPU, as {package} does")


def add_baselines(recorder: Recorder, label: str, inputs: HeadInputs, with_backward: bool) -> None:
    """Their times on these inputs: forward without gradient, or the backward pass and
    the two together.
    """
    for name, make in BASELINES.items():
        recorder.attempt(
            f"{label}, {name}",
            lambda name=name, make=make: _measure(
                recorder, f"{label}, {name}", make(inputs), with_backward
            ),
        )
        inputs.forget_gradients()


def _measure(recorder: Recorder, name: str, baseline: Baseline, with_backward: bool) -> None:
    limit_s = recorder.limit_s / 2
    recorder.note(name, baseline.note)
    if not with_backward:
        recorder.add_times(name, time_run(baseline.forward_only, recorder.device, limit_s))
        return
    _, backward = time_parts(
        [baseline.forward, baseline.backward], recorder.device, limit_s, before=baseline.forget
    )
    recorder.add_times(name, backward)
    recorder.add_times(f"{name}, with forward", time_run(baseline.both, recorder.device, limit_s))

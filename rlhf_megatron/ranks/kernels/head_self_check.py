"""A backend of `compute_linear_log_probs` against the reference, on a slice of what a run really
has. No collectives in here.

The slice: some rows of the hidden states that this rank holds, and the end of its vocabulary shard,
padding included, in two chunks and a ragged rest. It is taken for a whole vocabulary, with targets
spread over it, so that no other rank is needed. Compared are log-probs, entropies and both
gradients, the way to the weight's gradient as in training.
"""

# S tokens of this rank, R rows of the slice, V vocabulary shard (with padding), C columns of the
# slice, H hidden

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend, compute_linear_log_probs

_MAX_ROWS = 64
# of the slice of the weight: the reference has it, and its gradient, in float32
_MAX_ELEMENTS = 2**24
_RAGGED = 61  # columns behind two chunks: no block size divides it
_PADDING = 16  # columns at most
# of a chunk, where it is large enough: as the run's own chunk, which a compiler may build upon
_DIVISOR = 16
_FORWARD_BOUND = {torch.float64: 1e-9}  # else: logits that were rounded to 16 bits are off by 1e-2
_FORWARD_BOUND_16 = 1e-3
# a sink has float32
_BACKWARD_BOUND = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2}
_BACKWARD_BOUND_16 = 3e-2  # bfloat16 keeps 8 bits of each logit's gradient


@dataclass(frozen=True)
class SelfCheckResult:
    """The errors of a backend by result: the L2 norm of the difference, relative to the size of the
    terms that are added up in the result.
    """

    errors: dict[str, float]
    bounds: dict[str, float]
    num_rows: int
    num_columns: int

    @property
    def is_passed(self) -> bool:
        """Return whether all errors are within their bounds; also True where the reference is not
        finite, or the slice too small, so that nothing was measured.
        """
        return all(error <= self.bounds[name] for name, error in self.errors.items())

    def __str__(self) -> str:
        """Return a line with each error and its bound."""
        figures = ", ".join(
            f"{name} {error:.2g} (at most {self.bounds[name]:g})"
            for name, error in self.errors.items()
        )
        return f"relative errors on {self.num_rows} rows x {self.num_columns} columns: {figures}"


def check_log_prob_backend(
    backend: LogProbBackend,
    hidden_SH: Tensor,
    weight_VH: Tensor,
    *,
    temperature: float,
    num_columns: int,
    chunk_size: int,
    has_sink: bool,
    stash_bytes: int,
    softcap: float | None = None,
) -> SelfCheckResult:
    """Run `backend` on a slice of these hidden states and this weight, and return its errors
    against the reference. `num_columns` is the number of rows of `weight_VH` that are no padding;
    `has_sink` says that the weight's gradient goes to a sink in the run.

    Wait for the device. Raise what the backend raises.
    """
    slice_CH, num_real, chunk = _slice_vocabulary_shard(weight_VH.detach(), num_columns, chunk_size)
    rows_RH = _select_spread_rows(hidden_SH.detach())
    num_rows = rows_RH.shape[0]
    if num_real < 2 or num_rows < 1:
        return SelfCheckResult({}, {}, num_rows, num_real)
    trial = _HeadTrial(
        _make_spread_indices(num_rows, num_real, rows_RH.device), temperature, num_real, softcap
    )
    wide = torch.promote_types(rows_RH.dtype, torch.float32)
    wanted = trial.run_backend("reference", rows_RH.to(wide), slice_CH.to(wide), num_real)
    found = trial.run_backend(backend, rows_RH, slice_CH, chunk, has_sink, stash_bytes)
    scales = _compute_error_scales(rows_RH.to(wide), slice_CH.to(wide), trial.targets_R, wanted)
    differences = [(found[name].to(wide) - wanted[name]).norm() / scales[name] for name in wanted]
    is_finite = torch.stack([value.isfinite().all() for value in wanted.values()]).all()
    *errors, verdict = torch.stack([*differences, is_finite.to(wide)]).tolist()
    if not verdict:
        return SelfCheckResult({}, {}, num_rows, num_real)
    return SelfCheckResult(
        {
            name: math.inf if math.isnan(error) else error
            for name, error in zip(wanted, errors, strict=True)
        },
        _choose_error_bounds(rows_RH.dtype, stash_bytes > 0),
        num_rows,
        num_real,
    )


class _ScratchGradientSink:
    """A sink whose buffer is thrown away."""

    def __init__(self, weight_CH: Tensor) -> None:
        self.buffer = torch.zeros_like(weight_CH, dtype=torch.float32)

    def get_buffer_VH(self) -> Tensor:
        """Return the float32 buffer of the trial."""
        return self.buffer

    def make_autograd_gradient(self) -> None:
        """Return None: autograd gets no gradient of the weight."""


@dataclass(frozen=True)
class _HeadTrial:
    targets_R: Tensor
    temperature: float
    vocab_size: int
    softcap: float | None

    def run_backend(
        self,
        backend: LogProbBackend,
        rows_RH: Tensor,
        weight_CH: Tensor,
        chunk_size: int,
        has_sink: bool = False,
        stash_bytes: int = 0,
    ) -> dict[str, Tensor]:
        """Return log-probs, entropies, hidden gradient and weight gradient of a backend, by name.
        The upstream gradients have both signs, and differ between log-probs and entropies.
        """
        sink = _ScratchGradientSink(weight_CH) if has_sink else None
        with torch.enable_grad():
            hidden_RH = rows_RH.clone().requires_grad_()
            weight_CH = weight_CH.detach().requires_grad_()
            outputs = compute_linear_log_probs(
                hidden_RH,
                weight_CH,
                self.targets_R,
                temperature=self.temperature,
                vocab_start=0,
                vocab_size=self.vocab_size,
                tp_group=None,
                chunk_size=chunk_size,
                with_entropy=True,
                weight_grad_sink=sink,
                stash_bytes=stash_bytes,
                softcap=self.softcap,
                backend=backend,
            )
            assert outputs.entropies_R is not None
            upstream_R = _make_upstream_gradient(outputs.log_probs_R)
            total = upstream_R * outputs.log_probs_R + upstream_R.flip(0) * outputs.entropies_R
            grad_hidden, grad_weight = torch.autograd.grad(
                total.sum(), (hidden_RH, weight_CH), allow_unused=True
            )
        if sink is not None:
            grad_weight = sink.buffer
        assert grad_hidden is not None and grad_weight is not None
        return {
            "log_probs": outputs.log_probs_R.detach(),
            "entropies": outputs.entropies_R.detach(),
            "hidden gradient": grad_hidden,
            "weight gradient": grad_weight,
        }


def _make_upstream_gradient(like_R: Tensor) -> Tensor:
    """Return numbers from -1 to 2 in the shape of `like_R`, as upstream gradients."""
    return torch.linspace(-1.0, 2.0, like_R.numel(), dtype=like_R.dtype, device=like_R.device)


def _slice_vocabulary_shard(
    weight_VH: Tensor, num_columns: int, chunk_size: int
) -> tuple[Tensor, int, int]:
    """Return (the end of the shard, the number of its rows that are no padding, a chunk size that
    cuts these rows in two chunks and a rest).
    """
    end = min(weight_VH.shape[0], num_columns + _PADDING)
    fitting = max(1, (_MAX_ELEMENTS // weight_VH.shape[1] - _RAGGED - _PADDING) // 2)
    first = max(0, min(end, num_columns) - 2 * min(chunk_size, fitting) - _RAGGED)
    num_real = max(0, num_columns - first)
    chunk = max(1, min(chunk_size, fitting, num_real * 2 // 5))
    return weight_VH[first:end], num_real, chunk // _DIVISOR * _DIVISOR or chunk


def _select_spread_rows(hidden_SH: Tensor) -> Tensor:
    """Return [R, H]: rows at equal distances, because filler documents stand at the front."""
    num_rows = min(_MAX_ROWS, hidden_SH.shape[0])
    return hidden_SH[_make_spread_indices(num_rows, hidden_SH.shape[0], hidden_SH.device)]


def _make_spread_indices(count: int, size: int, device: torch.device) -> Tensor:
    """Return [count] int64: indices from 0 to size - 1 at equal distances."""
    return torch.arange(count, device=device) * (size - 1) // max(count - 1, 1)


def _compute_error_scales(
    rows_RH: Tensor, weight_CH: Tensor, targets_R: Tensor, expected_results: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return, for each result, the size that its rounding errors are proportional to. For gradients
    this is at least the size of the target's term, against which the rest may cancel where the
    model is sure; for log-probs and entropies at least 1 a row, since both may be near 0.
    """
    upstream_R1 = _make_upstream_gradient(expected_results["log_probs"])[:, None]
    least = {
        "log_probs": torch.ones_like(expected_results["log_probs"]),
        "entropies": torch.ones_like(expected_results["entropies"]),
        "hidden gradient": upstream_R1 * weight_CH[targets_R],
        "weight gradient": upstream_R1 * rows_RH,
    }
    tiny = torch.finfo(rows_RH.dtype).tiny
    return {
        name: torch.maximum(value.norm(), least[name].norm()).clamp_min(tiny)
        for name, value in expected_results.items()
    }


def _choose_error_bounds(dtype: torch.dtype, has_stash: bool) -> dict[str, float]:
    """Return the largest accepted error of each result. A stash in float16 costs float32 and
    float64 gradients some of their digits.
    """
    forward = _FORWARD_BOUND.get(dtype, _FORWARD_BOUND_16)
    backward = _BACKWARD_BOUND.get(dtype, _BACKWARD_BOUND_16)
    backward = max(backward, _BACKWARD_BOUND[torch.float32]) if has_stash else backward
    return dict(
        zip(
            ("log_probs", "entropies", "hidden gradient", "weight gradient"),
            (forward, forward, backward, backward),
            strict=True,
        )
    )

"""G6: the passes over a tile alone, in bytes a second: statistics of each row, and the gradient
of the logits.

The bar is on what others have published a figure for: statistics of 16-bit logits of the whole
vocabulary. The kernels' own tiles are float32; a device-to-device copy shows what the
memory can do.
"""

# R rows, C columns

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.head import DEFAULT_CHUNK_SIZE, FULL, QUICK, backends
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.timing import time_run
from benchmarks.kernels.case import Case, CaseResult
from rlhf_megatron.ranks.kernels.head_exchange import PackedStatistics
from rlhf_megatron.ranks.kernels.log_prob import LogProbBackend
from rlhf_megatron.ranks.kernels.logit_tile_ops import RowGradientInputs, TileOps, TorchTileOps

BAR_MS = 0.75


def run(is_quick: bool) -> CaseResult:
    recorder = Recorder(is_quick)
    shape = QUICK if is_quick else FULL
    num_rows = shape.num_tokens
    narrow = 64 if is_quick else DEFAULT_CHUNK_SIZE
    recorder.attempt("copy", lambda: _copy(recorder, num_rows * narrow))
    for backend in reversed(backends(recorder.device)):
        ops = tile_ops(backend)
        tiles: list[tuple[str, int, torch.dtype, float | None]] = [
            ("float32 tile", narrow, torch.float32, None)
        ]
        if backend == "triton":  # the other one makes its sums in the tile's own memory, and type
            tiles = [
                ("16-bit logits, whole vocabulary", shape.vocab, torch.bfloat16, BAR_MS),
                *tiles,
            ]
        for name, num_columns, dtype, bar_ms in tiles:
            what = f"statistics, {name}, {backend}"
            size = (num_rows, num_columns)
            recorder.attempt(what, partial(_statistics, recorder, what, ops, size, dtype, bar_ms))
        recorder.attempt(
            f"gradient, {backend}",
            lambda ops=ops: _gradient(recorder, backend, ops, num_rows, narrow),  # noqa: B023
        )
    return recorder.result()


def tile_ops(backend: LogProbBackend) -> TileOps:
    if backend == "chunked":
        return TorchTileOps()
    from rlhf_megatron.ranks.kernels.log_prob_triton import TritonTileOps

    return TritonTileOps()


def _copy(recorder: Recorder, num_elements: int) -> None:
    source = torch.randn(num_elements, device=recorder.device)
    target = torch.empty_like(source)
    _add(recorder, "copy of a float32 tile", lambda: target.copy_(source), 8 * num_elements)


def _statistics(
    recorder: Recorder,
    what: str,
    ops: TileOps,
    size: tuple[int, int],
    dtype: torch.dtype,
    bar_ms: float | None,
) -> None:
    """Log-prob and entropy of each row: one pass. Then the same with the stash written."""
    logits_RC, columns_R, packed = _problem(recorder, size, dtype)
    num_bytes = logits_RC.numel() * dtype.itemsize
    _add(
        recorder,
        what,
        lambda: ops.update_statistics(logits_RC, None, columns_R, packed.select_rows()),
        num_bytes,
        bar_ms,
    )
    if dtype == torch.float32:
        stash_RC = torch.empty(size, device=recorder.device, dtype=torch.float16)
        stash_max_R = torch.empty(size[0], device=recorder.device)
        _add(
            recorder,
            f"{what}, with stash",
            lambda: ops.update_statistics(
                logits_RC, None, columns_R, packed.select_rows(), stash_RC, stash_max_R
            ),
            num_bytes + 2 * stash_RC.numel(),
        )


def _gradient(
    recorder: Recorder, backend: LogProbBackend, ops: TileOps, num_rows: int, num_columns: int
) -> None:
    """Of log-prob and entropy: the tile is read, a 16-bit one is written."""
    logits_RC, columns_R, _ = _problem(recorder, (num_rows, num_columns), torch.float32)
    log_z_R = logits_RC.logsumexp(1)
    ones_R = torch.ones_like(log_z_R)
    rows = RowGradientInputs(log_z_R, None, ones_R, ones_R, ones_R)
    num_bytes = logits_RC.numel() * (4 + recorder.dtype.itemsize)
    _add(
        recorder,
        f"gradient, float32 tile, {backend}",
        lambda: ops.compute_logit_gradient(logits_RC, columns_R, rows, recorder.dtype),
        num_bytes,
    )


def _problem(
    recorder: Recorder, size: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, PackedStatistics]:
    generator = torch.Generator(recorder.device).manual_seed(0)
    logits_RC = torch.randn(size, generator=generator, device=recorder.device, dtype=dtype)
    columns_R = torch.randint(0, size[1], size[:1], generator=generator, device=recorder.device)
    return (
        logits_RC,
        columns_R,
        PackedStatistics.make_empty(size[0], True, False, torch.float32, recorder.device),
    )


def _add(
    recorder: Recorder,
    what: str,
    run: Callable[[], object],
    num_bytes: int,
    bar_ms: float | None = None,
) -> None:
    times = time_run(run, recorder.device, recorder.limit_s)
    recorder.add_times(what, times, bar_ms)
    recorder.add(f"{what}, rate", num_bytes / times.median / 1e9, "GB/s", "bytes read and written")


CASE = Case("G6", "passes over a materialised tile", run)

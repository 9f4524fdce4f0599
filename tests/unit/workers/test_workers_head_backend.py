"""Which backend of the head a role takes, and that a run goes on with a right one where the
first is wrong.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_head_jobs import CheckedRun, Crashing, WrongGradient, WrongStatistics, run_checked

from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.controller.observe.metrics.performance_metrics import LmHeadWatch
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.ranks.kernels.head_self_check import SelfCheckResult
from rlhf_megatron.ranks.kernels.logit_tile_ops import TorchTileOps
from rlhf_megatron.ranks.workers import head_backend
from rlhf_megatron.ranks.workers.head_backend import (
    CheckedHeadBackend,
    HeadBackendChoice,
    choose_head_backend,
)
from rlhf_megatron.ranks.workers.rank_reports import HeadReport
from rlhf_megatron.runtime.role_proxies import RoleProxies

CPU = torch.device("cpu")
MIB = 1 << 20
PASSED = SelfCheckResult({"entropies": 1e-7}, {"entropies": 1e-3}, 64, 317)
FAILED = SelfCheckResult(
    {"log_probs": 1e-7, "entropies": 0.25}, {"log_probs": 1e-3, "entropies": 1e-3}, 64, 317
)
ONE_RANK: Any = SimpleNamespace(layout=SimpleNamespace(tp=1))


@pytest.mark.parametrize(
    ("kernels", "dtype", "num_megabytes"),
    [
        ({}, torch.float32, 0),
        ({}, torch.bfloat16, 512),
        ({}, torch.float16, 512),
        ({"stash_megabytes": 7}, torch.float32, 7),
        ({"stash_megabytes": 0}, torch.bfloat16, 0),
    ],
)
def test_the_stash_that_the_configuration_leaves_open(
    kernels: dict[str, Any], dtype: torch.dtype, num_megabytes: int
) -> None:
    choice = choose_head_backend(KernelsConfig(**kernels), CPU, dtype)
    assert choice.stash_bytes == num_megabytes * MIB
    assert ("no stash" in str(choice)) == (num_megabytes == 0)


def test_auto_takes_triton_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_head_backend(KernelsConfig(), CPU, torch.float32).backend == "chunked"
    assert "auto: triton" in choose_head_backend(KernelsConfig(), CPU, torch.float32).reason, (
        "why it does not run here"
    )
    with pytest.raises(
        ValueError, match=r"actor.kernels.backend \(triton\) must be one that runs here: .*Use auto"
    ):
        choose_head_backend(KernelsConfig("triton"), CPU, torch.float32)
    monkeypatch.setattr(head_backend, "try_triton_kernel", lambda device: "")
    assert choose_head_backend(KernelsConfig(), CPU, torch.float32).backend == "triton"
    assert choose_head_backend(KernelsConfig("triton"), CPU, torch.float32).backend == "triton"
    for named in ("chunked", "reference"):
        found = choose_head_backend(KernelsConfig(named), CPU, torch.bfloat16)
        assert str(found) == f"{named} (as configured), stash of 512 MiB a micro-batch"


def test_only_the_first_calls_are_checked() -> None:
    checked = CheckedHeadBackend(HeadBackendChoice("chunked", "", 0), 2, "actor", ONE_RANK)
    seen: list[str] = []

    def check(backend: str) -> SelfCheckResult:
        seen.append(backend)
        return PASSED

    for _ in range(5):
        checked.check_and_fall_back(check)
    assert seen == ["chunked", "chunked"] and checked.backend == "chunked"
    assert checked.make_report().notices == () and checked.make_report().num_checks_left == 0
    CheckedHeadBackend(
        HeadBackendChoice("chunked", "", 0), 0, "actor", ONE_RANK
    ).check_and_fall_back(lambda backend: pytest.fail("asked"))
    CheckedHeadBackend(
        HeadBackendChoice("reference", "", 0), 9, "actor", ONE_RANK
    ).check_and_fall_back(lambda backend: pytest.fail("asked"))


def test_the_next_backend_is_checked_at_once_and_the_reference_never() -> None:
    checked = CheckedHeadBackend(HeadBackendChoice("triton", "", 0), 1, "actor", ONE_RANK)

    def check(backend: str) -> SelfCheckResult:
        if backend == "triton":
            raise RuntimeError("no compiler\nand more")
        return FAILED

    checked.check_and_fall_back(check)
    report = checked.make_report()
    assert (checked.backend, report.num_checks_left) == ("reference", 0)
    compiler, numbers = report.notices
    assert compiler.startswith("the triton backend of the head failed its self-check")
    assert "RuntimeError: no compiler. The run goes on with chunked" in compiler
    assert (
        "64 rows x 317 columns: log_probs 1e-07 (at most 0.001), entropies 0.25 (at most 0.001)"
        in numbers
    )
    assert "goes on with reference" in numbers


def test_memory_that_runs_out_is_no_reason_to_take_another_backend() -> None:
    checked = CheckedHeadBackend(HeadBackendChoice("chunked", "", 0), 1, "actor", ONE_RANK)

    def check(backend: str) -> SelfCheckResult:
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        checked.check_and_fall_back(check)
    assert checked.backend == "chunked"


@cache
def problem() -> tuple[dict[str, Tensor], MiniBatch]:
    model = reference.make_model("llama")
    state = {key: value.clone() for key, value in model.state_dict().items()}
    batch = reference.make_batch()
    with torch.no_grad():
        log_probs, _ = reference.token_log_probs(model, batch)
    return state, reference.with_past(batch, log_probs)


def run(
    dist_pool: DistPool, kernels: dict[str, Any], layout: dict[str, Any], **options: Any
) -> list[CheckedRun]:
    state, batch = problem()
    arguments = {"name": "llama", "state": state, "batch": batch, "kernels": kernels, **options}
    return dist_pool.run(run_checked, timeout_s=300, **layout, **arguments)


def are_equal(found: list[CheckedRun], wanted: list[CheckedRun]) -> bool:
    """Bit for bit: log-probs, entropies and gradients of all ranks."""
    for mine, other in zip(found, wanted, strict=True):
        if mine.log_probs is not None and other.log_probs is not None:
            if not torch.equal(mine.log_probs.log_probs, other.log_probs.log_probs):
                return False
            if not torch.equal(mine.log_probs.entropies, other.log_probs.entropies):
                return False
        if any(
            not torch.equal(mine.main_grads[key], grad) for key, grad in other.main_grads.items()
        ):
            return False
    return True


@pytest.mark.dist
@pytest.mark.parametrize("mistake", [WrongGradient, WrongStatistics, Crashing])
def test_a_run_with_a_wrong_backend_is_one_with_the_reference(
    dist_pool: DistPool, mistake: type[TorchTileOps]
) -> None:
    """Without the check the mistake gets through, so it is one."""
    wanted = run(dist_pool, {"backend": "reference"}, {})
    found = run(dist_pool, {}, {}, mistake=mistake)
    assert are_equal(found, wanted)
    (rank,) = found
    assert rank.report is not None
    assert (rank.report.backend, len(rank.report.notices)) == ("reference", 1)
    assert rank.warnings == [f"[actor dp0 pp0 tp0] {rank.report.notices[0]}"]
    if mistake is not Crashing:
        assert not are_equal(run(dist_pool, {"num_self_checks": 0}, {}, mistake=mistake), wanted)


@pytest.mark.dist
def test_all_tensor_parallel_ranks_fall_back_together(dist_pool: DistPool) -> None:
    """Backends exchange different things. The rank that found the mistake tells it."""
    layout = {"tp": 2, "sequence_parallel": True}
    wanted = run(dist_pool, {"backend": "reference"}, layout)
    found = run(dist_pool, {}, layout, mistake=WrongGradient, on_tp_rank=1)
    assert are_equal(found, wanted)
    reports = [rank.report for rank in found]
    assert [report.backend for report in reports if report is not None] == ["reference"] * 2
    assert [len(rank.warnings) for rank in found] == [0, 1]
    assert (
        found[1]
        .warnings[0]
        .startswith("[actor dp0 pp0 tp1] the chunked backend of the head failed")
    )


@pytest.mark.dist
def test_triton_that_cannot_run_gives_way_to_chunked(dist_pool: DistPool) -> None:
    """On a CPU its launcher, or the missing package, raises for real."""
    wanted = run(dist_pool, {"backend": "chunked"}, {"pp": 2})
    found = run(dist_pool, {}, {"pp": 2}, is_triton_taken=True)
    assert are_equal(found, wanted)
    assert found[0].report is None, "off the last stage"
    last = found[1].report
    assert last is not None and last.backend == "chunked" and "triton backend" in last.notices[0]


class FakeGroup:
    """Answers of the ranks, one list a step."""

    def __init__(self, answers: dict[str, list[list[HeadReport | None]]]) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def broadcast_call(self, method: str) -> Future[Any]:
        self.calls.append(method)
        future: Future[Any] = Future()
        future.set_result(self.answers[method].pop(0))
        return future


def test_the_controller_tells_the_choice_once_and_each_fall_back() -> None:
    choice = "chunked (auto: x), no stash"
    good = HeadReport("actor dp0 pp1 tp0", choice, "chunked", 1, ())
    bad = HeadReport("actor dp0 pp1 tp1", choice, "reference", 0, ("it failed",))
    done = HeadReport("actor dp0 pp1 tp0", choice, "chunked", 0, ())
    alone = HeadReport("reference dp0 pp1 tp0", choice, "chunked", 0, ())
    group: Any = FakeGroup(
        {
            "actor.head_report": [[None, good, good], [None, done, bad]],
            "reference.head_report": [[None, alone, alone], [None, alone, alone]],
        }
    )
    notes: list[str] = []
    watch = LmHeadWatch([RoleProxies(group).actor, RoleProxies(group).reference], notes.append)
    assert watch.collect_metrics() == {"perf/num_head_fallbacks": 0.0}
    assert notes == [f"head of the actor: {choice}", f"head of the reference: {choice}"]
    assert watch.collect_metrics() == watch.collect_metrics() == {"perf/num_head_fallbacks": 1.0}
    assert notes[2:] == ["[actor dp0 pp1 tp1] it failed"]
    assert len(group.calls) == 4, "nobody is asked once the checks are over"

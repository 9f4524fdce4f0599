"""Saving while training goes on, saving that fails on one rank,
and loading under another layout.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import workers_reference as reference
from checkpoint_jobs import failing_saves, overtaken_save, resumed
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import CONFIG, OVERLAPPED, SHARDED, train, whole

from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.weights.checkpoint_manifest import SaveResult

pytestmark = pytest.mark.dist
NAME = "qwen3_tied"
# times the error that float32 has of its own: transformers against float64, over some
# orders of summation
BAR = 3.0


@dataclass(frozen=True)
class Case:
    state: dict[str, Tensor]
    batch: MiniBatch
    exact: list[reference.Step]  # float64
    draws: list[list[reference.Step]]  # float32


@pytest.fixture(scope="module")
def case() -> Case:
    model = reference.make_model(NAME)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    batch = reference.make_batch()
    with torch.no_grad():
        log_probs, _ = reference.token_log_probs(model, batch)
    batch = reference.with_past(batch, log_probs)
    exact = reference.run_steps(reference.make_model(NAME).double(), batch, "policy")
    draws = reference.in_float32(
        lambda: reference.make_model(NAME),
        lambda model: reference.run_steps(model, batch, "policy"),
    )
    return Case(state, batch, exact, draws)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "dtype": torch.float32},
        {"dp": 2, "dtype": torch.bfloat16, "megatron": OVERLAPPED, "bucket_size": 20_000},
    ],
    ids=["tp2", "dp2 overlapped bf16"],
)
def test_a_save_holds_the_values_of_the_moment_it_was_asked_for(
    dist_pool: DistPool, case: Case, tmp_path: Path, layout: dict[str, Any]
) -> None:
    ranks = dist_pool.run(
        overtaken_save,
        name=NAME,
        state=case.state,
        batch=case.batch,
        directory=tmp_path,
        timeout_s=300,
        **layout,
    )
    assert not all(rank["was_done"] for rank in ranks), (
        "the writer was not overtaken; this test shows nothing"
    )
    for rank in ranks:
        assert rank["has_moved"]
        assert rank["is_loaded"] and rank["moments"] and rank["goes_on"]
        assert rank["result"].error is None
    records = {record.path: record for rank in ranks for record in rank["result"].files}
    files = {path.relative_to(tmp_path).as_posix(): path for path in (tmp_path / "actor").iterdir()}
    assert records.keys() == files.keys() and len(files) >= 4
    for name, path in files.items():
        assert records[name].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert records[name].num_bytes == path.stat().st_size


def test_a_rank_that_cannot_write_is_an_error_on_all_ranks(
    dist_pool: DistPool, case: Case, tmp_path: Path
) -> None:
    ranks: list[dict[str, SaveResult]] = dist_pool.run(
        failing_saves,
        tp=2,
        name=NAME,
        state=case.state,
        batch=case.batch,
        directory=tmp_path,
        timeout_s=300,
    )
    for name, words in {
        "injected": ("tp1", "No space left"),
        "before": ("tp0", "No space left"),
        "late": ("tp1", "still writing"),
        "gone": ("tp0", "No such file", "and 1 other rank"),
        "read only": ("tp0", "/sys/actor"),
        "limit": ("tp1",),
        "metadata": ("tp0", "Is a directory"),
    }.items():
        errors = {rank[name].error for rank in ranks}
        assert len(errors) == 1, f"{name}: the ranks do not agree: {errors}"
        (error,) = errors
        assert error is not None and all(word in error for word in words), f"{name}: {error}"
        assert all(rank[name].files == () for rank in ranks)
    assert all(rank["good"].error is None and rank["good"].files for rank in ranks)


def test_a_changed_learning_rate_is_in_use_after_a_resume(
    dist_pool: DistPool, case: Case, tmp_path: Path
) -> None:
    """Megatron's schedules would go on with the rate in the checkpoint, whatever the
    configuration says.
    """
    common: dict[str, Any] = {
        "name": NAME,
        "state": case.state,
        "batch": case.batch,
        "loss": "sft",
        "timeout_s": 300,
    }
    dist_pool.run(train, num_steps=2, directory=tmp_path / "a", **common)
    faster = replace(CONFIG, optim=replace(CONFIG.optim, lr=3 * reference.LR))
    (rank,) = dist_pool.run(
        train, num_steps=1, directory=tmp_path / "a", is_loading=True, config=faster, **common
    )
    assert rank.updates[0].lr == pytest.approx(3 * reference.LR)


def test_replicas_share_the_writing(dist_pool: DistPool, case: Case, tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "name": NAME,
        "state": case.state,
        "batch": case.batch,
        "loss": "sft",
        "timeout_s": 300,
    }
    dist_pool.run(train, dp=2, megatron=SHARDED, num_steps=1, directory=tmp_path / "a", **common)
    sizes = [(tmp_path / "a" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert 0.8 <= sizes[0] / sizes[1] <= 1.25, sizes


SAVES: list[
    tuple[dict[str, Any], torch.dtype]
] = [  # layouts of dist_pool, and settings of MegatronConfig
    ({"tp": 2, "megatron": SHARDED}, torch.float32),
    ({"pp": 2, "vpp": 2, "megatron": SHARDED}, torch.float32),
    ({"tp": 2, "pp": 2, "megatron": SHARDED}, torch.float32),
    ({"pp": 2, "megatron": SHARDED}, torch.bfloat16),
]
LOADS: list[dict[str, Any]] = [
    {"pp": 2, "megatron": SHARDED},
    {"dp": 2, "megatron": {**SHARDED}, "bucket_size": 20_000},
    {},
    {"dp": 2, "megatron": SHARDED},
]


def stored(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, whole, read by torch alone."""
    metadata = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
    }
    dcp.load(found, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return found


def weights_of(ranks: list[Any], layout: dict[str, Any], kind: str) -> dict[str, Tensor]:
    """HF name -> tensor, out of `kind` of the ranks' results."""
    holders = [type("Rank", (), rank if isinstance(rank, dict) else vars(rank)) for rank in ranks]
    return whole(holders, NAME, layout.get("tp", 1), layout.get("dp", 1), kind)


@pytest.mark.parametrize(
    "saved, dtype, loaded",
    [(*save, load) for save, load in zip(SAVES, LOADS, strict=True)],
    ids=["tp2 to pp2", "pp2 vpp2 to dp2", "tp2 pp2 to one rank", "pp2 to dp2 bf16"],
)
def test_a_checkpoint_is_the_same_under_another_layout(
    dist_pool: DistPool,
    case: Case,
    tmp_path: Path,
    saved: dict[str, Any],
    dtype: torch.dtype,
    loaded: dict[str, Any],
) -> None:
    """Parameters, moments and float32 parameters bit for bit; the step after it as close as
    three steps are.
    """
    common: dict[str, Any] = {
        "name": NAME,
        "state": case.state,
        "batch": case.batch,
        "loss": "policy",
        "dtype": dtype,
    }
    before = dist_pool.run(
        train, num_steps=2, directory=tmp_path / "a", timeout_s=300, **saved, **common
    )
    after = dist_pool.run(
        resumed, directory=tmp_path / "a", again=tmp_path / "b", timeout_s=300, **loaded, **common
    )
    at_save = weights_of(before, saved, "weights")
    at_load = weights_of(after, loaded, "loaded")
    assert all(torch.equal(at_save[key], at_load[key]) for key in at_save)

    first = stored(tmp_path / "a")
    second = stored(tmp_path / "b")
    assert first.keys() == second.keys()
    kinds = {
        key.rpartition("optimizer.state.")[2].partition(".")[0]
        for key in first
        if "optimizer.state." in key
    }
    assert kinds == {"exp_avg", "exp_avg_sq", *([] if dtype == torch.float32 else ["fp32_param"])}
    for key, tensor in first.items():
        rows = min(len(tensor), len(second[key]))  # the vocabulary is padded for the layout
        assert torch.equal(tensor[:rows], second[key][:rows]), key
        assert not tensor[rows:].any() and not second[key][rows:].any()
        assert tensor[:rows].any() or "bias" in key, f"{key} is zero: it shows nothing"

    if dtype != torch.float32:
        return
    grads, weights = (weights_of(after, loaded, kind) for kind in ("grads", "weights"))
    found = reference.in_units(grads, weights, case.state, case.exact[-1], case.draws)
    assert max(found.values()) <= BAR, found

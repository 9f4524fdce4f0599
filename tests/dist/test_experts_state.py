"""Checkpoints, copies and export of a model with experts, from one layout to another and
back, bit for bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.parity.cases import CUTS, FAMILIES, Recipe, add_past, make_batch, make_state
from benchmarks.parity.fused_experts import unfused
from benchmarks.parity.layouts import TE, Axes
from benchmarks.parity.sharded import _plan, train_batch
from benchmarks.parity.subjects import ActorSubject
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.data.batch import select_samples
from rlhf_megatron.data.replica_plan import take_replica_shard
from rlhf_megatron.ranks.parallel.world import World

pytestmark = pytest.mark.dist
CUT = replace(CUTS[0], token_budget=128)


def steps(
    world: World,
    family: str,
    megatron: MegatronConfig,
    load: Path | None,
    save: Path | None,
    exports: list[Path],
) -> tuple[list[str], int]:
    """Load; export, save, one optimizer step and export, as far as asked for. (differences of
    copies, bytes saved).
    """
    from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf

    subject = ActorSubject(CUT, Recipe(), megatron)
    worker = subject.make(FAMILIES[family], make_state(family), world)
    if load is not None:
        worker.load(load)
    else:
        step(subject, worker, world, range(12))
    for number, directory in enumerate(exports):
        if number:
            step(subject, worker, world, range(12, 24))
        export_sharded_model_to_hf(
            worker.export_shards(),
            world,
            directory=directory,
            hf_config=FAMILIES[family],
            dtype=torch.float32,
        )
        if number == 0 and save is not None:
            worker.save(save)
    found = worker.check_replicas().differences
    return [
        f"{difference.name} {difference.what}" for difference in found
    ], worker.estimate_save_bytes()


def step(subject: ActorSubject, worker: Any, world: World, samples: range) -> None:
    columns = make_batch()
    batch = train_batch(add_past(columns, torch.full_like(columns["advantages"], -4.9)))
    mini_batch = subject.mini_batch(select_samples(batch, samples))
    plan = _plan(world, mini_batch, CUT.token_budget)
    subject.update(worker, take_replica_shard(mini_batch, plan), plan)


def run(pool: DistPool, axes: Axes, family: str, **arguments: Any) -> int:
    """On the ranks of a layout, which must agree on what they hold alike. Bytes that a save has."""
    sizes = {
        "tp": axes.tp,
        "pp": axes.pp,
        "dp": axes.dp,
        "cp": axes.cp,
        "ep": axes.ep,
        "etp": axes.etp,
    }
    more = {
        "sequence_parallel": axes.sequence_parallel,
        "first_layers": axes.first_layers,
        "timeout_s": 300.0,
    }
    ranks = pool.run(steps, **sizes, **more, family=family, megatron=axes.megatron, **arguments)
    assert not [difference for differences, _ in ranks for difference in differences]
    return sum(num_bytes for _, num_bytes in ranks)


def tensors(directory: Path) -> dict[str, Tensor]:
    found = {
        name: tensor
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    return unfused(found, json.loads((directory / "config.json").read_text())["model_type"])


@pytest.mark.parametrize(
    "family, there, back",
    [
        (
            "qwen3_moe",
            Axes(dp=2, ep=2, distributed=True),
            Axes(tp=2, sequence_parallel=True, etp=1, impl=TE, is_grouped=True),
        ),
        pytest.param(
            "gpt_oss",
            Axes(tp=2, sequence_parallel=True, ep=2, etp=1),
            Axes(pp=2, first_layers=1, ep=2, dp=2, distributed=True),
            marks=pytest.mark.long,  # a minute
        ),
        (
            "deepseek_v3",
            Axes(tp=2, sequence_parallel=True, ep=2, etp=1),
            Axes(cp=2, ep=2, distributed=True, impl=TE),
        ),
        pytest.param(
            "glm4_moe",
            Axes(pp=2, first_layers=1, ep=2, dp=2),
            Axes(tp=2, sequence_parallel=True, ep=2, etp=1),
            marks=pytest.mark.long,
        ),
        pytest.param(
            "mixtral",
            Axes(tp=2, sequence_parallel=True, ep=2, etp=1, dp=2, distributed=True),
            Axes(pp=2, first_layers=3, etp=2, dp=2),
            marks=pytest.mark.long,
        ),
    ],
    ids=["qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral"],
)
def test_a_run_goes_on_after_a_stay_in_another_layout(
    dist_pool: DistPool, tmp_path: Path, family: str, there: Axes, back: Axes
) -> None:
    """Saved in one layout, loaded, exported and saved in another, loaded in the first: its next
    step is the same.
    """
    size = run(
        dist_pool,
        there,
        family,
        load=None,
        save=tmp_path / "a",
        exports=[tmp_path / "1", tmp_path / "2"],
    )
    other = run(
        dist_pool, back, family, load=tmp_path / "a", save=tmp_path / "b", exports=[tmp_path / "3"]
    )
    run(
        dist_pool,
        there,
        family,
        load=tmp_path / "b",
        save=None,
        exports=[tmp_path / "4", tmp_path / "5"],
    )
    once, twice, elsewhere, again, on = (tensors(tmp_path / str(number)) for number in range(1, 6))
    start = make_state(family)
    assert once.keys() == start.keys()
    whole = (
        "norms and latent attention's down projections are whole on each tp rank, and rows pad"
        " the vocabulary"
    )
    assert abs(size - other) < 0.05 * size, whole
    for name, tensor in once.items():
        assert torch.equal(tensor, elsewhere[name]) and torch.equal(tensor, again[name]), name
        assert torch.equal(twice[name], on[name]), name
        if name.endswith("_proj_bias"):  # of an expert that no token met: it is not decayed either
            continue
        is_moved = not torch.equal(tensor, start[name]) and not torch.equal(tensor, twice[name])
        assert is_moved != name.endswith("e_score_correction_bias"), name

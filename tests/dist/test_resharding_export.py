"""export_hf on real sharded models: the directory that appears is the model that was loaded;
failures leave nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from test_resharding_sender import CONFIG, LLAMA, SEED

from rlhf_megatron.ranks.checkpoint.model_weights import iterate_local_shards, load_weights_on_rank
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors, make_random_source


def export(
    world: Any, config: dict, directory: Path, dtype: str, file_bytes: int, fail_on: str = ""
) -> str:
    """On every rank. The error, or an empty string."""
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf

    table = make_weight_table(config, world.layout.tp)
    model = build_megatron_model(config, world, torch.float32)
    load_weights_on_rank(model.chunks, table, make_random_source(config, SEED), world)
    shards = list(iterate_local_shards(model.chunks, table))
    if str(world.coordinates) == fail_on:
        shards[-1] = (shards[-1][0], None)
    try:
        export_sharded_model_to_hf(
            shards,
            world,
            directory=directory,
            hf_config=config,
            dtype=getattr(torch, dtype),
            companions_directory=directory.parent / "from",
            max_file_bytes=file_bytes,
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "config", "dtype", "file_bytes"),
    [
        (1, 1, 1, LLAMA, "float32", 1 << 20),
        (2, 2, 1, CONFIG, "bfloat16", 5000),
        (1, 2, 2, LLAMA, "bfloat16", 1 << 20),
    ],
)
def test_directory_is_the_model(
    dist_pool: DistPool,
    tmp_path: Path,
    tp: int,
    pp: int,
    dp: int,
    config: dict,
    dtype: str,
    file_bytes: int,
) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    (tmp_path / ".hf.partial").mkdir()
    (tmp_path / ".hf.partial" / "stage-00007.json").write_text("a run that was killed left this")
    arguments = {
        "config": config,
        "directory": tmp_path / "hf",
        "dtype": dtype,
        "file_bytes": file_bytes,
    }
    assert dist_pool.run(export, tp=tp, pp=pp, dp=dp, **arguments) == [""] * (tp * pp * dp)
    reader = HFReader(tmp_path / "hf")
    reader.check_against_table(make_weight_table(config), is_strict=True)
    expected = dict(generate_random_hf_tensors(config, SEED))
    for rule in make_weight_table(config):
        for hf, tensor in zip(rule.hf_tensors, reader.read_hf_tensors(rule), strict=True):
            assert torch.equal(tensor, expected[hf.name].to(getattr(torch, dtype))), hf.name
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"config.json", "tokenizer.json"} < names and not any(
        name.startswith("stage") for name in names
    )
    assert ("model.safetensors" in names) == (pp == 1)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == dtype
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", "hf"]


@pytest.mark.dist
def test_directory_of_virtual_stages_and_context_parallel_ranks(
    dist_pool: DistPool, tmp_path: Path
) -> None:
    (tmp_path / "from").mkdir()
    arguments = {
        "config": LLAMA,
        "directory": tmp_path / "hf",
        "dtype": "float32",
        "file_bytes": 1 << 20,
    }
    assert dist_pool.run(export, pp=2, vpp=2, cp=2, timeout_s=300, **arguments) == [""] * 4
    expected = dict(generate_random_hf_tensors(LLAMA, SEED))
    reader = HFReader(tmp_path / "hf")
    reader.check_against_table(make_weight_table(LLAMA), is_strict=True)
    for rule in make_weight_table(LLAMA):
        for hf, tensor in zip(rule.hf_tensors, reader.read_hf_tensors(rule), strict=True):
            assert torch.equal(tensor, expected[hf.name]), hf.name


@pytest.mark.dist
def test_failure_on_any_rank_leaves_nothing_and_ends_everywhere(
    dist_pool: DistPool, tmp_path: Path
) -> None:
    arguments = {
        "config": CONFIG,
        "directory": tmp_path / "hf",
        "dtype": "float32",
        "file_bytes": 5000,
    }
    errors = dist_pool.run(export, tp=2, pp=2, fail_on="dp0 pp1 tp1", **arguments)
    assert errors[3].startswith("KeyError") and all(
        e.startswith("SyncAbortedError") for e in errors[:3]
    )
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "file").touch()
    errors = dist_pool.run(export, tp=2, pp=2, **arguments)
    assert "exists already" in errors[0] and all(
        e.startswith("SyncAbortedError") for e in errors[1:]
    )
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["file"]

"""A folder with two sets of weights is read where the two are equal, and refused where they differ:
other programs read the other set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from table_samples import SMALL_QWEN3, random_state
from torch import Tensor

from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.weight_sets import INDEX

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SINGLE = "model.safetensors"
STATE = random_state(SMALL_QWEN3, seed=0)
OTHER = random_state(SMALL_QWEN3, seed=7)


def write_shards(directory: Path, state: Mapping[str, Tensor], with_index: bool = True) -> None:
    """Write the tensors into two files, one tensor here and one there, and their index."""
    names = list(state)
    weight_map = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    for shard in SHARDS:
        tensors = {name: state[name] for name in names if weight_map[name] == shard}
        save_file(tensors, directory / shard)
    if with_index:
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def read_norm(directory: Path) -> Tensor:
    """Read the last norm of the directory's model."""
    table = make_weight_table(SMALL_QWEN3)
    reader = HFReader(directory)
    reader.check_against_table(table)
    rule = next(r for r in table if r.hf_tensors[0].name == "model.norm.weight")
    return reader.read_hf_tensors(rule)[0]


@pytest.mark.parametrize("with_index", [True, False])
def test_equal_sets_are_read(tmp_path: Path, with_index: bool) -> None:
    write_shards(tmp_path, STATE, with_index)
    save_file(STATE, tmp_path / SINGLE)
    assert torch.equal(read_norm(tmp_path), STATE["model.norm.weight"])


@pytest.mark.parametrize("with_index", [True, False])
def test_sets_that_differ_are_both_named(tmp_path: Path, with_index: bool) -> None:
    write_shards(tmp_path, STATE, with_index)
    second = INDEX if with_index else "model-00001-of-00002.safetensors"
    changed = STATE["model.norm.weight"].clone()
    changed[-1] += 1
    without_norm = {n: t for n, t in STATE.items() if n != "model.norm.weight"}
    for other, difference in (
        (OTHER, "has other values in the two"),
        (without_norm | {"model.norm.weight": changed}, "model.norm.weight has other values"),
        (without_norm | {"model.norm.weight": changed[:5].clone()}, r"norm.weight is F32 \[5\] in"),
        (without_norm, "model.norm.weight is in one of the two only"),
        (STATE | {"score.weight": changed}, "score.weight is in one of the two only"),
    ):
        save_file(other, tmp_path / SINGLE)
        with pytest.raises(ValueError) as error:
            HFReader(tmp_path)
        text = str(error.value)
        assert f"{tmp_path} has two sets of weights that differ" in text
        assert f"{tmp_path / SINGLE}, which transformers loads" in text and second in text
        with pytest.raises(ValueError, match=difference):
            HFReader(tmp_path)


def test_a_folder_that_changes_is_compared_again(tmp_path: Path) -> None:
    write_shards(tmp_path, STATE)
    save_file(OTHER, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="two sets"):
        HFReader(tmp_path)
    save_file(STATE, tmp_path / SINGLE)
    HFReader(tmp_path)
    (tmp_path / SINGLE).unlink()
    HFReader(tmp_path)


def test_an_index_that_names_the_single_file_is_one_set(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(STATE, SINGLE)}))
    assert torch.equal(read_norm(tmp_path), STATE["model.norm.weight"])


def test_an_index_whose_files_are_gone(tmp_path: Path) -> None:
    write_shards(tmp_path, STATE)
    (tmp_path / SHARDS[1]).unlink()
    with pytest.raises(ValueError, match=r"00002-of-00002.* is missing, though .*fetch"):
        read_norm(tmp_path)
    save_file(STATE, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"has all of its tensors: remove .*index.json to read"):
        HFReader(tmp_path)
    (tmp_path / INDEX).unlink()
    (tmp_path / SHARDS[0]).unlink()
    assert torch.equal(read_norm(tmp_path), STATE["model.norm.weight"])
    write_shards(tmp_path, STATE)
    (tmp_path / SHARDS[1]).unlink()
    save_file({"model.norm.weight": STATE["model.norm.weight"]}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"has 1 of its 47 tensors.*fetch .*00002-of-00002"):
        HFReader(tmp_path)


def test_a_broken_single_file_beside_an_index_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, STATE)
    (tmp_path / SINGLE).write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match=r"model.safetensors \(40 bytes\) is truncated or corrupt"):
        HFReader(tmp_path)

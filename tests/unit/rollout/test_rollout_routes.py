"""Which experts tokens met, as the bundled engine writes it, against a plain forward pass
of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.parity.cases import FAMILIES, make_state
from benchmarks.parity.reference import make_model
from benchmarks.parity.router_reference import Routers
from rlhf_megatron.controller.recovery.route_file_retention import RouteFileRetention
from rlhf_megatron.data.expert_route_files import check_expert_ids, map_route_file, write_route_file
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.local_model import LocalModel

PROMPTS = ((5, 9, 2), (17, 3, 88, 41, 7, 60), (1,))
NUM_LAYERS = {"qwen3_moe": 3, "mixtral": 4, "deepseek_v3": 3, "glm4_moe": 3}


def model_of(family: str, **changes: Tensor) -> Any:
    return make_model(FAMILIES[family], make_state(family) | changes, torch.float32)


def sets_of(family: str, model: Any, token_ids: list[int]) -> Tensor:
    """[tokens - 1, layers, experts], sorted, of the stock model."""
    routers = Routers(model, FAMILIES[family])
    with torch.no_grad():
        model(torch.tensor([token_ids]))
    return routers.routes([len(token_ids)])[:-1]


def request(directory: Path, prompt: tuple[int, ...], num_samples: int = 2) -> GenerateRequest:
    return GenerateRequest(
        prompt, tuple(range(num_samples)), SamplingParams(8), routes_dir=str(directory)
    )


def found(family: str, sample: GeneratedSample) -> Tensor:
    ids = map_route_file(
        sample.routes, (NUM_LAYERS[family],), FAMILIES[family]["num_experts_per_tok"]
    )
    return torch.from_numpy(ids.astype(np.int64)).sort(-1).values


@pytest.mark.parametrize("family", sorted(NUM_LAYERS))
def test_ids_are_those_of_a_plain_forward_pass(family: str, tmp_path: Path) -> None:
    """Prompts of several lengths, a cache that grows, and rows that are taken over by others."""
    generator = BatchGenerator(
        LocalModel(model_of(family)), max_num_seqs=3, max_num_batched_tokens=200
    )
    groups = generator.generate([request(tmp_path, prompt) for prompt in PROMPTS])
    stock = model_of(family)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for sample in group:
            assert torch.equal(
                found(family, sample), sets_of(family, stock, [*prompt, *sample.token_ids])
            )


def test_tokens_keep_what_they_met_when_they_were_drawn(tmp_path: Path) -> None:
    """Tokens of two versions: the first ones are read again with new weights, and keep
    their first route.
    """
    family = "qwen3_moe"
    turned = {}
    for name, tensor in make_state(family).items():
        if name.endswith("gate.weight"):
            turned[name] = tensor.roll(1, 0)
    model = model_of(family)
    generator = BatchGenerator(LocalModel(model), max_num_seqs=2, max_num_batched_tokens=100)
    (member,) = generator.add_request(request(tmp_path, PROMPTS[1], num_samples=1))
    for _ in range(3):
        generator.decode_step()
    generator.retract_samples()
    num_read = len(member.context_ids) - 1
    model.load_state_dict(turned, strict=False)
    while generator.has_work:
        generator.decode_step()
    sample = member.make_generated_sample()
    tokens = [*PROMPTS[1], *sample.token_ids]
    old, new = (sets_of(family, model_of(family, **changes), tokens) for changes in ({}, turned))
    ids = found(family, sample)
    assert 0 < num_read < len(tokens) - 1 and not torch.equal(old, new)
    assert torch.equal(ids[:num_read], old[:num_read]) and torch.equal(
        ids[num_read:], new[num_read:]
    )


def test_an_engine_without_experts_refuses(tmp_path: Path) -> None:
    generator = BatchGenerator(
        LocalModel(model_of("llama_tied")), max_num_seqs=2, max_num_batched_tokens=100
    )
    with pytest.raises(ValueError, match="the model has none"):
        generator.add_request(request(tmp_path, PROMPTS[0]))
    assert (
        generator.generate([GenerateRequest(PROMPTS[0], (0,), SamplingParams(2))])[0][0].routes
        == ""
    )


def test_files_are_checked_and_stay_as_long_as_they_are_needed(tmp_path: Path) -> None:
    ids = np.arange(24).reshape(2, 3, 4)
    names = [write_route_file(str(tmp_path / "routes"), ids + 20 * i) for i in range(2)]
    first, second = (map_route_file(name, (5, 3), 4) for name in names)
    assert first.dtype == np.uint8 and np.array_equal(second, ids + 20)
    assert map_route_file(write_route_file(str(tmp_path), ids + 300), (3,), 4).dtype == np.int16
    with pytest.raises(ValueError, match=r"shape \(2, 12\), not \[tokens, 4 or 6 layers x 4\]"):
        map_route_file(names[0], (4, 6), 4)
    check_expert_ids(names[1], second, 44)
    with pytest.raises(
        ValueError, match=r"names expert 43, and a layer has 8: it is of another model"
    ):
        check_expert_ids(names[1], second, 8)
    kept = RouteFileRetention(tmp_path / "routes", has_journal=True)
    kept.record_trained_step(1, (names[0], ""))
    kept.record_trained_step(2, (names[1],))
    kept.remove_files_through_step(1)
    assert [Path(name).exists() for name in names] == [False, True]
    with pytest.raises(
        ValueError, match="is not there: engines and ranks must see one file system"
    ):
        map_route_file(names[0], (3,), 4)
    RouteFileRetention(tmp_path / "routes", is_recorded=True).record_trained_step(3, (names[1],))
    assert Path(names[1]).exists()
    RouteFileRetention(tmp_path / "routes").record_trained_step(3, (names[1],))
    assert not Path(names[1]).exists()

"""Rotary embeddings out of config.json: the angles of transformers to the last bit, and
what is refused.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from table_samples import LLAMA3_ROPE, SMALL_LLAMA, SMALL_QWEN2, SMALL_QWEN3
from torch import Tensor

from rlhf_megatron.config.rope import (
    LinearScaling,
    Llama3Scaling,
    RotaryConfig,
    YarnScaling,
    read_rotary_config,
)
from rlhf_megatron.ranks.models.rotary_embedding import (
    compute_inverse_frequencies,
    make_rotary_tables,
    rotate_pairs,
)
from rlhf_megatron.weights.families.family_lookup import find_model_family

HEAD_DIM = 64
MODELS = {
    "llama": {**SMALL_LLAMA, "head_dim": HEAD_DIM, "hidden_size": 8 * HEAD_DIM},
    "qwen2": {**SMALL_QWEN2, "hidden_size": 8 * HEAD_DIM},
    "qwen3": {**SMALL_QWEN3, "head_dim": HEAD_DIM},
}
LONG = 131072  # max_position_embeddings
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    "llama3, short": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn, tuned": {
        **YARN,
        "attention_factor": 1.3,
        "beta_fast": 20.0,
        "beta_slow": 2,
        "factor": 3,
    },
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, no length of its own": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor 1": {**YARN, "factor": 1.0, "original_max_position_embeddings": LONG},
}


def in_both_spellings(
    model: dict[str, Any], rope: dict[str, Any], theta: float
) -> list[dict[str, Any]]:
    """A config.json of transformers 4 and one of transformers 5."""
    model = {**model, "max_position_embeddings": LONG}
    return [
        {**model, "rope_theta": theta, "rope_scaling": rope},
        {**model, "rope_parameters": rope | {"rope_theta": theta}},
    ]


def theirs(hf_config: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' configuration and rotary module."""
    import transformers

    name = hf_config["model_type"]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    config = transformers.AutoConfig.for_model(
        **{k: dict(v) if isinstance(v, dict) else v for k, v in hf_config.items()}
    )
    return config, getattr(module, f"{name.capitalize()}RotaryEmbedding")(config)


def tables(rotary: RotaryConfig) -> tuple[Tensor, Tensor]:
    cos, sin = make_rotary_tables(torch.arange(0, 4000, 7), HEAD_DIM, rotary, torch.float32)
    return cos[:, 0], sin[:, 0]


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", MODELS)
def test_angles_are_those_of_transformers(name: str, kind: str) -> None:
    for hf_config in in_both_spellings(MODELS[name], SCALINGS[kind], 50000.0):
        config, module = theirs(hf_config)
        for source in (hf_config, config.to_dict()):  # and as transformers writes what it read
            rotary = find_model_family(source).make_gpt_arguments(source)["rotary"]
            assert rotary.base == 50000.0
            assert torch.equal(
                compute_inverse_frequencies(rotary, HEAD_DIM, torch.device("cpu")), module.inv_freq
            )
            factor = (
                rotary.scaling.attention_factor if isinstance(rotary.scaling, YarnScaling) else 1.0
            )
            assert factor == module.attention_scaling
            cos, sin = module(torch.zeros(1), torch.arange(0, 4000, 7)[None])
            for mine, other in zip(tables(rotary), (cos, sin), strict=True):
                assert torch.equal(mine, other[0, :, : HEAD_DIM // 2])


def test_bands_of_llama3_by_hand() -> None:
    """Original length 32, low 1, high 4: waves over 32 are stretched eightfold, under 8 kept,
    between them blended.
    """
    rotary = read_rotary_config({"rope_scaling": LLAMA3_ROPE, "rope_theta": 100.0})
    # head_dim 8; waves of 6.3, 19.9, 62.8 and 198.7 positions
    plain = [100 ** (-i / 4) for i in range(4)]
    smooth = (32 / (2 * math.pi / plain[1]) - 1) / 3
    expected = [
        plain[0],
        (1 - smooth) * plain[1] / 8 + smooth * plain[1],
        plain[2] / 8,
        plain[3] / 8,
    ]
    got = compute_inverse_frequencies(rotary, 8, torch.device("cpu"))
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=0)


def test_ramp_of_yarn_by_hand() -> None:
    """Base 10^4 and 16 dimensions: dimension d turns 1024 / (2 pi 10^(d / 2)) times in
    1024 positions.

    That is 32 times at d = 1.41 and once at d = 4.42: the ramp goes from 1 to 5.
    """
    rope = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
    rotary = read_rotary_config({"rope_scaling": rope})
    keep = [1, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    expected = [10 ** (-d / 2) * (k + (1 - k) / 8) for d, k in enumerate(keep)]
    got = compute_inverse_frequencies(rotary, 16, torch.device("cpu"))
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-6, atol=0)
    cos, _ = make_rotary_tables(torch.tensor([0]), 16, rotary, torch.float32)
    assert cos[0, 0].tolist() == pytest.approx([0.1 * math.log(8) + 1] * 8, rel=1e-6)


def test_gradient_through_rescaled_angles() -> None:
    """cos and sin are longer than 1 under YaRN: the backward pass turns back, and
    stretches as well.
    """
    rotary = read_rotary_config({"rope_scaling": {**YARN, "attention_factor": 1.7}})
    cos, sin = make_rotary_tables(torch.tensor([0, 3, 50]), 8, rotary, torch.float64)
    torch.testing.assert_close(
        cos.square() + sin.square(), torch.full_like(cos, 1.7**2), rtol=1e-6, atol=0
    )
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: rotate_pairs(value, cos, sin), (x,))


def test_what_is_read() -> None:
    assert read_rotary_config({"rope_theta": 1e6, "rope_scaling": None}) == RotaryConfig(1e6)
    assert read_rotary_config(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    ) == RotaryConfig(2e4)
    assert read_rotary_config({}) == RotaryConfig(1e4)
    assert read_rotary_config({"rope_scaling": {"type": "linear", "factor": 2}}) == RotaryConfig(
        1e4, LinearScaling(2.0)
    )
    both = {
        "rope_theta": 7,
        "rope_scaling": LLAMA3_ROPE,
        "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 7.0},
    }
    assert read_rotary_config(both) == RotaryConfig(7.0, Llama3Scaling(8.0, 1.0, 4.0, 32))
    outside = {"original_max_position_embeddings": 16, "rope_scaling": LLAMA3_ROPE}
    assert read_rotary_config(outside).scaling == Llama3Scaling(8.0, 1.0, 4.0, 16)


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic' .* depend on the length of the text; .* null",
        ),
        (
            {"rope_scaling": {"type": "longrope"}},
            "'longrope' are not supported; .* default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"type": "mrope", "rope_type": "default"}},
            "the types .'default', 'mrope'.; keep one",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "factor of .* 'linear' .None. must be a number of at least 1",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            r"factor .* \(0.5\) must be a number of at least 1",
        ),
        ({"rope_scaling": {"type": "linear", "factor": True}}, r"factor .* \(True\) must be"),
        (
            {"rope_scaling": {**YARN, "mscale": 0.7}},
            "type 'yarn' have the settings mscale, which are not supported",
        ),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"a": 1}}},
            "settings full_attention, sliding_",
        ),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4}},
            r"low_freq_factor \(4.0\) must be below high",
        ),
        (
            {"rope_scaling": {**YARN, "beta_fast": 0.5}},
            r"beta_fast \(0.5\) must not be below beta_slow",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            r"original_max_position_embeddings \(None\) must be",
        ),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}},
            "given twice, as 10000.0 and 1000000.0",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": YARN},
            "differ, .* keep one",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling .'linear'. must be a mapping"),
        ({"rope_theta": -1.0}, r"rope_theta \(-1.0\) must be a positive number"),
        (
            {"partial_rotary_factor": 0.5},
            r"partial_rotary_factor \(0.5\) is not supported; it must be 1",
        ),
    ],
)
def test_what_is_refused(hf_config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rotary_config(hf_config)

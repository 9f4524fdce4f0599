"""Stock SGLang gives a reward model's export the scores that transformers and a run's pool give."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from places import MODEL
from safetensors.torch import save_file
from sglang_tools import needs_sglang
from test_reward_servers import ENDING, run_config, samples, servers_of

from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.value_model import make_reward_model_config

pytestmark = [pytest.mark.long, pytest.mark.sglang, needs_sglang]
BIAS = 1.5


def write_export(directory: Path, model_type: str, has_bias: bool) -> transformers.PreTrainedModel:
    """Write the files that an export has, and return the model that transformers reads there."""
    base = json.loads((MODEL / "config.json").read_text())
    name = model_type.capitalize()
    base |= {"model_type": model_type, "architectures": [f"{name}ForCausalLM"]}
    hf_config: dict[str, Any] = make_reward_model_config(base, has_bias, 0)
    generator = torch.Generator().manual_seed(3)
    state = {}
    for rule in make_weight_table(base, head="value"):
        for hf in rule.hf_tensors:
            values = 0.1 * torch.randn(hf.shape, generator=generator)
            state[hf.name] = 1 + values if "norm" in hf.name else values
    state["score.bias"] = torch.tensor([BIAS if has_bias else 0.0])
    directory.mkdir()
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, directory)
    [class_name] = hf_config["architectures"]
    return getattr(transformers, class_name).from_pretrained(directory).eval()


@pytest.mark.parametrize(
    ("model_type", "has_bias"),
    [("qwen3", False), ("qwen3", True), ("llama", True)],
    ids=["as it is", "with a bias", "with a bias that SGLang drops"],
)
def test_servers_give_the_numbers_of_transformers(
    tmp_path: Path, model_type: str, has_bias: bool
) -> None:
    model = write_export(tmp_path / "judge", model_type, has_bias)
    tokenizer = load_tokenizer(MODEL)
    drawn_samples = samples(12)
    scores = []
    for sample in drawn_samples:
        ids = torch.tensor([tokenizer.encode(sample.prompt + sample.response + ENDING)])
        with torch.no_grad():
            logits = model(ids).logits
        scores.append(float(logits[0, -1, 0] if has_bias else logits[0, 0]))
    config = run_config(tmp_path)
    served = replace(config.reward_model.served, num_servers=1)
    config = replace(config, reward_model=replace(config.reward_model, served=served))
    with servers_of(config, tmp_path) as servers:
        rewards = RewardConfig(name="zero", num_workers=1)
        with make_reward_scorer(rewards, tmp_path / "log", servers.make_reward_term()) as scorer:
            parts = [result.parts["reward_model"] for result in scorer(drawn_samples)]
    # run_config has the mean 0.1 and the deviation 3
    assert parts == pytest.approx([(score - 0.1) / 3 for score in scores], abs=1e-5)
    assert max(parts) - min(parts) > 1e-2

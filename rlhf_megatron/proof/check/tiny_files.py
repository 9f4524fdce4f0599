"""What a folded run reads: a tiny model's config.json and tokenizer, a reference, prompts. Nothing is fetched."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_megatron.checkpoint.hf_writer import hf_directory_writer
from rlhf_megatron.checkpoint.random_init import random_source
from rlhf_megatron.checkpoint.safetensors_writer import TensorSpec
from rlhf_megatron.checkpoint.value_model import value_model_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import as_yaml
from rlhf_megatron.data.tokenizer import write_character_tokenizer
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Rule

NUM_TRAIN, NUM_HELD_OUT = 64, 8
REFERENCE_SEED_OFFSET = 1000  # the reference's random weights are not those of the actor
CRITIC_SEED_OFFSET = 2000  # nor are those of a critic from a directory of its own


def write_model(directory: Path, hf_config: Mapping[str, Any]) -> Path:
    """config.json and tokenizer; weights come from a seed."""
    write_character_tokenizer(directory, int(hf_config["vocab_size"]))
    (directory / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
    return directory


def write_reference(directory: Path, hf_config: Mapping[str, Any], seed: int, model: Path) -> None:
    """A complete model of other random weights. `model`: the directory with the tokenizer."""
    _write_weights(directory, hf_config, table_for(hf_config), seed + REFERENCE_SEED_OFFSET, model)


def write_critic(directory: Path, hf_config: Mapping[str, Any], seed: int, model: Path) -> None:
    """A token classifier of one label: a value model with its head."""
    table = table_for(hf_config, head="value")
    _write_weights(directory, value_model_config(hf_config), table, seed + CRITIC_SEED_OFFSET, model)


def _write_weights(
    directory: Path, hf_config: Mapping[str, Any], table: Sequence[Rule], seed: int, model: Path
) -> None:
    tensors = [hf for rule in table for hf in rule.hf]
    source = random_source(hf_config, seed)
    specs = [TensorSpec(hf.name, "float32", hf.shape) for hf in tensors]
    with hf_directory_writer(directory, specs, hf_config, model) as writer:
        for hf in tensors:
            writer.write(hf.name, source.tensor(hf))


def write_prompts(directory: Path, seed: int) -> None:
    """train.jsonl and val.jsonl: additions of one, two and three digits, so that samples have different lengths."""
    draw = random.Random(seed)
    for name, count in (("train", NUM_TRAIN), ("val", NUM_HELD_OUT)):
        lines = [json.dumps(_addition(draw, 1 + number % 3)) + "\n" for number in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _addition(draw: random.Random, num_digits: int) -> dict[str, str]:
    """A problem as those of the addition task: "07+45=" -> "052"."""
    a, b = (draw.randrange(10**num_digits) for _ in range(2))
    return {"prompt": f"{a:0{num_digits}d}+{b:0{num_digits}d}=", "answer": f"{a + b:0{num_digits + 1}d}"}


def write_config(directory: Path, config: RunConfig) -> Path:
    """A file that `rlhf-megatron train` takes."""
    path = directory / f"{config.trainer.experiment_name}.yaml"
    path.touch(0o600)
    path.write_text(as_yaml(config, with_secrets=True), encoding="utf-8")
    return path

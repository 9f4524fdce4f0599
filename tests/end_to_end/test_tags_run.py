"""Whole runs whose responses have tags that a template prefills, or that decoding leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml
from end_to_end_tools import train
from places import ROOT

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n@PREFILL@{% endif %}"
)
PATTERN = "<think>.*</think>.*"
HIDDEN = 320  # the size of the model; each of its tokens has a dimension of its own


def write_tokenizer(directory: Path, has_special_tags: bool, prefill: str) -> tokenizers.Tokenizer:
    """Write a byte-level tokenizer, and return it. `has_special_tags`: whether <think> and </think>
    are special tokens; `prefill`: the text that the chat template writes of each answer.
    """
    special_tokens = ["<|im_start|>", "<|im_end|>"]
    special_tokens += ["<think>", "</think>"] if has_special_tags else []
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special_tokens),
        special_tokens=special_tokens,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    directory.mkdir(parents=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT.replace("@PREFILL@", prefill),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return backend


def write_parrot_model(directory: Path, successors: dict[int, int]) -> None:
    """Write a model that answers every prompt alike: the token behind a token is the one that
    `successors` names, and token 0 behind others. Its layers add nothing to the embeddings, which
    are the unit vectors, and a row of its head reads one dimension.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=HIDDEN,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(HIDDEN))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for token, successor in successors.items():
            model.lm_head.weight[successor, token] = 2.0
    model.save_pretrained(directory)


def write_run(directory: Path, has_special_tags: bool, prefill: str, answer: str) -> Path:
    """Write a model that answers every prompt with `answer`, and the configuration of one step with
    it that scores the form of the answers. Return the path of the configuration.
    """
    model = directory / "model"
    backend = write_tokenizer(model, has_special_tags, prefill)
    before = backend.encode(prefill or "\n", add_special_tokens=False).ids[-1]
    ids = [before, *backend.encode(answer + "<|im_end|>", add_special_tokens=False).ids]
    write_parrot_model(model, dict(pairwise(ids)))
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    lines = [json.dumps(row) + "\n" for row in rows]
    (directory / "train.jsonl").write_text("".join(lines))
    (directory / "val.jsonl").write_text("".join(lines[:2]))
    settings: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {
            "train_files": [str(directory / "train.jsonl")],
            "val_files": [str(directory / "val.jsonl")],
            "apply_chat_template": True,
            "train_batch_size": 2,
            "max_prompt_length": 64,
            "max_response_length": 24,
        },
        "actor": {
            "mini_batch_size": 4,
            "megatron": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
        },
        "reward": {"name": "format", "params": {"pattern": PATTERN}},
        "rollout": {"n": 2, "engine": "local", "num_engines": 1},
        "trainer": {
            "experiment_name": "tiny",
            "default_local_dir": str(directory / "runs"),
            "runtime": "inline",
            "n_gpus_per_node": 1,
            "device": "cpu",
            "total_training_steps": 1,
            "test_freq": 1,
        },
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run_command(directory: Path, *words: str) -> str:
    """Return the output of a command of the program, which must succeed."""
    ended = subprocess.run(
        [sys.executable, "-m", "rlhf_megatron", *words],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("has_special_tags", "prefill", "answer", "note"),
    [
        (
            True,
            "",
            "<think>1</think>3",
            "reward (format): the pattern names <think> and </think>, special tokens of this"
            " tokenizer; the reward reads each response with them",
        ),
        (
            False,
            "<think>\n",
            "1</think>3",
            r"the rendered prompts end with '<think>\n'; reward (format) reads that in front of"
            " each response",
        ),
    ],
    ids=["special", "prefilled"],
)
def test_a_well_formed_answer_scores(
    tmp_path: Path, has_special_tags: bool, prefill: str, answer: str, note: str
) -> None:
    config = write_run(tmp_path, has_special_tags, prefill, answer)
    run = train(config, {})
    assert run.exit_code == 0, run.console
    (step,) = run.rows("step")
    assert step["critic/rewards/mean"] == 1.0
    assert [row["val/accuracy"] for row in run.rows("evaluation")][-1] == 1.0
    assert note in run.console
    shown = run_command(tmp_path, "config", "check", str(config), "trainer.experiment_name=other")
    assert note in shown and "ok (" in shown
    assert note in run_command(tmp_path, "data", "show", str(config), "-n", "1")
    answers = tmp_path / "answers.jsonl"
    evaluated = run_command(
        tmp_path, "evaluate", str(config), "--out", str(answers), "--json", "figures.json"
    )
    assert json.loads((tmp_path / "figures.json").read_text())["mean"] == 1.0
    assert note in evaluated
    # the file alone says all that the reward reads
    scored = run_command(
        tmp_path, "evaluate", str(answers), "--config", str(config), "--json", "again.json"
    )
    assert json.loads((tmp_path / "again.json").read_text())["mean"] == 1.0
    assert note in scored

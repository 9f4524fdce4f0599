"""A reward model that this package writes gives one number to each of its readers, for every family
that is exported: transformers' classifiers, the pool of a run under Megatron and under FSDP.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from places import MODEL
from table_samples import StateSource
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.models.auto import modeling_auto
from workers_jobs import megatron_of, share

from benchmarks.parity.cases import FAMILIES
from rlhf_megatron.config.schema import FSDPConfig
from rlhf_megatron.data.batch import TokenBatch, append_next_state_positions
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.ranks.parallel.world import World, create_world, destroy_world
from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf
from rlhf_megatron.ranks.workers.frozen_model import FrozenRewardModel
from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend
from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
from rlhf_megatron.registry import load_registry
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.value_model import (
    FAMILIES_WITHOUT_CLASSIFIERS,
    choose_pad_token_id,
    describe_classifier_export,
    make_reward_model_config,
    make_value_model_config,
    make_zero_bias,
    needs_zero_bias,
    open_scoring_model,
    open_value_model,
    read_head_bias,
    warn_of_dropped_bias,
)
from rlhf_megatron.weights.weight_table import HeadKind

BASES = {
    **{name: FAMILIES[name] for name in ("qwen3_tied", "qwen2_untied", "llama_untied")},
    **{name: FAMILIES[name] for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")},
    "glm4_moe": FAMILIES["glm4_moe"],
    "mistral": {**FAMILIES["llama_untied"], "model_type": "mistral", "sliding_window": None},
}
CLASS_NAMES = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
PAD = 0
DOCUMENTS = [[5, 9, 77, 3, 1], [8, 1], [100, 130, 2, 64, 7, 7, 1]]
TOLERANCE = 2e-5
BIAS = 0.625


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield create_world(ParallelLayout(1), torch.device("cpu"))
    destroy_world()


def make_base_config(name: str) -> dict[str, Any]:
    base = BASES[name]
    return {**base, "architectures": [CLASS_NAMES[base["model_type"]]], "eos_token_id": 1}


def draw_state(hf_config: dict[str, Any], head: HeadKind) -> dict[str, Tensor]:
    """Random weights of a model with a value head, whose bias, where it has one, is BIAS."""
    generator = torch.Generator().manual_seed(5)
    state = {}
    for rule in make_weight_table(hf_config, head=head):
        for hf in rule.hf_tensors:
            values = 0.15 * torch.randn(hf.shape, generator=generator)
            state[hf.name] = 1 + values if "norm" in hf.name else values
    if head == "value":
        state["score.bias"] = torch.tensor([BIAS])
    return state


@dataclass(frozen=True)
class ExportedModel:
    """What an export has written: a directory, and the state that its model had."""

    directory: Path
    state: dict[str, Tensor]


def export_reward_model(
    world: World, directory: Path, name: str, head: HeadKind, config: dict[str, Any] | None = None
) -> ExportedModel:
    """Write a model as the job reward-model does at its end; `config`: another config.json."""
    hf_config = make_base_config(name)
    state = draw_state(hf_config, head)
    backend = MegatronBackend(
        hf_config, StateSource(state), world, torch.float32, megatron_of(world, {}), head, True
    )
    exported = make_reward_model_config(hf_config, head == "value", PAD)
    shards = list(backend.export_shards())
    if head == "unbiased_value" and needs_zero_bias(exported):
        shards.append(make_zero_bias(torch.float32, world.device))
    export_sharded_model_to_hf(
        shards, world, directory=directory, hf_config=config or exported, dtype=torch.float32
    )
    return ExportedModel(directory, state)


def score_on_ranks(world: World, directory: Path, backend: str) -> list[float]:
    """The scores of DOCUMENTS as the pool of the section reward_model computes them."""
    hf_config = read_hf_config(directory)
    source = open_scoring_model(directory, make_weight_table(hf_config, head="value"))
    model: Any
    if backend == "fsdp":
        fsdp = FSDPConfig(attn_implementation="eager")
        model = FSDPBackend(hf_config, source, world, torch.float32, fsdp, "value", True)
    else:
        settings = megatron_of(world, {})
        model = MegatronBackend(hf_config, source, world, torch.float32, settings, "value", True)
    ids = torch.tensor([token for document in DOCUMENTS for token in document]).int()
    offsets = torch.tensor([0, *map(len, DOCUMENTS)]).cumsum(0)
    tokens = append_next_state_positions(TokenBatch(offsets, ids, torch.ones(len(ids)).bool()))
    shard, plan = share(world, tokens, 40)
    values = FrozenRewardModel(model, "reward_model").values(shard, plan)
    assert values is not None
    return values.values[shard.response_mask].tolist()


def score_by_transformers(directory: Path, is_padded: bool) -> list[float]:
    """The logits of AutoModelForSequenceClassification, of single rows or of one padded batch."""
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    # A tensor that transformers drops must not change a number.
    assert loading["unexpected_keys"] <= {"score.bias"}
    longest = max(map(len, DOCUMENTS))
    rows = [
        document + [PAD] * (longest - len(document) if is_padded else 0) for document in DOCUMENTS
    ]
    batches = [rows] if is_padded else [[row] for row in rows]
    scores = []
    with torch.no_grad():
        for batch in batches:
            ids = torch.tensor(batch)
            scores += model.eval()(ids, attention_mask=(ids != PAD).long()).logits[:, 0].tolist()
    return scores


def score_tokens_by_transformers(directory: Path) -> list[float]:
    """The number that AutoModelForTokenClassification gives the last token of each document."""
    model, loading = AutoModelForTokenClassification.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(loading.values())
    with torch.no_grad():
        return [float(model.eval()(torch.tensor([row])).logits[0, -1, 0]) for row in DOCUMENTS]


@pytest.mark.parametrize("name", BASES)
def test_every_reader_of_a_family_gives_one_number(world: World, tmp_path: Path, name: str) -> None:
    exported = export_reward_model(world, tmp_path / "hf", name, "unbiased_value")
    scores = score_on_ranks(world, exported.directory, "megatron")
    assert max(scores) - min(scores) > 1e-2
    assert score_on_ranks(world, exported.directory, "fsdp") == pytest.approx(scores, abs=TOLERANCE)
    if BASES[name]["model_type"] in FAMILIES_WITHOUT_CLASSIFIERS:
        return
    for is_padded in (False, True):
        assert score_by_transformers(exported.directory, is_padded) == pytest.approx(
            scores, abs=TOLERANCE
        )


@pytest.mark.parametrize("name", [name for name in BASES if name != "glm4_moe"])
def test_a_trained_bias_is_read_from_a_token_classifier(
    world: World, tmp_path: Path, name: str
) -> None:
    exported = export_reward_model(world, tmp_path / "hf", name, "value")
    scores = score_on_ranks(world, exported.directory, "megatron")
    assert score_on_ranks(world, exported.directory, "fsdp") == pytest.approx(scores, abs=TOLERANCE)
    assert score_tokens_by_transformers(exported.directory) == pytest.approx(scores, abs=TOLERANCE)


def test_a_critic_is_read_with_its_bias(world: World, tmp_path: Path) -> None:
    for name in ("qwen3_tied", "mixtral"):
        config = make_value_model_config(make_base_config(name))
        exported = export_reward_model(world, tmp_path / name, name, "value", config)
        scores = score_on_ranks(world, exported.directory, "megatron")
        assert score_tokens_by_transformers(exported.directory) == pytest.approx(
            scores, abs=TOLERANCE
        )


def test_an_older_export_is_read_with_its_bias_and_a_warning(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A sequence classifier with a bias, as runs wrote it: transformers drops 0.625 of each
    score.
    """
    older = {
        **make_reward_model_config(make_base_config("llama_untied"), False, PAD),
        "architectures": ["LlamaForSequenceClassification"],
    }
    exported = export_reward_model(world, tmp_path / "hf", "llama_untied", "value", older)
    scores = score_on_ranks(world, exported.directory, "megatron")
    assert score_on_ranks(world, exported.directory, "fsdp") == pytest.approx(scores, abs=TOLERANCE)
    dropped = score_by_transformers(exported.directory, is_padded=False)
    assert [score - BIAS for score in scores] == pytest.approx(dropped, abs=TOLERANCE)
    with caplog.at_level(logging.WARNING):
        warn_of_dropped_bias(exported.directory)
    assert "has a score.bias of 0.625" in caplog.text
    assert "transformers' LlamaForSequenceClassification drops" in caplog.text


def test_no_warning_where_nothing_is_dropped(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unbiased = export_reward_model(world, tmp_path / "a", "qwen3_tied", "unbiased_value")
    biased = export_reward_model(world, tmp_path / "b", "qwen3_tied", "value")
    written = HFReader(unbiased.directory)
    assert "score.bias" in written.names and read_head_bias(written) == 0.0
    with caplog.at_level(logging.WARNING):
        warn_of_dropped_bias(unbiased.directory)
        warn_of_dropped_bias(biased.directory)
    assert not caplog.records


def test_a_head_without_a_bias_does_not_start_from_one_with_a_bias(
    world: World, tmp_path: Path
) -> None:
    biased = export_reward_model(world, tmp_path / "b", "llama_untied", "value").directory
    table = make_weight_table(read_hf_config(biased), head="unbiased_value")
    with pytest.raises(ValueError, match=r"has a score.bias of 0.625, .* sft.use_head_bias: true"):
        open_value_model(biased, table)
    unbiased = export_reward_model(world, tmp_path / "a", "qwen3_tied", "unbiased_value").directory
    open_value_model(unbiased, make_weight_table(read_hf_config(unbiased), head="unbiased_value"))


def test_the_families_without_classifiers_are_those_of_transformers() -> None:
    own = {
        name: (
            name in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
            name in modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
        )
        for name in load_registry("model family")
    }
    assert {name for name, has in own.items() if has == (False, False)} == set(
        FAMILIES_WITHOUT_CLASSIFIERS
    )
    assert set(own.values()) == {(True, True), (False, False)}


def test_labels_of_the_body_do_not_reach_the_export() -> None:
    """transformers refuses one label under single_label_classification, and would make two of
    num_labels.
    """
    labels = {"num_labels": 2, "problem_type": "single_label_classification"}
    base = make_base_config("qwen3_tied")
    for make in (make_value_model_config, lambda body: make_reward_model_config(body, False, PAD)):
        assert make(base | labels) == make(base)


def write_tokenizer(directory: Path, **changes: Any) -> Path:
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    settings = json.loads((MODEL / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **changes}))
    return directory


@pytest.mark.parametrize(
    ("changes", "vocab_size", "pad_token_id"),
    [
        ({}, 32, 0),
        ({"pad_token": "<eos>"}, 32, None),  # transformers would score the token before the end
        ({"pad_token": None}, 32, None),
        ({"pad_token": "+", "chat_template": "{{ messages[0]['content'] }}+"}, 32, None),
        ({"pad_token": "+", "chat_template": "{{ messages[0]['content'] }}="}, 32, 12),
        ({"pad_token": "+"}, 12, None),  # the embedding has no row for it
    ],
)
def test_the_padding_token_ends_no_answer(
    tmp_path: Path, changes: dict[str, Any], vocab_size: int, pad_token_id: int | None
) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", **changes))
    assert choose_pad_token_id(tokenizer, vocab_size) == pad_token_id


def test_an_end_that_is_also_padding_is_scored(world: World, tmp_path: Path) -> None:
    """config.json says that padding is the end of an answer, as many do. transformers then scores
    the token before the end; an export says null, with which it scores the end.
    """
    base = {**make_base_config("llama_untied"), "pad_token_id": 1}
    scores = {}
    for name, pad_token_id in (("wrong", 1), ("right", None)):
        config = make_reward_model_config(base, False, pad_token_id)
        exported = export_reward_model(
            world, tmp_path / name, "llama_untied", "unbiased_value", config
        )
        scores[name] = score_by_transformers(exported.directory, is_padded=False)
    on_ranks = score_on_ranks(world, tmp_path / "right", "megatron")
    assert scores["right"] == pytest.approx(on_ranks, abs=TOLERANCE)
    assert max(abs(a - b) for a, b in zip(scores["wrong"], on_ranks, strict=True)) > 1e-2
    with pytest.raises(ValueError, match="Cannot handle batch sizes > 1"):
        score_by_transformers(tmp_path / "right", is_padded=True)


def test_what_a_reader_must_know_is_said() -> None:
    base = make_base_config("qwen3_tied")
    assert describe_classifier_export(make_reward_model_config(base, False, PAD)) == ()
    assert describe_classifier_export(make_value_model_config(base)) == ()
    [note] = describe_classifier_export(make_reward_model_config(base, True, PAD))
    assert "AutoModelForTokenClassification, whose number of the last token is the score" in note
    [note] = describe_classifier_export(make_reward_model_config(base, False, None))
    assert "pad_token_id null" in note and "one row at a time" in note
    [note] = describe_classifier_export(
        make_reward_model_config(make_base_config("glm4_moe"), False, PAD)
    )
    assert "transformers has no Glm4MoeForSequenceClassification" in note
    olmo2 = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}
    assert describe_classifier_export(make_reward_model_config(olmo2, False, PAD)) == ()
    [note] = describe_classifier_export(make_value_model_config(olmo2))
    assert "transformers has no Olmo2ForTokenClassification" in note

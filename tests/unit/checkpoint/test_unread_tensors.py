"""A tensor of a model's files that nothing reads is an error that names the tensor, unless leaving
the tensor out changes no number: then its name is on a list, and most of these are not spoken of.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from table_samples import SMALL_LLAMA, SMALL_QWEN3, random_state, tied
from torch import Tensor

from rlhf_megatron.cli.main import main
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.controller.preflight import _check_weight_headers
from rlhf_megatron.data.tokenizer import write_character_tokenizer
from rlhf_megatron.jobs.generation.model_source import find_served_weights
from rlhf_megatron.ranks.workers.reference_model import ReferenceModel
from rlhf_megatron.rewards.service.reward_model_servers import check_judge_weights
from rlhf_megatron.rollout.local.local_model import load_local_model
from rlhf_megatron.runtime.rank_roles import open_weight_source
from rlhf_megatron.weights.conversion.conversion_dry_run import open_model_from_index
from rlhf_megatron.weights.conversion.stored_model import open_stored_model
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader
from rlhf_megatron.weights.value_model import open_scoring_model, open_value_model
from rlhf_megatron.weights.weight_sets import INDEX

TIED_LLAMA = tied({**SMALL_LLAMA, "head_dim": 4})
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER = "model.layers.0."
OTHER_HEAD = (
    r"lm_head.weight differs from model.embed_tokens.weight.*first in row 2.*"
    r"tie_word_embeddings to false.*remove lm_head.weight"
)


def write_model(directory: Path, config: dict[str, Any], state: dict[str, Tensor]) -> Path:
    """Write a model directory with a tokenizer, its weights in one file."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    write_character_tokenizer(directory, config["vocab_size"])
    return directory


@pytest.fixture
def other_head(tmp_path: Path) -> Path:
    """A model whose config.json ties embedding and head, and whose file has another head: they
    differ in one value of row 2.
    """
    state = random_state(TIED_LLAMA)
    head = state[EMBEDDING].clone()
    head[2, 5] += 0.25
    return write_model(tmp_path / "model", TIED_LLAMA, {**state, HEAD: head})


def load_reference(directory: Path) -> None:
    """Load the directory into a reference whose table is that of the directory's model."""
    backend = SimpleNamespace(
        table=make_weight_table(TIED_LLAMA),
        world=SimpleNamespace(device=torch.device("cpu")),
        list_part_tensors=lambda part: (),
        make_head=lambda *arguments: None,
        load_weights=lambda source: None,
        adapter=None,
    )
    ReferenceModel(backend, 16, None).load_hf(directory)  # type: ignore[arg-type]


READERS: dict[str, Callable[[Path], object]] = {
    "preflight": lambda path: _check_weight_headers(str(path), ActorConfig()),
    "a rank's policy, reference or teacher": lambda path: open_weight_source(
        path, None, TIED_LLAMA, 1
    ),
    "generate, evaluate and serve": lambda path: find_served_weights(path, path),
    "the local engine": lambda path: load_local_model(path, "float32", "cpu", load_weights=True),
    "convert": open_stored_model,
    "a reference that a warm-up made": load_reference,
    "a served judge": check_judge_weights,
}


@pytest.mark.parametrize("reader", READERS)
def test_a_head_that_differs_from_the_tied_embedding_is_refused(
    other_head: Path, reader: str
) -> None:
    with pytest.raises(ValueError, match=OTHER_HEAD):
        READERS[reader](other_head)


def test_convert_refuses_a_head_that_it_would_lose(
    other_head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "convert",
        str(other_head),
        "--out",
        str(tmp_path / "out"),
        "--to",
        "ranks",
        "--verify",
    ]
    assert main(words) == 1
    assert "lm_head.weight differs from model.embed_tokens.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_equals_the_embedding_is_not_spoken_of(
    tmp_path: Path, reader: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    state = {name: value.bfloat16().float() for name, value in random_state(TIED_LLAMA).items()}
    head = state[EMBEDDING].to(dtype)  # bfloat16 holds the same values
    path = write_model(tmp_path / "model", TIED_LLAMA, {**state, HEAD: head.clone()})
    with caplog.at_level(logging.INFO, "rlhf_megatron"):
        READERS[reader](path)
    assert caplog.records == []


def test_the_two_remedies_that_the_message_names_work(other_head: Path) -> None:
    config = other_head / "config.json"
    config.write_text(json.dumps({**TIED_LLAMA, "tie_word_embeddings": False}))
    untied = open_stored_model(other_head)
    rule = next(r for r in untied.weight_table if r.megatron_name == "output_layer.weight")
    state = load_file(other_head / "model.safetensors")
    assert torch.equal(untied.source.read_hf_tensors(rule)[0], state[HEAD])
    config.write_text(json.dumps(TIED_LLAMA))
    save_file({n: t for n, t in state.items() if n != HEAD}, other_head / "model.safetensors")
    open_stored_model(other_head)


def test_a_head_of_another_size_or_type_differs(tmp_path: Path) -> None:
    state = random_state(TIED_LLAMA)
    table = make_weight_table(TIED_LLAMA)
    for head in (torch.cat([state[EMBEDDING], torch.zeros(3, 24)]), torch.zeros(21, 24).byte()):
        write_model(tmp_path / "model", TIED_LLAMA, {**state, HEAD: head})
        with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens"):
            HFReader(tmp_path / "model").check_against_table(table)


def test_the_tie_of_a_family_that_only_transformers_has(tmp_path: Path) -> None:
    """Under FSDP: GPT-2 ties without a word in config.json, and calls its embedding otherwise."""
    config = {
        "model_type": "gpt2",
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "vocab_size": 19,
        "n_positions": 16,
    }
    table = make_weight_table(config)
    state = {hf.name: torch.ones(hf.shape) for rule in table for hf in rule.hf_tensors}
    state["transformer.h.0.attn.bias"] = torch.ones(16, 16).tril().view(1, 1, 16, 16)
    state["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    equal = state["transformer.wte.weight"].clone()
    HFReader(write_model(tmp_path / "a", config, {**state, HEAD: equal})).check_against_table(table)
    reader = HFReader(write_model(tmp_path / "b", config, {**state, HEAD: 2 * equal}))
    with pytest.raises(ValueError, match=r"differs from transformer.wte.weight.* in row 0"):
        reader.check_against_table(table)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        (f"{LAYER}self_attn.q_proj.bias", (24,), "attention_bias"),
        (f"{LAYER}mlp.up_proj.bias", (40,), "mlp_bias"),
        ("model.layers.4.mlp.up_proj.weight", (40, 24), "num_hidden_layers"),
        (f"{LAYER}self_attn.q_proj.lora_A.weight", (2, 24), "merge the adapter"),
        ("score.weight", (1, 24), "critic.path or reward_model.path"),
        ("v_head.summary.weight", (1, 24), "critic.path or reward_model.path"),
        (f"{LAYER}self_attn.bias", (24,), "remove them from the files"),
        (f"{LAYER}self_attn.q_norm.weight", (3,), "remove them from the files"),
    ],
)
def test_a_tensor_that_nothing_reads_is_an_error(
    tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    state = {**random_state(TIED_LLAMA), name: torch.ones(shape)}
    path = write_model(tmp_path / "model", TIED_LLAMA, state)
    for reader in ("convert", "generate, evaluate and serve"):
        with pytest.raises(ValueError, match=f"nothing reads {name}.*{words}"):
            READERS[reader](path)


def test_the_local_engine_reads_as_the_others_do(tmp_path: Path) -> None:
    state = random_state(TIED_LLAMA)
    extra = {f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    path = write_model(tmp_path / "model", TIED_LLAMA, state | extra)
    load_local_model(path, "float32", "cpu", load_weights=True)
    bias = {f"{LAYER}self_attn.q_proj.bias": torch.ones(32)}
    write_model(path, TIED_LLAMA, state | extra | bias)
    with pytest.raises(ValueError, match=r"nothing reads model.*q_proj.bias.*attention_bias"):
        load_local_model(path, "float32", "cpu", load_weights=True)
    save_file(state, path / "model-00001-of-00001.safetensors")
    with pytest.raises(ValueError, match="two sets of weights"):
        load_local_model(path, "float32", "cpu", load_weights=True)


def test_buffers_that_config_json_gives_are_not_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {
        f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.rotary_emb.inv_freq": torch.ones(4),
        "model.position_ids": torch.arange(4),
        f"{LAYER}self_attn.bias": torch.ones(9, 9).tril().view(1, 1, 9, 9),
        f"{LAYER}self_attn.causal_mask": torch.ones(9, 9).tril().bool().view(1, 1, 9, 9),
        f"{LAYER}self_attn.masked_bias": torch.tensor(-1e9),
    }
    path = write_model(tmp_path / "model", SMALL_LLAMA, random_state(SMALL_LLAMA) | extra)
    with caplog.at_level(logging.INFO, "rlhf_megatron"):
        open_stored_model(path)
    assert caplog.records == []
    with pytest.raises(ValueError, match=r"not part of this model: model.layers.0.self_attn.bias"):
        open_stored_model(path, is_strict=True)


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.up_proj.weight", "model.visual.proj.weight"])
def test_parts_that_no_text_meets_are_left_out_with_a_line(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = {**random_state(SMALL_LLAMA), name: torch.ones(2, 2)}
    open_stored_model(write_model(tmp_path / "model", SMALL_LLAMA, state))
    assert f"{name} (" in caplog.text and "exports and conversions leave them out" in caplog.text


def test_a_tensor_of_a_shard_that_the_index_does_not_name_is_no_exception(tmp_path: Path) -> None:
    state = random_state(SMALL_QWEN3)
    path = write_model(tmp_path / "model", SMALL_QWEN3, {**state, "score.weight": torch.ones(1)})
    (path / "model.safetensors").rename(path / "part.safetensors")
    index = {"weight_map": dict.fromkeys(state, "part.safetensors")}
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"nothing reads score.weight"):
        open_stored_model(path)


def test_a_value_model_leaves_the_head_of_words_out_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = random_state(SMALL_LLAMA)
    table = make_weight_table(SMALL_LLAMA, head="value")
    path = write_model(tmp_path / "policy", SMALL_LLAMA, state)
    with caplog.at_level(logging.INFO, "rlhf_megatron"):
        open_value_model(path, table)
    assert caplog.records == []
    path = write_model(tmp_path / "trl", SMALL_LLAMA, {**state, "v_head.weight": torch.ones(1, 24)})
    with pytest.raises(ValueError, match=r"nothing reads v_head.weight.*call the head score"):
        open_value_model(path, table)
    scores = {**state, "score.weight": torch.ones(1, 24), "score.dense.weight": torch.ones(2, 2)}
    path = write_model(tmp_path / "reward", SMALL_LLAMA, scores)
    with pytest.raises(ValueError, match=r"nothing reads score.dense.weight"):
        open_scoring_model(path, table)


def test_the_plan_of_an_index_names_what_would_be_lost(tmp_path: Path) -> None:
    names = dict.fromkeys(random_state(TIED_LLAMA), "model-1.safetensors")
    names |= dict.fromkeys([HEAD, f"{LAYER}self_attn.rotary_emb.inv_freq"], "model-1.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TIED_LLAMA))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert open_model_from_index(tmp_path)[1] == [
        "note: lm_head.weight must equal the embedding, to which config.json ties the head; the"
        " conversion compares them and refuses a head that differs"
    ]


def test_converted_layouts_name_what_they_hold_beyond_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_model(tmp_path / "hf", TIED_LLAMA, random_state(TIED_LLAMA))
    for layout in ("ranks", "torch_dist"):
        assert main(["convert", str(source), "--out", str(tmp_path / layout), "--to", layout]) == 0
        open_stored_model(tmp_path / layout, config_directory=source)
    file = tmp_path / "ranks" / "tp0_pp0.safetensors"
    save_file({**load_file(file), "output_layer.weight": torch.ones(21, 24)}, file)
    with pytest.raises(ValueError, match=r"tp0_pp0.safetensors holds output_layer.weight, which"):
        open_stored_model(tmp_path / "ranks")
    path = next((tmp_path / "torch_dist").rglob(".metadata"))
    metadata = pickle.loads(path.read_bytes())
    some = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    metadata.state_dict_metadata["optimizer.state.exp_avg.weight"] = some
    metadata.state_dict_metadata["mtp.layers.0.enorm.weight"] = some
    path.write_bytes(pickle.dumps(metadata))
    caplog.clear()
    open_stored_model(tmp_path / "torch_dist", config_directory=source)
    assert "mtp.layers.0.enorm.weight (" in caplog.text and "exp_avg" not in caplog.text
    metadata.state_dict_metadata["decoder.layers.0.self_attention.linear_qkv.bias"] = some
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"nothing reads decoder.layers.0.*linear_qkv.bias"):
        open_stored_model(tmp_path / "torch_dist", config_directory=source)

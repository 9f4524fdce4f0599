"""Configuration and weights of a job that trains nothing: from a YAML file, the directory of a run,
or of a model.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from rlhf_megatron.config.hub import download_from_hub, find_local_model_copy, is_hub_name
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import ModelConfig, RunConfig
from rlhf_megatron.config.secrets import reveal_secrets
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.controller.recovery.checkpoint_export import HF, find_exportable_weights
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.data.vocabulary_size import require_all_tokens_known
from rlhf_megatron.device import count_devices, has_accelerator
from rlhf_megatron.jobs.generation.answer_file import digest_texts
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.weights.conversion.stored_model import StoredModel
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config
from rlhf_megatron.write_errors import write_text_file


@dataclass(frozen=True)
class ServedWeights:
    """The weights of a job, and the values that distinguish them from others."""

    model: StoredModel
    path_name: str  # a path, for messages
    identity: str  # changes where the files change
    step: int | None = None  # of a checkpoint


def find_served_weights(
    job_source: Path, model_path: Path, step: int | None = None, is_best: bool = False
) -> ServedWeights:
    """Return the weights that a job with this source serves; `job_source` is as in
    `load_job_config`, and `model_path` is that of its configuration.

    For a run, these are the checkpoint of `step` or the best one (as
    `controller.recovery.checkpoint_export.find_exportable_weights` says), else its folder `hf`,
    else its newest checkpoint. Only headers are read. Raise ValueError where there are no such
    weights, and for --step or --best without a run.
    """
    is_run = (job_source / "config.yaml").is_file()
    if (step is not None or is_best) and not is_run:
        raise ValueError(
            "--step and --best need the directory of a run, with checkpoints;"
            f" {job_source} is none."
        )
    if is_run and (step is not None or is_best or not _has_hf_export(job_source)):
        found = find_exportable_weights(job_source, step, is_best)
        return ServedWeights(
            found.model,
            str(found.checkpoint_path),
            _digest_file_stats(found.checkpoint_path),
            found.step,
        )
    path = job_source / HF if is_run else model_path
    hf_config = read_hf_config(path)
    reader = HFReader(path)
    reader.check_against_table(make_weight_table(hf_config))
    return ServedWeights(
        StoredModel(hf_config, reader, path, path, recorded_digests={}),
        str(path),
        _digest_file_stats(path),
    )


def load_job_tokenizer(model: ModelConfig, served_weights: ServedWeights) -> Tokenizer:
    """Return the tokenizer that a configuration names for these weights. Raise ValueError where the
    tokenizer has token ids that the model of the weights does not have.
    """
    tokenizer = load_tokenizer(model.tokenizer_path or model.path, model.path)
    vocab_size = int(served_weights.model.hf_config["vocab_size"])
    require_all_tokens_known(tokenizer.vocab_size, vocab_size, served_weights.path_name)
    return tokenizer


def _has_hf_export(run_dir: Path) -> bool:
    """Return whether a run has written its weights in Hugging Face layout."""
    return (run_dir / HF / "config.json").is_file()


def _digest_file_stats(directory: Path) -> str:
    """Return a digest of the names, sizes and times of a directory's files, since reading the bytes
    would take minutes.
    """
    files = [(path, path.stat()) for path in sorted(directory.glob("*")) if path.is_file()]
    return digest_texts([f"{path.name} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files])


def load_job_config(
    job_source: Path | None, prompt_files: Sequence[str], overrides: Sequence[str]
) -> RunConfig:
    """Return the configuration of `load_job_settings`, for callers that need not know which
    settings somebody wrote.
    """
    return load_job_settings(job_source, prompt_files, overrides).config


def load_job_settings(
    job_source: Path | None, prompt_files: Sequence[str], overrides: Sequence[str]
) -> LoadedConfig:
    """Return the configuration for a job that trains nothing. `job_source` is RUN.yaml, a run's
    directory, a model in Hugging Face layout or its name on a hub (downloaded if there is no copy),
    or None for the defaults.

    `prompt_files` replace the prompts that the source names; `overrides` count last. Plugins are
    loaded. Raise ConfigError or ValueError for a source or settings that are wrong.
    """
    words: list[str] = []
    path: Path | None = None
    given: list[str] = []
    if prompt_files:
        files = json.dumps([os.fspath(name) for name in prompt_files])
        words = [
            "data.task=null",
            "data.sources=[]",
            f"data.train_files={files}",
            f"data.val_files={files}",
        ]
    if job_source is not None and job_source.is_file():
        path = job_source
    elif job_source is not None and (job_source / "config.yaml").is_file():
        path = job_source / "config.yaml"
        given = ["model.init_seed=null"]
        given += (
            [f"model.path={json.dumps(str(job_source / HF))}"] if _has_hf_export(job_source) else []
        )
        given += (
            _make_engine_overrides()
            if yaml.safe_load(path.read_text(encoding="utf-8")).get("job", "train") != "train"
            else []
        )
    elif job_source is not None and (job_source / "config.json").is_file():
        given = _make_default_overrides(job_source)
    elif job_source is not None and is_hub_name(str(job_source)) and not job_source.exists():
        given = _make_default_overrides(
            Path(find_local_model_copy(str(job_source)) or download_from_hub(str(job_source)))
        )
    elif job_source is not None:
        raise ValueError(
            f"{job_source} must be a configuration (RUN.yaml), the directory of a run, or a model"
            " in Hugging Face layout (with config.json) or on a model hub (owner/name);"
            " correct it."
        )
    with tempfile.TemporaryDirectory() as directory:
        if path is None:
            path = Path(directory) / "model.yaml"
            write_text_file(path, "{}\n")
        loaded = read_run_config(path, [*given, *words, *overrides])
    load_plugins(loaded.config.plugins)
    return replace(loaded, config=reveal_secrets(loaded.config, os.environ))


def _make_default_overrides(model: Path) -> list[str]:
    """Return settings that fit a model and this machine, for a model that comes without a
    configuration.
    """
    reader = HFReader(model)
    found = reader.get_dtype_name(make_weight_table(read_hf_config(model))[0])
    dtype = found if found in ("float32", "bfloat16") else "bfloat16"
    return [
        f"model.path={json.dumps(str(model))}",
        f"model.dtype={dtype}",
        *_make_engine_overrides(),
    ]


def _make_engine_overrides() -> list[str]:
    """Return settings of engines for this machine, since a model, or a job without rollouts, names
    none: SGLang on GPUs, else the local engine, one for each device.
    """
    engine = "sglang" if has_accelerator() else "local"
    return [f"rollout.engine={engine}", f"rollout.num_engines={max(1, count_devices())}"]

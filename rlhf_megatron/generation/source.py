"""Configuration and weights of a job that trains nothing: from a YAML file, the directory of a run, or of a model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config
from rlhf_megatron.config.hub import download, is_hub_name, local_copy
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import revealed
from rlhf_megatron.conversion.model import Model
from rlhf_megatron.generation.answer_file import digest_of
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.parallel.device import has_accelerator, num_devices
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.recovery.export import HF, find_weights


@dataclass(frozen=True)
class Served:
    """The weights of a job, and what tells them from others."""

    model: Model
    name: str  # a path, for messages
    identity: str  # changes where the files change
    step: int | None = None  # of a checkpoint


def weights_of(source: Path, model_path: Path, step: int | None = None, is_best: bool = False) -> Served:
    """Find the weights that `source`, as in `config_of`, serves. `model_path` is that of its configuration.

    Of a run: the checkpoint of `step` or the best one (as `recovery.export.find_weights` says), else its folder `hf`,
    else its newest checkpoint.

    Reads headers only. Raises ValueError.
    """
    is_run = (source / "config.yaml").is_file()
    if (step is not None or is_best) and not is_run:
        raise ValueError(f"--step and --best need the directory of a run, with checkpoints; {source} is none.")
    if is_run and (step is not None or is_best or not _has_hf(source)):
        found = find_weights(source, step, is_best)
        return Served(found.model, str(found.checkpoint), _identity(found.checkpoint), found.step)
    path = source / HF if is_run else model_path
    hf_config, reader = read_hf_config(path), HFReader(path)
    reader.check(table_for(hf_config))
    return Served(Model(hf_config, reader, path, path, digests={}), str(path), _identity(path))


def _has_hf(run_dir: Path) -> bool:
    return (run_dir / HF / "config.json").is_file()


def _identity(directory: Path) -> str:
    """A digest of names, sizes and times of the files: bytes would take minutes to read."""
    files = [(path, path.stat()) for path in sorted(directory.glob("*")) if path.is_file()]
    return digest_of([f"{path.name} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files])


def config_of(source: Path | None, prompt_files: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    """`source`: RUN.yaml; a run's directory; a model in Hugging Face layout, or its name on a hub; None: the defaults.

    `prompt_files` take the place of the prompts that it names. Raises ConfigError and ValueError.
    """
    words: list[str] = []
    path: Path | None = None
    given: list[str] = []
    if prompt_files:
        files = json.dumps([os.fspath(name) for name in prompt_files])
        words = ["data.task=null", "data.sources=[]", f"data.train_files={files}", f"data.val_files={files}"]
    if source is not None and source.is_file():
        path = source
    elif source is not None and (source / "config.yaml").is_file():
        path, given = source / "config.yaml", ["model.init_seed=null"]
        given += [f"model.path={json.dumps(str(source / HF))}"] if _has_hf(source) else []
        given += _engine() if yaml.safe_load(path.read_text(encoding="utf-8")).get("job", "train") != "train" else []
    elif source is not None and (source / "config.json").is_file():
        given = _defaults(source)
    elif source is not None and is_hub_name(str(source)) and not source.exists():
        given = _defaults(Path(local_copy(str(source)) or download(str(source))))
    elif source is not None:
        raise ValueError(
            f"{source} must be a configuration (RUN.yaml), the directory of a run, or a model in Hugging Face layout"
            " (with config.json) or on a model hub (owner/name); correct it."
        )
    with tempfile.TemporaryDirectory() as directory:
        if path is None:
            path = Path(directory) / "model.yaml"
            path.write_text("{}\n")
        config = revealed(read_run_config(path, [*given, *words, *overrides]).config, os.environ)
    load_plugins(config.plugins)
    return config


def _defaults(model: Path) -> list[str]:
    """Settings that fit a model and this machine, where no configuration says otherwise."""
    reader = HFReader(model)
    found = reader.dtype_of(table_for(read_hf_config(model))[0])
    dtype = found if found in ("float32", "bfloat16") else "bfloat16"
    return [f"model.path={json.dumps(str(model))}", f"model.dtype={dtype}", *_engine()]


def _engine() -> list[str]:
    """Choose engines for this machine, since a model, or a job without rewards, names none."""
    engine = "sglang" if has_accelerator() else "local"
    return [f"rollout.engine={engine}", f"rollout.num_engines={max(1, num_devices())}"]

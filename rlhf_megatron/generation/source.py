"""The configuration of a job that trains nothing, from a YAML file, the directory of a run or that of a model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import revealed
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.parallel.device import has_accelerator
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.resharding.manifest import DTYPE_BYTES


def config_of(source: Path | None, prompt_files: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    """`source`: RUN.yaml; a run's directory, whose weights are in its folder `hf`; a model in Hugging Face layout;
    None: the defaults.

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
        path, given = (
            source / "config.yaml",
            ["model.init_seed=null", f"model.path={json.dumps(str(_weights_of(source)))}"],
        )
    elif source is not None and (source / "config.json").is_file():
        given = _defaults(source)
    elif source is not None:
        raise ValueError(
            f"{source} must be a configuration (RUN.yaml), the directory of a run, or a model in Hugging Face layout"
            " (with config.json); correct the path."
        )
    with tempfile.TemporaryDirectory() as directory:
        if path is None:
            path = Path(directory) / "model.yaml"
            path.write_text("{}\n")
        config = revealed(read_run_config(path, [*given, *words, *overrides]).config, os.environ)
    load_plugins(config.plugins)
    return config


def _weights_of(run_dir: Path) -> Path:
    if not (run_dir / "hf" / "config.json").is_file():
        raise ValueError(
            f"{run_dir} has no weights in Hugging Face layout ({run_dir / 'hf'}): write them with"
            f" `rlhf-megatron export {run_dir} --out DIR`, and name that directory."
        )
    return run_dir / "hf"


def _defaults(model: Path) -> list[str]:
    """Settings that fit a model and this machine, where no configuration says otherwise."""
    reader = HFReader(model)
    found = reader.dtype_of(table_for(read_hf_config(model))[0])
    dtype = found if found in ("float32", "bfloat16") else "bfloat16"
    assert dtype in DTYPE_BYTES
    engine = "sglang" if has_accelerator() else "local"
    return [f"model.path={json.dumps(str(model))}", f"model.dtype={dtype}", f"rollout.engine={engine}"]

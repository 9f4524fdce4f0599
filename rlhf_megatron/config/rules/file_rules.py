"""Rules on what a configuration points to: model and tokenizer directories, data files, the
transfer directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib.util import find_spec
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.hub import is_hub_name, parse_cached_model_name
from rlhf_megatron.config.hub_data import SUFFIXES, DatasetSplit
from rlhf_megatron.config.rules.model_rules import (
    find_critic_model_problems,
    find_policy_model_problems,
    find_reward_model_problems,
    find_teacher_model_problems,
)
from rlhf_megatron.config.rules.run_rules import (
    has_critic,
    has_reward_model,
    has_served_model,
    has_teacher,
    needs_reference,
)
from rlhf_megatron.config.schema import DataConfig, RunConfig
from rlhf_megatron.config.secrets import read_key_file
from rlhf_megatron.install_hints import format_install_command

MAX_JSON = 1 << 24  # characters of a config.json; the longest have thousands
SAME_IN_REFERENCE = (
    "model_type",
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
)


def find_file_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each file or directory of the configuration that is missing or does not
    fit: models, tokenizer, data files, transfer directory and API key files. Only small files are
    read; weights are looked for but not opened.
    """
    hf_config = None
    if config.model.path:
        hf_config = yield from _check_model_dir(
            "model.path", config.model.path, config.model.init_seed is None
        )
    if hf_config is not None:
        yield from find_policy_model_problems(config, hf_config)
    yield from _check_tokenizer(config)
    if needs_reference(config) and config.reference.path:
        yield from _check_reference_dir(config, config.reference.path, hf_config)
    if has_critic(config) and config.critic.path:
        yield from _check_critic_dir(config, config.critic.path, hf_config)
    if has_reward_model(config) and config.reward_model.path:
        yield from _check_reward_model_dir(config, config.reward_model.path, hf_config)
    if has_served_model(config) and config.reward_model.path:
        yield from _check_served_model_dir(config, config.reward_model.path)
    yield from _check_data_files(config.data)
    if config.rollout.transfer_dir is not None and not isdir(config.rollout.transfer_dir):
        key = "rollout.transfer_dir"
        yield ConfigProblem(
            (
                f"{key} ({config.rollout.transfer_dir}) must be a directory; make it or"
                " remove the key."
            ),
            (key,),
        )
    if config.rollout.endpoints:
        yield from _check_key_files(config)


def _check_key_files(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each API key file of the SGLang servers that cannot be read."""
    for name in ("api_key_file", "admin_api_key_file"):
        key = f"rollout.sglang.{name}"
        try:
            read_key_file(getattr(config.rollout.sglang, name), key)
        except ValueError as error:
            yield ConfigProblem(str(error), (key,))


def _check_model_dir(
    key: str, path: str, with_weights: bool
) -> Generator[ConfigProblem, None, dict[str, Any] | None]:
    """Yield a problem for what a model directory lacks: the directory, weights (if `with_weights`),
    or a readable config.json. Return the parsed config.json, or None where it cannot be read.
    """
    if not isdir(path):
        hub = (
            f" (`rlhf-megatron fetch {path}` brings the model of a hub, as `train` does)"
            if is_hub_name(path)
            else ""
        )
        yield ConfigProblem(
            (
                f"{key} ({path}) is not a directory; correct it, or make or fetch the"
                f" model first{hub}."
            ),
            (key,),
        )
        return None
    if with_weights and not any(file.is_file() for file in Path(path).glob("*.safetensors")):
        seed = (
            "; put weights there, or set model.init_seed for random ones"
            if key == "model.path"
            else ""
        )
        copied = parse_cached_model_name(path)
        fetch = (
            f"; `rlhf-megatron fetch {copied}` brings what this copy lacks of the hub's"
            if copied
            else ""
        )
        yield ConfigProblem(f"{key} ({path}) has no *.safetensors{fetch}{seed}.", (key,))
    file = Path(path) / "config.json"
    if not isfile(file):
        yield ConfigProblem(
            f"{key} ({path}) has no config.json; name a model in Hugging Face layout.", (key,)
        )
        return None
    try:
        return _read_json_object(file)
    except ValueError as error:
        yield ConfigProblem(str(error), (key,))
        return None


def _read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ValueError if the file cannot be read as JSON, or
    holds something other than an object.
    """
    try:
        with file.open(encoding="utf-8") as opened:
            parsed = json.loads(opened.read(MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} cannot be read as JSON ({error}); mend or fetch it again."
        ) from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{file} must hold a JSON object; mend or fetch it again.")
    return parsed


def _check_data_files(data: DataConfig) -> Iterator[ConfigProblem]:
    """Yield a problem for each data file that does not exist, and for each parquet file or saved
    dataset if pyarrow is not installed. A saved dataset is a directory with a state.json.
    """
    files = [
        ("data.train_files", "data.train_files", data.train_files),
        ("data.val_files", "data.val_files", data.val_files),
    ]
    for index, source in enumerate(data.sources):
        for name, paths in (("train_files", source.train_files), ("val_files", source.val_files)):
            files.append((f"data.sources[{index}].{name}", "data.sources", paths))
    for name, key, paths in files:
        for file in paths:
            # a saved dataset is a folder
            if not isfile(file) and not isfile(Path(file) / "state.json"):
                yield ConfigProblem(
                    f"{name} ({file}) does not exist; {_suggest_data_file_fix(file)}.", (key,)
                )
            if (file.endswith(".parquet") or isdir(file)) and find_spec("pyarrow") is None:
                yield ConfigProblem(
                    (
                        f"{name} ({file}) needs pyarrow, which is not installed; install the extra"
                        f" ({format_install_command('parquet')}), or convert the file to JSONL."
                    ),
                    (key,),
                )


def _suggest_data_file_fix(file: str) -> str:
    """Return advice on a data file that does not exist: fetch the hub's data set, correct the path,
    or name a split of a data set of the hub.
    """
    if DatasetSplit.from_name(file) is not None:
        return f"`rlhf-megatron fetch {file}` brings it from the hub, as `train` and `sft` do"
    name = "/".join(Path(file).parts[-2:])
    is_file = Path(file).suffix in SUFFIXES
    hub = (
        f", or name the split of a data set of the hub ({name}:train)"
        if is_hub_name(name) and not is_file
        else ""
    )
    return f"correct the path{hub}"


def _check_tokenizer(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield a problem if the tokenizer directory has no tokenizer.json, or has no chat template
    although data.apply_chat_template is on.
    """
    key = "model.path" if config.model.tokenizer_path is None else "model.tokenizer_path"
    path = config.model.tokenizer_path or config.model.path
    if path and (key != "model.path" or isdir(path)) and not isfile(Path(path) / "tokenizer.json"):
        yield ConfigProblem(
            (
                f"{key} ({path}) has no tokenizer.json; set model.tokenizer_path to a"
                " directory that has."
            ),
            (key,),
        )
    elif (
        config.data.apply_chat_template
        and path
        and isdir(path)
        and not _has_chat_template(Path(path))
    ):
        yield ConfigProblem(
            (
                f"{key} ({path}) has no chat template, neither chat_template.jinja nor"
                " chat_template in tokenizer_config.json; set model.tokenizer_path to a directory"
                " that has one, or data.apply_chat_template to false."
            ),
            (key, "data.apply_chat_template"),
        )


def _has_chat_template(directory: Path) -> bool:
    """Return whether a tokenizer directory has a chat template, in chat_template.jinja or in a
    readable tokenizer_config.json.
    """
    settings = directory / "tokenizer_config.json"
    found = isfile(directory / "chat_template.jinja")
    with suppress(ValueError):
        found = found or (
            isfile(settings) and bool(_read_json_object(settings).get("chat_template"))
        )
    return found


def _check_served_model_dir(config: RunConfig, path: str) -> Iterator[ConfigProblem]:
    """Yield problems of the directory of a served reward model. Without a judge the model must have
    one label and give a score; with a judge it must generate text and have a chat template.
    """
    key = "reward_model.path"
    judge = "reward_model.served.judge"
    served = config.reward_model.served
    names = [
        str(name)
        for name in ((yield from _check_model_dir(key, path, with_weights=True)) or {}).get(
            "architectures", []
        )
    ]
    if served.judge is None and any(name.endswith("ForCausalLM") for name in names):
        yield ConfigProblem(
            (
                f"{key} ({path}) is a model that writes ({', '.join(names)}), and has no score;"
                f" name a model with one label, or set {judge}: {{}}, and its verdict is the score."
            ),
            (key, judge),
        )
    if served.judge is None:
        return
    if any("Classification" in name or "Reward" in name for name in names):
        yield ConfigProblem(
            (
                f"{key} ({path}) gives numbers ({', '.join(names)}), and writes no verdict; name a"
                f" model that writes, or set {judge}: null."
            ),
            (key, judge),
        )
    elif (
        isdir(path)
        and not _has_chat_template(Path(path))
        and not {"chat_template", "chat-template"} & set(served.args)
    ):
        yield ConfigProblem(
            f"{key} ({path}) has no chat template, by which a judge is asked; name one with"
            " reward_model.served.args.chat_template.",
            (key, "reward_model.served.args"),
        )


def _check_reference_dir(
    config: RunConfig, path: str, hf_config: dict[str, Any] | None
) -> Iterator[ConfigProblem]:
    """Yield problems of the reference's model directory: a reference must have the policy's
    architecture. A teacher may be another model, but must read and generate the same tokens.
    """
    key = "reference.path"
    found = yield from _check_model_dir(key, path, with_weights=True)
    if found is not None and (has_teacher(config) or config.reference.num_ranks):
        yield from find_teacher_model_problems(config, found)
    if has_teacher(config):
        if found is not None:
            yield from _check_same_vocabulary(key, "teacher", found, hf_config)
        return
    for name in SAME_IN_REFERENCE:
        if found is not None and hf_config is not None and found.get(name) != hf_config.get(name):
            yield ConfigProblem(
                (
                    f"{key}: {name} ({found.get(name)}) must be that of model.path"
                    f" ({hf_config.get(name)}); choose a reference of the same architecture."
                ),
                (key, "model.path"),
            )


def _check_critic_dir(
    config: RunConfig, path: str, hf_config: dict[str, Any] | None
) -> Iterator[ConfigProblem]:
    """Yield problems of the critic's model directory: the critic may differ from the policy, but
    must read the same token ids.
    """
    key = "critic.path"
    found = yield from _check_model_dir(key, path, with_weights=True)
    if found is not None:
        yield from find_critic_model_problems(config, found)
        yield from _check_same_vocabulary(key, "critic", found, hf_config)


def _check_reward_model_dir(
    config: RunConfig, path: str, hf_config: dict[str, Any] | None
) -> Iterator[ConfigProblem]:
    """Yield problems of the reward model's directory: the model must have a supported architecture
    and read the policy's token ids, and `path` must not be a run directory in place of the model
    that the run exported.
    """
    key = "reward_model.path"
    of_run = os.path.join(path, "hf")
    if not exists(os.path.join(path, "config.json")) and isdir(of_run):
        yield ConfigProblem(
            f"{key} ({path}) is a run directory; name the model that it has written, {of_run}.",
            (key,),
        )
        return
    found = yield from _check_model_dir(key, path, with_weights=True)
    if found is not None:
        yield from find_reward_model_problems(config, found)
        yield from _check_same_vocabulary(key, "reward model", found, hf_config)


def _check_same_vocabulary(
    key: str, role: str, other_config: dict[str, Any], hf_config: dict[str, Any] | None
) -> Iterator[ConfigProblem]:
    """Yield a problem if the vocabulary sizes of the two Hugging Face configs differ; `role` names
    the other model in the text. Yield nothing where the policy's config is not known.
    """
    if hf_config is not None and other_config.get("vocab_size") != hf_config.get("vocab_size"):
        yield ConfigProblem(
            (
                f"{key}: vocab_size ({other_config.get('vocab_size')}) must be that of model.path"
                f" ({hf_config.get('vocab_size')}): the {role} reads the policy's tokens; choose a"
                f" {role} with the same tokenizer."
            ),
            (key, "model.path"),
        )

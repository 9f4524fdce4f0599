"""`rlhf-megatron init [quickstart|grpo|ppo|async|sft] DIR`: writes a configuration to start
from, and what it needs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from importlib.resources import files
from pathlib import Path
from string import Template

from rlhf_megatron.write_errors import write_text_file

RECIPE_TITLES = {
    "grpo": "GRPO: a sample's reward against the other samples of its prompt",
    "ppo": "PPO: a critic says what a sample is compared with",
    "async": "GRPO whose engines never wait for the trainer, nor it for them",
}
RECIPE_TEMPLATES = {
    "grpo": "algorithm:\n  adv_estimator: grpo         # others: rlhf-megatron algorithms\n",
    "ppo": """\
algorithm:
  adv_estimator: gae
  params: {gamma: 1.0, lam: 1.0}

critic:                       # starts as a copy of the policy, on its ranks
  optim:
    lr: $critic_lr
""",
    "async": """\
schedule:
  name: asynchronous
  params:
    max_lag: 2                # weight syncs that a sample may be old

algorithm:
  adv_estimator: grpo
  rollout_correction:
    preset: decoupled_token_is  # weighs tokens that an older policy sampled
""",
}
SFT = "sft"
STARTER_KINDS = ("quickstart", *RECIPE_TEMPLATES, SFT)
NUM_ROWS_BY_FILE = {"train.jsonl": 1000, "val.jsonl": 200}


def _parse_kind_and_directory(words: list[str]) -> tuple[str, Path]:
    """Return the kind of starter (quickstart if none is named) and the directory from the words of
    the command line. Raise ValueError for other words.
    """
    *kinds, directory = words
    if len(kinds) > 1 or not set(kinds) <= set(STARTER_KINDS) or directory in STARTER_KINDS:
        raise ValueError(
            f"`init {' '.join(words)}` must name a folder, and before it one of"
            f" {', '.join(STARTER_KINDS)}: as `rlhf-megatron init grpo my_run`."
        )
    return (kinds or STARTER_KINDS)[0], Path(directory)


def run_init_command(args: argparse.Namespace) -> None:
    """Write run.yaml, and the model and data that it needs, into a directory, and print the next
    command. Raise ValueError for options that do not fit, or where a file exists, which is never
    overwritten.
    """
    kind, directory = _parse_kind_and_directory(args.words)
    gpus: int = args.gpus if args.gpus is not None else len(list(Path("/dev").glob("nvidia[0-9]*")))
    if kind == "quickstart" and args.gpus:
        raise ValueError(
            "the quickstart needs no GPU; leave out --gpus, or write `rlhf-megatron init grpo DIR`."
        )
    if kind == "async" and gpus == 1:
        raise ValueError(
            "engines that never wait need GPUs of their own; use --gpus 2 or more, or grpo."
        )
    own = {"quickstart": "model"}.get(kind, "" if gpus else "warm_model")
    names = [
        "run.yaml",
        *(["model"] if own else []),
        *([] if kind == "quickstart" or gpus else NUM_ROWS_BY_FILE),
    ]
    if there := [name for name in names if (directory / name).exists()]:
        raise ValueError(
            f"{directory / there[0]} is there already and is not overwritten; name another folder."
        )
    directory.mkdir(parents=True, exist_ok=True)
    if own:
        shutil.copytree(find_shipped_dir() / "examples" / "quickstart" / own, directory / "model")
    if "train.jsonl" in names:
        _write_addition_data(directory)
    text = (
        _render_quickstart_config() if kind == "quickstart" else render_starter_config(kind, gpus)
    )
    write_text_file(directory / "run.yaml", text)
    print(f"{directory}: {', '.join(names)}")
    print(
        f"next: rlhf-megatron {SFT if kind == SFT else 'train'} {directory / 'run.yaml'}"
        if own
        else "next: put your model and data into run.yaml"
    )


def find_shipped_dir() -> Path:
    """Return the folder that holds configs/, examples/ and launch/: in the installed package, or in
    the working tree around it.
    """
    package = Path(str(files("rlhf_megatron")))
    return package / "shipped" if (package / "shipped").is_dir() else package.parent


def render_starter_config(kind: str, num_gpus: int) -> str:
    """Return the YAML of a starter configuration for one machine with `num_gpus` GPUs, or for a CPU
    if that is 0.
    """
    is_apart = kind == "async" and num_gpus > 0
    of_engines = max(1, num_gpus // 4) if is_apart else num_gpus
    ranks = num_gpus - of_engines if is_apart else num_gpus
    tp = next(size for size in (2, 1) if max(ranks, 1) % size == 0)
    if kind == SFT:
        sharing = {"gpus": num_gpus, "tp": tp, "sp": "true" if tp > 1 else "false"}
        return _read_template("sft_gpu.yaml" if num_gpus else "sft_cpu.yaml").substitute(sharing)
    n = 4 if kind == "ppo" else 8
    prompts = 128 if num_gpus else 32
    values = {
        "title": RECIPE_TITLES[kind],
        "name": kind,
        "n": n,
        "mini_batch": prompts * n // 2,
        "recipe": Template(RECIPE_TEMPLATES[kind]).safe_substitute(
            critic_lr="1.0e-5" if num_gpus else "1.0e-3"
        ),
        "gpus": num_gpus,
        "ranks": ranks,
        "tp": tp,
        "sp": "true" if tp > 1 else "false",
        "engines": _format_engine_settings(of_engines, is_apart),
    }
    return _read_template("gpu.yaml" if num_gpus else "cpu.yaml").substitute(values)


def _read_template(file_name: str) -> Template:
    """Return the template of a starter configuration."""
    file = files("rlhf_megatron.cli").joinpath("starters", file_name)
    return Template(file.read_text(encoding="utf-8"))


def _format_engine_settings(num_engines: int, has_own_gpus: bool) -> str:
    """Return the YAML lines on the number of engines; without GPUs of their own they are colocated
    with the trainer.
    """
    if has_own_gpus:
        return (
            f"  num_engines: {num_engines}              # on GPUs of their own, behind"
            " the trainer's"
        )
    return (
        "  colocated: true             # engines and trainer take turns with the GPUs\n"
        f"  num_engines: {num_engines}\n"
        "  sglang:\n    args: {mem_fraction_static: 0.65}"
    )


def _render_quickstart_config() -> str:
    """Return the YAML of the quickstart configuration, with paths that fit a directory
    of its own.
    """
    text = (find_shipped_dir() / "configs" / "quickstart.yaml").read_text(encoding="utf-8")
    return text.replace("../examples/quickstart/model", "model").replace(
        "configs/quickstart.yaml", "run.yaml"
    )


def _write_addition_data(directory: Path) -> None:
    """Write train.jsonl and val.jsonl with distinct sums of two-digit numbers, the same in every
    call.
    """
    draw = random.Random(1)
    sums = draw.sample(
        [(a, b) for a in range(100) for b in range(100)], sum(NUM_ROWS_BY_FILE.values())
    )
    for name, count in NUM_ROWS_BY_FILE.items():
        rows = [{"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in sums[:count]]
        write_text_file(directory / name, "".join(json.dumps(row) + "\n" for row in rows))
        sums = sums[count:]

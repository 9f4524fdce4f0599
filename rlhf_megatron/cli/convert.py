"""`rlhf-megatron export`, `convert` and `fetch`: weights on disk, out of checkpoints and between layouts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rlhf_megatron.checkpoint import smollm2
from rlhf_megatron.recovery.export import find_weights
from rlhf_megatron.resharding import convert
from rlhf_megatron.resharding.convert import OnRule


def export(args: argparse.Namespace) -> None:
    """Write the weights of a run's checkpoint, and say what was written and how it is used."""
    role: Literal["actor", "critic"] = "critic" if args.critic else "actor"
    found = find_weights(args.run_dir, args.step, args.best, args.model, role)
    with _Bar(len(found.model.table)) as bar:
        num_tensors = found.write(args.out, args.dtype, bar.step("write"))
    print(f"{args.out}: {num_tensors} tensors of step {found.step}, from {found.checkpoint}.")
    if found.model.companions_from is None:
        print("note: without a tokenizer, since the run's model directory is not here; --model DIR names another.")
    if not args.critic:
        print(f'next: transformers.AutoModelForCausalLM.from_pretrained("{args.out}"), or model.path of a run')


def hf_to_megatron(args: argparse.Namespace) -> None:
    _to_megatron(args, args.hf)


def reshard(args: argparse.Namespace) -> None:
    _to_megatron(args, args.megatron)


def megatron_to_hf(args: argparse.Namespace) -> None:
    if args.max_shard_mib <= 0:
        raise ValueError(f"--max-shard-mib is {args.max_shard_mib}; it must be positive.")
    model = convert.open_model(args.megatron)
    with _Bar(len(convert.table_for(model.hf_config))) as bar:
        digests = convert.write_hf(model, args.out, args.dtype, args.max_shard_mib << 20, bar.step("write"))
        if args.verify:
            convert.verify(model, args.out, digests, bar.step("verify"))
    _report(args, len(digests))


def _to_megatron(args: argparse.Namespace, directory: Path) -> None:
    for name in ("tp", "pp"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be positive.")
    model = convert.open_model(directory)
    with _Bar(len(convert.table_for(model.hf_config))) as bar:
        digests = convert.write_megatron(model, args.out, args.tp, args.pp, args.dtype, bar.step("write"))
        if args.verify:
            convert.verify(model, args.out, digests, bar.step("verify"))
    _report(args, len(digests))


def _report(args: argparse.Namespace, num_tensors: int) -> None:
    checked = ", read back and compared" if args.verify else ""
    print(f"{args.out}: {num_tensors} tensors written{checked}.")


class _Bar:
    """A progress bar on standard error."""

    def __init__(self, num_rules: int) -> None:
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True))
        self._num_rules = num_rules

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, name: str) -> OnRule:
        task = self._progress.add_task(name, total=self._num_rules)
        return lambda rule: self._progress.advance(task)


def fetch(args: argparse.Namespace) -> None:
    """Fetch and convert the model, unless its directory is complete already."""
    is_new = smollm2.fetch(args.out, args.dtype)
    print(f"{args.out}: {'fetched and converted' if is_new else 'is there already'}.")

"""`rlhf-megatron convert`, also `python -m tools.checkpoint_convert`: Hugging Face <-> per-rank Megatron weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_megatron.resharding.convert import OnRule

_HERE = "rlhf_megatron.cli.convert"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The three directions, each with a function of this file."""
    from rlhf_megatron.cli.commands import add_traceback

    actions = parser.add_subparsers(metavar="DIRECTION", required=True)
    to_megatron = actions.add_parser("hf-to-megatron", help="one file a (tp, pp) rank from a Hugging Face directory")
    to_megatron.add_argument("--hf", metavar="DIR", type=Path, required=True, help="model in Hugging Face layout")
    to_megatron.set_defaults(run=f"{_HERE}:hf_to_megatron")
    to_hf = actions.add_parser("megatron-to-hf", help="a Hugging Face directory from per-rank files")
    to_hf.add_argument("--megatron", metavar="DIR", type=Path, required=True, help="directory made by this command")
    to_hf.add_argument("--max-shard-mib", metavar="N", type=int, default=4096, help="size of a file, MiB (4096)")
    to_hf.set_defaults(run=f"{_HERE}:megatron_to_hf")
    reshard = actions.add_parser("reshard", help="per-rank files for another layout")
    reshard.add_argument("--megatron", metavar="DIR", type=Path, required=True, help="directory made by this command")
    reshard.set_defaults(run=f"{_HERE}:reshard")
    for action in (to_megatron, reshard):
        action.add_argument("--tp", metavar="N", type=int, default=1, help="tensor parallel size (1)")
        action.add_argument("--pp", metavar="N", type=int, default=1, help="pipeline parallel size (1)")
    for action in (to_megatron, to_hf, reshard):
        action.add_argument("--out", metavar="DIR", type=Path, required=True, help="new directory, written at once")
        action.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="cast (default: keep)")
        action.add_argument("--verify", action="store_true", help="read the result back and compare, both ways")
        add_traceback(action)


def hf_to_megatron(args: argparse.Namespace) -> None:
    _to_megatron(args, args.hf)


def reshard(args: argparse.Namespace) -> None:
    _to_megatron(args, args.megatron)


def megatron_to_hf(args: argparse.Namespace) -> None:
    from rlhf_megatron.resharding import convert

    if args.max_shard_mib <= 0:
        raise ValueError(f"--max-shard-mib is {args.max_shard_mib}; it must be positive.")
    model = convert.open_model(args.megatron)
    with _Bar(len(convert.table_for(model.hf_config))) as bar:
        digests = convert.write_hf(model, args.out, args.dtype, args.max_shard_mib << 20, bar.step("write"))
        if args.verify:
            convert.verify(model, args.out, digests, bar.step("verify"))
    _report(args, len(digests))


def _to_megatron(args: argparse.Namespace, directory: Path) -> None:
    from rlhf_megatron.resharding import convert

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
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

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

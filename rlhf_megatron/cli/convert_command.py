"""`rlhf-megatron export`, `convert` and `fetch`: weights on disk, out of
checkpoints and between layouts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rlhf_megatron.config import hub_data
from rlhf_megatron.config.hub import download_from_hub, is_hub_name
from rlhf_megatron.config.hub_data import DatasetSplit
from rlhf_megatron.controller.recovery.checkpoint_export import find_exportable_weights
from rlhf_megatron.data.atomic_directory import refuse_nonempty_directory
from rlhf_megatron.jobs import smollm2
from rlhf_megatron.weights.conversion import conversion_dry_run, conversion_writer
from rlhf_megatron.weights.conversion.conversion_targets import (
    ConversionTarget,
    HFTarget,
    RankFilesTarget,
    TorchDistTarget,
)
from rlhf_megatron.weights.conversion.logit_comparison import verify_layer_outputs
from rlhf_megatron.weights.conversion.stored_model import (
    ConversionItem,
    StoredModel,
    open_stored_model,
)
from rlhf_megatron.weights.conversion.weight_comparison import verify_weight_bits
from rlhf_megatron.weights.hf_writer import MAX_SHARD_BYTES
from rlhf_megatron.weights.megatron_dir import make_disk_layout
from rlhf_megatron.weights.safe_pickle import METADATA

_LAYOUT_OPTIONS = ("tp", "pp", "vpp", "ep", "etp", "first_layers", "last_layers")
_OPTIONS_BY_TARGET = {
    "ranks": _LAYOUT_OPTIONS,
    "torch_dist": ("impl", "stacked", "max_shard_mib"),
    "hf": ("max_shard_mib",),
}
"""Options that only one target reads, by target; they are refused with any other one."""


def run_export_command(args: argparse.Namespace) -> None:
    """Write the weights of a run's checkpoint as a Hugging Face directory, or its adapter, and
    print what was written and how to use it. Raise ValueError where the run has no such weights,
    and before the checkpoint is read where --out is a directory with files.
    """
    refuse_nonempty_directory(args.out)
    role: Literal["actor", "critic"] = "critic" if args.critic else "actor"
    weights = find_exportable_weights(args.run_dir, args.step, args.best, args.model, role)
    if args.adapter:
        if args.dtype is not None:
            raise ValueError(
                f"--dtype {args.dtype} is not for --adapter, which is float32; leave it out."
            )
        num_tensors = weights.write_adapter_directory(args.out)
        print(
            f"{args.out}: adapter of {num_tensors} tensors of step {weights.step},"
            f" from {weights.checkpoint_path}."
        )
        print(
            f'next: peft.PeftModel.from_pretrained(model, "{args.out}"), or'
            " actor.lora.path of a run"
        )
        return
    with _ByteProgressBar(weights.model.make_conversion_items(args.dtype)) as bar:
        num_tensors = weights.write_hf_directory(
            args.out, args.dtype, bar.add_progress_task("write")
        )
    print(
        f"{args.out}: {num_tensors} tensors of step {weights.step}, from {weights.checkpoint_path}."
    )
    for note in weights.notes:
        print(f"note: {note}")
    if (weights.model.tokenizer_directory or weights.model.companions_directory) is None:
        print(
            "note: without a tokenizer, since the run's model directory is not here; --model DIR"
            " names another."
        )
    if weights.model.head == "vocabulary":
        print(
            f'next: transformers.AutoModelForCausalLM.from_pretrained("{args.out}"), or model.path'
            " of a run"
        )


def run_convert_command(args: argparse.Namespace) -> int:
    """Convert a model, or with --dry-run print the plan, or with --verify and --only-verify compare
    the result with the source. Return 1 where a dry run finds a problem, else 0. Raise ValueError
    for options that do not fit and for results that differ.
    """
    _refuse_ignored_options(args)
    problems: list[str] = []
    if args.dry_run and conversion_dry_run.has_only_weight_index(args.source):
        model, problems = conversion_dry_run.open_model_from_index(args.source)
    else:
        model = _open_source_model(args.source, _choose_config_dir(args.source, args.model))
    items = model.make_conversion_items(args.dtype, args.tp or 1)
    if args.only_verify:
        digests = None
    else:
        target = _make_target(args, model, items)
        if args.dry_run:
            lines = conversion_dry_run.describe_conversion(model, items, target, args.out, problems)
            print("\n".join(lines))
            return int(any(line.startswith("problem") for line in lines))
        with _ByteProgressBar(items) as bar:
            done = bar.add_progress_task("convert")
            digests = conversion_writer.convert_model(
                model, items, target, args.out, args.processes, done
            )
        print(f"{args.out}: {len(digests)} tensors written.")
    if args.verify is not None or args.only_verify:
        _verify_written_model(args, model, items, digests)
    return 0


def _verify_written_model(
    args: argparse.Namespace,
    model: StoredModel,
    items: Sequence[ConversionItem],
    digests: Mapping[str, str] | None,
) -> None:
    """Compare the written model with its source, by the outputs of its layers or by the bits of its
    tensors, and print the result. `digests` are those of the written tensors, None for a model that
    was there before. Raise ValueError where the two differ.
    """
    written = open_stored_model(
        args.out, is_strict=True, config_directory=_choose_config_dir(args.out, args.model)
    )
    if args.verify == "logits":
        print("\n".join(verify_layer_outputs(model, written, is_cast=args.dtype is not None)))
        print(
            f"{args.out}: every layer and every expert computes what those of {model.directory} do."
        )
        return
    with _ByteProgressBar(items) as bar:
        verify_weight_bits(
            model, items, written, digests, args.processes, bar.add_progress_task("verify")
        )
    print(
        f"{args.out}: {sum(len(item.rule.hf_tensors) for item in items)} tensors read back"
        " and compared."
    )


def _choose_config_dir(directory: Path, model_dir: Path | None) -> Path | None:
    """Return None if the directory has its own config.json, else `model_dir` (--model), from which
    the configuration is then read.
    """
    return None if (directory / "config.json").is_file() else model_dir


def _open_source_model(source: Path, config_dir: Path | None) -> StoredModel:
    """Return the stored model of a directory of weights, of a run, or of a checkpoint. Raise
    ValueError for a run that trained a model with a score head.
    """
    if (source / "checkpoints").is_dir() or (source / "actor" / METADATA).is_file():
        found = find_exportable_weights(source, model_directory=config_dir)
        if found.model.head != "vocabulary":
            raise ValueError(
                f"{source} trained a model that scores, which only Hugging Face layout holds;"
                " use export."
            )
        return replace(found.model, hf_config=dict(found.hf_config))
    return open_stored_model(source, config_directory=config_dir)


def _make_target(
    args: argparse.Namespace, model: StoredModel, items: Sequence[ConversionItem]
) -> ConversionTarget:
    """Return the conversion target that --to names, made from its options. Raise ValueError for a
    model of the backend fsdp with another target than hf.
    """
    if model.is_written_by_fsdp and args.to != "hf":
        raise ValueError(
            f"{args.source} was trained by the backend fsdp; convert it --to hf first."
        )
    max_bytes = args.max_shard_mib << 20 if args.max_shard_mib else MAX_SHARD_BYTES
    if args.to == "ranks":
        axes = {
            name: getattr(args, name) for name in _LAYOUT_OPTIONS if getattr(args, name) is not None
        }
        return RankFilesTarget(model, items, make_disk_layout(**axes))
    if args.to == "torch_dist":
        is_stacked = {"yes": True, "no": False}.get(args.stacked or "auto")
        return TorchDistTarget(
            model, items, args.impl or "transformer_engine", is_stacked, max_bytes
        )
    return HFTarget(model, items, max_bytes)


def _refuse_ignored_options(args: argparse.Namespace) -> None:
    """Raise ValueError for the first option that would have no effect, does not fit the target, or
    has an impossible value.
    """
    own = _OPTIONS_BY_TARGET[args.to]
    options = dict.fromkeys(option for options in _OPTIONS_BY_TARGET.values() for option in options)
    for name in options:
        value = getattr(args, name)
        option = f"--{name.replace('_', '-')}"
        if value is not None and args.only_verify:
            raise ValueError(
                f"{option} would be ignored by --only-verify, which finds the layout of"
                f" {args.out}; leave it out."
            )
        if value is not None and name not in own:
            raise ValueError(f"{option} would be ignored by --to {args.to}; leave it out.")
    if args.dtype == "fp8" and args.to != "hf":
        raise ValueError(f"--dtype fp8 needs --to hf, not {args.to}; use that, or another type.")
    if args.max_shard_mib is not None and args.max_shard_mib <= 0:
        raise ValueError(f"--max-shard-mib is {args.max_shard_mib}; it must be positive.")
    has_config = [(path / "config.json").is_file() for path in (args.source, args.out)]
    if args.model is not None and has_config[0] and (has_config[1] or not args.only_verify):
        raise ValueError(
            f"--model {args.model}: {args.source} has its own config.json; leave the option out."
        )
    if args.dry_run and (args.only_verify or args.verify):
        raise ValueError(
            "--dry-run writes nothing that could be verified; leave it out, or --verify"
            " and --only-verify."
        )


class _ByteProgressBar:
    """A progress bar on standard error: bytes, rate and the time that is left."""

    def __init__(self, items: Sequence[ConversionItem]) -> None:
        """Prepare the display; the total is the bytes of these items."""
        self._progress = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,  # Processes are forked off this one: no thread may draw meanwhile.
        )
        self._total_bytes = sum(item.num_bytes for item in items)

    def __enter__(self) -> _ByteProgressBar:
        """Start the display, and return this object."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the display."""
        self._progress.stop()

    def add_progress_task(self, task_name: str) -> conversion_writer.ReportBytes:
        """Show a bar for `task_name`. Return a function that adds a number of finished bytes to the
        bar.
        """
        task = self._progress.add_task(task_name, total=self._total_bytes)

        def advance_task(num_bytes: int) -> None:
            """Add finished bytes to the bar, and draw it."""
            self._progress.advance(task, num_bytes)
            self._progress.refresh()

        return advance_task


def run_fetch_command(args: argparse.Namespace) -> None:
    """Download a hub's model or data split, or SmolLM2, which is also converted; files that are
    there already are kept. Print the directory or files. Raise ValueError for a wrong name or
    option and for a failed download.
    """
    split = DatasetSplit.from_name(args.model)
    if split is not None:
        if args.dtype is not None or args.out is not None:
            raise ValueError(
                f"{split} goes to huggingface_hub's cache; leave --dtype and --out out."
            )
        hub_data.fetch_split(split)
        print("\n".join(hub_data.find_local_split_files(split)))
        return
    if args.model != "smollm2":
        if args.dtype is not None or not is_hub_name(args.model):
            raise ValueError(
                f"{args.model} must be smollm2, or owner/name of a model hub, whose weights stay"
                " as they are (without --dtype), or owner/name:split of a data set."
            )
        print(download_from_hub(args.model, args.out))
        return
    out = args.out or Path(".cache/smollm2-135m-instruct")
    is_new = smollm2.fetch_smollm2(out, args.dtype or "float32")
    print(f"{out}: {'fetched and converted' if is_new else 'is there already'}.")

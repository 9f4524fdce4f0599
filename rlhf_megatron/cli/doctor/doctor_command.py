"""`rlhf-megatron doctor`: which fast paths are live on this machine, which are not, why, and what
would bring them.

With a configuration it also tells what that run asks for and this machine has not.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlhf_megatron.cli.doctor.machine_facts import MachineFacts, gather_machine_facts
from rlhf_megatron.cli.doctor.machine_rows import (
    make_device_rows,
    make_engine_rows,
    make_host_rows,
    make_launcher_and_logger_rows,
)
from rlhf_megatron.cli.doctor.trainer_rows import (
    SETTING_BY_PATH,
    TE,
    DoctorRow,
    TrainerPathSettings,
    make_expert_rows,
    make_gradient_fusion_row,
    make_head_row,
    make_package_rows,
    make_trainer_rows,
)
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.expert_rules import read_num_experts
from rlhf_megatron.config.rules.part_rules import has_engine_setting
from rlhf_megatron.config.rules.run_rules import list_pool_layouts
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.ranks.models.fused_kernel_choice import DeviceType
from rlhf_megatron.ranks.parallel.optional_packages import INSTALL, find_package

EXTRAS_BY_REWARD = {
    "json_schema": ("jsonschema", "json-schema"),
    "math_verify": ("math_verify", "math"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym"),
}
"""Reward -> (module that it needs, extra that installs the module)."""

AREA_TITLES = {
    "device": "Devices",
    "packages": "Packages",
    "trainer": "Trainer",
    "engines": "Engines",
    "around": "Launchers and loggers",
    "host": "Machine",
    "cluster": "Nodes of this job",
}


def run_doctor_command(args: argparse.Namespace) -> int:
    """Print which paths are live on this machine, or on all nodes with --cluster. Return 1 if the
    run's settings ask for something that is missing here, or a node is broken, else 0. Raise
    ConfigError for a wrong configuration.
    """
    config = (
        load_run_config(args.config, args.overrides, with_files=False).config
        if args.config
        else None
    )
    if args.cluster:
        from rlhf_megatron.cli.doctor.cluster_doctor import examine_cluster  # imports torch

        return examine_cluster(args, config, lambda rows: _print_report(args, rows, []))
    facts = gather_machine_facts()
    wanted = (
        TrainerPathSettings(resolve_device_type("auto", facts))
        if config is None
        else limit_to_this_machine(read_path_settings(config, facts), facts)
    )
    rows = [
        *make_device_rows(facts),
        *make_package_rows(facts, wanted.device),
        *make_trainer_rows(facts, wanted),
        *make_engine_rows(config.rollout.sglang.python if config else None),
        *make_launcher_and_logger_rows(facts),
        *make_host_rows(facts.host),
    ]
    problems = [] if config is None else find_unmet_settings(config, facts)
    _print_report(args, rows, problems)
    return 1 if problems else 0


def _print_report(
    args: argparse.Namespace, rows: Sequence[DoctorRow], problems: Sequence[UnmetSetting]
) -> None:
    """Print the rows and problems as JSON or as a table; a reader that closes the pipe early is no
    error.
    """
    try:
        if args.is_json:
            _print_json(args, rows, problems)
        else:
            _print_table(args, rows, problems)
    except BrokenPipeError:  # `doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(
    args: argparse.Namespace, rows: Sequence[DoctorRow], problems: Sequence[UnmetSetting]
) -> None:
    """Print the rows and problems as one JSON object."""
    found = {
        "run": str(args.config) if args.config else None,
        "overrides": list(args.overrides),
        "rows": [dataclasses.asdict(row) for row in rows],
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }
    print(json.dumps(found, indent=1), flush=True)


def _print_table(
    args: argparse.Namespace, rows: Sequence[DoctorRow], problems: Sequence[UnmetSetting]
) -> None:
    """Print the rows under the titles of their areas, with reasons and fixes, and the unmet
    settings of the run.
    """
    shown = list(rows) if args.shows_all else fold_gpu_rows(rows)
    width = max(len(row.path) for row in shown)
    for area, area_rows in itertools.groupby(shown, key=lambda row: row.area):
        print(AREA_TITLES[area] if area == shown[0].area else f"\n{AREA_TITLES[area]}")
        for row in area_rows:
            print(f"  {row.state:8}  {row.path:{width}}  {row.taken}".rstrip())
            why_word = "note" if row.state == "live" else "why"
            for word, text in ((why_word, row.why), ("fix", row.fix)):
                if text:
                    print(f"{'':{width + 14}}{word}: {text}")
    if args.config is not None and not args.cluster:
        print(f"\n{args.config}: {len(problems)} setting(s) ask for what is not here")
        for problem in problems:
            print(f"  {problem}")
    sys.stdout.flush()


def fold_gpu_rows(rows: Sequence[DoctorRow]) -> list[DoctorRow]:
    """Return the rows, of each area those that are for GPUs only as one row that names them."""
    shown: list[DoctorRow] = []
    for area, area_rows in itertools.groupby(rows, key=lambda row: row.area):
        folded: list[str] = []
        for row in area_rows:
            if row.is_for_gpus:
                folded.append(row.path)
            else:
                shown.append(row)
        if folded:
            why = "this machine has no GPU; --all shows each with the reason and the fix"
            shown.append(DoctorRow(area, "for GPUs only", "not live", ", ".join(folded), why))
    return shown


@dataclass(frozen=True)
class UnmetSetting:
    """A setting that asks for something that this machine lacks."""

    setting: str
    value: str
    why: str
    fix: str

    def __str__(self) -> str:
        """Return the setting, its value, the reason and the fix as one sentence."""
        return f"{self.setting} ({self.value}): {self.why}; {self.fix}."


def resolve_device_type(
    device_setting: Literal["auto", "cpu", "cuda"], facts: MachineFacts
) -> DeviceType:
    """Return the device type that a run asks for, whether this machine has such a device or not;
    auto means cuda where it is usable.
    """
    return (
        "cuda"
        if device_setting == "cuda" or (device_setting == "auto" and facts.has_cuda)
        else "cpu"
    )


def limit_to_this_machine(
    path_settings: TrainerPathSettings, facts: MachineFacts
) -> TrainerPathSettings:
    """Return the settings as they would run here: on the CPU if a GPU is wanted and
    none is usable.
    """
    return path_settings if facts.has_cuda else replace(path_settings, device="cpu")


def read_path_settings(config: RunConfig, facts: MachineFacts) -> TrainerPathSettings:
    """Return the settings of the actor's models, which most of a run's work depends on, with the
    model's shape from its config.json.
    """
    megatron = config.actor.megatron
    head_dim, has_sinks, has_experts = _read_model_shape(config.model.path)
    # as ranks.models.layer_specs has it
    is_local = has_experts and megatron.transformer_impl == "auto"
    return TrainerPathSettings(
        device=resolve_device_type(config.trainer.device, facts),
        dtype=config.model.dtype,
        head_dim=head_dim,
        has_sinks=has_sinks,
        transformer_impl="local" if is_local else megatron.transformer_impl,
        gradient_fusion=megatron.gradient_accumulation_fusion,
        kernels_config=config.actor.kernels,
        loss_mode=config.actor.policy_loss.loss_mode,
        is_deterministic=config.trainer.deterministic,
        expert_config=megatron if has_experts else None,
    )


def find_unmet_settings(config: RunConfig, facts: MachineFacts) -> list[UnmetSetting]:
    """Return the settings of the run that ask for something that this machine lacks, in the order
    of the schema's sections.
    """
    return [
        *_find_unmet_layer_settings(config, facts),
        *_find_unmet_kernel_settings(config, facts),
        *_find_unmet_engine_settings(config),
        *_find_unmet_reward_settings(config),
        *_find_unmet_device_settings(config, facts),
        *_find_unmet_logger_settings(config, facts),
    ]


def _read_model_shape(model_path: str) -> tuple[int, bool, bool]:
    """Return (width of a head, whether attention has sinks, whether there are experts) from a
    model's config.json; the shape of most models where the file cannot be read, for instance before
    it is fetched.
    """
    try:
        model = json.loads((Path(model_path) / "config.json").read_text())
        head_dim = int(
            model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
        )
        return head_dim, model.get("model_type") == "gpt_oss", read_num_experts(model) > 0
    except (OSError, ValueError, KeyError, TypeError):
        return TrainerPathSettings(device="cpu").head_dim, False, False


def _find_unmet_layer_settings(config: RunConfig, facts: MachineFacts) -> Iterator[UnmetSetting]:
    """Yield the settings of each pool's layers that this machine cannot run: Transformer Engine,
    gradient fusion, and kernels for experts.
    """
    wanted = read_path_settings(config, facts)
    for section, megatron, _ in list_pool_layouts(config):
        impl = megatron.transformer_impl
        package = facts.packages[TE]
        if impl == TE and wanted.device == "cuda" and not package.is_usable:
            yield UnmetSetting(
                f"{section}.transformer_impl", impl, package.why_not, f"{INSTALL[TE]}, or use local"
            )
        fusion = megatron.gradient_accumulation_fusion
        row = make_gradient_fusion_row(
            facts, replace(wanted, transformer_impl=impl, gradient_fusion=fusion)
        )
        if row.state == "broken":
            yield UnmetSetting(f"{section}.gradient_accumulation_fusion", "true", row.why, row.fix)
        for row in make_expert_rows(
            facts,
            replace(wanted, transformer_impl=impl, expert_config=wanted.expert_config and megatron),
        ):
            if row.state == "broken":
                key, value = SETTING_BY_PATH[row.path]
                yield UnmetSetting(
                    f"{section}.{key}", value, row.why, f"{row.fix}, or leave it out"
                )


def _find_unmet_kernel_settings(config: RunConfig, facts: MachineFacts) -> Iterator[UnmetSetting]:
    """Yield actor.kernels.backend if that backend cannot run here."""
    row = make_head_row(facts, read_path_settings(config, facts))
    if row.state == "broken":
        yield UnmetSetting("actor.kernels.backend", config.actor.kernels.backend, row.why, row.fix)


def _find_unmet_engine_settings(config: RunConfig) -> Iterator[UnmetSetting]:
    """Yield rollout.engine and rollout.router if their packages are missing here or unsupported.
    Servers that a run attaches to are checked when the run starts.
    """
    from rlhf_megatron.rollout.engine_kinds import get_balancer_kind
    from rlhf_megatron.rollout.sglang.sglang_environment import check_sglang_environment

    rollout = config.rollout
    if has_engine_setting(config.rollout, "rollout.sglang") and not rollout.endpoints:
        try:
            check_sglang_environment(rollout.sglang.python, {}, rollout.sglang.env)
        except ValueError as error:
            yield UnmetSetting("rollout.engine", "sglang", *_split_reason_and_fix(error))
    try:
        get_balancer_kind(rollout.router).check_rollout(rollout)
    except ValueError as error:
        yield UnmetSetting("rollout.router", rollout.router, *_split_reason_and_fix(error))


def _find_unmet_reward_settings(config: RunConfig) -> Iterator[UnmetSetting]:
    """Yield each setting that names a reward whose package is not usable here."""
    named = [("reward.name", config.reward.name)]
    named += [
        (f"reward.by_source.{source}.name", term.name)
        for source, term in config.reward.by_source.items()
    ]
    named += [
        (f"reward.terms[{number}].name", term.name)
        for number, term in enumerate(config.reward.terms)
    ]
    for setting, name in named:
        if name in EXTRAS_BY_REWARD:
            module, extra = EXTRAS_BY_REWARD[name]
            package = find_package(module)
            if not package.is_usable:
                yield UnmetSetting(setting, name, package.why_not, format_install_command(extra))


def _find_unmet_device_settings(config: RunConfig, facts: MachineFacts) -> Iterator[UnmetSetting]:
    """Yield trainer.device or trainer.n_gpus_per_node if this machine has no usable or too few
    GPUs.
    """
    trainer = config.trainer
    num_devices = len(facts.torch.device_names) if facts.torch else 0
    if trainer.device == "cuda" and not facts.has_cuda:
        why = facts.torch.why_no_cuda if facts.torch else facts.torch_error
        yield UnmetSetting(
            "trainer.device", "cuda", why, "see the table's accelerator, or use cpu or auto"
        )
    elif (
        resolve_device_type(trainer.device, facts) == "cuda"
        and trainer.n_gpus_per_node > num_devices
    ):
        why = f"torch sees {num_devices} devices on this machine"
        fix = f"use {num_devices}, or look at CUDA_VISIBLE_DEVICES"
        yield UnmetSetting("trainer.n_gpus_per_node", str(trainer.n_gpus_per_node), why, fix)


def _find_unmet_logger_settings(config: RunConfig, facts: MachineFacts) -> Iterator[UnmetSetting]:
    """Yield trainer.logger for each logger whose package is not usable here."""
    for name, install in (
        ("tensorboard", "pip install tensorboard"),
        ("wandb", format_install_command("wandb")),
    ):
        package = facts.packages[name]
        if name in config.trainer.logger and not package.is_usable:
            yield UnmetSetting(
                "trainer.logger",
                name,
                package.why_not,
                f"{install}, or take it out of trainer.logger",
            )


def _split_reason_and_fix(error: ValueError) -> tuple[str, str]:
    """Return the reason and the fix that an error's message joins by "; "."""
    why, _, fix = str(error).partition("; ")
    return why, fix.rstrip(".")

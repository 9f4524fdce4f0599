"""`rlhf-megatron doctor`: which fast paths are live on this machine, which are not, why, and what would bring them.

With a configuration it also tells what that run asks for and this machine has not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlhf_megatron.cli.doctor.facts import Facts, gather
from rlhf_megatron.cli.doctor.host import around_rows, device_rows, engine_rows, host_rows
from rlhf_megatron.cli.doctor.rows import (
    SETTINGS,
    TE,
    Row,
    Wanted,
    expert_rows,
    gradient_row,
    head_row,
    package_rows,
    trainer_rows,
)
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.experts import num_experts
from rlhf_megatron.config.rules.parts import reads
from rlhf_megatron.config.rules.run import megatron_sections
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.models.fused import DeviceType
from rlhf_megatron.parallel.packages import INSTALL, find_package

TITLES = {
    "device": "Devices",
    "packages": "Packages",
    "trainer": "Trainer",
    "engines": "Engines",
    "around": "Launchers and loggers",
    "host": "Machine",
    "cluster": "Nodes of this job",
}


def doctor(args: argparse.Namespace) -> int:
    """Return 0, or 1 when the run asks for what is not there. Raises ConfigError for a file that is wrong anywhere."""
    config = load_run_config(args.config, args.overrides, with_files=False).config if args.config else None
    if args.cluster:
        from rlhf_megatron.cli.doctor.cluster import examine  # imports torch

        return examine(args, config, lambda rows: _show(args, rows, []))
    facts = gather()
    wanted = Wanted(device_of("auto", facts)) if config is None else of_this_machine(wanted_by(config, facts), facts)
    rows = [
        *device_rows(facts),
        *package_rows(facts, wanted.device),
        *trainer_rows(facts, wanted),
        *engine_rows(config.rollout.sglang.python if config else None),
        *around_rows(facts),
        *host_rows(facts.host),
    ]
    problems = [] if config is None else run_problems(config, facts)
    _show(args, rows, problems)
    return 1 if problems else 0


def _show(args: argparse.Namespace, rows: Sequence[Row], problems: Sequence[Problem]) -> None:
    try:
        if args.is_json:
            _print_json(args, rows, problems)
        else:
            _print_table(args, rows, problems)
    except BrokenPipeError:  # `doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(args: argparse.Namespace, rows: Sequence[Row], problems: Sequence[Problem]) -> None:
    found = {
        "run": str(args.config) if args.config else None,
        "overrides": list(args.overrides),
        "rows": [dataclasses.asdict(row) for row in rows],
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }
    print(json.dumps(found, indent=1), flush=True)


def _print_table(args: argparse.Namespace, rows: Sequence[Row], problems: Sequence[Problem]) -> None:
    width = max(len(row.path) for row in rows)
    area = ""
    for row in rows:
        if row.area != area:
            print(f"{TITLES[row.area]}" if not area else f"\n{TITLES[row.area]}")
            area = row.area
        print(f"  {row.state:8}  {row.path:{width}}  {row.taken}".rstrip())
        for word, text in (("note" if row.state == "live" else "why", row.why), ("fix", row.fix)):
            if text:
                print(f"{'':{width + 14}}{word}: {text}")
    if args.config is not None and not args.cluster:
        print(f"\n{args.config}: {len(problems)} setting(s) ask for what is not here")
        for problem in problems:
            print(f"  {problem}")
    sys.stdout.flush()


@dataclass(frozen=True)
class Problem:
    """A setting that asks for something that this machine lacks."""

    setting: str
    value: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.setting} ({self.value}): {self.why}; {self.fix}."


def device_of(setting: Literal["auto", "cpu", "cuda"], facts: Facts) -> DeviceType:
    """Return the device that a run asks for, whether it is there or not."""
    return "cuda" if setting == "cuda" or (setting == "auto" and facts.has_cuda) else "cpu"


def of_this_machine(wanted: Wanted, facts: Facts) -> Wanted:
    """Return what would run here: on the CPU if a GPU is wanted and none is there."""
    return wanted if facts.has_cuda else replace(wanted, device="cpu")


def wanted_by(config: RunConfig, facts: Facts) -> Wanted:
    """Return the settings of the actor's models, which are those that a run has most of."""
    megatron = config.actor.megatron
    head_dim, has_sinks, has_experts = _shape_of(config.model.path)
    is_local = has_experts and megatron.transformer_impl == "auto"  # as models.backend has it
    return Wanted(
        device=device_of(config.trainer.device, facts),
        dtype=config.model.dtype,
        head_dim=head_dim,
        has_sinks=has_sinks,
        transformer_impl="local" if is_local else megatron.transformer_impl,
        gradient_fusion=megatron.gradient_accumulation_fusion,
        kernels=config.actor.kernels,
        loss_mode=config.actor.policy_loss.loss_mode,
        is_deterministic=config.trainer.deterministic,
        experts=megatron if has_experts else None,
    )


def run_problems(config: RunConfig, facts: Facts) -> list[Problem]:
    """Return what the run asks for and this machine lacks, in the order of the schema's sections."""
    return [
        *_of_layers(config, facts),
        *_of_kernels(config, facts),
        *_of_engines(config),
        *_of_rewards(config),
        *_of_devices(config, facts),
        *_of_loggers(config, facts),
    ]


def _shape_of(path: str) -> tuple[int, bool, bool]:
    """The width of heads, whether they have sinks, and whether there are experts, out of config.json; what most models
    have where that cannot be read, as before it was fetched."""
    try:
        model = json.loads((Path(path) / "config.json").read_text())
        head_dim = int(model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"])
        return head_dim, model.get("model_type") == "gpt_oss", num_experts(model) > 0
    except (OSError, ValueError, KeyError, TypeError):
        return Wanted(device="cpu").head_dim, False, False


def _of_layers(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    wanted = wanted_by(config, facts)
    for section, megatron, _ in megatron_sections(config):
        impl, package = megatron.transformer_impl, facts.packages[TE]
        if impl == TE and wanted.device == "cuda" and not package.is_usable:
            yield Problem(f"{section}.transformer_impl", impl, package.why_not, f"{INSTALL[TE]}, or use local")
        fusion = megatron.gradient_accumulation_fusion
        row = gradient_row(facts, replace(wanted, transformer_impl=impl, gradient_fusion=fusion))
        if row.state == "broken":
            yield Problem(f"{section}.gradient_accumulation_fusion", "true", row.why, row.fix)
        for row in expert_rows(facts, replace(wanted, transformer_impl=impl, experts=wanted.experts and megatron)):
            if row.state == "broken":
                key, value = SETTINGS[row.path]
                yield Problem(f"{section}.{key}", value, row.why, f"{row.fix}, or leave it out")


def _of_kernels(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    row = head_row(facts, wanted_by(config, facts))
    if row.state == "broken":
        yield Problem("actor.kernels.backend", config.actor.kernels.backend, row.why, row.fix)


def _of_engines(config: RunConfig) -> Iterator[Problem]:
    """Check the engines that the run would start. A server that it attaches to is checked when the run starts."""
    from rlhf_megatron.rollout.kinds import balancer_kind
    from rlhf_megatron.rollout.sglang.environment import check_sglang

    rollout = config.rollout
    if reads(config.rollout, "rollout.sglang") and not rollout.endpoints:
        try:
            check_sglang(rollout.sglang.python, {}, rollout.sglang.env)
        except ValueError as error:
            yield Problem("rollout.engine", "sglang", *_why_and_fix(error))
    try:
        balancer_kind(rollout.router).check(rollout)
    except ValueError as error:
        yield Problem("rollout.router", rollout.router, *_why_and_fix(error))


def _of_rewards(config: RunConfig) -> Iterator[Problem]:
    needs = {"math_verify": ("math_verify", "math"), "reasoning_gym": ("reasoning_gym", "reasoning-gym")}
    named = [("reward.name", config.reward.name)]
    named += [(f"reward.by_source.{source}.name", term.name) for source, term in config.reward.by_source.items()]
    named += [(f"reward.terms[{number}].name", term.name) for number, term in enumerate(config.reward.terms)]
    for setting, name in named:
        if name in needs:
            module, extra = needs[name]
            package = find_package(module)
            if not package.is_usable:
                yield Problem(setting, name, package.why_not, f"pip install 'rlhf-megatron[{extra}]'")


def _of_devices(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    trainer = config.trainer
    num_devices = len(facts.torch.devices) if facts.torch else 0
    if trainer.device == "cuda" and not facts.has_cuda:
        why = facts.torch.why_no_cuda if facts.torch else facts.torch_error
        yield Problem("trainer.device", "cuda", why, "see the table's accelerator, or use cpu or auto")
    elif device_of(trainer.device, facts) == "cuda" and trainer.n_gpus_per_node > num_devices:
        why = f"torch sees {num_devices} devices on this machine"
        fix = f"use {num_devices}, or look at CUDA_VISIBLE_DEVICES"
        yield Problem("trainer.n_gpus_per_node", str(trainer.n_gpus_per_node), why, fix)


def _of_loggers(config: RunConfig, facts: Facts) -> Iterator[Problem]:
    for name, install in (("tensorboard", "pip install tensorboard"), ("wandb", "pip install 'rlhf-megatron[wandb]'")):
        package = facts.packages[name]
        if name in config.trainer.logger and not package.is_usable:
            yield Problem("trainer.logger", name, package.why_not, f"{install}, or take it out of trainer.logger")


def _why_and_fix(error: ValueError) -> tuple[str, str]:
    why, _, fix = str(error).partition("; ")
    return why, fix.rstrip(".")

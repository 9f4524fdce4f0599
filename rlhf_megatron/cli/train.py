"""`rlhf-megatron train`: checks everything, then becomes the launcher, a host or the controller, as the case may be."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron import faults
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.keys import leaf_keys, value_of
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.validate import check_world_size
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import redacted, revealed
from rlhf_megatron.config.show import as_text, as_yaml
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.stop import STOPPED_EXIT_CODE, RunStopped, StopRequest

if TYPE_CHECKING:
    from rlhf_megatron.observe.run_dir import OpenRunDir, RunLock
    from rlhf_megatron.runtime.worker_group import WorkerGroup

CONTROLLER_ENV = "RLHF_MEGATRON_RUN_DIR"  # set in the controller's environment: where the run goes
LOCK_ENV = "RLHF_MEGATRON_LOCK_FD"  # set in the controller's environment: the open run.lock that it inherits
CHECKED_ENV = "RLHF_MEGATRON_CHECKED"  # set in the environment of the ranks: the launcher has checked everything


def train(args: argparse.Namespace) -> int:
    """The exit code of the process. Under torchrun every rank comes through here."""
    if args.fresh:
        args.overrides = [*args.overrides, "trainer.resume_mode=disable"]
    config = revealed(load_run_config(args.config, args.overrides).config, os.environ)
    if config.trainer.deterministic:
        from rlhf_megatron.parallel.prepare import ENVIRONMENT

        os.environ |= {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    if isinstance(args.replay, int) != (args.replay_from is not None):
        problem = "--replay STEP and --replay-from RUN_DIR (a run made with --record) need each other"
        raise ConfigError([f"{problem}; --replay CAPSULE_DIR stands alone."])
    if CONTROLLER_ENV in os.environ:
        _install_faults("controller")
        return _control(args, config, Path(os.environ.pop(CONTROLLER_ENV)))
    if config.trainer.runtime == "inline":
        _install_faults("controller")
        _check(args, config)
        if _is_complete(args, config):
            return 0
        return _inline(args, config, _open_run_dir(args, config, as_yaml(config)))
    if config.trainer.runtime == "ray":
        return _ray(args, config)
    from rlhf_megatron.runtime.torchrun import launcher as torchrun

    if not torchrun.is_under_torchrun():
        if config.trainer.nnodes > 1:
            raise ValueError(
                f"trainer.nnodes is {config.trainer.nnodes}: start this run with launch/torchrun.sh on every node."
            )
        _check(args, config)
        if _is_complete(args, config):
            return 0
        os.environ[CHECKED_ENV] = "1"
        stop_s = config.trainer.stop_grace_s
        torchrun.launch_single_node(_arguments(args), config.trainer.n_gpus_per_node, stop_s=stop_s)
    _install_faults(f"rank{os.environ['RANK']}")
    return _host(args, config, as_yaml(config))


def _install_faults(who: str) -> None:
    """Faults that a test has planned for this process (`faults`)."""
    if faults.PLAN_ENV in os.environ:
        faults.install(os.environ[faults.PLAN_ENV], who, Path(os.environ[faults.DIRECTORY_ENV]))


def _arguments(args: argparse.Namespace) -> Sequence[str]:
    """The command line that says the same again."""
    words = ["train", str(args.config), *args.overrides]
    words += ["--record"] if args.record else []
    words += ["--replay", str(args.replay)] if args.replay is not None else []
    words += ["--replay-from", str(args.replay_from)] if args.replay_from else []
    return words


def _check(args: argparse.Namespace, config: RunConfig) -> None:
    """What the configuration names must exist and fit, before any process is started."""
    from rlhf_megatron.proof.preflight import check_run

    if isinstance(args.replay, Path):
        check_run(config, capsule=args.replay)
    else:
        check_run(config, None if args.replay_from is None else Path(args.replay_from), args.replay)


def _pools(config: RunConfig):  # type: ignore[no-untyped-def]
    from rlhf_megatron.runtime.pool import pools_of

    return pools_of(config)


def _run_name(args: argparse.Namespace, config: RunConfig) -> str:
    """A replay goes beside the run that it reads, which mostly has the same configuration."""
    return config.trainer.experiment_name + ("-replay" if args.replay is not None else "")


def _is_complete(args: argparse.Namespace, config: RunConfig) -> bool:
    """True, and said, where the run directory holds this very run with all of its steps."""
    from rlhf_megatron.recovery.resume import completion

    said = completion(_run_dir(args, config), config) if args.replay is None else None
    if said is not None:
        print(said)
    return said is not None


def _run_dir(args: argparse.Namespace, config: RunConfig) -> Path:
    return Path(config.trainer.default_local_dir) / _run_name(args, config)


def _open_run_dir(args: argparse.Namespace, config: RunConfig, resolved: str) -> OpenRunDir:
    """Locked for this process and those that inherit its lock."""
    from rlhf_megatron.observe.run_dir import open_run_dir, write_text
    from rlhf_megatron.recovery.resume import goes_on

    def is_kept(path: Path) -> bool:
        return args.replay is None and goes_on(path, config)

    opened = open_run_dir(config.trainer.default_local_dir, _run_name(args, config), is_kept)
    if opened.moved is not None:
        print(f"{opened.path} held a former run; it is {opened.moved} now")
    if not is_kept(opened.path):
        write_text(opened.path / "config.yaml", resolved)
    return opened


def _run(
    args: argparse.Namespace,
    config: RunConfig,
    run_dir: Path,
    lock: RunLock,
    stop: StopRequest,
    group,  # type: ignore[no-untyped-def]
    place=None,  # type: ignore[no-untyped-def]
) -> int:
    """`place`: of the engines; None: beside this process."""
    from rlhf_megatron.proof.replay import replay
    from rlhf_megatron.proof.replay_capsule import NOT_REPRODUCED_EXIT_CODE, replay_capsule
    from rlhf_megatron.recovery.skips import NONFINITE_EXIT_CODE, NonFiniteNumbers
    from rlhf_megatron.rollout.engine import EngineError
    from rlhf_megatron.rollout.fleet.process import here
    from rlhf_megatron.scheduler import run

    try:
        if isinstance(args.replay, Path):
            outcome = replay_capsule(config, group, run_dir, args.replay)
            print(*outcome.lines, sep="\n")
            return 0 if outcome.is_reproduced else NOT_REPRODUCED_EXIT_CODE
        if args.replay is not None:
            replay(config, group, run_dir, Path(args.replay_from), args.replay, stop)
        elif not _is_complete(args, config):  # ranks that torchrun has started come here without having asked
            run.train(config, group, run_dir, args.record or config.trainer.record, lock.since, stop, place or here)
    except EngineError as error:
        raise ValueError(str(error)) from error
    except NonFiniteNumbers as error:
        print(f"error: {error}", file=sys.stderr)
        return NONFINITE_EXIT_CODE
    except RunStopped as error:
        print(f"stopped: {error}", file=sys.stderr)
        return STOPPED_EXIT_CODE if config.trainer.save_freq else 128 + signal.SIGTERM
    return 0


def _inline(args: argparse.Namespace, config: RunConfig, opened: OpenRunDir) -> int:
    from rlhf_megatron.runtime.inline import InlineGroup
    from rlhf_megatron.runtime.stopping import ControllerStop

    def connect() -> WorkerGroup:
        return InlineGroup(partial(_build_roles, config), backend=_backend(config))

    stop = StopRequest()
    with ControllerStop(stop, config.trainer.stop_grace_s).installed():
        return _run(args, config, opened.path, opened.lock, stop, connect)


def _ray(args: argparse.Namespace, config: RunConfig) -> int:
    from rlhf_megatron.runtime.ray.driver import RayJob, run_driver
    from rlhf_megatron.runtime.ray.environment import address_of, check_installed

    _install_faults("controller")
    check_installed()
    address_of(config, os.environ)  # a wrong one is told before a run directory is made
    _check(args, config)
    if _is_complete(args, config):
        return 0
    opened = _open_run_dir(args, config, as_yaml(config))
    stop = StopRequest()

    def run(group, place) -> int:  # type: ignore[no-untyped-def]
        return _run(args, config, opened.path, opened.lock, stop, lambda: group, place)

    job = RayJob(
        config,
        _pools(config),
        partial(_build_roles, redacted(config)),  # ranks need no secrets
        opened.path / "logs",
        _deadlines(config),
        has_engines=args.replay is None,
    )
    return run_driver(run, job, stop)


def _deadlines(config: RunConfig):  # type: ignore[no-untyped-def]
    from rlhf_megatron.runtime.controller import Deadlines

    trainer = config.trainer
    return Deadlines(
        startup_s=config.rollout.startup_timeout_s,
        call_s=max(trainer.stage_timeout_s, *trainer.stage_timeouts_s.values(), 0.0),
        stop_s=trainer.stop_grace_s,
    )


def _host(args: argparse.Namespace, config: RunConfig, resolved: str) -> int:
    from rlhf_megatron.runtime.torchrun.launcher import run_host

    problems = check_world_size(config, int(os.environ["WORLD_SIZE"]))
    if problems:
        raise ConfigError(problems)
    inherited: list[int] = []
    if os.environ["RANK"] == "0":
        if CHECKED_ENV not in os.environ:
            _check(args, config)
        opened = _open_run_dir(args, config, resolved)
        inherited = [opened.lock.descriptor]
        os.environ |= {CONTROLLER_ENV: str(opened.path), LOCK_ENV: str(opened.lock.descriptor)}
    return run_host(
        partial(_build_roles, config),
        _pools(config),
        ["-m", "rlhf_megatron", *_arguments(args)],
        _run_dir(args, config) / "logs",
        _deadlines(config),
        backend=_backend(config),
        settings=[f"{key}: {as_text(value_of(redacted(config), key))}" for key in leaf_keys(RunConfig)],
        controller_descriptors=inherited,
    )


def _backend(config: RunConfig) -> str:
    from rlhf_megatron.parallel.device import has_accelerator

    return "cpu:gloo,cuda:nccl" if config.trainer.device != "cpu" and has_accelerator() else "gloo"


def _build_roles(config: RunConfig, pool):  # type: ignore[no-untyped-def]
    """Megatron is imported after the host has registered, so that what fails there is told with coordinates."""
    from rlhf_megatron.parallel.prepare import make_deterministic
    from rlhf_megatron.runtime.roles import role_builder

    load_plugins(config.plugins)  # an actor of Ray has not read the file
    if config.trainer.deterministic:
        make_deterministic()
    return role_builder(config)(pool)


def _control(args: argparse.Namespace, config: RunConfig, run_dir: Path) -> int:
    from rlhf_megatron.observe.run_dir import RunLock
    from rlhf_megatron.runtime.torchrun.launcher import run_controller

    lock = RunLock.inherited(int(os.environ.pop(LOCK_ENV)))

    stop = StopRequest()

    def run(group):  # type: ignore[no-untyped-def]
        return _run(args, config, run_dir, lock, stop, lambda: group)

    return run_controller(run, _pools(config), _deadlines(config), stop)

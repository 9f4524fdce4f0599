"""A process of a training job: it checks everything, then becomes the launcher, a host or
the controller.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlhf_megatron import faults
from rlhf_megatron.config.cuda_environment import hide_gpus, set_missing_variables
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.former_defaults import FormerDefault, keep_former_defaults
from rlhf_megatron.config.hub import fetch_models
from rlhf_megatron.config.hub_data import fetch_data_splits
from rlhf_megatron.config.key_paths import get_config_value, list_leaf_keys
from rlhf_megatron.config.load import LOCK_FILE, load_run_config, read_run_config
from rlhf_megatron.config.resume_changes import flatten_config_yaml
from rlhf_megatron.config.rules import PreflightCheck
from rlhf_megatron.config.rules.run_rules import has_served_model, list_pool_layouts
from rlhf_megatron.config.rules.validate import check_world_size
from rlhf_megatron.config.schema import RunConfig, TrainerConfig
from rlhf_megatron.config.secrets import redact_secrets, reveal_secrets
from rlhf_megatron.config.show import format_yaml_value, render_config_yaml
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.runtime.process_control import KEEPER_ENV
from rlhf_megatron.stop import STOPPED_EXIT_CODE, RunStopped, StopRequest

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.run_dir import LockedRunDir, RunLock
    from rlhf_megatron.rewards.service.run_placement import RunPlacement
    from rlhf_megatron.runtime.host_control import RunDeadlines
    from rlhf_megatron.runtime.rank_pools import PoolMember, PoolSpec
    from rlhf_megatron.runtime.routed_worker_group import RoutedWorkerGroup
    from rlhf_megatron.runtime.torchrun.machine_servers import KeeperPoolSpec
    from rlhf_megatron.runtime.worker_group import WorkerGroup

CONTROLLER_ENV = "RLHF_MEGATRON_RUN_DIR"  # set in the controller's environment: where the run goes
# set in the controller's environment: the open files of the lock that it inherits
LOCK_ENV = "RLHF_MEGATRON_LOCK_FD"
_OF_RANKS = (
    "runtime.rank_roles",
    "runtime.torchrun.agent",
    "runtime.torchrun.torchrun_launcher",
    "controller.scheduler.training_run",
    "controller.supervised.supervised_run",
)
# set in the environment of the ranks: the launcher has checked everything
CHECKED_ENV = "RLHF_MEGATRON_CHECKED"


@dataclass(frozen=True)
class TrainJob:
    """A job as the command `rlhf-megatron train`, `sft` or `reward-model` describes it. The
    processes that the job starts make the same job from `build_arguments`.
    """

    path: Path  # of the configuration
    overrides: tuple[str, ...] = ()  # "key=value"
    record: bool = False  # write every step's batches
    # last recorded step to train on, or the directory of a capsule
    replay: int | Path | None = None
    replay_from: Path | None = None  # run directory that holds the recorded steps
    command: Literal["train", "sft", "reward-model"] = "train"
    # since the run was locked (controller/recovery/config_lock_file.py)
    allow_changes: bool = False

    @cached_property
    def config(self) -> RunConfig:
        """Return the run's configuration, secrets included. Raise ConfigError with every problem.
        Unless the launcher has checked the run already, first fetch files from the hub; rank 0, or
        the only process, then also checks the files and the machine.
        """
        checks = [
            PreflightCheck(("job",), lambda config: self._check_job_matches_command(config.job))
        ]
        is_checked = bool({CONTROLLER_ENV, CHECKED_ENV, KEEPER_ENV} & os.environ.keys())
        if not is_checked:
            self._fetch_hub_files()
        is_first = not is_checked and os.environ.get("RANK", "0") == "0"
        if is_first:
            from rlhf_megatron.controller.preflight import list_preflight_checks

            capsule = self.replay if isinstance(self.replay, Path) else None
            last_step = self.replay if isinstance(self.replay, int) else None
            checks += list_preflight_checks(self.replay_from, last_step, capsule)
        former_defaults: list[FormerDefault] = []

        def keep_resumed_settings(loaded: LoadedConfig) -> LoadedConfig:
            """Return the configuration with the former defaults that the resumed run keeps."""
            settings = self._read_resumed_settings(loaded.config.trainer)
            resumed, former_defaults[:] = keep_former_defaults(loaded, settings)
            return resumed

        loaded = load_run_config(
            self.path, self.overrides, checks=checks, adjust_loaded=keep_resumed_settings
        )
        for former in former_defaults if is_first else ():
            print(former.describe(get_config_value(RunConfig(), former.key)), flush=True)
        if is_first and loaded.lock_contents is not None:
            from rlhf_megatron.controller.recovery.config_lock_file import check_config_lock

            check_config_lock(loaded, self.allow_changes, partial(print, flush=True))
        return reveal_secrets(loaded.config, os.environ)

    def _read_resumed_settings(self, trainer: TrainerConfig) -> dict[str, str]:
        """Return the settings, each as text, of the checkpoint, recorded run or capsule that this
        job goes on from or repeats; {} for a new run.
        """
        from rlhf_megatron.controller.recovery.resume_point import CONFIG, read_resumed_settings

        if self.replay is None:
            return read_resumed_settings(self._locate_run_dir(trainer), trainer)
        recorded = self.replay if isinstance(self.replay, Path) else self.replay_from
        if recorded is None or not (recorded / CONFIG).is_file():
            return {}  # another message says what is wrong with the replay
        return flatten_config_yaml((recorded / CONFIG).read_text(encoding="utf-8"))

    def _fetch_hub_files(self) -> None:
        """Download the hub's models and data of the run on this machine. Of several ranks on one
        machine, the library lets only one download. Do nothing for a configuration that cannot be
        read, whose problems are raised later.
        """
        try:
            config = read_run_config(self.path, self.overrides).config
        except ConfigError:  # raised again with all other problems
            return
        fetch_models(config, partial(print, flush=True))
        fetch_data_splits(config.data, partial(print, flush=True))

    def _check_job_matches_command(self, job: str) -> None:
        """Raise ValueError if the configuration's job is another one than the command runs. `job`
        is the one of the configuration.
        """
        if job != self.command:
            raise ValueError(
                f"job ({job}) is not what the command {self.command} runs; use `rlhf-megatron"
                f" {job}`, or set job: {self.command}."
            )

    @property
    def run_dir(self) -> Path:
        """Return the run's directory. A replay gets a directory of its own beside that of the run
        it reads, which mostly has the same configuration.
        """
        return self._locate_run_dir(self.config.trainer)

    def _locate_run_dir(self, trainer: TrainerConfig) -> Path:
        """Return the directory of a run with these settings."""
        name = trainer.experiment_name + ("-replay" if self.replay is not None else "")
        return Path(trainer.default_local_dir) / name

    def start(self) -> int:
        """Run this process's part of the job, as launcher, host or controller, and return its exit
        code.

        The launcher of torchrun does not return; every rank that the launcher starts calls this
        function too. Raise ConfigError, ValueError or OSError for errors that a user can fix.
        """
        is_forked = self._preload_rank_modules()
        trainer = self.config.trainer
        megatrons = [megatron for _, megatron, _ in list_pool_layouts(self.config)]
        set_missing_variables(os.environ, trainer, self.config.rollout, megatrons)
        if isinstance(self.replay, int) != (self.replay_from is not None):
            problem = (
                "--replay STEP and --replay-from RUN_DIR (a run made with --record) need each other"
            )
            raise ConfigError([f"{problem}; --replay CAPSULE_DIR stands alone."])
        if CONTROLLER_ENV in os.environ:
            faults.install_fault_plan_from_env("controller")
            return self._run_torchrun_controller(Path(os.environ.pop(CONTROLLER_ENV)))
        if KEEPER_ENV in os.environ:
            return self._run_keeper(int(os.environ.pop(KEEPER_ENV)))
        if trainer.runtime == "inline":
            faults.install_fault_plan_from_env("controller")
            if self._finish_if_complete():
                return 0
            return self._run_inline(self._open_run_dir())
        if trainer.runtime == "ray":
            return self._run_on_ray()
        from rlhf_megatron.runtime.torchrun import forked_ranks
        from rlhf_megatron.runtime.torchrun import torchrun_launcher as torchrun

        if not torchrun.is_under_torchrun():
            if trainer.nnodes > 1:
                raise ValueError(
                    f"trainer.nnodes is {trainer.nnodes}: start this run with launch/torchrun.sh"
                    " on every node (`rlhf-megatron launch-scripts launch` writes it)."
                )
            if self._finish_if_complete():
                return 0
            os.environ[CHECKED_ENV] = "1"
            if is_forked:
                forked_ranks.run_agent_with_forks(
                    self.build_arguments(), trainer.n_gpus_per_node, trainer.stop_grace_s
                )
            torchrun.launch_single_node(
                self.build_arguments(), trainer.n_gpus_per_node, stop_s=trainer.stop_grace_s
            )
        faults.install_fault_plan_from_env(f"rank{os.environ['RANK']}")
        return self._run_host()

    def _preload_rank_modules(self) -> bool:
        """Import the modules that ranks need while a fork checks the configuration, if this process
        can fork its ranks (`runtime.torchrun.forked_ranks`). Return True if it will fork them and
        the check has passed; then CHECKED_ENV is set. Return False otherwise: the normal start
        finds and reports the problems again.
        """
        from rlhf_megatron.runtime.torchrun import forked_ranks

        try:
            trainer = load_run_config(self.path, self.overrides).config.trainer
        except ConfigError:  # found before anything is imported
            return False
        hide_gpus(os.environ, trainer)
        is_alone = trainer.runtime == "torchrun" and trainer.nnodes == 1
        if (
            not is_alone
            or {CONTROLLER_ENV, KEEPER_ENV} & os.environ.keys()
            or not forked_ranks.can_fork_ranks(trainer.device)
        ):
            return False
        is_checked = CHECKED_ENV in os.environ
        modules = [f"rlhf_megatron.{name}" for name in _OF_RANKS]
        if not forked_ranks.import_while_checking(
            lambda: is_checked or self.config, modules, trainer.n_gpus_per_node
        ):
            return False
        os.environ[CHECKED_ENV] = "1"
        return True

    def build_arguments(self) -> Sequence[str]:
        """Return the command line, from the command on, that starts the same job."""
        record = ["--record"] if self.record else []
        replay = ["--replay", str(self.replay)] if self.replay is not None else []
        replay += ["--replay-from", str(self.replay_from)] if self.replay_from is not None else []
        changes = ["--allow-changes"] if self.allow_changes else []
        return [self.command, str(self.path), *self.overrides, *record, *replay, *changes]

    def _build_pool_specs(self) -> tuple[PoolSpec, ...]:
        """Return the specifications of the run's pools of ranks."""
        from rlhf_megatron.runtime.rank_pools import build_pool_specs

        return build_pool_specs(self.config)

    def _finish_if_complete(self) -> bool:
        """Return True, after printing so, if the run directory holds this very run with all of its
        steps; first write the weights that trainer.save_hf asks for if they are missing. Return
        False for a run with steps left and for a replay.
        """
        from rlhf_megatron.controller.recovery.resume_point import describe_complete_run

        said = (
            describe_complete_run(self.run_dir, self.config.trainer)
            if self.replay is None
            else None
        )
        if said is None:
            return False
        print(said)
        if self.config.trainer.save_hf:
            from rlhf_megatron.config.rules.run_rules import has_critic
            from rlhf_megatron.controller.recovery.checkpoint_export import export_missing_weights

            for line in export_missing_weights(
                self.run_dir, self.config.trainer, has_critic(self.config)
            ):
                print(line)
        return True

    def _open_run_dir(self) -> LockedRunDir:
        """Open the run's directory, locked for this process and the processes that inherit the
        lock. Move a former run that is not continued aside, and write the configuration and its
        lock file for a new run.
        """
        from rlhf_megatron.controller.observe.run_dir import open_run_dir, write_text_atomically
        from rlhf_megatron.controller.recovery.config_lock_file import make_lock_yaml
        from rlhf_megatron.controller.recovery.resume_point import is_run_resumed

        def can_continue_run(path: Path) -> bool:
            """Return whether the run in this directory is to be resumed; never for a replay."""
            return self.replay is None and is_run_resumed(path, self.config.trainer)

        opened = open_run_dir(
            self.config.trainer.default_local_dir, self.run_dir.name, can_continue_run
        )
        if opened.former_run_path is not None:
            print(f"{opened.path} held a former run; it is {opened.former_run_path} now")
        if not can_continue_run(opened.path):
            resolved = render_config_yaml(self.config)
            write_text_atomically(opened.path / "config.yaml", resolved)
            write_text_atomically(opened.path / LOCK_FILE, make_lock_yaml(resolved))
        return opened

    def _run_controller(
        self,
        run_dir: Path,
        run_lock: RunLock,
        stop_request: StopRequest,
        connect_group: Callable[[], WorkerGroup],
        server_places: RunPlacement | None = None,
    ) -> int:
        """Run the training, supervised training or replay as the controller, and return the exit
        code: also after a stop or non-finite numbers, which are printed. `server_places` says where
        engine servers and reward workers start; None means below this process. Raise ValueError
        where an engine fails for good.
        """
        from rlhf_megatron.controller.recovery.nonfinite_skips import (
            NONFINITE_EXIT_CODE,
            NonFiniteNumbers,
        )
        from rlhf_megatron.controller.recovery.save_policy import is_run_state_saved
        from rlhf_megatron.controller.scheduler import training_run
        from rlhf_megatron.controller.scheduler.run_replay import (
            NOT_REPRODUCED_EXIT_CODE,
            replay_capsule,
            replay_run,
        )
        from rlhf_megatron.controller.supervised.supervised_run import run_supervised_training
        from rlhf_megatron.rewards.service.run_placement import RunPlacement
        from rlhf_megatron.rollout.engine_interface import EngineError

        config = self.config
        try:
            if isinstance(self.replay, Path):
                outcome = replay_capsule(config, connect_group, run_dir, self.replay)
                print(*outcome.report_lines, sep="\n")
                return 0 if outcome.is_reproduced else NOT_REPRODUCED_EXIT_CODE
            if self.replay is not None and self.replay_from is not None:
                replay_run(
                    config, connect_group, run_dir, self.replay_from, self.replay, stop_request
                )
            elif (
                self._finish_if_complete()
            ):  # ranks that torchrun has started come here without having asked
                pass
            elif config.job != "train":
                run_supervised_training(config, connect_group, run_dir, run_lock, stop_request)
            else:
                is_recorded = self.record or config.trainer.record
                training_run.run_training(
                    config,
                    connect_group,
                    run_dir,
                    is_recorded,
                    run_lock,
                    stop_request,
                    server_places or RunPlacement(),
                )
        except EngineError as error:
            raise ValueError(str(error)) from error
        except NonFiniteNumbers as error:
            print(f"error: {error}", file=sys.stderr)
            return NONFINITE_EXIT_CODE
        except RunStopped as error:
            print(f"stopped: {error}", file=sys.stderr)
            return STOPPED_EXIT_CODE if is_run_state_saved(config.trainer) else 128 + signal.SIGTERM
        return 0

    def _run_inline(self, opened_run_dir: LockedRunDir) -> int:
        """Run the controller and the only rank in this process, and return the exit code."""
        from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
        from rlhf_megatron.runtime.stop_signals import ControllerStopHandler

        def connect_inline_group() -> WorkerGroup:
            """Return the worker group whose roles are in this process."""
            return InlineWorkerGroup(
                partial(_build_roles, self.config), backend=self._choose_distributed_backend()
            )

        stop = self._make_stop_request()
        with ControllerStopHandler(stop, self.config.trainer.stop_grace_s).install_handlers():
            return self._run_controller(
                opened_run_dir.path, opened_run_dir.lock, stop, connect_inline_group
            )

    def _make_stop_request(self) -> StopRequest:
        """Return a StopRequest whose answer says whether the run saves its state first."""
        from rlhf_megatron.controller.recovery.save_policy import is_run_state_saved

        if self.replay is None and is_run_state_saved(self.config.trainer):
            return StopRequest("saving, then stopping")
        return StopRequest("stopping; this run saves no state (trainer.save_freq)")

    def _run_on_ray(self) -> int:
        """Run the job as the driver of a Ray cluster, and return the exit code. Check Ray and its
        address before a run directory is made.
        """
        from rlhf_megatron.runtime.ray.ray_driver import RayJob, run_ray_driver
        from rlhf_megatron.runtime.ray.ray_environment import (
            check_ray_version,
            find_cluster_address,
        )

        faults.install_fault_plan_from_env("controller")
        check_ray_version()
        # a wrong one is told before a run directory is made
        find_cluster_address(self.config.ray, os.environ)
        if self._finish_if_complete():
            return 0
        opened = self._open_run_dir()
        stop = self._make_stop_request()

        def run_with_ray_group(group: RoutedWorkerGroup, server_places: RunPlacement) -> int:
            """Run the controller with the ranks and places that Ray has provided, and return the
            exit code.
            """
            return self._run_controller(
                opened.path, opened.lock, stop, lambda: group, server_places
            )

        config = self.config
        job = RayJob(
            config.trainer,
            config.ray,
            config.rollout,
            config.reward_model.served if has_served_model(config) else None,
            [megatron for _, megatron, _ in list_pool_layouts(config)],
            self._build_pool_specs(),
            partial(_build_roles, redact_secrets(self.config)),  # ranks need no secrets
            opened.path / "logs",
            self._build_deadlines(),
            has_engines=self.replay is None and config.job == "train",
            keeps_routes=config.actor.router_replay == "r3",
        )
        return run_ray_driver(run_with_ray_group, job, stop)

    def _build_deadlines(self) -> RunDeadlines:
        """Return the deadlines of the run, in seconds: for startup, for one call to the ranks, and
        for a stop.
        """
        from rlhf_megatron.runtime.host_control import RunDeadlines

        trainer = self.config.trainer
        return RunDeadlines(
            startup_s=self.config.rollout.startup_timeout_s,
            call_s=max(trainer.stage_timeout_s, *trainer.stage_timeouts_s.values(), 0.0),
            stop_s=trainer.stop_grace_s,
        )

    def _run_host(self) -> int:
        """Run this process as a rank's host under torchrun, and return the exit code. Rank 0 opens
        the run directory and passes it to the controller, which it starts. Raise ConfigError where
        the number of processes is wrong.
        """
        from rlhf_megatron.runtime.torchrun.torchrun_launcher import run_torchrun_host

        problems = check_world_size(self.config, int(os.environ["WORLD_SIZE"]))
        if problems:
            raise ConfigError(problems)
        inherited: list[int] = []
        if os.environ["RANK"] == "0":
            opened = self._open_run_dir()
            inherited = opened.lock.descriptors
            os.environ |= {
                CONTROLLER_ENV: str(opened.path),
                LOCK_ENV: ",".join(map(str, inherited)),
            }
        return run_torchrun_host(
            partial(_build_roles, self.config),
            self._build_pool_specs(),
            ["-m", "rlhf_megatron", *self.build_arguments()],
            self.run_dir / "logs",
            self._build_deadlines(),
            backend=self._choose_distributed_backend(),
            setting_lines=[
                f"{key}: {format_yaml_value(get_config_value(redact_secrets(self.config), key))}"
                for key in list_leaf_keys(RunConfig)
            ],
            controller_descriptors=inherited,
            keeper_machines=()
            if (keepers := self._find_keeper_pool()) is None
            else keepers.machines,
        )

    def _find_keeper_pool(self) -> KeeperPoolSpec | None:
        """Return the pool of keepers, processes on machines that start servers but may have no
        ranks; None where the run needs none or is a replay.
        """
        from rlhf_megatron.runtime.torchrun.machine_servers import ServerMachines

        return ServerMachines.from_config(self.config).keeper_pool if self.replay is None else None

    def _run_keeper(self, machine: int) -> int:
        """Run this process as the keeper of servers on a machine, and return the exit code."""
        from rlhf_megatron.runtime.torchrun.machine_keeper import run_keeper
        from rlhf_megatron.runtime.torchrun.machine_servers import ServerMachines

        return run_keeper(
            machine, ServerMachines.from_config(self.config), self.run_dir, self._build_deadlines()
        )

    def _choose_distributed_backend(self) -> str:
        """Return the backend for torch.distributed: gloo with NCCL for CUDA tensors where the run
        may use GPUs and has some, else gloo.
        """
        from rlhf_megatron.device import has_accelerator

        return (
            "cpu:gloo,cuda:nccl"
            if self.config.trainer.device != "cpu" and has_accelerator()
            else "gloo"
        )

    def _run_torchrun_controller(self, run_dir: Path) -> int:
        """Run the controller beside the ranks of torchrun, with the run directory's lock that rank
        0 has passed on, and return the exit code.
        """
        from rlhf_megatron.controller.observe.run_dir import RunLock
        from rlhf_megatron.runtime.torchrun.torchrun_launcher import run_torchrun_controller

        lock = RunLock.take_over_inherited(
            run_dir, [int(number) for number in os.environ.pop(LOCK_ENV).split(",")]
        )
        stop = self._make_stop_request()

        keepers = self._find_keeper_pool()

        def run_with_rank_groups(group: RoutedWorkerGroup) -> int:
            """Run the controller with the connected ranks, and return the exit code. On several
            machines, place servers on those.
            """
            from rlhf_megatron.rewards.service.run_placement import RunPlacement
            from rlhf_megatron.runtime.torchrun.machine_servers import (
                MachineServerPlacer,
                ServerMachines,
            )

            is_spread = self.config.trainer.nnodes > 1 or keepers is not None
            servers = (
                MachineServerPlacer(ServerMachines.from_config(self.config), group, run_dir)
                if is_spread
                else None
            )
            places = (
                RunPlacement(servers, servers.place_reward_server) if servers is not None else None
            )
            return self._run_controller(run_dir, lock, stop, lambda: group, places)

        pools = (*self._build_pool_specs(), *([] if keepers is None else [keepers]))
        return run_torchrun_controller(run_with_rank_groups, pools, self._build_deadlines(), stop)


def _build_roles(config: RunConfig, pool: PoolMember) -> dict[str, object]:
    """Return the roles of a rank by name. Megatron is imported only here, after the host has
    registered, so that a failing import is reported with the rank's coordinates.
    """
    from rlhf_megatron.device import make_deterministic
    from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron

    # Before the roles import it: it says what is wrong with what is installed, and saves 2 s of
    # imports without CUDA.
    prepare_megatron()
    from rlhf_megatron.runtime.rank_roles import RoleBuilder

    load_plugins(config.plugins)  # an actor of Ray has not read the file
    if config.trainer.deterministic:
        make_deterministic()
    return RoleBuilder(config)(pool)

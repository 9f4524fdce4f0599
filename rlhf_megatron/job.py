"""A process of a training job: it checks everything, then becomes the launcher, a host or the controller."""

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
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.hub import fetch_models
from rlhf_megatron.config.hub_data import fetch_data
from rlhf_megatron.config.keys import leaf_keys, value_of
from rlhf_megatron.config.load import LOCK_FILE, load_run_config, read_run_config
from rlhf_megatron.config.rules import Check
from rlhf_megatron.config.rules.run import has_served_model, megatron_sections
from rlhf_megatron.config.rules.validate import check_world_size
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import redacted, revealed
from rlhf_megatron.config.show import as_text, as_yaml
from rlhf_megatron.parallel.environment import hide_gpus, set_up
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.runtime.processes import KEEPER_ENV
from rlhf_megatron.stop import STOPPED_EXIT_CODE, RunStopped, StopRequest

if TYPE_CHECKING:
    from rlhf_megatron.observe.run_dir import OpenRunDir, RunLock
    from rlhf_megatron.rewards.service.places import Places
    from rlhf_megatron.runtime.controller import Deadlines
    from rlhf_megatron.runtime.pool import Pool, PoolSpec
    from rlhf_megatron.runtime.routed import RoutedGroups
    from rlhf_megatron.runtime.torchrun.engines import KeeperPool
    from rlhf_megatron.runtime.worker_group import WorkerGroup

CONTROLLER_ENV = "RLHF_MEGATRON_RUN_DIR"  # set in the controller's environment: where the run goes
LOCK_ENV = "RLHF_MEGATRON_LOCK_FD"  # set in the controller's environment: the open files of the lock that it inherits
_OF_RANKS = ("runtime.roles", "runtime.torchrun.agent", "runtime.torchrun.launcher", "scheduler.run", "supervised.run")
CHECKED_ENV = "RLHF_MEGATRON_CHECKED"  # set in the environment of the ranks: the launcher has checked everything


@dataclass(frozen=True)
class TrainJob:
    """A job as `rlhf-megatron train` or `sft` was asked for it. The processes that it starts make the same job from
    `arguments`.
    """

    path: Path  # of the configuration
    overrides: tuple[str, ...] = ()  # "key=value"
    record: bool = False  # write every step's batches
    replay: int | Path | None = None  # last recorded step to train on, or the directory of a capsule
    replay_from: Path | None = None  # run directory that holds the recorded steps
    command: Literal["train", "sft", "reward-model"] = "train"
    allow_changes: bool = False  # since the run was locked (recovery/lock_file.py)

    @cached_property
    def config(self) -> RunConfig:
        """Secrets included. Raises ConfigError with all that is wrong, which one process looks for."""
        checks = [Check(("job",), lambda config: self._check_job(config.job))]
        is_checked = bool({CONTROLLER_ENV, CHECKED_ENV, KEEPER_ENV} & os.environ.keys())
        if not is_checked:
            self._fetch_models()
        is_first = not is_checked and os.environ.get("RANK", "0") == "0"
        if is_first:
            from rlhf_megatron.proof.preflight import checks_of_run

            capsule = self.replay if isinstance(self.replay, Path) else None
            last_step = self.replay if isinstance(self.replay, int) else None
            checks += checks_of_run(self.replay_from, last_step, capsule)
        loaded = load_run_config(self.path, self.overrides, checks=checks)
        if is_first and loaded.lock is not None:
            from rlhf_megatron.recovery.lock_file import check_lock

            check_lock(loaded, self.allow_changes, partial(print, flush=True))
        return revealed(loaded.config, os.environ)

    def _fetch_models(self) -> None:
        """Download the models of the run on each machine. Of several ranks on one machine, the library lets one
        download.
        """
        try:
            config = read_run_config(self.path, self.overrides).config
        except ConfigError:  # raised again with all other problems
            return
        fetch_models(config, partial(print, flush=True))
        fetch_data(config.data, partial(print, flush=True))

    def _check_job(self, job: str) -> None:
        if job != self.command:
            raise ValueError(
                f"job ({job}) is not what the command {self.command} runs; use `rlhf-megatron {job}`, or"
                f" set job: {self.command}."
            )

    @property
    def run_dir(self) -> Path:
        """Return the run's directory. A replay gets one beside the run that it reads, which mostly has the same
        configuration.
        """
        name = self.config.trainer.experiment_name + ("-replay" if self.replay is not None else "")
        return Path(self.config.trainer.default_local_dir) / name

    def start(self) -> int:
        """Return the exit code of the process, which becomes the launcher, a host or the controller.

        The launcher of torchrun does not return; every rank that it starts comes through here.

        Raises ConfigError, ValueError and OSError for what a user can mend.
        """
        is_forked = self._imports_once()
        trainer = self.config.trainer
        megatrons = [megatron for _, megatron, _ in megatron_sections(self.config)]
        set_up(os.environ, trainer, self.config.rollout, megatrons)
        if isinstance(self.replay, int) != (self.replay_from is not None):
            problem = "--replay STEP and --replay-from RUN_DIR (a run made with --record) need each other"
            raise ConfigError([f"{problem}; --replay CAPSULE_DIR stands alone."])
        if CONTROLLER_ENV in os.environ:
            faults.install_planned("controller")
            return self._control(Path(os.environ.pop(CONTROLLER_ENV)))
        if KEEPER_ENV in os.environ:
            return self._keep(int(os.environ.pop(KEEPER_ENV)))
        if trainer.runtime == "inline":
            faults.install_planned("controller")
            if self._is_complete():
                return 0
            return self._inline(self._open_run_dir())
        if trainer.runtime == "ray":
            return self._ray()
        from rlhf_megatron.runtime.torchrun import forks
        from rlhf_megatron.runtime.torchrun import launcher as torchrun

        if not torchrun.is_under_torchrun():
            if trainer.nnodes > 1:
                raise ValueError(
                    f"trainer.nnodes is {trainer.nnodes}: start this run with launch/torchrun.sh on every node."
                )
            if self._is_complete():
                return 0
            os.environ[CHECKED_ENV] = "1"
            if is_forked:
                forks.launch(self.arguments(), trainer.n_gpus_per_node, trainer.stop_grace_s)
            torchrun.launch_single_node(self.arguments(), trainer.n_gpus_per_node, stop_s=trainer.stop_grace_s)
        faults.install_planned(f"rank{os.environ['RANK']}")
        return self._host()

    def _imports_once(self) -> bool:
        """Whether this process has imported what its ranks need and becomes their agent (`runtime.torchrun.forks`).

        Then all has been checked, in a fork. What is wrong is found here again, and told.
        """
        from rlhf_megatron.runtime.torchrun import forks

        try:
            trainer = load_run_config(self.path, self.overrides).config.trainer
        except ConfigError:  # found before anything is imported
            return False
        hide_gpus(os.environ, trainer)
        is_alone = trainer.runtime == "torchrun" and trainer.nnodes == 1
        if not is_alone or {CONTROLLER_ENV, KEEPER_ENV} & os.environ.keys() or not forks.can_fork(trainer.device):
            return False
        is_checked = CHECKED_ENV in os.environ
        modules = [f"rlhf_megatron.{name}" for name in _OF_RANKS]
        if not forks.check_and_import(lambda: is_checked or self.config, modules, trainer.n_gpus_per_node):
            return False
        os.environ[CHECKED_ENV] = "1"
        return True

    def arguments(self) -> Sequence[str]:
        """Return the command line that asks for the same job."""
        record = ["--record"] if self.record else []
        replay = ["--replay", str(self.replay)] if self.replay is not None else []
        replay += ["--replay-from", str(self.replay_from)] if self.replay_from is not None else []
        changes = ["--allow-changes"] if self.allow_changes else []
        return [self.command, str(self.path), *self.overrides, *record, *replay, *changes]

    def _pools(self) -> tuple[PoolSpec, ...]:
        from rlhf_megatron.runtime.pool import pools_of

        return pools_of(self.config)

    def _is_complete(self) -> bool:
        """True, and said, where the run directory holds this very run with all of its steps; with the weights that
        trainer.save_hf asks for."""
        from rlhf_megatron.recovery.resume import completion

        said = completion(self.run_dir, self.config.trainer) if self.replay is None else None
        if said is None:
            return False
        print(said)
        if self.config.trainer.save_hf:
            from rlhf_megatron.config.rules.run import has_critic
            from rlhf_megatron.recovery.export import export_complete

            for line in export_complete(self.run_dir, self.config.trainer, has_critic(self.config)):
                print(line)
        return True

    def _open_run_dir(self) -> OpenRunDir:
        """Locked for this process and those that inherit its lock."""
        from rlhf_megatron.observe.run_dir import open_run_dir, write_text
        from rlhf_megatron.recovery.lock_file import locked_yaml
        from rlhf_megatron.recovery.resume import goes_on

        def is_kept(path: Path) -> bool:
            return self.replay is None and goes_on(path, self.config.trainer)

        opened = open_run_dir(self.config.trainer.default_local_dir, self.run_dir.name, is_kept)
        if opened.moved is not None:
            print(f"{opened.path} held a former run; it is {opened.moved} now")
        if not is_kept(opened.path):
            resolved = as_yaml(self.config)
            write_text(opened.path / "config.yaml", resolved)
            write_text(opened.path / LOCK_FILE, locked_yaml(resolved))
        return opened

    def _run(
        self,
        run_dir: Path,
        lock: RunLock,
        stop: StopRequest,
        connect_group: Callable[[], WorkerGroup],
        places: Places | None = None,
    ) -> int:
        """`places`: of servers and reward workers; None: below this process."""
        from rlhf_megatron.proof.replay import NOT_REPRODUCED_EXIT_CODE, replay, replay_capsule
        from rlhf_megatron.recovery.keeper import saves_state
        from rlhf_megatron.recovery.skips import NONFINITE_EXIT_CODE, NonFiniteNumbers
        from rlhf_megatron.rewards.service.places import Places
        from rlhf_megatron.rollout.engine import EngineError
        from rlhf_megatron.scheduler import run
        from rlhf_megatron.supervised.run import train_supervised

        config = self.config
        try:
            if isinstance(self.replay, Path):
                outcome = replay_capsule(config, connect_group, run_dir, self.replay)
                print(*outcome.lines, sep="\n")
                return 0 if outcome.is_reproduced else NOT_REPRODUCED_EXIT_CODE
            if self.replay is not None and self.replay_from is not None:
                replay(config, connect_group, run_dir, self.replay_from, self.replay, stop)
            elif self._is_complete():  # ranks that torchrun has started come here without having asked
                pass
            elif config.job != "train":
                train_supervised(config, connect_group, run_dir, lock, stop)
            else:
                is_recorded = self.record or config.trainer.record
                run.train(config, connect_group, run_dir, is_recorded, lock, stop, places or Places())
        except EngineError as error:
            raise ValueError(str(error)) from error
        except NonFiniteNumbers as error:
            print(f"error: {error}", file=sys.stderr)
            return NONFINITE_EXIT_CODE
        except RunStopped as error:
            print(f"stopped: {error}", file=sys.stderr)
            return STOPPED_EXIT_CODE if saves_state(config.trainer) else 128 + signal.SIGTERM
        return 0

    def _inline(self, opened: OpenRunDir) -> int:
        from rlhf_megatron.runtime.inline import InlineGroup
        from rlhf_megatron.runtime.stopping import ControllerStop

        def connect() -> WorkerGroup:
            return InlineGroup(partial(_build_roles, self.config), backend=self._backend())

        stop = StopRequest()
        with ControllerStop(stop, self.config.trainer.stop_grace_s).installed():
            return self._run(opened.path, opened.lock, stop, connect)

    def _ray(self) -> int:
        from rlhf_megatron.runtime.ray.driver import RayJob, run_driver
        from rlhf_megatron.runtime.ray.environment import address_of, check_installed

        faults.install_planned("controller")
        check_installed()
        address_of(self.config.ray, os.environ)  # a wrong one is told before a run directory is made
        if self._is_complete():
            return 0
        opened = self._open_run_dir()
        stop = StopRequest()

        def run(group: RoutedGroups, places: Places) -> int:
            return self._run(opened.path, opened.lock, stop, lambda: group, places)

        config = self.config
        job = RayJob(
            config.trainer,
            config.ray,
            config.rollout,
            config.reward_model.served if has_served_model(config) else None,
            [megatron for _, megatron, _ in megatron_sections(config)],
            self._pools(),
            partial(_build_roles, redacted(self.config)),  # ranks need no secrets
            opened.path / "logs",
            self._deadlines(),
            has_engines=self.replay is None and config.job == "train",
            keeps_routes=config.actor.router_replay == "r3",
        )
        return run_driver(run, job, stop)

    def _deadlines(self) -> Deadlines:
        from rlhf_megatron.runtime.controller import Deadlines

        trainer = self.config.trainer
        return Deadlines(
            startup_s=self.config.rollout.startup_timeout_s,
            call_s=max(trainer.stage_timeout_s, *trainer.stage_timeouts_s.values(), 0.0),
            stop_s=trainer.stop_grace_s,
        )

    def _host(self) -> int:
        from rlhf_megatron.runtime.torchrun.launcher import run_host

        problems = check_world_size(self.config, int(os.environ["WORLD_SIZE"]))
        if problems:
            raise ConfigError(problems)
        inherited: list[int] = []
        if os.environ["RANK"] == "0":
            opened = self._open_run_dir()
            inherited = opened.lock.descriptors
            os.environ |= {CONTROLLER_ENV: str(opened.path), LOCK_ENV: ",".join(map(str, inherited))}
        return run_host(
            partial(_build_roles, self.config),
            self._pools(),
            ["-m", "rlhf_megatron", *self.arguments()],
            self.run_dir / "logs",
            self._deadlines(),
            backend=self._backend(),
            settings=[f"{key}: {as_text(value_of(redacted(self.config), key))}" for key in leaf_keys(RunConfig)],
            controller_descriptors=inherited,
            keeper_machines=() if (keepers := self._keepers()) is None else keepers.machines,
        )

    def _keepers(self) -> KeeperPool | None:
        from rlhf_megatron.runtime.torchrun.engines import Servers

        return Servers.of(self.config).keepers if self.replay is None else None

    def _keep(self, machine: int) -> int:
        from rlhf_megatron.runtime.torchrun.engines import Servers
        from rlhf_megatron.runtime.torchrun.keeper import keep

        return keep(machine, Servers.of(self.config), self.run_dir, self._deadlines())

    def _backend(self) -> str:
        from rlhf_megatron.parallel.device import has_accelerator

        return "cpu:gloo,cuda:nccl" if self.config.trainer.device != "cpu" and has_accelerator() else "gloo"

    def _control(self, run_dir: Path) -> int:
        from rlhf_megatron.observe.run_dir import RunLock
        from rlhf_megatron.runtime.torchrun.launcher import run_controller

        lock = RunLock.inherited(run_dir, [int(number) for number in os.environ.pop(LOCK_ENV).split(",")])
        stop = StopRequest()

        keepers = self._keepers()

        def run(group: RoutedGroups) -> int:
            from rlhf_megatron.rewards.service.places import Places
            from rlhf_megatron.runtime.torchrun.engines import MachineEngines, Servers

            is_spread = self.config.trainer.nnodes > 1 or keepers is not None
            servers = MachineEngines(Servers.of(self.config), group, run_dir) if is_spread else None
            places = Places(servers, servers.reward_server) if servers is not None else None
            return self._run(run_dir, lock, stop, lambda: group, places)

        pools = (*self._pools(), *([] if keepers is None else [keepers]))
        return run_controller(run, pools, self._deadlines(), stop)


def _build_roles(config: RunConfig, pool: Pool) -> dict[str, object]:
    """Megatron is imported after the host has registered, so that what fails there is told with coordinates."""
    from rlhf_megatron.parallel.device import make_deterministic
    from rlhf_megatron.parallel.prepare import prepare_megatron

    # Before the roles import it: it says what is wrong with what is installed, and saves 2 s of imports without CUDA.
    prepare_megatron()
    from rlhf_megatron.runtime.roles import RoleBuilder

    load_plugins(config.plugins)  # an actor of Ray has not read the file
    if config.trainer.deterministic:
        make_deterministic()
    return RoleBuilder(config)(pool)

"""The controller writes and loads checkpoints of a run; docs/checkpoints.md lists their files.

A save begins between two steps and is committed at the end of a later one: the hosts copy their
state to memory, the run goes on while they write, and when all files are complete the directory is
renamed. One save runs at a time. Before a save, and every so many steps, `require_equal_replicas`
compares what ranks hold alike, so that no checkpoint has weights that differ or are not finite.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.controller.observe.run_facts import read_package_versions
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore, VerifiedCheckpoint
from rlhf_megatron.controller.recovery.resume_point import (
    CHECKPOINTS,
    CONFIG,
    RUN_STATE,
    RunState,
    read_run_state,
)
from rlhf_megatron.controller.sync.device_turns import DeviceTurns
from rlhf_megatron.data import codec
from rlhf_megatron.data.direct_file_io import fsync_path, write_large_file_atomically
from rlhf_megatron.runtime.role_proxies import CriticProxy, HostProxy, RoleProxies, TrainedProxy
from rlhf_megatron.weights.checkpoint_manifest import FileRecord, SaveResult, make_file_record

REFERENCE = "reference"
RNG = "rng"
PACKAGES = ("torch", "megatron-core", "rlhf-megatron")
NUM_SHOWN = 20  # findings in a message
SPARE_SHARE = 0.05  # of the estimated size, that must be free beside it
POLL_S = 0.05
Result = TypeVar("Result")
SETTLE_S = 90.0  # over the 60 s that NFS may show an old listing of a directory


class CheckpointSaveFailed(OSError):
    """A checkpoint could not be written and trainer.save_failure is stop. Earlier checkpoints
    are untouched.
    """


@dataclass(frozen=True)
class _PendingSave:
    """A save whose files the hosts are writing.
    Values are from the request, not from the commit.
    """

    step: int
    policy_version: int
    written_files: tuple[FileRecord, ...]  # that stand already
    start_time: float  # time.monotonic()
    staging_seconds: float  # until the run went on


class RunCheckpointer:
    """Saves and restores the state of hosts and controller.

    `config_yaml`: the run's configuration, stored in each checkpoint. `has_critic`: the critic is
    saved too. `has_frozen_start`: a KL term needs a reference and no path gives it, so the policy
    after the warm-up is saved as well. `run_dir`: locked by this run. `note`: takes a line for
    whoever watches the run. `turns`: of trainer and engines that share devices; a save needs
    the trainer's.

    `commit_callback(step)` is called when a checkpoint has its name, from `begin_save`,
    `commit_if_written` or `wait_for_save`. `choose_best_step(steps)`: the one that is kept beside
    the newest, None where none is.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        config_yaml: str,
        workers: RoleProxies,
        has_critic: bool,
        has_frozen_start: bool,
        run_dir: Path,
        note: Callable[[str], None],
        device_turns: DeviceTurns | None = None,
    ) -> None:
        """Make the checkpointer, and remove checkpoints that a killed run left unfinished."""
        self.store = CheckpointStore(run_dir / CHECKPOINTS, SETTLE_S if trainer.nnodes > 1 else 0.0)
        self.commit_callback: Callable[[int], None] = lambda step: None
        self.choose_best_step: Callable[[Sequence[int]], int | None] = lambda steps: None
        # that the last save took, without what the run did meanwhile
        self.last_save_seconds: float | None = None
        self._trainer = trainer
        self._config_yaml = config_yaml
        self._has_frozen_start = has_frozen_start
        self._workers = workers
        self._note = note
        self._device_turns = device_turns or DeviceTurns()
        self._trained_workers = workers.list_trained_proxies(has_critic)
        self._pending_save: _PendingSave | None = None
        self._last_checkpoint: VerifiedCheckpoint | None = None  # committed or restored here
        self._estimated_bytes: int | None = None  # that the hosts will write, about
        self._num_failed_saves = 0
        self._metrics: dict[str, float] = {}  # that `commit_if_written` has not handed out yet
        for path in self.store.remove_unfinished():
            note(f"removed {path}: it was not complete when the run ended")

    def begin_save(self, state: RunState) -> None:
        """Begin a checkpoint of `state` and of the hosts as they are now; return when they may
        change.

        Wait for the save before. Do nothing for a step that has a checkpoint. Where
        `trainer.async_save` is off, wait until the checkpoint is committed. Raise
        CheckpointSaveFailed where trainer.save_failure is stop, and ReplicasDiffer.
        """
        self.wait_for_save()
        if self._last_checkpoint is not None and self._last_checkpoint.manifest.step == state.step:
            return
        self._device_turns.give_devices_to_trainer()
        if self._trainer.desync_freq:
            require_equal_replicas(self._trained_workers)
        began = time.monotonic()
        try:
            self._require_disk_space()
            directory = self.store.begin_checkpoint(state.step)
            files = [
                *self._write_controller_files(directory, state),
                *self._write_host_files(directory, state),
            ]
        except (OSError, ValueError) as error:
            self._handle_failed_save(state.step, str(error))
            return
        _await_all_results(
            worker.begin_save(directory=directory / worker.role) for worker in self._trained_workers
        )
        staged_s = time.monotonic() - began
        self._pending_save = _PendingSave(
            state.step, state.policy_version, tuple(files), began, staged_s
        )
        if not self._trainer.async_save:
            self.wait_for_save()

    def commit_if_written(self) -> dict[str, float]:
        """Commit the pending save if all hosts have written it; called at each step's end. Return
        the metrics since the last call. Raise CheckpointSaveFailed.
        """
        if self._pending_save is not None and self._are_hosts_done_writing():
            self._finish_save(self._trainer.stage_timeout_s)
        metrics = self._metrics
        self._metrics = {}
        return metrics

    def wait_for_save(self, timeout_s: float | None = None) -> None:
        """Wait for the pending save and commit it; give up after `timeout_s` (None:
        trainer.stage_timeout_s). Raise CheckpointSaveFailed.
        """
        if self._pending_save is None:
            return
        deadline = time.monotonic() + (
            self._trainer.stage_timeout_s if timeout_s is None else timeout_s
        )
        while not self._are_hosts_done_writing() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._finish_save(max(0.0, deadline - time.monotonic()))

    def restore_checkpoint(self, checkpoint: VerifiedCheckpoint) -> RunState:
        """Load `checkpoint` on the hosts, whatever their layout, and return the controller's state.
        Random states are restored only in pools of the same layout.

        Raise ValueError for a checkpoint that does not fit the configuration.
        """
        state = read_run_state(checkpoint)
        if self._has_warmed_up_reference(state) and not (checkpoint.path / REFERENCE).is_dir():
            raise ValueError(
                f"{checkpoint.path} has no reference policy, but a KL term needs the one after the"
                " warm-up; restore the settings of the KL terms that the run began with, or"
                " give reference.path."
            )
        for worker in self._trained_workers:
            if not (checkpoint.path / worker.role).is_dir():
                raise ValueError(
                    f"{checkpoint.path} has no {worker.role}; restore the settings that the run"
                    " began with."
                )
        _await_all_results(
            worker.load(directory=checkpoint.path / worker.role) for worker in self._trained_workers
        )
        if self._has_warmed_up_reference(state):
            self._workers.host.load_reference(directory=checkpoint.path / REFERENCE).result()
        for pool, keeper in self._choose_rng_workers().items():
            layout = str(keeper.layout)
            if checkpoint.manifest.layouts.get(pool) == layout:
                keeper.load_rng(directory=checkpoint.path / RNG).result()
            else:
                self._note(
                    f"{pool}: the layout was {checkpoint.manifest.layouts.get(pool)} and is"
                    f" {layout}; random states start anew and sums have another order, so results"
                    " differ in the last bits from an undisturbed run"
                )
        if checkpoint.path.parent == self.store.directory:
            self._last_checkpoint = checkpoint
        return state

    def _write_controller_files(self, directory: Path, state: RunState) -> list[FileRecord]:
        """Write the run's state and configuration into the checkpoint, and return their records."""
        codec.write_message_file(directory / RUN_STATE, state)
        write_large_file_atomically(directory / CONFIG, [self._config_yaml.encode()])
        return [make_file_record(directory, directory / name) for name in (RUN_STATE, CONFIG)]

    def _write_host_files(self, directory: Path, state: RunState) -> list[FileRecord]:
        """Write the random states, and the reference policy where it is the warmed-up policy;
        return the records of the files. The weights come later, in `begin_save` of the roles.
        """
        files: list[FileRecord] = []
        for keeper in self._choose_rng_workers().values():
            files += _collect_written_files(keeper.save_rng(directory=directory / RNG).result())
        if not self._has_warmed_up_reference(state):
            return files
        if self._last_checkpoint is not None and (self._last_checkpoint.path / REFERENCE).is_dir():
            return [*files, *_link_reference_files(self._last_checkpoint, directory)]
        saved = self._workers.host.save_reference(directory=directory / REFERENCE).result()
        return [*files, *_collect_written_files(saved)]

    def _are_hosts_done_writing(self) -> bool:
        """Return whether all ranks have written their files."""
        return all(
            all(done)
            for done in _await_all_results(
                worker.is_save_done() for worker in self._trained_workers
            )
        )

    def _finish_save(self, timeout_s: float) -> None:
        """Collect the files of all ranks, commit the checkpoint, and remove old checkpoints. A
        failure is handled by `_handle_failed_save`.
        """
        assert self._pending_save is not None
        save = self._pending_save
        self._pending_save = None
        finishing = time.monotonic()
        results = _await_all_results(
            worker.finish_save(timeout_s=timeout_s) for worker in self._trained_workers
        )
        try:
            files = [
                *save.written_files,
                *(record for of_role in results for record in _collect_written_files(of_role)),
            ]
            layouts = {pool: str(layout) for pool, layout in self._workers.group.layouts.items()}
            found = self.store.commit_checkpoint(
                save.step, save.policy_version, layouts, read_package_versions(PACKAGES), files
            )
        except (OSError, ValueError) as error:
            self._handle_failed_save(save.step, str(error))
            return
        self._last_checkpoint = found
        seconds = time.monotonic() - save.start_time
        writing_s = max(result.seconds for of_role in results for result in of_role)
        self.last_save_seconds = min(
            seconds, save.staging_seconds + writing_s + time.monotonic() - finishing
        )
        num_bytes = found.manifest.num_bytes
        self._metrics |= {
            "checkpoint/step": float(save.step),
            "checkpoint/seconds": seconds,
            "checkpoint/num_bytes": float(num_bytes),
            "checkpoint/num_failed": float(self._num_failed_saves),
        }
        self._note(
            f"committed step {save.step}: {found.path} ({_format_bytes(num_bytes)},"
            f" {seconds:.1f} s)"
        )
        self.commit_callback(save.step)
        self.store.prune_old_checkpoints(
            self._trainer.max_ckpt_to_keep, self.choose_best_step(self.store.list_steps())
        )

    def _handle_failed_save(self, step: int, problem: str) -> None:
        """Remove the unfinished checkpoint and note the problem. Raise CheckpointSaveFailed where
        trainer.save_failure is stop.
        """
        self.store.abandon_checkpoint(step)
        self._num_failed_saves += 1
        self._metrics["checkpoint/num_failed"] = float(self._num_failed_saves)
        kept = (
            f"the newest one is of step {self._last_checkpoint.manifest.step}"
            if self._last_checkpoint
            else "there is none before it"
        )
        text = f"the checkpoint of step {step} was not written: {problem} ({kept})"
        if self._trainer.save_failure == "stop":
            raise CheckpointSaveFailed(
                f"{text}; the run ends because trainer.save_failure is stop."
            )
        self._note(f"WARNING: {text}; the run goes on without it")

    def _require_disk_space(self) -> None:
        """Raise OSError when the file system has less room than the hosts will need."""
        if self._estimated_bytes is None:
            self._estimated_bytes = sum(
                map(
                    sum,
                    _await_all_results(
                        worker.estimate_save_bytes() for worker in self._trained_workers
                    ),
                )
            )
        needed = int(self._estimated_bytes * (1 + SPARE_SHARE))
        self.store.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.store.directory).free
        if free < needed:
            raise OSError(
                f"it needs about {_format_bytes(needed)} and {_format_bytes(free)} are free at"
                f" {self.store.directory}; make room, or lower trainer.max_ckpt_to_keep"
            )

    def _has_warmed_up_reference(self, state: RunState) -> bool:
        """Return whether the reference is the policy after the warm-up, which must be saved."""
        return self._has_frozen_start and state.num_warmup_steps > 0

    def _choose_rng_workers(self) -> dict[str, HostProxy | CriticProxy]:
        """Return, by pool, a role that saves and loads the random states of its ranks."""
        return {
            pool: self._workers.critic if pool == "critic" else self._workers.host
            for pool in self._workers.group.layouts
            if pool not in ("reward_model", "reference")  # which draw nothing
        }


def _await_all_results(calls: Iterable[Future[Result]]) -> list[Result]:
    """Make all calls, and then return their results in order: different ranks work at the same
    time.
    """
    return [call.result() for call in list(calls)]


def _collect_written_files(results: Sequence[SaveResult]) -> list[FileRecord]:
    """Return the records of the files that all ranks wrote. Raise OSError where a rank could not
    write.
    """
    for result in results:
        if result.error is not None:
            raise OSError(result.error)
    return [record for result in results for record in result.files]


def _link_reference_files(last_checkpoint: VerifiedCheckpoint, directory: Path) -> list[FileRecord]:
    """Hard-link the reference of the checkpoint before, which never changes, into `directory`; copy
    it where links are not possible. Return the records of the files.
    """
    files = [
        record
        for record in last_checkpoint.manifest.files
        if record.path.startswith(f"{REFERENCE}/")
    ]
    for record in files:
        source = last_checkpoint.path / record.path
        target = directory / record.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
            fsync_path(target)
    return files


def _format_bytes(num_bytes: int) -> str:
    """Return the size as text in GB or MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"


class ReplicasDiffer(ValueError):
    """Ranks disagree on what they hold alike, or parameters are not finite. The run must not
    go on with them.
    """


def require_equal_replicas(workers: Sequence[TrainedProxy]) -> dict[str, float]:
    """Check that the ranks of `workers` hold the same bits where they hold the same tensors, and
    that parameters are finite. Return the time it took, as a metric.

    Pools are checked at the same time. Raise ReplicasDiffer naming each tensor and the ranks that
    differ from the majority.
    """
    start = time.monotonic()
    reports = _await_all_results(worker.check_replicas() for worker in workers)
    found = [
        (worker.role, report)
        for worker, ranks in zip(workers, reports, strict=True)
        for report in ranks
    ]
    differences = [
        f"[{role}] {difference}" for role, report in found for difference in report.differences
    ]
    not_finite = [
        f"[{role} {report.rank_name}] {bad}"
        for role, report in found
        for bad in report.bad_parameters
    ]
    if differences:
        raise ReplicasDiffer(
            "tensors that ranks hold alike are not the same"
            f" ({len(differences)}):\n  {_join_first_lines(differences)}\n"
            "A rank computed, received or stored something else, by its hardware or a race. Start"
            " again from the newest checkpoint, which was checked; if the same rank differs again,"
            " replace its machine."
        )
    if not_finite:
        raise ReplicasDiffer(
            f"parameters are not finite ({len(not_finite)}):\n  {_join_first_lines(not_finite)}\n"
            "The last optimizer step was finite and overflowed them: lower the learning rate or"
            " clip_grad, and start again from the newest checkpoint."
        )
    return {"timing_s/desync": time.monotonic() - start}


def _join_first_lines(lines: list[str]) -> str:
    """Return the first NUM_SHOWN lines as an indented text, and how many more there are."""
    more = [f"... and {len(lines) - NUM_SHOWN} more"] if len(lines) > NUM_SHOWN else []
    return "\n  ".join([*lines[:NUM_SHOWN], *more])

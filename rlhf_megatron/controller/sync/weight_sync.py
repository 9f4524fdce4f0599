"""One weight sync as a transaction: begin -> stream -> verify -> commit. The policy
version counts syncs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypedDict

from rlhf_megatron import faults
from rlhf_megatron.controller.sync.device_turns import DeviceTurns
from rlhf_megatron.ranks.resharding.weight_sender import SendReport
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    InferenceEngine,
    WeightTransport,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.transports.disk_transport import (
    assemble_weight_checkpoint,
    load_checkpoint_into_engines,
    remove_other_versions,
)
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.tensor_digest import format_digest
from rlhf_megatron.weights.update_rounding import compute_lost_update_share

NAMES_SHOWN = 5


class PolicySync:
    """The last act of a step, unless the step left the policy as it was. This one is for a run
    without engines: the version still counts.
    """

    def __init__(self, policy_version: int = 0) -> None:
        """Begin with this version of the policy."""
        self.policy_version = policy_version  # of the policy: how many times this was called

    def __call__(self) -> dict[str, float]:
        """Raise the policy version by one, and return metrics with the new version."""
        self.policy_version += 1
        return {"policy/version": float(self.policy_version)}


class WeightSender(Protocol):
    """The holder of the weights: the trainer's ranks, or a reader of files."""

    @property
    def send_weights(self) -> Callable[..., Future[list[SendReport]]]:
        """Return the method `HostWorker.send_weights`, whose future has one report for each
        rank.
        """


class WeightSync(PolicySync):
    """Callable; owned by the controller. An engine that fails on the way is STALE and set aside;
    the others go on.
    """

    def __init__(
        self,
        weight_sender: WeightSender,
        fleet: EngineFleet,
        transfer_dir: Path,
        bucket_bytes: int,
        engine_dtype: str,
        policy_version: int = 0,
        probe_engine: Callable[[InferenceEngine], None] | None = None,
        transport: WeightTransport = "tensor",
        model_path: Path | None = None,
        device_turns: DeviceTurns | None = None,
        ranks_per_machine: int | None = None,
        watch_lost_update: Callable[[float], None] | None = None,
    ) -> None:
        """Make the sync, and register it with `fleet` and `device_turns`, which use it to send
        weights again.

        `probe_engine` is called with a serving engine that cannot compute digests; it raises
        EngineError. `model_path` is the directory whose configuration and tokenizer go with files
        of weights (`transport` disk). `device_turns` are those of trainer and engines, where they
        share devices. `ranks_per_machine`: see `deliver_weights`. `watch_lost_update` is called
        with the share of the update that rounding lost in a sync, where the share is known.
        """
        assert transport != "disk" or model_path is not None, (
            "files of weights need a configuration"
        )
        self.weight_sender = weight_sender
        self.fleet = fleet
        self.transfer_dir = transfer_dir
        self.bucket_bytes = bucket_bytes
        self.engine_dtype = engine_dtype
        super().__init__(policy_version)
        self.probe_engine = probe_engine
        self.transport = transport
        self.model_path = model_path
        self.ranks_per_machine = ranks_per_machine
        self.watch_lost_update = watch_lost_update
        self._sent_digests: dict[str, str] | None = None  # digests of what `policy_version` is
        self.device_turns = device_turns or DeviceTurns()
        self.device_turns.resend_weights = partial(self, is_full_resync=True)
        fleet.resync_engines = self.resync_engines

    def __call__(self, is_full_resync: bool = False) -> dict[str, float]:
        """Send the trainer's weights to all engines, verify them, and make the engines serve them
        as the next version. With `is_full_resync`, send the same version once more, to engines that
        have released their weights.

        An engine that fails is set aside. Raise EngineError when no engine with the right weights
        is left.
        """
        start = time.monotonic()
        version = self.policy_version if is_full_resync else self.policy_version + 1
        self.device_turns.prepare_weight_stream()
        self.fleet.begin_weight_update(version, is_full_resync)
        faults.reach_fault_point("sync.after_begin")
        engines = self.fleet.live_engines
        reports = self.weight_sender.send_weights(
            **self._make_send_arguments(version, engines)
        ).result()
        sent = self._sum_send_reports(reports, version, engines)
        if is_full_resync:
            self._assert_weights_unchanged(sent)
        for name, reason in sent.failure_by_engine.items():
            self.fleet.set_engine_aside(name, reason)
        standing_by_name = self.fleet.get_weight_digests()
        for name, standing in standing_by_name.items():
            try:
                verify_engine_digests(name, sent.digests, standing)
            except EngineError as error:
                self.fleet.set_engine_aside(name, str(error))
        self.device_turns.finish_weight_stream()
        faults.reach_fault_point("sync.before_commit")
        # an engine without digests, which must serve for its probe
        is_probed = None in standing_by_name.values()
        self.fleet.commit_weight_update(version, waits_for_all=is_probed)
        faults.reach_fault_point("sync.after_commit")
        self.policy_version = version
        self._sent_digests = sent.digests
        if self.transport == "disk":
            remove_other_versions(self.transfer_dir, version_to_keep=version)
        for engine in self.fleet.live_engines:
            if standing_by_name.get(engine.address.name) is None:
                self._probe_or_set_aside(engine)
        metrics = {
            "policy/version": float(version),
            "sync/num_bytes": float(sent.num_bytes),
            "sync/bytes_moved": float(sent.bytes_moved),
            "sync/bytes_needed": float(sent.bytes_needed),
            "sync/seconds": time.monotonic() - start,
        }
        if sent.lost_update_share is not None and not is_full_resync:
            metrics["policy/lost_update_share"] = sent.lost_update_share
            if self.watch_lost_update is not None:
                self.watch_lost_update(sent.lost_update_share)
        return metrics

    def resync_engines(self, engines: Sequence[InferenceEngine]) -> None:
        """Send the current version again to these engines, and verify it: they were started again,
        or the run was.

        Call it between a sync and the next update, while no call runs on the hosts. Raise
        EngineError naming the engines that failed, which are STALE then; the others serve.
        """
        failures: dict[str, str] = {}
        opened = _apply_to_engines(
            engines,
            lambda engine: engine.begin_weight_update(self.policy_version, is_full_resync=True),
            failures,
        )
        if opened:
            self.device_turns.prepare_weight_stream()
            reports = self.weight_sender.send_weights(
                **self._make_send_arguments(self.policy_version, opened)
            ).result()
            sent = self._sum_send_reports(reports, self.policy_version, opened)
            self._assert_weights_unchanged(sent)
            failures |= sent.failure_by_engine
            self._sent_digests = sent.digests
            standing = [engine for engine in opened if engine.address.name not in failures]
            self.device_turns.finish_weight_stream()
            _apply_to_engines(
                standing, lambda engine: self._verify_and_commit(engine, sent.digests), failures
            )
        if failures:
            raise EngineError("; ".join(failures.values()))

    def _assert_weights_unchanged(self, sync_totals: _SyncTotals) -> None:
        """Assert that the weights just sent have the digests of the last send."""
        assert self._sent_digests in (None, sync_totals.digests), (
            f"the weights have changed since version {self.policy_version} was sent"
        )

    def _make_send_arguments(
        self, version: int, engines: Sequence[InferenceEngine]
    ) -> _SendArguments:
        """Return the arguments of `send_weights`. The callers call it themselves, so that the way
        to the bytes stays short.
        """
        return {
            "version": version,
            "engines": [engine.address for engine in engines],
            "transfer_dir": self.transfer_dir,
            "bucket_bytes": self.bucket_bytes,
            "dtype": self.engine_dtype,
            "transport": self.transport,
            "ranks_per_machine": self.ranks_per_machine,
        }

    def _sum_send_reports(
        self, reports: Sequence[SendReport], version: int, engines: Sequence[InferenceEngine]
    ) -> _SyncTotals:
        """Add up the reports of all senders. With transport "disk", also assemble the files into a
        model directory, and make the engines without the run's loader load it. An engine that fails
        raises nothing: `failure_by_engine` has the reason.
        """
        failures: dict[str, list[str]] = {}
        digests: dict[str, int] = {}
        for report in reports:
            for name, reason in report.failures.items():
                failures.setdefault(name, []).append(reason)
            # of the parts that each rank sent: they add up
            for name, value in report.digests.items():
                digests[name] = digests.get(name, 0) + int(value, 16)
        sent = _SyncTotals(
            num_bytes=sum(report.num_bytes for report in reports),
            bytes_moved=sum(report.bytes_moved for report in reports),
            bytes_needed=sum(report.bytes_needed for report in reports),
            digests={name: format_digest(value) for name, value in digests.items()},
            failure_by_engine={name: "; ".join(reasons) for name, reasons in failures.items()},
            lost_update_share=compute_lost_update_share(report.lost_update for report in reports),
        )
        if self.transport == "disk":
            assert self.model_path is not None
            config = read_hf_config(self.model_path)
            directory = assemble_weight_checkpoint(
                self.transfer_dir, version, sent.digests, config, self.model_path
            )
            sent.failure_by_engine.update(
                load_checkpoint_into_engines([engine.address for engine in engines], directory)
            )
        return sent

    def _probe_or_set_aside(self, engine: InferenceEngine) -> None:
        """Probe an engine that has no digests, and set it aside where the probe fails. Raise its
        EngineError when no engine is left.
        """
        try:
            self._probe_or_mark_stale(engine)
        except EngineError as error:
            self.fleet.set_engine_aside(engine.address.name, str(error))
            if not self.fleet.live_engines:
                raise

    def _probe_or_mark_stale(self, engine: InferenceEngine) -> None:
        """Probe the engine, where there is a probe. If the probe fails, make the engine stop
        serving until the next full sync, and raise its EngineError.
        """
        if self.probe_engine is None:
            return
        try:
            self.probe_engine(engine)
        except EngineError:
            with suppress(EngineError):  # it serves nothing from here to the next full sync
                engine.begin_weight_update(self.policy_version, is_full_resync=True)
            raise

    def _verify_and_commit(self, engine: InferenceEngine, sent_digests: dict[str, str]) -> None:
        """Verify the weights in an engine, make it serve the current version, and probe an engine
        without digests. Raise EngineError where any of these fails.
        """
        standing = engine.get_weight_digests()
        verify_engine_digests(engine.address.name, sent_digests, standing)
        engine.commit_weight_update(self.policy_version)
        found = engine.get_served_version()
        if found != self.policy_version:
            raise EngineError(
                f"{engine.address.name} serves version {found} after the sync"
                f" of {self.policy_version}."
            )
        if standing is None:
            self._probe_or_mark_stale(engine)


class _SendArguments(TypedDict):
    version: int
    engines: list[EngineAddress]
    transfer_dir: Path
    bucket_bytes: int
    dtype: str
    transport: WeightTransport
    ranks_per_machine: int | None


@dataclass(frozen=True)
class _SyncTotals:
    num_bytes: int
    bytes_moved: int
    bytes_needed: int
    digests: dict[str, str]  # Hugging Face name -> digest, in the engines' type
    failure_by_engine: dict[str, str]  # engine name -> why it has not got everything
    lost_update_share: float | None  # what rounding lost of the update; None: not measured


def _apply_to_engines(
    engines: Sequence[InferenceEngine],
    action: Callable[[InferenceEngine], None],
    failure_by_engine: dict[str, str],
) -> list[InferenceEngine]:
    """Call `action` with each engine. Return the engines for which it raised no EngineError, and
    add the messages of the others to `failure_by_engine`.
    """
    good = []
    for engine in engines:
        try:
            action(engine)
        except EngineError as error:
            failure_by_engine[engine.address.name] = str(error)
            continue
        good.append(engine)
    return good


def verify_engine_digests(
    engine_name: str, sent_digests: dict[str, str], engine_digests: dict[str, str] | None
) -> None:
    """Raise EngineError where the weights in the engine differ from the exported weights in any
    bit. `engine_digests` is None for an engine that cannot compute digests: nothing is checked
    then.
    """
    if engine_digests is None:
        return
    wrong = sorted(
        name
        for name in sent_digests.keys() | engine_digests.keys()
        if sent_digests.get(name) != engine_digests.get(name)
    )
    if wrong:
        shown = ", ".join(
            (
                f"{n} (sent {sent_digests.get(n, 'nothing')}, stands"
                f" {engine_digests.get(n, 'nothing')})"
            )
            for n in wrong[:NAMES_SHOWN]
        )
        raise EngineError(
            f"{engine_name}: {len(wrong)} of {len(sent_digests)} tensors that stand in it differ"
            f" from what was exported: {shown}. It is STALE."
        )

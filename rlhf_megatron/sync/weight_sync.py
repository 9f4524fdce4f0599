"""One weight sync as a transaction: begin -> stream -> verify -> commit. The policy version counts syncs."""

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
from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.resharding.digest import as_hex
from rlhf_megatron.resharding.sender import SendReport
from rlhf_megatron.rollout.engine import Engine, EngineAddress, EngineError, WeightTransport
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.transports.disk import complete_checkpoint, load_directory, remove_versions
from rlhf_megatron.sync.colocation import Turns

NAMES_SHOWN = 5


class Sync:
    """The last act of a step, unless the step left the policy as it was. This one is for a run without engines: the
    version still counts."""

    def __init__(self, version: int = 0) -> None:
        self.version = version  # of the policy: how many times this was called

    def __call__(self) -> dict[str, float]:
        """Returns metrics, among them the new version."""
        self.version += 1
        return {"policy/version": float(self.version)}


class Sender(Protocol):
    """The holder of the weights: the trainer's ranks, or a reader of files."""

    @property
    def send_weights(self) -> Callable[..., Future[list[SendReport]]]:
        """The method `HostWorker.send_weights`, which returns a report a rank."""


class WeightSync(Sync):
    """Callable; owned by the controller. An engine that fails on the way is STALE and set aside; the others go on."""

    def __init__(
        self,
        host: Sender,
        fleet: EngineFleet,
        transfer_dir: Path,
        bucket_bytes: int,
        dtype: str,
        version: int = 0,
        probe: Callable[[Engine], None] | None = None,
        transport: WeightTransport = "tensor",
        model_path: Path | None = None,
        turns: Turns | None = None,
        ranks_per_machine: int | None = None,
    ) -> None:
        """`probe` is called with an engine that serves and cannot tell digests. It raises EngineError. `model_path`:
        the directory whose configuration and tokenizer go with files of weights (`transport` disk). `turns`: of trainer
        and engines, where they share devices. `ranks_per_machine`: see `deliver_weights`."""
        assert transport != "disk" or model_path is not None, "files of weights need a configuration"
        self.host = host
        self.fleet = fleet
        self.transfer_dir = transfer_dir
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype
        super().__init__(version)
        self.probe = probe
        self.transport = transport
        self.model_path = model_path
        self.ranks_per_machine = ranks_per_machine
        self._sent: dict[str, str] | None = None  # digests of what `version` is
        self.turns = turns or Turns()
        self.turns.resend = partial(self, full_resync=True)
        fleet.resync = self.resync

    def __call__(self, full_resync: bool = False) -> dict[str, float]:
        """Trainer's weights to all engines. `full_resync`: the same version once more, to engines that have released
        theirs. Raises EngineError when none is left in which they stand as sent."""
        start = time.monotonic()
        version = self.version if full_resync else self.version + 1
        self.turns.before_stream()
        self.fleet.begin_update(version, full_resync)
        faults.reach("sync.after_begin")
        engines = self.fleet.live
        reports = self.host.send_weights(**self._stream(version, engines)).result()
        sent = self._sent_by(reports, version, engines)
        if full_resync:
            self._assert_unchanged(sent)
        for name, reason in sent.failures.items():
            self.fleet.set_aside(name, reason)
        standing_by_name = self.fleet.weight_digests()
        for name, standing in standing_by_name.items():
            try:
                verify(name, sent.digests, standing)
            except EngineError as error:
                self.fleet.set_aside(name, str(error))
        self.turns.after_stream()
        faults.reach("sync.before_commit")
        is_probed = None in standing_by_name.values()  # an engine without digests, which must serve for its probe
        self.fleet.commit_update(version, is_whole=is_probed)
        faults.reach("sync.after_commit")
        self.version, self._sent = version, sent.digests
        if self.transport == "disk":
            remove_versions(self.transfer_dir, keep=version)
        for engine in self.fleet.live:
            if standing_by_name.get(engine.address.name) is None:
                self._probe(engine)
        return {
            "policy/version": float(version),
            "sync/num_bytes": float(sent.num_bytes),
            "sync/bytes_moved": float(sent.bytes_moved),
            "sync/bytes_needed": float(sent.bytes_needed),
            "sync/seconds": time.monotonic() - start,
        }

    def resync(self, engines: Sequence[Engine]) -> None:
        """Sends the same version again to these engines, verified: they were started again, or the run was.

        To be called between a sync and the next update, while no call runs on the hosts. Raises EngineError naming the
        engines that failed, which are STALE then; the others serve.
        """
        failures: dict[str, str] = {}
        opened = _each(engines, lambda engine: engine.begin_update(self.version, full_resync=True), failures)
        if opened:
            self.turns.before_stream()
            reports = self.host.send_weights(**self._stream(self.version, opened)).result()
            sent = self._sent_by(reports, self.version, opened)
            self._assert_unchanged(sent)
            failures |= sent.failures
            self._sent = sent.digests
            standing = [engine for engine in opened if engine.address.name not in failures]
            self.turns.after_stream()
            _each(standing, lambda engine: self._finish(engine, sent.digests), failures)
        if failures:
            raise EngineError("; ".join(failures.values()))

    def _assert_unchanged(self, sent: _Sent) -> None:
        assert self._sent in (None, sent.digests), f"the weights have changed since version {self.version} was sent"

    def _stream(self, version: int, engines: Sequence[Engine]) -> _Stream:
        """The arguments of `send_weights`, which its callers call themselves: the way to the bytes stays short."""
        return {
            "version": version,
            "engines": [engine.address for engine in engines],
            "transfer_dir": self.transfer_dir,
            "bucket_bytes": self.bucket_bytes,
            "dtype": self.dtype,
            "transport": self.transport,
            "ranks_per_machine": self.ranks_per_machine,
        }

    def _sent_by(self, reports: Sequence[SendReport], version: int, engines: Sequence[Engine]) -> _Sent:
        """Adds up what senders report. Files become a model directory, for engines that could not take them one by
        one."""
        failures: dict[str, list[str]] = {}
        digests: dict[str, int] = {}
        for report in reports:
            for name, reason in report.failures.items():
                failures.setdefault(name, []).append(reason)
            for name, value in report.digests.items():  # of the parts that each rank sent: they add up
                digests[name] = digests.get(name, 0) + int(value, 16)
        sent = _Sent(
            num_bytes=sum(report.num_bytes for report in reports),
            bytes_moved=sum(report.bytes_moved for report in reports),
            bytes_needed=sum(report.bytes_needed for report in reports),
            digests={name: as_hex(value) for name, value in digests.items()},
            failures={name: "; ".join(reasons) for name, reasons in failures.items()},
        )
        if self.transport == "disk":
            assert self.model_path is not None
            config = read_hf_config(self.model_path)
            directory = complete_checkpoint(self.transfer_dir, version, sent.digests, config, self.model_path)
            sent.failures.update(load_directory([engine.address for engine in engines], directory))
        return sent

    def _probe(self, engine: Engine) -> None:
        """Probes an engine that has no digests. One that fails is set aside; raises its EngineError when none is
        left."""
        try:
            self._try(engine)
        except EngineError as error:
            self.fleet.set_aside(engine.address.name, str(error))
            if not self.fleet.live:
                raise

    def _try(self, engine: Engine) -> None:
        if self.probe is None:
            return
        try:
            self.probe(engine)
        except EngineError:
            with suppress(EngineError):  # it serves nothing from here to the next full sync
                engine.begin_update(self.version, full_resync=True)
            raise

    def _finish(self, engine: Engine, sent: dict[str, str]) -> None:
        standing = engine.weight_digests()
        verify(engine.address.name, sent, standing)
        engine.commit_update(self.version)
        found = engine.version()
        if found != self.version:
            raise EngineError(f"{engine.address.name} serves version {found} after the sync of {self.version}.")
        if standing is None:
            self._try(engine)


class _Stream(TypedDict):
    version: int
    engines: list[EngineAddress]
    transfer_dir: Path
    bucket_bytes: int
    dtype: str
    transport: WeightTransport
    ranks_per_machine: int | None


@dataclass(frozen=True)
class _Sent:
    num_bytes: int
    bytes_moved: int
    bytes_needed: int
    digests: dict[str, str]  # Hugging Face name -> digest, in the engines' type
    failures: dict[str, str]  # engine name -> why it has not got everything


def _each(engines: Sequence[Engine], act: Callable[[Engine], None], failures: dict[str, str]) -> list[Engine]:
    """Return the engines for which `act` raised no EngineError, and add what the others said to `failures`."""
    good = []
    for engine in engines:
        try:
            act(engine)
        except EngineError as error:
            failures[engine.address.name] = str(error)
            continue
        good.append(engine)
    return good


def verify(engine: str, sent: dict[str, str], standing: dict[str, str] | None) -> None:
    """Compares what stands in the engine with what was exported, bit for bit. None: the engine cannot tell."""
    if standing is None:
        return
    wrong = sorted(name for name in sent.keys() | standing.keys() if sent.get(name) != standing.get(name))
    if wrong:
        shown = ", ".join(
            f"{n} (sent {sent.get(n, 'nothing')}, stands {standing.get(n, 'nothing')})" for n in wrong[:NAMES_SHOWN]
        )
        raise EngineError(
            f"{engine}: {len(wrong)} of {len(sent)} tensors that stand in it differ from what was exported: {shown}."
            " It is STALE."
        )

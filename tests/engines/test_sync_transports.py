"""Whole weight syncs by every transport, with and without faults: refused, left out, mended
by the next one.

Trainer, engines and syncs are those of a run; the damage is done between a transport
and its engine.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rollout_tools import reference_log_probs
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from sync_tools import (
    BUCKET_BYTES,
    REQUESTS,
    change_weights,
    config_of,
    probe_of,
    trainer,
    write_model,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.rollout.engine_interface import EngineError, WeightTransport
from rlhf_megatron.rollout.engine_kinds import (
    EngineKind,
    LocalEngineKind,
    SGLangEngineKind,
    connect_engine,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines
from rlhf_megatron.rollout.transports import process_group_transport
from rlhf_megatron.rollout.transports.bucket_transport import BucketTransport, DeliveryTraffic
from rlhf_megatron.rollout.transports.link_transport import LinkTransport
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.bucket_manifest import BucketManifest
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

pytestmark = pytest.mark.dist
on_sglang = [pytest.mark.sglang, pytest.mark.long, needs_sglang]
TRANSPORTS: tuple[WeightTransport, ...] = ("tensor", "process_group", "disk")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sync") / "model")


@pytest.fixture(scope="module")
def group(model: Path) -> Iterator[InlineWorkerGroup]:
    with trainer(model) as started:
        yield started


@dataclass
class Damage:
    """What happens to the nth bucket of the next sync. Stands between the transports and
    their engines.
    """

    kind: str = ""
    nth: int = 0
    kill: Callable[[], None] = lambda: None
    seen: list[BucketManifest] = field(default_factory=list)

    def plan(self, kind: str = "", nth: int = 2) -> None:
        self.kind = kind
        self.nth = nth
        self.seen.clear()


class DamagedTransport:
    """The transport of a run but for one bucket."""

    def __init__(self, transport: BucketTransport, damage: Damage, directory: Path) -> None:
        self.transport = transport
        self.damage = damage
        self.directory = directory
        self.engine_name = transport.engine_name
        self.num_reading_ranks = transport.num_reading_ranks
        self.prepare_sync = transport.prepare_sync

    @property
    def bucket_memory(self) -> Any:
        return self.transport.bucket_memory

    def deliver_bucket(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        self.damage.seen.append(manifest)
        if len(self.damage.seen) != self.damage.nth:
            return self.transport.deliver_bucket(manifest, bucket)
        if self.damage.kind == "lost":
            return DeliveryTraffic()
        if self.damage.kind == "doubled":
            self.transport.deliver_bucket(manifest, bucket)
        if self.damage.kind == "killed":
            self.damage.kill()
        if self.damage.kind == "flipped":
            return self._deliver_flipped(manifest, bucket)
        return self.transport.deliver_bucket(manifest, bucket)

    def _deliver_flipped(self, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        """One bit, where the engine takes the bytes from."""
        place = manifest.tensors[0].offset + 5
        if self.bucket_memory == "device_memory":
            bucket = bucket.clone()
            bucket[place] ^= 8
            return self.transport.deliver_bucket(manifest, bucket)
        with (self.directory / manifest.file).open("r+b") as file:
            file.seek(manifest.file_offset + place)
            value = file.read(1)[0]
            file.seek(manifest.file_offset + place)
            file.write(bytes([value ^ 8]))
            file.flush()
            try:
                return self.transport.deliver_bucket(manifest, bucket)
            finally:
                file.seek(manifest.file_offset + place)
                file.write(bytes([value]))


@dataclass
class Rig:
    group: InlineWorkerGroup
    servers: EngineServers
    transfer: Path
    model: Path
    damage: Damage
    version: int = 0

    def syncing(self, transport: WeightTransport, has_loader: bool = True) -> WeightSync:
        """A sync of a fresh fleet, with other weights than the engine has. Without its
        loader it is probed.
        """
        change_weights(self.group, seed=self.version)
        address = replace(self.servers.addresses[0], has_loader=has_loader)
        fleet = EngineFleet([connect_engine(address, self.transfer)], 60.0, 0)
        probe = probe_of(config_of(self.model), self.group)
        return WeightSync(
            RoleProxies(self.group).host,
            fleet,
            self.transfer,
            BUCKET_BYTES,
            "float32",
            self.version,
            probe_engine=probe,
            transport=transport,
            model_path=self.model,
        )

    def sync(self, sync: WeightSync) -> dict[str, float]:
        metrics = sync()
        self.version = sync.policy_version
        return metrics

    def weights(self) -> dict[str, Tensor]:
        """The trainer's, as Hugging Face tensors: one rank holds all."""
        assert self.group._host is not None
        export = self.group._host._roles["actor"].export_shards()  # type: ignore[attr-defined]
        return {
            hf.name: tensor.clone()
            for rule, whole in export
            for hf, tensor in zip(rule.hf_tensors, rule.to_hf(whole), strict=True)
        }

    def check(self, sync: WeightSync) -> None:
        """It serves what the trainer has: by digests, and by the log-probs of what it samples."""
        (engine,) = sync.fleet.live_engines
        weights = self.weights()
        assert engine.get_served_version() == self.version
        digests = {name: format_digest(digest_tensor(tensor)) for name, tensor in weights.items()}
        assert engine.get_weight_digests() == (digests if engine.address.has_loader else None)
        reference = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        reference.load_state_dict(weights)
        for asked, samples in zip(REQUESTS, sync.fleet.generate(REQUESTS), strict=True):
            expected = reference_log_probs(reference.eval(), asked.prompt_ids, samples[0].token_ids)
            assert (torch.tensor(samples[0].log_probs) - expected).abs().max() <= 1e-4


def rig_with(
    servers: EngineServers,
    group: InlineWorkerGroup,
    model: Path,
    transfer: Path,
    patch: pytest.MonkeyPatch,
) -> Rig:
    damage = Damage(kill=lambda: os.killpg(servers.processes[0].pid, signal.SIGKILL))
    for kind in (LocalEngineKind, SGLangEngineKind):

        def damaged(self: EngineKind, *arguments: Any, real: Any = kind.make_transport) -> Any:
            return DamagedTransport(real(self, *arguments), damage, transfer)

        patch.setattr(kind, "make_transport", damaged)
    real_link = LinkTransport.deliver_bucket

    def deliver(self: LinkTransport, manifest: BucketManifest, bucket: Tensor) -> DeliveryTraffic:
        whole: Any = SimpleNamespace(
            engine_name=self.engine_name,
            bucket_memory=self.bucket_memory,
            num_reading_ranks=self.num_reading_ranks,
            prepare_sync=self.prepare_sync,
            deliver_bucket=partial(real_link, self),
        )
        return DamagedTransport(whole, damage, transfer).deliver_bucket(manifest, bucket)

    patch.setattr(LinkTransport, "deliver_bucket", deliver)
    return Rig(group, servers, transfer, model, damage)


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@pytest.fixture(scope="module")
def rig(
    request: pytest.FixtureRequest,
    model: Path,
    group: InlineWorkerGroup,
    patch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Rig]:
    """Stock SGLang, started once."""
    folder = tmp_path_factory.mktemp("sglang")
    transfer = folder / "transfer"
    transfer.mkdir()
    with start_sglang_engines(
        model,
        1,
        folder,
        python=str(sglang_python()),
        transfer_dir=transfer,
        dtype="float32",
        arguments={**CPU_ARGUMENTS, "context_length": 256},
        env=CPU_ENV,
        startup_timeout_s=STARTUP_S,
    ) as servers:
        yield rig_with(servers, group, model, transfer, patch)


@pytest.mark.parametrize("transport", [pytest.param(name, marks=on_sglang) for name in TRANSPORTS])
def test_syncs_one_after_the_other(rig: Rig, transport: WeightTransport) -> None:
    """Of the same process and server: the group is kept, old versions of files go; and the same
    version again.
    """
    rig.damage.plan()
    sync = rig.syncing(transport)
    groups = rig.group._host._roles["host"]._engine_groups._group_by_engine  # type: ignore[union-attr, attr-defined]
    used = []
    for _ in range(2):
        metrics = rig.sync(sync)
        used.append(groups.get("engine0"))
        rig.check(sync)
        assert (
            metrics["sync/bytes_moved"]
            == metrics["sync/bytes_needed"]
            == metrics["sync/num_bytes"]
            > 0
        )
        change_weights(rig.group, seed=50 + rig.version)
    rig.sync(sync)
    sync.resync_engines(sync.fleet.engines)
    rig.check(sync)
    assert (used[0] is not None or transport != "process_group") and groups.get("engine0") is used[
        0
    ] is used[1]
    versions = [path.name for path in rig.transfer.glob("version-*")]
    assert versions == ([f"version-{rig.version}"] if transport == "disk" else [])


@pytest.mark.parametrize("transport", [pytest.param(name, marks=on_sglang) for name in TRANSPORTS])
def test_a_server_without_the_loader_of_the_run(
    rig: Rig, transport: WeightTransport, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's plain update calls bring the weights; what is lost on the way is found by the
    probe that follows.
    """
    rig.damage.plan()
    sync = rig.syncing(transport, has_loader=False)
    metrics = rig.sync(sync)
    rig.check(sync)
    assert metrics["sync/bytes_moved"] == metrics["sync/num_bytes"] > 0
    if transport == "disk":
        return  # it reads a whole directory
    change_weights(rig.group, seed=90)
    rig.damage.plan("lost")
    with caplog.at_level(logging.WARNING), pytest.raises(EngineError):
        sync()
    assert sync.fleet.live_engines == () and "log-prob" in caplog.text
    rig.version += 1  # it was committed, and set aside by the probe
    rig.damage.plan()
    rig.sync(sync)
    rig.check(sync)


@pytest.mark.parametrize("kind", ["flipped", "lost"])
@pytest.mark.parametrize("transport", [pytest.param(name, marks=on_sglang) for name in TRANSPORTS])
def test_a_damaged_bucket_is_refused_and_the_next_sync_mends(
    rig: Rig, transport: WeightTransport, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    sync = rig.syncing(transport)
    rig.damage.plan(kind)
    with caplog.at_level(logging.WARNING):
        rig.sync(sync)
    assert sync.fleet.live_engines == () and sync.fleet.engines[0].get_served_version() is None
    named = rig.damage.seen[1].tensors[0].name
    words = named if kind == "flipped" else "never came whole"
    assert any(
        words in record.getMessage() or named in record.getMessage() for record in caplog.records
    )
    with pytest.raises(EngineError, match="STALE"):
        sync.fleet.engines[0].generate(REQUESTS, 10.0)
    rig.damage.plan()
    rig.sync(sync)
    rig.check(sync)


@pytest.mark.parametrize("transport", [pytest.param(name, marks=on_sglang) for name in TRANSPORTS])
def test_a_bucket_that_comes_twice_changes_nothing(rig: Rig, transport: WeightTransport) -> None:
    sync = rig.syncing(transport)
    rig.damage.plan("doubled")
    rig.sync(sync)
    rig.check(sync)


@pytest.mark.parametrize("transport", [pytest.param("process_group", marks=on_sglang)])
def test_a_port_that_is_refused(
    rig: Rig,
    transport: WeightTransport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig.damage.plan()
    sync = rig.syncing(transport)
    rig.group._host._roles["host"]._engine_groups.close()  # type: ignore[union-attr, attr-defined]
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(
            process_group_transport, "find_address_towards_url", lambda url: "192.0.2.1"
        )
        rig.sync(sync)
    assert sync.fleet.live_engines == () and "cannot listen on 192.0.2.1" in caplog.text
    rig.sync(sync)
    rig.check(sync)


@pytest.mark.parametrize("transport", [pytest.param("disk", marks=on_sglang)])
def test_a_disk_that_is_full(rig: Rig, transport: WeightTransport) -> None:
    sync = rig.syncing(transport)
    rig.damage.plan()
    refuse_a_full_disk(sync)
    rig.sync(sync)
    rig.check(sync)


def refuse_a_full_disk(sync: WeightSync) -> None:
    """The sender says so, and the engine is STALE."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # the kernel refuses what would be larger
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(ValueError, match=r"no room for weights at .*rollout\.transfer_dir"):
            sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(EngineError, match="STALE"):
        sync.fleet.engines[0].generate(REQUESTS, 10.0)


@pytest.mark.parametrize("transport", [pytest.param(name, marks=on_sglang) for name in TRANSPORTS])
def test_an_engine_that_is_killed_in_a_bucket(rig: Rig, transport: WeightTransport) -> None:
    """It is left out and nothing waits for it; started again, the next sync gives it everything."""
    sync = rig.syncing(transport)
    rig.damage.plan("killed")
    try:
        rig.sync(sync)
    except EngineError as error:  # nobody is left
        assert "engine0" in str(error)
    assert sync.fleet.live_engines == ()
    rig.servers.restart_server("engine0")
    rig.damage.plan()
    sync = rig.syncing(transport)
    rig.sync(sync)
    rig.check(sync)


def test_files_to_the_bundled_engine(
    model: Path, group: InlineWorkerGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk in between, and a flipped bit."""
    transfer = tmp_path / "transfer"
    transfer.mkdir()
    with start_local_engines(
        model, 1, tmp_path, transfer_dir=transfer, load_weights=False
    ) as servers:
        rig = rig_with(servers, group, model, transfer, monkeypatch)
        sync = rig.syncing("disk")
        metrics = rig.sync(sync)
        rig.check(sync)
        assert (
            metrics["sync/bytes_moved"] == metrics["sync/bytes_needed"] == metrics["sync/num_bytes"]
        )
        change_weights(group, seed=77)
        refuse_a_full_disk(sync)
        rig.damage.plan("flipped")
        rig.sync(sync)
        assert sync.fleet.live_engines == ()
        rig.damage.plan()
        rig.sync(sync)
        rig.check(sync)
        assert [path.name for path in transfer.glob("version-*")] == [f"version-{rig.version}"]

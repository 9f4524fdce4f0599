"""What random schedules of faults run on: a trainer of one rank in this process, two engines, and a
proxy in front of each engine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from benchmarks.chaos.fault_proxy import FaultProxy, ProxyFault
from benchmarks.chaos.task import LAYOUTS, MODEL, overrides, place, write_task
from benchmarks.common import ROOT
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.rollout.engine_interface import EngineAddress, InferenceEngine
from rlhf_megatron.rollout.engine_kinds import connect_engine, get_balancer_kind
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_setup import MIB, EngineSetup
from rlhf_megatron.rollout.fleet.engine_supervisor import SupervisionSettings
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.rank_pools import PoolMember
from rlhf_megatron.runtime.rank_roles import RoleBuilder
from rlhf_megatron.runtime.role_proxies import RoleProxies

SHAKE = 0.05  # standard deviation of what is added to every weight before a sync
# has the arguments for a machine without a GPU
SGLANG_CPU = ROOT / "configs" / "quickstart_sglang.yaml"


@dataclass(frozen=True)
class Pace:
    """Deadlines and what a kind of engine is asked for."""

    request_s: float  # deadline of a generate request; a dropped one costs as much
    health_s: float  # a hung engine costs as much
    kill_every: int  # schedules; a restart takes a second here and half a minute there
    paths: tuple[str, ...]  # that faults are done to


PACES = {
    "local": Pace(
        4.0,
        4.0,
        10,
        (
            "/generate",
            "/begin_weight_update",
            "/commit_weight_update",
            "/weight_digests",
            "/health",
        ),
    ),
    "sglang": Pace(
        8.0,
        10.0,
        25,
        (
            *(
                "/generate",
                "/begin_weight_update",
                "/end_weight_update",
                "/update_weight_version",
                "/flush_cache",
            ),
            *("/pause_generation", "/continue_generation", "/server_info"),
        ),
    ),
}


class Shaker:
    """A role on the rank: new weights without an optimizer step."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @torch.no_grad()
    def shake(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for chunk in self._actor.backend.model.chunks:
            for parameter in chunk.parameters():
                parameter.add_(SHAKE * torch.randn(parameter.shape, generator=generator))


@dataclass
class Proxies:
    """The proxy in front of each engine, made anew when an engine is started again at
    another address.
    """

    servers: EngineServers
    transfer_dir: Path
    stack: ExitStack
    timeout_s: float
    by_name: dict[str, FaultProxy] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)

    def connect(self, address: EngineAddress) -> InferenceEngine:
        self._count(address.name)
        name = address.name
        proxy = FaultProxy(
            address,
            self.transfer_dir,
            kill_engine=lambda: self.servers.kill_server(name),
            hang_engine=lambda: hang(self.servers.get_process(name).pid),
            timeout_s=self.timeout_s,
        )
        self.by_name[name] = self.stack.enter_context(proxy)
        return connect_engine(proxy.address, self.transfer_dir)

    def plan(self, name: str, faults: Sequence[ProxyFault]) -> None:
        """From now on. `nth` of each fault counts from here."""
        self._count(name)
        proxy = self.by_name[name]
        proxy.faults = tuple(
            ProxyFault(
                fault.kind,
                fault.path,
                fault.nth + (proxy.passed[fault.path] if fault.path else proxy.num_buckets),
                seconds=fault.seconds,
                is_hidden=fault.is_hidden,
            )
            for fault in faults
        )

    def _count(self, name: str) -> None:
        if name in self.by_name:
            self.fired.update(fault.kind for fault, _ in self.by_name[name].fired)
            self.by_name[name].fired.clear()

    def totals(self) -> dict[str, int]:
        """Faults that have happened, by kind."""
        for name in self.by_name:
            self._count(name)
        return dict(sorted(self.fired.items()))


def hang(pid: int) -> None:
    """Stop the processes of a server that hold the model: of SGLang its HTTP side goes on, as when
    a kernel hangs.
    """
    children = psutil.Process(pid).children(recursive=True)
    with suppress(psutil.NoSuchProcess):
        schedulers = [child.pid for child in children if "scheduler" in "".join(child.cmdline())]
        for scheduler in schedulers or [pid]:
            os.kill(scheduler, signal.SIGSTOP)


class Stand:
    """Engines serve when it is made; `sync` brings them new weights."""

    def __init__(self, config: RunConfig, directory: Path, stack: ExitStack) -> None:
        self.config = config
        self.directory = directory
        self.pace = PACES[config.rollout.engine]
        transfer = stack.enter_context(
            make_transfer_directory(
                directory / "transfer", EngineSetup.from_config(config).compute_transfer_bytes()
            )
        )
        self.transfer_dir = transfer.path
        servers = EngineSetup.from_config(config).start_servers(directory, transfer.path, None)
        assert isinstance(servers, EngineServers), "engines that were started, not attached"
        self.servers = stack.enter_context(servers)
        self.proxies = Proxies(self.servers, transfer.path, stack, 1.25 * self.pace.request_s)
        build = RoleBuilder(config)

        def build_with_shaker(pool: PoolMember) -> Any:
            roles = dict(build(pool))
            return {**roles, "shaker": Shaker(roles["actor"])}

        self.group = InlineWorkerGroup(build_with_shaker)
        stack.callback(self.group.close)
        self.version = 0
        self._make_fleet()
        stack.callback(lambda: self.fleet.close())

    def _make_fleet(self) -> None:
        rollout = self.config.rollout
        pace = self.pace
        supervision = SupervisionSettings(
            self.servers, self.proxies.connect, 0.5, pace.health_s, max_restarts=10_000
        )
        engines = [self.proxies.connect(address) for address in self.servers.addresses]
        balancer = get_balancer_kind(rollout.router).build_balancer(
            EngineSetup.from_config(self.config), self.directory
        )
        is_closed = rollout.engine == "local"
        self.fleet = EngineFleet(
            engines,
            pace.request_s,
            20,
            supervision=supervision,
            balancer=balancer,
            is_isolated=is_closed,
        )
        bucket_bytes = rollout.update_weights_bucket_megabytes * MIB
        self.sync = WeightSync(
            RoleProxies(self.group).host,
            self.fleet,
            self.transfer_dir,
            bucket_bytes,
            "float32",
            self.version,
        )

    def restart(self) -> None:
        """As a run that is started again would: another fleet, the version kept. Servers that take
        long to start and have not died are those that run.
        """
        self.version = self.sync.policy_version
        self.fleet.close()
        deadline = time.monotonic() + self.config.rollout.startup_timeout_s
        while any(
            call.verb == "restart" and call.seconds is None
            for call in self.fleet.list_recent_calls()
        ):
            assert time.monotonic() < deadline, (
                "a server that was being started again has not come up"
            )
            time.sleep(0.1)
        for address in self.servers.addresses:
            if (
                self.config.rollout.engine == "local"
                or self.servers.describe_exit(address.name) is not None
            ):
                self.servers.restart_server(address.name)
        self._make_fleet()

    def reference(self) -> Any:
        """transformers on the weights that the trainer holds now."""
        from transformers import AutoModelForCausalLM

        directory = self.directory / "hf"
        shutil.rmtree(directory, ignore_errors=True)
        self.group.broadcast_call("host.save_hf", directory=directory).result()
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def tiny_config(directory: Path, engine: str, router: str) -> RunConfig:
    """One rank, two engines, a model of two small layers in several buckets."""
    model = directory / "model"
    model.mkdir(parents=True, exist_ok=True)
    tree = json.loads((MODEL / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**tree, "num_hidden_layers": 2}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, model / name)
    values = {
        **LAYOUTS["inline"],
        **place(directory),
        "model.path": str(model),
        "rollout.num_engines": 2,
    }
    if engine == "sglang":
        values |= {
            "rollout.engine": "sglang",
            "rollout.router": router,
            "trainer.deterministic": False,
        }
        values |= {"rollout.sglang": sglang_on_cpu(), "rollout.max_engine_restarts": 10_000}
    return load_run_config(write_task(directory), overrides(values)).config


def sglang_on_cpu() -> Mapping[str, Any]:
    """Its settings for a machine without a GPU. Seeds count."""
    tree = yaml.safe_load(SGLANG_CPU.read_text())["rollout"]["sglang"]
    paths = {"python": str(ROOT / tree["python"]), "env": {**tree["env"]}}
    paths["env"]["PYTHONPATH"] = str(ROOT / tree["env"]["PYTHONPATH"])
    return {**tree, **paths}

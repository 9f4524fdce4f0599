"""Kinds of engines and of balancers, by the names in `rollout.engine` and `rollout.router`: how each is checked and
started, how engines are spoken to and given weights.

Imports no torch: a kind imports what it needs when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlhf_megatron.registry import Registry

if TYPE_CHECKING:
    from rlhf_megatron.config.schema import RolloutConfig
    from rlhf_megatron.resharding.sender import Place as SenderPlace
    from rlhf_megatron.rollout.engine import Engine, EngineAddress, WeightTransport
    from rlhf_megatron.rollout.fleet.balancer import Balancer
    from rlhf_megatron.rollout.fleet.process import EngineServers, Place, Progress
    from rlhf_megatron.rollout.fleet.start import EngineSetup
    from rlhf_megatron.rollout.sglang.attach import AttachedEngines
    from rlhf_megatron.rollout.transports.base import Transport
    from rlhf_megatron.rollout.transports.links import LinkVerbs
    from rlhf_megatron.rollout.transports.process_group import Groups


class EngineKind:
    """A kind of engine. `start` and `connect` are its own; the rest fits an engine whose servers need no check and
    whose client reads buckets from files. The configuration reads what stands here before any of it is called."""

    settings: ClassVar[tuple[str, ...]] = ()  # full keys that it reads and not every engine does
    transports: ClassVar[tuple[str, ...]] = ("tensor", "disk")  # values of rollout.weight_transport
    quantizations: ClassVar[tuple[str, ...]] = ()  # values of rollout.quantization that it can hold
    can_attach: ClassVar[bool] = False  # to running servers, rollout.endpoints
    is_elsewhere: ClassVar[bool] = False  # servers may run on machines without a rank

    @staticmethod
    def refused(rollout: RolloutConfig, is_deterministic: bool) -> Iterator[tuple[str, str]]:
        """(full key, value with rule and fix) of each setting that no server of this kind can have in training.

        `is_deterministic`: trainer.deterministic. It is asked before anything of the engine is there.
        """
        return iter(())

    def check(self, setup: EngineSetup) -> None:
        """Raise ValueError, with the fix, where servers could not be started. Starts nothing."""

    def start(
        self, setup: EngineSetup, run_dir: Path, transfer_dir: Path, progress: Progress | None, place: Place
    ) -> EngineServers | AttachedEngines:
        """Start `setup.rollout.num_engines` servers without weights, where `place` says, and wait until all are
        healthy; or take those of `rollout.endpoints`, where it `can_attach`. Raises EngineError."""
        raise NotImplementedError(f"{type(self).__name__} starts no servers; name running ones in rollout.endpoints.")

    def connect(self, address: EngineAddress, transfer_dir: Path) -> Engine:
        """Make a client. `transfer_dir`: where weight buckets and receipts lie."""
        raise NotImplementedError

    def transport(
        self, address: EngineAddress, kind: WeightTransport, transfer_dir: Path, place: SenderPlace, groups: Groups
    ) -> Transport:
        """Make what brings buckets from the rank at `place` to an engine. `groups`: of that rank."""
        from rlhf_megatron.rollout.transports.tensor import FileTransport

        assert kind != "process_group", "config.rules.engines refuses it"
        return FileTransport(self.connect(address, transfer_dir), "files" if kind == "disk" else "shared_memory")

    def link(self, address: EngineAddress, transfer_dir: Path) -> LinkVerbs:
        """Make what asks an engine to take parts of tensors over a process group, where `transports` says that it
        does."""
        raise NotImplementedError(f"{type(self).__name__} takes no parts of tensors over process groups.")


ENGINES: Registry[type[EngineKind]] = Registry("engine")


class BalancerKind:
    """A way to spread requests over engines. `build` is its own; the configuration reads the rest before that."""

    settings: ClassVar[tuple[str, ...]] = ()  # full keys that it reads, also where the run starts no servers
    engine_setting: ClassVar[str] = ""  # full key that the engine must read as well; "": any engine will do
    min_engines: ClassVar[int] = 1
    no_turns: ClassVar[str] = ""  # why it cannot be had with rollout.colocated, after "would"; "": it can
    asks_engines: ClassVar[bool] = True  # one by one, so that drivers on their machines can do it

    def check(self, rollout: RolloutConfig) -> None:
        """Raise ValueError, with the fix, where it could not be built. Starts nothing."""

    def build(self, setup: EngineSetup, run_dir: Path) -> Balancer:
        """Make who spreads requests, started. Raises ValueError and EngineError."""
        raise NotImplementedError


BALANCERS: Registry[type[BalancerKind]] = Registry("balancer")


@ENGINES.register("local")
class LocalKind(EngineKind):
    """The bundled server."""

    settings = ("rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.num_drivers")
    transports = ("tensor", "process_group", "disk")
    quantizations = ("fp8",)

    def start(
        self, setup: EngineSetup, run_dir: Path, transfer_dir: Path, progress: Progress | None, place: Place
    ) -> EngineServers:
        from rlhf_megatron.parallel.device import has_accelerator, visible_devices
        from rlhf_megatron.rollout.fleet.process import here
        from rlhf_megatron.rollout.local.process import devices_of, start_local_engines

        rollout, trainer = setup.rollout, setup.trainer
        use_cuda = trainer.device == "cuda" or (trainer.device == "auto" and has_accelerator())
        visible = visible_devices() if use_cuda and place is here else []  # elsewhere a seat has them
        return start_local_engines(
            setup.model.path,
            rollout.num_engines,
            run_dir,
            transfer_dir=transfer_dir,
            dtype=setup.dtype,
            device="cuda" if use_cuda else "cpu",
            load_weights=False,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            quantization=rollout.quantization,
            deterministic=trainer.deterministic,
            startup_timeout_s=rollout.startup_timeout_s,
            env=devices_of(rollout.num_engines, visible, trainer.n_gpus_per_node, rollout.colocated),
            progress=progress,
            place=place,
        )

    def connect(self, address: EngineAddress, transfer_dir: Path) -> Engine:
        from rlhf_megatron.rollout.local.client import LocalEngine

        return LocalEngine(address)

    def transport(
        self, address: EngineAddress, kind: WeightTransport, transfer_dir: Path, place: SenderPlace, groups: Groups
    ) -> Transport:
        from rlhf_megatron.rollout.local.client import LocalEngine
        from rlhf_megatron.rollout.transports.tensor import LocalTensorTransport

        if kind == "tensor":
            return LocalTensorTransport(LocalEngine(address))
        return super().transport(address, kind, transfer_dir, place, groups)

    def link(self, address: EngineAddress, transfer_dir: Path) -> LinkVerbs:
        from rlhf_megatron.rollout.local.client import LocalEngine
        from rlhf_megatron.rollout.transports.links import LocalLinkVerbs

        return LocalLinkVerbs(LocalEngine(address))


@ENGINES.register("sglang")
class SGLangKind(EngineKind):
    """Stock SGLang."""

    settings = ("rollout.sglang", "rollout.num_drivers")
    transports = ("tensor", "process_group", "disk")
    quantizations = ("fp8",)
    can_attach = True
    is_elsewhere = True

    @staticmethod
    def refused(rollout: RolloutConfig, is_deterministic: bool) -> Iterator[tuple[str, str]]:
        from rlhf_megatron.rollout.sglang.environment import refused_arguments

        return refused_arguments(rollout.sglang, is_deterministic, rollout.colocated)

    def check(self, setup: EngineSetup) -> None:
        from rlhf_megatron.rollout.engine import EngineError
        from rlhf_megatron.rollout.sglang.attach import endpoints_of, look_at_all
        from rlhf_megatron.rollout.sglang.environment import check_communicators, check_sglang, on_cpu

        sglang, trainer = setup.rollout.sglang, setup.trainer
        if setup.rollout.endpoints:
            try:
                look_at_all(*endpoints_of(setup))
            except EngineError as error:
                raise ValueError(str(error)) from error
            return
        found = check_sglang(
            sglang.python,
            sglang.args,
            sglang.env,
            deterministic=trainer.deterministic,
            num_engines=setup.rollout.num_engines,
            machine=setup.machine(setup.is_placed),
        )
        if setup.rollout.weight_transport == "process_group" and not on_cpu(found.arguments.values, sglang.env):
            check_communicators(sglang.python, sglang.env)

    def start(
        self, setup: EngineSetup, run_dir: Path, transfer_dir: Path, progress: Progress | None, place: Place
    ) -> EngineServers | AttachedEngines:
        from rlhf_megatron.rollout.sglang.attach import AttachedEngines, endpoints_of

        if setup.rollout.endpoints:
            return AttachedEngines(*endpoints_of(setup), transfer_dir)
        return self.serve(setup, run_dir, transfer_dir, progress, place)

    def serve(
        self,
        setup: EngineSetup,
        run_dir: Path,
        transfer_dir: Path,
        progress: Progress | None,
        place: Place,
        key: str | None = None,
    ) -> EngineServers:
        """Start servers. `key`: of all of them; None: one each."""
        from rlhf_megatron.rollout.fleet.process import here
        from rlhf_megatron.rollout.sglang.process import start_sglang_engines

        rollout, trainer = setup.rollout, setup.trainer
        return start_sglang_engines(
            setup.model.path,
            rollout.num_engines,
            run_dir,
            python=rollout.sglang.python,
            transfer_dir=transfer_dir,
            dtype=setup.dtype,
            quantization=rollout.quantization,
            arguments=rollout.sglang.args,
            env=rollout.sglang.env,
            startup_timeout_s=rollout.startup_timeout_s,
            deterministic=trainer.deterministic,
            machine=setup.machine(is_placed=place is not here),
            is_one_machine=trainer.nnodes == 1,
            key=key,
            progress=progress,
            place=place,
        )

    def connect(self, address: EngineAddress, transfer_dir: Path) -> Engine:
        from rlhf_megatron.rollout.sglang.client import SGLangEngine

        return SGLangEngine(address, transfer_dir)

    def transport(
        self, address: EngineAddress, kind: WeightTransport, transfer_dir: Path, place: SenderPlace, groups: Groups
    ) -> Transport:
        from rlhf_megatron.parallel.device import backend
        from rlhf_megatron.rollout.transports.disk import SGLangDiskTransport
        from rlhf_megatron.rollout.transports.process_group import ProcessGroupTransport
        from rlhf_megatron.rollout.transports.tensor import SGLangTensorTransport

        if kind == "process_group":
            return ProcessGroupTransport(address, transfer_dir, str(place.coordinates), backend(place.device), groups)
        if kind == "disk":
            return SGLangDiskTransport(address, transfer_dir)
        return SGLangTensorTransport(address, transfer_dir)

    def link(self, address: EngineAddress, transfer_dir: Path) -> LinkVerbs:
        from rlhf_megatron.rollout.transports.links import SGLangLinkVerbs

        return SGLangLinkVerbs(address, transfer_dir)


@BALANCERS.register("balancer")
class LeastOutstandingKind(BalancerKind):
    """The run itself."""

    def build(self, setup: EngineSetup, run_dir: Path) -> Balancer:
        from rlhf_megatron.rollout.fleet.balancer import LeastOutstanding

        return LeastOutstanding()


@BALANCERS.register("sglang")
class SGLangRouterKind(BalancerKind):
    """sglang-router, a process of the run."""

    settings = ("rollout.sglang.python", "rollout.sglang.env", "rollout.max_engine_restarts")
    engine_setting = "rollout.sglang"
    min_engines = 2
    no_turns = "take engines for dead that have lent their memory"
    asks_engines = False

    def check(self, rollout: RolloutConfig) -> None:
        from rlhf_megatron.rollout.router.process import check_router

        check_router(rollout.sglang.python, rollout.sglang.env)

    def build(self, setup: EngineSetup, run_dir: Path) -> Balancer:
        from rlhf_megatron.rollout.router.balancer import SGLangRouter
        from rlhf_megatron.rollout.router.process import prepare_router

        rollout = setup.rollout
        process = prepare_router(rollout.sglang.python, rollout.sglang.env, run_dir, rollout.startup_timeout_s)
        limits = (rollout.max_engine_restarts, rollout.health_interval_s, rollout.health_timeout_s)
        return SGLangRouter(process, *limits)


def engine_kind(name: str) -> EngineKind:
    """Raises ValueError naming the known kinds."""
    return ENGINES.get(name).build()


def balancer_kind(name: str) -> BalancerKind:
    """Raises ValueError naming the known kinds."""
    return BALANCERS.get(name).build()


def connect(address: EngineAddress, transfer_dir: Path) -> Engine:
    """A client of that engine. `transfer_dir`: where weight buckets and receipts lie."""
    return engine_kind(address.kind).connect(address, transfer_dir)

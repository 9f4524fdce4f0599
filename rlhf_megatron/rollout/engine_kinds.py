"""Kinds of engines and of balancers, by the names in `rollout.engine` and `rollout.router`: how
each is checked and started, how engines are spoken to and given weights.

Imports no torch: a kind imports what it needs when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlhf_megatron.part_hooks import required_hook
from rlhf_megatron.registry import Registry

if TYPE_CHECKING:
    from rlhf_megatron.config.schema import RolloutConfig
    from rlhf_megatron.ranks.resharding.weight_sender import SenderWorld as SenderPlace
    from rlhf_megatron.rollout.engine_interface import (
        EngineAddress,
        InferenceEngine,
        WeightTransport,
    )
    from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
    from rlhf_megatron.rollout.fleet.request_balancer import RequestBalancer
    from rlhf_megatron.rollout.fleet.server_process import (
        EngineServers,
        LaunchPlacement,
        StartProgress,
    )
    from rlhf_megatron.rollout.sglang.attached_engines import AttachedEngines
    from rlhf_megatron.rollout.transports.bucket_transport import BucketTransport
    from rlhf_megatron.rollout.transports.link_transport import EngineLinkVerbs
    from rlhf_megatron.rollout.transports.process_group_transport import EngineProcessGroups


class EngineKind:
    """A kind of engine. `start_servers` and `make_client` are its own; the rest fits an engine
    whose servers need no check and whose client reads buckets from files. The configuration reads
    what stands here before any of it is called.
    """

    setting_keys: ClassVar[
        tuple[str, ...]
    ] = ()  # full keys that it reads and not every engine does
    weight_transports: ClassVar[tuple[str, ...]] = (
        "tensor",
        "disk",
    )  # values of rollout.weight_transport
    quantizations: ClassVar[tuple[str, ...]] = ()  # values of rollout.quantization that it can hold
    can_attach: ClassVar[bool] = False  # to running servers, rollout.endpoints
    can_run_elsewhere: ClassVar[bool] = False  # servers may run on machines without a rank

    @staticmethod
    def find_refused_settings(
        rollout: RolloutConfig, is_deterministic: bool
    ) -> Iterator[tuple[str, str]]:
        """(full key, value with rule and fix) of each setting that no server of this kind can
        have in training.

        `is_deterministic`: trainer.deterministic. It is asked before anything of the
        engine is there.
        """
        return iter(())

    def check_setup(self, setup: EngineSetup) -> None:
        """Raise ValueError, with the fix, where servers could not be started. Starts nothing."""

    def start_servers(
        self,
        setup: EngineSetup,
        run_dir: Path,
        transfer_dir: Path,
        progress: StartProgress | None,
        placement: LaunchPlacement,
    ) -> EngineServers | AttachedEngines:
        """Start `setup.rollout.num_engines` servers without weights, where `placement` says, and
        wait until all are healthy; or take those of `rollout.endpoints`, where it `can_attach`.
        Raises EngineError.
        """
        raise NotImplementedError(
            f"{type(self).__name__} starts no servers; name running ones in rollout.endpoints."
        )

    @required_hook
    def make_client(self, address: EngineAddress, transfer_dir: Path) -> InferenceEngine:
        """Make a client. `transfer_dir`: where weight buckets and receipts lie."""
        raise NotImplementedError

    def make_transport(
        self,
        address: EngineAddress,
        transport_kind: WeightTransport,
        transfer_dir: Path,
        world: SenderPlace,
        process_groups: EngineProcessGroups,
    ) -> BucketTransport:
        """Make what brings buckets from the rank at `world` to an engine.
        `process_groups`: of that rank.
        """
        from rlhf_megatron.rollout.transports.tensor_transport import FileBucketTransport

        assert transport_kind != "process_group", "config.rules.engines refuses it"
        return FileBucketTransport(
            self.make_client(address, transfer_dir),
            "files" if transport_kind == "disk" else "shared_memory",
        )

    def make_link_verbs(self, address: EngineAddress, transfer_dir: Path) -> EngineLinkVerbs:
        """Make what asks an engine to take parts of tensors over a process group, where
        `weight_transports` says that it does.
        """
        raise NotImplementedError(
            f"{type(self).__name__} takes no parts of tensors over process groups."
        )


ENGINES: Registry[type[EngineKind]] = Registry("engine", EngineKind)


class BalancerKind:
    """A way to spread requests over engines. `build_balancer` is its own; the configuration reads
    the rest before that.
    """

    setting_keys: ClassVar[
        tuple[str, ...]
    ] = ()  # full keys that it reads, also where the run starts no servers
    required_engine_setting: ClassVar[str] = (
        ""  # full key that the engine must read as well; "": any engine will do
    )
    min_engines: ClassVar[int] = 1
    colocation_problem: ClassVar[str] = (
        ""  # why it cannot be had with rollout.colocated, after "would"; "": it can
    )
    sends_to_engines: ClassVar[bool] = (
        True  # one by one, so that drivers on their machines can do it
    )

    def check_rollout(self, rollout: RolloutConfig) -> None:
        """Raise ValueError, with the fix, where it could not be built. Starts nothing."""

    @required_hook
    def build_balancer(self, setup: EngineSetup, run_dir: Path) -> RequestBalancer:
        """Make who spreads requests, started. Raises ValueError and EngineError."""
        raise NotImplementedError


BALANCERS: Registry[type[BalancerKind]] = Registry("balancer", BalancerKind)


@ENGINES.register("local")
class LocalEngineKind(EngineKind):
    """The bundled server."""

    setting_keys = ("rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.num_drivers")
    weight_transports = ("tensor", "process_group", "disk")
    quantizations = ("fp8",)

    def start_servers(
        self,
        setup: EngineSetup,
        run_dir: Path,
        transfer_dir: Path,
        progress: StartProgress | None,
        placement: LaunchPlacement,
    ) -> EngineServers:
        from rlhf_megatron.device import has_accelerator, list_visible_devices
        from rlhf_megatron.rollout.fleet.server_process import launch_here
        from rlhf_megatron.rollout.local.local_launch import (
            assign_local_devices,
            start_local_engines,
        )

        rollout = setup.rollout
        trainer = setup.trainer
        use_cuda = trainer.device == "cuda" or (trainer.device == "auto" and has_accelerator())
        visible = (
            list_visible_devices() if use_cuda and placement is launch_here else []
        )  # elsewhere a seat has them
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
            is_deterministic=trainer.deterministic,
            startup_timeout_s=rollout.startup_timeout_s,
            env=assign_local_devices(
                rollout.num_engines, visible, trainer.n_gpus_per_node, rollout.colocated
            ),
            progress=progress,
            placement=placement,
        )

    def make_client(self, address: EngineAddress, transfer_dir: Path) -> InferenceEngine:
        from rlhf_megatron.rollout.local.local_client import LocalEngine

        return LocalEngine(address)

    def make_transport(
        self,
        address: EngineAddress,
        transport_kind: WeightTransport,
        transfer_dir: Path,
        world: SenderPlace,
        process_groups: EngineProcessGroups,
    ) -> BucketTransport:
        from rlhf_megatron.rollout.local.local_client import LocalEngine
        from rlhf_megatron.rollout.transports.tensor_transport import LocalTensorTransport

        if transport_kind == "tensor":
            return LocalTensorTransport(LocalEngine(address))
        return super().make_transport(address, transport_kind, transfer_dir, world, process_groups)

    def make_link_verbs(self, address: EngineAddress, transfer_dir: Path) -> EngineLinkVerbs:
        from rlhf_megatron.rollout.local.local_client import LocalEngine
        from rlhf_megatron.rollout.transports.link_transport import LocalLinkVerbs

        return LocalLinkVerbs(LocalEngine(address))


@ENGINES.register("sglang")
class SGLangEngineKind(EngineKind):
    """Stock SGLang."""

    setting_keys = ("rollout.sglang", "rollout.num_drivers")
    weight_transports = ("tensor", "process_group", "disk")
    quantizations = ("fp8",)
    can_attach = True
    can_run_elsewhere = True

    @staticmethod
    def find_refused_settings(
        rollout: RolloutConfig, is_deterministic: bool
    ) -> Iterator[tuple[str, str]]:
        from rlhf_megatron.rollout.sglang.sglang_environment import find_refused_arguments

        return find_refused_arguments(rollout.sglang, is_deterministic, rollout.colocated)

    def check_setup(self, setup: EngineSetup) -> None:
        from rlhf_megatron.rollout.engine_interface import EngineError
        from rlhf_megatron.rollout.sglang.attached_engines import (
            inspect_all_servers,
            resolve_endpoints,
        )
        from rlhf_megatron.rollout.sglang.sglang_environment import (
            check_nccl_versions,
            check_sglang_environment,
            runs_on_cpu,
        )

        sglang = setup.rollout.sglang
        trainer = setup.trainer
        if setup.rollout.endpoints:
            try:
                inspect_all_servers(*resolve_endpoints(setup))
            except EngineError as error:
                raise ValueError(str(error)) from error
            return
        found = check_sglang_environment(
            sglang.python,
            sglang.args,
            sglang.env,
            is_deterministic=trainer.deterministic,
            num_engines=setup.rollout.num_engines,
            machine_gpus=setup.make_machine_gpus(setup.is_placed_by_launcher),
        )
        if setup.rollout.weight_transport == "process_group" and not runs_on_cpu(
            found.arguments.value_by_option, sglang.env
        ):
            check_nccl_versions(sglang.python, sglang.env)

    def start_servers(
        self,
        setup: EngineSetup,
        run_dir: Path,
        transfer_dir: Path,
        progress: StartProgress | None,
        placement: LaunchPlacement,
    ) -> EngineServers | AttachedEngines:
        from rlhf_megatron.rollout.sglang.attached_engines import AttachedEngines, resolve_endpoints

        if setup.rollout.endpoints:
            return AttachedEngines(*resolve_endpoints(setup), transfer_dir)
        return self.start_own_servers(setup, run_dir, transfer_dir, progress, placement)

    def start_own_servers(
        self,
        setup: EngineSetup,
        run_dir: Path,
        transfer_dir: Path,
        progress: StartProgress | None,
        placement: LaunchPlacement,
        shared_key: str | None = None,
    ) -> EngineServers:
        """Start servers. `shared_key`: of all of them; None: one each."""
        from rlhf_megatron.rollout.fleet.server_process import launch_here
        from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines

        rollout = setup.rollout
        trainer = setup.trainer
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
            is_deterministic=trainer.deterministic,
            machine_gpus=setup.make_machine_gpus(
                is_placed_by_launcher=placement is not launch_here
            ),
            is_one_machine=trainer.nnodes == 1,
            shared_key=shared_key,
            progress=progress,
            placement=placement,
        )

    def make_client(self, address: EngineAddress, transfer_dir: Path) -> InferenceEngine:
        from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine

        return SGLangEngine(address, transfer_dir)

    def make_transport(
        self,
        address: EngineAddress,
        transport_kind: WeightTransport,
        transfer_dir: Path,
        world: SenderPlace,
        process_groups: EngineProcessGroups,
    ) -> BucketTransport:
        from rlhf_megatron.device import choose_distributed_backend
        from rlhf_megatron.rollout.transports.disk_transport import SGLangDiskTransport
        from rlhf_megatron.rollout.transports.process_group_transport import ProcessGroupTransport
        from rlhf_megatron.rollout.transports.tensor_transport import SGLangTensorTransport

        if transport_kind == "process_group":
            return ProcessGroupTransport(
                address,
                transfer_dir,
                str(world.coordinates),
                choose_distributed_backend(world.device),
                process_groups,
            )
        if transport_kind == "disk":
            return SGLangDiskTransport(address, transfer_dir)
        return SGLangTensorTransport(address, transfer_dir)

    def make_link_verbs(self, address: EngineAddress, transfer_dir: Path) -> EngineLinkVerbs:
        from rlhf_megatron.rollout.transports.link_transport import SGLangLinkVerbs

        return SGLangLinkVerbs(address, transfer_dir)


@BALANCERS.register("balancer")
class LeastOutstandingBalancerKind(BalancerKind):
    """The run itself."""

    def build_balancer(self, setup: EngineSetup, run_dir: Path) -> RequestBalancer:
        from rlhf_megatron.rollout.fleet.request_balancer import LeastOutstandingBalancer

        return LeastOutstandingBalancer()


@BALANCERS.register("sglang")
class SGLangRouterBalancerKind(BalancerKind):
    """sglang-router, a process of the run."""

    setting_keys = ("rollout.sglang.python", "rollout.sglang.env", "rollout.max_engine_restarts")
    required_engine_setting = "rollout.sglang"
    min_engines = 2
    colocation_problem = "take engines for dead that have lent their memory"
    sends_to_engines = False

    def check_rollout(self, rollout: RolloutConfig) -> None:
        from rlhf_megatron.rollout.router.router_process import check_router

        check_router(rollout.sglang.python, rollout.sglang.env)

    def build_balancer(self, setup: EngineSetup, run_dir: Path) -> RequestBalancer:
        from rlhf_megatron.rollout.router.router_balancer import SGLangRouterBalancer
        from rlhf_megatron.rollout.router.router_process import prepare_router

        rollout = setup.rollout
        process = prepare_router(
            rollout.sglang.python, rollout.sglang.env, run_dir, rollout.startup_timeout_s
        )
        return SGLangRouterBalancer(
            process,
            max_restarts=rollout.max_engine_restarts,
            health_interval_s=rollout.health_interval_s,
            health_timeout_s=rollout.health_timeout_s,
        )


def get_engine_kind(name: str) -> EngineKind:
    """Raises ValueError naming the known kinds."""
    return ENGINES.get(name).build()


def get_balancer_kind(name: str) -> BalancerKind:
    """Raises ValueError naming the known kinds."""
    return BALANCERS.get(name).build()


def connect_engine(address: EngineAddress, transfer_dir: Path) -> InferenceEngine:
    """A client of that engine. `transfer_dir`: where weight buckets and receipts lie."""
    return get_engine_kind(address.kind).make_client(address, transfer_dir)

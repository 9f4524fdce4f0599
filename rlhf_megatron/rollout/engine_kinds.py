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

    # full keys that it reads and not every engine does
    setting_keys: ClassVar[tuple[str, ...]] = ()
    # values of rollout.weight_transport
    weight_transports: ClassVar[tuple[str, ...]] = "tensor", "disk"
    quantizations: ClassVar[tuple[str, ...]] = ()  # values of rollout.quantization that it can hold
    can_attach: ClassVar[bool] = False  # to running servers, rollout.endpoints
    can_run_elsewhere: ClassVar[bool] = False  # servers may run on machines without a rank

    @staticmethod
    def find_refused_settings(
        rollout: RolloutConfig, is_deterministic: bool
    ) -> Iterator[tuple[str, str]]:
        """Yield (full key, text of the value, the rule and the fix) for each setting that no server
        of this kind can have in training. Called before any part of the engine exists.

        `is_deterministic` is trainer.deterministic.
        """
        return iter(())

    def check_setup(self, setup: EngineSetup) -> None:
        """Raise ValueError, with the fix, where servers could not be started. Start nothing."""

    def start_servers(
        self,
        setup: EngineSetup,
        run_dir: Path,
        transfer_dir: Path,
        progress: StartProgress | None,
        placement: LaunchPlacement,
    ) -> EngineServers | AttachedEngines:
        """Start `setup.rollout.num_engines` servers without weights, each where `placement` puts
        it, and wait until all are healthy; or attach to the servers of `rollout.endpoints`, where
        the kind has `can_attach`. Raise EngineError.
        """
        raise NotImplementedError(
            f"{type(self).__name__} starts no servers; name running ones in rollout.endpoints."
        )

    @required_hook
    def make_client(self, address: EngineAddress, transfer_dir: Path) -> InferenceEngine:
        """Make a client of the engine at `address`. `transfer_dir` is the directory of weight
        buckets and receipts.
        """
        raise NotImplementedError

    def make_transport(
        self,
        address: EngineAddress,
        transport_kind: WeightTransport,
        transfer_dir: Path,
        world: SenderPlace,
        process_groups: EngineProcessGroups,
    ) -> BucketTransport:
        """Make the transport that brings weight buckets from this rank to an engine. `world`
        describes the sending rank, and `process_groups` are that rank's groups with engines.
        """
        from rlhf_megatron.rollout.transports.tensor_transport import FileBucketTransport

        assert transport_kind != "process_group", "config.rules.engines refuses it"
        return FileBucketTransport(
            self.make_client(address, transfer_dir),
            "files" if transport_kind == "disk" else "shared_memory",
        )

    def make_link_verbs(self, address: EngineAddress, transfer_dir: Path) -> EngineLinkVerbs:
        """Make the client of the verbs by which an engine takes parts of tensors over a process
        group, for kinds with "process_group" in `weight_transports`. Raise NotImplementedError for
        others.
        """
        raise NotImplementedError(
            f"{type(self).__name__} takes no parts of tensors over process groups."
        )


ENGINES: Registry[type[EngineKind]] = Registry("engine", EngineKind, call_arguments=())


class BalancerKind:
    """A way to spread requests over engines. `build_balancer` is its own; the configuration reads
    the rest before that.
    """

    # full keys that it reads, also where the run starts no servers
    setting_keys: ClassVar[tuple[str, ...]] = ()
    # full key that the engine must read as well; "": any engine will do
    required_engine_setting: ClassVar[str] = ""
    min_engines: ClassVar[int] = 1
    # why it cannot be had with rollout.colocated, after "would"; "": it can
    colocation_problem: ClassVar[str] = ""
    # one by one, so that drivers on their machines can do it
    sends_to_engines: ClassVar[bool] = True

    def check_rollout(self, rollout: RolloutConfig) -> None:
        """Raise ValueError, with the fix, where the balancer could not be built. Start nothing."""

    @required_hook
    def build_balancer(self, setup: EngineSetup, run_dir: Path) -> RequestBalancer:
        """Build and start the balancer that spreads requests over the engines. Raise ValueError and
        EngineError.
        """
        raise NotImplementedError


BALANCERS: Registry[type[BalancerKind]] = Registry("balancer", BalancerKind, call_arguments=())


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
        """Start bundled servers without weights, on GPUs or on the CPU as the trainer's device
        says, and wait until all are healthy. Raise EngineError.
        """
        from rlhf_megatron.device import has_accelerator, list_visible_devices
        from rlhf_megatron.rollout.fleet.server_process import launch_here
        from rlhf_megatron.rollout.local.local_launch import (
            assign_local_devices,
            start_local_engines,
        )

        rollout = setup.rollout
        trainer = setup.trainer
        use_cuda = trainer.device == "cuda" or (trainer.device == "auto" and has_accelerator())
        # elsewhere a seat has them
        visible = list_visible_devices() if use_cuda and placement is launch_here else []
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
            max_restarts=rollout.max_engine_restarts,
            env=assign_local_devices(
                rollout.num_engines, visible, trainer.n_gpus_per_node, rollout.colocated
            ),
            progress=progress,
            placement=placement,
        )

    def make_client(self, address: EngineAddress, transfer_dir: Path) -> InferenceEngine:
        """Return a client of the bundled server; the transfer directory is not used."""
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
        """Return a transport over shared memory of tensors for "tensor", over files for "disk"."""
        from rlhf_megatron.rollout.local.local_client import LocalEngine
        from rlhf_megatron.rollout.transports.tensor_transport import LocalTensorTransport

        if transport_kind == "tensor":
            return LocalTensorTransport(LocalEngine(address))
        return super().make_transport(address, transport_kind, transfer_dir, world, process_groups)

    def make_link_verbs(self, address: EngineAddress, transfer_dir: Path) -> EngineLinkVerbs:
        """Return the bundled server's verbs for parts of tensors over a process group."""
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
        """Yield (full key, text of the value, the rule and the fix) for each entry of
        rollout.sglang that training cannot have.
        """
        from rlhf_megatron.rollout.sglang.sglang_environment import find_refused_arguments

        return find_refused_arguments(rollout.sglang, is_deterministic, rollout.colocated)

    def check_setup(self, setup: EngineSetup) -> None:
        """Raise ValueError where the servers of rollout.endpoints do not fit the run, or, without
        endpoints, where the Python environment of rollout.sglang.python, its arguments, its GPUs or
        its NCCL (for weight transport process_group) does not. Start nothing.
        """
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
        """Attach to the servers of rollout.endpoints where the setting names some, else start own
        servers.
        """
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
        """Start rollout.num_engines SGLang servers and wait until they are healthy. `shared_key` is
        one API key for all of them; None gives each server its own. Raise EngineError.
        """
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
            max_restarts=rollout.max_engine_restarts,
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
        """Return a client of the SGLang server at `address`."""
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
        """Return the transport to an SGLang server for "process_group", "disk" or "tensor"."""
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
        """Return SGLang's verbs for parts of tensors over a process group."""
        from rlhf_megatron.rollout.transports.link_transport import SGLangLinkVerbs

        return SGLangLinkVerbs(address, transfer_dir)


@BALANCERS.register("balancer")
class LeastOutstandingBalancerKind(BalancerKind):
    """The run itself."""

    def build_balancer(self, setup: EngineSetup, run_dir: Path) -> RequestBalancer:
        """Return the run's own balancer, which starts nothing."""
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
        """Raise ValueError unless sglang-router, in a known version, is installed for
        rollout.sglang.python.
        """
        from rlhf_megatron.rollout.router.router_process import check_router

        check_router(rollout.sglang.python, rollout.sglang.env)

    def build_balancer(self, setup: EngineSetup, run_dir: Path) -> RequestBalancer:
        """Return a balancer that starts sglang-router as a process of the run, and starts it again
        when it dies, at most rollout.max_engine_restarts times. Raise ValueError and EngineError.
        """
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
    """Return an instance of the engine kind of this name. Raise ValueError, with the known
    names.
    """
    return ENGINES.get(name).build()


def get_balancer_kind(name: str) -> BalancerKind:
    """Return an instance of the balancer kind of this name. Raise ValueError, with the known
    names.
    """
    return BALANCERS.get(name).build()


def connect_engine(address: EngineAddress, transfer_dir: Path) -> InferenceEngine:
    """Return a client of the engine at `address`. `transfer_dir` is the directory of weight buckets
    and receipts.
    """
    return get_engine_kind(address.kind).make_client(address, transfer_dir)

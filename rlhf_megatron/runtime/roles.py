"""What stands on a rank of a pool: the roles that the controller can call, built from the configuration.

This is the one place that puts workers, resharding and engine clients together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlhf_megatron.checkpoint.dist_checkpoint import write_together
from rlhf_megatron.checkpoint.hf_reader import HFReader, read_hf_config
from rlhf_megatron.checkpoint.manifest import FileRecord, SaveResult, record_of, records_below
from rlhf_megatron.checkpoint.rng_state import load_rng, save_rng
from rlhf_megatron.checkpoint.source import WeightSource, random_source
from rlhf_megatron.checkpoint.value_model import read_value_model, with_value_head
from rlhf_megatron.config.rules.run import actor_ranks, critic_ranks, has_critic, needs_reference
from rlhf_megatron.config.schema import MegatronConfig, RunConfig
from rlhf_megatron.data.seeds import seed_process
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Head
from rlhf_megatron.parallel.device import device_for, local_rank
from rlhf_megatron.parallel.world import World, create_world, destroy_world, smallest_device
from rlhf_megatron.resharding.export_hf import export_hf
from rlhf_megatron.resharding.sender import SendReport
from rlhf_megatron.rollout.engine import EngineAddress, WeightTransport
from rlhf_megatron.rollout.transports.delivery import deliver_weights
from rlhf_megatron.rollout.transports.process_group import Groups
from rlhf_megatron.runtime.pool import ACTOR, CRITIC, Pool, pool_of_role, pools_of
from rlhf_megatron.runtime.proxies import CriticWorker, HostWorker
from rlhf_megatron.workers.activations import Trained, settled
from rlhf_megatron.workers.actor import Actor
from rlhf_megatron.workers.backend import TrainedBackend
from rlhf_megatron.workers.contract import ForwardWorker, TrainWorker
from rlhf_megatron.workers.critic import Critic
from rlhf_megatron.workers.losses import moving_correction
from rlhf_megatron.workers.megatron import MegatronBackend
from rlhf_megatron.workers.reference import Reference
from rlhf_megatron.workers.trained_model import Phase


class HostRole:
    """Methods that are about the rank and not about one model."""

    def __init__(self, world: World, actor: Actor, reference: Reference | None, model_path: Path) -> None:
        self.world = world
        self.model_path = model_path
        self.actor = actor
        self.reference = reference
        self._groups = Groups()

    def close(self) -> None:
        """Process groups with engines end."""
        self._groups.close()

    def send_weights(
        self,
        version: int,
        engines: list[EngineAddress],
        transfer_dir: Path,
        bucket_bytes: int,
        dtype: str,
        transport: WeightTransport = "tensor",
    ) -> SendReport:
        """The actor's weights to all engines. Every rank takes part; one rank of each pipeline stage sends.

        An engine that fails stands in the report and ends nothing here.
        """
        return deliver_weights(
            self.actor.export(),
            self.actor.backend.exporting,
            self._groups,
            version=version,
            engines=engines,
            transfer_dir=transfer_dir,
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            transport=transport,
        )

    def save_hf(self, directory: Path) -> None:
        """The actor's weights in Hugging Face layout, with configuration and tokenizer of the model that it was."""
        export_hf(
            self.actor.export(),
            self.actor.backend.exporting,
            directory=directory,
            hf_config=self.actor.backend.hf_config,
            dtype=self.actor.dtype,
            companions_from=self.model_path,
        )

    def refresh_reference(self) -> None:
        """The reference becomes the actor as it is now (after a warm-up)."""
        if self.reference is not None:
            self.actor.memory.require("parameters")
            self.actor.backend.sync()
            self.reference.copy_weights(self.actor.backend)

    def save_reference(self, directory: Path) -> SaveResult:
        """The reference in Hugging Face layout, as a part of a checkpoint. What goes wrong is in the result."""
        reference, world = self.reference, self.world
        assert reference is not None, "there is no reference here"

        def write() -> tuple[FileRecord, ...]:
            hf_config, dtype = self.actor.backend.hf_config, self.actor.dtype
            export_hf(
                reference.export(), reference.backend.exporting, directory=directory, hf_config=hf_config, dtype=dtype
            )
            return records_below(directory) if world.rank == 0 else ()

        if reference.is_offloaded:
            reference.onload()
        result = write_together(str(world), write)
        if reference.is_offloaded:
            reference.offload()
        return result

    def load_reference(self, directory: Path) -> None:
        """Undo `save_reference`."""
        assert self.reference is not None, "there is no reference here"
        self.reference.load_hf(directory)

    def save_rng(self, directory: Path) -> SaveResult:
        """This rank's random states, as a part of a checkpoint. What goes wrong is in the result."""
        return _save_rng(directory / f"rank{self.world.rank}.safetensors", self.world)

    def load_rng(self, directory: Path) -> None:
        """Undo `save_rng`. Raises ValueError."""
        load_rng(directory / f"rank{self.world.rank}.safetensors", self.world.device)


class CriticRole(Critic):
    """The critic, and how it is written."""

    tokenizer_path: Path  # set by its maker: the directory whose tokenizer is written with it

    def save_hf(self, directory: Path) -> None:
        """Its weights in Hugging Face layout, as a token classifier of one label. critic.path can name it."""
        export_hf(
            self.export(),
            self.backend.exporting,
            directory=directory,
            hf_config=self.exported_config,
            dtype=self.dtype,
            companions_from=self.tokenizer_path,
        )

    def save_rng(self, directory: Path) -> SaveResult:
        """As `HostRole.save_rng`, for a critic that has ranks of its own."""
        return _save_rng(directory / f"critic_rank{self.world.rank}.safetensors", self.world)

    def load_rng(self, directory: Path) -> None:
        """Undo `save_rng`. Raises ValueError."""
        load_rng(directory / f"critic_rank{self.world.rank}.safetensors", self.world.device)


def _save_rng(path: Path, world: World) -> SaveResult:
    def write() -> tuple[FileRecord, ...]:
        save_rng(path, world.device)
        return (record_of(path.parent.parent, path),)

    return write_together(str(world), write)


class WorldRole:
    """The Megatron world that a pool's roles share."""

    def close(self) -> None:
        """Its process groups end with the pool."""
        destroy_world(is_default_group_ended=False)


def weight_source(path: Path, init_seed: int | None, hf_config: HFConfig, tp: int) -> WeightSource:
    """The weights of a Hugging Face directory, checked against the table; or random ones of its architecture."""
    if init_seed is not None:
        return random_source(hf_config, init_seed)
    reader = HFReader(path)
    reader.check(table_for(hf_config, tp))
    return reader


def settled_config(config: RunConfig, device_bytes: int) -> RunConfig:
    """`config` with both layouts `settled`, by the models that stand on their ranks. `device_bytes`: see there."""
    if config.actor.backend == "fsdp":
        return config  # which layouts of Megatron mean nothing to
    dtype, actor, critic = getattr(torch, config.model.dtype), config.actor, config.critic
    policy = read_hf_config(Path(config.model.path))
    of_actor = [Trained(policy, dtype, actor.ppo_max_token_len_per_gpu)]
    if has_critic(config):
        hf_config = read_hf_config(Path(critic.path)) if critic.path else policy
        tokens = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        values = Trained(hf_config, dtype, tokens, "value")
        if num_ranks := critic_ranks(config):
            megatron = settled(critic.megatron, num_ranks, [values], device_bytes)
            critic = replace(critic, megatron=megatron)
        else:
            of_actor.append(values)
    has_reference = needs_reference(config) and not config.reference.param_offload
    megatron = settled(actor.megatron, actor_ranks(config), of_actor, device_bytes, has_reference)
    return replace(config, actor=replace(actor, megatron=megatron), critic=critic)


@dataclass(frozen=True)
class RoleBuilder:
    """The factory that a launcher calls on every rank of each pool."""

    config: RunConfig

    def __call__(self, pool: Pool) -> dict[str, object]:
        """The roles of this rank of `pool`, by name."""
        config = self.config
        seed = config.trainer.seed
        world = create_world(pool.layout, device_for(config.trainer.device, local_rank()), seed=seed)
        seed_process(seed, 1 + [ACTOR, CRITIC].index(pool.name), world.rank)
        builder = RoleBuilder(settled_config(config, smallest_device(world)))
        roles: dict[str, object] = {"world": WorldRole()}
        if pool.name == ACTOR:
            roles |= builder._actor_roles(world)
        if has_critic(config) and pool.name == pool_of_role([pool.name for pool in pools_of(config)], CRITIC):
            roles[CRITIC] = builder._critic(pool, world)
        return roles

    @property
    def actor_phases(self) -> dict[str, Phase]:
        """The actor's optimizers by phase, in the order in which the run goes through them."""
        config, actor = self.config, self.config.actor
        if config.job == "sft":
            return {"sft": Phase(actor.optim, config.trainer.total_training_steps)}
        alone = config.trainer.critic_warmup if has_critic(config) else 0  # steps in which the critic learns alone
        a_step = actor.ppo_epochs * self._num_mini_batches(actor.mini_batch_size)
        phases = {"rl": Phase(actor.optim, (config.trainer.total_training_steps - alone) * a_step)}
        if config.warmup.max_steps:
            phases = {"warmup": Phase(config.warmup.optim, config.warmup.max_steps), **phases}
        return phases

    @property
    def critic_phases(self) -> dict[str, Phase]:
        """The critic's one optimizer. What `critic` leaves null is as in `actor`."""
        critic, actor = self.config.critic, self.config.actor
        num_mini_batches = self._num_mini_batches(critic.mini_batch_size or actor.mini_batch_size)
        a_step = (critic.ppo_epochs or actor.ppo_epochs) * num_mini_batches
        return {"rl": Phase(critic.optim, self.config.trainer.total_training_steps * a_step)}

    def _num_mini_batches(self, size: int) -> int:
        return self.config.data.train_batch_size * self.config.rollout.n // size

    def _actor_roles(self, world: World) -> dict[str, object]:
        config = self.config
        path = Path(config.model.path)
        hf_config = read_hf_config(path)
        weights = weight_source(path, config.model.init_seed, hf_config, world.layout.tp)
        correction = moving_correction(config.algorithm.rollout_correction)
        backend = self._backend(hf_config, weights, world, config.actor.megatron)
        actor = Actor(backend, config.actor, self.actor_phases, correction)
        reference = self._reference(hf_config, weights, world) if needs_reference(config) else None
        trains: TrainWorker = actor  # mypy compares what stands here with what the proxies call
        host: HostWorker = HostRole(world, actor, reference, path)
        scores: ForwardWorker | None = reference
        roles: dict[str, object] = {"actor": trains, "host": host}
        return roles if scores is None else {**roles, "reference": scores}

    def _backend(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        megatron: MegatronConfig,
        head: Head = "vocabulary",
        is_frozen: bool = False,
    ) -> TrainedBackend:
        dtype = getattr(torch, self.config.model.dtype)
        if self.config.actor.backend == "fsdp":
            from rlhf_megatron.workers.fsdp import FSDPBackend  # imports transformers

            return FSDPBackend(hf_config, weights, world, dtype, self.config.actor.fsdp, head, is_frozen)
        return MegatronBackend(hf_config, weights, world, dtype, megatron, head, is_frozen)

    def _critic(self, pool: Pool, world: World) -> CriticWorker:
        """From critic.path, else as the policy starts: the same weights, loaded or random."""
        config, critic, seed = self.config, self.config.critic, self.config.model.init_seed
        path = Path(critic.path or config.model.path)
        hf_config = read_hf_config(path)
        source: WeightSource
        if critic.path is None and seed is not None:
            source = random_source(hf_config, seed)
        else:
            source = read_value_model(path, table_for(hf_config, head="value"))
        first = with_value_head(source, critic.value_head_init_std, config.trainer.seed)
        megatron = critic.megatron if pool.name == CRITIC else config.actor.megatron
        backend = self._backend(hf_config, first, world, megatron, head="value")
        role = CriticRole(backend, critic, self.critic_phases, config.trainer.seed)
        role.tokenizer_path = Path(config.model.path)
        return role

    def _reference(self, hf_config: HFConfig, weights: WeightSource, world: World) -> Reference:
        actor, reference = self.config.actor, self.config.reference
        if reference.path is not None:
            path = Path(reference.path)
            hf_config = read_hf_config(path)
            weights = weight_source(path, None, hf_config, world.layout.tp)
        backend = self._backend(hf_config, weights, world, actor.megatron, is_frozen=True)
        return Reference(backend, actor.log_prob_chunk_size, actor.kernels, is_offloaded=reference.param_offload)

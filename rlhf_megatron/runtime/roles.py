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
from rlhf_megatron.checkpoint.value_model import (
    read_value_model,
    reward_model_config,
    scoring_model,
    with_value_head,
)
from rlhf_megatron.config.rules.run import (
    actor_ranks,
    critic_ranks,
    has_critic,
    has_reward_model,
    has_teacher,
    needs_reference,
    reference_ranks,
    teaching,
)
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
from rlhf_megatron.runtime.pool import ACTOR, CRITIC, POOLS, REFERENCE, REWARD_MODEL, Pool, pool_of_role, pools_of
from rlhf_megatron.runtime.proxies import CriticWorker, HostWorker
from rlhf_megatron.workers.activations import Trained, settled
from rlhf_megatron.workers.actor import Actor
from rlhf_megatron.workers.backend import TrainedBackend
from rlhf_megatron.workers.contract import ScoreWorker, TeachingWorker, TrainWorker, ValueWorker
from rlhf_megatron.workers.critic import Critic
from rlhf_megatron.workers.frozen import RewardModel
from rlhf_megatron.workers.losses import distillation_params, distillation_row_loss, moving_correction
from rlhf_megatron.workers.megatron import MegatronBackend
from rlhf_megatron.workers.reference import Reference
from rlhf_megatron.workers.routes import ReplayMode
from rlhf_megatron.workers.trained_model import Phase


class HostRole:
    """Methods that are about the rank and not about one model."""

    def __init__(
        self,
        world: World,
        actor: Actor | Critic,
        reference: Reference | None,
        model_path: Path,
        hf_config: HFConfig | None = None,
    ) -> None:
        """`hf_config`: that the weights are exported with, where it is not the policy's."""
        self.world = world
        self.model_path = model_path
        self.exported_config = hf_config or actor.backend.hf_config
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
        ranks_per_machine: int | None = None,
    ) -> SendReport:
        """Send the actor's weights to all engines, as `deliver_weights` says. Every rank takes part.

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
            ranks_per_machine=ranks_per_machine,
        )

    def save_hf(self, directory: Path) -> None:
        """Write the actor in Hugging Face layout, with configuration and tokenizer of the model that it was."""
        export_hf(
            self.actor.export(),
            self.actor.backend.exporting,
            directory=directory,
            hf_config=self.exported_config,
            dtype=self.actor.dtype,
            companions_from=self.model_path,
        )

    def refresh_reference(self) -> None:
        """Make the reference the actor as it is now (after a warm-up)."""
        if self.reference is not None:
            self.actor.memory.require("parameters")
            self.actor.backend.sync()
            self.reference.copy_weights(self.actor.backend)

    def save_reference(self, directory: Path) -> SaveResult:
        """Write the reference in Hugging Face layout, as a part of a checkpoint. What goes wrong is in the result."""
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
        """Write its weights in Hugging Face layout, as a token classifier of one label. critic.path can name it."""
        export_hf(
            self.export(),
            self.backend.exporting,
            directory=directory,
            hf_config=self.exported_config,
            dtype=self.dtype,
            companions_from=self.tokenizer_path,
        )

    def save_rng(self, directory: Path) -> SaveResult:
        """Save random states as `HostRole.save_rng` does, for a critic that has ranks of its own."""
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
        """End the process groups with the pool."""
        destroy_world(is_default_group_ended=False)


def weight_source(path: Path, init_seed: int | None, hf_config: HFConfig, tp: int) -> WeightSource:
    """Return the weights of a Hugging Face directory, checked against the table; or random ones of its architecture."""
    if init_seed is not None:
        return random_source(hf_config, init_seed)
    reader = HFReader(path)
    reader.check(table_for(hf_config, tp))
    return reader


@dataclass(frozen=True)
class RoleBuilder:
    """The factory that a launcher calls on every rank of each pool."""

    config: RunConfig

    def __call__(self, pool: Pool) -> dict[str, object]:
        """The roles of this rank of `pool`, by name."""
        config = self.config
        seed = config.trainer.seed
        world = create_world(pool.layout, device_for(config.trainer.device, local_rank()), seed=seed)
        seed_process(seed, 1 + POOLS.index(pool.name), world.rank)
        builder = self.settled(smallest_device(world))
        roles: dict[str, object] = {"world": WorldRole()}
        if config.job == "reward-model":
            return roles | builder._reward_model_roles(world)
        if pool.name == ACTOR:
            roles |= builder._actor_roles(world)
        names = [one.name for one in pools_of(config)]
        if has_critic(config) and pool.name == pool_of_role(names, CRITIC):
            roles[CRITIC] = builder._critic(pool, world)
        if has_reward_model(config) and pool.name == pool_of_role(names, REWARD_MODEL):
            scores: ScoreWorker = builder._reward_model(pool, world)
            roles[REWARD_MODEL] = scores
        if pool.name == REFERENCE:
            hf_config = read_hf_config(Path(config.model.path))
            teaches: TeachingWorker = builder._reference(hf_config, None, world, config.reference.megatron)
            roles[REFERENCE] = teaches
        return roles

    def settled(self, device_bytes: int) -> RoleBuilder:
        """Itself with both layouts `settled`, by the models that stand on their ranks. `device_bytes`: see there."""
        config = self.config
        if config.actor.backend == "fsdp":
            return self  # which layouts of Megatron mean nothing to
        dtype, actor, critic = getattr(torch, config.model.dtype), config.actor, config.critic
        policy = read_hf_config(Path(config.model.path))
        head: Head = "value" if config.job == "reward-model" else "vocabulary"
        of_actor = [Trained(policy, dtype, actor.ppo_max_token_len_per_gpu, head)]
        if has_critic(config):
            hf_config = read_hf_config(Path(critic.path)) if critic.path else policy
            tokens = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
            values = Trained(hf_config, dtype, tokens, "value")
            if num_ranks := critic_ranks(config):
                megatron = settled(critic.megatron, num_ranks, [values], device_bytes)
                critic = replace(critic, megatron=megatron)
            else:
                of_actor.append(values)
        has_reference = needs_reference(config) and not reference_ranks(config) and not config.reference.param_offload
        megatron = settled(actor.megatron, actor_ranks(config), of_actor, device_bytes, has_reference)
        return RoleBuilder(replace(config, actor=replace(actor, megatron=megatron), critic=critic))

    @property
    def actor_phases(self) -> dict[str, Phase]:
        """The actor's optimizers by phase, in the order in which the run goes through them."""
        config, actor = self.config, self.config.actor
        if config.job != "train":
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
        replay = config.actor.router_replay
        backend = self._backend(hf_config, weights, world, config.actor.megatron, router_replay=replay)
        distillation = distillation_row_loss(*teaching(config)) if has_teacher(config) else None
        actor = Actor(backend, config.actor, self.actor_phases, correction, distillation)
        is_here = needs_reference(config) and not reference_ranks(config)
        reference = self._reference(hf_config, weights, world, config.actor.megatron) if is_here else None
        trains: TrainWorker = actor  # mypy compares what stands here with what the proxies call
        host: HostWorker = HostRole(world, actor, reference, path)
        scores: TeachingWorker | None = reference
        roles: dict[str, object] = {"actor": trains, "host": host}
        return roles if scores is None else {**roles, REFERENCE: scores}

    def _reward_model_roles(self, world: World) -> dict[str, object]:
        """The model that learns stands where the policy does in other jobs; its output layer has one label."""
        config = self.config
        hf_config = read_hf_config(Path(config.model.path))
        first = self._value_source(None, hf_config)
        backend = self._backend(hf_config, first, world, config.actor.megatron, head="value")
        model = Critic(backend, config.critic, self.actor_phases, config.trainer.seed)
        learns: ValueWorker = model  # mypy compares what stands here with what the proxies call
        host = HostRole(world, model, None, Path(config.model.path), reward_model_config(hf_config))
        return {"actor": learns, "host": host}

    def _backend(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        megatron: MegatronConfig,
        head: Head = "vocabulary",
        is_frozen: bool = False,
        router_replay: ReplayMode = "none",
    ) -> TrainedBackend:
        dtype = getattr(torch, self.config.model.dtype)
        if self.config.actor.backend == "fsdp":
            from rlhf_megatron.workers.fsdp import FSDPBackend  # imports transformers

            lora = self.config.actor.lora if head == "vocabulary" else None
            how = (self.config.actor.fsdp, head, is_frozen, lora, self.config.trainer.seed)
            return FSDPBackend(hf_config, weights, world, dtype, *how)
        return MegatronBackend(hf_config, weights, world, dtype, megatron, head, is_frozen, router_replay)

    def _critic(self, pool: Pool, world: World) -> CriticWorker:
        """Build the critic from critic.path, else from the weights that the policy starts with, loaded or random."""
        config, critic = self.config, self.config.critic
        hf_config = read_hf_config(Path(critic.path or config.model.path))
        first = self._value_source(critic.path, hf_config)
        megatron = critic.megatron if pool.name == CRITIC else config.actor.megatron
        backend = self._backend(hf_config, first, world, megatron, head="value")
        role = CriticRole(backend, critic, self.critic_phases, config.trainer.seed)
        role.tokenizer_path = Path(config.model.path)
        return role

    def _value_source(self, path: str | None, hf_config: HFConfig) -> WeightSource:
        """First weights of a value model: those of `path`, else of the policy as it starts; and a head."""
        config, seed = self.config, self.config.model.init_seed
        source: WeightSource
        if path is None and seed is not None:
            source = random_source(hf_config, seed)
        else:
            source = read_value_model(Path(path or config.model.path), table_for(hf_config, head="value"))
        return with_value_head(source, config.critic.value_head_init_std, config.trainer.seed)

    def _reward_model(self, pool: Pool, world: World) -> RewardModel:
        """Build the reward model from reward_model.path, which has a head of its own."""
        config, chosen = self.config, self.config.reward_model
        path = Path(chosen.path or "")
        hf_config = read_hf_config(path)
        weights = scoring_model(path, table_for(hf_config, head="value"))
        megatron = chosen.megatron if pool.name == REWARD_MODEL else config.actor.megatron
        backend = self._backend(hf_config, weights, world, megatron, head="value", is_frozen=True)
        return RewardModel(backend, REWARD_MODEL, is_offloaded=chosen.param_offload)

    def _reference(
        self, hf_config: HFConfig, weights: WeightSource | None, world: World, megatron: MegatronConfig
    ) -> Reference:
        """`hf_config` and `weights` are the policy's: it is that as it starts, where it has no path of its own."""
        actor, reference = self.config.actor, self.config.reference
        if reference.path is not None:
            path = Path(reference.path)
            student, hf_config = hf_config, read_hf_config(path)
            if has_teacher(self.config) and hf_config.get("vocab_size") != student.get("vocab_size"):
                raise ValueError(
                    f"the teacher at reference.path ({path}) has a vocabulary of {hf_config.get('vocab_size')} and the"
                    f" model one of {student.get('vocab_size')}; name a teacher with the model's tokenizer."
                )
            top_k = distillation_params(*teaching(self.config)).top_k if has_teacher(self.config) else 0
            if top_k > hf_config["vocab_size"]:
                raise ValueError(f"top_k ({top_k}) must be at most the vocabulary's {hf_config['vocab_size']} tokens.")
            weights = weight_source(path, None, hf_config, world.layout.tp)
        assert weights is not None, "a rule demands reference.path of a reference in a pool of its own"
        backend = self._backend(hf_config, weights, world, megatron, is_frozen=True)
        return Reference(backend, actor.log_prob_chunk_size, actor.kernels, is_offloaded=reference.param_offload)

"""What stands on a rank of a pool: the roles that the controller can call, built from
the configuration.

This is the one place that puts workers, resharding and engine clients together.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.config.rules.run_rules import (
    count_actor_ranks,
    count_critic_ranks,
    count_reference_ranks,
    get_teacher_term,
    has_critic,
    has_reward_model,
    has_teacher,
    needs_reference,
)
from rlhf_megatron.config.schema import MegatronConfig, ModelConfig, RunConfig
from rlhf_megatron.data.seeds import seed_process
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.device import read_local_rank, select_rank_device
from rlhf_megatron.ranks.checkpoint.rng_state import load_rng_states, save_rng_states
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import write_on_all_ranks
from rlhf_megatron.ranks.parallel.world import (
    World,
    create_world,
    destroy_world,
    find_smallest_device_memory,
)
from rlhf_megatron.ranks.resharding.export_hf import export_sharded_model_to_hf
from rlhf_megatron.ranks.resharding.weight_sender import SendReport
from rlhf_megatron.ranks.workers.actor import ActorModel
from rlhf_megatron.ranks.workers.actor_losses import (
    make_distillation_row_loss,
    parse_distillation_params,
    parse_loss_side_correction,
)
from rlhf_megatron.ranks.workers.backend_protocols import TrainedBackend
from rlhf_megatron.ranks.workers.critic import CriticModel
from rlhf_megatron.ranks.workers.expert_routes import ReplayMode
from rlhf_megatron.ranks.workers.frozen_model import FrozenRewardModel
from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
from rlhf_megatron.ranks.workers.peak_memory import TrainedModelSpec, resolve_memory_settings
from rlhf_megatron.ranks.workers.reference_model import ReferenceModel
from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
from rlhf_megatron.ranks.workers.worker_protocols import (
    PolicyWorker,
    ScoreWorker,
    TeacherWorker,
    ValueWorker,
)
from rlhf_megatron.rollout.engine_interface import EngineAddress, WeightTransport
from rlhf_megatron.rollout.transports.process_group_transport import EngineProcessGroups
from rlhf_megatron.rollout.transports.weight_delivery import deliver_weights
from rlhf_megatron.runtime.rank_pools import (
    ACTOR,
    CRITIC,
    POOLS,
    REFERENCE,
    REWARD_MODEL,
    PoolMember,
    build_pool_specs,
    find_pool_of_role,
)
from rlhf_megatron.runtime.role_proxies import CriticWorker, HostWorker
from rlhf_megatron.weights.checkpoint_manifest import (
    FileRecord,
    SaveResult,
    make_file_record,
    make_file_records,
)
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config
from rlhf_megatron.weights.lora_adapter import CONFIG as ADAPTER_CONFIG
from rlhf_megatron.weights.value_model import (
    add_value_head,
    choose_pad_token_id,
    describe_classifier_export,
    make_reward_model_config,
    make_zero_bias,
    needs_zero_bias,
    open_scoring_model,
    open_value_model,
)
from rlhf_megatron.weights.weight_source import WeightSource, make_random_source
from rlhf_megatron.weights.weight_table import HeadKind, WeightRule

logger = logging.getLogger(__name__)


class HostRole:
    """The role "host": methods that concern the rank and not one model."""

    def __init__(
        self,
        world: World,
        actor: ActorModel | CriticModel,
        reference: ReferenceModel | None,
        model_path: Path,
        hf_config: HFConfig | None = None,
        has_exported_zero_bias: bool = False,
        tokenizer_path: Path | None = None,
    ) -> None:
        """Keep the models of this rank. `hf_config` is the configuration that exported weights get;
        None takes that of the actor's backend. `has_exported_zero_bias`: exported weights get a
        bias of 0 for the value head, which the actor's head does not have. `tokenizer_path`: the
        directory of the run's tokenizer; None takes `model_path`.
        """
        self.world = world
        self.model_path = model_path
        self.tokenizer_path = tokenizer_path
        self.exported_config = hf_config or actor.backend.hf_config
        self.has_exported_zero_bias = has_exported_zero_bias
        self.actor = actor
        self.reference = reference
        self._engine_groups = EngineProcessGroups()

    def close(self) -> None:
        """Close the process groups that this rank shares with engines."""
        self._engine_groups.close()

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
        """Send the actor's weights to all engines, as `deliver_weights` describes. Every rank takes
        part.

        A failure of an engine is recorded in the report, and is not raised here.
        """
        export = self.actor.export_for_engines(version, getattr(torch, dtype))
        report = deliver_weights(
            export.shards,
            self.actor.backend.export_world,
            self._engine_groups,
            version=version,
            engines=engines,
            transfer_dir=transfer_dir,
            bucket_bytes=bucket_bytes,
            engine_dtype=dtype,
            transport_kind=transport,
            ranks_per_machine=ranks_per_machine,
        )
        return replace(report, lost_update=export.finish_send())

    def save_hf(self, directory: Path) -> None:
        """Write the actor in Hugging Face layout, with the exported configuration and the tokenizer
        files of the model directory.
        """
        world = self.actor.backend.export_world
        added_shards: list[tuple[WeightRule, Tensor | None]] = []
        if self.has_exported_zero_bias and world.is_last_stage:
            added_shards.append(make_zero_bias(self.actor.dtype, world.device))
        export_sharded_model_to_hf(
            chain(self.actor.export_shards(), added_shards),
            world,
            directory=directory,
            hf_config=self.exported_config,
            dtype=self.actor.dtype,
            companions_directory=self.model_path,
            tokenizer_directory=self.tokenizer_path,
        )

    def refresh_reference(self) -> None:
        """Copy the actor's present weights into the reference (after a warm-up), if this rank has a
        reference.
        """
        if self.reference is not None:
            self.actor.offloadable_memory.require_parts(["parameters"])
            self.actor.backend.gather_parameters()
            self.reference.copy_weights_from(self.actor.backend)

    def save_reference(self, directory: Path) -> SaveResult:
        """Write the reference as a part of a checkpoint: in Hugging Face layout, or, where the
        policy has an adapter, the reference's adapter alone, in peft's format. Merged weights would
        be rounded. Every rank takes part. The returned result holds the error of a failed write,
        which is not raised.
        """
        reference = self.reference
        world = self.world
        assert reference is not None, "there is no reference here"
        adapter = reference.backend.adapter

        def write_reference() -> tuple[FileRecord, ...]:
            """Write the reference, and return the records of the files on rank 0, () on other
            ranks.
            """
            if adapter is not None:
                matrices = adapter.gather_matrices()
                if world.rank == 0:
                    adapter.save(directory, matrices, str(self.model_path))
                return make_file_records(directory) if world.rank == 0 else ()
            hf_config = self.actor.backend.hf_config
            dtype = self.actor.dtype
            export_sharded_model_to_hf(
                reference.export_shards(),
                reference.backend.export_world,
                directory=directory,
                hf_config=hf_config,
                dtype=dtype,
            )
            return make_file_records(directory) if world.rank == 0 else ()

        if reference.is_offloaded:
            reference.onload()
        result = write_on_all_ranks(str(world), write_reference)
        if reference.is_offloaded:
            reference.offload()
        return result

    def load_reference(self, directory: Path) -> None:
        """Load the reference's weights from a directory that `save_reference` wrote. Earlier
        versions wrote a reference with an adapter as merged weights, which are loaded as they are.
        """
        assert self.reference is not None, "there is no reference here"
        if (directory / ADAPTER_CONFIG).is_file():
            self.reference.load_adapter(directory)
        else:
            self.reference.load_hf(directory)

    def save_rng(self, directory: Path) -> SaveResult:
        """Write this rank's random states to its own file in `directory`, as a part of a
        checkpoint. Every rank takes part. The returned result holds the error of a failed write,
        which is not raised.
        """
        return _write_rng_together(directory / f"rank{self.world.rank}.safetensors", self.world)

    def load_rng(self, directory: Path) -> None:
        """Restore this rank's random states from a directory that `save_rng` wrote. Raise
        ValueError with the file's name where the file holds no such states.
        """
        load_rng_states(directory / f"rank{self.world.rank}.safetensors", self.world.device)


class CriticRole(CriticModel):
    """The role "critic": the critic, and the ways to write it."""

    policy_path: Path  # set by its maker: the policy's directory, whose tokenizer is written
    tokenizer_path: Path | None  # of the run's tokenizer, where it is not that of the policy

    def save_hf(self, directory: Path) -> None:
        """Write the critic's weights in Hugging Face layout, as a token classifier of one label,
        with the run's tokenizer. critic.path can name the directory.
        """
        export_sharded_model_to_hf(
            self.export_shards(),
            self.backend.export_world,
            directory=directory,
            hf_config=self.exported_config,
            dtype=self.dtype,
            companions_directory=self.policy_path,
            tokenizer_directory=self.tokenizer_path,
        )

    def save_rng(self, directory: Path) -> SaveResult:
        """Write this rank's random states to a file of the critic's, for a critic that has ranks of
        its own. Every rank takes part. The returned result holds the error of a failed write.
        """
        return _write_rng_together(
            directory / f"critic_rank{self.world.rank}.safetensors", self.world
        )

    def load_rng(self, directory: Path) -> None:
        """Restore this rank's random states from a directory that `save_rng` wrote. Raise
        ValueError with the file's name where the file holds no such states.
        """
        load_rng_states(directory / f"critic_rank{self.world.rank}.safetensors", self.world.device)


def _write_rng_together(path: Path, world: World) -> SaveResult:
    """Write this rank's random states to `path`, on all ranks of `world` at the same time. The
    result holds the file's record, or the error of a failed write.
    """

    def write_rng() -> tuple[FileRecord, ...]:
        """Write the random states and return the record of the file."""
        save_rng_states(path, world.device)
        return (make_file_record(path.parent.parent, path),)

    return write_on_all_ranks(str(world), write_rng)


class WorldRole:
    """The role that owns the Megatron world, which the other roles of a pool share."""

    def close(self) -> None:
        """Destroy Megatron's process groups, and leave the default process group to the pool."""
        destroy_world(is_default_group_ended=False)


def find_own_tokenizer_path(model: ModelConfig) -> Path | None:
    """Return the directory of the tokenizer where the model's directory is another one, else
    None.
    """
    return None if model.tokenizer_path is None else Path(model.tokenizer_path)


def choose_trained_head(job: str, use_head_bias: bool) -> HeadKind:
    """Return what stands behind the final norm of the model under the name "actor": the output
    layer of a policy, or the value head of the job reward-model.
    """
    if job != "reward-model":
        return "vocabulary"
    return "value" if use_head_bias else "unbiased_value"


def open_weight_source(
    path: Path, init_seed: int | None, hf_config: HFConfig, tp: int
) -> WeightSource:
    """Return the weights of the Hugging Face directory `path`, after a check of their names and
    shapes against the model's table. With `init_seed`, return random weights of the architecture
    instead.
    """
    if init_seed is not None:
        return make_random_source(hf_config, init_seed)
    reader = HFReader(path)
    reader.check_against_table(make_weight_table(hf_config, tp))
    return reader


@dataclass(frozen=True)
class RoleBuilder:
    """The factory that a launcher calls on every rank of each pool."""

    config: RunConfig

    def __call__(self, pool: PoolMember) -> dict[str, object]:
        """Return the roles of this rank of `pool`, by name. All ranks of the pool must call it: the
        Megatron world and the models are made here.
        """
        config = self.config
        seed = config.trainer.seed
        world = create_world(
            pool.layout, select_rank_device(config.trainer.device, read_local_rank()), seed=seed
        )
        seed_process(seed, 1 + POOLS.index(pool.pool_name), world.rank)
        builder = self.with_settled_layouts(find_smallest_device_memory(world))
        roles: dict[str, object] = {"world": WorldRole()}
        if config.job == "reward-model":
            return roles | builder._build_reward_model_roles(world)
        if pool.pool_name == ACTOR:
            roles |= builder._build_actor_roles(world)
        names = [one.name for one in build_pool_specs(config)]
        if has_critic(config) and pool.pool_name == find_pool_of_role(names, CRITIC):
            roles[CRITIC] = builder._build_critic(pool, world)
        if has_reward_model(config) and pool.pool_name == find_pool_of_role(names, REWARD_MODEL):
            scores: ScoreWorker = builder._build_reward_model(pool, world)
            roles[REWARD_MODEL] = scores
        if pool.pool_name == REFERENCE:
            hf_config = read_hf_config(Path(config.model.path))
            teaches: TeacherWorker = builder._build_reference(
                hf_config, None, world, config.reference.megatron
            )
            roles[REFERENCE] = teaches
        return roles

    def with_settled_layouts(self, device_bytes: int) -> RoleBuilder:
        """Return a builder whose actor and critic layouts have their memory settings resolved for
        `device_bytes`, the memory of the smallest device. Under actor.backend fsdp return this
        builder.
        """
        config = self.config
        if config.actor.backend == "fsdp":
            return self  # which layouts of Megatron mean nothing to
        dtype = getattr(torch, config.model.dtype)
        actor = config.actor
        critic = config.critic
        policy = read_hf_config(Path(config.model.path))
        head = choose_trained_head(config.job, config.sft.use_head_bias)
        of_actor = [TrainedModelSpec(policy, dtype, actor.ppo_max_token_len_per_gpu, head)]
        if has_critic(config):
            hf_config = read_hf_config(Path(critic.path)) if critic.path else policy
            tokens = critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
            values = TrainedModelSpec(hf_config, dtype, tokens, "value")
            if num_ranks := count_critic_ranks(config):
                megatron = resolve_memory_settings(
                    critic.megatron, num_ranks, [values], device_bytes
                )
                critic = replace(critic, megatron=megatron)
            else:
                of_actor.append(values)
        has_reference = (
            needs_reference(config)
            and not count_reference_ranks(config)
            and not config.reference.param_offload
        )
        megatron = resolve_memory_settings(
            actor.megatron, count_actor_ranks(config), of_actor, device_bytes, has_reference
        )
        return RoleBuilder(replace(config, actor=replace(actor, megatron=megatron), critic=critic))

    @property
    def actor_phases(self) -> dict[str, TrainingPhase]:
        """Return the actor's training phases by name ("sft", or "warmup" and "rl"), in the order in
        which the run goes through them. A phase holds the optimizer settings and the number of
        optimizer steps.
        """
        config = self.config
        actor = self.config.actor
        if config.job != "train":
            return {"sft": TrainingPhase(actor.optim, config.trainer.total_training_steps)}
        # steps in which the critic learns alone
        alone = config.trainer.critic_warmup if has_critic(config) else 0
        a_step = actor.ppo_epochs * self._count_mini_batches(actor.mini_batch_size)
        phases = {
            "rl": TrainingPhase(actor.optim, (config.trainer.total_training_steps - alone) * a_step)
        }
        if config.warmup.max_steps:
            phases = {
                "warmup": TrainingPhase(config.warmup.optim, config.warmup.max_steps),
                **phases,
            }
        return phases

    @property
    def critic_phases(self) -> dict[str, TrainingPhase]:
        """Return the critic's only training phase, "rl". Settings that are null in `critic` come
        from `actor`.
        """
        critic = self.config.critic
        actor = self.config.actor
        num_mini_batches = self._count_mini_batches(critic.mini_batch_size or actor.mini_batch_size)
        a_step = (critic.ppo_epochs or actor.ppo_epochs) * num_mini_batches
        return {
            "rl": TrainingPhase(critic.optim, self.config.trainer.total_training_steps * a_step)
        }

    def _count_mini_batches(self, mini_batch_size: int) -> int:
        """Return the number of mini-batches of `mini_batch_size` samples in a rollout batch."""
        return self.config.data.train_batch_size * self.config.rollout.n // mini_batch_size

    def _build_actor_roles(self, world: World) -> dict[str, object]:
        """Build the roles "actor" and "host", and "reference" where the reference shares the
        actor's ranks.
        """
        config = self.config
        path = Path(config.model.path)
        hf_config = read_hf_config(path)
        weights = open_weight_source(path, config.model.init_seed, hf_config, world.layout.tp)
        correction = parse_loss_side_correction(config.algorithm.rollout_correction)
        replay = config.actor.router_replay
        backend = self._build_backend(
            hf_config, weights, world, config.actor.megatron, router_replay=replay
        )
        distillation = (
            make_distillation_row_loss(*get_teacher_term(config)) if has_teacher(config) else None
        )
        actor = ActorModel(backend, config.actor, self.actor_phases, correction, distillation)
        is_here = needs_reference(config) and not count_reference_ranks(config)
        reference = (
            self._build_reference(hf_config, weights, world, config.actor.megatron)
            if is_here
            else None
        )
        trains: PolicyWorker = actor  # mypy compares what stands here with what the proxies call
        host: HostWorker = HostRole(
            world, actor, reference, path, tokenizer_path=find_own_tokenizer_path(config.model)
        )
        scores: TeacherWorker | None = reference
        roles: dict[str, object] = {"actor": trains, "host": host}
        return roles if scores is None else {**roles, REFERENCE: scores}

    def _build_reward_model_roles(self, world: World) -> dict[str, object]:
        """Build the roles of the job reward-model: the reward model that is trained, under the name
        "actor", with an output layer of one label; and "host".
        """
        config = self.config
        path = Path(config.model.path)
        hf_config = read_hf_config(path)
        head = choose_trained_head(config.job, config.sft.use_head_bias)
        first = self._open_value_weights(None, hf_config, head)
        backend = self._build_backend(hf_config, first, world, config.actor.megatron, head)
        model = CriticModel(backend, config.critic, self.actor_phases, config.trainer.seed)
        learns: ValueWorker = model  # mypy compares what stands here with what the proxies call
        tokenizer = load_tokenizer(config.model.tokenizer_path or path, path)
        has_head_bias = config.sft.use_head_bias
        exported_config = make_reward_model_config(
            hf_config, has_head_bias, choose_pad_token_id(tokenizer, int(hf_config["vocab_size"]))
        )
        if world.rank == 0:
            for note in describe_classifier_export(exported_config):
                logger.warning("the exported reward model: %s", note)
        has_zero_bias = not has_head_bias and needs_zero_bias(exported_config)
        host = HostRole(
            world,
            model,
            None,
            path,
            exported_config,
            has_zero_bias,
            find_own_tokenizer_path(config.model),
        )
        return {"actor": learns, "host": host}

    def _build_backend(
        self,
        hf_config: HFConfig,
        weight_source: WeightSource,
        world: World,
        megatron: MegatronConfig,
        head: HeadKind = "vocabulary",
        is_frozen: bool = False,
        router_replay: ReplayMode = "none",
    ) -> TrainedBackend:
        """Build the Megatron or FSDP backend that holds a model's weights on this rank, as
        actor.backend says. `megatron` and `router_replay` have no effect under FSDP.
        """
        dtype = getattr(torch, self.config.model.dtype)
        if self.config.actor.backend == "fsdp":
            from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend  # imports transformers

            has_adapter = head == "vocabulary" and not (
                is_frozen and self._starts_reference_without_adapter()
            )
            return FSDPBackend(
                hf_config,
                weight_source,
                world,
                dtype,
                self.config.actor.fsdp,
                head,
                is_frozen,
                self.config.actor.lora if has_adapter else None,
                self.config.trainer.seed,
            )
        return MegatronBackend(
            hf_config, weight_source, world, dtype, megatron, head, is_frozen, router_replay
        )

    def _starts_reference_without_adapter(self) -> bool:
        """Return whether the reference never has an adapter of the policy: it is another model, or
        the policy has no effective adapter when the reference becomes the policy.
        """
        config = self.config
        return config.reference.path is not None or (
            config.actor.lora.path is None and not config.warmup.max_steps
        )

    def _build_critic(self, pool: PoolMember, world: World) -> CriticWorker:
        """Build the critic from critic.path, or without a path from the weights that the policy
        starts with, loaded or random.
        """
        config = self.config
        critic = self.config.critic
        hf_config = read_hf_config(Path(critic.path or config.model.path))
        first = self._open_value_weights(critic.path, hf_config)
        megatron = critic.megatron if pool.pool_name == CRITIC else config.actor.megatron
        backend = self._build_backend(hf_config, first, world, megatron, head="value")
        role = CriticRole(backend, critic, self.critic_phases, config.trainer.seed)
        role.policy_path = Path(config.model.path)
        role.tokenizer_path = find_own_tokenizer_path(config.model)
        if world.rank == 0:
            for note in describe_classifier_export(role.exported_config):
                logger.warning("the exported critic: %s", note)
        return role

    def _open_value_weights(
        self, path: str | None, hf_config: HFConfig, head: HeadKind = "value"
    ) -> WeightSource:
        """Return the first weights of a value model, whose head is `head`. The weights come from
        `path`, or where `path` is None are the policy's first weights (random with
        model.init_seed).
        """
        config = self.config
        seed = self.config.model.init_seed
        source: WeightSource
        if path is None and seed is not None:
            source = make_random_source(hf_config, seed)
        else:
            source = open_value_model(
                Path(path or config.model.path), make_weight_table(hf_config, head=head)
            )
        return add_value_head(source, config.critic.value_head_init_std, config.trainer.seed)

    def _build_reward_model(self, pool: PoolMember, world: World) -> FrozenRewardModel:
        """Build the frozen reward model from reward_model.path, whose checkpoint has a scoring
        head.
        """
        config = self.config
        chosen = self.config.reward_model
        path = Path(chosen.path or "")
        hf_config = read_hf_config(path)
        weights = open_scoring_model(path, make_weight_table(hf_config, head="value"))
        megatron = chosen.megatron if pool.pool_name == REWARD_MODEL else config.actor.megatron
        backend = self._build_backend(
            hf_config, weights, world, megatron, head="value", is_frozen=True
        )
        return FrozenRewardModel(backend, REWARD_MODEL, is_offloaded=chosen.param_offload)

    def _build_reference(
        self,
        hf_config: HFConfig,
        weight_source: WeightSource | None,
        world: World,
        megatron: MegatronConfig,
    ) -> ReferenceModel:
        """Build the frozen reference (or teacher) from reference.path; without a path, from
        `hf_config` and `weight_source`, which are the policy's.

        Raise ValueError where a teacher's vocabulary differs from the model's, or top_k is larger
        than the vocabulary.
        """
        actor = self.config.actor
        reference = self.config.reference
        if reference.path is not None:
            path = Path(reference.path)
            student = hf_config
            hf_config = read_hf_config(path)
            if has_teacher(self.config) and hf_config.get("vocab_size") != student.get(
                "vocab_size"
            ):
                raise ValueError(
                    f"the teacher at reference.path ({path}) has a vocabulary of"
                    f" {hf_config.get('vocab_size')} and the model one of"
                    f" {student.get('vocab_size')}; name a teacher with the model's tokenizer."
                )
            top_k = (
                parse_distillation_params(*get_teacher_term(self.config)).top_k
                if has_teacher(self.config)
                else 0
            )
            if top_k > hf_config["vocab_size"]:
                raise ValueError(
                    f"top_k ({top_k}) must be at most the vocabulary's"
                    f" {hf_config['vocab_size']} tokens."
                )
            weight_source = open_weight_source(path, None, hf_config, world.layout.tp)
        assert weight_source is not None, (
            "a rule demands reference.path of a reference in a pool of its own"
        )
        backend = self._build_backend(hf_config, weight_source, world, megatron, is_frozen=True)
        return ReferenceModel(
            backend, actor.log_prob_chunk_size, actor.kernels, is_offloaded=reference.param_offload
        )

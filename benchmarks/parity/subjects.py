"""What is compared, in either role: the worker of a rank, what it is asked for, and the
settings that it gets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.parity.cases import Cut, Recipe, Role
from rlhf_megatron.config.rollout_correction_rules import is_bypass_mode
from rlhf_megatron.config.schema import (
    ActorConfig,
    CriticConfig,
    MegatronConfig,
    OptimConfig,
    PolicyLossConfig,
)
from rlhf_megatron.controller.observe.metrics.batch_metrics import make_valid_sample_mask
from rlhf_megatron.controller.scheduler.advantage_stage import compute_correction_columns
from rlhf_megatron.controller.scheduler.mini_batches import (
    make_actor_mini_batch,
    make_critic_mini_batch,
    make_token_selection_mask,
)
from rlhf_megatron.data.batch import (
    CriticValues,
    MiniBatch,
    TokenBatch,
    TokenLogProbs,
    TrainBatch,
    ValueMiniBatch,
)
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.actor_losses import (
    parse_correction_params,
    parse_loss_side_correction,
)
from rlhf_megatron.ranks.workers.expert_routes import ReplayMode
from rlhf_megatron.weights.weight_table import HeadKind, WeightRule

LOSS_SCALE_FACTOR = 16.0  # tokens, of seq-mean-token-sum-norm
HEADS: dict[Role, HeadKind] = {"actor": "vocabulary", "critic": "value"}


@dataclass(frozen=True)
class StateSource:
    """Weights out of a dict of Hugging Face tensors."""

    state: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.state)

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        return tuple(self.state[tensor.name] for tensor in rule.hf_tensors)


class Subject(Protocol):
    """One role on one rank."""

    @property
    def cut(self) -> Cut: ...

    @property
    def megatron(self) -> MegatronConfig: ...

    def make(self, hf_config: dict[str, Any], state: dict[str, Tensor], world: World) -> Any:
        """A new worker that holds `state`. All ranks."""

    def columns(
        self, worker: Any, batch: TokenBatch, plan: ReplicaPlan
    ) -> TokenLogProbs | CriticValues | None:
        """Its token columns, on leaders; None elsewhere. All ranks."""

    def mini_batch(self, part: TrainBatch) -> Any:
        """All samples of `part` as one mini-batch, as the controller would make it."""

    def update(self, worker: Any, mini_batch: Any, plan: ReplicaPlan) -> Any:
        """One optimizer step. All ranks."""


@dataclass(frozen=True)
class ActorSubject:
    cut: Cut
    recipe: Recipe
    megatron: MegatronConfig
    router_replay: ReplayMode = "none"

    def make(self, hf_config: dict[str, Any], state: dict[str, Tensor], world: World) -> Any:
        from rlhf_megatron.ranks.workers.actor import ActorModel
        from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
        from rlhf_megatron.ranks.workers.trained_model import TrainingPhase

        config = actor_config(self.recipe, self.cut, self.megatron)
        phases = {"rl": TrainingPhase(config.optim, len(self.cut.mini_batches))}
        moving = (
            None if self.cut.correction is None else parse_loss_side_correction(self.cut.correction)
        )
        source = StateSource(state)
        replay = self.router_replay
        backend = MegatronBackend(
            hf_config, source, world, torch.float32, self.megatron, router_replay=replay
        )
        return ActorModel(backend, config, phases, correction=moving)

    def columns(self, worker: Any, batch: TokenBatch, plan: ReplicaPlan) -> TokenLogProbs | None:
        found: TokenLogProbs | None = worker.log_probs(
            batch, plan, self.recipe.temperature, with_entropy=True
        )
        return found

    def mini_batch(self, part: TrainBatch) -> MiniBatch:
        loss = actor_config(self.recipe, self.cut, self.megatron).policy_loss
        is_moving = False
        if self.cut.correction is not None:
            is_moving = is_bypass_mode(self.cut.correction)
            params = parse_correction_params(self.cut.correction)
            part = replace(
                part,
                **compute_correction_columns(part, make_valid_sample_mask(part), params, is_moving)[
                    0
                ],
            )
        is_picked = make_token_selection_mask(part, loss, seed=1, step=0, mini_batch_number=0)
        return make_actor_mini_batch(
            part, self.cut.loss_agg_mode, LOSS_SCALE_FACTOR, is_picked, is_moving
        )

    def update(self, worker: Any, mini_batch: MiniBatch, plan: ReplicaPlan) -> Any:
        return worker.update(mini_batch, plan, self.recipe.temperature, "policy")


@dataclass(frozen=True)
class CriticSubject:
    cut: Cut
    recipe: Recipe
    megatron: MegatronConfig

    def make(self, hf_config: dict[str, Any], state: dict[str, Tensor], world: World) -> Any:
        from rlhf_megatron.ranks.workers.critic import CriticModel
        from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
        from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
        from rlhf_megatron.weights.value_model import add_value_head

        config = critic_config(self.recipe, self.cut)
        phases = {"rl": TrainingPhase(config.optim, len(self.cut.mini_batches))}
        source = StateSource(state)
        first = add_value_head(source, config.value_head_init_std, 0)
        backend = MegatronBackend(hf_config, first, world, torch.float32, self.megatron, "value")
        return CriticModel(backend, config, phases, seed=0)

    def columns(self, worker: Any, batch: TokenBatch, plan: ReplicaPlan) -> CriticValues | None:
        found: CriticValues | None = worker.values(batch, plan)
        return found

    def mini_batch(self, part: TrainBatch) -> ValueMiniBatch:
        return make_critic_mini_batch(part, self.cut.loss_agg_mode, LOSS_SCALE_FACTOR)

    def update(self, worker: Any, mini_batch: ValueMiniBatch, plan: ReplicaPlan) -> Any:
        return worker.update(mini_batch, plan)


SUBJECTS: dict[Role, type[ActorSubject] | type[CriticSubject]] = {
    "actor": ActorSubject,
    "critic": CriticSubject,
}


def actor_config(recipe: Recipe, cut: Cut, megatron: MegatronConfig) -> ActorConfig:
    """The settings as a user would write them."""
    return ActorConfig(
        megatron=megatron,
        optim=_optim(recipe),
        policy_loss=cut.policy_loss
        or PolicyLossConfig(
            "ppo_clip",
            {
                "clip_ratio_low": recipe.clip_low,
                "clip_ratio_high": recipe.clip_high,
                "clip_ratio_c": recipe.dual_clip,
            },
        ),
        loss_agg_mode=cut.loss_agg_mode,
        entropy_coeff=recipe.entropy_coef,
        use_kl_loss=True,
        kl_loss_coef=recipe.kl_coef,
        kl_loss_type="k3",
        log_prob_chunk_size=50,
    )


def critic_config(recipe: Recipe, cut: Cut) -> CriticConfig:
    """Likewise."""
    return CriticConfig(
        optim=_optim(recipe),
        cliprange_value=recipe.cliprange_value,
        loss_agg_mode=cut.loss_agg_mode,
    )


def _optim(recipe: Recipe) -> OptimConfig:
    return OptimConfig(
        lr=recipe.lr,
        eps=recipe.adam_eps,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        clip_grad=recipe.max_grad_norm,
    )

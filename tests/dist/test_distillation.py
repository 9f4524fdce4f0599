"""A student of another family learns from a teacher's most likely tokens, on both backends and in
layouts, alone and beside a policy loss; against plain transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import CONFIG, StateSource, megatron_of, shards, share, whole

from rlhf_megatron.config.schema import FSDPConfig, TeacherTermConfig
from rlhf_megatron.data.batch import MiniBatch, TopLogProbs
from rlhf_megatron.data.replica_plan import ReplicaPlan, restore_sample_order
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult

pytestmark = pytest.mark.dist
COUNT = 5
STUDENT = "llama"
TEACHER = "qwen3_tied"


OTHERS_COEF = 0.5
COEF = 2.0


@dataclass(frozen=True)
class Found:
    """Of a rank: what the teacher told and the update on leaders only."""

    plan: ReplicaPlan
    told: TopLogProbs | None
    result: UpdateResult | None
    grads: dict[str, Tensor]


def distil(
    world: World,
    states: dict[str, dict[str, Tensor]],
    batch: MiniBatch,
    loss: str,
    backend: str,
    is_rl: bool = False,
) -> Found:
    """One update towards the teacher, or with `is_rl` of the policy loss and the teacher's term."""
    from rlhf_megatron.algorithms.distillation import DISTILLATION_LOSSES
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.actor_losses import DistillationRowLoss
    from rlhf_megatron.ranks.workers.fsdp_backend import FSDPBackend
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.reference_model import ReferenceModel
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase

    def model(name: str, is_frozen: bool) -> Any:
        kind, section = (
            (FSDPBackend, FSDPConfig())
            if backend == "fsdp"
            else (MegatronBackend, megatron_of(world, {}))
        )
        settings = (world, torch.float32, section, "vocabulary", is_frozen)
        return kind(reference.HF_CONFIGS[name], StateSource(states[name]), *settings)

    row_loss = DistillationRowLoss(DISTILLATION_LOSSES.get(loss).build, has_tail=True)
    config = replace(CONFIG, distillation=TeacherTermConfig(loss, COEF, OTHERS_COEF))
    student = ActorModel(
        model(STUDENT, False),
        config,
        {"sft": TrainingPhase(CONFIG.optim, 10)},
        distillation=row_loss,
    )
    teacher = ReferenceModel(model(TEACHER, True), CONFIG.log_prob_chunk_size, CONFIG.kernels)
    shard, plan = share(world, batch, 40)
    told = teacher.top_log_probs(shard, plan, reference.TEMPERATURE, COUNT)
    of_ranks: list[Any] = [None] * world.layout.world_size
    dist.all_gather_object(of_ranks, (world.coordinates.dp, told))
    (mine,) = [one for dp, one in of_ranks if dp == world.coordinates.dp and one is not None]
    given = replace(shard, teacher_ids=mine.teacher_ids, teacher_log_probs=mine.teacher_log_probs)
    result = student.update(
        given, plan, reference.TEMPERATURE, "policy" if is_rl else "distillation"
    )
    return Found(plan, told, result, shards(student)[0])


CELLS = [
    ("fsdp", {"dp": 2}),
    ("megatron", {"tp": 2, "sequence_parallel": True}),
    ("megatron", {"tp": 2, "pp": 2}),
    ("megatron", {"cp": 2, "dp": 2}),
]


@pytest.mark.parametrize(("backend", "layout"), CELLS)
@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
def test_one_update_equals_transformers(
    dist_pool: DistPool, loss: str, backend: str, layout: dict[str, Any], is_rl: bool = False
) -> None:
    models = {name: reference.make_model(name) for name in (STUDENT, TEACHER)}
    states = {
        name: {k: v.clone() for k, v in model.state_dict().items()}
        for name, model in models.items()
    }
    batch = reference.make_batch()
    if is_rl:
        with torch.no_grad():
            batch = reference.with_past(batch, reference.token_log_probs(models[STUDENT], batch)[0])
    job = {"states": states, "batch": batch, "loss": loss, "backend": backend, "is_rl": is_rl}
    results = dist_pool.run(distil, **job, **layout)

    held: dict[str, Tensor] = {}

    def keep(log_p: Tensor, ids: Tensor) -> dict[str, Tensor]:
        held["teacher"] = log_p.detach()
        return {"likeliest": log_p.amax(-1)}

    def divergence(log_p: Tensor, ids: Tensor) -> dict[str, Tensor]:
        teacher, places = held["teacher"].topk(COUNT, -1)
        p = teacher.exp()
        q = log_p.gather(-1, places).exp()
        p, q = (torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in (p, q))
        return {"loss": (p * (p / q).log() if loss == "forward_kl" else q * (q / p).log()).sum(-1)}

    likeliest = reference.token_columns(models[TEACHER].double(), batch, keep)["likeliest"]
    student = models[STUDENT].double()
    loss_T = reference.token_columns(student, batch, divergence)["loss"]
    if is_rl:
        policy_T = reference.policy_token_loss(*reference.token_log_probs(student, batch), batch)
        loss_T = COEF * loss_T + OTHERS_COEF * policy_T
    value = (loss_T * batch.loss_weights.double()).sum()
    value.backward()

    leaders = [r for r in results if r.told is not None]
    told = restore_sample_order([r.told for r in leaders], [r.plan for r in leaders], batch.offsets)
    assert told.teacher_ids.shape == (batch.num_tokens, COUNT)
    assert (told.teacher_log_probs[:, 0] - likeliest).abs().max() <= 1e-5
    assert bool((told.teacher_log_probs.diff(dim=1) <= 0).all())
    assert sum(r.result.sums["actor/loss"] for r in leaders) == pytest.approx(
        float(value.detach()), rel=1e-5
    )
    parameters = dict(student.named_parameters())
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
    assert leaders[0].result.grad_norm == pytest.approx(float(norm), rel=1e-4)
    clip = min(1.0, reference.CLIP / float(norm))
    if backend == "fsdp":
        found = {name: torch.cat([r.grads[name] for r in results]) for name in results[0].grads}
    else:
        found = whole(
            results,
            STUDENT,
            layout.get("tp", 1),
            layout.get("dp", 1) * layout.get("cp", 1),
            "grads",
        )
    for name, parameter in parameters.items():
        wanted = clip * parameter.grad
        assert (found[name] - wanted).norm() <= 2e-5 * wanted.norm(), name


def test_a_term_beside_the_policy_loss(dist_pool: DistPool) -> None:
    test_one_update_equals_transformers(
        dist_pool, "reverse_kl", "megatron", {"tp": 2, "dp": 2}, is_rl=True
    )

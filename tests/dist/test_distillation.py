"""A student of another family learns from a teacher's most likely tokens on two ranks; against plain transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import workers_reference as reference
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import CONFIG, StateSource, share

from rlhf_megatron.config.schema import FSDPConfig
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.data.plan import restore
from rlhf_megatron.parallel.world import World

pytestmark = pytest.mark.dist
COUNT = 5
STUDENT, TEACHER = "llama", "qwen3_tied"


def distil(world: World, states: dict[str, dict[str, Tensor]], batch: MiniBatch, loss: str) -> tuple[Any, ...]:
    """(plan, what the teacher told, result of one update, gradients)."""
    from rlhf_megatron.algorithms.distillation import DISTILLATION_LOSSES
    from rlhf_megatron.workers.actor import Actor
    from rlhf_megatron.workers.fsdp import FSDPBackend
    from rlhf_megatron.workers.losses import DistillationRowLoss
    from rlhf_megatron.workers.reference import Reference
    from rlhf_megatron.workers.trained_model import Phase

    def backend(name: str, is_frozen: bool) -> FSDPBackend:
        settings = (world, torch.float32, FSDPConfig(), "vocabulary", is_frozen)
        return FSDPBackend(reference.HF_CONFIGS[name], StateSource(states[name]), *settings)

    row_loss = DistillationRowLoss(DISTILLATION_LOSSES.get(loss).build, has_tail=True)
    student = Actor(backend(STUDENT, False), CONFIG, {"sft": Phase(CONFIG.optim, 10)}, distillation=row_loss)
    teacher = Reference(backend(TEACHER, True), CONFIG.log_prob_chunk_size, CONFIG.kernels)
    shard, plan = share(world, batch, 40)
    told = teacher.top_log_probs(shard, plan, reference.TEMPERATURE, COUNT)
    assert told is not None
    given = replace(shard, teacher_ids=told.teacher_ids, teacher_log_probs=told.teacher_log_probs)
    result = student.update(given, plan, reference.TEMPERATURE, "distillation")
    return plan, told, result, {name: grad.clone() for name, grad in student.backend.named_gradients().items()}


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl"])
def test_one_update_equals_transformers(dist_pool: DistPool, loss: str) -> None:
    models = {name: reference.make_model(name) for name in (STUDENT, TEACHER)}
    states = {name: {k: v.clone() for k, v in model.state_dict().items()} for name, model in models.items()}
    batch = reference.make_batch()
    results = dist_pool.run(distil, states=states, batch=batch, loss=loss, dp=2)

    held: dict[str, Tensor] = {}

    def keep(log_p: Tensor, ids: Tensor) -> dict[str, Tensor]:
        held["teacher"] = log_p.detach()
        return {"likeliest": log_p.amax(-1)}

    def divergence(log_p: Tensor, ids: Tensor) -> dict[str, Tensor]:
        teacher, places = held["teacher"].topk(COUNT, -1)
        p, q = teacher.exp(), log_p.gather(-1, places).exp()
        p, q = (torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in (p, q))
        return {"loss": (p * (p / q).log() if loss == "forward_kl" else q * (q / p).log()).sum(-1)}

    likeliest = reference.token_columns(models[TEACHER].double(), batch, keep)["likeliest"]
    student = models[STUDENT].double()
    value = (reference.token_columns(student, batch, divergence)["loss"] * batch.loss_weights.double()).sum()
    value.backward()

    told = restore([r[1] for r in results], [r[0] for r in results], batch.offsets)
    assert told.teacher_ids.shape == (batch.num_tokens, COUNT)
    assert (told.teacher_log_probs[:, 0] - likeliest).abs().max() <= 1e-5
    assert bool((told.teacher_log_probs.diff(dim=1) <= 0).all())
    assert sum(r[2].sums["actor/loss"] for r in results) == pytest.approx(float(value.detach()), rel=1e-5)
    parameters = dict(student.named_parameters())
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm()
    assert results[0][2].grad_norm == pytest.approx(float(norm), rel=1e-4)
    clip = min(1.0, reference.CLIP / float(norm))
    for name, parameter in parameters.items():
        gradient = torch.cat([r[3][name] for r in results])
        assert (gradient - clip * parameter.grad).norm() <= 2e-5 * clip * parameter.grad.norm(), name

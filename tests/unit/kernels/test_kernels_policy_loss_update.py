"""The policy loss in one pass in an update: the split of a mini-batch, and what a GPU would be waited for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import workers_reference as reference
from device_waits import DeviceWaits
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import make_actor, share

from benchmarks import split_pure
from benchmarks.split_invariance import PURE_BAR, pure_rows
from benchmarks.split_pure import LossCase, Split
from rlhf_megatron.config.schema import ActorConfig
from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers import losses
from rlhf_megatron.workers.losses import make_row_losses

FULL = ActorConfig(entropy_coeff=0.03, use_kl_loss=True, kl_loss_coef=0.1)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_the_split_changes_nothing_with_explicit_gradients(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where the workers take the eager loss: everything but the precision is as in training."""
    monkeypatch.setattr(losses, "FUSED_DTYPES", (torch.float64,))
    case = LossCase("ppo_clip + entropy + k3", "policy", replace(FULL, loss_agg_mode=mode))  # type: ignore[arg-type]
    assert make_row_losses(case.config)["policy"].fused is not None
    splits = [Split(parts=7, is_shuffled=True), Split(Layout(4, cp=2), parts=2)]
    rows = list(pure_rows([case], splits))
    assert {row.kind for row in rows} == {"plain means", "pure", "pure metrics"} and all(row.is_ok for row in rows)
    explicit = split_pure.split_gradient(split_pure.make_batch(), case, Split())
    monkeypatch.undo()
    eager = split_pure.split_gradient(split_pure.make_batch(), case, Split())
    for name, gradient in eager.gradients.items():
        assert float((explicit.gradients[name] - gradient).norm()) <= PURE_BAR * float(gradient.norm()), name


def waits_of_an_update(world: World, state: dict[str, Tensor], batch: MiniBatch) -> tuple[int, list[str]]:
    """(micro-batches, what the host would wait for in their forward and backward passes)."""
    actor = make_actor(world, "llama", state)
    shard, plan = share(world, batch, token_budget=40)
    for _ in range(2):  # the head compares itself with its reference at first
        actor.update(shard, plan, reference.TEMPERATURE)
    packed, row_loss = actor._work(shard, plan, reference.TEMPERATURE, "policy")
    with DeviceWaits() as waits:
        actor.trained._pass(packed, row_loss)
    return len(packed.micro_batches), waits.found


@pytest.mark.dist
def test_an_update_waits_at_most_for_the_rows_of_the_head(dist_pool: DistPool) -> None:
    """Its backward pass asks once a micro-batch which rows have a gradient, to leave the others out.

    Attention without a flash kernel, as here, reads the documents' lengths as well.
    """
    model = reference.make_model("llama")
    batch = reference.make_batch()
    with torch.no_grad():
        batch = reference.with_past(batch, reference.token_log_probs(model, batch)[0])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ((num_micro_batches, found),) = dist_pool.run(waits_of_an_update, state=state, batch=batch, timeout_s=300)
    assert num_micro_batches == 3
    places = Counter(place.partition(",")[0] for place in found)
    assert set(places) <= {"nonzero in kernels/log_prob_chunked.py", "_unique2 in models/document_order.py"}
    assert max(places.values()) <= num_micro_batches

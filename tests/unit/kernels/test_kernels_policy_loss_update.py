"""The policy loss in one pass in an update: the split of a mini-batch, and what a GPU would
be waited for.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import workers_reference as reference
from device_waits import DeviceWaits
from dist_pool import DistPool
from torch import Tensor
from workers_jobs import make_actor, share

from rlhf_megatron.data.batch import MiniBatch
from rlhf_megatron.ranks.parallel.world import World


def waits_of_an_update(
    world: World, state: dict[str, Tensor], batch: MiniBatch
) -> tuple[int, list[str]]:
    """(micro-batches, what the host would wait for in their forward and backward passes)."""
    actor = make_actor(world, "llama", state)
    shard, plan = share(world, batch, token_budget=40)
    for _ in range(2):  # the head compares itself with its reference at first
        actor.update(shard, plan, reference.TEMPERATURE)
    packed, row_loss, _ = actor._prepare_update(shard, plan, reference.TEMPERATURE, "policy")
    with DeviceWaits() as waits:
        actor._run_training_pass(packed, row_loss)
    return len(packed.micro_batches), waits.found


@pytest.mark.dist
def test_an_update_waits_at_most_for_the_rows_of_the_head(dist_pool: DistPool) -> None:
    """Its backward pass asks once a micro-batch which rows have a gradient, to leave
    the others out.

    Attention without a flash kernel, as here, reads the documents' lengths as well.
    """
    model = reference.make_model("llama")
    batch = reference.make_batch()
    with torch.no_grad():
        batch = reference.with_past(batch, reference.token_log_probs(model, batch)[0])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ((num_micro_batches, found),) = dist_pool.run(
        waits_of_an_update, state=state, batch=batch, timeout_s=300
    )
    assert num_micro_batches == 3
    places = Counter(place.partition(",")[0] for place in found)
    assert set(places) <= {
        "nonzero in ranks/kernels/log_prob_chunked.py",
        "_unique2 in ranks/models/document_token_order.py",
    }
    assert max(places.values()) <= num_micro_batches

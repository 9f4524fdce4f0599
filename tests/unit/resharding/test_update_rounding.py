"""What rounding loses of an update: by hand, in sums of ranks, and the tensors of the sample."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.lora import compute_lora_change, merge_lora_weight
from rlhf_megatron.weights.update_rounding import (
    LostUpdateSums,
    MergeRounding,
    choose_sampled_tensors,
    compute_lost_update_share,
    make_lost_update_sums,
    sum_lost_squares,
)

UNIT = 2.0**-9  # a quarter of the distance of two bfloat16 values above 1
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}


def small_adapter() -> tuple[Tensor, Tensor, Tensor, float]:
    """W, A, B and a scale; the change is one unit in the first row and three in the second."""
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    down = torch.tensor([[0.5, 0.5]])
    up = torch.tensor([[UNIT], [3 * UNIT]])
    return weight, down, up, 2.0


@pytest.mark.parametrize(
    ("engine_dtype", "lost_squares", "share"),
    [(torch.bfloat16, 4 * UNIT**2, (4 / 20) ** 0.5), (torch.float32, 0.0, 0.0)],
)
def test_share_of_a_small_adapter_by_hand(
    engine_dtype: torch.dtype, lost_squares: float, share: float
) -> None:
    """In bfloat16 1 + 1 unit becomes 1, and 1 + 3 units become 1 + 4 units: each of the four values
    is off by one unit. The change is 1, 1, 3 and 3 units.
    """
    weight, down, up, scale = small_adapter()
    change = compute_lora_change(down, up, scale)
    assert torch.equal(change, torch.tensor([[UNIT, UNIT], [3 * UNIT, 3 * UNIT]]))
    rounding = MergeRounding(engine_dtype, torch.device("cpu"))
    for row in range(2):  # as two ranks would have them
        merged = merge_lora_weight(weight[row : row + 1], down, up[row : row + 1], scale)
        rounding.add_merged_weight(weight[row : row + 1], change[row : row + 1], merged)
    sums = rounding.finish_send()
    assert sums.lost_squares == pytest.approx(lost_squares, rel=1e-12)
    assert sums.change_squares == pytest.approx(20 * UNIT**2, rel=1e-12)
    assert compute_lost_update_share([sums]) == pytest.approx(share, rel=1e-12)


def test_a_base_that_the_engine_rounds_counts_as_the_engine_holds_it() -> None:
    """A float32 base of 1 + 1 unit stands as 1 in the engine, and with a change of 2 units as
    1 + 4 units: the engine sees 4 units of 2.
    """
    weight = torch.tensor([1 + UNIT])
    change = torch.tensor([2 * UNIT])
    rounding = MergeRounding(torch.bfloat16, torch.device("cpu"))
    rounding.add_merged_weight(weight, change, weight + change)
    assert compute_lost_update_share([rounding.finish_send()]) == pytest.approx(1.0, rel=1e-12)


def test_sums_of_ranks_add_up() -> None:
    whole = LostUpdateSums(3.0, 12.0)
    parts = [LostUpdateSums(1.0, 8.0), None, LostUpdateSums(2.0, 4.0), LostUpdateSums(0.0, 0.0)]
    assert compute_lost_update_share(parts) == compute_lost_update_share([whole]) == 0.5


def test_there_is_no_share_where_nothing_was_measured_or_changed() -> None:
    assert compute_lost_update_share([]) is None
    assert compute_lost_update_share([None, None]) is None
    assert compute_lost_update_share([LostUpdateSums(0.0, 0.0)]) is None


def test_blocks_change_no_sum() -> None:
    """More values than are compared at a time, of which the engine sees every second one."""
    change = torch.full((3, 1_000_000), UNIT)
    seen = change.clone()
    seen[:, ::2] = 0
    sums = make_lost_update_sums(sum_lost_squares(1 + seen, torch.ones_like(seen), change))
    assert sums.change_squares == pytest.approx(3_000_000 * UNIT**2, rel=1e-12)
    assert sums.lost_squares == pytest.approx(1_500_000 * UNIT**2, rel=1e-12)


@pytest.mark.parametrize("config", [QWEN3, MOE], ids=["dense", "experts"])
def test_the_sample_has_all_kinds_and_all_layers(config: dict[str, Any]) -> None:
    table = make_weight_table(config)
    names = choose_sampled_tensors(table)
    matrices = {rule.megatron_name for rule in table if len(rule.megatron_shape) >= 2}
    assert len(set(names)) == 16 and matrices.issuperset(names)
    assert {re.sub(r"\d+", "N", name) for name in names} == {
        re.sub(r"\d+", "N", name) for name in matrices
    }
    layers = {found[1] for name in names if (found := re.search(r"layers\.(\d+)", name))}
    assert layers == {"0", "1", "2", "3"}
    assert names == choose_sampled_tensors(make_weight_table(config, 2)), "of another layout"


def test_a_small_model_is_in_the_sample_as_a_whole() -> None:
    table = make_weight_table({**QWEN3, "num_hidden_layers": 1})
    assert sorted(choose_sampled_tensors(table)) == sorted(
        rule.megatron_name for rule in table if len(rule.megatron_shape) == 2
    )

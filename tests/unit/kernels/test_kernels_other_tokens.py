"""Chosen logits and the likeliest tokens of a whole head, against plain torch; cut over
ranks: test_distillation.
"""

from __future__ import annotations

import pytest
import torch
from head_tools import Sink
from torch import Tensor

from rlhf_megatron.ranks.kernels.chosen_token_logits import (
    ROWS,
    HeadShard,
    compute_chosen_logits,
    find_likeliest_tokens,
)

V = 29
H = 12
# of a product with the same operands
BARS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-6}


def drawn(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states, a weight with three rows of padding that stand out, distinct rows)."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, H, generator=generator).to(dtype)
    weight = torch.randn(V + 3, H, generator=generator).to(dtype)
    weight[V:] = 9.0
    return hidden, weight, torch.randperm(num_tokens, generator=generator)[: num_tokens * 2 // 3]


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize(("chunk_size", "softcap"), [(4, None), (8192, None), (4, 2.5)])
def test_the_likeliest_are_those_of_all_logits(
    dtype: torch.dtype, chunk_size: int, softcap: float | None
) -> None:
    """Also of 16-bit operands as exact as float32: rounded logits would cost 2e-2."""
    hidden, weight, rows = drawn(40, dtype)
    ids, log_probs = find_likeliest_tokens(
        hidden, weight, 6, rows, HeadShard(0, V, None), 0.7, chunk_size, softcap
    )
    logits = hidden[rows].double() @ weight[:V].double().T
    capped = logits if softcap is None else softcap * (logits / softcap).tanh()
    wanted, wanted_ids = (capped / 0.7).log_softmax(-1).topk(6, -1)
    assert torch.equal(ids, wanted_ids)
    assert log_probs.dtype == torch.promote_types(dtype, torch.float32)
    assert (log_probs - wanted).abs().max() <= 10 * BARS[dtype]


@pytest.mark.parametrize("has_sink", [False, True])
@pytest.mark.parametrize("has_repeats", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 40, 2 * ROWS])
def test_chosen_logits_and_their_gradients(
    num_tokens: int, has_repeats: bool, has_sink: bool
) -> None:
    """Rows of more than a block, or none; a token that is chosen twice, or has two rows, gets
    both gradients.
    """
    hidden, weight, rows = drawn(num_tokens, torch.float64)
    if has_repeats:
        rows = torch.cat([rows, rows[::3]])
    ids = torch.randint(0, V, (len(rows), 5), generator=torch.Generator().manual_seed(1))
    ids[:, 1] = ids[:, 0]
    upstream = torch.randn(
        ids.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    sink = Sink(weight, torch.float64, start=1.0)

    mine = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    shard = HeadShard(0, V, None, weight_grad_sink=sink if has_sink else None)
    found = compute_chosen_logits(mine[0], mine[1], ids, rows, shard)
    found.backward(upstream)
    plain = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    wanted = (plain[0][rows] @ plain[1].T).gather(1, ids)
    wanted.backward(upstream)

    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert torch.allclose(mine[0].grad, plain[0].grad, rtol=0, atol=1e-12)
    if has_sink:
        assert mine[1].grad is None and sink.num_asked == 0, (
            "the targets' log-probs tell autograd of it"
        )
        assert torch.allclose(sink.buffer, 1 + plain[1].grad, rtol=0, atol=1e-12)
    else:
        assert torch.allclose(mine[1].grad, plain[1].grad, rtol=0, atol=1e-12)


def test_more_tokens_than_there_are() -> None:
    hidden, weight, rows = drawn(4, torch.float32)
    with pytest.raises(
        ValueError, match=r"top_k \(30\) must be at most the vocabulary's 29 tokens"
    ):
        find_likeliest_tokens(hidden, weight, 30, rows, HeadShard(0, V, None))

"""The policy loss in one pass against the eager one, on whatever rows and parameters
Hypothesis thinks of.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels_policy_loss import eager, fused

from rlhf_megatron.algorithms.losses import PolicyLossInputs
from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams
from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams

finite = st.floats(-60, 0)
rows = st.tuples(
    finite,
    finite,
    st.one_of(st.just(0.0), st.floats(-1e3, 1e3)),
    finite,
    st.floats(0, 9),
    st.floats(0, 4),
    st.floats(0, 1),
)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(rows, max_size=12),
    st.builds(PPOClipParams, st.floats(0.01, 1), st.floats(0.01, 3), st.floats(1.01, 10)),
    st.builds(
        RegularizerParams,
        st.sampled_from([0.0, 0.1]),
        st.sampled_from(["k1", "k2", "k3"]),
        st.sampled_from([0.0, 0.2]),
    ),
)
def test_any_rows(
    table: list[tuple[float, ...]], params: PPOClipParams, regularizers: RegularizerParams
) -> None:
    columns = torch.tensor(table, dtype=torch.float64).reshape(-1, 7).unbind(1)
    log_probs, old, advantages, ref, entropies, corrections, weights = columns
    mask = torch.ones(len(table), dtype=torch.bool)
    inputs = PolicyLossInputs(log_probs, old, advantages, mask, entropies, ref, None, corrections)
    found, expected = (
        form(inputs, (weights, weights), params, regularizers) for form in (fused, eager)
    )
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-11, atol=1e-9, msg=f"{name}: {found[name]} is not {value}"
        )

"""Sampling of the local engine against its distribution: draws, and what top-k, top-p, min-p and
min_new_tokens do.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from rollout_tools import (
    assert_same,
    reference_greedy,
    reference_log_probs,
    request,
    tiny_llama,
    tiny_qwen3,
)
from torch import Tensor

from rlhf_megatron.rollout.engine_interface import GenerateRequest, SamplingParams
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.local_model import LocalModel
from rlhf_megatron.rollout.local.token_sampling import (
    ProbabilityCuts,
    RowSampling,
    draw_tokens,
    draw_uniforms,
    sample_tokens,
)

STOCK = {"qwen3": tiny_qwen3(1), "llama": tiny_llama(3)}
PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (3, 3), (20, 19, 18, 17, 16)]


def generator(name: str = "qwen3", max_num_seqs: int = 8, budget: int = 4096) -> BatchGenerator:
    return BatchGenerator(LocalModel(copy.deepcopy(STOCK[name])), max_num_seqs, budget)


def test_draw_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, -1)
    points = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw_tokens(probs, points).tolist() == [1, 1, 3, 3, 4, 4]


def test_draw_over_blocks_is_draw_over_the_whole_vocabulary() -> None:
    torch.manual_seed(0)
    probs = torch.rand(64, 1000).pow(8)
    probs[:, 512:768] = 0  # a block without weight
    points = torch.rand(64, dtype=torch.float64)
    whole = probs.double().cumsum(-1)
    expected = (whole <= points[:, None] * whole[:, -1:]).sum(-1)
    assert draw_tokens(probs, points).tolist() == expected.tolist()


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    seeds = torch.arange(300).repeat_interleave(300)
    positions = torch.arange(300).repeat(300)
    values = draw_uniforms(seeds, positions)
    assert values.unique().numel() == values.numel()
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values, 100, 0, 1)
    assert ((counts - 900) ** 2 / 900).sum() < 162  # 1e-4 quantile of chi2, 99 degrees of freedom
    grid = values.view(300, 300)
    assert abs(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1]) < 0.015
    assert (
        abs(torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1])
        < 0.015
    )


def test_sample_of_one_hot_logits() -> None:
    logits = torch.full((2, 300), -1e4)
    logits[0, 299] = logits[1, 256] = 0.0
    tokens, log_probs = sample_tokens(
        logits, None, None, torch.tensor([1, 2]), torch.tensor([0, 0])
    )
    assert tokens.tolist() == [299, 256]
    assert log_probs.tolist() == [0.0, 0.0]


# by probability: tokens 0, 2, 3, 1, 4; the sums before them are 0, 8, 12, 14, 15
SIXTEENTHS = [8, 1, 4, 2, 1]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 2, 3}),
        ({"top_k": 4}, {0, 2, 3, 1}),  # of equal ones the lower id
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.1}, {0}),  # the most likely one always stays
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.5}, {0, 2}),  # the sum before it is not above top_p
        ({"top_p": 0.8}, {0, 2, 3}),
        ({"top_p": 0.9}, {0, 2, 3, 1}),
        ({"top_p": 1.0, "top_k": 5}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.5}, {0, 2}),
        ({"min_p": 0.26}, {0, 2}),
        ({"min_p": 0.25}, {0, 2, 3}),
        ({"min_p": 1.0}, {0}),
        (
            {"top_k": 2, "top_p": 0.6},
            {0, 2},
        ),  # sums are not rescaled after top-k, or 8/12 would be above 0.6
        ({"top_k": 3, "top_p": 0.5}, {0, 2}),
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.25}, {0, 2, 3}),
        ({"top_k": 4, "top_p": 0.8, "min_p": 0.3}, {0, 2}),
        ({"top_k": 2, "top_p": 0.99, "min_p": 0.01}, {0, 2}),
    ],
)
def test_kept_sets(params: dict[str, float], kept: set[int]) -> None:
    probs = torch.tensor([SIXTEENTHS, [3, 3, 3, 3, 4]]) / 16
    cuts = ProbabilityCuts.from_params(
        [SamplingParams(1, **params), SamplingParams(1)], torch.device("cpu")
    )
    got = cuts.zero_cut_probs(probs)
    assert got[0].tolist() == [
        n / 16 if token in kept else 0.0 for token, n in enumerate(SIXTEENTHS)
    ]
    assert torch.equal(got[1], probs[1])  # a row that leaves nothing out


def test_kept_sets_of_a_large_vocabulary() -> None:
    """Beside each other: sets within the most likely thousand, larger ones, and rows with many
    equal probabilities.
    """
    torch.manual_seed(0)
    probs = torch.stack(
        [torch.randn(5000) * scale for scale in (4.0, 0.3, 0.3, 1.0, 0.3, 4.0, 0.0, 0.0)]
    ).softmax(-1)
    probs[3] = (probs[3] * 4096).round() / 4096
    kinds = [{"top_p": 0.9}, {"top_p": 0.9}, {"top_k": 1500, "min_p": 0.01}, {"top_p": 0.5}]
    kinds += [{"min_p": 0.01}, {}, {"top_k": 700}, {"top_k": 3000}]
    params = [SamplingParams(1, **kind) for kind in kinds]
    cuts = ProbabilityCuts.from_params(params, torch.device("cpu"))
    got = cuts.zero_cut_probs(probs)
    sizes = [int(row.count_nonzero()) for row in got]
    assert (
        sizes[0] < 1000 < sizes[1]
        and sizes[2] == 1500
        and sizes[4] == 5000
        and sizes[6:] == [700, 3000]
    )
    for row, before, one in zip(got, probs, params, strict=True):
        expected = kept_tokens(before, one)
        assert {token for token in expected if before[token] > 0} == set(
            row.nonzero().squeeze(-1).tolist()
        )
        assert torch.equal(row[row > 0], before[row > 0])


def test_no_cuts_where_all_is_off() -> None:
    params = [SamplingParams(4), SamplingParams(4, 0.0, (3,), min_new_tokens=2)]
    assert RowSampling.from_params(params, torch.device("cpu")).cuts is None
    assert (
        RowSampling.from_params([*params, SamplingParams(4, top_k=9)], torch.device("cpu")).cuts
        is not None
    )


def kept_tokens(probs: Tensor, params: SamplingParams) -> set[int]:
    """One token at a time, as SGLang's rules say."""
    ranked = sorted(enumerate(probs.tolist()), key=lambda entry: -entry[1])
    kept = set()
    before = 0.0
    for rank, (token, p) in enumerate(ranked):
        is_in_sum = before <= params.top_p or params.top_p == 1
        if (
            (params.top_k == -1 or rank < params.top_k)
            and is_in_sum
            and p >= ranked[0][1] * params.min_p
        ):
            kept.add(token)
        before += p
    return kept


CUTS = [{"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.05}]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_cuts_bound_what_is_drawn_and_not_its_log_probs(name: str) -> None:
    """Every token of long responses, against transformers' distribution. Rows of all kinds
    share the batch.
    """
    wanted = [request(PROMPTS[i], (1, 2), 40, 0.8, **params) for i, params in enumerate(CUTS)]
    plain = request(PROMPTS[4], (5, 6), 40, 0.8)
    groups = generator(name, 10).generate([*wanted, plain])
    num_left_out = 0
    for sent, group in zip(wanted, groups[:-1], strict=True):
        for got in group:
            ids = torch.tensor([[*sent.prompt_ids, *got.token_ids]])
            with torch.no_grad():
                logits = STOCK[name](ids).logits[0, len(sent.prompt_ids) - 1 : -1]
            probs = (logits / 0.8).softmax(-1)
            for token, row in zip(got.token_ids, probs, strict=True):
                kept = kept_tokens(row, sent.params)
                num_left_out += len(row) - len(kept)
                assert token in kept
            expected = reference_log_probs(STOCK[name], sent.prompt_ids, got.token_ids, 0.8)
            assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
    assert num_left_out > 1000
    assert_same(groups[-1], generator(name).generate([plain])[0])


@pytest.mark.parametrize("params", CUTS)
def test_first_tokens_follow_the_cut_distribution(params: dict[str, float]) -> None:
    """Chi-square over 4000 seeds: the kept probabilities, rescaled."""
    count = 4000
    sent = request(PROMPTS[0], tuple(range(count)), 1, 1.3, **params)
    group = generator(max_num_seqs=4096, budget=1 << 20).generate([sent])[0]
    seen = Counter(s.token_ids[0] for s in group)
    with torch.no_grad():
        probs = (STOCK["qwen3"](torch.tensor([PROMPTS[0]])).logits[0, -1] / 1.3).softmax(-1)
    kept = kept_tokens(probs, sent.params)
    total = sum(float(probs[token]) for token in kept)
    cells = [(seen[token], float(probs[token]) / total * count) for token in kept]
    assert set(seen) <= kept and 2 <= len(kept) < 32
    # 1e-4 quantile of chi2, 12 degrees of freedom
    assert sum((got - want) ** 2 / want for got, want in cells) < 40


def test_cuts_leave_the_draws_of_other_rows_alone_to_the_bit() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 700) * 3
    seeds = torch.arange(6)
    positions = torch.arange(6) * 2
    params = [SamplingParams(1, top_p=0.5), *[SamplingParams(1)] * 4, SamplingParams(1, top_k=1)]
    cuts = ProbabilityCuts.from_params(params, torch.device("cpu"))
    tokens, log_probs = sample_tokens(logits, None, None, seeds, positions, cuts)
    free_tokens, free_log_probs = sample_tokens(logits, None, None, seeds, positions)
    assert torch.equal(tokens[1:5], free_tokens[1:5]) and torch.equal(
        log_probs[1:5], free_log_probs[1:5]
    )
    assert tokens[5] == logits[5].argmax()


def test_greedy_stays_greedy_under_cuts() -> None:
    (got,) = generator().generate(
        [request(PROMPTS[0], (1,), 12, 0.0, top_p=0.3, top_k=5, min_p=0.5)]
    )[0]
    assert got.token_ids == reference_greedy(STOCK["qwen3"], PROMPTS[0], 12)


def without_stops(sent: GenerateRequest, response: tuple[int, ...], temperature: float) -> Tensor:
    """Log-probs [tokens, V] where no stop token could be drawn for the first tokens."""
    ids = torch.tensor([[*sent.prompt_ids, *response]])
    with torch.no_grad():
        logits = STOCK["qwen3"](ids).logits[0, len(sent.prompt_ids) - 1 : -1]
    logits[: sent.params.min_new_tokens, list(sent.params.stop_token_ids)] = float("-inf")
    return (logits / temperature).log_softmax(-1)


def test_stop_tokens_are_not_drawn_before_min_new_tokens() -> None:
    stops = (3, 7, 9, 12, 20, 25)
    sent = request(PROMPTS[2], tuple(range(40)), 20, 1.2, stop_token_ids=stops, min_new_tokens=6)
    free = request(PROMPTS[2], tuple(range(40)), 20, 1.2, stop_token_ids=stops)
    group, neighbours = generator(max_num_seqs=80).generate([sent, free])
    lengths = [len(got.token_ids) for got in group]
    assert min(lengths) == 7 and min(len(got.token_ids) for got in neighbours) == 1
    for got in group:
        assert not set(got.token_ids[:6]) & set(stops)
        expected = without_stops(sent, got.token_ids, 1.2)
        picked = expected.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
        assert (torch.tensor(got.log_probs) - picked).abs().max() <= 1e-4
    assert_same(neighbours, generator().generate([free])[0])
    (greedy,) = generator().generate(
        [request(PROMPTS[0], (1,), 12, 0.0, stop_token_ids=stops, min_new_tokens=12)]
    )[0]
    assert len(greedy.token_ids) == 12 and not set(greedy.token_ids) & set(stops)

"""The local generator against transformers, and sampling against its distribution."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from rollout_tools import assert_same, reference_greedy, reference_log_probs, request, tiny_llama, tiny_qwen3

from rlhf_megatron.rollout.local.generator import Generator
from rlhf_megatron.rollout.local.model import LocalModel
from rlhf_megatron.rollout.local.sampling import draw, sample, uniforms

STOCK = {"qwen3": tiny_qwen3(1), "qwen3_untied": tiny_qwen3(2, tied=False), "llama": tiny_llama(3)}
PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (3, 3), (20, 19, 18, 17, 16)]


def generator(name: str = "qwen3", max_num_seqs: int = 8, budget: int = 4096) -> Generator:
    return Generator(LocalModel(copy.deepcopy(STOCK[name])), max_num_seqs, budget)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_greedy_is_that_of_transformers(name: str, max_num_seqs: int) -> None:
    requests = [request(p, (0,), 5 + 6 * i, temperature=0.0) for i, p in enumerate(PROMPTS)]
    groups = generator(name, max_num_seqs).generate(requests)
    for sent, (got,) in zip(requests, groups, strict=True):
        assert got.token_ids == reference_greedy(STOCK[name], sent.prompt_ids, sent.params.max_new_tokens)
        assert got.finish_reason == "length"
        expected = reference_log_probs(STOCK[name], sent.prompt_ids, got.token_ids)  # of temperature 1
        assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_are_those_of_scaled_logits(name: str, temperature: float) -> None:
    requests = [request(p, tuple(range(9 * i, 9 * i + 5)), 3 + 7 * i, temperature) for i, p in enumerate(PROMPTS)]
    for sent, group in zip(requests, generator(name, 7).generate(requests), strict=True):
        for got in group:
            expected = reference_log_probs(STOCK[name], sent.prompt_ids, got.token_ids, temperature)
            assert len(got.log_probs) == sent.params.max_new_tokens
            assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4


def test_temperatures_and_greedy_mix_in_one_batch() -> None:
    requests = [request(PROMPTS[0], (7, 8), 6, t) for t in (0.0, 0.5, 1.0, 2.0)]
    together = generator().generate(requests)
    for sent, group in zip(requests, together, strict=True):
        assert_same(group, generator().generate([sent])[0])


def test_tokens_depend_on_the_seed_and_not_on_the_batch() -> None:
    wanted = request(PROMPTS[2], (41, 42, 43), 12)
    alone = generator().generate([wanted])[0]
    crowd = [request(p, (900 + i, 41), 4 + i) for i, p in enumerate(PROMPTS)]
    amid = generator(max_num_seqs=5).generate([*crowd, wanted, *crowd])[len(crowd)]
    assert [s.token_ids for s in alone] == [s.token_ids for s in amid]
    assert len({s.token_ids for s in alone}) == 3
    again = generator().generate([request(PROMPTS[2], (43, 43), 12)])[0]
    assert again[0].token_ids == again[1].token_ids == alone[2].token_ids


def test_first_tokens_follow_the_distribution() -> None:
    """Chi-square over 20 000 seeds; 1e-4 quantile of chi2 with about 31 degrees of freedom is 69.7."""
    count = 20_000
    group = generator(max_num_seqs=4096, budget=1 << 20).generate([request(PROMPTS[0], tuple(range(count)), 1)])[0]
    seen = Counter(s.token_ids[0] for s in group)
    with torch.no_grad():
        probs = STOCK["qwen3"](torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).tolist()
    rare = [token for token, p in enumerate(probs) if p * count < 5]
    cells = [(seen[token], p * count) for token, p in enumerate(probs) if token not in rare]
    cells.append((sum(seen[token] for token in rare), max(sum(probs[token] for token in rare) * count, 1e-9)))
    cells = [cell for cell in cells if cell[1] >= 1]
    assert len(cells) >= 8
    assert sum((got - want) ** 2 / want for got, want in cells) < 69.7


def test_draw_inverts_the_cumulative_distribution() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, -1)
    points = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs, points).tolist() == [1, 1, 3, 3, 4, 4]


def test_draw_over_blocks_is_draw_over_the_whole_vocabulary() -> None:
    torch.manual_seed(0)
    probs = torch.rand(64, 1000).pow(8)
    probs[:, 512:768] = 0  # a block without weight
    points = torch.rand(64, dtype=torch.float64)
    whole = probs.double().cumsum(-1)
    expected = (whole <= points[:, None] * whole[:, -1:]).sum(-1)
    assert draw(probs, points).tolist() == expected.tolist()


def test_uniforms_are_uniform_and_differ_by_seed_and_position() -> None:
    seeds, positions = torch.arange(300).repeat_interleave(300), torch.arange(300).repeat(300)
    values = uniforms(seeds, positions)
    assert values.unique().numel() == values.numel()
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values, 100, 0, 1)
    assert ((counts - 900) ** 2 / 900).sum() < 162  # 1e-4 quantile of chi2, 99 degrees of freedom
    grid = values.view(300, 300)
    assert abs(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1]) < 0.015
    assert abs(torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1]) < 0.015


def test_sample_of_one_hot_logits() -> None:
    logits = torch.full((2, 300), -1e4)
    logits[0, 299] = logits[1, 256] = 0.0
    tokens, log_probs = sample(logits, None, None, torch.tensor([1, 2]), torch.tensor([0, 0]))
    assert tokens.tolist() == [299, 256]
    assert log_probs.tolist() == [0.0, 0.0]


def test_stop_token_ends_a_response_and_belongs_to_it() -> None:
    free = generator().generate([request(PROMPTS[0], tuple(range(20)), 10)])[0]
    stop = free[0].token_ids[3]
    for before, got in zip(
        free,
        generator().generate([request(PROMPTS[0], tuple(range(20)), 10, stop_token_ids=(31, stop))])[0],
        strict=True,
    ):
        ends = [i for i, token in enumerate(before.token_ids) if token in (31, stop)]
        expected = before.token_ids[: ends[0] + 1] if ends else before.token_ids
        assert got.token_ids == expected
        assert got.finish_reason == ("stop" if ends else "length")
        assert len(got.log_probs) == len(expected)


def test_abort_keeps_what_there_is() -> None:
    full = generator().generate([request(PROMPTS[0], (1, 2), 20), request(PROMPTS[1], (3,), 20)])
    engine = generator(max_num_seqs=2)
    members = engine.add(request(PROMPTS[0], (1, 2), 20)) + engine.add(request(PROMPTS[1], (3,), 20))
    for _ in range(5):
        assert engine.step() == []
    assert len(engine.abort()) == 3
    assert not engine.has_work
    results = [member.result() for member in members]
    assert [r.finish_reason for r in results] == ["abort"] * 3
    assert results[0].token_ids == full[0][0].token_ids[:6]  # the prompt's own pass gives the first of them
    assert results[1].log_probs == pytest.approx(full[0][1].log_probs[:6], abs=1e-5)
    assert results[2].token_ids == ()


def test_abort_of_some_leaves_the_others_alone() -> None:
    engine = generator()
    gone, kept = engine.add(request(PROMPTS[0], (1, 2), 20)), engine.add(request(PROMPTS[2], (3, 4), 20))
    engine.step()
    assert set(map(id, engine.abort(gone))) == set(map(id, gone))
    while engine.has_work:
        engine.step()
    assert_same([m.result() for m in kept], generator().generate([request(PROMPTS[2], (3, 4), 20)])[0])


def test_retracted_samples_go_on_where_they_were() -> None:
    wanted = [request(p, (5, 6), 15) for p in PROMPTS]
    expected = generator().generate(wanted)
    engine = generator(max_num_seqs=6)
    members = [engine.add(r) for r in wanted]
    for _ in range(4):
        engine.step()
        engine.step()
        engine.retract()
    while engine.has_work:
        engine.step()
    got = [[m.result() for m in group] for group in members]
    assert [[s.token_ids for s in g] for g in got] == [[s.token_ids for s in g] for g in expected]
    assert got[0][0].log_probs == pytest.approx(expected[0][0].log_probs, abs=1e-5)


def test_cache_stays_within_the_token_budget() -> None:
    engine = generator(max_num_seqs=64, budget=160)
    requests = [request(p, tuple(range(6)), 30) for p in PROMPTS]
    members = [engine.add(r) for r in requests]
    while engine.has_work:
        engine.step()
        assert engine._slots.num_rows * engine._slots.num_columns <= 160
    assert [[m.result().token_ids for m in g] for g in members] == [
        [s.token_ids for s in g] for g in generator().generate(requests)
    ]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request((), (1,), 4), "at least one prompt token"),
        (request((1,), (), 4), "one seed"),
        (request((1,), (1,), 0), "max_new_tokens >= 1"),
        (request((1, 32), (1,), 4), r"\[0, 32\)"),
        (request((1, 2), (1,), 255), "make 257, but max_position_embeddings is 256"),
        (request((1,), (-1,), 4), "seeds must lie"),
        (request((1,), (1,), 4, -0.5), "temperature"),
        (request((1,), (1,), 4, float("nan")), "temperature"),
    ],
)
def test_what_cannot_work_is_refused(bad: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generator().add(bad)


def test_a_prompt_as_long_as_the_model_allows() -> None:
    prompt = tuple(i % 32 for i in range(255))
    assert generator().generate([request(prompt, (1,), 1, 0.0)])[0][0].token_ids == reference_greedy(
        STOCK["qwen3"], prompt, 1
    )


def test_logits_that_are_not_finite_are_an_error() -> None:
    engine = generator()
    engine.model.module.model.norm.weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate([request((1, 2), (1,), 3)])


def test_a_family_with_another_head_is_refused() -> None:
    class Scaled(type(STOCK["qwen3"])):
        def forward(self, *args: object, **kwargs: object) -> object:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 0.5
            return out

    model = copy.deepcopy(STOCK["qwen3"])
    model.__class__ = Scaled
    with pytest.raises(ValueError, match="differ from transformers'"):
        LocalModel(model)

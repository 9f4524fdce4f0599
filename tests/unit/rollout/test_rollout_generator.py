"""The local generator against transformers: tokens, log-probs, and what retractions and weight
syncs do to samples.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

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
from transformers import PreTrainedModel

from benchmarks.parity.cases import EXPERT_FAMILIES, make_state
from benchmarks.parity.reference import make_model
from rlhf_megatron.rollout.engine_interface import GenerateRequest, VersionSpan
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.cache_slots import PendingSample
from rlhf_megatron.rollout.local.local_model import LocalModel, load_local_model

STOCK = {
    "qwen3": tiny_qwen3(1),
    "qwen3_untied": tiny_qwen3(2, tied=False),
    "llama": tiny_llama(3),
    "deepseek_v3": make_model(
        EXPERT_FAMILIES["deepseek_v3"], make_state("deepseek_v3"), torch.float32
    ),
    "gpt_oss": make_model(EXPERT_FAMILIES["gpt_oss"], make_state("gpt_oss"), torch.float32),
}
PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8, 9, 10, 11), (3, 3), (20, 19, 18, 17, 16)]


def generator(name: str = "qwen3", max_num_seqs: int = 8, budget: int = 4096) -> BatchGenerator:
    return BatchGenerator(LocalModel(copy.deepcopy(STOCK[name])), max_num_seqs, budget)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_greedy_is_that_of_transformers(name: str, max_num_seqs: int) -> None:
    requests = [request(p, (0,), 5 + 6 * i, temperature=0.0) for i, p in enumerate(PROMPTS)]
    groups = generator(name, max_num_seqs).generate(requests)
    for sent, (got,) in zip(requests, groups, strict=True):
        assert got.token_ids == reference_greedy(
            STOCK[name], sent.prompt_ids, sent.params.max_new_tokens
        )
        assert got.finish_reason == "length"
        # of temperature 1
        expected = reference_log_probs(STOCK[name], sent.prompt_ids, got.token_ids)
        assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_are_those_of_scaled_logits(name: str, temperature: float) -> None:
    requests = [
        request(p, tuple(range(9 * i, 9 * i + 5)), 3 + 7 * i, temperature)
        for i, p in enumerate(PROMPTS)
    ]
    for sent, group in zip(requests, generator(name, 7).generate(requests), strict=True):
        for got in group:
            expected = reference_log_probs(STOCK[name], sent.prompt_ids, got.token_ids, temperature)
            assert len(got.log_probs) == sent.params.max_new_tokens
            assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4


def test_kimi_is_a_deepseek_whose_norms_are_as_its_file_says(tmp_path: Path) -> None:
    STOCK["deepseek_v3"].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "model_type": "kimi_k2", "rms_norm_eps": 1e-3})
    )
    for with_weights in (False, True):
        model = load_local_model(tmp_path, "float32", "cpu", with_weights)
        norms = [norm for name, norm in model.module.named_modules() if name.endswith("norm")]
        assert len(norms) == 4 * 4 + 1 and {norm.variance_epsilon for norm in norms} == {1e-3}
    loaded = model.module.state_dict()
    assert all(
        torch.equal(loaded[name], tensor)
        for name, tensor in STOCK["deepseek_v3"].state_dict().items()
    )


def test_a_response_in_parts_is_that_of_one_request() -> None:
    """`num_given`: what was drawn before stands in the prompt, and seeds go on behind it."""
    whole = generator().generate([request(PROMPTS[2], (5, 6), 12, 0.8)])[0]
    for sample, seed in zip(whole, (5, 6), strict=True):
        given = sample.token_ids[:7]
        rest = GenerateRequest(
            (*PROMPTS[2], *given), (seed,), request((), (), 5, 0.8).params, len(given)
        )
        ((got,),) = generator().generate([rest])
        assert got.token_ids == sample.token_ids[7:]
        assert torch.allclose(
            torch.tensor(got.log_probs), torch.tensor(sample.log_probs[7:]), atol=1e-5
        )
    with pytest.raises(
        ValueError, match=r"num_given \(3\) must be below the number of prompt tokens, 3"
    ):
        generator().add_request(GenerateRequest(PROMPTS[0], (1,), request((), (), 5).params, 3))


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
    """Chi-square over 20 000 seeds; 1e-4 quantile of chi2 with about 31 degrees of
    freedom is 69.7.
    """
    count = 20_000
    group = generator(max_num_seqs=4096, budget=1 << 20).generate(
        [request(PROMPTS[0], tuple(range(count)), 1)]
    )[0]
    seen = Counter(s.token_ids[0] for s in group)
    with torch.no_grad():
        probs = STOCK["qwen3"](torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1).tolist()
    rare = [token for token, p in enumerate(probs) if p * count < 5]
    cells = [(seen[token], p * count) for token, p in enumerate(probs) if token not in rare]
    cells.append(
        (sum(seen[token] for token in rare), max(sum(probs[token] for token in rare) * count, 1e-9))
    )
    cells = [cell for cell in cells if cell[1] >= 1]
    assert len(cells) >= 8
    assert sum((got - want) ** 2 / want for got, want in cells) < 69.7


def test_stop_token_ends_a_response_and_belongs_to_it() -> None:
    free = generator().generate([request(PROMPTS[0], tuple(range(20)), 10)])[0]
    stop = free[0].token_ids[3]
    for before, got in zip(
        free,
        generator().generate(
            [request(PROMPTS[0], tuple(range(20)), 10, stop_token_ids=(31, stop))]
        )[0],
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
    members = engine.add_request(request(PROMPTS[0], (1, 2), 20)) + engine.add_request(
        request(PROMPTS[1], (3,), 20)
    )
    for _ in range(5):
        assert engine.decode_step() == []
    assert len(engine.abort_samples()) == 3
    assert not engine.has_work
    results = [member.make_generated_sample() for member in members]
    assert [r.finish_reason for r in results] == ["abort"] * 3
    # the prompt's own pass gives the first of them
    assert results[0].token_ids == full[0][0].token_ids[:6]
    assert results[1].log_probs == pytest.approx(full[0][1].log_probs[:6], abs=1e-5)
    assert results[2].token_ids == ()


def test_abort_of_some_leaves_the_others_alone() -> None:
    engine = generator()
    gone = engine.add_request(request(PROMPTS[0], (1, 2), 20))
    kept = engine.add_request(request(PROMPTS[2], (3, 4), 20))
    engine.decode_step()
    assert set(map(id, engine.abort_samples(gone))) == set(map(id, gone))
    while engine.has_work:
        engine.decode_step()
    assert_same(
        [m.make_generated_sample() for m in kept],
        generator().generate([request(PROMPTS[2], (3, 4), 20)])[0],
    )


def test_retracted_samples_go_on_where_they_were() -> None:
    wanted = [request(p, (5, 6), 15) for p in PROMPTS]
    expected = generator().generate(wanted)
    engine = generator(max_num_seqs=6)
    members = [engine.add_request(r) for r in wanted]
    for _ in range(4):
        engine.decode_step()
        engine.decode_step()
        engine.retract_samples()
    while engine.has_work:
        engine.decode_step()
    got = [[m.make_generated_sample() for m in group] for group in members]
    assert [[s.token_ids for s in g] for g in got] == [[s.token_ids for s in g] for g in expected]
    assert got[0][0].log_probs == pytest.approx(expected[0][0].log_probs, abs=1e-5)


def test_cache_stays_within_the_token_budget() -> None:
    engine = generator(max_num_seqs=64, budget=160)
    requests = [request(p, tuple(range(6)), 30) for p in PROMPTS]
    members = [engine.add_request(r) for r in requests]
    while engine.has_work:
        engine.decode_step()
        assert engine._cache_slots.num_rows * engine._cache_slots.num_columns <= 160
    assert [[m.make_generated_sample().token_ids for m in g] for g in members] == [
        [s.token_ids for s in g] for g in generator().generate(requests)
    ]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request((), (1,), 4), "at least one prompt token"),
        (request((1,), (), 4), "one seed"),
        (request((1,), (1,), -1), "max_new_tokens >= 0"),
        (request((1, 2), (1,), 0), "it needs num_given >= 1"),
        (request((1, 32), (1,), 4), r"\[0, 32\)"),
        (request((1, 2), (1,), 255), "make 257, but max_position_embeddings is 256"),
        (request((1,), (-1,), 4), "seeds must lie"),
        (request((1,), (1,), 4, -0.5), "temperature"),
        (request((1,), (1,), 4, float("nan")), "temperature"),
        (request((1,), (1,), 4, top_p=0.0), r"top_p \(0.0\) must be above 0 and at most 1"),
        (request((1,), (1,), 4, top_p=1.5), r"top_p \(1.5\)"),
        (request((1,), (1,), 4, top_p=float("nan")), r"top_p \(nan\)"),
        (request((1,), (1,), 4, top_k=0), r"top_k \(0\) must be at least 1, or -1"),
        (request((1,), (1,), 4, top_k=-2), r"top_k \(-2\)"),
        (request((1,), (1,), 4, min_p=-0.1), r"min_p \(-0.1\) must be from 0"),
        (request((1,), (1,), 4, min_p=1.1), r"min_p \(1.1\)"),
        (
            request((1,), (1,), 4, min_new_tokens=-1),
            r"min_new_tokens \(-1\) must be from 0 to max_new_tokens \(4\)",
        ),
        (request((1,), (1,), 4, min_new_tokens=5), r"min_new_tokens \(5\)"),
        (
            request((1,), (1,), 4, stop_token_ids=(3, 32)),
            r"stop_token_ids \(\[32\]\) must be from 0 to 31",
        ),
        (request((1,), (1,), 4, stop_token_ids=(-1,)), r"stop_token_ids \(\[-1\]\) must be"),
        (
            request((1,), (1,), 4, stop_token_ids=tuple(range(32)), min_new_tokens=1),
            "leaves nothing to draw",
        ),
    ],
)
def test_what_cannot_work_is_refused(bad: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generator().add_request(bad)


def test_a_prompt_as_long_as_the_model_allows() -> None:
    prompt = tuple(i % 32 for i in range(255))
    assert generator().generate([request(prompt, (1,), 1, 0.0)])[0][
        0
    ].token_ids == reference_greedy(STOCK["qwen3"], prompt, 1)


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


def test_rows_that_moved_keep_their_own_way_of_sampling() -> None:
    """A sample in the middle is taken out; the last row moves into the gap."""
    sent = [
        request(PROMPTS[1], (1,), 12, t, **p)
        for t, p in ((1.0, {}), (0.0, {}), (0.4, {"top_k": 3}), (2.0, {}))
    ]
    engine = generator()
    members = [engine.add_request(r) for r in sent]
    engine.decode_step()
    engine.abort_samples(members[0])
    while engine.has_work:
        engine.decode_step()
    for one, (member,) in zip(sent[1:], members[1:], strict=True):
        assert_same([member.make_generated_sample()], generator().generate([one])[0])


# Which weights, whose keys and values


def steps(engine: BatchGenerator, number: int) -> None:
    for _ in range(number):
        assert engine.decode_step() == []


def finish(engine: BatchGenerator, members: list[PendingSample]) -> list[object]:
    while engine.has_work:
        engine.decode_step()
    return [member.make_generated_sample() for member in members]


def test_spans_and_retractions() -> None:
    engine = generator(max_num_seqs=3)
    first = engine.add_request(request(PROMPTS[0], (1, 2), 10))
    late = engine.add_request(request(PROMPTS[1], (3, 4), 6))
    engine.set_policy_version(5)
    steps(engine, 3)  # four tokens each; the second of `late` waits for a row
    engine.retract_samples()
    engine.retract_samples()  # what has no cache loses none
    engine.set_policy_version(6)
    engine.set_policy_version(7)
    results = finish(engine, [*first, *late])
    spans = [[(span.version, span.start, span.end) for span in r.version_spans] for r in results]
    assert spans == [
        [(5, 0, 4), (7, 4, 10)],
        [(5, 0, 4), (7, 4, 10)],
        [(5, 0, 4), (7, 4, 6)],
        [(7, 0, 6)],
    ]
    assert [r.policy_version for r in results] == [5, 5, 5, 7]
    assert [r.num_retractions for r in results] == [1, 1, 1, 0]


def test_an_aborted_sample_without_a_token_has_no_span() -> None:
    engine = generator(max_num_seqs=1)
    members = engine.add_request(request(PROMPTS[0], (1, 2), 10))
    engine.set_policy_version(5)
    steps(engine, 1)
    engine.set_policy_version(6)
    engine.abort_samples()
    one, none = (member.make_generated_sample() for member in members)
    assert one.version_spans == (VersionSpan(5, 0, 2),) and one.policy_version == 5
    assert none.version_spans == () and none.token_ids == () and none.policy_version == -1


def with_stale_cache(
    old: PreTrainedModel, new: PreTrainedModel, ids: list[int], count: int
) -> tuple[list, list]:
    """Greedy tokens and log-probs of transformers, whose cache of all but the last of `ids`
    comes from `old`.
    """
    tokens = []
    log_probs = []
    with torch.no_grad():
        cache = old(torch.tensor([ids[:-1]]), use_cache=True).past_key_values
        last = ids[-1]
        for _ in range(count):
            logits = new(torch.tensor([[last]]), past_key_values=cache, use_cache=True).logits[
                0, -1
            ]
            last = int(logits.argmax())
            tokens.append(last)
            log_probs.append(float(logits.log_softmax(-1)[last]))
    return tokens, log_probs


def test_in_place_goes_on_with_the_old_keys_and_values() -> None:
    new = tiny_qwen3(9)
    engine = generator(max_num_seqs=2)
    members = engine.add_request(request(PROMPTS[2], (1, 2), 14, 0.0)) + engine.add_request(
        request(PROMPTS[0], (3,), 6, 0.0)
    )
    steps(engine, 4)
    with torch.no_grad():
        for mine, other in zip(engine.model.module.parameters(), new.parameters(), strict=True):
            mine.copy_(other)
    engine.set_policy_version(1)
    one, two, waited = finish(engine, members)
    assert one.token_ids == two.token_ids and one.num_retractions == 0
    assert one.token_ids[:5] == reference_greedy(STOCK["qwen3"], PROMPTS[2], 5)
    tokens, log_probs = with_stale_cache(STOCK["qwen3"], new, [*PROMPTS[2], *one.token_ids[:5]], 9)
    assert list(one.token_ids[5:]) == tokens
    assert one.log_probs[5:] == pytest.approx(log_probs, abs=1e-4)
    recomputed = reference_log_probs(new, PROMPTS[2], one.token_ids)[5:]
    # the cache of the new weights is another
    assert (torch.tensor(log_probs) - recomputed).abs().max() > 0.01
    assert one.version_spans == (VersionSpan(-1, 0, 5), VersionSpan(1, 5, 14))
    # Read ahead with the old weights, but no token drawn: it is read anew.
    assert waited.token_ids == reference_greedy(new, PROMPTS[0], 6)
    assert waited.version_spans == (VersionSpan(1, 0, 6),)


def test_cached_tokens_are_those_that_another_sample_made_it_read() -> None:
    engine = generator(max_num_seqs=2)
    group = engine.add_request(request(PROMPTS[2], (1, 2, 3, 4), 5))
    alone = engine.add_request(request(PROMPTS[0], (5,), 5))
    steps(engine, 1)
    engine.retract_samples()  # the third finds nothing: the prompt is read again
    results = finish(engine, [*group, *alone])
    assert [r.num_cached_tokens for r in results] == [0, 7, 0, 7, 0]
    assert [r.num_retractions for r in results] == [1, 1, 0, 0, 0]


def test_a_released_cache_is_gone_and_samples_go_on_after_it() -> None:
    wanted = [request(p, (5, 6), 15) for p in PROMPTS]
    expected = generator().generate(wanted)
    engine = generator(max_num_seqs=6)
    members = [engine.add_request(r) for r in wanted]
    steps(engine, 3)
    assert engine.cache_bytes >= engine._cache_slots.cache.nbytes > 0
    old = engine._cache_slots.cache
    engine.release_cache()
    assert engine.cache_bytes == 0 and engine._cache_slots.cache.untyped_storage().nbytes() == 0
    # ours alone held it
    assert old.untyped_storage().nbytes() > 0 and old is not engine._cache_slots.cache
    with pytest.raises(AssertionError, match="released"):
        engine.decode_step()
    engine.release_cache()
    engine.resume_cache()
    engine.resume_cache()
    for sent, group in zip(expected, members, strict=True):
        assert_same(finish(engine, group), sent)
    assert engine.cache_bytes > 0
    assert [m.num_retractions for group in members for m in group] == [1] * 6 + [0] * 4

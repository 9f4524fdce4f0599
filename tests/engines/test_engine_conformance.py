"""What every engine promises, run against each: tokens, log-probs, seeds, stops, aborts,
refusals, a sync.

`make engine-conformance ENGINE=local` or `ENGINE=sglang` runs this file and its neighbours
test_engine_conformance_*. An engine joins by a line in SEEDED and UNSEEDED of conformance_tools.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from conformance_tools import (
    ENGINES,
    LONG,
    PROMPT,
    VOCAB,
    Call,
    Server,
    midway,
    sync,
    sync_weights,
    use_server,
    use_unseeded_server,
)
from rollout_tools import (
    assert_same,
    digests_of,
    reference_greedy,
    reference_log_probs,
    request,
    weights_of,
    with_entry,
    write_buckets,
)
from table_samples import StateSource
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_megatron.ranks.checkpoint.model_weights import iterate_local_shards, load_hf_weights
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.models.output_heads import get_head_weight
from rlhf_megatron.ranks.models.packed_attention import make_packed_documents
from rlhf_megatron.ranks.parallel.world import create_world, destroy_world
from rlhf_megatron.rollout.engine_interface import EngineError, EngineRequestError, GeneratedSample
from rlhf_megatron.rollout.fleet.engine_calls import make_call_name
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout

LogProbs = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]


@pytest.fixture(scope="module", params=ENGINES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from use_server(request, tmp_path_factory)


@pytest.fixture(scope="module", params=ENGINES)
def unseeded_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from use_unseeded_server(request, tmp_path_factory)


@pytest.fixture
def synced(server: Server) -> Iterator[tuple[Server, PreTrainedModel]]:
    """The server with the weights of seed 1 from a fresh sync."""
    sync(server, 1)
    yield server, server.model(1)
    server.engine.resume_decoding()


def test_serves_before_a_sync_with_its_own_weights(server: Server) -> None:
    if server.version == -1:
        assert server.engine.get_served_version() is None
        (sample,) = server.engine.generate([request(PROMPT, (1,), 5, 0.0)], 60)[0]
        assert sample.token_ids == reference_greedy(server.model(1), PROMPT, 5)
        assert sample.policy_version == -1


def test_greedy_and_log_probs(synced: tuple[Server, PreTrainedModel]) -> None:
    server, model = synced
    requests = [request(PROMPT[: 1 + i], (5, 6), 6 + i, t) for i, t in enumerate((0.0, 0.7, 1.0))]
    groups = server.engine.generate(requests, 60)
    for sent, group in zip(requests, groups, strict=True):
        assert len(group) == 2
        for got in group:
            temperature = sent.params.temperature or 1.0
            expected = reference_log_probs(model, sent.prompt_ids, got.token_ids, temperature)
            assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
            assert got.finish_reason == "length" and got.policy_version == server.version
    assert groups[0][0].token_ids == reference_greedy(model, PROMPT[:1], 6)
    assert server.engine.generate([], 60) == []


def test_seeds(synced: tuple[Server, PreTrainedModel]) -> None:
    engine = synced[0].engine
    first, second = engine.generate(
        [request(PROMPT, (1, 2, 3, 4), 16), request(PROMPT, (4, 3), 16)], 60
    )
    assert len({sample.token_ids for sample in first}) == 4
    assert_same(second, [first[3], first[2]])


def test_stop_token(synced: tuple[Server, PreTrainedModel]) -> None:
    server, model = synced
    free = reference_greedy(model, PROMPT, 12)
    stop = free[4]
    end = free.index(stop)
    (got,) = server.engine.generate([request(PROMPT, (1,), 12, 0.0, stop_token_ids=(stop,))], 60)[0]
    assert got.token_ids == free[: end + 1]
    assert got.finish_reason == "stop" and len(got.log_probs) == end + 1


def test_a_sync_changes_what_is_served(synced: tuple[Server, PreTrainedModel]) -> None:
    server, old = synced
    new = server.model(2)
    sync(server, 2)
    assert server.engine.get_served_version() == server.version
    (got,) = server.engine.generate([request(PROMPT, (1,), 10, 0.0)], 60)[0]
    assert got.token_ids == reference_greedy(new, PROMPT, 10) != reference_greedy(old, PROMPT, 10)
    expected = reference_log_probs(new, PROMPT, got.token_ids)
    assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
    assert got.policy_version == server.version
    assert server.engine.get_weight_digests() == digests_of(weights_of(new))
    assert not list(server.transfer_dir.glob("receipt*"))


def test_a_failed_sync_makes_it_stale_until_a_full_one(
    synced: tuple[Server, PreTrainedModel],
) -> None:
    server = synced[0]
    engine = synced[0].engine
    version = server.version + 1
    first, second = write_buckets(weights_of(server.model(3)), server.transfer_dir, version)
    engine.begin_weight_update(version)
    with pytest.raises(EngineError):
        engine.generate([request(PROMPT, (1,), 4)], 60)
    engine.update_weights(first)
    with pytest.raises(EngineError, match="digest"):
        engine.update_weights(with_entry(second, 0, digest="0" * 16))
    with pytest.raises(EngineError):
        engine.commit_weight_update(version)
    assert engine.get_served_version() is None
    with pytest.raises(EngineError, match="STALE"):
        engine.generate([request(PROMPT, (1,), 4)], 60)
    sync(server, 3)
    (got,) = engine.generate([request(PROMPT, (1,), 6, 0.0)], 60)[0]
    assert got.token_ids == reference_greedy(server.model(3), PROMPT, 6)


def test_a_sync_meets_a_response_in_its_middle(synced: tuple[Server, PreTrainedModel]) -> None:
    """Nobody paused: what comes after is the new model's, over keys and values that it has
    computed anew.
    """
    server, old = synced
    new = server.model(2)

    def attempt(delay: float) -> tuple[int, list[GeneratedSample]]:
        sync(server, 1)
        call = Call(server.engine, request(PROMPT, (1, 2), LONG, 0.0))
        time.sleep(delay)
        sync(server, 2)
        samples = call.samples()
        spans = [sample.version_spans for sample in samples]
        if all(len(span) == 2 for span in spans):
            return 0, samples
        return (1 if samples[0].policy_version == server.version - 1 else -1), samples

    for sample in midway(attempt):
        first, second = sample.version_spans
        assert (first.version, second.version) == (server.version - 1, server.version)
        assert (
            first.start == 0
            and first.end == second.start
            and second.end == len(sample.token_ids) == LONG
        )
        assert sample.policy_version == server.version - 1 and sample.finish_reason == "length"
        cut = first.end
        assert sample.token_ids[:cut] == reference_greedy(old, PROMPT, cut)
        assert sample.token_ids[cut:] == reference_greedy(
            new, (*PROMPT, *sample.token_ids[:cut]), LONG - cut
        )
        got = torch.tensor(sample.log_probs)
        assert (got - reference_log_probs(old, PROMPT, sample.token_ids))[:cut].abs().max() <= 1e-4
        assert (got - reference_log_probs(new, PROMPT, sample.token_ids))[cut:].abs().max() <= 1e-4


def test_abort_keeps_a_prefix(synced: tuple[Server, PreTrainedModel]) -> None:
    server, model = synced

    def attempt(delay: float) -> tuple[int, GeneratedSample]:
        call = Call(server.engine, request(PROMPT, (9,), LONG, 0.0))
        time.sleep(delay)
        server.engine.abort_calls()
        (sample,) = call.samples()
        return (len(sample.token_ids) == LONG) - (not sample.token_ids), sample

    sample = midway(attempt)
    assert sample.finish_reason == "abort" and len(sample.log_probs) == len(sample.token_ids)
    assert sample.token_ids == reference_greedy(model, PROMPT, len(sample.token_ids))
    assert server.engine.generate([request(PROMPT, (1,), 4)], 60)[0][0].finish_reason == "length"


def test_an_abort_by_name_leaves_the_others(synced: tuple[Server, PreTrainedModel]) -> None:
    """Two calls of two samples run; one of them is ended,
    and a name that nobody has ends nothing.
    """
    server, model = synced
    assert server.engine.get_max_running_samples() == {"local": 256, "sglang": 16}[server.kind]
    whole = reference_greedy(model, PROMPT, LONG)

    def attempt(delay: float) -> tuple[int, tuple[Call, Call]]:
        name = make_call_name(2)
        named, other = (
            Call(server.engine, request(PROMPT, (1, 2), LONG, 0.0), n)
            for n in (name, make_call_name(2))
        )
        time.sleep(delay)
        server.engine.abort_calls([name, make_call_name(2)])
        lengths = [len(sample.token_ids) for sample in named.samples()]
        return (1 if max(lengths) == LONG else -1 if min(lengths) == 0 else 0), (named, other)

    named, other = midway(attempt)
    for sample in named.samples():
        assert (
            sample.finish_reason == "abort" and sample.token_ids == whole[: len(sample.token_ids)]
        )
    assert [(s.token_ids, s.finish_reason) for s in other.samples()] == [(whole, "length")] * 2


def test_given_tokens_get_their_log_probs(synced: tuple[Server, PreTrainedModel]) -> None:
    """Nothing is drawn for them, beside others;
    a prompt that was read before makes no difference.
    """
    server, model = synced
    tokens = (7, 3, 19, 30, 2)
    scored = [
        replace(request((*PROMPT, *tokens)[: 4 + count], (1,), 0), num_given=given)
        for count, given in ((5, 5), (5, 2), (1, 1), (5, 8))
    ]
    drawn = request(PROMPT, (1, 2), 6)
    for asked in ([*scored[:2], drawn, *scored[2:]], scored):
        groups = [group for group in server.engine.generate(asked, 60) if len(group) == 1]
        for (sample,), given in zip(groups, scored, strict=True):
            before = given.prompt_ids[: -given.num_given]
            after = given.prompt_ids[-given.num_given :]
            assert tuple(sample.token_ids) == after and sample.finish_reason == "length"
            expected = reference_log_probs(model, before, after)
            assert (torch.tensor(sample.log_probs) - expected).abs().max() <= 1e-5
            assert sample.policy_version == server.version


REFUSED = {
    "too_many_new_tokens": (PROMPT, {"max_new_tokens": 300}, "256"),
    "too_long_a_prompt": ((1,) * 260, {"max_new_tokens": 1}, "256"),
    "empty_prompt": ((), {"max_new_tokens": 4}, "empty|at least one prompt token"),
    "token_after_the_last": ((1, VOCAB, 2), {"max_new_tokens": 4}, "vocabulary"),
    "token_before_the_first": ((-1, 1), {"max_new_tokens": 4}, "vocabulary"),
    "no_new_tokens": (PROMPT, {"max_new_tokens": 0}, "num_given"),
    "fewer_than_no_tokens": (PROMPT, {"max_new_tokens": -1}, "max_new_tokens"),
    "top_p": (PROMPT, {"max_new_tokens": 4, "top_p": 1.5}, r"top_p.*1\.5"),
    "top_k": (PROMPT, {"max_new_tokens": 4, "top_k": 0}, "top_k.*0"),
    "min_p": (PROMPT, {"max_new_tokens": 4, "min_p": -0.5}, r"min_p.*-0\.5"),
    "temperature": (PROMPT, {"max_new_tokens": 4, "temperature": -1.0}, "temperature.*-1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_is_refused(server: Server, case: str) -> None:
    """With the reason, and so is a good one that comes with it; the engine lives on."""
    engine = server.engine
    prompt_ids, params, words = REFUSED[case]
    with pytest.raises(EngineRequestError, match=words):
        engine.generate([request(PROMPT, (1,), 4), request(prompt_ids, (1,), **params)], 60)  # type: ignore[arg-type]
    assert engine.generate([request(PROMPT, (1,), 4)], 60)[0][0].finish_reason == "length"


def test_an_unknown_parameter_is_refused(server: Server) -> None:
    """By the server itself: no client of ours can send one."""
    bodies = {
        "local": {
            "requests": [
                {"prompt_ids": [1], "seeds": [1], "params": {"max_new_tokens": 4, "warmth": 1.0}}
            ]
        },
        "sglang": {"input_ids": [[1]], "sampling_params": [{"max_new_tokens": 4, "warmth": 1.0}]},
    }
    http = HttpClient(server.engine.address)
    # SGLang does not say which
    with pytest.raises(EngineError, match="warmth" if server.kind == "local" else "500"):
        http.post("/generate", bodies[server.kind], 30)
    server.engine.check_health(30)


def test_biases_and_rescaled_angles_are_the_trainers(unseeded_server: Server) -> None:
    """Of a Qwen2 model, or of one with experts: the engine's log-probs are those of the trainer's
    Megatron model, whose weights it was sent.
    """
    server = unseeded_server
    trained = unseeded_server.model(2)
    with trainer_of(trained) as (weights, trainers_log_probs):
        sync_weights(server, weights)
        assert server.engine.get_weight_digests() == digests_of(weights_of(trained))
        requests = [
            request(PROMPT, (1,), LONG, 0.0),
            request(PROMPT, (1, 2), 60),
            request(PROMPT[:2], (3,), 20),
        ]
        for sent, group in zip(requests, server.engine.generate(requests, 60), strict=True):
            for got in group:
                expected = trainers_log_probs(sent.prompt_ids, got.token_ids)
                assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
                assert got.policy_version == server.version


@contextmanager
def trainer_of(model: PreTrainedModel) -> Iterator[tuple[dict[str, Tensor], LogProbs]]:
    """What a Megatron model with the weights of `model` exports, and its log-probs of a
    response to a prompt.
    """
    hf_config = {**model.config.to_dict(), "model_type": model.config.model_type}
    table = make_weight_table(hf_config)
    chunk = build_megatron_model(
        hf_config, create_world(ParallelLayout(1), torch.device("cpu")), torch.float32
    ).chunks[0]
    load_hf_weights([chunk], table, StateSource(weights_of(model)), 0, 1)
    weights = {
        hf.name: tensor
        for rule, shard in iterate_local_shards([chunk], table)
        for hf, tensor in zip(rule.hf_tensors, rule.to_hf(shard), strict=True)
    }

    def log_probs(prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
        ids = torch.tensor([[*prompt, *response]])
        length = ids.shape[1]
        document = make_packed_documents(
            torch.tensor([0, length], dtype=torch.int32), length, torch.arange(length)
        )
        with torch.no_grad():
            hidden = chunk(ids, torch.arange(length)[None], None, packed_seq_params=document)[0]
            log_p = (hidden @ get_head_weight(chunk).T).log_softmax(-1)
        return log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]

    try:
        yield weights, log_probs
    finally:
        destroy_world()

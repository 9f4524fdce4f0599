"""What every engine promises about weight syncs: their session, what is served after one, memory
that is given away.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from conformance_tools import (
    LONG,
    LONG_ENGINES,
    PROMPT,
    Call,
    Server,
    sync,
    use_server,
    use_unseeded_server,
)
from rollout_tools import (
    digests_of,
    reference_greedy,
    reference_log_probs,
    reference_rows,
    request,
    weights_of,
    write_buckets,
)

from rlhf_megatron.rollout.engine_interface import EngineError


@pytest.fixture(scope="module", params=LONG_ENGINES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from use_server(request, tmp_path_factory)


@pytest.fixture(scope="module", params=LONG_ENGINES)
def unseeded_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from use_unseeded_server(request, tmp_path_factory)


@pytest.fixture
def synced(server: Server) -> Iterator[Server]:
    """With the weights of seed 1, and all memory, also afterwards."""
    sync(server, 1)
    yield server
    server.engine.resume_memory()
    server.engine.resume_decoding()


def assert_serves(server: Server, seed: int) -> None:
    model = server.model(seed)
    (got,) = server.engine.generate([request(PROMPT, (1,), 8, 0.0)], 60)[0]
    assert got.token_ids == reference_greedy(model, PROMPT, 8)
    assert (
        torch.tensor(got.log_probs) - reference_log_probs(model, PROMPT, got.token_ids)
    ).abs().max() <= 1e-4
    assert got.policy_version == server.version == server.engine.get_served_version()


def assert_refuses(server: Server, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        server.engine.generate([request(PROMPT, (1,), 4)], 60)


def send(server: Server, seed: int, version: int) -> None:
    for manifest in write_buckets(weights_of(server.model(seed)), server.transfer_dir, version):
        server.engine.update_weights(manifest)


def test_a_bucket_without_a_session_changes_nothing(synced: Server) -> None:
    (bucket,) = write_buckets(
        weights_of(synced.model(3)), synced.transfer_dir, synced.version + 1, num_buckets=1
    )
    with pytest.raises(EngineError, match=r"begin_weight_update|open sync"):
        synced.engine.update_weights(bucket)
    assert_serves(synced, 1)


def test_a_commit_without_a_session_changes_nothing(synced: Server) -> None:
    with pytest.raises(EngineError, match=str(synced.version + 1)):
        synced.engine.commit_weight_update(synced.version + 1)
    assert_serves(synced, 1)
    # the answer to the first one could have been lost
    synced.engine.commit_weight_update(synced.version)
    assert_serves(synced, 1)


def test_a_second_begin_starts_anew(synced: Server) -> None:
    """What came in the first session does not count."""
    version = synced.version + 2
    synced.engine.begin_weight_update(version - 1)
    first, second = write_buckets(weights_of(synced.model(3)), synced.transfer_dir, version - 1)
    synced.engine.update_weights(first)
    synced.engine.begin_weight_update(version)
    _, second = write_buckets(weights_of(synced.model(4)), synced.transfer_dir, version)
    synced.engine.update_weights(second)
    with pytest.raises(EngineError, match=str(version - 1)):
        synced.engine.commit_weight_update(version - 1)
    with pytest.raises(EngineError, match="never came"):
        synced.engine.commit_weight_update(version)
    assert_refuses(synced, "STALE")
    synced.version = version
    sync(synced, 4)
    assert_serves(synced, 4)


def test_an_incomplete_sync_is_not_committed(synced: Server) -> None:
    version = synced.version + 1
    synced.engine.begin_weight_update(version)
    synced.engine.update_weights(
        write_buckets(weights_of(synced.model(3)), synced.transfer_dir, version)[0]
    )
    with pytest.raises(EngineError, match="never came"):
        synced.engine.commit_weight_update(version)
    assert synced.engine.get_served_version() is None
    assert_refuses(synced, "STALE")
    synced.engine.resume_decoding()
    assert_refuses(synced, "STALE")


def test_an_old_version_is_refused(synced: Server) -> None:
    for version in (synced.version, synced.version - 1):
        with pytest.raises(EngineError, match=f"{version}.*above"):
            synced.engine.begin_weight_update(version)
    assert_serves(synced, 1)


def test_the_same_version_again_as_a_full_resync(synced: Server) -> None:
    synced.engine.begin_weight_update(synced.version, is_full_resync=True)
    send(synced, 4, synced.version)
    synced.engine.commit_weight_update(synced.version)
    assert_serves(synced, 4)
    assert synced.engine.get_weight_digests() == digests_of(weights_of(synced.model(4)))


def test_the_prefix_cache_is_empty_after_a_sync(unseeded_server: Server) -> None:
    """A prompt that was cached gives the new model's log-probs."""
    server = unseeded_server
    prompt = tuple(i % 7 + 1 for i in range(40))
    sync(server, 1)
    for seed in (1, 2):
        sync(server, seed)
        model = server.model(seed)
        num = server.num_caches
        found = [
            server.engine.generate([request(prompt, (1,), 8, 0.0)], 60)[0][0]
            for _ in range(2 * num)
        ]
        assert [first.num_cached_tokens for first in found[:num]] == [0] * num
        if server.kind == "sglang":  # `local` keeps no prompts
            assert min(again.num_cached_tokens for again in found[num:]) >= len(prompt) - 1
        for got in found:
            expected = reference_log_probs(model, prompt, got.token_ids)
            assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4
            assert got.policy_version == server.version


def test_a_group_shares_its_prompt(unseeded_server: Server) -> None:
    """However an engine shares it, the log-probs are those of the whole prompt."""
    model = unseeded_server.model(1)
    prompt = tuple(i % 5 + 2 for i in range(60))
    sync(unseeded_server, 1)
    (group,) = unseeded_server.engine.generate([request(prompt, tuple(range(6)), 10)], 60)
    for got in group:
        expected = reference_log_probs(model, prompt, got.token_ids)
        assert (torch.tensor(got.log_probs) - expected).abs().max() <= 1e-4


def test_the_key_value_cache_is_released_and_comes_back(synced: Server) -> None:
    """Weights stay: the same version is served afterwards, without a sync."""
    engine = synced.engine
    for _ in range(2):
        engine.release_memory(["kv_cache"])
        assert_refuses(synced, "cache")
    engine.check_health(30)
    for _ in range(2):
        engine.resume_memory(["kv_cache"])
        assert_serves(synced, 1)


def test_weights_are_released_and_come_back(synced: Server) -> None:
    engine = synced.engine
    for _ in range(2):
        engine.release_memory(["weights"])
        assert engine.get_served_version() is None
        assert_refuses(synced, "STALE")
    with pytest.raises(EngineError, match="released"):
        engine.begin_weight_update(synced.version + 1)
    for _ in range(2):
        engine.resume_memory(["weights"])
    assert_refuses(synced, "STALE")
    sync(synced, 5)
    assert_serves(synced, 5)


def test_a_sync_needs_no_key_value_cache(synced: Server) -> None:
    """As in a run where trainer and engine share a device: the cache comes last, before the
    commit or after it.
    """
    engine = synced.engine
    for seed, is_before_commit in ((5, True), (6, False)):
        engine.release_memory()
        engine.resume_memory(["weights"])
        synced.version += 1
        engine.begin_weight_update(synced.version)
        send(synced, seed, synced.version)
        if is_before_commit:
            engine.resume_memory(["kv_cache"])
        engine.commit_weight_update(synced.version)
        if not is_before_commit:
            assert_refuses(synced, "cache")
            engine.resume_memory(["kv_cache"])
        assert_serves(synced, seed)
        assert engine.get_weight_digests() == digests_of(weights_of(synced.model(seed)))


def test_what_runs_waits_for_the_key_value_cache(synced: Server) -> None:
    call = Call(synced.engine, request(PROMPT, (1,), LONG, 0.0))
    time.sleep(0.05)
    synced.engine.release_memory(["kv_cache"])
    is_held = call.runs_after(0.3)
    synced.engine.resume_memory(["kv_cache"])
    (sample,) = call.samples()
    assert is_held or sample.num_retractions == 0
    assert (
        sample.token_ids == reference_greedy(synced.model(1), PROMPT, LONG)
        and sample.finish_reason == "length"
    )


def test_what_runs_when_weights_are_released(synced: Server) -> None:
    """It goes on after the next sync, and no token of it comes from weights that are undefined."""
    call = Call(synced.engine, request(PROMPT, (1,), LONG, 0.0))
    time.sleep(0.05)
    synced.engine.release_memory()
    is_held = call.runs_after(0.3)
    synced.engine.resume_memory()
    sync(synced, 5)
    (sample,) = call.samples()
    cut = sample.version_spans[0].end if sample.policy_version < synced.version else 0
    assert cut < LONG or not is_held
    rows = [
        reference_rows(model, PROMPT, sample.token_ids)
        for model in (synced.model(1), synced.model(5))
    ]
    assert sample.token_ids == tuple(torch.cat([rows[0][:cut], rows[1][cut:]]).argmax(-1).tolist())

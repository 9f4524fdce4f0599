"""Pause modes, weight syncs and released memory in the middle of a generation, without a server.

`decode` runs a fixed number of steps between a resume and a pause in one call, so that nothing here
depends on time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from rollout_tools import (
    assert_same,
    digests_of,
    reference_greedy,
    reference_log_probs,
    request,
    tiny_qwen3,
    weights_of,
    write_buckets,
)

from rlhf_megatron.rollout.engine_interface import (
    GeneratedSample,
    GenerateRequest,
    MemoryPart,
    PauseMode,
    VersionSpan,
)
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.cache_slots import PendingSample
from rlhf_megatron.rollout.local.decode_service import (
    DecodeService,
    ReleasedCacheError,
    StaleWeightsError,
)
from rlhf_megatron.rollout.local.local_model import LocalModel
from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver

OLD = tiny_qwen3(1)
NEW = tiny_qwen3(2)
PROMPT = (5, 6, 7, 8)
LENGTH = 16
Groups = list[list[GeneratedSample]]


class Engine:
    """A service of `OLD` as version 0, paused in place."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        model = LocalModel(tiny_qwen3(1))
        self.service = DecodeService(
            BatchGenerator(model, 4, 4096), WeightReceiver(model.module, directory, True)
        )
        self.generator = self.service.generator
        self.call(self.service.begin_weight_update, 0, False)
        self.finish_sync(0, OLD)
        self.pause("in_place")

    def call(self, function: object, *args: object) -> object:
        assert callable(function)
        return self.service.run_in_decode_loop(lambda: function(*args)).result(30)

    def pause(self, mode: PauseMode) -> None:
        self.call(self.service.pause_decoding, mode)

    def submit(self, *requests: GenerateRequest) -> Future[Groups]:
        job, admitted = self.service.submit_generate(requests)
        admitted.result(30)
        return job.future

    def decode(self, number: int, mode: PauseMode = "in_place") -> None:
        """Samples that run have `number` + 1 tokens more where they begin, `number` more
        where they go on.
        """

        def steps() -> None:
            self.service.resume_decoding()
            for _ in range(number):
                self.service._deliver_samples(self.generator.decode_step())
            self.service.pause_decoding(mode)

        self.call(steps)

    def running(self, params: int = LENGTH, seeds: tuple[int, ...] = (1, 2)) -> Future[Groups]:
        """A group with five tokens, paused in place."""
        future = self.submit(request(PROMPT, seeds, params, 0.0))
        self.decode(4)
        return future

    def finish_sync(self, version: int, model: object) -> None:
        for manifest in write_buckets(weights_of(model), self.directory, version):
            self.call(self.service.update_weights, manifest)
        self.call(self.service.commit_weight_update, version)

    def sync(self, version: int, model: object) -> None:
        self.call(self.service.begin_weight_update, version, False)
        self.finish_sync(version, model)

    def release(self, *parts: MemoryPart) -> None:
        self.call(self.service.release_memory, parts)

    def resume_memory(self, *parts: MemoryPart) -> None:
        self.call(self.service.resume_memory, parts)

    def result(self, future: Future[Groups]) -> list[GeneratedSample]:
        """After a resume."""
        self.call(self.service.resume_decoding)
        return future.result(30)[0]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.service.close()


def unpaused() -> GeneratedSample:
    return BatchGenerator(LocalModel(tiny_qwen3(1)), 4, 4096).generate(
        [request(PROMPT, (1,), LENGTH, 0.0)]
    )[0][0]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing_but_the_count(engine: Engine, mode: PauseMode) -> None:
    future = engine.running()
    for _ in range(2):
        engine.pause(mode)  # twice is as good as once
        assert (engine.generator.cache_bytes > 0) and len(engine.generator._running_samples) == (
            2 if mode == "in_place" else 0
        )
    assert not future.done()
    for got in engine.result(future):
        assert (
            got.token_ids == reference_greedy(OLD, PROMPT, LENGTH) and got.finish_reason == "length"
        )
        assert got.log_probs == pytest.approx(unpaused().log_probs, abs=1e-4)
        assert got.num_retractions == (1 if mode == "retract" else 0)
        assert got.version_spans == (VersionSpan(0, 0, LENGTH),)


def test_pause_with_abort_ends_what_runs_and_holds_what_comes(engine: Engine) -> None:
    future = engine.running(seeds=(1, 2, 3, 4))
    queued = engine.submit(request(PROMPT, (5,), 3))
    # The second came during the pause: it is no part of what was running.
    engine.pause("abort")
    for got in future.result(5)[0]:
        assert got.finish_reason == "abort" and got.token_ids == reference_greedy(OLD, PROMPT, 5)
        assert len(got.log_probs) == 5 and got.version_spans == (VersionSpan(0, 0, 5),)
    late = engine.submit(request(PROMPT, (6,), 3))
    engine.pause("abort")
    engine.pause("retract")
    engine.pause("in_place")
    engine.pause("abort")
    assert not queued.done() and not late.done() and not engine.generator.has_work
    assert [got.finish_reason for got in engine.result(queued)] == ["length"]
    assert [got.finish_reason for got in late.result(30)[0]] == ["length"]


def test_pause_with_abort_ends_what_waits_for_a_row_too(engine: Engine) -> None:
    first = request(PROMPT, (1, 2, 3), LENGTH, 0.0)
    second = request(PROMPT[:2], (4, 5), LENGTH, 0.0)
    future = engine.submit(first, second)  # four rows for five samples
    engine.decode(2, mode="abort")
    samples = [sample for group in future.result(5) for sample in group]
    assert [len(sample.token_ids) for sample in samples] == [3, 3, 3, 3, 0]
    assert {sample.finish_reason for sample in samples} == {"abort"}


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_engine_can_still_be_told_to_abort(engine: Engine, mode: PauseMode) -> None:
    future = engine.running()
    engine.pause(mode)
    engine.pause("abort")
    assert [sample.token_ids for sample in future.result(5)[0]] == [
        reference_greedy(OLD, PROMPT, 5)
    ] * 2


def test_an_abort_ends_what_came_during_a_pause(engine: Engine) -> None:
    running = engine.running()
    held = engine.submit(request(PROMPT, (5,), 3))
    engine.call(engine.service.abort_calls)
    assert [len(sample.token_ids) for sample in running.result(5)[0]] == [5, 5]
    assert [(sample.token_ids, sample.finish_reason) for sample in held.result(5)[0]] == [
        ((), "abort")
    ]


def test_an_abort_by_name_ends_that_call_alone(engine: Engine) -> None:
    """Of four calls two are named: one that runs, one that came during the pause."""
    named, admitted = engine.service.submit_generate(
        [request(PROMPT, (2, 3), LENGTH, 0.0)], "call-2"
    )
    admitted.result(30)
    running = engine.running(seeds=(1,))
    late, admitted = engine.service.submit_generate([request(PROMPT, (4,), 3)], "late-1")
    admitted.result(30)
    held = engine.submit(request(PROMPT, (5,), 3))
    engine.call(engine.service.abort_calls, ("call-2", "late-1", "nobody-1"))
    for got in named.future.result(5)[0]:
        assert (got.token_ids, got.finish_reason) == (reference_greedy(OLD, PROMPT, 5), "abort")
    assert [(got.token_ids, got.finish_reason) for got in late.future.result(5)[0]] == [
        ((), "abort")
    ]
    assert not running.done() and not held.done() and len(engine.generator._running_samples) == 1
    assert [got.token_ids for got in engine.result(running)] == [
        reference_greedy(OLD, PROMPT, LENGTH)
    ]
    assert [got.finish_reason for got in held.result(30)[0]] == ["length"]


def test_a_client_that_leaves_during_a_pause(engine: Engine) -> None:
    job, admitted = engine.service.submit_generate([request(PROMPT, (5,), 3)])
    admitted.result(5)
    engine.call(engine.service.drop_job, job)
    other = engine.submit(request(PROMPT, (6,), 3))
    engine.result(other)
    assert not job.future.done() and not engine.generator.has_work


@pytest.mark.parametrize("mode", [None, "retract"])
def test_a_sync_has_the_cache_computed_again(engine: Engine, mode: PauseMode | None) -> None:
    """Also where the engine was not paused: the sync retracts what runs."""
    future = engine.submit(request(PROMPT, (1, 2), LENGTH, 0.0))
    if mode is None:

        def steps_and_begin() -> None:
            engine.service.resume_decoding()
            for _ in range(4):
                engine.service._deliver_samples(engine.generator.decode_step())
            engine.service.begin_weight_update(1, False)

        engine.call(steps_and_begin)
        engine.finish_sync(1, NEW)
    else:
        engine.decode(4, mode)
        engine.sync(1, NEW)
    (got, other) = engine.result(future)
    assert_same([got], [other])
    assert got.token_ids[:5] == reference_greedy(OLD, PROMPT, 5)
    assert got.token_ids[5:] == reference_greedy(NEW, (*PROMPT, *got.token_ids[:5]), LENGTH - 5)
    expected = reference_log_probs(NEW, PROMPT, got.token_ids)[5:].tolist()
    assert got.log_probs[5:] == pytest.approx(expected, abs=1e-4)
    assert (
        got.version_spans == (VersionSpan(0, 0, 5), VersionSpan(1, 5, LENGTH))
        and got.policy_version == 0
    )
    assert got.num_retractions == 1


def test_a_sync_of_an_engine_paused_in_place_leaves_the_old_cache(engine: Engine) -> None:
    future = engine.running()
    held = engine.submit(request(PROMPT, (7,), 5, 0.0))
    engine.sync(1, NEW)
    engine.call(engine.service.commit_weight_update, 1)  # again, as after a lost answer
    assert len(engine.generator._running_samples) == 2
    (got, _) = engine.result(future)
    assert (
        got.version_spans == (VersionSpan(0, 0, 5), VersionSpan(1, 5, LENGTH))
        and got.num_retractions == 0
    )
    recomputed = reference_log_probs(NEW, PROMPT, got.token_ids)[5:].tolist()
    assert max(abs(a - b) for a, b in zip(got.log_probs[5:], recomputed, strict=True)) > 0.01
    (fresh,) = held.result(30)[0]
    assert fresh.token_ids == reference_greedy(NEW, PROMPT, 5)  # nothing of it was read before
    assert fresh.version_spans == (VersionSpan(1, 0, 5),)


def test_a_failed_sync_fails_what_waits(engine: Engine) -> None:
    running = engine.running()
    held = engine.submit(request(PROMPT, (5,), 3))
    engine.call(engine.service.begin_weight_update, 1, False)
    with pytest.raises(ValueError, match="never came"):
        engine.call(engine.service.commit_weight_update, 1)
    for future in (running, held):
        with pytest.raises(StaleWeightsError, match="never came"):
            future.result(5)


def test_a_stray_bucket_harms_nobody_who_waits(engine: Engine) -> None:
    """One that comes a second time, after its sync."""
    future = engine.running()
    (late, _) = write_buckets(weights_of(OLD), engine.directory, 0)
    with pytest.raises(ValueError, match="open sync is None"):
        engine.call(engine.service.update_weights, late)
    with pytest.raises(ValueError, match="open sync is None"):
        engine.call(engine.service.commit_weight_update, 4)
    assert [sample.finish_reason for sample in engine.result(future)] == ["length"] * 2


def test_only_the_cache_released(engine: Engine) -> None:
    """No sync is needed afterwards, but one can come in between."""
    future = engine.running()
    engine.release("kv_cache")
    engine.release("kv_cache")
    engine.call(engine.service.resume_decoding)
    assert engine.generator.cache_bytes == 0 and engine.service.weights.num_bytes > 0
    with pytest.raises(
        ReleasedCacheError, match=r"memory is released \(kv_cache\); resume_memory must come before"
    ):
        engine.submit(request(PROMPT, (5,), 3))
    assert engine.service.weights.stale_reason is None
    engine.resume_memory("kv_cache", "weights")
    got = engine.result(future)[0]
    assert got.token_ids == reference_greedy(OLD, PROMPT, LENGTH) and got.num_retractions == 1
    engine.release("kv_cache")
    engine.sync(1, NEW)
    engine.resume_memory("kv_cache")
    (fresh,) = engine.submit(request(PROMPT, (5,), 6, 0.0)).result(30)[0]
    assert fresh.token_ids == reference_greedy(NEW, PROMPT, 6) and fresh.policy_version == 1


def test_the_order_of_a_colocated_step(engine: Engine) -> None:
    """Both parts go, weights come back, a full sync, then the cache."""
    future = engine.running()
    engine.pause("retract")
    engine.release("weights", "kv_cache")
    parameters = list(engine.generator.model.module.parameters())
    assert [p.untyped_storage().nbytes() for p in parameters] == [0] * len(parameters)
    assert engine.generator.cache_bytes == 0
    with pytest.raises(StaleWeightsError, match=r"memory is released \(weights\)"):
        engine.submit(request(PROMPT, (5,), 3))
    with pytest.raises(
        ValueError, match="the weights' memory is released; resume_memory must come before"
    ):
        engine.call(engine.service.begin_weight_update, 1, False)
    engine.resume_memory("weights")
    with pytest.raises(StaleWeightsError, match="have not been sent again"):
        engine.submit(request(PROMPT, (5,), 3))
    engine.sync(1, NEW)
    assert engine.service.weights.compute_digests() == digests_of(weights_of(NEW))
    with pytest.raises(ReleasedCacheError, match="kv_cache"):
        engine.submit(request(PROMPT, (5,), 3))
    engine.resume_memory("kv_cache")
    (got, _) = engine.result(future)
    assert (
        got.version_spans == (VersionSpan(0, 0, 5), VersionSpan(1, 5, LENGTH))
        and got.num_retractions == 1
    )
    assert got.token_ids[5:] == reference_greedy(NEW, (*PROMPT, *got.token_ids[:5]), LENGTH - 5)


def test_only_the_weights_released_keeps_a_cache_that_was_paused_in_place(engine: Engine) -> None:
    future = engine.running()
    engine.release("weights")
    assert len(engine.generator._running_samples) == 2 and engine.generator.cache_bytes > 0
    engine.resume_memory("weights")
    engine.sync(1, OLD)
    got = engine.result(future)[0]
    assert got.token_ids == reference_greedy(OLD, PROMPT, LENGTH) and got.num_retractions == 0


def test_a_full_disk_fails_the_call_and_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are handed out when files of routes are written."""

    def no_room(member: PendingSample) -> GeneratedSample:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(PendingSample, "make_generated_sample", no_room)
        failed = engine.submit(request(PROMPT, (1,), 2))
        engine.call(engine.service.resume_decoding)
        with pytest.raises(OSError, match="No space left"):
            failed.result(30)
    engine.pause("in_place")
    future = engine.submit(request(PROMPT, (1,), 2))
    engine.call(engine.service.resume_decoding)
    assert len(future.result(30)[0][0].token_ids) == 2

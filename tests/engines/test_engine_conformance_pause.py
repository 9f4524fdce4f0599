"""What every engine promises when it is paused in the middle of a generation, with a weight sync
then and without.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from conformance_tools import LONG, LONG_ENGINES, PROMPT, Call, Server, midway, sync, use_server
from rollout_tools import picked, reference_greedy, reference_rows, reference_rows_over, request

from rlhf_megatron.rollout.engine_interface import (
    EngineTimeoutError,
    GeneratedSample,
    PauseMode,
    VersionSpan,
)

HOLDS_S = 0.3  # nothing comes meanwhile


@pytest.fixture(scope="module", params=LONG_ENGINES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    yield from use_server(request, tmp_path_factory)


@pytest.fixture
def resumed(server: Server) -> Iterator[Server]:
    """With the weights of seed 1, decoding, and so again afterwards."""
    server.engine.resume_decoding()
    sync(server, 1)
    yield server
    server.engine.resume_decoding()


def interrupted(server: Server, mode: PauseMode, seed: int | None) -> GeneratedSample:
    """A greedy response of seed 1 that was paused in its middle, got new weights, if any,
    and was resumed.
    """

    def attempt(delay: float) -> tuple[int, GeneratedSample]:
        sync(server, 1)
        call = Call(server.engine, request(PROMPT, (1,), LONG, 0.0))
        time.sleep(delay)
        server.engine.pause_decoding(mode)
        is_held = call.runs_after(HOLDS_S)
        if seed is not None:
            sync(server, seed)
            assert call.runs_after(HOLDS_S) == is_held, (
                "a pause lasts until it is undone, also through a weight sync"
            )
        server.engine.resume_decoding()
        (sample,) = call.samples()
        if mode == "abort":
            return (sample.finish_reason == "length") - (not sample.token_ids), sample
        if not is_held:
            return 1, sample
        has_begun = sample.policy_version == server.version - (seed is not None)
        return (0 if has_begun else -1), sample

    return midway(attempt)


@pytest.mark.parametrize("seed", [None, 2], ids=["as_it_was", "new_weights"])
def test_pause_and_abort(resumed: Server, seed: int | None) -> None:
    sample = interrupted(resumed, "abort", seed)
    assert sample.finish_reason == "abort"
    assert sample.token_ids == reference_greedy(resumed.model(1), PROMPT, len(sample.token_ids))
    (after,) = resumed.engine.generate([request(PROMPT, (1,), 6, 0.0)], 60)[0]
    model = resumed.model(seed or 1)
    assert (
        after.token_ids == reference_greedy(model, PROMPT, 6)
        and after.policy_version == resumed.version
    )


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_and_go_on(resumed: Server, mode: PauseMode) -> None:
    sample = interrupted(resumed, mode, None)
    assert sample.token_ids == reference_greedy(resumed.model(1), PROMPT, LONG)
    expected = picked(reference_rows(resumed.model(1), PROMPT, sample.token_ids), sample.token_ids)
    assert (torch.tensor(sample.log_probs) - expected).abs().max() <= 1e-4
    assert sample.finish_reason == "length"
    assert sample.version_spans in ((), (VersionSpan(resumed.version, 0, LONG),))
    assert sample.num_retractions == (mode == "retract")


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_and_go_on_with_new_weights(resumed: Server, mode: PauseMode) -> None:
    """Retracted: the tokens after are those of the new model alone. In place: of the new model over
    the keys and values that the old one left.
    """
    old = resumed.model(1)
    new = resumed.model(2)
    sample = interrupted(resumed, mode, 2)
    first, second = sample.version_spans
    assert (first.version, second.version) == (resumed.version - 1, resumed.version)
    cut = first.end
    assert (first.start, second.start, second.end) == (0, cut, LONG) and len(
        sample.token_ids
    ) == LONG
    assert sample.policy_version == first.version and sample.finish_reason == "length"
    before = reference_rows(old, PROMPT, sample.token_ids)[:cut]
    if mode == "retract":
        after = reference_rows(new, PROMPT, sample.token_ids)[cut:]
    else:
        after = reference_rows_over(old, new, PROMPT, sample.token_ids, cut)
    rows = torch.cat([before, after])
    assert sample.token_ids == tuple(rows.argmax(-1).tolist())
    assert (torch.tensor(sample.log_probs) - picked(rows, sample.token_ids)).abs().max() <= 1e-4
    assert sample.num_retractions == (mode == "retract")


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_what_comes_during_a_pause_waits(resumed: Server, mode: PauseMode) -> None:
    engine = resumed.engine
    engine.pause_decoding(mode)
    call = Call(engine, request(PROMPT, (1, 2), 8))
    assert call.runs_after(HOLDS_S)
    engine.check_health(30)
    engine.resume_decoding()
    assert [sample.finish_reason for sample in call.samples()] == ["length"] * 2
    engine.resume_decoding()  # once more, which does nothing
    assert engine.generate([request(PROMPT, (1,), 4)], 60)[0][0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_abort_ends_what_a_pause_holds(resumed: Server, mode: PauseMode) -> None:
    engine = resumed.engine
    running = Call(engine, request(PROMPT, (1, 2), LONG, 0.0))
    time.sleep(0.05)
    engine.pause_decoding(mode)
    waiting = Call(engine, request(PROMPT, (1, 2), 8))
    assert waiting.runs_after(HOLDS_S)
    engine.abort_calls()
    assert [sample.finish_reason for sample in waiting.samples()] == ["abort"] * 2
    whole = reference_greedy(resumed.model(1), PROMPT, LONG)
    for sample in running.samples():
        assert sample.token_ids == whole[: len(sample.token_ids)]
        assert sample.finish_reason == ("length" if len(sample.token_ids) == LONG else "abort")
    engine.resume_decoding()
    assert engine.generate([request(PROMPT, (1,), 4)], 60)[0][0].finish_reason == "length"


@pytest.mark.parametrize(
    "modes", [("in_place", "abort"), ("in_place", "retract"), ("retract", "in_place")], ids="-".join
)
def test_one_pause_after_another(resumed: Server, modes: tuple[PauseMode, PauseMode]) -> None:
    """The second says what becomes of what waits; keys and values that were dropped do
    not come back.
    """
    engine = resumed.engine
    call = Call(engine, request(PROMPT, (1,), LONG, 0.0))
    time.sleep(0.05)
    engine.pause_decoding(modes[0])
    engine.pause_decoding(modes[1])
    is_held = call.runs_after(HOLDS_S)
    engine.resume_decoding()
    (sample,) = call.samples()
    assert (
        sample.token_ids
        == reference_greedy(resumed.model(1), PROMPT, LONG)[: len(sample.token_ids)]
    )
    if modes[1] == "abort":
        assert not is_held and (sample.finish_reason == "abort" or len(sample.token_ids) == LONG)
    else:
        assert sample.finish_reason == "length" and sample.num_retractions <= 1
    assert engine.generate([request(PROMPT, (1,), 4)], 60)[0][0].finish_reason == "length"


def test_a_deadline_is_kept(resumed: Server) -> None:
    engine = resumed.engine
    engine.pause_decoding()
    with pytest.raises(EngineTimeoutError, match=r"no answer within 0\.5 s"):
        engine.generate([request(PROMPT, (1,), 4)], 0.5)
    engine.resume_decoding()
    engine.check_health(30)
    assert engine.generate([request(PROMPT, (1,), 4)], 60)[0][0].finish_reason == "length"

"""What every engine promises about draws: which tokens may be drawn, how often, of what
distribution the log-probs are, and what ends a response. Expectations are computed from
transformers' logits alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from conformance_tools import (
    END,
    LONG_ENGINES,
    PROMPT,
    Server,
    sync,
    use_server,
    use_unseeded_server,
)
from rollout_tools import (
    assert_same,
    kept,
    picked,
    reference_greedy,
    reference_log_probs,
    reference_rows,
    request,
)

from rlhf_megatron.rollout.engine_interface import EngineRequestError, GeneratedSample

NUM_DRAWS = 400
CUTS: dict[str, dict[str, float]] = {
    "none": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "top_k_top_p": {"top_k": 4, "top_p": 0.7},
}
MIN_P_CUTS: dict[str, dict[str, float]] = {
    "min_p": {"min_p": 0.3},
    "all": {"top_k": 5, "top_p": 0.9, "min_p": 0.2},
}
TEMPERATURES = (0.6, 1.0, 1.8)


@pytest.fixture(scope="module", params=LONG_ENGINES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    for server in use_server(request, tmp_path_factory):
        sync(server, 1)
        yield server


@pytest.fixture(scope="module", params=LONG_ENGINES)
def unseeded_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    for server in use_unseeded_server(request, tmp_path_factory):
        sync(server, 1)
        yield server


def check_draws(server: Server, cuts: dict[str, float], temperature: float) -> None:
    """Responses of 12 tokens: each token is one that may be drawn, its log-prob that of the
    whole distribution.
    """
    (group,) = server.engine.generate(
        [request(PROMPT, tuple(range(8)), 12, temperature, **cuts)], 60
    )
    model = server.model(1)
    for sample in group:
        rows = reference_rows(model, PROMPT, sample.token_ids, temperature)
        assert (torch.tensor(sample.log_probs) - picked(rows, sample.token_ids)).abs().max() <= 1e-4
        for row, token in zip(rows, sample.token_ids, strict=True):
            assert token in kept(row, **cuts), f"{token} must not be drawn"  # type: ignore[arg-type]


def check_frequencies(server: Server, cuts: dict[str, float], temperature: float) -> None:
    """Of the first token: those of the tokens that may be drawn, and of no other."""
    (group,) = server.engine.generate(
        [request(PROMPT, tuple(range(NUM_DRAWS)), 1, temperature, **cuts)], 60
    )
    (row,) = reference_rows(server.model(1), PROMPT, (0,), temperature)
    allowed = kept(row, **cuts)  # type: ignore[arg-type]
    assert 1 < len(allowed) < len(row) or not cuts
    probs = {token: float(row[token].exp()) for token in allowed}
    counts = Counter(sample.token_ids[0] for sample in group)
    assert set(counts) <= allowed
    for token, p in probs.items():
        p /= sum(probs.values())
        deviation = (NUM_DRAWS * p * (1 - p)) ** 0.5
        assert abs(counts[token] - NUM_DRAWS * p) <= 5 * deviation + 1, (
            f"token {token}, probability {p}"
        )


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", CUTS)
def test_cuts(server: Server, name: str, temperature: float) -> None:
    check_draws(server, CUTS[name], temperature)


@pytest.mark.parametrize("name", CUTS)
def test_frequencies(server: Server, name: str) -> None:
    check_frequencies(server, CUTS[name], 1.3)


@pytest.mark.parametrize("name", [*CUTS, *MIN_P_CUTS])
def test_cuts_and_frequencies_without_seeds(unseeded_server: Server, name: str) -> None:
    cuts = {**CUTS, **MIN_P_CUTS}[name]
    check_draws(unseeded_server, cuts, 0.8)
    check_frequencies(unseeded_server, cuts, 1.3)


def test_min_p_with_seeds(server: Server) -> None:
    """Where an engine has no such draw it says so, and lives on."""
    if server.kind == "local":
        check_draws(server, MIN_P_CUTS["min_p"], 1.0)
        check_frequencies(server, MIN_P_CUTS["min_p"], 1.8)
        return
    with pytest.raises(EngineRequestError, match=r"min_p is 0\.3.*enable_deterministic_inference"):
        server.engine.generate([request(PROMPT, (1,), 4, min_p=0.3)], 60)
    server.engine.check_health(30)


@pytest.mark.parametrize("cuts", [{"top_k": 1}, {"top_p": 1e-6}], ids=["top_k", "top_p"])
def test_a_cut_to_one_token_is_greedy_with_log_probs_of_its_temperature(
    server: Server, cuts: dict[str, float]
) -> None:
    (sample,) = server.engine.generate([request(PROMPT, (1,), 12, 0.5, **cuts)], 60)[0]
    assert sample.token_ids == reference_greedy(server.model(1), PROMPT, 12)
    expected = reference_log_probs(server.model(1), PROMPT, sample.token_ids, 0.5)
    assert (torch.tensor(sample.log_probs) - expected).abs().max() <= 1e-4


def test_what_is_drawn_depends_on_the_seed_alone(server: Server) -> None:
    """Not on the neighbours of the batch or their order; on SGLang as long as none of them is
    greedy or cut, or all.
    """
    seeds = tuple(range(100, 108))
    (alone,) = server.engine.generate([request(PROMPT, seeds, 16)], 60)
    assert len({sample.token_ids for sample in alone}) == len(seeds)
    neighbours = [request(PROMPT[:2], (1, 2), 20, 0.7), request(PROMPT, (5,), 9, 1.5)]
    if server.kind == "local":
        neighbours += [request(PROMPT, (1,), 20, 0.0), request(PROMPT[:3], (1,), 12, top_k=2)]
    mixed = server.engine.generate([*neighbours, request(PROMPT, seeds[::-1], 16)], 60)
    assert_same(mixed[-1], alone[::-1])


def test_greedy_beside_draws(server: Server) -> None:
    """Each sample of a mixed batch has the log-probs of its own temperature."""
    model = server.model(1)
    sent = [
        request(PROMPT, (1,), 12, 0.0),
        request(PROMPT, (1, 2), 12, 0.6),
        request(PROMPT, (3,), 12, 1.7, top_k=2),
    ]
    for one, group in zip(sent, server.engine.generate(sent, 60), strict=True):
        for sample in group:
            expected = reference_log_probs(
                model, PROMPT, sample.token_ids, one.params.temperature or 1.0
            )
            assert (torch.tensor(sample.log_probs) - expected).abs().max() <= 1e-4
            assert one.params.temperature or sample.token_ids == reference_greedy(model, PROMPT, 12)


def test_samples_of_a_group_differ_without_seeds(unseeded_server: Server) -> None:
    (group,) = unseeded_server.engine.generate([request(PROMPT, tuple(range(8)), 16)], 60)
    assert len({sample.token_ids for sample in group}) == 8


def check_stops(
    group: Sequence[GeneratedSample], stops: set[int], max_new_tokens: int, min_new_tokens: int = 0
) -> None:
    """Each response ends with its first stop token after the ones where none may be, or is full."""
    for sample in group:
        places = [place for place, token in enumerate(sample.token_ids) if token in stops]
        assert all(place >= min_new_tokens for place in places) and len(places) <= 1
        if places:
            assert places[0] == len(sample.token_ids) - 1 and sample.finish_reason == "stop"
        else:
            assert len(sample.token_ids) == max_new_tokens and sample.finish_reason == "length"
        assert len(sample.log_probs) == len(sample.token_ids)
    assert {sample.finish_reason for sample in group} == {"stop", "length"}, "seeds that show both"


def test_stop_tokens(server: Server) -> None:
    stops = (5, 21, 27)
    (group,) = server.engine.generate(
        [request(PROMPT, tuple(range(16)), 8, stop_token_ids=stops)], 60
    )
    check_stops(group, set(stops), 8)


def test_a_stop_token_as_last_token_is_a_stop(server: Server) -> None:
    greedy = reference_greedy(server.model(1), PROMPT, 1)
    (sample,) = server.engine.generate([request(PROMPT, (1,), 1, 0.0, stop_token_ids=greedy)], 60)[
        0
    ]
    assert sample.token_ids == greedy and sample.finish_reason == "stop"


def test_min_new_tokens(server: Server) -> None:
    """No stop token before so many. The log-probs until there are those of a distribution
    without stop tokens.
    """
    model = server.model(1)
    stops = (5, 21, 27)
    sent = request(PROMPT, tuple(range(16)), 8, 0.9, stop_token_ids=stops, min_new_tokens=4)
    if server.kind == "sglang":  # it would end on it
        with pytest.raises(EngineRequestError, match="min_new_tokens is 4"):
            server.engine.generate([sent], 60)
        server.engine.check_health(30)
        return
    (group,) = server.engine.generate([sent], 60)
    check_stops(group, set(stops), 8, 4)
    for sample in group:
        rows = reference_rows(model, PROMPT, sample.token_ids, 0.9)
        rows[:4, list(stops)] = -torch.inf
        expected = picked(rows.log_softmax(-1), sample.token_ids)
        assert (torch.tensor(sample.log_probs) - expected).abs().max() <= 1e-4


def test_the_end_of_sequence_token_of_the_model(unseeded_server: Server) -> None:
    """It is a stop token like others where a request names it, as those of a run do. Where none
    does, `local` goes on and SGLang ends: it reads the model's configuration itself.
    """
    (named,) = unseeded_server.engine.generate(
        [request(PROMPT, tuple(range(64)), 16, stop_token_ids=(END,))], 60
    )
    check_stops(named, {END}, 16)
    (unnamed,) = unseeded_server.engine.generate([request(PROMPT, tuple(range(64)), 16)], 60)
    if unseeded_server.kind == "sglang":
        check_stops(unnamed, {END}, 16)
    else:
        assert {sample.finish_reason for sample in unnamed} == {"length"}
        assert any(END in sample.token_ids[:-1] for sample in unnamed)

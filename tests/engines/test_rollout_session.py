"""Generation over weight syncs: every key once, and every token from the weights that it says.

`python -m pytest -s tests/engines/test_rollout_session.py -k every_token` prints how log-probs
fit the versions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout_tools import request, tiny_qwen3
from session_tools import FITS, Poller, Rig, Work, prove

from rlhf_megatron.rollout.engine_interface import GenerateRequest
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines

MAX_NUM_SEQS = 16


def work_of(num_keys: int, num_samples: int = 4, longest: int = 200, first: int = 0) -> Work:
    """Keys of one sampled group each, of many lengths; every third with a greedy sample beside it,
    or another temperature.
    """
    work: dict[int, list[GenerateRequest]] = {}
    for key in range(first, first + num_keys):
        prompt = (1 + key % 30, 2, 3 + key % 7)
        length = longest // 2 + (37 * key) % (longest // 2)
        temperature = 0.7 if key % 3 == 1 else 1.0
        work[key] = [
            request(prompt, tuple(range(100 * key, 100 * key + num_samples)), length, temperature)
        ]
        if key % 3 == 0:
            work[key].append(request(prompt, (0,), length // 2, 0.0))
    return work


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServers, Path]]:
    folder = tmp_path_factory.mktemp("session")
    (folder / "transfer").mkdir()
    tiny_qwen3(0).save_pretrained(folder / "model")
    settings = {
        "load_weights": False,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": 1 << 16,
    }
    with start_local_engines(
        folder / "model", 2, folder, transfer_dir=folder / "transfer", **settings
    ) as started:  # type: ignore[arg-type]
        yield started, folder / "transfer"


def rig_of(
    servers: tuple[EngineServers, Path],
    connect: type[LocalEngine] = LocalEngine,
    **settings: object,
) -> Rig:
    """With all engines at one version."""
    rig = Rig(*servers, connect, **settings)  # type: ignore[arg-type]
    rig.sync()
    assert len(rig.fleet.live_engines) == len(rig.fleet.engines)
    return rig


@pytest.mark.dist
def test_every_token_is_of_the_version_that_it_says(servers: tuple[EngineServers, Path]) -> None:
    """Four syncs while groups are generated, with an evaluation between them; then some are
    given up, then all.
    """
    rig = rig_of(servers)
    first = rig.version
    work = work_of(24)
    with rig.fleet.open_session() as session:
        poller = Poller(session, work)
        for num_came in (2, 5, 9, 13):
            poller.wait(lambda least=num_came: len(poller.results) >= least)  # type: ignore[misc]
            rig.sync()
        evaluated = rig.fleet.generate([request((5, 6), (0,), 12, 0.0) for _ in range(4)])
        assert {sample.policy_version for group in evaluated for sample in group} == {rig.version}
        found = poller.wait_for(work)
        assert session.num_running == 0
        versions = range(first, rig.version + 1)
        proof = prove(work, found, versions)
        assert proof.right <= FITS and proof.wrong > 0.1
        assert proof.num_wrong_fits < 0.05 * proof.num_pairs
        assert sum(count for number, count in proof.num_spans.items() if number > 1) >= 8
        assert set(rig.fleet.take_counters().values()) == {0.0}

        poller.submit(work_of(12, 8, 240, first=100))
        poller.wait(lambda: session.num_running == 12)
        poller.abort(range(101, 112))
        poller.submit({7: work[7]})  # a key that came back may be used again
        poller.wait(lambda: {100, 7} <= set(poller.came[len(work) :]))
        assert poller.came_after_abort <= {7, 100} and session.num_running == 0
        assert len(poller.came) == len(set(poller.came)) + 1
        assert rig.reasons["abort"] > 0
        rig.reasons.clear()
        poller.submit(work_of(12, 8, 240, first=200))
        poller.wait(lambda: session.num_running == 12)
        poller.end()
    await_ends(rig.fleet)
    assert rig.reasons["abort"] > 0 and session.num_running == 0 and session.poll_finished() == []
    assert len(rig.fleet.generate(work[1])[0]) == 4 and poller.error is None
    rig.fleet.close()


def await_ends(fleet: EngineFleet, within_s: float = 10.0) -> None:
    """No call to an engine runs any more."""
    deadline = time.monotonic() + within_s
    while running := [str(call) for call in fleet.list_recent_calls() if call.seconds is None]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)

"""Generation over weight syncs on stock SGLang, by the balancer and through sglang-router: every
key once, and every token from the weights that it says, by transformers' log-probs.

`python -m pytest -s tests/engines/test_sglang_session.py -k every_token` prints how log-probs
fit the versions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rollout_tools import request, tiny_qwen3
from session_tools import FITS, Poller, Rig, Work, prove
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from test_rollout_session import await_ends

from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.router.router_balancer import SGLangRouterBalancer
from rlhf_megatron.rollout.router.router_process import prepare_router
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines

pytestmark = [pytest.mark.long, pytest.mark.sglang, needs_sglang]
MAX_RUNNING = 12


def work_of(num_keys: int, first: int = 0, longest: int = 120, num_samples: int = 3) -> Work:
    """Every second key has a greedy sample beside its group."""
    work = {}
    for key in range(first, first + num_keys):
        prompt = (1 + key % 30, 2, 3 + key % 7)
        length = longest // 2 + (37 * key) % (longest // 2)
        work[key] = [
            request(
                prompt,
                tuple(range(10 * key, 10 * key + num_samples)),
                length,
                0.7 if key % 3 == 1 else 1.0,
            )
        ]
        if key % 2 == 0:
            work[key].append(request(prompt, (0,), length // 2, 0.0))
    return work


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineServers, Path]]:
    folder = tmp_path_factory.mktemp("session")
    (folder / "transfer").mkdir()
    tiny_qwen3(0).save_pretrained(folder / "model")
    with start_sglang_engines(
        folder / "model",
        2,
        folder,
        python=str(sglang_python()),
        transfer_dir=folder / "transfer",
        dtype="float32",
        arguments={**CPU_ARGUMENTS, "context_length": 256, "max_running_requests": MAX_RUNNING},
        env=CPU_ENV,
        startup_timeout_s=STARTUP_S,
    ) as started:
        yield started, folder / "transfer"


@pytest.mark.parametrize("router", [False, True], ids=["balancer", "router"])
def test_every_token_is_of_the_version_that_it_says(
    servers: tuple[EngineServers, Path], router: bool, tmp_path: Path
) -> None:
    """Three syncs while groups are generated, the second one fails on engine0; an evaluation; then
    all that runs is given up, which frees the engines.
    """
    balancer = (
        SGLangRouterBalancer(prepare_router(str(sglang_python()), {}, tmp_path, 60.0), 0)
        if router
        else None
    )
    transfer = servers[1]
    rig = Rig(
        *servers,
        partial(connect_engine, transfer_dir=transfer),
        health_interval_s=5.0,
        balancer=balancer,
    )
    rig.sync()
    first = rig.version
    work = work_of(16)
    with rig.fleet.open_session() as session:
        assert [member.max_running_samples for member in rig.fleet._supervisor.members] == [
            MAX_RUNNING
        ] * 2
        poller = Poller(session, work)
        poller.wait(lambda: len(poller.results) >= 2)
        rig.sync()
        poller.wait(lambda: len(poller.results) >= 4)
        rig.sync(spoil="engine0")
        assert [engine.address.name for engine in rig.fleet.live_engines] == ["engine1"]
        poller.wait(lambda: len(rig.fleet.live_engines) == 2, session.mend_engines)
        poller.wait(lambda: len(poller.results) >= 6)
        rig.sync()
        requests = [request((5, 6), (1, 2), 12)]
        evaluated = rig.fleet.generate(requests)
        assert {sample.policy_version for group in evaluated for sample in group} == {rig.version}
        found = poller.wait_for(work, session.mend_engines)
        proof = prove(work, found, range(first, rig.version + 1))
        assert (
            proof.right <= FITS
            and proof.num_wrong_fits < 0.05 * proof.num_pairs
            and proof.wrong > 0.1
        )
        assert sum(count for number, count in proof.num_spans.items() if number > 1) >= 4
        assert (
            rig.resynced == ["engine0"]
            and rig.fleet.take_counters()["rollout/engine_restarts"] == 0
        )

        poller.submit(work_of(20, 100, 240, 8))  # minutes of work
        poller.wait(lambda: session.num_running == 20)
        time.sleep(0.5)
        poller.abort(range(100, 120))
        poller.submit(work_of(1, 200, 10))
        poller.wait(lambda: poller.came[-1:] == [200])
        assert poller.came_after_abort == {200}
        await_ends(rig.fleet, 20.0)
        poller.submit(work_of(6, 300, 200))
        poller.wait(lambda: session.num_running == 6)
        time.sleep(0.5)
        poller.end()
    await_ends(rig.fleet, 20.0)
    assert poller.error is None and poller.came_after_abort <= {200, *range(300, 306)}
    assert router or rig.reasons["abort"] > 30, "of 72 that were on their way"
    rig.fleet.close()

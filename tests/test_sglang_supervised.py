"""Stock SGLang that is killed or stopped while it generates: started again, given the current weights, asked again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from rollout_tools import request, tiny_qwen3, weights_of, write_buckets
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python

from rlhf_megatron.rollout.clients import connect
from rlhf_megatron.rollout.engine import Engine, EngineError, GeneratedSample
from rlhf_megatron.rollout.fleet import EngineFleet
from rlhf_megatron.rollout.sglang_process import start_sglang_engines
from rlhf_megatron.rollout.supervisor import Supervision

pytestmark = [pytest.mark.chaos, pytest.mark.sglang, needs_sglang]
REQUESTS = [request((1 + i, 2), (10 * i, 10 * i + 1), 40) for i in range(6)]
VERSION = 3


def test_a_killed_and_a_stopped_server_are_replaced(tmp_path: Path) -> None:
    """One request at a time in the server, so that seeds alone decide what it answers."""
    transfer = tmp_path / "transfer"
    transfer.mkdir()
    tiny_qwen3(1).save_pretrained(tmp_path / "model")
    arguments = {**CPU_ARGUMENTS, "context_length": 256, "max_running_requests": 1, "disable_radix_cache": True}

    def send(engine: Engine) -> None:
        for manifest in write_buckets(weights_of(tiny_qwen3(1)), transfer, VERSION):
            engine.update_weights(manifest)

    def resync(engines: Sequence[Engine]) -> None:
        for engine in engines:
            engine.begin_update(VERSION, full_resync=True)
            send(engine)
            engine.commit_update(VERSION)

    with start_sglang_engines(
        tmp_path / "model",
        1,
        tmp_path,
        python=str(sglang_python()),
        transfer_dir=transfer,
        dtype="float32",
        arguments=arguments,
        env=CPU_ENV,
        startup_timeout_s=STARTUP_S,
    ) as servers:
        make_client = partial(connect, transfer_dir=transfer)
        supervision = Supervision(servers, make_client, health_interval_s=1, health_timeout_s=30, max_restarts=2)
        fleet = EngineFleet([make_client(servers.addresses[0])], 300.0, 2, supervision=supervision, is_closed=True)
        fleet.resync = resync
        fleet.begin_update(VERSION)
        send(fleet.engines[0])
        fleet.commit_update(VERSION)
        expected = fleet.generate(REQUESTS)
        assert {sample.policy_version for group in expected for sample in group} == {VERSION}

        def signalled(number: int) -> Callable[[int, list[list[GeneratedSample]]], None]:
            """At the first groups that come, while the others are under way."""
            signals = [number]
            return lambda first, groups: os.killpg(servers.processes[0].pid, signals.pop()) if signals else None

        for number in (signal.SIGKILL, signal.SIGSTOP):
            process = servers.processes[0]
            assert tokens(fleet.generate(REQUESTS, signalled(number))) == tokens(expected)
            assert process.exit_code is not None and servers.processes[0].pid != process.pid
            assert fleet.version() == VERSION
            counters = fleet.take_counters()
            assert (counters["rollout/engine_failures"], counters["rollout/engine_restarts"]) == (1.0, 1.0)
        with pytest.raises(EngineError, match=r"(?s)no engine is left of 1: engine0 is lost"):
            fleet.generate(REQUESTS, signalled(signal.SIGKILL))
        fleet.close()


def tokens(groups: list[list[GeneratedSample]]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in group] for group in groups]

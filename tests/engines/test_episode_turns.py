"""Random episodes over real engines whose weights change, and which are killed, meanwhile: what
trains is what was sampled.

`python -m pytest -s tests/engines/test_episode_turns.py` prints what was compared.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from episode_proof import AnswerRecorder, EpisodeProof, prove_episodes
from episode_tools import DIALOGUE
from places import MODEL, SUPPORT
from rollout_tools import tiny_qwen3
from session_tools import Rig
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python

from rlhf_megatron.agents.episode_book import EpisodeSettings, GroupSize
from rlhf_megatron.agents.episode_messages import EpisodeLimits
from rlhf_megatron.agents.episode_runner import FreeEpisodeRunner
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.rollout.engine_interface import EngineAddress, InferenceEngine, SamplingParams
from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.fleet.server_process import EngineServers
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines

pytestmark = pytest.mark.long
RUN_SEED = 11
STEP = 3
GROUP_SIZE = GroupSize(num_episodes=8, min_group=7)  # the last one of a group is aborted
LIMITS = EpisodeLimits(max_turns=12, max_tokens=200, max_turn_tokens=20, max_prompt_tokens=20)
PARAMS = SamplingParams(20, 1.0, stop_token_ids=(1, 12, 13))
PLUGIN = str(SUPPORT / "wandering_environment.py")


def make_prompts(num_rows: int) -> PromptBatch:
    texts = [f"{row % 100:02d}+{row * 7 % 100:02d}=" for row in range(num_rows)]
    tokenizer = load_tokenizer(MODEL)
    return PromptBatch(
        tuple(tuple(tokenizer.encode(text)) for text in texts),
        tuple(texts),
        ("",) * num_rows,
        ("talks",) * num_rows,
        tuple(range(50, 50 + num_rows)),
        ("",) * num_rows,
    )


@contextmanager
def disturbing(disturb: Sequence[Callable[[], None]], pause_s: float) -> Iterator[None]:
    """Something goes wrong every moment, on a thread of its own, until the block ends."""
    is_over = threading.Event()
    errors: list[BaseException] = []

    def disturb_again_and_again() -> None:
        number = 0
        while not is_over.wait(pause_s):
            try:
                disturb[number % len(disturb)]()
            except BaseException as error:
                errors.append(error)
                return
            number += 1

    thread = threading.Thread(target=disturb_again_and_again, daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join(120)
    assert not errors, errors


def run_and_prove(
    servers: tuple[EngineServers, Path],
    connect: Callable[[EngineAddress], InferenceEngine],
    num_rows: int,
    disturb: Callable[[Rig], Sequence[Callable[[], None]]],
    pause_s: float,
    log_path: Path,
) -> tuple[EpisodeProof, Rig]:
    """Run the episodes while the rig is disturbed, and compare all of them."""
    load_plugins([PLUGIN])
    recorder = AnswerRecorder(connect)
    rig = Rig(*servers, recorder, health_interval_s=1.0)
    rig.sync()
    first_version = rig.version
    entry = {"name": "wandering", "params": {}, "key": "rollout.environment"}
    prompts = make_prompts(num_rows)
    with EpisodeWorkerPool([entry], DIALOGUE, 2, log_path) as pool:
        pool.start()
        settings = EpisodeSettings("wandering", {}, LIMITS, 240.0, 48, RUN_SEED)
        runner = FreeEpisodeRunner(rig.fleet, pool, settings)
        recorded: list[int] = []
        began = time.monotonic()
        with disturbing(disturb(rig), pause_s):
            groups = runner.run_episodes(
                prompts,
                GROUP_SIZE,
                PARAMS,
                STEP,
                {},
                lambda groups: recorded.extend(row for row, _ in groups),
                lambda text: None,
            )
        print(f"\n{time.monotonic() - began:.0f} s, versions {first_version} .. {rig.version}")
    assert sorted(recorded) == list(range(num_rows)), "each group is recorded once"
    return (
        prove_episodes(
            prompts,
            groups,
            recorder.answers,
            load_tokenizer(MODEL),
            run_seed=RUN_SEED,
            step=STEP,
            versions=range(first_version, rig.version + 1),
        ),
        rig,
    )


def test_a_thousand_episodes_over_engines_that_are_synced_and_killed(tmp_path: Path) -> None:
    (tmp_path / "transfer").mkdir()
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    with start_local_engines(
        tmp_path / "model",
        2,
        tmp_path,
        transfer_dir=tmp_path / "transfer",
        load_weights=False,
        max_num_seqs=16,
        max_num_batched_tokens=1 << 16,
    ) as servers:

        def disturb(rig: Rig) -> Sequence[Callable[[], None]]:
            """Two syncs, then an engine is killed; at most three times, as restarts are limited."""
            num_kills = [0]

            def kill_engine() -> None:
                if num_kills[0] < 3 and len(rig.fleet.live_engines) == 2:
                    os.kill(servers.processes[num_kills[0] % 2].pid, signal.SIGKILL)
                    num_kills[0] += 1

            return (rig.sync, kill_engine, rig.sync)

        proof, rig = run_and_prove(
            (servers, tmp_path / "transfer"), LocalEngine, 125, disturb, 1.0, tmp_path / "log"
        )
        counters = rig.fleet.take_counters()
        rig.fleet.close()
    assert proof.num_episodes == 1000 and proof.largest_difference < 1e-5
    assert proof.ends["aborted"] > 50 and proof.ends["done"] > 500
    assert proof.num_turns_over_syncs > 10
    assert counters["rollout/engine_restarts"] >= 1 and counters["rollout/requests_reissued"] >= 1


@pytest.mark.sglang
@needs_sglang
def test_two_hundred_episodes_on_stock_sglang_over_syncs(tmp_path: Path) -> None:
    (tmp_path / "transfer").mkdir()
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    with start_sglang_engines(
        tmp_path / "model",
        1,
        tmp_path,
        python=str(sglang_python()),
        transfer_dir=tmp_path / "transfer",
        dtype="float32",
        arguments={**CPU_ARGUMENTS, "context_length": 256, "max_running_requests": 12},
        env=CPU_ENV,
        startup_timeout_s=STARTUP_S,
    ) as servers:
        transfer = tmp_path / "transfer"
        proof, rig = run_and_prove(
            (servers, transfer),
            partial(connect_engine, transfer_dir=transfer),
            25,
            lambda rig: (rig.sync,),
            2.0,
            tmp_path / "log",
        )
        rig.fleet.close()
    assert proof.num_episodes == 200 and proof.largest_difference < 1e-5
    assert proof.ends["done"] > 100

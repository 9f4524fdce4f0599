"""The bundled server as a process: access, answers to bad input, start and end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import urllib3
from places import SUPPORT
from rollout_tools import request, tiny_qwen3, weights_of, write_buckets

from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    EngineRequestError,
    EngineTimeoutError,
    GeneratedSample,
    VersionSpan,
)
from rlhf_megatron.rollout.fleet.server_process import EngineServers, write_token_file
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.decode_service import DecodeService, StaleWeightsError
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.local.local_model import LocalModel
from rlhf_megatron.rollout.local.local_server import main, read_token_file
from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "model"
    tiny_qwen3(1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def servers(model_dir: Path) -> Iterator[EngineServers]:
    folder = model_dir.parent
    (folder / "transfer").mkdir()
    with start_local_engines(
        model_dir, 1, folder, transfer_dir=folder / "transfer", load_weights=False
    ) as started:
        yield started


def raw_post(url: str, path: str, body: bytes, token: str | None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    response = urllib3.request(
        "POST", url + path, body=body, headers=headers, timeout=30, retries=False
    )
    return response.status, json.loads(response.data)["error"]


@pytest.mark.dist
def test_started_without_weights_it_is_stale_until_the_first_sync(servers: EngineServers) -> None:
    engine = LocalEngine(servers.addresses[0])
    if not engine.fetch_server_info()["stale"]:
        pytest.fail("this test must be the first of the module")
    with pytest.raises(EngineError, match="503: STALE: it was started without weights"):
        engine.generate([request((1,), (1,), 2)], 30)
    engine.begin_weight_update(1)
    for manifest in write_buckets(
        weights_of(tiny_qwen3(1)), servers.processes[0].log.parent.parent / "transfer", 1
    ):
        engine.update_weights(manifest)
    engine.commit_weight_update(1)
    assert engine.generate([request((1,), (1,), 2)], 30)[0][0].policy_version == 1


@pytest.mark.dist
def test_every_verb_needs_the_token(servers: EngineServers) -> None:
    url = servers.addresses[0].url
    token = servers.addresses[0].token
    verbs = (
        "generate abort pause resume begin_weight_update update_weights"
        " commit_weight_update weight_digests"
    )
    for verb in [*verbs.split(), "release_memory", "resume_memory"]:
        for wrong in (None, "", token[:-1], token + "x"):
            status, error = raw_post(url, f"/{verb}", b"{}", wrong)
            assert status == 401 and "token" in error
    with pytest.raises(EngineRequestError, match="401"):
        LocalEngine(replace(servers.addresses[0], token="no")).abort_calls()
    engine = LocalEngine(servers.addresses[0])
    info = engine.fetch_server_info()
    assert not info["stale"] and not info["is_paused"] and token not in json.dumps(info)
    process = servers.processes[0]
    assert token not in process.log.read_text()
    assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/generate", b"not json", "JSON is malformed"),
        ("/generate", b"[]", "Expected `object`, got `array`"),
        ("/generate", b'{"requests": [{"prompt_ids": [1]}]}', "missing required field `seeds`"),
        (
            "/generate",
            b'{"requests": [{"prompt_ids": [1.5], "seeds": [1], "params": {"max_new_tokens": 1}}]}',
            "Expected `int`, got `float` - at `$.requests[0].prompt_ids[0]`",
        ),
        (
            "/generate",
            (
                b'{"requests": [{"prompt_ids": [1], "seeds": [1], "params": {"max_new_tokens": 1,'
                b' "beams": 2}}]}'
            ),
            "unknown field `beams`",
        ),
        (
            "/generate",
            (
                b'{"requests": [{"prompt_ids": [1], "seeds": [1], "params": {"max_new_tokens": 1,'
                b' "top_p": "0.5"}}]}'
            ),
            "Expected `float`, got `str` - at `$.requests[0].params.top_p`",
        ),
        (
            "/generate",
            (
                b'{"requests": [{"prompt_ids": [1], "seeds": [1], "params": {"max_new_tokens": 1,'
                b' "top_k": 0}}]}'
            ),
            "top_k (0) must be at least 1, or -1 (off)",
        ),
        (
            "/pause",
            b'{"mode": "politely"}',
            'the body must be {"mode": "abort", "retract" or "in_place"}: Invalid enum value',
        ),
        (
            "/release_memory",
            b'{"parts": []}',
            (
                '{"parts": ["weights", "kv_cache"]}, one or more of these: Expected `array` of'
                " length >= 1"
            ),
        ),
        ("/release_memory", b'{"parts": ["cuda_graph"]}', "Invalid enum value 'cuda_graph'"),
        ("/resume_memory", b'{"parts": "weights"}', "Expected `array`, got `str` - at `$.parts`"),
        (
            "/generate",
            b'{"requests": [{"prompt_ids": [99], "seeds": [1], "params": {"max_new_tokens": 1}}]}',
            "vocabulary",
        ),
        ("/begin_weight_update", b'{"version": "7"}', "Expected `int`, got `str` - at `$.version`"),
        ("/begin_weight_update", b'{"version": 1}', "must be above 1"),
        ("/update_weights", b"{}", "not a bucket manifest"),
        (
            "/update_weights",
            b'{"version":2,"sender":"","bucket":0,"file":"../x","num_bytes":0,"tensors":[]}',
            "plain name",
        ),
        ("/commit_weight_update", b'{"version": 9}', "open sync is None"),
    ],
)
def test_bad_input_is_answered_with_a_message(
    servers: EngineServers, path: str, body: bytes, words: str
) -> None:
    status, error = raw_post(servers.addresses[0].url, path, body, servers.addresses[0].token)
    assert status == 400 and words in error
    engine = LocalEngine(servers.addresses[0])
    engine.check_health(10)
    assert engine.get_served_version() == 1


@pytest.mark.dist
def test_a_client_that_went_away_leaves_nothing_running(servers: EngineServers) -> None:
    engine = LocalEngine(servers.addresses[0])
    engine.pause_decoding()
    with pytest.raises(EngineTimeoutError):
        engine.generate([request((1, 2), tuple(range(8)), 200)], 0.3)
    time.sleep(0.3)
    engine.resume_decoding()
    engine.generate([request((1,), (1,), 1)], 60)


@pytest.mark.dist
def test_memory_parts_and_pause_modes(servers: EngineServers) -> None:
    """Over HTTP; what each does to samples is in test_rollout_service."""
    engine = LocalEngine(servers.addresses[0])
    transfer_dir = servers.processes[0].log.parent.parent / "transfer"
    engine.generate([request((1,), (1,), 2)], 30)
    parameter_bytes = sum(tensor.nbytes for tensor in weights_of(tiny_qwen3(1)).values())
    held = engine.fetch_server_info()["memory"]
    assert (
        held["weights_bytes"] == parameter_bytes
        and held["kv_cache_bytes"] > 0
        and held["resident_bytes"] > 0
    )
    engine.release_memory(["kv_cache"])
    info = engine.fetch_server_info()
    assert (
        info["released"] == ["kv_cache"]
        and info["memory"]["kv_cache_bytes"] == 0
        and info["version"] == 1
    )
    with pytest.raises(
        EngineError,
        match=r"503: its memory is released \(kv_cache\); resume_memory must come before",
    ):
        engine.generate([request((1,), (1,), 2)], 30)
    engine.release_memory()
    info = engine.fetch_server_info()
    assert info["released"] == ["weights", "kv_cache"] and info["memory"]["weights_bytes"] == 0
    assert info["version"] is None
    with pytest.raises(EngineError, match=r"503: STALE: its memory is released \(weights\)"):
        engine.generate([request((1,), (1,), 2)], 30)
    engine.check_health(10)
    engine.resume_memory(["weights"])
    assert engine.fetch_server_info()["released"] == ["kv_cache"]
    engine.begin_weight_update(1, is_full_resync=True)
    for manifest in write_buckets(weights_of(tiny_qwen3(1)), transfer_dir, 1):
        engine.update_weights(manifest)
    engine.commit_weight_update(1)
    engine.resume_memory()
    info = engine.fetch_server_info()
    assert info["released"] == [] and info["version"] == 1
    for mode in info["pause_modes"]:
        engine.pause_decoding(mode)
        assert (
            engine.fetch_server_info()["pause_mode"] == mode
            and engine.fetch_server_info()["is_paused"]
        )
    engine.resume_decoding()
    assert engine.fetch_server_info()["pause_mode"] is None
    (sample,) = engine.generate(
        [request((1, 2), (1,), 3, top_p=0.9, top_k=20, min_p=0.01, min_new_tokens=2)], 30
    )[0]
    assert sample.version_spans == (VersionSpan(1, 0, 3),) and sample.num_retractions == 0


@pytest.mark.dist
def test_a_missing_model_shows_the_servers_own_words(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)engine0 exited with code 2 .*has no config\.json"):
        start_local_engines(
            tmp_path / "nothing", 1, tmp_path, transfer_dir=None, startup_timeout_s=120
        )


@pytest.mark.dist
def test_sigterm_ends_it_cleanly_and_the_end_of_its_parent_too(
    model_dir: Path, tmp_path: Path
) -> None:
    """A starter process is killed: its engine must go.
    A second engine gets SIGTERM: exit code 0.
    """
    command = [sys.executable, str(SUPPORT / "engine_starter.py"), str(model_dir), str(tmp_path)]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert starter.stdout is not None
        orphan = int(starter.stdout.readline().split()[0])
        assert starter.stdout.readline().strip() == "0"
        starter.send_signal(signal.SIGKILL)
        starter.wait(60)
        deadline = time.monotonic() + 60
        while is_alive(orphan):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.05)
    finally:
        starter.kill()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_closed_batches_wait_for_their_turn_and_can_be_taken_out() -> None:
    """The loop is held by a pause; what is dropped or aborted while it waits never runs."""
    model = LocalModel(tiny_qwen3(1))
    service = DecodeService(
        BatchGenerator(model, 4, 4096), WeightReceiver(model.module, None, True), is_isolated=True
    )
    service.run_in_decode_loop(service.pause_decoding).result(10)

    def submit(seed: int) -> Future[list[list[GeneratedSample]]]:
        job, admitted = service.submit_generate([request((1, 2), (seed, seed + 10), 5)])
        admitted.result(10)
        jobs.append(job)
        return job.future

    jobs: list[Any] = []
    for seed in range(4):
        submit(seed)
    assert not service.generator.has_work
    service.run_in_decode_loop(lambda: service.drop_job(jobs[1])).result(10)
    service.run_in_decode_loop(service.resume_decoding).result(10)
    alone = BatchGenerator(model, 4, 4096)
    for seed in (0, 2, 3):
        assert jobs[seed].future.result(10) == alone.generate(
            [request((1, 2), (seed, seed + 10), 5)]
        )
        alone.reset_cache_size()
    assert not jobs[1].future.done()

    service.run_in_decode_loop(service.pause_decoding).result(10)
    late = [submit(seed) for seed in range(2)]
    service.run_in_decode_loop(service.abort_calls).result(10)
    assert [future.result(10)[0][0].finish_reason for future in late] == ["abort", "abort"]
    late = [submit(seed) for seed in range(2)]
    service.close()
    for future in late:
        with pytest.raises(StaleWeightsError, match="shutting down"):
            future.result(10)


def test_a_closed_batch_that_lost_its_cache_gives_the_same_bits_as_one_that_kept_it() -> None:
    """It starts from its prompts again: read anew, its tokens so far would give other last bits."""
    model = LocalModel(tiny_qwen3(1))
    service = DecodeService(
        BatchGenerator(model, 4, 4096), WeightReceiver(model.module, None, True), is_isolated=True
    )
    asked = [request((1, 2, 3), (5, 6), 60), request((4,), (7,), 50)]
    num_tokens: list[int] = []

    def release() -> None:
        num_tokens.append(
            int(service.generator._cache_slots.host_ages[0]) if service.generator.has_work else 0
        )
        service.release_memory(("kv_cache",))

    job, admitted = service.submit_generate(asked)
    admitted.result(10)
    while not num_tokens or num_tokens[-1] < 8:  # until some of it has been decoded
        service.run_in_decode_loop(release).result(10)
        service.run_in_decode_loop(lambda: service.resume_memory(("kv_cache",))).result(10)
        time.sleep(0.005 * len(num_tokens))
        assert not job.future.done(), "it ended before it could be interrupted"
    assert job.future.result(60) == BatchGenerator(model, 4, 4096).generate(asked)
    service.close()


def test_a_remote_address_needs_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path), "--token-file", str(tmp_path / "t"), "--host", "0.0.0.0"])
    assert "--allow-remote" in capsys.readouterr().err


def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token = write_token_file(tmp_path / "token")
    assert read_token_file(tmp_path / "token") == token
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(ValueError, match="must be 600"):
        read_token_file(tmp_path / "token")

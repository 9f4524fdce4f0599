"""Answers of stock SGLang and what is made of them, and requests that are refused before
they are sent.
"""

from __future__ import annotations

import base64
import copy
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_tools import request

from rlhf_megatron.data.expert_route_files import map_route_file
from rlhf_megatron.rollout import http_client
from rlhf_megatron.rollout.engine_interface import (
    UNSYNCED,
    EngineAddress,
    EngineError,
    EngineRequestError,
    EngineTimeoutError,
    GeneratedSample,
    VersionSpan,
)
from rlhf_megatron.rollout.router.router_balancer import make_single_sample_body
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_samples import (
    ServerLimits,
    make_generate_body,
    make_version_name,
    parse_sample_groups,
)

PROMPT = (1, 2)
ANSWER: dict[str, Any] = {  # as SGLang 0.5.21 sent it
    "output_ids": [4, 13, 7],
    "meta_info": {
        "id": "3686d784",
        "finish_reason": {"type": "stop", "matched": 7},
        "prompt_tokens": 2,
        "weight_version": make_version_name(6),
        "num_retractions": 1,
        "output_token_logprobs": [[-1.5, 4, None], [-0.25, 13, None], [-0.5, 7, None]],
        "completion_tokens": 3,
        "cached_tokens": 1,
        "weight_versions": [
            {"version": make_version_name(v), "start": s, "end": e}
            for v, s, e in ((5, 0, 2), (6, 2, 3))
        ],
    },
}


def sample_of(**meta: Any) -> GeneratedSample:
    """Of the answer with these changes in its meta_info; None: the field is not there."""
    answer = copy.deepcopy(ANSWER)
    for name, value in meta.items():
        if value is None:
            del answer["meta_info"][name]
        else:
            answer["meta_info"][name] = value
    return parse_sample_groups(json.dumps([answer]).encode(), [request(PROMPT, (1,), 8)])[0][0]


def test_a_sample_keeps_what_the_server_tells() -> None:
    assert sample_of() == GeneratedSample(
        (4, 13, 7),
        (-1.5, -0.25, -0.5),
        "stop",
        5,
        (VersionSpan(5, 0, 2), VersionSpan(6, 2, 3)),
        1,
        1,
    )
    plain = sample_of(weight_versions=None, cached_tokens=None, num_retractions=None)
    assert plain == GeneratedSample((4, 13, 7), (-1.5, -0.25, -0.5), "stop", 6)
    # before a sync, and weights that another run has brought
    for name in ("default", "7", "0a1b2c3d-17-7"):
        unsynced = sample_of(weight_versions=[{"version": name, "start": 0, "end": 3}])
        assert (unsynced.policy_version, unsynced.version_spans) == (
            UNSYNCED,
            (VersionSpan(UNSYNCED, 0, 3),),
        )


def test_the_experts_that_tokens_met_go_into_a_file(tmp_path: Path) -> None:
    """Prompt and response have five tokens: four were read, of two layers and two experts each."""
    asked = replace(request(PROMPT, (1,), 8), routes_dir=str(tmp_path))
    assert make_generate_body([asked], 1)[
        "return_routed_experts"
    ] and "return_routed_experts" not in make_generate_body([request(PROMPT, (1,), 8)], 1)
    ids = np.arange(16, dtype="<i4")

    def answer(**meta: Any) -> bytes:
        return json.dumps([{**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta}}]).encode()

    def told(count: int) -> str:
        return base64.b64encode(ids[:count].tobytes()).decode()

    sample = parse_sample_groups(answer(routed_experts=told(16)), [asked])[0][0]
    assert map_route_file(sample.routes, (2,), 2).tolist() == ids.reshape(4, 2, 2).tolist()
    with pytest.raises(ValueError, match="15 ids for 4 tokens"):
        parse_sample_groups(answer(routed_experts=told(15)), [asked])
    with pytest.raises(ValueError, match="start the server with --enable-return-routed-experts"):
        parse_sample_groups(answer(), [asked])
    aborted = {"finish_reason": {"type": "abort"}}
    written = set(tmp_path.iterdir())
    # of two rows of four ids, or four of two: nobody knows
    for more in ({}, {"routed_experts": told(8)}):
        assert parse_sample_groups(answer(**aborted, **more), [asked])[0][0].routes == ""
    assert set(tmp_path.iterdir()) == written
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"file does not take .* make room there, or use actor.router_replay: r2"
    ):
        parse_sample_groups(
            answer(routed_experts=told(16)), [replace(asked, routes_dir=str(tmp_path / "file"))]
        )


def test_given_tokens_are_asked_for_from_the_one_before_them(tmp_path: Path) -> None:
    """The server's first entry has no log-prob; in a call with others, these say that
    they want none.
    """
    scored = replace(request((5, 6, 7, 8), (1,), 0), num_given=2)
    assert make_generate_body([scored, request(PROMPT, (1, 2), 8)], 1)["logprob_start_len"] == [
        1,
        -1,
        -1,
    ]
    assert make_single_sample_body(scored, 1)[
        "logprob_start_len"
    ] == 1 and "logprob_start_len" not in make_single_sample_body(request(PROMPT, (1,), 8), 1)
    read = [[None, 6, None], [-0.5, 7, None], [-2.0, 8, None]]
    meta = {**ANSWER["meta_info"], "completion_tokens": 1, "input_token_logprobs": read}

    def sample(entries: list[Any]) -> GeneratedSample:
        answer = [{"meta_info": {**meta, "input_token_logprobs": entries}, "output_ids": [9]}]
        return parse_sample_groups(json.dumps(answer).encode(), [scored])[0][0]

    assert (sample(read).token_ids, sample(read).log_probs) == ((7, 8), (-0.5, -2.0))
    for wrong in (
        read[:2],
        [[None, 6, None], [-0.5, 7, None], [-2.0, 9, None]],
        [[None, 7, None], [-2.0, 8, None]],
    ):
        with pytest.raises(
            ValueError, match=r"input_token_logprobs tells of \d of 2 tokens to score"
        ):
            sample(wrong)


def test_an_aborted_sample_has_the_tokens_that_came() -> None:
    aborted = {
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "completion_tokens": 2,
    }
    assert sample_of(**aborted).version_spans == (VersionSpan(5, 0, 2), VersionSpan(6, 2, 3))
    part = sample_of(**aborted, output_token_logprobs=[[-1.5, 4, None]])
    assert (part.token_ids, part.finish_reason, part.version_spans) == (
        (4,),
        "abort",
        (VersionSpan(5, 0, 1),),
    )
    none = sample_of(**aborted, output_token_logprobs=None)
    assert (none.token_ids, none.log_probs, none.policy_version, none.version_spans) == (
        (),
        (),
        6,
        (),
    )


LOG_PROBS = "output_token_logprobs"
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"finish_reason": None}, "missing required field `finish_reason` - at `\\$.meta_info`"),
    ({"finish_reason": "stop"}, r"Expected `object`, got `str` - at `\$.meta_info.finish_reason`"),
    ({"finish_reason": {"type": "tired"}}, r"'tired' - at `\$.meta_info.finish_reason.type`"),
    ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, "not a number"),
    ({LOG_PROBS: None}, r"meta_info\.output_token_logprobs is missing"),
    ({LOG_PROBS: ANSWER["meta_info"][LOG_PROBS][:2]}, "2 entries, completion_tokens is 3"),
    (
        {LOG_PROBS: [[-1.5, 4, None], [None, 13, None], [-0.5, 7, None]]},
        r"Expected `float`, got `null` - at `\$.meta_info.output_token_logprobs\[1\]\[0\]`",
    ),
    ({LOG_PROBS: [[float("nan"), 4, None]] * 3}, r"\[0\]: the log-prob of token 4 is nan"),
    (
        {LOG_PROBS: [[-1.5, "4", None]] * 3},
        r"Expected `int`, got `str` - at `\$.meta_info.output_token_logprobs\[0\]\[1\]`",
    ),
    ({LOG_PROBS: [[-1.5, 4, None], [-0.25, 14, None], [-0.5, 7, None]]}, "name different tokens"),
    ({"completion_tokens": None}, "completion_tokens is None"),
    ({"cached_tokens": -1}, r"Expected `int` >= 0 - at `\$.meta_info.cached_tokens`"),
    ({"num_retractions": "1"}, r"got `str` - at `\$.meta_info.num_retractions`"),
    ({"weight_versions": [{"version": "5", "start": 1, "end": 3}]}, "token 1 does not follow on"),
    ({"weight_versions": [{"version": "5", "start": 0, "end": 2}]}, "ends at token 2 of 3"),
    (
        {"weight_versions": [{"version": "5", "start": 0}]},
        r"missing required field `end` - at `\$.meta_info.weight_versions\[0\]`",
    ),
]


@pytest.mark.parametrize(("changes", "words"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_wrong_with_an_answer_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"sample 0 of 1: .*{words}"):
        sample_of(**changes)


def test_numbers_of_samples() -> None:
    asked = [request(PROMPT, (1, 2), 8), request(PROMPT, (3,), 8)]
    assert [
        len(group) for group in parse_sample_groups(json.dumps([ANSWER] * 3).encode(), asked)
    ] == [2, 1]
    for sent, words in (
        ([ANSWER] * 2, "2 samples for 3 asked for"),
        ("no", "'no' for 3 asked for"),
        (
            [ANSWER, {"output_ids": []}, ANSWER],
            r"sample 1 of 3: .*missing required field `meta_info`",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            parse_sample_groups(json.dumps(sent).encode(), asked)


def test_numbers_of_a_token_are_read_however_they_are_written() -> None:
    spaced = json.dumps([ANSWER], indent=1).encode()
    with_texts = sample_of(
        output_token_logprobs=[[-1.5, 4, "[4],"], [-0.25, 13, "]"], [-0.5, 7, None]]
    )
    whole = sample_of(output_token_logprobs=[[-1, 4, None], [-0.25, 13, None], [-5e-1, 7, None]])
    assert (
        parse_sample_groups(spaced, [request(PROMPT, (1,), 8)])[0][0] == with_texts == sample_of()
    )
    assert whole.log_probs == (-1.0, -0.25, -0.5)
    for wrong in (
        [[-1.5, 4.0, None]] * 3,
        [[-1.5, 1 << 31, None]] * 3,
        [[-1.5, 4], [None, -0.25, 13, None]],
    ):
        with pytest.raises(ValueError, match="sample 0 of 1"):
            sample_of(output_token_logprobs=wrong)


def test_a_request_has_an_entry_and_a_seed_a_sample() -> None:
    body = make_generate_body(
        [request(PROMPT, (7, 8), 4, 0.5, top_p=0.9, top_k=5, stop_token_ids=(3,))], 12
    )
    assert body["input_ids"] == [(1, 2), (1, 2)] and body["extra_key"] == "version 12"
    first, second = body["sampling_params"]
    assert (first.pop("sampling_seed"), second.pop("sampling_seed")) == (7, 8) and first == second
    assert {
        name: first[name] for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    } == {
        "max_new_tokens": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
    }
    assert first["stop_token_ids"] == [3]


REFUSED = [
    ({"prompt": ()}, "the prompt is empty"),
    ({"prompt": (1, 32)}, r"token 32 .* \(0 \.\. 31\)"),
    ({"prompt": (-1, 3)}, "token -1 "),
    ({"max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"max_new_tokens": 0}, "it needs num_given >= 1"),
    ({"min_new_tokens": 2}, "min_new_tokens is 2"),
    ({"min_p": 0.1}, r"min_p is 0\.1.*enable_deterministic_inference"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_would_end_the_server_is_refused(changes: dict[str, Any], words: str) -> None:
    asked = {"prompt": PROMPT, "seeds": (1,), "max_new_tokens": 4, **changes}
    with pytest.raises(EngineRequestError, match=f"engine0: .*{words}"):
        ServerLimits(32, True).check_requests([request(**asked)], "engine0")


def test_what_a_server_can_do_is_not_refused() -> None:
    ServerLimits(32, False).check_requests([request((0, 31), (1,), 1, min_p=0.1)], "engine0")
    ServerLimits(None, True).check_requests([request((99,), (1,), 1)], "engine0")
    # greedy: nothing to cut
    ServerLimits(32, True).check_requests([request((1,), (1,), 1, 0.0, min_p=0.1)], "engine0")


class Recorder(BaseHTTPRequestHandler):
    """Answers as a server does that has nothing to say, and keeps who asked with which key."""

    keys: dict[str, str]

    def do_GET(self) -> None:
        self.keys[self.path] = self.headers.get("Authorization", "")
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or "{}")
        is_question = "token_ids_logprob" in body
        text = json.dumps([ANSWER] if self.path == "/generate" and not is_question else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[tuple[str, dict[str, str]]]:
    keys: dict[str, str] = {}
    server = HTTPServer(("127.0.0.1", 0), type("R", (Recorder,), {"keys": keys}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", keys
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_each_verb_takes_its_key(recorder: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """SGLang refuses the admin key where its other key is asked for, and the other way round."""
    url, keys = recorder
    engine = SGLangEngine(EngineAddress("engine0", "sglang", url, "admin", api_key="api"), tmp_path)
    engine.generate([request(PROMPT, (1,), 8)], 10)
    engine.check_health(10)
    engine.pause_decoding()
    engine.check_health(10)
    engine.release_memory(["kv_cache"])
    engine.close()
    of_api = {"/generate", "/server_info", "/health_generate", "/model_info"}
    assert {path: key for path, key in keys.items() if path in of_api} == dict.fromkeys(
        of_api, "Bearer api"
    )
    of_admin = {"/pause_generation", "/release_memory_occupation"}
    assert {path: key for path, key in keys.items() if path not in of_api} == dict.fromkeys(
        of_admin, "Bearer admin"
    )


def test_graphs_are_released_with_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SGLangEngine(
        EngineAddress("engine0", "sglang", "http://127.0.0.1:9", "admin"), tmp_path
    )
    sent: list[Any] = []
    monkeypatch.setattr(
        engine._admin_http, "post", lambda path, body, timeout_s: sent.append(body.get("tags"))
    )
    engine.release_memory()
    engine.release_memory(["kv_cache"])
    engine.resume_memory(["weights"])
    engine.resume_memory()
    tags = [["weights", "kv_cache", "cuda_graph"], ["weights"], ["kv_cache", "cuda_graph"]]
    assert [found for found in sent if found] == tags


@pytest.mark.parametrize(("token", "expected"), [("admin", "Bearer admin"), ("", "")])
def test_one_key_or_none(
    recorder: tuple[str, dict[str, str]], tmp_path: Path, token: str, expected: str
) -> None:
    url, keys = recorder
    engine = SGLangEngine(EngineAddress("engine0", "sglang", url, token), tmp_path)
    engine.generate([request(PROMPT, (1,), 8)], 10)
    engine.abort_calls()
    engine.close()
    assert keys == dict.fromkeys(("/server_info", "/generate", "/abort_request"), expected)


def test_a_paused_server_is_asked_nothing(
    recorder: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """Its answer would not come either, not even to what it can do."""
    url, keys = recorder
    engine = SGLangEngine(EngineAddress("engine0", "sglang", url, "key"), tmp_path)
    engine.pause_decoding()
    with pytest.raises(EngineTimeoutError, match=r"engine0 is paused: no answer within 0\.1 s"):
        engine.generate([request(PROMPT, (1,), 8)], 0.1)
    engine.close()
    assert set(keys) == {"/pause_generation"}


def test_servers_that_hang_keep_nobody_from_reading_answers(tmp_path: Path) -> None:
    """More of them than there are threads to read in, at the first question to each. Who waits for
    that of another call has its own deadline.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        engines = [
            SGLangEngine(EngineAddress(f"engine{i}", "sglang", url, "key"), tmp_path)
            for i in range(40)
        ]
        asked = [
            http_client.start_in_event_loop(
                engine.generate_async([request(PROMPT, (1,), 8)], 3600.0)
            )
            for engine in engines
        ]
        assert (
            http_client.run_in_event_loop(
                http_client.run_in_thread_if_large(1 << 20, lambda: "read"), 30.0
            )
            == "read"
        )
        late = http_client.start_in_event_loop(
            engines[0].generate_async([request(PROMPT, (1,), 8)], 0.1)
        )
        with pytest.raises(
            EngineTimeoutError, match=r"engine0 does not tell its limits: no answer within 0\.1 s"
        ):
            late.result(60)
        for future in asked:
            future.cancel()


def test_a_wrong_answer_names_the_engine(
    recorder: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    engine = SGLangEngine(EngineAddress("engine0", "sglang", recorder[0], "key"), tmp_path)
    with pytest.raises(
        EngineError, match=r"^engine0 \(http://127.0.0.1:\d+/generate\): 1 samples for 2 asked for"
    ):
        engine.generate([request(PROMPT, (1, 2), 8)], 10)
    engine.close()


def test_columns_stand_where_tuples_could() -> None:
    ids = sample_of().token_ids
    log_probs = sample_of().log_probs
    assert (
        ids == (4, 13, 7) and ids == (4, 13, 7) and ids != (4, 13) and hash(ids) == hash((4, 13, 7))
    )
    assert (ids[1], ids[:2], [*ids], len(ids), repr(ids)) == (
        13,
        (4, 13),
        [4, 13, 7],
        3,
        "(4, 13, 7)",
    )
    assert np.asarray(ids).dtype == np.int32 and np.asarray(log_probs).dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(ids)[0] = 5

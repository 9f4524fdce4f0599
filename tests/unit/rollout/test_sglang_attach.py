"""Running servers that a run attaches to: what is looked at, keys. Small servers say
what SGLang says.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.config.rules.engine_rules import is_local_host, parse_endpoint_address
from rlhf_megatron.config.secrets import read_key_file
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.sglang.attached_engines import (
    ServerRequirements,
    inspect_all_servers,
    inspect_server,
    make_endpoint_addresses,
)
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 64,
}
INFO: dict[str, Any] = {
    "version": "0.5.21",
    "tp_size": 2,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "custom_weight_loader": [LOAD_FORMAT],
    "enable_deterministic_inference": True,
    "device": "cuda",
    "max_total_num_tokens": 4096,
    "context_length": None,
    "dp_size": 1,
    "pp_size": 1,
}
MODEL: dict[str, Any] = {
    "model_path": "/nowhere",
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}
Answer = Callable[[str, str, Any, str], tuple[int, Any]]


@contextmanager
def served(answer: Answer) -> Iterator[str]:
    """The URL of a server that answers as `answer(method, path, body, key)` says: status,
    and JSON or text.
    """

    class Handler(BaseHTTPRequestHandler):
        def reply(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            key = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            status, value = answer(self.command, self.path, body, key)
            data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header(
                "Content-Type", "text/html" if isinstance(value, str) else "application/json"
            )
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = reply

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def sglang(info: Mapping[str, Any], model: Mapping[str, Any], key: str = "") -> Answer:
    answers = {"/server_info": info, "/model_info": model}

    def answer(method: str, path: str, body: Any, given: str) -> tuple[int, Any]:
        return (200, answers[path]) if given == key else (401, {"error": "Unauthorized"})

    return answer


@pytest.fixture
def expected(tmp_path: Path) -> ServerRequirements:
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "ours" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    return ServerRequirements(
        tmp_path / "ours", tmp_path / "ours", "float32", max_sample_tokens=100
    )


def at(url: str, key: str = "") -> EngineAddress:
    return make_endpoint_addresses([url], key, "")[0]


def test_a_server_that_fits(expected: ServerRequirements) -> None:
    with served(sglang(INFO, MODEL)) as url:
        found = inspect_server(at(url), expected)
    assert (found.problems, found.warnings) == ((), ())
    assert (found.tp_size, found.lists_loader, found.dtype) == (2, True, "float32")


@pytest.mark.parametrize(
    "info, words",
    [
        (
            {"version": "0.5.20"},
            r"sglang in the server is 0.5.20, but 0.5.21 or newer is needed .*upgrade it",
        ),
        (
            {"dtype": "half"},
            (
                r"its weights are float16, but rollout.dtype .* is float32; start it with"
                r" --dtype float32"
            ),
        ),
        (
            {"dp_size": 2},
            r"its dp-size is 2: .*; use rollout.num_engines \(or more endpoints\) and dp-size 1",
        ),
        ({"pp_size": 2}, r"its pp-size is 2: "),
        (
            {"speculative_algorithm": "EAGLE"},
            r"its speculative-algorithm is 'EAGLE': .* without speculative decoding",
        ),
        ({"enable_lora": True}, r"its enable-lora is True: .*; start it without LoRA"),
        ({"quantization": "fp8"}, r"its quantization is 'fp8': .*; start it without quantization"),
        ({"max_total_num_tokens": 99}, r"has room for 99 tokens, the longest sample has 100 "),
        ({"context_length": 64}, r"its --context-length is 64, the longest sample has 100 tokens"),
    ],
)
def test_what_stands_against_a_server(
    info: dict[str, Any], words: str, expected: ServerRequirements
) -> None:
    with served(sglang({**INFO, **info}, MODEL)) as url, pytest.raises(EngineError) as caught:
        inspect_all_servers([at(url)], expected)
    assert re.match(rf"rollout.endpoints \({url}\): .*{words}", str(caught.value))


def test_dp_attention_where_the_head_is_the_embedding(expected: ServerRequirements) -> None:
    config = expected.model_path / "config.json"
    config.write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    info = {**INFO, "dp_size": 2, "enable_dp_attention": True}
    with served(sglang({**info, "enable_dp_lm_head": True}, MODEL)) as url:
        assert inspect_server(at(url), expected).problems == ()
    with served(sglang(info, MODEL)) as url:
        (problem,) = inspect_server(at(url), expected).problems
    assert "over fewer ranks than the head" in problem and problem.endswith(
        "; add enable-dp-lm-head"
    )


def test_dp_attention_whose_ranks_would_draw_the_same_samples(expected: ServerRequirements) -> None:
    info = {
        **INFO,
        "dp_size": 2,
        "enable_dp_attention": True,
        "enable_deterministic_inference": False,
    }
    for loaders, is_refused in (([], True), ([LOAD_FORMAT], False)):
        with served(sglang({**info, "custom_weight_loader": loaders}, MODEL)) as url:
            problems = inspect_server(at(url), expected).problems
        assert (
            any("samples of a group would be the same; start it with" in text for text in problems)
            is is_refused
        )


def test_everything_that_is_wrong_is_told_at_once(expected: ServerRequirements) -> None:
    answer = sglang({**INFO, "dp_size": 2, "dtype": "bfloat16"}, MODEL)
    with served(answer) as url, pytest.raises(EngineError) as caught:
        inspect_all_servers([at(url), at("http://127.0.0.1:9")], expected)
    first, second, third = str(caught.value).splitlines()
    assert ("dp-size" in first, "bfloat16" in second, "no connection" in third) == (
        True,
        True,
        True,
    )


def test_another_model(expected: ServerRequirements, tmp_path: Path) -> None:
    other = {**MODEL, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "config.json").write_text(
        json.dumps({**CONFIG, "hidden_size": 128, "torch_dtype": "bfloat16"})
    )
    for model, words in (
        (other, "LlamaForCausalLM instead of Qwen3ForCausalLM; start it with that model"),
        ({**MODEL, "model_type": "qwen3_moe"}, "model_type qwen3_moe instead of qwen3"),
        (
            {**MODEL, "model_path": str(theirs)},
            "hidden_size 128 instead of 64; start it with that model",
        ),
    ):
        with served(sglang(INFO, model)) as url:
            (problem,) = inspect_server(at(url), expected).problems
        assert problem.startswith(
            f"it serves another model than model.path ({expected.model_path}): "
        )
        assert problem.endswith(
            words + ("" if "start it" in words else "; start it with that model")
        )


def test_another_tokenizer(expected: ServerRequirements, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    tokenizer = theirs / "tokenizer.json"
    info = {**INFO, "skip_tokenizer_init": False, "tokenizer_path": str(theirs)}
    for vocabulary, count in (({"a": 0}, 0), ({"b": 0}, 1)):
        tokenizer.write_text(json.dumps({"model": {"vocab": vocabulary}}))
        with served(sglang(info, MODEL)) as url:
            problems = inspect_server(at(url), expected).problems
        assert len(problems) == count
    assert (
        f"another tokenizer ({theirs}) than the run ({expected.tokenizer_path}); start it with"
        in problems[0]
    )
    with served(sglang({**info, "skip_tokenizer_init": True}, MODEL)) as url:
        assert inspect_server(at(url), expected).problems == ()


def test_a_deterministic_run_wants_deterministic_servers(expected: ServerRequirements) -> None:
    info = {**INFO, "enable_deterministic_inference": False}
    strict = replace(expected, is_deterministic=True)
    with served(sglang(info, MODEL)) as url:
        assert "ignores the seed of a sample" in inspect_server(at(url), expected).warnings[0]
        assert inspect_server(at(url), strict).problems == (
            "trainer.deterministic is set; start it with --enable-deterministic-inference",
        )
    with served(sglang({**INFO, "device": "cpu"}, MODEL)) as url:
        assert "which SGLang has not on a CPU" in inspect_server(at(url), strict).problems[0]


@pytest.mark.parametrize(
    "status, value, words",
    [
        (
            404,
            "<html>no such page</html>",
            r"is not an SGLang server \(engine0 .* answered 404: <html>no such page",
        ),
        (
            200,
            "<html>hello</html>",
            r"is not an SGLang server: its /server_info says <html>hello</html>; correct the",
        ),
        (
            200,
            {"status": "ok"},
            r"is not an SGLang server: its /server_info says {'status': 'ok'}; .*a router is not",
        ),
        (
            500,
            "broken",
            r"is not an SGLang server \(.* answered 500: broken\); correct the address",
        ),
    ],
)
def test_an_endpoint_that_is_not_sglang(
    status: int, value: Any, words: str, expected: ServerRequirements
) -> None:
    with served(lambda *_: (status, value)) as url, pytest.raises(EngineError) as caught:
        inspect_all_servers([at(url)], expected)
    assert re.match(f"rollout.endpoints: {url} {words}", str(caught.value))


def test_nobody_at_the_endpoint(expected: ServerRequirements) -> None:
    with pytest.raises(
        EngineError,
        match=r"rollout.endpoints: .*no connection .*Start the server first, or correct",
    ):
        inspect_all_servers([at("http://127.0.0.1:9")], expected)


def test_a_key_that_is_refused(expected: ServerRequirements) -> None:
    with served(sglang(INFO, MODEL, key="right")) as url:
        assert inspect_server(at(url, "right"), expected).problems == ()
        for key in ("", "wrong"):
            with pytest.raises(
                EngineError, match=f"{url} refuses the key; .*rollout.sglang.api_key_file"
            ) as caught:
                inspect_all_servers([at(url, key)], expected)
            assert "wrong" not in str(caught.value)


def test_the_addresses_of_endpoints() -> None:
    first, second = make_endpoint_addresses(["http://a:1/", "https://b"], "api", "admin")
    assert (first.name, first.kind, first.url, first.token, first.api_key) == (
        *("engine0", "sglang", "http://a:1"),
        *("admin", "api"),
    )
    assert (second.name, second.url) == ("engine1", "https://b")
    assert (at("http://a", "api").token, at("http://a", "api").api_key) == ("api", "")
    assert "api" not in repr(first) and "admin" not in repr(first)


def test_where_an_endpoint_is() -> None:
    assert (
        parse_endpoint_address("http://localhost:80")
        == parse_endpoint_address("http://127.0.0.1/")
        == ("127.0.0.1", 80)
    )
    assert parse_endpoint_address("https://a.example") == ("a.example", 443)
    for wrong in (
        "a:1",
        "ftp://a",
        "http://",
        "http://a/v1",
        "http://u:p@a",
        "http://a:b",
        "http://a?x",
        "http://[a",
    ):
        assert parse_endpoint_address(wrong) is None
    assert [is_local_host(host) for host in ("127.0.0.9", "::1", "localhost", "a")] == [
        True,
        True,
        True,
        False,
    ]


def test_keys_over_the_network_are_warned_of(
    expected: ServerRequirements, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlhf_megatron.rollout.sglang.attached_engines.is_local_host", lambda host: False
    )
    with served(sglang(INFO, MODEL, key="right")) as url:
        assert inspect_server(at(url, "right"), expected).warnings == (
            "its keys go over the network in clear, since the address begins with http; use https.",
        )
    with served(sglang(INFO, MODEL)) as url:
        assert inspect_server(at(url), expected).warnings == ()


def test_a_key_lies_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("s3cret\n")
    path.chmod(0o600)
    assert read_key_file(str(path), "setting") == "s3cret"
    assert read_key_file(None, "setting") == ""
    path.chmod(0o640)
    with pytest.raises(
        ValueError,
        match=rf"setting \({path}\) must belong to you and have mode 0600; run chmod 600",
    ):
        read_key_file(str(path), "setting")
    path.chmod(0o600)
    for text in ("", "two words", "two\nlines"):
        path.write_text(text)
        with pytest.raises(
            ValueError, match=r"must hold the key, one line of it, and nothing else"
        ):
            read_key_file(str(path), "setting")
    with pytest.raises(
        ValueError, match=r"cannot be read: No such file or directory; correct the path"
    ):
        read_key_file(str(tmp_path / "gone"), "setting")


def test_a_weight_update_of_another_run_is_not_joined(tmp_path: Path) -> None:
    """What an own sync that failed has left open is begun anew;
    what another run has open is not.
    """
    opened: list[str] = ["by somebody else"]
    num_ended = 0

    def answer(method: str, path: str, body: Any, key: str) -> tuple[int, Any]:
        nonlocal num_ended
        if path == "/begin_weight_update":
            if opened:
                return 400, {"error": {"message": "a session is open"}}
            opened.append("here")
        elif path == "/end_weight_update":
            opened.clear()
            num_ended += 1
        return 200, {"success": True}

    with served(answer) as url:
        other = SGLangEngine(replace(at(url), is_attached=True), tmp_path)
        with pytest.raises(
            EngineError, match="a session is open Another run syncs weights with it; give each run"
        ):
            other.begin_weight_update(1)
        assert num_ended == 0
        opened.clear()
        own = SGLangEngine(replace(at(url), is_attached=True), tmp_path)
        own.begin_weight_update(1)
        own.begin_weight_update(1)
        assert num_ended == 1

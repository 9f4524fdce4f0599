"""`rlhf-megatron serve` as clients use it: answers, streams, refusals, killed engines, a run
that is followed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_tools import ONE_RANK, overrides, train, write_config
from program_jobs import LOCAL, SGLANG, Job
from rollout_tools import reference_log_probs
from serve_tools import (
    KEY,
    MODEL,
    Client,
    Load,
    ask_with_openai,
    has_openai,
    names_of,
    needs_openai,
    served,
    sglang_words,
)
from sglang_tools import needs_sglang
from transformers import AutoModelForCausalLM

from rlhf_megatron.controller.recovery.checkpoint_export import find_exportable_weights
from rlhf_megatron.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.dist
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
SUM = {"prompt": "12+34=", "max_tokens": 12, "temperature": 1.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Client]]:
    with served(tmp_path_factory.mktemp("served")) as found:
        yield found


def test_completions_are_those_of_transformers(server: tuple[Job, Client]) -> None:
    """Texts, log-probs, counts and the version;
    prompts as texts and as token ids, several at once.
    """
    client = server[1]
    tokenizer = load_tokenizer(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    ids = tokenizer.encode("12+34=")
    ids_by_name = names_of(tokenizer)
    answer = client.post(COMPLETIONS, **SUM, n=3, seed=7, logprobs=0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and answer[
        "model"
    ] == "model"
    for choice in answer["choices"]:
        drawn = tuple(ids_by_name[token] for token in choice["logprobs"]["tokens"])
        expected = reference_log_probs(model, ids, drawn)
        assert torch.allclose(
            torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-4
        )
        assert choice["text"] == tokenizer.decode(drawn)
        assert choice["version_spans"] == [[0, 0, len(drawn)]]
        assert (choice["finish_reason"] == "stop") == (drawn[-1] == tokenizer.eos_token_id)
    num_drawn = sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": num_drawn,
        "total_tokens": 6 + num_drawn,
    }
    assert answer["policy_version"] == 0 and answer["system_fingerprint"] == "version-0"
    greedy = {"max_tokens": 4, "temperature": 0}
    texts = client.post(COMPLETIONS, prompt=["12+34=", list(tokenizer.encode("50+49="))], **greedy)[
        "choices"
    ]
    assert (
        texts[1]["text"]
        == client.post(COMPLETIONS, prompt="50+49=", **greedy)["choices"][0]["text"]
    )
    native = client.post(
        "/generate", requests=[{"prompt_ids": ids, "seeds": [1], "params": {"max_new_tokens": 4}}]
    )
    assert (
        len(native["groups"][0][0]["token_ids"]) <= 4
        and native["groups"][0][0]["policy_version"] == 0
    )


def test_streams_are_the_answers_in_pieces(server: tuple[Job, Client]) -> None:
    """Also where a text ends them: stop is cut off whether the answer is streamed or not."""
    client = server[1]
    for more in ({}, {"stop": ["0"]}, {"stop": ["+", "1"]}):
        body = {**SUM, "n": 2, "seed": 11, "max_tokens": 40, "logprobs": 0, **more}
        whole = client.post(COMPLETIONS, **body)
        chunks = client.chunks(COMPLETIONS, **body, stream_options={"include_usage": True})
        assert chunks[-1]["usage"] == whole["usage"] and chunks[-1]["choices"] == []
        for choice in whole["choices"]:
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            assert "".join(c["text"] for c in own) == choice["text"]
            assert [t for c in own for t in (c["logprobs"] or {"tokens": []})["tokens"]] == choice[
                "logprobs"
            ]["tokens"]
            assert [c["finish_reason"] for c in own if c["finish_reason"]] == [
                choice["finish_reason"]
            ]
            assert not any(stop in choice["text"] for stop in more.get("stop", ()))
        assert {chunk["policy_version"] for chunk in chunks} == {0}
        assert more or len(chunks) > 4


def test_chats_go_through_the_template_with_tools(server: tuple[Job, Client]) -> None:
    """The template joins contents and counts tools: a chat is the completion of that text."""
    client = server[1]
    messages = [
        {"role": "system", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "2+34"}]},
    ]
    body = {"max_tokens": 8, "temperature": 0.8, "seed": 5}
    chat = client.post(CHAT, messages=messages, **body, logprobs=True)
    text = client.post(COMPLETIONS, **{**SUM, **body})["choices"][0]["text"]
    message = chat["choices"][0]["message"]
    assert message == {"role": "assistant", "content": text} and chat["object"] == "chat.completion"
    assert chat["usage"]["prompt_tokens"] == 6
    assert len(chat["choices"][0]["logprobs"]["content"]) == chat["usage"]["completion_tokens"]
    deltas = [
        c["delta"]
        for chunk in client.chunks(CHAT, messages=messages, **body)
        for c in chunk["choices"]
    ]
    assert (
        deltas[0]["role"] == "assistant" and "".join(d.get("content", "") for d in deltas) == text
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with_tools = client.post(
        CHAT, messages=messages, tools=[tool, tool], tool_choice="auto", **body
    )
    assert with_tools["usage"]["prompt_tokens"] == len("2*12+34=")
    assert (
        client.post(CHAT, messages=messages, tools=[tool], tool_choice="none", **body)["usage"][
            "prompt_tokens"
        ]
        == 6
    )


def test_what_cannot_be_had_is_refused_with_the_reason(server: tuple[Job, Client]) -> None:
    client = server[1]
    for more, status, words in (
        ({"prompt": []}, 400, "prompt must be a text"),
        ({"prompt": [1, 99]}, 400, "each from 0 to 31"),
        (
            {"prompt": "1", "max_tokens": 64},
            400,
            "1 tokens and 64 of the response; together they may be 64 at most",
        ),
        ({"prompt": "one"}, 400, "cannot be spelled with this vocabulary"),
        ({"prompt": "1", "nonsense": 1}, 400, "unknown field `nonsense`"),
        ({"prompt": "1", "logprobs": 3}, 400, "the drawn token alone"),
        ({"prompt": "1", "presence_penalty": 1}, 400, "change the distribution"),
        ({"prompt": "1", "stop": ["a", ""]}, 400, "a stop must not be empty"),
        (
            {"prompt": "1", "model": "another"},
            404,
            "there is no model 'another' here; it is 'model'",
        ),
    ):
        found = client.refusal(COMPLETIONS, **more)  # type: ignore[arg-type]
        assert found[0] == status and words in found[1], found
        assert client.refusal(COMPLETIONS, **{**more, "stream": True}) == found  # type: ignore[arg-type]
    message = {"role": "user", "content": "1"}
    needs = {"messages": [message], "tools": [{}], "tool_choice": "required"}
    assert "needs a grammar" in client.refusal(CHAT, **needs)[1]
    assert (
        "reads text alone"
        in client.refusal(CHAT, messages=[{"role": "user", "content": [{"type": "image"}]}])[1]
    )
    assert (
        client.refusal(
            "/generate",
            requests=[{"prompt_ids": [40], "seeds": [1], "params": {"max_new_tokens": 1}}],
        )[0]
        == 400
    )
    assert Client(client.url, "wrong").refusal(COMPLETIONS, **SUM)[0] == 401
    assert Client(client.url, "").send("GET", "/health").json()["engines_serving"] == 2
    assert (
        client.get("/v1/models")["data"][0]["id"] == "model"
        and client.get("/v1/models/model")["id"] == "model"
    )


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_plain_curl_gets_what_other_clients_get(server: tuple[Job, Client], tmp_path: Path) -> None:
    client = server[1]
    chat = {"messages": [{"role": "user", "content": "12+34"}], "max_tokens": 6, "seed": 2}
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}

    def curl(path: str, body: dict[str, Any]) -> str:
        words = [
            "curl",
            "-sSN",
            "--fail-with-body",
            "-H",
            f"Authorization: Bearer {KEY}",
            client.url + path,
        ]
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout

    for path, body in (
        (COMPLETIONS, {**SUM, "seed": 1, "n": 2, "logprobs": 0, "stop": ["0"]}),
        (CHAT, {**chat, "logprobs": True, "n": 2}),
        (CHAT, {**chat, "tools": [tool]}),
    ):
        found = json.loads(curl(path, body))
        for name, value in client.post(path, **body).items():
            assert name in ("id", "created") or found[name] == value
    events = curl(CHAT, {**chat, "stream": True}).removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
    assert choices == [chunk["choices"] for chunk in client.chunks(CHAT, **chat)]


@pytest.mark.long
@needs_openai
def test_openai_s_own_client_is_content(server: tuple[Job, Client]) -> None:
    ask_with_openai(server[1].url, "sampled")


@pytest.mark.long
@pytest.mark.sglang
@needs_sglang
def test_stock_sglang_answers_at_the_same_addresses(tmp_path: Path) -> None:
    """Log-probs are transformers', a seed decides, streams are greedily the same, and OpenAI's
    client is content.
    """
    with served(tmp_path, *sglang_words()) as (_, client):
        tokenizer = load_tokenizer(MODEL)
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        ids = tokenizer.encode("12+34=")
        ids_by_name = names_of(tokenizer)
        answer = client.post(COMPLETIONS, **SUM, n=3, seed=7, logprobs=0)
        assert (
            answer["choices"] == client.post(COMPLETIONS, **SUM, n=3, seed=7, logprobs=0)["choices"]
        )
        assert len({choice["text"] for choice in answer["choices"]}) > 1
        for choice in answer["choices"]:
            drawn = tuple(ids_by_name[token] for token in choice["logprobs"]["tokens"])
            expected = reference_log_probs(model, ids, drawn)
            assert torch.allclose(
                torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-4
            )
            assert choice["version_spans"] == [[0, 0, len(drawn)]]
        asked = [{"prompt_ids": ids, "seeds": [1], "params": {"max_new_tokens": 0}, "num_given": 3}]
        (((scored,),),) = (client.post("/generate", requests=asked)["groups"],)
        assert torch.allclose(
            torch.tensor(scored["log_probs"]),
            reference_log_probs(model, ids[:3], ids[3:]),
            atol=1e-5,
        )
        assert (
            "needs a grammar"
            in client.refusal(CHAT, messages=[{"role": "user"}], tool_choice="required")[1]
        )
        if has_openai():
            ask_with_openai(client.url, "greedy")


ENGINES = [
    pytest.param("", id="local"),
    pytest.param("sglang", id="sglang", marks=[pytest.mark.long, pytest.mark.sglang, needs_sglang]),
]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_killed_costs_no_request(engine: str, tmp_path: Path) -> None:
    """Plain requests and streams of clients that never stop asking; then the end lets
    what runs finish.

    On SGLang they are greedy: of streams that are drawn it is not promised that they are the same
    from any engine.
    """
    with served(tmp_path, *(sglang_words() if engine else ())) as (job, client):
        body = {**SUM, "max_tokens": 40} | ({"temperature": 0} if engine else {})
        expected = [
            client.post(COMPLETIONS, **body, seed=seed)["choices"][0]["text"] for seed in range(8)
        ]

        def plain(number: int) -> tuple[int, str]:
            return number % 8, client.post(COMPLETIONS, **body, seed=number % 8)["choices"][0][
                "text"
            ]

        def stream(number: int) -> tuple[int, str]:
            chunks = client.chunks(COMPLETIONS, **body, seed=number % 8)
            return number % 8, "".join(chunk["choices"][0]["text"] for chunk in chunks)

        with Load([plain] * 4 + [stream] * 4) as load:
            load.wait(lambda: len(load.answers) > 8)
            os.kill(job.engines(SGLANG if engine else LOCAL)[0], signal.SIGKILL)
            load.wait(lambda: client.metric("engine_restarts_total") == 1, 300)
            load.wait(lambda: client.get("/health")["engines_serving"] == 2, 300)
            load.wait_for(8)
            last = [
                threading.Thread(target=lambda seed=seed: load.answers.append(stream(seed)))
                for seed in range(8)
            ]
        assert not load.errors and {text == expected[seed] for seed, text in load.answers} == {True}
        for thread in last:
            thread.start()
        load.wait(
            lambda: (
                client.metric("pieces_running") > 0 or not any(thread.is_alive() for thread in last)
            )
        )
        job.process.terminate()
        for thread in last:
            thread.join(60)
        assert not load.errors


def test_a_run_that_is_followed(tmp_path: Path) -> None:
    """Its checkpoints come one by one while clients ask: no answer is lost, and each is of the
    version it names.
    """
    trained = train(
        write_config(tmp_path),
        {**ONE_RANK, "trainer.save_freq": 1, "trainer.total_training_steps": 3},
    )
    assert trained.exit_code == 0, trained.console
    steps = {int(path.name[5:]): path for path in (trained.run_dir / "checkpoints").glob("step_*")}
    models = {}
    for step, path in steps.items():
        find_exportable_weights(path).write_hf_directory(tmp_path / f"hf{step}")
        models[step] = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf{step}")
    waiting = tmp_path / "later"
    waiting.mkdir()
    for step in (2, 3):
        steps[step].rename(waiting / steps[step].name)
    with served(tmp_path, "--follow", str(trained.run_dir)) as (job, client):
        with Load(
            [partial(ask_for_spans, client, 1.0)] * 3 + [partial(ask_for_spans, client, 0.7)] * 3
        ) as load:
            for step in (2, 3):
                load.wait_for(6)
                (waiting / steps[step].name).rename(steps[step])
                load.wait(lambda step=step: client.get("/health")["policy_version"] == step)  # type: ignore[misc]
            load.wait_for(6)
        assert not load.errors
        assert f"step {max(steps)} is served, verified" in job.console.read_text()
        assert [
            path.name
            for path in (tmp_path / f"{trained.run_dir.name}-server" / "weights").iterdir()
        ] == [f"step_{max(steps):06d}"]
    _check_versions(load.answers, models)


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_is_followed_while_it_trains(engine: str, tmp_path: Path) -> None:
    """At least five of its checkpoints are served, each as soon as it stands; every answer is of
    the versions it names, and no request fails.
    """
    settings = {**ONE_RANK, "trainer.save_freq": 5, "trainer.total_training_steps": 5000}
    settings |= {"trainer.max_ckpt_to_keep": 1000}  # to be looked at afterwards
    trainer = Job(tmp_path, "train", str(write_config(tmp_path)), *overrides(settings))
    run_dir = tmp_path / "runs" / "tiny"
    words = ("rollout.num_engines=1", *(sglang_words() if engine else ()))
    served_dir = tmp_path / "served"
    served_dir.mkdir()
    try:
        trainer.wait_for_words("committed step 0")
        with served(served_dir, "--follow", str(run_dir), *words) as (_, client):
            versions: set[int] = set()
            with Load(
                [partial(ask_for_spans, client, 1.0)] * 2
                + [partial(ask_for_spans, client, 0.7)] * 2
            ) as load:
                while len(versions) < 5:
                    load.wait_for(4)
                    assert trainer.process.poll() is None, trainer.console.read_text()
                    versions = {span[0] for answer in list(load.answers) for span in answer[2]}
            assert not load.errors
    finally:
        trainer.process.terminate()
        trainer.end()
    models = {}
    for step in {span[0] for answer in load.answers for span in answer[2]}:
        find_exportable_weights(run_dir / "checkpoints" / f"step_{step:06d}").write_hf_directory(
            tmp_path / f"hf{step}"
        )
        models[step] = AutoModelForCausalLM.from_pretrained(tmp_path / f"hf{step}")
    _check_versions(load.answers, models)


IDS = (3, 4, 12, 5, 6, 14)


def ask_for_spans(
    client: Client, temperature: float, number: int
) -> tuple[list[str], list[float], list[list[int]], float]:
    """Tokens, log-probs and version spans of an answer, every other one streamed."""
    body = {
        "prompt": list(IDS),
        "max_tokens": 50,
        "temperature": temperature,
        "logprobs": 0,
        "seed": number,
    }
    chunks = (
        client.chunks(COMPLETIONS, **body) if number % 2 else [client.post(COMPLETIONS, **body)]
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    tokens = [token for c in choices for token in (c["logprobs"] or {"tokens": []})["tokens"]]
    values = [
        value
        for c in choices
        for value in (c["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    return tokens, values, [span for c in choices for span in c["version_spans"]], temperature


def _check_versions(answers: list, models: dict) -> None:  # type: ignore[type-arg]
    """Log-probs of each span are those of the model of its version, over the tokens of
    all spans before.
    """
    ids_by_name = names_of(load_tokenizer(MODEL))
    seen = set()
    for tokens, values, spans, temperature in answers:
        drawn = tuple(ids_by_name[token] for token in tokens)
        assert [span[1] for span in spans] == [0, *(span[2] for span in spans[:-1])] and spans[-1][
            2
        ] == len(drawn)
        for version, start, end in spans:
            expected = reference_log_probs(models[version], IDS, drawn, temperature)
            assert torch.allclose(torch.tensor(values[start:end]), expected[start:end], atol=1e-4)
            seen.add(version)
    assert seen == set(models)

"""Scorers by rules against published examples and by hand, and the judge against a server of the
same protocol.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_megatron.rewards import reward_endpoint
from rlhf_megatron.rewards.reward_endpoint import (
    RewardEndpoint,
    RewardEndpointError,
    _wait_for_rate_slot,
)
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.scorers.json_schema import JsonSchemaParams, score_json_schema
from rlhf_megatron.rewards.scorers.llm_judge import (
    LlmJudgeParams,
    read_first_log_prob,
    score_by_llm_judge,
)
from rlhf_megatron.rewards.scorers.multiple_choice import (
    MultipleChoiceParams,
    score_multiple_choice,
)
from rlhf_megatron.rewards.scorers.repetition import RepetitionParams, score_repetition
from rlhf_megatron.rewards.scorers.short_answer import (
    ShortAnswerParams,
    compute_word_f1,
    normalise_answer,
    score_short_answer,
)


def sample(response: str, label: str = "", reason: str = "stop", **row: Any) -> RewardSample:
    return RewardSample(
        "the question", response, label, "s", reason, 9, json.dumps(row) if row else ""
    )


@pytest.mark.parametrize(
    ("response", "label", "expected"),
    [
        ("Thus, the answer is (C).", "C", (1.0, "ok")),  # MMLU-Pro's form
        ("First B. Answer: B\nno.\n**Answer: C**", "C", (1.0, "ok")),
        ("Answer: $D", "D) all of them", (1.0, "ok")),  # simple-evals' form
        (r"The answer is A, \boxed{\text{B}}", "B", (1.0, "ok")),
        (r"\boxed{(C)} ... so the answer is **D**", "C", (0.0, "ok")),
        ("answer is I'm not sure", "I", (0.0, "malformed")),
        ("C", "C", (0.0, "malformed")),
        ("The answer is clear.", "C", (0.0, "malformed")),
        ("the answer is K", "A", (0.0, "malformed")),
        ("answer is A", "7", (0.0, "masked:bad_label")),
        (r"\boxed{\textbf{(E)}\ 12}", "E", (1.0, "ok")),  # AMC's form
        ("Answer: $(**B**)$", "B", (1.0, "ok")),
        ("answer: " + "*" * 200_000, "A", (0.0, "malformed")),  # in no time
        ("the answer is: A. The answer is b", "A", (1.0, "ok")),
        ("answer is AB", "A", (0.0, "malformed")),
    ],
)
def test_multiple_choice(response: str, label: str, expected: tuple[float, str]) -> None:
    result = score_multiple_choice(sample(response, label), MultipleChoiceParams())
    assert (result.score, result.status) == expected


def test_multiple_choice_leniently() -> None:
    params = MultipleChoiceParams(letters="ABCD", lenient=True)
    assert score_multiple_choice(sample("B, no: C", "C"), params).score == 1.0
    assert score_multiple_choice(sample("C", "C", "length"), params).status == "malformed"
    with pytest.raises(ValueError, match="each once"):
        MultipleChoiceParams(letters="AAB")


def test_words_as_squad_compares_them() -> None:
    """The examples of SQuAD's evaluation script, by hand: 2 of 2 words, 1 of 2 in 1 of 3."""
    assert normalise_answer("The  Cat's,\na mat") == "cats mat"
    assert compute_word_f1("new york", "new york") == 1.0
    assert compute_word_f1("york city", "new york state") == pytest.approx(
        2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)
    )
    assert compute_word_f1("paris", "rome") == 0.0


@pytest.mark.parametrize(
    ("response", "label", "score", "expected"),
    [
        ("<answer>The Beatles!</answer>", '["beatles"]', "exact", (1.0, "ok")),
        (
            "<answer>a</answer> <answer>Paris</answer>",
            '{"target": ["London", "Paris"]}',
            "exact",
            (1.0, "ok"),
        ),
        ("<answer>in Paris</answer>", "Paris", "exact", (0.0, "ok")),
        ("<answer>in Paris</answer>", "Paris", "contains", (1.0, "ok")),
        ("<answer>Parisian</answer>", "Paris", "contains", (0.0, "ok")),
        ("<answer>in Paris</answer>", "Paris", "f1", (2 / 3, "ok")),
        ("<answer>1990</answer>", "1990", "exact", (1.0, "ok")),
        ("Paris", "Paris", "exact", (0.0, "malformed")),
        ("<answer>the</answer>", "The", "exact", (0.0, "masked:bad_label")),  # Search-R1 gives 1
        ("<answer>x</answer>", "[]", "exact", (0.0, "masked:bad_label")),
        ("<answer>null</answer>", "null", "exact", (1.0, "ok")),
        ("<answer>none</answer>", "null", "exact", (0.0, "ok")),
        ("<answer>true</answer>", "true", "exact", (1.0, "ok")),
        ("<answer>Paris Rome Oslo</answer>", "Paris", "f1", (0.5, "ok")),
        ("<answer>Paris Paris</answer>", "Paris", "f1", (2 / 3, "ok")),
        ("<answer></answer>", "Paris", "f1", (0.0, "malformed")),
        ("<answer>the</answer>", "Paris", "f1", (0.0, "ok")),
    ],
)
def test_short_answers(response: str, label: str, score: Any, expected: tuple[float, str]) -> None:
    result = score_short_answer(sample(response, label), ShortAnswerParams(score=score))
    assert (pytest.approx(result.score), result.status) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("", 0.0),
        ("this is", 0.0),
        ("a b c d", 0.0),
        ("a a a a a", 1 / 3 - 1),
        ("A b c a B C", 3 / 4 - 1),
    ],
)
def test_repetition(response: str, expected: float) -> None:
    """Distinct runs of three words by hand; the fourth is an example of Open-R1's tests."""
    assert score_repetition(sample(response), RepetitionParams()).score == pytest.approx(expected)


PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", 1]}, "uniqueItems": True, "maxItems": 2},
        "boss": {"anyOf": [{"type": "null"}, {"type": "string"}], "not": {"const": "me"}},
    },
}


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ('{"name": "Ann", "age": 3}', (1.0, "ok")),
        (
            'So:\n```json\n{"name": "Ann", "age": 3.0, "tags": ["x", 1], "boss": null}\n```',
            (1.0, "ok"),
        ),
        ('{"name": "ann", "age": 3}', (0.0, "ok")),
        ('{"name": "Ann", "age": true}', (0.0, "ok")),
        ('{"name": "Ann", "age": 150}', (0.0, "ok")),
        ('{"name": "Ann"}', (0.0, "ok")),
        ('{"name": "Ann", "age": 3, "more": 1}', (0.0, "ok")),
        ('{"name": "Ann", "age": 3, "tags": ["x", "x"]}', (0.0, "ok")),
        ('{"name": "Ann", "age": 3, "tags": [true]}', (0.0, "ok")),
        ('{"name": "Ann", "age": 3, "boss": "me"}', (0.0, "ok")),
        ("[]", (0.0, "ok")),
        ('{"name": NaN}', (0.0, "malformed")),
        ('```python\nx\n```\nand\n```json\n{"name": "Ann", "age": 3}\n```', (1.0, "ok")),
        ('```JSON\n{"name": "A ```text``` B", "age": 3}```\nDone.', (1.0, "ok")),
        ('```json\n{"name": "Ann", "age": 3}\n```\n```json\n[]\n```', (0.0, "ok")),
        ('```yaml\n{"name": "Ann", "age": 3}\n```', (0.0, "malformed")),
        ('{"name": "Ann", "age": 3} {"name": "Ann", "age": 3}', (0.0, "malformed")),
        ("{'name': 'Ann', 'age': 3}", (0.0, "malformed")),
        ('{"name": "Ann", "age": 3,}', (0.0, "malformed")),
        ('{"name": "Ann", "age": 3, "age": 200}', (0.0, "ok")),
        ('{"name": "Ann", "age": 1e400}', (0.0, "ok")),
        ('{"name": "Ann", "age": "3"}', (0.0, "ok")),
        ("no", (0.0, "malformed")),
        ("[" * 100_000, (0.0, "malformed")),
    ],
)
def test_json_schema(response: str, expected: tuple[float, str]) -> None:
    for params, label in ((JsonSchemaParams(PERSON), ""), (JsonSchemaParams(), json.dumps(PERSON))):
        result = score_json_schema(sample(response, label), params)
        assert (result.score, result.status) == expected


@pytest.mark.parametrize(
    ("divisor", "text", "score"),
    [
        (0.01, "19.99", 1.0),
        (0.01, "0.07", 1.0),
        (0.1, "0.3", 1.0),
        (0.01, "19.995", 0.0),
        (0.01, "19.990000000000002", 0.0),
        (1e-9, "1e-9", 1.0),
        (0.5, "1.5", 1.0),
        (0.5, "9" * 400, 1.0),
        (0.5, "9" * 400 + ".25", 0.0),
        (3, "9" * 400, 1.0),
        (3, "1e400", 0.0),
        (2, "4.0", 1.0),
        (2, "true", 1.0),
        (2, '"a"', 1.0),
    ],
)
def test_multiples_are_those_of_decimals(divisor: float, text: str, score: float) -> None:
    """As floats 19.99 / 0.01 is 1998.9999999999998, and 0.3 / 0.1 is 2.9999999999999996. What is
    no number has no multiple to be.
    """
    for schema in (
        {"multipleOf": divisor},
        {"$schema": "http://json-schema.org/draft-03/schema#", "divisibleBy": divisor},
        {"$schema": "http://json-schema.org/draft-07/schema#", "multipleOf": divisor},
    ):
        result = score_json_schema(sample(text), JsonSchemaParams(schema))
        assert (result.score, result.status) == (score, "ok")


def test_schemas_that_are_not_understood() -> None:
    email = JsonSchemaParams({"type": "string", "format": "email"})
    assert [score_json_schema(sample(text), email).score for text in ('"a@b.c"', '"a"')] == [
        1.0,
        0.0,
    ]
    with pytest.raises(ValueError, match=r"schema at \$\.properties\.a\.type: 'text' is not valid"):
        JsonSchemaParams({"properties": {"a": {"type": "text"}}})
    for label in ("no schema", '{"$ref": "http://127.0.0.1:9/schema"}', '{"$ref": "#"}'):
        assert (
            score_json_schema(sample("1", label), JsonSchemaParams()).status == "masked:bad_label"
        )
    tree = '{"properties": {"c": {"$ref": "#"}}}'
    deep = '{"c": ' * 900 + "{}" + "}" * 900
    result = score_json_schema(sample(deep, tree), JsonSchemaParams())
    assert (result.score, result.status) == (0.0, "ok"), "too deep an answer is the policy's doing"
    assert score_json_schema(sample('{"c": {"c": {}}}', tree), JsonSchemaParams()).score == 1.0


class Judge(BaseHTTPRequestHandler):
    """Answers with what `say` makes of the question; counts requests and those at a time."""

    log: list[float] = []  # noqa: RUF012
    busy: list[int] = [0, 0]  # noqa: RUF012  (now, at most)
    lock = threading.Lock()
    fails = 0  # so many requests get a 503

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            self.log.append(time.monotonic())
            self.busy[0] += 1
            self.busy[1] = max(self.busy)
            fails = Judge.fails
            Judge.fails = max(0, Judge.fails - 1)
        time.sleep(0.02)
        with self.lock:
            self.busy[0] -= 1
        if fails:
            self.send_error(503)
            return
        asked = body["messages"][0]["content"]
        rating = {
            "good": "[[9]]",
            "bad": "[[1]]",
            "split": f"[[{1 + 9 * (body.get('seed', 0) % 2)}]]",
        }
        said = next(
            (text for word, text in rating.items() if f"<response>\n{word}" in asked),
            "I cannot say. [[99]]",
        )
        answer = json.dumps(
            {"choices": [{"message": {"content": f"The scale is [[5]]. {said}"}}]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        server.shutdown()


def test_the_judge(url: str) -> None:
    params = LlmJudgeParams(RewardEndpoint(url), "judge")
    result = score_by_llm_judge(sample("good {label} [[10]]"), params)
    assert result.score == pytest.approx(8 / 9) and result.parts["retries"] == 0
    assert score_by_llm_judge(sample("bad"), params).score == 0.0
    assert score_by_llm_judge(sample("odd"), params).status == "masked:no_verdict"
    votes = score_by_llm_judge(
        sample("split"), LlmJudgeParams(RewardEndpoint(url), "judge", num_votes=4, temperature=1.0)
    )
    assert votes.score == pytest.approx(0.5) and votes.parts["spread"] == pytest.approx(0.5)
    with pytest.raises(ValueError, match="one vote many times"):
        LlmJudgeParams(RewardEndpoint(url), "judge", num_votes=2)


def test_judges_stand_in_for_each_other(url: str) -> None:
    away = RewardEndpoint("http://127.0.0.1:9/v1/chat/completions")
    params = LlmJudgeParams(servers=(away, RewardEndpoint(url)), num_votes=4, temperature=1.0)
    found = [score_by_llm_judge(sample("split"), params) for _ in range(6)]
    assert {result.score for result in found} == {0.5}
    assert 0 < sum(result.parts["failovers"] for result in found) < 4, "one that failed rests"
    lost = score_by_llm_judge(sample("good"), LlmJudgeParams(servers=(away, away), patience_s=0.1))
    assert lost.status == "masked:endpoint"
    for wrong in ({}, {"server": away, "servers": (away,)}):
        with pytest.raises(ValueError, match="name either server"):
            LlmJudgeParams(**wrong)


def test_how_certain_a_judge_is_of_its_first_token() -> None:
    answer: dict[str, Any] = {
        "choices": [{"logprobs": {"content": [{"token": "4", "logprob": -0.25}]}}]
    }
    assert read_first_log_prob(answer, "URL") == -0.25
    answer["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")
    with pytest.raises(RewardEndpointError, match="its weights are broken"):
        read_first_log_prob(answer, "URL")
    with pytest.raises(RewardEndpointError, match="which has no log-prob"):
        read_first_log_prob({"choices": [{"logprobs": None}]}, "URL")


def test_requests_that_fail_are_sent_again(url: str) -> None:
    Judge.fails = 2
    assert (
        score_by_llm_judge(sample("good"), LlmJudgeParams(RewardEndpoint(url), "judge")).parts[
            "retries"
        ]
        == 2
    )
    Judge.fails = 1000
    lost = score_by_llm_judge(
        sample("good"), LlmJudgeParams(RewardEndpoint(url, patience_s=0.5), "judge")
    )
    Judge.fails = 0
    assert lost.status == "masked:endpoint" and "gave no answer in 0.5 s (status 503" in lost.error


def test_a_request_that_waited_long_for_its_turn_is_sent_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of six a minute is no failure of the server, whose patience begins with the
    first request.
    """
    waited_s = [1000.0, 0.0]
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 1000.0 - sum(waited_s), sleep=time.sleep
    )
    monkeypatch.setattr(reward_endpoint, "time", clock)
    monkeypatch.setattr(
        reward_endpoint, "_wait_for_rate_slot", lambda path, interval_s: waited_s.pop(0)
    )
    Judge.fails = 1
    params = LlmJudgeParams(RewardEndpoint(url, requests_per_s=0.1), "judge")
    assert score_by_llm_judge(sample("good"), params).parts["retries"] == 1


def _ask(url: str, count: int, settings: dict[str, Any]) -> None:
    for _ in range(count):
        RewardEndpoint(url, **settings).post_with_retries({"messages": [{"content": "x"}]})


def test_limits_hold_over_all_processes(url: str) -> None:
    """Four processes; 24 requests at 20 a second take 23 twentieths of a second at least."""
    for settings in ({"requests_per_s": 20.0}, {"concurrency": 2}):
        Judge.log.clear()
        Judge.busy[1] = 0
        fork = multiprocessing.get_context("fork")
        workers = [fork.Process(target=_ask, args=(url, 6, settings)) for _ in range(4)]
        start = time.monotonic()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert len(Judge.log) == 24 and [worker.exitcode for worker in workers] == [0] * 4
        if "concurrency" in settings:
            assert Judge.busy[1] <= 2
        else:
            assert max(Judge.log) - start > 23 / 20  # an arrival can be late, never early


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "ftp://x"}, "http://"),
        ({"concurrency": 0}, "at least 1"),
        ({"requests_per_s": 0.0}, "no limit"),
    ],
)
def test_wrong_endpoints(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RewardEndpoint(**{"url": "http://x", **settings})


def test_a_rate_of_another_boot_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "next"
    later = time.clock_gettime(time.CLOCK_BOOTTIME) + 3600.0
    path.write_bytes(struct.pack("d", later))
    os.utime(path, (0, 0))
    start = time.monotonic()
    _wait_for_rate_slot(path, 0.01)
    assert time.monotonic() - start < 600.0
    assert struct.unpack("d", path.read_bytes())[0] < later

"""Rewards read what the model wrote: behind a tag that the prompt wrote already, and with the tags
that decoding leaves out.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from rlhf_megatron.config.schema import DataConfig, RewardConfig, RewardTermConfig
from rlhf_megatron.controller.scheduler.scored_samples import make_reward_samples
from rlhf_megatron.data.batch import RolloutBatch
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.jobs.generation.answer_scoring import score_answer_file
from rlhf_megatron.rewards.scorers import REWARDS, RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.llm_judge import LlmJudgeParams, fill_judge_template
from rlhf_megatron.rewards.scorers.reward_types import does_name
from rlhf_megatron.rewards.service.response_reading import (
    ReadingReporter,
    describe_configured_reading,
)
from rlhf_megatron.rewards.service.reward_components import load_reward_components
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer
from rlhf_megatron.rewards.service.worker_messages import RewardTask, decode_tasks, encode_tasks

PATTERN = "<think>.*</think>.*"
# of "<think>\n1 plus 2\n</think>\n\n3<|im_end|>", the tags being special tokens
WITH_SPECIAL_TAGS = RewardSample(
    "1+2=",
    "\n1 plus 2\n\n\n3",
    "3",
    "s",
    "stop",
    9,
    special_tokens=((0, "<think>"), (10, "</think>"), (13, "<|im_end|>")),
)
BEHIND_PREFIX = RewardSample(
    "1+2=<think>\n", "1 plus 2\n</think>\n\n3", "3", "s", "stop", 9, response_prefix="<think>\n"
)
PLAIN = replace(BEHIND_PREFIX, response_prefix="", prompt="1+2=")


def score(name: str, sample: RewardSample, **params: Any) -> RewardResult:
    """Return the result of a reward, called in this process."""
    entry = REWARDS.get(name)
    assert entry.params is not None
    return entry.build(sample, entry.params(**params))


@pytest.mark.parametrize(
    ("sample", "params", "expected"),
    [
        (WITH_SPECIAL_TAGS, {}, 1.0),
        (WITH_SPECIAL_TAGS, {"skip_special_tokens": True}, 0.0),
        (WITH_SPECIAL_TAGS, {"skip_special_tokens": False}, 1.0),
        (BEHIND_PREFIX, {}, 1.0),
        (PLAIN, {}, 0.0),
        # the token that ends the response is seen where the pattern names it, or where all are
        (WITH_SPECIAL_TAGS, {"pattern": r"<think>.*</think>\s*\d"}, 1.0),
        (
            WITH_SPECIAL_TAGS,
            {"pattern": r"<think>.*</think>\s*\d", "skip_special_tokens": False},
            0.0,
        ),
        (WITH_SPECIAL_TAGS, {"pattern": r"<think>.*</think>.*<\|im_end\|>"}, 1.0),
        # a pattern that names no special token reads what it read before
        (WITH_SPECIAL_TAGS, {"pattern": r"1 plus 2\s*3"}, 1.0),
        (BEHIND_PREFIX, {"pattern": "^1 plus", "match": "somewhere"}, 0.0),
        (PLAIN, {"pattern": "^1 plus", "match": "somewhere"}, 1.0),
        # a second opening tag is one too many
        (
            replace(BEHIND_PREFIX, response="<think>1</think>2"),
            {"pattern": "(?!.*<think>.*<think>)<think>.*</think>.*"},
            0.0,
        ),
    ],
)
def test_format(sample: RewardSample, params: dict[str, Any], expected: float) -> None:
    assert score("format", sample, **{"pattern": PATTERN, **params}).score == expected


@pytest.mark.parametrize(
    ("pattern", "token", "expected"),
    [
        ("<think>.*</think>.*", "<think>", True),
        ("<think>.*</think>.*", "</think>", True),
        ("<think>.*</think>.*", "<|im_end|>", False),
        ("</?think>", "<think>", True),
        ("</?think>", "</think>", True),
        ("<(?:think|answer)>.*", "<answer>", True),
        ("<(?:think|answer)>.*", "</answer>", False),
        ("(?i)<THINK>.*", "<think>", True),
        (r".*<\|im_end\|>$", "<|im_end|>", True),
        (r"\[/?THINK\]", "[THINK]", True),
        (r"\[/?THINK\]", "[/THINK]", True),
        (r"<\|(im|begin)_(end|of_thought)\|>", "<|begin_of_thought|>", True),
        ("<.*>", "<think>", False),
        (r"<\w+>.*", "<think>", False),
        ("<[^>]+>", "<think>", False),
        ("####", "<think>", False),
    ],
)
def test_a_pattern_names_a_token(pattern: str, token: str, expected: bool) -> None:
    assert does_name(pattern, token) is expected


def test_answers_in_tags_that_are_special_tokens() -> None:
    sample = replace(
        WITH_SPECIAL_TAGS,
        response="so 3.",
        special_tokens=((0, "<think>"), (3, "<answer>"), (4, "</answer>"), (5, "<|im_end|>")),
    )
    assert score("short_answer", sample).score == 1.0
    assert score("exact_match", sample, pattern="<answer>(.*?)</answer>").score == 1.0
    assert score("math_verify", sample, pattern="<answer>(.*?)</answer>").score == 1.0
    status = score(
        "exact_match", sample, pattern="<answer>(.*?)</answer>", skip_special_tokens=True
    ).status
    assert status == "malformed"


def test_answers_behind_a_prefix() -> None:
    pattern = r"(?s)<think>.*</think>\s*(.*)"
    assert score("exact_match", BEHIND_PREFIX, pattern=pattern).score == 1.0
    assert score("math_verify", BEHIND_PREFIX, pattern=pattern).score == 1.0
    assert score("exact_match", PLAIN, pattern=pattern).status == "malformed"
    # the response alone has the answer: the prefix changes nothing
    empty_thoughts = replace(PLAIN, response="3", response_prefix="<think>\n\n</think>\n\n")
    assert score("exact_match", empty_thoughts, pattern="^(.)").score == 1.0
    assert score("exact_match", empty_thoughts).score == 1.0


FUNCTIONS = """
def has_tags(response):
    return float(response.startswith("<think>") and response.endswith("<|im_end|>"))

def joins(response, response_prefix, label):
    return float(response_prefix + response == label)

def lists(response, **others):
    return float(sorted(others) == [
        "extra", "finish_reason", "label", "num_tokens", "prompt", "source"])
"""


def test_functions_of_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)

    def call(name: str, sample: RewardSample, **params: Any) -> float:
        return score("function", sample, path=f"{path}:{name}", **params).score

    assert call("has_tags", WITH_SPECIAL_TAGS) == 0.0
    assert call("has_tags", WITH_SPECIAL_TAGS, skip_special_tokens=False) == 1.0
    whole = "<think>\n1 plus 2\n</think>\n\n3"
    assert call("joins", replace(BEHIND_PREFIX, label=whole)) == 1.0
    assert call("lists", BEHIND_PREFIX) == 1.0
    with pytest.raises(ValueError, match="kwargs"):
        score("function", PLAIN, path="a:b", kwargs={"response_prefix": ""})


def test_a_judge_reads_special_tokens_but_the_last() -> None:
    params = {"server": {"url": "http://127.0.0.1"}, "template": "{response}"}
    for skips, text in ((True, "\n1 plus 2\n\n\n3"), (False, "<think>\n1 plus 2\n</think>\n\n3")):
        judge = msgspec.convert({**params, "skip_special_tokens": skips}, LlmJudgeParams)
        assert fill_judge_template(WITH_SPECIAL_TAGS, judge) == text


class ModelHandler(BaseHTTPRequestHandler):
    """Answers for a reward model: the score of a text is its length."""

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        body = json.dumps([{"embedding": [len(text)]}]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


def test_a_served_model_reads_special_tokens_but_the_last() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ModelHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        written = {
            "servers": [{"url": f"http://127.0.0.1:{server.server_port}/classify"}],
            "ending": "<end>",
        }
        for skips, response in (
            (True, "\n1 plus 2\n\n\n3"),
            (False, "<think>\n1 plus 2\n</think>\n\n3"),
        ):
            config = RewardConfig("reward_server", {**written, "skip_special_tokens": skips})
            main = load_reward_components(config).main_component
            result = main.entry.build(WITH_SPECIAL_TAGS, main.params)
            assert result.score == len(f"1+2={response}<end>"), result
        server.shutdown()


def test_samples_go_to_workers_and_servers_whole() -> None:
    task = RewardTask(0, replace(WITH_SPECIAL_TAGS, response_prefix="<think>"))
    assert decode_tasks(encode_tasks("token", {3: task})) == ("token", {3: task})
    body = json.dumps(asdict(task.sample))
    assert msgspec.json.decode(body, type=RewardSample) == task.sample
    # a run of an older version sends neither
    older = {name: value for name, value in asdict(PLAIN).items() if "prefix" not in name}
    older.pop("special_tokens")
    assert msgspec.json.decode(json.dumps(older), type=RewardSample) == PLAIN


def test_scores_in_worker_processes() -> None:
    config = RewardConfig(
        name="format",
        params={"pattern": PATTERN},
        terms=(RewardTermConfig("exact_match", 0.5, {"pattern": r"(?s)</think>\s*(.*)"}),),
        num_workers=1,
    )
    with make_reward_scorer(config, Path(os.devnull)) as scorer:
        results = scorer([WITH_SPECIAL_TAGS, BEHIND_PREFIX, PLAIN])
    assert [result.score for result in results] == [1.5, 1.5, 0.5]


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer of digits, with tags and the end as special tokens."""
    names = ["<think>", "</think>", "<end>", "1", "2", "3"]
    backend = Backend(models.WordLevel({name: i for i, name in enumerate(names)}))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names[:3]]
    )
    return Tokenizer(backend, [2], 2)


def test_samples_of_a_rollout() -> None:
    lengths = (7, 3)
    rollout = RolloutBatch(
        offsets=torch.tensor([0, 7, 10]),
        token_ids=torch.tensor([3, 0, 4, 1, 5, 5, 2, 3, 4, 4]),
        response_mask=torch.tensor([False, False, *[True] * 5, False, True, True]),
        rollout_log_probs=torch.zeros(sum(lengths)),
        group_ids=torch.tensor([0, 1]),
        sample_ids=torch.tensor([0, 1]),
        policy_versions=torch.tensor([1, 1]),
        finish_reasons=("stop", "length"),
        prompts=("1<think>", "1"),
        responses=("233", "22"),
        labels=("33", "2"),
        sources=("s", "s"),
        extras=("", ""),
    )
    first, second = make_reward_samples(rollout, ResponseReader(make_tokenizer(), "<think>"))
    assert first == RewardSample(
        *("1<think>", "233", "33", "s", "stop", 5),
        response_prefix="<think>",
        special_tokens=((1, "</think>"), (3, "<end>")),
    )
    assert second == RewardSample("1", "22", "2", "s", "length", 2)
    assert score("format", first, pattern=r"<think>\d*</think>\d*").score == 1.0


def test_files_of_answers(tmp_path: Path) -> None:
    """Files of older versions and of other programs say nothing of tags, but for the prompt."""
    row = {"index": 0, "source": "s", "prompt": "1+2=<think>\n", "answer": "3"}
    row |= {"responses": ["1</think>3", "3"], "finish_reasons": ["stop"] * 2, "num_tokens": [9, 1]}
    special = {"position": 0, "token": "<think>"}, {"position": 1, "token": "</think>"}
    tagged = {**row, "index": 1, "prompt": "1+2=", "responses": ["13", "3"]}
    tagged["special_tokens"] = [[*special], []]
    other = {"prompt": "1+2=<think>", "answer": "3", "responses": ["1</think>3", "3"]}
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (row, tagged, other)))
    config = RewardConfig(name="format", params={"pattern": PATTERN})
    lines: list[str] = []
    sets = score_answer_file(path, config, tmp_path / "log", DataConfig(), None, lines.append)
    assert [scores for one in sets for scores in one.collect_valid_scores()] == [(1.0, 0.0)] * 3
    reads = "reward (format) reads that in front of each response"
    assert lines == [
        f"some of the rendered prompts end with '<think>'; {reads}",
        rf"some of the rendered prompts end with '<think>\n'; {reads}",
        "reward (format): the pattern names <think> and </think>, special tokens of this tokenizer;"
        " the reward reads each response with them",
    ]


def test_what_is_said_at_start() -> None:
    config = RewardConfig(
        name="function",
        params={"path": "a:b"},
        by_source={"sums": RewardTermConfig("exact_match")},
        terms=(
            RewardTermConfig("format", params={"pattern": PATTERN}),
            RewardTermConfig("format", params={"pattern": "<b>", "skip_special_tokens": True}),
            RewardTermConfig("format", params={"pattern": ".*", "skip_special_tokens": False}),
        ),
    )
    names = ["<think>", "</think>", "<end>", "<b>"]
    assert describe_configured_reading(config, [""], ["<end>"]) == [
        "reward.terms[2] (format) reads each response with its special tokens"
    ]
    assert describe_configured_reading(config, ["<think>"], names) == [
        "the rendered prompts end with '<think>'; reward.terms[0] (format), reward.terms[1]"
        " (format), reward.terms[2] (format) read that in front of each response; reward (function)"
        " may take it as the argument response_prefix",
        "reward (function) reads each response without <think> and </think>, special tokens of this"
        " tokenizer; skip_special_tokens: false shows them",
        "reward.terms[0] (format): the pattern names <think> and </think>, special tokens of this"
        " tokenizer; the reward reads each response with them",
        "reward.terms[1] (format): the pattern names <b>, a special token of this tokenizer;"
        " skip_special_tokens (true) leaves it out of each response, so the pattern cannot match"
        " there: remove that setting",
        "reward.terms[2] (format) reads each response with its special tokens",
    ]
    assert describe_configured_reading(RewardConfig(name="no such reward"), ["<think>"], []) == []
    servers = {"servers": [{"url": "http://127.0.0.1/score"}]}
    assert describe_configured_reading(RewardConfig("remote", servers), ["<think>"], names) == [
        "the rendered prompts end with '<think>'; no reward reads that in front of a response;"
        " reward (remote) sends it to the servers, which say what they read"
    ]
    assert describe_configured_reading(RewardConfig(), ["", "<think>"], names) == [
        "some of the rendered prompts end with '<think>'; no reward reads that in front of a"
        " response"
    ]


def test_a_server_of_rewards_says_each_line_once() -> None:
    config = RewardConfig(name="format", params={"pattern": PATTERN})
    lines: list[str] = []
    reporter = ReadingReporter(load_reward_components(config), lines.append)
    for samples in ([PLAIN], [PLAIN, BEHIND_PREFIX], [BEHIND_PREFIX], [WITH_SPECIAL_TAGS] * 2):
        reporter.report_samples(samples)
    assert [line.partition(";")[0] for line in lines] == [
        r"the rendered prompts end with '<think>\n'",
        "reward (format): the pattern names </think> and <think>, special tokens of this tokenizer",
    ]

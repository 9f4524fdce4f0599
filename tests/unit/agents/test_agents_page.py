"""The examples of docs/agents.md do what the page says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from docs_tools import BLOCK
from places import ROOT

from rlhf_megatron.agents.answer_formats.parsed_answer import ToolCall
from rlhf_megatron.agents.environment import ENVIRONMENTS, EpisodeOver, Message, Outcome, Task, Turn
from rlhf_megatron.agents.episode import make_environment
from rlhf_megatron.agents.tool_environment import ToolEnvironment
from rlhf_megatron.config.load import load_run_config

BLOCKS = BLOCK.findall((ROOT / "docs" / "agents.md").read_text())
PYTHON = [text for language, text in BLOCKS if language == "python"]
SETTINGS, TOOL_SETTINGS = (text for language, text in BLOCKS if language == "yaml")


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files beside the page's settings; the run that names them is checked."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "my_game.py").write_text(PYTHON[0])
    (folder / "my_agent.py").write_text(PYTHON[1])
    (folder / "shop.py").write_text(PYTHON[2])
    (folder / "run.yaml").write_text(f"extends: {ROOT}/configs/quickstart.yaml\n{SETTINGS}")
    loaded = load_run_config(folder / "run.yaml", with_files=False)
    assert loaded.config.rollout.environment.params == {"reward_of_hint": 0.2}
    functions, _, _ = PYTHON[2].partition("@ENVIRONMENTS")
    (folder / "my_tools.py").write_text(functions)
    (folder / "tools.yaml").write_text(f"extends: {ROOT}/configs/quickstart.yaml\n{TOOL_SETTINGS}")
    named = load_run_config(folder / "tools.yaml", with_files=False).config.rollout.environment
    assert isinstance(make_environment(named.name, named.params), ToolEnvironment)
    more = [f"plugins=[{folder}/my_game.py,{folder}/my_agent.py,{folder}/shop.py]"]
    load_run_config(folder / "run.yaml", more, with_files=False)
    return folder


def run(
    name: str, answers: Sequence[str], max_turns: int = 6, **params: Any
) -> tuple[Outcome, list[Message]]:
    """The outcome of an episode in which the policy gives these answers, and the last talk."""
    left = list(answers)
    talk: list[Message] = []
    task = Task(({"role": "user", "content": "?"},), "?", "house", "words", {}, 1)

    async def chat(messages: Sequence[Message], tools: object = None) -> Turn:
        talk[:] = messages
        number = len(answers) - len(left)
        if number == max_turns:
            raise EpisodeOver("max_turns")
        text = left.pop(0)
        return Turn(number, {"role": "assistant", "content": text}, text, (), (), "stop")

    outcome = asyncio.run(make_environment(name, params).run(task, chat))
    return outcome, talk


def test_the_whole_example_plays() -> None:
    outcome, talk = run("guess_the_word", ["tree", "hand", "house"])
    assert outcome.turn_rewards == (0.0, 0.1, 1.0)
    assert [message["content"] for message in talk] == [
        "?",
        "It has 5 letters.",
        "tree",
        "No.",
        "hand",
        "The first letter is right.",
    ]
    limited, _ = run("guess_the_word", ["tree", "hand", "house"], max_turns=2, reward_of_hint=0.5)
    assert limited.turn_rewards == (0.0, 0.5)
    assert ENVIRONMENTS.get("guess_the_word").build.is_deterministic
    assert len(PYTHON[0].splitlines()) <= 40


def test_code_with_a_loop_of_its_own_plays() -> None:
    outcome, talk = run("my_agent", ["tree", "house"])
    assert outcome == Outcome(reward=1.0)
    assert [message["role"] for message in talk] == ["user", "assistant", "user"]


def test_a_shop_with_tools_plays() -> None:
    """The policy asks for two prices at once, adds them up, and says the sum."""
    task = Task(({"role": "user", "content": "An apple and bread?"},), "?", "3.7", "shop", {}, 1)
    prices = [ToolCall("look_up_price", {"item": name}, name) for name in ("apple", "bread")]
    answers = [prices, [ToolCall("calculate", {"expression": "0.5 + 3.2"}, "sum")], []]
    read: list[str] = []

    async def chat(messages: Sequence[Message], tools: Any = None) -> Turn:
        names = [tool["function"]["name"] for tool in tools]
        assert names == ["look_up_price", "calculate"]
        read[:] = [message["content"] for message in messages if message["role"] == "tool"]
        calls = tuple(answers.pop(0))
        return Turn(0, {"role": "assistant", "content": ""}, "", (), (), "stop", "", calls)

    outcome = asyncio.run(make_environment("shop", {}).run(task, chat))
    assert read == ["0.5", "3.2", "3.7"]
    assert outcome.reward is None, "the scorers judge the last answer"

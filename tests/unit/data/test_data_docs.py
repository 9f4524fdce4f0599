"""The examples of docs/data.md: each configuration is loaded, and what the page shows of it is
what comes out.
"""

import re
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest
from chat_templates import QWEN, write_chat_tokenizer
from config_samples import VALID
from places import ROOT
from pyarrow import parquet

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.data.item_stream import PromptStream
from rlhf_megatron.data.prompt_items import PromptItem
from rlhf_megatron.data.prompts import PromptSets, load_prompt_sets
from rlhf_megatron.data.tokenizer import load_tokenizer

PAGE = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
FILES = re.findall(r"^File `([\w.]+)`:\n\n```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(r"^```(yaml|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CONFIGURATIONS = [text for language, text in BLOCKS if language == "yaml"]
SHOWN = [(before[1], text) for before, (language, text) in pairwise(BLOCKS) if language == "text"]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES:
        (tmp_path / name).write_text(text, encoding="utf-8")
    write_chat_tokenizer(tmp_path / "model", chat_template=QWEN)
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "extra_info": {"index": 0},
    }
    table = pyarrow.Table.from_pylist(
        [row | {"reward_model": {"ground_truth": "2", "style": "rule"}}]
    )
    parquet.write_table(table, tmp_path / "verl.parquet")
    return tmp_path


def loaded(directory: Path, text: str) -> tuple[DataConfig, PromptSets]:
    """The `data` section of the page in an otherwise valid run."""
    path = directory / "run.yaml"
    lengths = "data: {train_batch_size: 32, max_prompt_length: 512, max_response_length: 4}\n"
    path.write_text(re.sub("^data: .*\n", lengths, VALID, flags=re.MULTILINE))
    (directory / "example.yaml").write_text("extends: run.yaml\n" + text)
    run = read_run_config(directory / "example.yaml")
    assert validate_config(run) == []
    return run.config.data, load_prompt_sets(run.config.data, load_tokenizer(directory / "model"))


def shown(item: PromptItem) -> str:
    return f"{item.source} | {item.prompt} | {item.label} | {item.extra}".replace(
        "\n", "↵"
    ).rstrip()


def test_the_page_has_its_examples() -> None:
    assert len(FILES) == 2 and len(CONFIGURATIONS) == 5 and len(SHOWN) == 4


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_the_model_reads(directory: Path, number: int) -> None:
    text, lines = SHOWN[number]
    _, sets = loaded(directory, text)
    assert [shown(item) for item in (*sets.train_items, *sets.held_out_items)] == lines.splitlines()


def test_the_order_of_sources(directory: Path) -> None:
    text, lines = SHOWN[-1]
    config, sets = loaded(directory, text)
    stream = PromptStream(sets.sources, 8, config.shuffle, seed=1)
    assert " ".join(stream.draw_step_prompts(1).sources) == lines.strip()
    assert [held_out.name for held_out in sets.held_out_sets] == ["sums", "products"]
    assert sets.sources[1].items[0].prompt.endswith("=") and not sets.sources[1].items[
        0
    ].prompt.endswith("==")


def test_the_recipe_for_verl(directory: Path) -> None:
    (text,) = [text for text in CONFIGURATIONS if "verl.parquet" in text]
    _, sets = loaded(directory, text)
    (item,) = sets.train_items
    assert shown(item) == (
        "openai/gsm8k | <|im_start|>user↵1+1?<|im_end|>↵<|im_start|>assistant↵ | 2 | "
        '{"data_source": "openai/gsm8k", "extra_info": {"index": 0},'
        ' "reward_model": {"style": "rule"}}'
    )

"""Prompts as chats: the same token ids as transformers from the same files, and what
cannot be rendered.
"""

from pathlib import Path
from typing import Any

import pytest
from chat_templates import LLAMA, QWEN, write_chat_tokenizer
from data_samples import written
from places import ROOT
from transformers import PreTrainedTokenizerFast

from rlhf_megatron.config.schema import DataConfig, FewShotConfig
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.data_rows import ChatMessage, PromptRow
from rlhf_megatron.data.prompt_items import PromptFormat, PromptLimit, encode_prompt_rows
from rlhf_megatron.data.prompts import load_prompt_sets
from rlhf_megatron.data.tokenizer import load_tokenizer

SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"
USER = {"role": "user", "content": "What is 2+2? é ☃ <|im_end|> {prompt}"}
SYSTEM = {"role": "system", "content": "You are short.\n"}
CHATS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "<think>x</think>\n\n4"},
        {"role": "user", "content": " 3? "},
    ],
}


def theirs(directory: Path, messages: list[dict[str, str]], **kwargs: Any) -> tuple[int, ...]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **kwargs
    )
    return tuple(ids)


def ours(
    directory: Path, messages: list[dict[str, str]], system: str | None = None, **kwargs: Any
) -> tuple[int, ...]:
    tokenizer = load_tokenizer(directory)
    chat = make_chat_format(tokenizer, system, kwargs)
    return tokenizer.encode(
        chat.render_prompt(tuple(ChatMessage(**message) for message in messages))
    )


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    ("template", "kwargs"),
    [
        (QWEN, {}),
        (QWEN, {"enable_thinking": False}),
        (QWEN, {"tools": [{"name": "<é>", "type": "function"}]}),
        (LLAMA, {"date_string": "1 Jan 2025"}),
    ],
    ids=["qwen", "qwen-without-thinking", "qwen-with-tools", "llama"],
)
def test_token_ids_are_those_of_transformers(
    tmp_path: Path, template: str, kwargs: dict[str, Any], chat: str
) -> None:
    directory = write_chat_tokenizer(tmp_path, chat_template=template)
    found = ours(directory, CHATS[chat], **kwargs)
    assert found == theirs(directory, CHATS[chat], **kwargs)
    assert len(set(found) & {1, 2, 3, 4, 5}) >= 2, "control tokens are single ids"


@pytest.mark.smollm2
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="fetch it with `rlhf-megatron fetch smollm2`")
def test_smollm2() -> None:
    tokenizer = load_tokenizer(SMOLLM2)
    other = PreTrainedTokenizerFast.from_pretrained(SMOLLM2)
    chat = make_chat_format(tokenizer, None, {})
    for messages in CHATS.values():
        found = tokenizer.encode(
            chat.render_prompt(tuple(ChatMessage(**message) for message in messages))
        )
        expected = other.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert list(found) == expected and len(found) > 20


def test_a_text_is_the_message_of_a_user(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, chat_template=QWEN)
    tokenizer = load_tokenizer(directory)
    text = make_chat_format(tokenizer, None, {}).render_prompt("1+1?")
    assert text == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    text = make_chat_format(tokenizer, "be short", {}).render_prompt("1+1?")
    assert text.startswith("<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n1+1?")
    assert tokenizer.encode(text) == theirs(
        directory, [{"role": "system", "content": "be short"}, USER | {"content": "1+1?"}]
    )


def test_a_chat_is_cut_from_the_left_as_verl_cuts_it(tmp_path: Path) -> None:
    """The last tokens of the rendered chat: what is left ends where the answer begins."""
    directory = write_chat_tokenizer(tmp_path, chat_template=QWEN)
    tokenizer = load_tokenizer(directory)
    rows = [PromptRow(tuple(ChatMessage(**message) for message in CHATS["turns"]), "6", "t", "t:1")]
    form = PromptFormat(chat=make_chat_format(tokenizer, None, {}))
    found = encode_prompt_rows(rows, tokenizer, form, PromptLimit(30, truncation="left"))
    assert (
        found.items[0].prompt_ids == theirs(directory, CHATS["turns"])[-30:] and found.num_cut == 1
    )
    assert found.items[0].prompt.endswith(" 3? <|im_end|>\n<|im_start|>assistant\n")


def test_one_system_message_only(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, chat_template=QWEN)
    with pytest.raises(
        ValueError,
        match=r"has a system message of its own \('You are short.*remove it, or data.system_",
    ):
        ours(directory, [SYSTEM, USER], system="be short")


def test_where_the_template_stands(tmp_path: Path) -> None:
    """The file wins; of several, the one named default. Both as in transformers."""
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": QWEN}]
    directory = write_chat_tokenizer(tmp_path / "named", chat_template=named)
    assert ours(directory, [USER]) == theirs(directory, [USER])
    directory = write_chat_tokenizer(tmp_path / "file", chat_template="no")
    (directory / "chat_template.jinja").write_text(QWEN)
    assert ours(directory, [USER]) == theirs(directory, [USER])
    directory = write_chat_tokenizer(tmp_path / "unnamed", chat_template=named[:1])
    with pytest.raises(
        ValueError, match=r"of its chat templates \(tool_use\) one must be named default"
    ):
        load_tokenizer(directory)


def test_special_tokens_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ unk_token }}|{{"
        " messages[0].content }}"
    )
    tokens = {
        "bos_token": {"content": "<|bos|>", "__type": "AddedToken"},
        "image_token": "<|eot_id|>",
    }
    directory = write_chat_tokenizer(tmp_path, chat_template=template, **tokens)
    (directory / "special_tokens_map.json").write_text('{"unk_token": "<|im_start|>"}')
    tokenizer = load_tokenizer(directory)
    assert (
        make_chat_format(tokenizer, None, {}).render_prompt("x")
        == "<|bos|>|<|im_end|>|<|eot_id|>|<|im_start|>|x"
    )
    assert ours(directory, [USER]) == theirs(directory, [USER])


def test_no_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"apply_chat_template \(true\) needs a chat template, and the tokenizer has none",
    ):
        make_chat_format(tokenizer, None, {})


def test_what_a_template_refuses(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, chat_template=LLAMA)
    with pytest.raises(
        ValueError,
        match=r"refuses the prompt \(Conversation roles must alternate.*correct the prompt",
    ):
        ours(directory, [USER, USER], date_string="x")
    rows = [{"prompt": "fine", "answer": 1}, {"prompt": [USER, USER], "answer": 1}]
    path = written(tmp_path / "a.jsonl", *rows)
    kwargs = {"date_string": "x"}
    config = DataConfig(
        train_files=(str(path),), apply_chat_template=True, apply_chat_template_kwargs=kwargs
    )
    with pytest.raises(ValueError, match=r"a.jsonl:2: the chat template refuses"):
        load_prompt_sets(config, load_tokenizer(directory))


def test_a_malformed_template(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path, chat_template="{% if x %}")
    with pytest.raises(ValueError, match=r"chat template is malformed .*; fetch it again"):
        ours(directory, [USER])


def test_a_template_is_kept_in_its_sandbox(tmp_path: Path) -> None:
    for code in (
        "messages.append(1)",
        "''.__class__.__mro__",
        "raise_exception.__globals__.keys()",
    ):
        directory = write_chat_tokenizer(tmp_path, chat_template="{{" + code + "}}")
        with pytest.raises(
            ValueError, match=r"refuses the prompt \((access to|<bound|.*unsafe|.*not safely)"
        ):
            ours(directory, [USER])


def test_the_day_stands_still(tmp_path: Path) -> None:
    """Prompts that change overnight could not be resumed: the day is named, or the
    template's variable is.
    """
    directory = write_chat_tokenizer(tmp_path, chat_template=LLAMA)
    with pytest.raises(
        ValueError, match=r"today's date.*name one with .*\{strftime_now: 2025-01-31\}"
    ):
        ours(directory, [USER])
    assert ours(directory, [USER], strftime_now="2025-01-31") == theirs(
        directory, [USER], date_string="31 Jan 2025"
    )
    with pytest.raises(
        ValueError, match=r"strftime_now \('tomorrow'\) must be a day such as 2025-01-31"
    ):
        ours(directory, [USER], strftime_now="tomorrow")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "enable_thinkng",
            (
                r"would be ignored: the chat template reads no such variable \(it reads"
                r" enable_thinking, tools\)"
            ),
        ),
        ("strftime_now", "would be ignored: the chat template reads no such variable"),
        ("messages", "apply_chat_template_kwargs.messages is set by the trainer; remove it"),
        ("add_generation_prompt", "is set by the trainer"),
    ],
)
def test_variables_that_nothing_reads(tmp_path: Path, name: str, problem: str) -> None:
    tokenizer = load_tokenizer(write_chat_tokenizer(tmp_path, chat_template=QWEN))
    with pytest.raises(ValueError, match=problem):
        make_chat_format(tokenizer, None, {name: "2025-01-31"})


# in a run


def test_chats_of_a_file(tmp_path: Path) -> None:
    """Texts and lists of messages side by side; the text of a prompt is what its ids spell."""
    directory = write_chat_tokenizer(tmp_path / "tokenizer", chat_template=QWEN)
    rows = [{"prompt": "1+1?", "answer": 2}, {"prompt": [USER], "answer": 4}]
    path = written(tmp_path / "train.jsonl", *rows)
    config = DataConfig(
        train_files=(str(path),), apply_chat_template=True, system_prompt="be short"
    )
    tokenizer = load_tokenizer(directory)
    short, long = load_prompt_sets(config, tokenizer).train_items
    system = {"role": "system", "content": "be short"}
    assert short.prompt_ids == theirs(directory, [system, {"role": "user", "content": "1+1?"}])
    assert long.prompt_ids == theirs(directory, [system, USER])
    assert tokenizer.decode_with_special_tokens(long.prompt_ids) == long.prompt and (
        short.label,
        long.label,
    ) == ("2", "4")


def test_solved_rows_stand_in_the_message(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path / "tokenizer", chat_template=QWEN)
    path = written(
        tmp_path / "train.jsonl", {"prompt": "1+1", "answer": 2}, {"prompt": "1+2", "answer": 3}
    )
    config = DataConfig(
        train_files=(str(path),),
        apply_chat_template=True,
        prompt_template="{prompt}=",
        few_shot=FewShotConfig(num_shots=1),
    )
    (item,) = load_prompt_sets(config, load_tokenizer(directory)).train_items
    one, other = ("1+1=", "1+2=3\n") if item.label == "2" else ("1+2=", "1+1=2\n")
    assert item.prompt == f"<|im_start|>user\n{other}{one}<|im_end|>\n<|im_start|>assistant\n"


def test_what_is_for_texts_does_not_go_with_messages(tmp_path: Path) -> None:
    directory = write_chat_tokenizer(tmp_path / "tokenizer", chat_template=QWEN)
    path = written(tmp_path / "train.jsonl", {"prompt": [USER], "answer": 2})
    config = DataConfig(
        train_files=(str(path),), apply_chat_template=True, prompt_template="{prompt}="
    )
    with pytest.raises(
        ValueError,
        match=r"train.jsonl:1: the prompt is a list .*prompt_template and few_shot are for texts",
    ):
        load_prompt_sets(config, load_tokenizer(directory))
    config = DataConfig(train_files=(str(path),))
    with pytest.raises(ValueError, match=r"train.jsonl:1: .*set data.apply_chat_template=true"):
        load_prompt_sets(config, load_tokenizer(directory))

"""Plain text gets what the tokenizer writes before text: the ids are those of transformers' own
call, in every job, less what stands behind a text that is to be continued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from special_token_tokenizers import BOS, EOS, KINDS, TokenizerKind, write_tokenizer
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from rlhf_megatron.config.former_defaults import keep_former_defaults
from rlhf_megatron.config.schema import DataConfig, FewShotConfig, SFTConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.data.chat_template import make_chat_format
from rlhf_megatron.data.document_samples import DocumentSample
from rlhf_megatron.data.document_sets import load_documents, load_held_out_samples
from rlhf_megatron.data.opening_tokens import describe_opening_tokens
from rlhf_megatron.data.prompts import load_prompt_sets
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.data.tokenizer_backend import PLAIN_TOKENIZER_CLASSES, REBUILT_MODEL_TYPES
from rlhf_megatron.jobs.serving.openai_requests import (
    ChatRequest,
    CompletionRequest,
    ServedModel,
    check_request,
)
from rlhf_megatron.rewards.scorers.reward_server import _encode_scored_text

TEXTS = (
    "What is the sum of 12 + 34 = ",
    " a space first",
    "two  spaces and a\nline",
    "naïve ☃",
    f"a {BOS} in the middle",
    "don't",
)
ANSWER = "the answer is 46"


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> TokenizerKind:
    return request.param


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind.name: write_tokenizer(root / kind.name, kind) for kind in KINDS}


@pytest.fixture
def tokenizer(kind: TokenizerKind, directories: Mapping[str, Path]) -> Tokenizer:
    return load_tokenizer(directories[kind.name])


@pytest.fixture
def reference(kind: TokenizerKind, directories: Mapping[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(str(directories[kind.name]))


def drop_closing_ids(ids: list[int], kind: TokenizerKind) -> tuple[int, ...]:
    """The ids of a text that is to be continued."""
    return tuple(ids[: len(ids) - kind.num_closing])


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_kinds_differ_in_what_they_write(kind: TokenizerKind, reference: Any) -> None:
    """Or the comparisons below would compare less than they say."""
    ids = reference(TEXTS[0]).input_ids
    assert (ids[0] == reference.bos_token_id) == kind.writes_bos
    assert (ids[-1] == reference.eos_token_id) == kind.writes_eos


def test_rl_prompts(
    kind: TokenizerKind, tokenizer: Tokenizer, reference: Any, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "q.jsonl", [{"prompt": t, "answer": "46"} for t in TEXTS])
    sets = load_prompt_sets(DataConfig(train_files=(file,), val_files=(file,)), tokenizer)
    expected = [drop_closing_ids(reference(text).input_ids, kind) for text in TEXTS]
    assert [item.prompt_ids for item in sets.train_items] == expected
    assert [item.prompt_ids for item in sets.held_out_items] == expected
    # what rewards read is the text as it was
    assert [item.prompt for item in sets.train_items] == list(TEXTS)


def test_templates_and_solved_rows_are_plain_text(
    kind: TokenizerKind, tokenizer: Tokenizer, reference: Any, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(4)]
    data = DataConfig(
        train_files=(write_rows(tmp_path / "q.jsonl", rows),),
        prompt_template="Q: {prompt}",
        few_shot=FewShotConfig(num_shots=1),
    )
    for item in load_prompt_sets(data, tokenizer).train_items:
        assert item.prompt_ids == drop_closing_ids(reference(item.prompt).input_ids, kind)


def test_sft_rows_of_prompt_and_answer(
    kind: TokenizerKind, tokenizer: Tokenizer, reference: Any, tmp_path: Path
) -> None:
    """The answer gets neither what stands before text nor what stands behind it, but the token that
    ends an answer.
    """
    file = write_rows(tmp_path / "q.jsonl", [{"prompt": t, "answer": ANSWER} for t in TEXTS])
    sets = load_documents(DataConfig(train_files=(file,)), SFTConfig(), tokenizer, is_pairs=False)
    answer_ids = reference(ANSWER, add_special_tokens=False).input_ids
    for index, text in enumerate(TEXTS):
        (document,) = sets.sources[0].items[index].documents
        prompt_ids = drop_closing_ids(reference(text).input_ids, kind)
        assert document.token_ids == (*prompt_ids, *answer_ids, reference.eos_token_id)
        assert document.trained_spans == ((len(prompt_ids), len(document.token_ids)),)


def test_pairs_of_answers(
    kind: TokenizerKind, tokenizer: Tokenizer, reference: Any, tmp_path: Path
) -> None:
    row = {"prompt": TEXTS[0], "chosen": ANSWER, "rejected": "no"}
    data = DataConfig(train_files=(write_rows(tmp_path / "p.jsonl", [row]),))
    sets = load_documents(data, SFTConfig(), tokenizer, is_pairs=True)
    prompt_ids = drop_closing_ids(reference(TEXTS[0]).input_ids, kind)
    for answer, document in zip((ANSWER, "no"), sets.sources[0].items[0].documents, strict=True):
        answer_ids = reference(answer, add_special_tokens=False).input_ids
        assert document.token_ids == (*prompt_ids, *answer_ids, reference.eos_token_id)


def read_document_ids(samples: tuple[DocumentSample, ...]) -> list[list[int]]:
    return [list(sample.documents[0].token_ids) for sample in samples]


def test_documents_have_the_ids_of_the_whole_call(
    kind: TokenizerKind, tokenizer: Tokenizer, reference: Any, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "d.jsonl", [{"text": text} for text in TEXTS])
    expected = [reference(text).input_ids for text in TEXTS]
    data = DataConfig(train_files=(file,), val_files=(file,))
    assert read_document_ids(load_held_out_samples(data, SFTConfig(), tokenizer)) == expected
    sft = SFTConfig(text_key="text")
    assert read_document_ids(load_held_out_samples(data, sft, tokenizer)) == expected
    (source,) = load_documents(data, sft, tokenizer, is_pairs=False).sources
    samples = tuple(source.items[index] for index in range(len(source.items)))
    assert read_document_ids(samples) == expected
    # all that a token stands before
    assert [sample.documents[0].trained_spans for sample in samples] == [
        ((1, len(ids)),) for ids in expected
    ]


def test_completions_of_a_server(kind: TokenizerKind, tokenizer: Tokenizer, reference: Any) -> None:
    served = ServedModel("m", tokenizer, None, (), 1000, tokenizer.vocab_size)
    expected = tuple(drop_closing_ids(reference(text).input_ids, kind) for text in TEXTS)
    bare = tuple(tuple(reference(text, add_special_tokens=False).input_ids) for text in TEXTS)
    asked = CompletionRequest(prompt=list(TEXTS))
    assert check_request(asked, served).prompts == expected
    assert check_request(CompletionRequest(prompt=TEXTS[0]), served).prompts == expected[:1]
    # what a request says goes before the server's setting; ids are taken as they are
    without = CompletionRequest(prompt=list(TEXTS), add_special_tokens=False)
    assert check_request(without, served).prompts == bare
    switched_off = ServedModel(
        "m", tokenizer, None, (), 1000, tokenizer.vocab_size, add_special_tokens=False
    )
    assert check_request(asked, switched_off).prompts == bare
    insisting = CompletionRequest(prompt=list(TEXTS), add_special_tokens=True)
    assert check_request(insisting, switched_off).prompts == expected
    assert check_request(CompletionRequest(prompt=[5, 6]), served).prompts == ((5, 6),)


def test_switched_off_nothing_is_written(
    kind: TokenizerKind, tokenizer: Tokenizer, reference: Any, tmp_path: Path
) -> None:
    bare = [reference(text, add_special_tokens=False).input_ids for text in TEXTS]
    questions = write_rows(tmp_path / "q.jsonl", [{"prompt": t, "answer": "46"} for t in TEXTS])
    data = DataConfig(train_files=(questions,), add_special_tokens=False)
    items = load_prompt_sets(data, tokenizer).train_items
    assert [list(item.prompt_ids) for item in items] == bare
    texts = write_rows(tmp_path / "d.jsonl", [{"text": text} for text in TEXTS])
    data = DataConfig(val_files=(texts,), add_special_tokens=False)
    assert read_document_ids(load_held_out_samples(data, SFTConfig(), tokenizer)) == bare


def find_kind(name: str) -> TokenizerKind:
    return next(kind for kind in KINDS if kind.name == name)


def load_kind(directories: Mapping[str, Path], name: str) -> Tokenizer:
    return load_tokenizer(directories[name])


def test_a_rendered_chat_gets_nothing(directories: Mapping[str, Path], tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "chat", find_kind("byte-level both"))
    (directory / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    tokenizer = load_tokenizer(directory)
    file = write_rows(tmp_path / "q.jsonl", [{"prompt": TEXTS[0], "answer": "46"}])
    data = DataConfig(train_files=(file,), apply_chat_template=True)
    (item,) = load_prompt_sets(data, tokenizer).train_items
    assert item.prompt_ids == tokenizer.encode(f"{BOS}{TEXTS[0]}\n")
    assert item.prompt_ids.count(tokenizer.encode_single_token(BOS)) == 1
    messages = [{"role": "user", "content": TEXTS[0]}]
    documents = load_documents(
        DataConfig(
            train_files=(
                write_rows(
                    tmp_path / "c.jsonl",
                    [{"messages": [*messages, {"role": "assistant", "content": ANSWER}]}],
                ),
            ),
            apply_chat_template=True,
        ),
        SFTConfig(messages_key="messages"),
        tokenizer,
        is_pairs=False,
    )
    ids = documents.sources[0].items[0].documents[0].token_ids
    assert ids[:2].count(tokenizer.encode_single_token(BOS)) == 1
    served = ServedModel(
        "m", tokenizer, make_chat_format(tokenizer, None, {}), (), 1000, tokenizer.vocab_size
    )
    (prompt_ids,) = check_request(ChatRequest(messages=messages), served).prompts
    assert prompt_ids == item.prompt_ids


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_cut_leaves_the_first_token(
    directories: Mapping[str, Path], tmp_path: Path, side: Any
) -> None:
    tokenizer = load_kind(directories, "byte-level both")
    file = write_rows(tmp_path / "q.jsonl", [{"prompt": TEXTS[0], "answer": "46"}])
    data = DataConfig(train_files=(file,), max_prompt_length=5, truncation=side)
    (item,) = load_prompt_sets(data, tokenizer).train_items
    text_ids = tokenizer.encode(TEXTS[0])
    expected = {
        "left": text_ids[-4:],
        "right": text_ids[:4],
        "middle": text_ids[:2] + text_ids[-2:],
    }[side]
    assert item.prompt_ids == (tokenizer.encode_single_token(BOS), *expected)
    assert item.prompt == tokenizer.decode(expected)


def test_a_document_that_is_cut_does_not_end(
    directories: Mapping[str, Path], tmp_path: Path
) -> None:
    """The end-of-sequence token stands only where the row ends the document."""
    tokenizer = load_kind(directories, "byte-level both")
    file = write_rows(tmp_path / "d.jsonl", [{"text": TEXTS[0]}])
    data = DataConfig(val_files=(file,), truncation="right")
    (cut,) = load_held_out_samples(data, SFTConfig(max_length=5), tokenizer)
    whole = tokenizer.encode_document(TEXTS[0])
    assert cut.documents[0].token_ids == whole[:5]
    assert whole[-1] == tokenizer.encode_single_token(EOS)


def test_a_limit_without_room_for_text_is_refused(
    directories: Mapping[str, Path], tmp_path: Path
) -> None:
    file = write_rows(tmp_path / "q.jsonl", [{"prompt": TEXTS[0], "answer": "46"}])
    data = DataConfig(train_files=(file,), max_prompt_length=1, truncation="left")
    with pytest.raises(
        ValueError, match=r"max_prompt_length \(1\) leaves no token .* writes 1 before each text"
    ):
        load_prompt_sets(data, load_kind(directories, "byte-level bos"))


def test_the_start_of_a_job_says_what_prompts_begin_with(
    directories: Mapping[str, Path],
) -> None:
    with_bos = load_kind(directories, "byte-level bos")
    bare = load_kind(directories, "byte-level")
    first_ids = with_bos.encode_opening(["What"])[0]
    data = DataConfig()
    assert describe_opening_tokens(with_bos, data, first_ids, "prompts") == (
        "prompts begin with '<s>', which the tokenizer writes before text"
    )
    assert describe_opening_tokens(bare, data, bare.encode("What"), "documents") == (
        "documents begin with their own text: the tokenizer writes nothing before text"
    )
    off = DataConfig(add_special_tokens=False)
    assert describe_opening_tokens(with_bos, off, with_bos.encode("What"), "prompts") == (
        "prompts begin without '<s>', which the tokenizer writes before text:"
        " data.add_special_tokens is false"
    )
    twice = with_bos.encode_opening([f"{BOS}What"])[0]
    assert describe_opening_tokens(with_bos, data, twice, "prompts").endswith(
        "begins with '<s>', too, so that the model reads it twice: remove it from the text, or set"
        " data.add_special_tokens=false"
    )
    chat = DataConfig(apply_chat_template=True)
    assert describe_opening_tokens(with_bos, chat, first_ids, "prompts") == (
        "prompts begin as the chat template writes them: '<s>What'"
    )


def test_a_reward_model_reads_the_token_once(directories: Mapping[str, Path]) -> None:
    tokenizer = load_kind(directories, "byte-level bos")
    expected = list(tokenizer.encode(f"{BOS}What is 1+2?3"))
    assert _encode_scored_text(tokenizer, "What is 1+2?3", True) == expected
    assert _encode_scored_text(tokenizer, f"{BOS}What is 1+2?3", True) == expected, "a chat"
    assert _encode_scored_text(tokenizer, "What is 1+2?3", False) == expected[1:]
    assert _encode_scored_text(tokenizer, "", True) == []


def test_the_model_types_that_transformers_rebuilds_are_listed() -> None:
    """For these, transformers uses its own class, whatever class tokenizer_config.json names."""
    rebuilt = {
        model_type
        for model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if tokenization_auto.TOKENIZER_MAPPING_NAMES.get(model_type)
        not in (*PLAIN_TOKENIZER_CLASSES, None)
    }
    assert rebuilt == set(REBUILT_MODEL_TYPES)


def test_files_that_transformers_refuses_give_the_ids_of_tokenizer_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_tokenizer(tmp_path, find_kind("byte-level bos"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = "no list"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(Exception, match=r"\w"):
        AutoTokenizer.from_pretrained(str(directory))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode_with_special_tokens(tokenizer.encode_document("What")) == "<s>What"
    assert "transformers cannot load the tokenizer" in caplog.text


def test_a_run_that_began_without_these_tokens_goes_on_without_them() -> None:
    """A checkpoint that knows no data.add_special_tokens means false; what the user set counts."""
    older = {"data.shuffle": "true"}
    loaded, _ = keep_former_defaults(LoadedConfig.from_defaults(), older)
    assert not loaded.config.data.add_special_tokens
    newer = {**older, "data.add_special_tokens": "true"}
    loaded, _ = keep_former_defaults(LoadedConfig.from_defaults(), newer)
    assert loaded.config.data.add_special_tokens

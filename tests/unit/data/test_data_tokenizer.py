"""The tokenizer wrapper on real tokenizer files, and the one that we write."""

import json
from pathlib import Path

import pytest
import tokenizers
from places import MODEL
from transformers import PreTrainedTokenizerFast

from rlhf_megatron.data.tokenizer import load_tokenizer, write_character_tokenizer


@pytest.fixture
def characters(tmp_path: Path) -> Path:
    write_character_tokenizer(tmp_path)
    return tmp_path


def test_characters(characters: Path) -> None:
    """<pad> 0, <eos> 1, digits 2..11, then + - * = ? and space."""
    tokenizer = load_tokenizer(characters)
    assert tokenizer.encode("07+45=") == (2, 9, 12, 6, 7, 15)
    assert tokenizer.encode_texts(["0", "", "1 ?"]) == [(2,), (), (3, 17, 16)]
    assert tokenizer.decode([2, 7, 4, 1, 0]) == "052"
    assert (tokenizer.eos_token_ids, tokenizer.eos_token_id, tokenizer.pad_token_id) == ((1,), 1, 0)
    assert tokenizer.vocab_size == 32


def test_ids_without_a_character_show(characters: Path) -> None:
    """A policy that samples one must not be scored as if it had not."""
    tokenizer = load_tokenizer(characters)
    assert tokenizer.decode([2, 20, 4]) == "0<unused20>2"
    assert tokenizer.decode([2, 40, 4]) == "0\N{REPLACEMENT CHARACTER}2"


def test_transformers_reads_it_the_same_way(characters: Path) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(characters)
    assert theirs("07+45=").input_ids == [2, 9, 12, 6, 7, 15]
    assert theirs.decode([2, 7, 4, 1], skip_special_tokens=True) == "052"
    assert (theirs.eos_token_id, theirs.pad_token_id) == (1, 0)


def test_the_quickstart_ships_it(characters: Path) -> None:
    shipped = MODEL
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((shipped / name).read_text()) == json.loads(
            (characters / name).read_text()
        )
    assert (
        load_tokenizer(shipped).vocab_size
        == json.loads((shipped / "config.json").read_text())["vocab_size"]
    )


def test_a_character_outside_the_vocabulary(characters: Path) -> None:
    with pytest.raises(ValueError, match="cannot be spelled with this vocabulary"):
        load_tokenizer(characters).encode("a")


def test_a_stop_string_must_be_one_token(characters: Path) -> None:
    tokenizer = load_tokenizer(characters)
    assert tokenizer.encode_single_token("?") == 16
    with pytest.raises(
        ValueError, match=r"'12' is 2 tokens \[3, 4\]; choose a string that is one token"
    ):
        tokenizer.encode_single_token("12")


def test_vocabulary_too_small(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocab_size \(17\) must be at least 18"):
        write_character_tokenizer(tmp_path, vocab_size=17)


def test_all_end_of_sequence_ids_count(
    characters: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (characters / "generation_config.json").write_text(
        '{"eos_token_id": [5, 1], "pad_token_id": 7}'
    )
    (characters / "config.json").write_text('{"eos_token_id": 6}')
    assert load_tokenizer(characters).eos_token_ids == (1, 5, 6)
    assert load_tokenizer(characters).pad_token_id == 0

    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(characters, model).eos_token_ids == (1, 9)

    (characters / "tokenizer_config.json").write_text('{"eos_token": {"content": "4"}}')
    assert load_tokenizer(characters).eos_token_ids == (6, 5, 1)
    assert load_tokenizer(characters).pad_token_id == 7


def test_byte_level_with_a_template_and_padding(tmp_path: Path) -> None:
    """Nothing is added, padded or cut, whatever the file asks for; specials in the text
    are recognized.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["two and two"], trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.enable_padding(length=50)
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    tokenizer = load_tokenizer(tmp_path)
    for text in ("two and two", "naïve  ☃ \n", "zzz"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and not {0, 1} & set(ids)
    assert tokenizer.encode("<s>two</s>")[0] == 0
    assert tokenizer.decode(tokenizer.encode("<s>two</s>")) == "two"


def test_missing_and_malformed_files(tmp_path: Path, characters: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no tokenizer at .*/nowhere/tokenizer.json; the directory does not exist"
    ):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(
        ValueError, match=r"no tokenizer at .*/bare/tokenizer.json; save it with transformers"
    ):
        load_tokenizer(tmp_path / "bare")
    (characters / "tokenizer_config.json").unlink()
    with pytest.raises(
        ValueError, match=r"no end-of-sequence token in .*; name eos_token in tokenizer_config.json"
    ):
        load_tokenizer(characters)
    (characters / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        load_tokenizer(characters)
    (characters / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        load_tokenizer(characters)


@pytest.mark.parametrize("file_name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("value", "shown"), [("-1", "-1"), ("[1, 99]", "[1, 99]"), ('"1"', "'1'"), ("1.5", "1.5")]
)
def test_an_end_that_is_no_token_is_refused(
    characters: Path, file_name: str, value: str, shown: str
) -> None:
    (characters / "config.json").write_text('{"vocab_size": 99, "pad_token_id": -1}')
    assert load_tokenizer(characters).pad_token_id == 0
    text = f'{{"vocab_size": 99, "eos_token_id": {value}}}'
    (characters / file_name).write_text(text)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(characters)
    assert str(caught.value) == (
        f"{characters / file_name}: eos_token_id ({shown}) must be a token, 0 to 98, or a list of"
        " such: no response would end; write the id of the token that ends one."
    )

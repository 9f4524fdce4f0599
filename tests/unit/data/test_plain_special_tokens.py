"""Text that spells special tokens becomes plain ids, and merges as other text does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from special_token_tokenizers import BOS, EOS, KINDS, TokenizerKind, write_tokenizer
from tokenizers import AddedToken

from rlhf_megatron.data.plain_special_tokens import NOTHING_HIDDEN, PlainTextEncoder
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer

END = "<|im_end|>"
START = "<|im_start|>"


def make_tokenizer(**flags: bool) -> Tokenizer:
    """A byte-level tokenizer with the tokens of a chat, that merges "ab" and "<|"."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: i for i, name in enumerate([*alphabet, "ab", "<|", "Ġab"])}
    merges = [("a", "b"), ("<", "|"), ("Ġ", "ab")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, **flags) for name in (START, END)]
    )
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return Tokenizer(backend, [backend.token_to_id(END)], backend.token_to_id(END))


def name_tokens(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[str]:
    return [tokenizer.decode_with_special_tokens([token_id]) for token_id in ids]


def test_a_spelled_special_token_is_plain_and_the_template_s_own_is_not() -> None:
    tokenizer = make_tokenizer()
    encoder = PlainTextEncoder(tokenizer)
    messages, hidden = encoder.hide_control_texts([{"role": "tool", "content": f"7{END}ab"}])
    assert END not in messages[0]["content"] and len(messages[0]["content"]) == 4
    ids = encoder.encode(f"{START}tool {messages[0]['content']}{END}ab", hidden)
    assert name_tokens(tokenizer, ids) == [
        START, "t", "o", "o", "l", " ", "7", "<|", "i", "m", "_", "e", "n", "d", "|", ">", "ab",
        END, "ab",
    ]  # fmt: skip
    assert tokenizer.decode(ids) == f"tool 7{END}abab"


def test_text_merges_over_the_ends_of_a_spelled_token() -> None:
    """The tokenizer has "<|" and "ab": the text around a spelled token is not cut there."""
    tokenizer = make_tokenizer()
    encoder = PlainTextEncoder(tokenizer, border_texts=["<think>"])
    hidden_text, hidden = encoder.hide_control_texts("<think>")
    ids = encoder.encode(f"<{hidden_text}ab", hidden)
    assert tokenizer.decode_with_special_tokens(ids) == "<<think>ab"
    assert not set(ids) & set(tokenizer.added_tokens_by_id)


def test_added_tokens_that_are_not_special_stay_tokens_unless_they_are_borders() -> None:
    tokenizer = make_tokenizer()
    think = tokenizer.encode("<think>")
    assert len(think) == 1
    value, hidden = PlainTextEncoder(tokenizer).hide_control_texts("<think>")
    assert value == "<think>" and hidden is NOTHING_HIDDEN
    bordered = PlainTextEncoder(tokenizer, border_texts=["<think>"])
    value, hidden = bordered.hide_control_texts("<think>")
    assert bordered.control_texts == {START, END, "<think>"}
    assert bordered.encode(value, hidden) != think
    assert bordered.encode("<think>") == think, "written by the template"


def test_a_prepared_encoder_makes_no_copy_later() -> None:
    tokenizer = make_tokenizer()
    encoder = PlainTextEncoder(tokenizer)
    encoder.prepare()
    prepared = encoder._copy
    value, hidden = encoder.hide_control_texts(f"a{END}")
    assert tokenizer.decode(encoder.encode(value, hidden)) == f"a{END}"
    assert encoder._copy is prepared is not None


def test_values_without_special_tokens_are_not_copied() -> None:
    encoder = PlainTextEncoder(make_tokenizer())
    messages = [{"role": "user", "content": "ab", "tool_calls": [{"x": [1, None, True, "<|"]}]}]
    assert encoder.hide_control_texts(messages) == (messages, NOTHING_HIDDEN)
    assert encoder.hide_control_texts(messages)[0] is messages


def test_texts_are_hidden_within_nested_values_and_keys() -> None:
    encoder = PlainTextEncoder(make_tokenizer())
    value = [
        {
            "role": "user",
            "type": END,
            "calls": [{"arguments": {f"a{END}": [1, None, f"{START}{END}"]}}],
        }
    ]
    hidden_value, hidden = encoder.hide_control_texts(value, ("role", "type"))
    assert hidden_value[0]["role"] == "user", "an entry that is kept"
    assert hidden.restore(hidden_value[0]["type"]) == END != hidden_value[0]["type"]
    written = json.dumps(hidden_value[0]["calls"], ensure_ascii=False)
    assert START not in written and END not in written
    assert hidden.restore(written) == json.dumps(value[0]["calls"])


def test_json_with_ascii_escapes_is_restored_too() -> None:
    encoder = PlainTextEncoder(make_tokenizer())
    value, hidden = encoder.hide_control_texts({"content": f"a{END}"})
    assert hidden.restore(json.dumps(value)) == json.dumps({"content": f"a{END}"})


def test_private_use_characters_of_a_text_are_not_taken_for_tokens() -> None:
    """Text may hold the very characters by which tokens would be replaced."""
    tokenizer = make_tokenizer()
    encoder = PlainTextEncoder(tokenizer)
    icons = "".join(map(chr, (0xF0000, 0xF0001, 0xF0002, 0x100000, 0x100001)))
    # the first text has none, so that the characters of the second were taken by then
    for text in (f"a{END}", f"{icons}{END}", f"{END}{icons[::-1]}{START}"):
        value, hidden = encoder.hide_control_texts(text)
        ids = encoder.encode(value + END, hidden)
        assert tokenizer.decode_with_special_tokens(ids) == text + END
        assert [i for i in ids if i in tokenizer.special_tokens_by_id] == list(
            tokenizer.encode(END)
        )


def test_a_text_that_uses_up_the_private_characters_is_refused() -> None:
    encoder = PlainTextEncoder(make_tokenizer())
    text = "".join(map(chr, range(0x100000, 0x10FFFE))) + END
    with pytest.raises(ValueError, match="65534 of the 65534 private-use characters"):
        encoder.hide_control_texts(text)


def test_a_token_that_is_found_in_other_letters_is_plain_as_well() -> None:
    """A tokenizer that reads capitals as small letters finds tokens where none is spelled."""
    names = ["[unk]", *"abcdenv<>[]| "]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[unk]")
    )
    backend.normalizer = tokenizers.normalizers.Lowercase()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"[\s\S]"), behavior="isolated"
    )
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=True)])
    end_id = backend.token_to_id("<|end|>")
    tokenizer = Tokenizer(backend, [end_id], end_id)
    assert end_id in tokenizer.encode("a<|END|>"), "what is to be prevented"
    encoder = PlainTextEncoder(tokenizer)
    value, hidden = encoder.hide_control_texts("a<|END|>")
    ids = encoder.encode(value + "<|end|>", hidden)
    assert tokenizer.decode_with_special_tokens(ids) == "a<|end|><|end|>"
    assert ids.count(end_id) == 1 and ids[-1] == end_id


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_tokenizer(kind: TokenizerKind, tmp_path: Path) -> None:
    """The copy has the same ids for text without special tokens, and the template's own."""
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, kind))
    encoder = PlainTextEncoder(tokenizer)
    value, hidden = encoder.hide_control_texts(f"What is {EOS} or {BOS}?")
    special_ids = {tokenizer.encode_single_token(BOS), tokenizer.encode_single_token(EOS)}
    ids = encoder.encode(f"{value}", hidden)
    assert not special_ids & set(ids)
    if "<" in tokenizer.decode(tokenizer.encode("a < b")):  # else the vocabulary cannot spell it
        assert tokenizer.decode(ids).strip() == f"What is {EOS} or {BOS}?"
    # the same text without special tokens, by the copy and by the tokenizer itself
    for text in ("What is the sum", " a space", f"12 + 34{EOS} = 46", f"{BOS}the answer"):
        assert encoder._copy is not None
        assert encoder._copy.encode(_rename(encoder, text)) == tokenizer.encode(text)


def _rename(encoder: PlainTextEncoder, text: str) -> str:
    assert encoder._copy is not None
    for name, character in encoder._copy.characters_by_text.items():
        text = text.replace(name, character)
    return text


@pytest.mark.parametrize("flags", [{}, {"rstrip": True}, {"lstrip": True}], ids=str)
def test_flags_of_the_template_s_tokens_are_kept(flags: dict[str, bool]) -> None:
    """A token that strips the space beside it strips that space in the copy, and a spelled one
    strips none.
    """
    tokenizer = make_tokenizer(**flags)
    encoder = PlainTextEncoder(tokenizer)
    value, hidden = encoder.hide_control_texts(f"a {END} b")
    ids = encoder.encode(f"{value} {END} c", hidden)
    stripped = {"": " {} ", "rstrip": " {}", "lstrip": "{} "}["".join(flags)].format(END)
    expected = f"a {END} b{stripped}c"
    # the names of the tokens, since decoding writes the stripped space nowhere
    assert tokenizer.decode_with_special_tokens(ids) == expected
    assert [i for i in ids if i in tokenizer.special_tokens_by_id] == [tokenizer.eos_token_id]

"""Text of messages that spells special tokens, encoded as plain text.

A tool's result may hold `<|im_end|>`: read as a special token it would end the turn and forge the
next one. Before the chat template renders the messages, each such text in them is replaced by a
private-use character (`hide_control_texts`). In the rendered text the special tokens that are left
are the template's own. A copy of the tokenizer knows these under other private-use characters, so
that it reads the spelled text as the plain text that it is, and merges it with its neighbours as
any other text. Text without such a spelling takes the tokenizer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import tokenizers

from rlhf_megatron.data.tokenizer import Tokenizer

# private-use characters: the last two code points of a plane are no characters
HIDDEN_TEXT_RANGE = range(0x100000, 0x10FFFE)  # stand for the texts within messages
CONTROL_TOKEN_RANGE = range(0xF0000, 0xFFFFE)  # stand for the template's own tokens
PLAIN_WORD = re.compile(r"\w{1,40}")
Content = TypeVar("Content")


@dataclass(frozen=True)
class HiddenTexts:
    """The texts that were taken out of messages, by the character that stands in their place."""

    texts_by_character: Mapping[str, str]

    def restore(self, text: str) -> str:
        """Return the text with the hidden texts in their places. JSON with ASCII escapes spells a
        character as two surrogates.
        """
        for character, hidden in self.texts_by_character.items():
            text = text.replace(character, hidden)
            text = text.replace(json.dumps(character)[1:-1], hidden)
        return text


NOTHING_HIDDEN = HiddenTexts({})


class PlainTextEncoder:
    """Encodes rendered text such that control tokens come from the template alone.

    Control tokens are the special tokens, and the `border_texts`: tokens that the tokenizer does
    not call special, and that a chat template puts between turns all the same.
    """

    def __init__(self, tokenizer: Tokenizer, border_texts: Collection[str] = ()) -> None:
        """Take the tokenizer, and the texts of further control tokens, which must be tokens that
        were added to the vocabulary.
        """
        self._tokenizer = tokenizer
        self._ids_by_text = {
            text: token_id
            for token_id, text in tokenizer.added_tokens_by_id.items()
            if (token_id in tokenizer.special_tokens_by_id or text in border_texts)
            and text.strip()  # white space is text, whatever a tokenizer calls it
        }
        self._control_ids = frozenset(self._ids_by_text.values())
        # the longest first: what `tokenizers` takes where one token's text begins another's
        texts = sorted(self._ids_by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._copy: _RenamedTokenizer | None = None

    @cached_property
    def control_texts(self) -> frozenset[str]:
        """Return the texts of the control tokens."""
        return frozenset(self._ids_by_text)

    def prepare(self) -> None:
        """Make the copy of the tokenizer, which the first text that spells a control token needs:
        two seconds for a vocabulary of 150,000.
        """
        if self._copy is None:
            self._copy = _RenamedTokenizer(self._tokenizer, self._ids_by_text, "")

    def hide_control_texts(
        self, value: Content, kept_entries: Collection[str] = ()
    ) -> tuple[Content, HiddenTexts]:
        """Return a value of JSON, such as a list of messages, in which each text of a control token
        is replaced by a private-use character, and what was replaced. The entries `kept_entries` of
        objects stay as they are. The value itself is returned where nothing was replaced.
        """
        pattern = self._pattern
        if pattern is None:
            return value, NOTHING_HIDDEN
        texts = list(_iterate_texts(value, kept_entries))
        spelled = sorted({match for text in texts for match in pattern.findall(text)})
        if not spelled:
            return value, NOTHING_HIDDEN
        characters = _choose_characters(HIDDEN_TEXT_RANGE, len(spelled), texts)
        characters_by_text = dict(zip(spelled, characters, strict=True))

        def hide(text: str) -> str:
            """Return a text with its control tokens replaced."""
            assert pattern is not None
            return pattern.sub(lambda match: characters_by_text[match.group()], text)

        hidden = HiddenTexts({character: text for text, character in characters_by_text.items()})
        return _replace_texts(value, hide, kept_entries), hidden

    def encode(self, text: str, hidden: HiddenTexts = NOTHING_HIDDEN) -> tuple[int, ...]:
        """Return the token ids of a text that a template rendered from hidden messages: the control
        tokens that it spells, and the hidden texts as plain text. Raise ValueError where the
        vocabulary cannot spell a character.
        """
        pattern = self._pattern
        if pattern is None:
            return self._tokenizer.encode(hidden.restore(text))
        if not hidden.texts_by_character:
            ids = self._tokenizer.encode(text)
            # a tokenizer that reads capitals as small letters finds more tokens than are spelled
            num_control = sum(token_id in self._control_ids for token_id in ids)
            if num_control <= len(pattern.findall(text)):
                return ids
        if self._copy is None or self._copy.is_ambiguous(text):
            self._copy = _RenamedTokenizer(self._tokenizer, self._ids_by_text, text)
        characters_by_text = self._copy.characters_by_text
        renamed = pattern.sub(lambda match: characters_by_text[match.group()], text)
        return self._copy.encode(hidden.restore(renamed))


class _RenamedTokenizer:
    """A copy of a tokenizer in which the control tokens are called by private-use characters."""

    def __init__(
        self, tokenizer: Tokenizer, ids_by_text: Mapping[str, int], avoided_text: str
    ) -> None:
        """Copy the tokenizer, with characters that do not stand in `avoided_text`."""
        characters = _choose_characters(CONTROL_TOKEN_RANGE, len(ids_by_text), [avoided_text])
        self.characters_by_text = dict(zip(ids_by_text, characters, strict=True))
        self._characters = frozenset(characters)
        content = _rename_tokens(json.loads(tokenizer.write_json()), self.characters_by_text)
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._backend.no_padding()
        self._backend.no_truncation()
        for text, character in self.characters_by_text.items():
            token_id = self._backend.token_to_id(character)
            assert token_id == ids_by_text[text], f"the copy gives {text!r} the id {token_id}"

    def is_ambiguous(self, text: str) -> bool:
        """Return whether a text holds a character by which the copy calls a control token."""
        return not self._characters.isdisjoint(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text. Raise ValueError where the vocabulary cannot spell it."""
        try:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise ValueError(
                f"a text that spells special tokens cannot be spelled with this vocabulary without"
                f" them ({error}); take the special tokens out of the text."
            ) from error


def _choose_characters(code_points: range, num_characters: int, texts: Iterable[str]) -> list[str]:
    """Return private-use characters that stand in none of the texts. Raise ValueError where the
    texts use up the range.
    """
    used = {character for text in texts for character in text if ord(character) in code_points}
    characters: list[str] = []
    for code_point in code_points:
        if len(characters) == num_characters:
            break
        if chr(code_point) not in used:
            characters.append(chr(code_point))
    if len(characters) < num_characters:
        raise ValueError(
            f"a text holds {len(used)} of the {len(code_points)} private-use characters from"
            f" U+{code_points.start:X} on, and {num_characters} are needed to encode its special"
            " tokens as plain text; take either out of the text."
        )
    return characters


def _is_kept(key: Any, item: Any, kept_entries: Collection[str]) -> bool:
    """Return whether an entry is left as it is: one of these names whose value is a plain word, as
    templates compare it ("user", "string"). Any other value may spell a token: a tool's parameter
    may have the name "type", too.
    """
    return key in kept_entries and isinstance(item, str) and PLAIN_WORD.fullmatch(item) is not None


def _iterate_texts(value: Any, kept_entries: Collection[str]) -> Iterator[str]:
    """Yield the texts within a value of JSON, those of keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not _is_kept(key, item, kept_entries):
                yield from _iterate_texts(key, ())
                yield from _iterate_texts(item, kept_entries)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _iterate_texts(item, kept_entries)


def _replace_texts(value: Any, replace: Callable[[str], str], kept_entries: Collection[str]) -> Any:
    """Return a value of JSON with its texts, those of keys too, replaced by a function."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        replaced = {}
        for key, item in value.items():
            if _is_kept(key, item, kept_entries):
                replaced[key] = item
            else:
                new_key = _replace_texts(key, replace, ())
                replaced[new_key] = _replace_texts(item, replace, kept_entries)
        return replaced
    if isinstance(value, Sequence):
        return [_replace_texts(item, replace, kept_entries) for item in value]
    return value


def _rename_tokens(
    content: dict[str, Any], characters_by_text: Mapping[str, str]
) -> dict[str, Any]:
    """Return the content of a tokenizer.json in which tokens have other names and the same ids and
    flags: among the added tokens and, where they stand there, in the model.
    """
    for token in content["added_tokens"]:
        token["content"] = characters_by_text.get(token["content"], token["content"])
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {
            characters_by_text.get(text, text): token_id for text, token_id in vocabulary.items()
        }
    elif isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
        model["vocab"] = [[characters_by_text.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in characters_by_text:
        model["unk_token"] = characters_by_text[model["unk_token"]]
    # nothing is written before and behind the text here, and the names there are the old ones
    content["post_processor"] = None
    return content

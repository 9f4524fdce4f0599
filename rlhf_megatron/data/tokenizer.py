"""Text to token ids and back, from a directory in Hugging Face layout.

Text becomes ids in three ways, which the caller chooses by the method's name. Text that has its
control tokens already, such as a rendered chat or an answer, gets no others (`encode`). Plain text
that is to be continued gets what the tokenizer writes before text (`encode_opening`). A document
gets what the tokenizer writes before and behind text (`encode_document`), which are the ids of
transformers' own call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from rlhf_megatron.config.token_ids import describe_token_id_problem, shorten_value
from rlhf_megatron.data.tokenizer_backend import make_tokenizer_backend, read_tokenizer_file
from rlhf_megatron.write_errors import write_text_file

# stands in decoded text for an id that is no token (rows of a padded vocabulary)
UNKNOWN_TOKEN_TEXT = "\N{REPLACEMENT CHARACTER}"
MAX_VOCABULARY = 1 << 24
TEXTS_PER_CALL = 8192  # bounds the memory of encodings, which hold far more than ids

CHARACTERS = "0123456789+-*=? "


class Tokenizer:
    """Text to token ids and back. Special tokens that stand in a text are recognized."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Take the backend and the token ids. Raise ValueError where the vocabulary is empty or has
        ids of MAX_VOCABULARY or more.
        """
        self._backend = backend
        self._vocabulary_ids = frozenset(backend.get_vocab(with_added_tokens=True).values())
        if not self._vocabulary_ids or max(self._vocabulary_ids) >= MAX_VOCABULARY:
            raise ValueError(
                f"tokenizer.json has token ids up to {max(self._vocabulary_ids, default=None)};"
                f" they must be below {MAX_VOCABULARY}, which no vocabulary reaches:"
                " fetch it again."
            )
        # an id is one object, however often it occurs: memory
        self._shared_ints = list(range(max(self._vocabulary_ids) + 1))
        self.eos_token_ids = tuple(eos_token_ids)  # any of them ends a response
        self.pad_token_id = pad_token_id
        self.chat_template = chat_template  # jinja2; None: it has none
        # bos_token, eos_token ...: what a chat template calls them
        self.special_tokens = dict(special_tokens or {})
        # ids that the tokenizer writes before and behind a text: <s> of a Llama, and the like
        self.opening_ids, self.closing_ids = _find_added_ids(backend, self._vocabulary_ids)
        added_tokens = backend.get_added_tokens_decoder()
        # the names of the tokens that are recognized in a text before it is split, by id
        self.added_tokens_by_id = {
            token_id: token.content for token_id, token in added_tokens.items()
        }
        # those of them that `decode` leaves out
        self.special_tokens_by_id = {
            token_id: token.content for token_id, token in added_tokens.items() if token.special
        }

    @property
    def eos_token_id(self) -> int:
        """Return the id of the end-of-sequence token that is put behind an answer: the first of
        `eos_token_ids`.
        """
        return self.eos_token_ids[0]

    @property
    def vocab_size(self) -> int:
        """Return the largest token id + 1. A model's vocabulary may be larger."""
        return max(self._vocabulary_ids) + 1

    @cached_property
    def longest_token_characters(self) -> int:
        """Return the length of the longest token's name, in characters: no token stands for more
        characters of a text.
        """
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def has_same_vocabulary(self, other: Tokenizer) -> bool:
        """Return whether every id stands for the same token in both tokenizers."""
        own, its = (one._backend.get_vocab(with_added_tokens=True) for one in (self, other))
        return own == its

    def write_json(self) -> str:
        """Return the tokenizer as the content of a file tokenizer.json."""
        return self._backend.to_str()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text, without added special tokens. Raise ValueError as
        `encode_texts` does.
        """
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text, without added special tokens. Raise ValueError when
        the vocabulary cannot spell a character of a text.
        """
        ids: list[tuple[int, ...]] = []
        for start in range(0, len(texts), TEXTS_PER_CALL):
            try:
                encodings = self._backend.encode_batch_fast(
                    list(texts[start : start + TEXTS_PER_CALL]), add_special_tokens=False
                )
            except Exception as error:  # `tokenizers` raises nothing more specific
                raise ValueError(
                    f"a text cannot be spelled with this vocabulary ({error}); use"
                    " another tokenizer."
                ) from error
            ids += [
                tuple(map(self._shared_ints.__getitem__, encoding.ids)) for encoding in encodings
            ]
        return ids

    def encode_opening(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[tuple[int, ...]]:
        """Return the token ids of plain texts that are to be continued: what the tokenizer writes
        before text, such as a beginning-of-sequence token, and the text, without what the tokenizer
        writes behind text. `add_special_tokens` false: the text alone. Raise ValueError as
        `encode_texts` does.
        """
        opening_ids = self.opening_ids if add_special_tokens else ()
        return [(*opening_ids, *ids) for ids in self.encode_texts(texts)]

    def encode_document(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a plain text that is whole, as transformers' own call does: with
        what the tokenizer writes before and behind text. `add_special_tokens` false: the text
        alone. Raise ValueError as `encode_texts` does.
        """
        ids = self.encode(text)
        return (*self.opening_ids, *ids, *self.closing_ids) if add_special_tokens else ids

    def encode_with_offsets(self, text: str) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Return the token ids of a text, and the characters [begin, end) of each token. Raise
        ValueError as `encode_texts` does.
        """
        ids = self.encode(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        assert tuple(encoding.ids) == ids, "offsets change no ids"
        return ids, encoding.offsets

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens. An id that is not a token shows as
        U+FFFD.
        """
        return self._decode_known_ids(token_ids, skip_special_tokens=True)

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids with special tokens under their names, for people. An id that
        is not a token shows as U+FFFD.
        """
        return self._decode_known_ids(token_ids, skip_special_tokens=False)

    def _decode_known_ids(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Decode the runs of known ids, and join their texts by U+FFFD for each unknown id."""
        pieces = _split_at_unknown_ids(token_ids, self._vocabulary_ids)
        return UNKNOWN_TOKEN_TEXT.join(
            self._backend.decode(piece, skip_special_tokens=skip_special_tokens) for piece in pieces
        )

    def make_stop_token_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Return the ids that end a response: the end-of-sequence tokens, then the ids of these
        texts, each once. Raise ValueError as `encode_single_token` does.
        """
        return tuple(dict.fromkeys([*self.eos_token_ids, *map(self.encode_single_token, texts)]))

    def encode_single_token(self, text: str) -> int:
        """Return the id of a text that is one token, such as a stop string. Raise ValueError when
        the text is no token or several.
        """
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(
                f"{text!r} is {len(ids)} tokens {list(ids)}; choose a string that is one token."
            )
        return ids[0]


def load_tokenizer(directory: str | Path, model_directory: str | Path | None = None) -> Tokenizer:
    """Load a tokenizer from tokenizer.json, with special tokens from tokenizer_config.json,
    generation_config.json and config.json, and with the chat template where there is one.

    All end-of-sequence ids that these files name count, in that order. `model_directory`: the
    directory of generation_config.json and config.json when it is not `directory`. Raise ValueError
    that names the file that is missing or malformed.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        fix = (
            (
                "save it with transformers'"
                " AutoTokenizer.from_pretrained(...).save_pretrained(directory)"
            )
            if directory.is_dir()
            else "the directory does not exist"
        )
        raise ValueError(f"no tokenizer at {path}; {fix}, or set model.tokenizer_path.")
    backend = read_tokenizer_file(path)
    settings = _read_json_object(directory / "tokenizer_config.json")
    backend = make_tokenizer_backend(
        backend, directory, settings, _read_json_object(directory / "config.json")
    )
    model = Path(model_directory) if model_directory is not None else directory
    model_config = _read_json_object(model / "config.json")
    config_by_path = {
        model / "generation_config.json": _read_json_object(model / "generation_config.json"),
        model / "config.json": model_config,
    }
    candidates = [_find_token_id(backend, settings.get("eos_token"))]
    for config_path, config in config_by_path.items():
        value = config.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            problem = describe_token_id_problem(token_id, model_config.get("vocab_size"))
            if problem is not None:
                raise ValueError(f"{config_path}: eos_token_id ({shorten_value(value)}) {problem}")
            candidates.append(token_id)
    eos_token_ids = list(dict.fromkeys(i for i in candidates if isinstance(i, int)))
    if not eos_token_ids:
        raise ValueError(
            f"no end-of-sequence token in {directory}; name eos_token in tokenizer_config.json "
            "or eos_token_id in generation_config.json."
        )
    pads = [
        _find_token_id(backend, settings.get("pad_token")),
        *(config.get("pad_token_id") for config in config_by_path.values()),
    ]
    # Some models write -1 for "none".
    pad_token_id = next((i for i in pads if isinstance(i, int) and i >= 0), eos_token_ids[0])
    return Tokenizer(
        backend,
        eos_token_ids,
        pad_token_id,
        _read_chat_template(directory, settings),
        _parse_special_tokens(_read_json_object(directory / "special_tokens_map.json"))
        | _parse_special_tokens(settings),
    )


def write_character_tokenizer(directory: str | Path, vocab_size: int = 32) -> None:
    """Write the files of a tokenizer with one token a character (`CHARACTERS`), <pad> 0 and <eos>
    1, for models that are made from nothing.

    Ids up to `vocab_size` that no character uses decode as <unusedN>, so that samples of them are
    visible. Raise ValueError for a `vocab_size` below the number of tokens.
    """
    names = ["<pad>", "<eos>", *CHARACTERS]
    if vocab_size < len(names):
        raise ValueError(
            f"vocab_size ({vocab_size}) must be at least {len(names)}, the number of tokens."
        )
    names += [f"<unused{i}>" for i in range(len(names), vocab_size)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)})
    )
    every_character = tokenizers.Regex(r"[\s\S]")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(every_character, behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(
        [tokenizers.AddedToken(name, special=True, normalized=False) for name in names[:2]]
    )

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    write_text_file(directory / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")


def _read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or {} when there is no such file. Raise ValueError for any
    other content.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _read_chat_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template, or None. chat_template.jinja wins over the entry of
    tokenizer_config.json, as in transformers; among several the one named "default" is used. Raise
    ValueError for several without a default, and for an entry that is not text.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        if "default" not in named:
            raise ValueError(
                f"{directory / 'tokenizer_config.json'}: of its chat templates"
                f" ({', '.join(map(str, named))}) one must be named default; write that one"
                " to chat_template.jinja."
            )
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be text; write it"
            " to chat_template.jinja."
        )
    return template


def _parse_special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of each special token by its name ("eos_token"). An entry is a string or
    {"content": string}.
    """
    contents = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return {
        name: text
        for name, text in contents.items()
        if name.endswith("_token") and isinstance(text, str)
    }


def _find_token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """Return the id of a token in tokenizer_config.json, which is a string or {"content": string};
    None for anything else or an unknown token.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _find_added_ids(
    backend: tokenizers.Tokenizer, vocabulary_ids: Iterable[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the backend's post-processor writes before a text, and those that it
    writes behind a text.
    """
    if backend.post_processor is None:
        return (), ()
    for token_id in sorted(vocabulary_ids):
        try:
            encoding = backend.encode(backend.id_to_token(token_id), add_special_tokens=True)
        except Exception:  # a token whose name this vocabulary cannot spell as a text
            continue
        # None marks a token that the post-processor added, 0 a token of the text
        sequence_ids = encoding.sequence_ids
        if 0 not in sequence_ids:
            continue  # a token whose name makes no token, such as a lone space that is stripped
        first = sequence_ids.index(0)
        end = len(sequence_ids) - sequence_ids[::-1].index(0)
        return tuple(encoding.ids[:first]), tuple(encoding.ids[end:])
    return (), ()


def _split_at_unknown_ids(
    token_ids: Iterable[int], vocabulary_ids: frozenset[int]
) -> Iterator[list[int]]:
    """Yield the runs of known ids between unknown ids; a run may be empty."""
    token_ids = list(token_ids)
    if vocabulary_ids.issuperset(token_ids):
        yield token_ids
        return
    piece: list[int] = []
    for token_id in token_ids:
        if token_id in vocabulary_ids:
            piece.append(token_id)
        else:
            yield piece
            piece = []
    yield piece

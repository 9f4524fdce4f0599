"""Tokenizers that write special tokens before and behind text, or spaces of their own: one of each
kind that published models have. transformers' own call says what their ids are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

CORPUS = [
    "What is the sum of 12 + 34 = 46 ? The answer is 7.",
    "two  spaces, a\nline and naïve words: I don't know what they are.",
] * 4
BOS = "<s>"
EOS = "</s>"
UNKNOWN = "<unk>"
SPECIAL_TOKENS = (UNKNOWN, BOS, EOS)


@dataclass(frozen=True)
class TokenizerKind:
    """How a tokenizer is made."""

    name: str
    vocabulary: Literal["byte-level", "sentencepiece", "unigram"]
    writes_bos: bool = False
    writes_eos: bool = False
    puts_space_first: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # of tokenizer_config.json
    model_type: str = "llama"

    @property
    def num_closing(self) -> int:
        """Return the number of tokens that the tokenizer writes behind a text."""
        return int(self.writes_eos)


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {"tokenizer_class": "LlamaTokenizerFast"}
KINDS = (
    TokenizerKind("byte-level", "byte-level", settings=PLAIN),
    TokenizerKind("byte-level bos", "byte-level", writes_bos=True, settings=PLAIN),
    TokenizerKind("byte-level eos", "byte-level", writes_eos=True, settings=PLAIN),
    TokenizerKind(
        "byte-level both",
        "byte-level",
        writes_bos=True,
        writes_eos=True,
        settings={"tokenizer_class": "TokenizersBackend"},
    ),
    TokenizerKind(
        "byte-level space first bos",
        "byte-level",
        writes_bos=True,
        puts_space_first=True,
        settings=PLAIN,
    ),
    # transformers builds its own byte-level tokenizer for this model type
    TokenizerKind("qwen2", "byte-level", settings=PLAIN, model_type="qwen2"),
    # a token that tokenizer.json lacks
    TokenizerKind(
        "byte-level named token",
        "byte-level",
        writes_bos=True,
        settings={**PLAIN, "pad_token": "#!"},
    ),
    TokenizerKind(
        "sentencepiece space first bos",
        "sentencepiece",
        writes_bos=True,
        puts_space_first=True,
        settings=PLAIN,
    ),
    # of these two, transformers takes the vocabulary and sets its own rules for spaces
    TokenizerKind(
        "llama bos", "sentencepiece", writes_bos=True, puts_space_first=True, settings=LLAMA
    ),
    TokenizerKind(
        "llama no space both",
        "sentencepiece",
        writes_bos=True,
        writes_eos=True,
        puts_space_first=True,
        settings={**LLAMA, "add_prefix_space": False, "legacy": False},
    ),
    TokenizerKind(
        "gemma bos",
        "sentencepiece",
        writes_bos=True,
        settings={"tokenizer_class": "GemmaTokenizer"},
        model_type="gemma2",
    ),
    TokenizerKind("sentencepiece neither", "sentencepiece", puts_space_first=True, settings=LLAMA),
    TokenizerKind("unigram eos", "unigram", writes_eos=True, puts_space_first=True, settings=PLAIN),
    # the switches of tokenizer_config.json change nothing where tokenizer.json says what is written
    TokenizerKind(
        "switches",
        "byte-level",
        writes_bos=True,
        settings={**PLAIN, "add_bos_token": False, "add_eos_token": True},
    ),
)


def write_tokenizer(directory: Path, kind: TokenizerKind) -> Path:
    """Write the files of a tokenizer, and a config.json that names its model type."""
    backend = tokenizers.Tokenizer(_make_vocabulary(kind))
    special_tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    if kind.vocabulary == "byte-level":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind.puts_space_first)
        backend.decoder = decoders.ByteLevel()
        trainer: Any = tokenizers.trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=special_tokens,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    else:
        prepend = [normalizers.Prepend("▁")] if kind.puts_space_first else []
        backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        byte_tokens = [AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)]
        make_trainer = {
            "sentencepiece": tokenizers.trainers.BpeTrainer,
            "unigram": tokenizers.trainers.UnigramTrainer,
        }[kind.vocabulary]
        options = {"unk_token": UNKNOWN} if kind.vocabulary == "unigram" else {}
        trainer = make_trainer(
            vocab_size=360,
            special_tokens=[*special_tokens, *byte_tokens],
            show_progress=False,
            **options,
        )
    backend.train_from_iterator(CORPUS, trainer)
    pieces = [*[BOS] * kind.writes_bos, "$A", *[EOS] * kind.writes_eos]
    if len(pieces) > 1:
        backend.post_processor = processors.TemplateProcessing(
            single=pieces,
            special_tokens=[(token, backend.token_to_id(token)) for token in (BOS, EOS)],
        )
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "unk_token": UNKNOWN, **kind.settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(
        json.dumps({"model_type": kind.model_type, "vocab_size": backend.get_vocab_size() + 8})
    )
    return directory


def _make_vocabulary(kind: TokenizerKind) -> models.Model:
    """Return the empty model that is trained."""
    if kind.vocabulary == "byte-level":
        return models.BPE()
    if kind.vocabulary == "unigram":
        return models.Unigram()
    return models.BPE(unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)

"""The `tokenizers` backend of a directory, such that its ids are those of transformers' own call.

transformers does not always take tokenizer.json as it stands: for some classes it builds the
tokenizer anew from the vocabulary, with other rules for spaces, and it adds tokens that only
tokenizer_config.json names. Where the files leave no room for a difference, tokenizer.json is read
without transformers, whose import takes seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

logger = logging.getLogger(__name__)

# classes for which transformers takes tokenizer.json as it stands
PLAIN_TOKENIZER_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
# model types for which transformers builds a tokenizer of its own, whatever class the files name
REBUILT_MODEL_TYPES = ("qwen2",)
# entries of tokenizer_config.json by which transformers changes what it read from tokenizer.json
CHANGING_ENTRIES = ("split_special_tokens", "fix_mistral_regex", "auto_map", "extra_special_tokens")
# kinds of vocabulary that transformers rebuilds; of another kind it would lose every word
REBUILT_VOCABULARIES = ("BPE", "Unigram")


def read_tokenizer_file(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file tokenizer.json. Raise ValueError where the file holds none."""
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises nothing more specific
        raise ValueError(
            f"{path} is not a tokenizer that `tokenizers` can read ({error})."
        ) from error


def make_tokenizer_backend(
    backend: tokenizers.Tokenizer,
    directory: Path,
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
) -> tokenizers.Tokenizer:
    """Return the backend that transformers would use for the tokenizer in `directory`, without
    padding and truncation: `backend`, which is that of tokenizer.json, or another one.

    `settings` is the content of tokenizer_config.json and `config` that of config.json in the same
    directory; {} for a file that does not exist.
    """
    if not takes_file_as_it_stands(backend, settings, config):
        backend = _load_transformers_backend(directory) or backend
    backend.no_padding()
    backend.no_truncation()
    return backend


def takes_file_as_it_stands(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> bool:
    """Return whether transformers surely encodes text as tokenizer.json says."""
    if type(backend.model).__name__ not in REBUILT_VOCABULARIES:
        return True
    if settings.get("tokenizer_class") not in PLAIN_TOKENIZER_CLASSES:
        return False
    if config.get("model_type") in REBUILT_MODEL_TYPES:
        return False
    if any(settings.get(name) for name in CHANGING_ENTRIES):
        return False
    # transformers adds the tokens that tokenizer_config.json names and the file lacks
    return all(backend.token_to_id(token) is not None for token in _iterate_named_tokens(settings))


def _iterate_named_tokens(settings: Mapping[str, Any]) -> list[str]:
    """Return the texts of the tokens that tokenizer_config.json names."""
    entries = [value for name, value in settings.items() if name.endswith("_token")]
    for name in ("added_tokens_decoder", "additional_special_tokens"):
        value = settings.get(name) or ()
        entries += value.values() if isinstance(value, dict) else value
    texts = [entry.get("content") if isinstance(entry, dict) else entry for entry in entries]
    return [text for text in texts if isinstance(text, str)]


def _load_transformers_backend(directory: Path) -> tokenizers.Tokenizer | None:
    """Return the backend that transformers makes of the files, or None, after a line of the log,
    where transformers makes none.
    """
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
        return loaded.backend_tokenizer
    except Exception as error:  # whatever classes of strangers raise
        logger.warning(
            "transformers cannot load the tokenizer in %s (%s): token ids are those that"
            " tokenizer.json alone gives.",
            directory,
            json.dumps(str(error))[:300],
        )
        return None

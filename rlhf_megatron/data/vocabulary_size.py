"""Whether a model has a row of its embedding for every token of a tokenizer."""

from __future__ import annotations

SET_TOKENIZER = "set model.tokenizer_path to the tokenizer of this model"


def require_all_tokens_known(
    num_token_ids: int, vocab_size: int, model_name: str, remedy: str = SET_TOKENIZER
) -> None:
    """Raise ValueError where a tokenizer has token ids that a model's vocabulary does not have.
    `num_token_ids` is the largest id + 1, `vocab_size` that of config.json; `remedy` says how
    another tokenizer is chosen.
    """
    if num_token_ids > vocab_size:
        raise ValueError(
            f"the tokenizer has {num_token_ids} token ids (0 to {num_token_ids - 1}), but"
            f" {model_name} has a vocabulary of {vocab_size}; {remedy}, or resize the model's"
            f" embedding to {num_token_ids} rows."
        )

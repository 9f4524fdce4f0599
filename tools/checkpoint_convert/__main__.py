"""`python -m tools.checkpoint_convert hf-to-megatron ...` is `rlhf-megatron convert hf-to-megatron ...`."""

import sys

from rlhf_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))

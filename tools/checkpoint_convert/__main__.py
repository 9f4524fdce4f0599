"""`python -m tools.checkpoint_convert SOURCE ...` is `rlhf-megatron convert SOURCE ...`."""

import sys

from rlhf_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))

"""`python -m rlhf_megatron` is the command `rlhf-megatron`."""

import sys

from rlhf_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

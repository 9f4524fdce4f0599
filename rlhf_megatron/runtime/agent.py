"""torch.distributed.run, with the run's own exit code and without the noise: `python -m rlhf_megatron.runtime.agent`.

torchrun exits with 1 and prints a table whatever a rank's exit code was. The controller has said what went wrong.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

ELASTIC = "torch.distributed.elastic"


def main(arguments: Sequence[str]) -> int:
    """Returns the code of the rank that failed first, 128 + n for signal n, 0 when none failed."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(ELASTIC):  # each of them has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(parse_args(list(arguments)))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

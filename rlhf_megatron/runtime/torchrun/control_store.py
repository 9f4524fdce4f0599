"""Torchrun's store as the processes of a run use it: where the controller listens,
and how it ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from rlhf_megatron.runtime.process_control import read_machine_id, read_process_state

logger = logging.getLogger(__name__)

EXIT_CODE_POLL_S = 0.1
EXIT_CODE_S = 300.0  # for the controller to finish after it has let the hosts go
HEARD_S = 15.0  # for machines without ranks to read the exit code; one that is lost does not
ADDRESS_KEY = "control/address"
SECRET_KEY = "control/secret"
EXIT_CODE_KEY = "control/exit_code"
RANK_0_KEY = "control/rank_0"  # its machine and process
HEARD_KEY = "control/heard"  # and a machine without ranks: it has the exit code


def open_rendezvous_store(prefix: str, timeout_s: float) -> dist.Store:
    """Return a new connection to torchrun's store, with keys under `prefix` and the present
    attempt. A blocked call on one connection does not hold up another.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"rlhf_megatron/{attempt}/{prefix}", store)


def find_controller(timeout_s: float, secret: bytes | None) -> tuple[str, bytes, dist.Store] | None:
    """Return the controller's HOST:PORT, the secret, and the store at MASTER_ADDR, on a machine
    without a rank; None where that run is over. Wait `timeout_s` at most. Set torchrun's variables
    in os.environ. Raise RuntimeError where there is no store.
    """
    # nobody counts the connections
    place = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {**place, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "engines"}
    store = open_rendezvous_store("control", timeout_s)
    controller = store.get(ADDRESS_KEY).decode()
    if store.check([EXIT_CODE_KEY]):
        return None
    return controller, secret or bytes(store.get(SECRET_KEY)), store


def read_exit_code(store: dist.Store, machine: int) -> int:
    """Wait for the controller's exit code, on a machine without a rank, and return it; 1 where it
    does not come. Tell the store that this machine has read it.
    """
    code = make_exit_code_waiter(store)()
    with contextlib.suppress(RuntimeError):  # the store is gone: nobody waits for this
        store.set(f"{HEARD_KEY}/{machine}", "")
    return code


def wait_for_keepers(store: dist.Store, machines: Sequence[int]) -> None:
    """Wait, HEARD_S at most, until the machines without a rank have read the exit code. The store
    ends with rank 0.
    """
    deadline = time.monotonic() + HEARD_S
    keys = [f"{HEARD_KEY}/{machine}" for machine in machines]
    with contextlib.suppress(RuntimeError):
        while keys and not store.check(keys) and time.monotonic() < deadline:
            time.sleep(EXIT_CODE_POLL_S)


def make_exit_code_waiter(store: dist.Store) -> Callable[[], int]:
    """Return a function that waits until rank 0 has published the controller's exit code, and
    returns the code; 1 where rank 0 ends or the code does not come within EXIT_CODE_S.
    """

    def wait_for_exit_code() -> int:
        """Wait for the exit code and return it; 1 where it does not come."""
        deadline = time.monotonic() + EXIT_CODE_S
        try:
            machine, _, pid = store.get(RANK_0_KEY).decode().rpartition(" ")
            while not store.check([EXIT_CODE_KEY]):
                is_gone = machine == read_machine_id() and read_process_state(int(pid)) in (
                    "",
                    "Z",
                    "T",
                )
                if (is_gone and not store.check([EXIT_CODE_KEY])) or time.monotonic() > deadline:
                    logger.warning(
                        "rank 0 has ended, is stopped, or has no exit code for %g s", EXIT_CODE_S
                    )
                    return 1
                time.sleep(EXIT_CODE_POLL_S)
            return int(store.get(EXIT_CODE_KEY))
        except (RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
            logger.warning("the rendezvous store is gone: %s", error)
            return 1

    return wait_for_exit_code

"""The reward of the soak, and a service that breaks down now and then: while a file exists, some
samples raise.
"""

from __future__ import annotations

import zlib
from pathlib import Path

LENGTH = 4
FAILING = 8  # while the service is down, one sample in so many meets it


def echo(prompt: str, response: str, outage: str) -> float:
    """The share of the four places of an answer at which the first character of the prompt stands.

    Raises ConnectionError for some samples while the file `outage` exists: nothing that the policy
    can have caused.
    """
    if zlib.crc32(f"{prompt}{response}".encode()) % FAILING == 0 and Path(outage).exists():
        raise ConnectionError("the reward service does not answer")
    return sum(character == prompt[0] for character in response[:LENGTH]) / LENGTH

"""How much work an engine is sent at once. Without torch, so that the simulator counts by the same figures."""

from __future__ import annotations

CHUNK_SAMPLES = 512  # of one HTTP request, at most (a group is never cut)
CHUNKS_IN_FLIGHT = 2  # of a generate call per engine, so that its batch stays full while an answer travels
# A session fills an engine with so many times what it decodes at once. Of groups in flight only some samples still run:
# with 8 samples of geometric lengths 1 / (1 + 1/2 + ... + 1/8) = 0.37.
OVERFILL = 3

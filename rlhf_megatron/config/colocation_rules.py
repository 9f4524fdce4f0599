"""The rules of `rollout.colocated`: what cannot share devices by turns. What is wanted of endpoints: `engine_rules`."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.rules import NODES, needs_reference

COLOCATED = "rollout.colocated"


def colocation(loaded: Loaded) -> Iterator[Problem]:
    c = loaded.config
    if not c.rollout.colocated:
        return
    if c.trainer.nnodes > 1:
        yield Problem(
            f"{COLOCATED} (true) needs {NODES} 1, which is {c.trainer.nnodes}: engines are started on the first"
            " machine, and the devices of the others would have nobody to take turns with; use one machine, or set"
            " colocated: false.",
            (COLOCATED, NODES),
        )
    if c.rollout.weight_transport == "process_group":
        yield Problem(
            f"rollout.weight_transport (process_group) needs a device for each of its ranks, but with {COLOCATED}"
            " trainer and engine are on the same ones; use tensor or disk.",
            ("rollout.weight_transport", COLOCATED),
        )
    if c.rollout.router == "sglang":
        yield Problem(
            f"rollout.router (sglang) would take engines for dead that have lent their memory ({COLOCATED}); use"
            " balancer.",
            ("rollout.router", COLOCATED),
        )
    if needs_reference(c) and not c.reference.param_offload:
        yield Problem(
            f"reference.param_offload (false) must be true with {COLOCATED}: the reference would keep memory that the"
            " engines are to use; set it to true.",
            ("reference.param_offload", COLOCATED),
        )


RULES = (colocation,)

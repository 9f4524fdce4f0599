"""What a SGLang server that does not start says of it: found in its log, with what can be done."""

from __future__ import annotations

import re

_ERROR_LINE = re.compile(r"^(\[[^]]*\] *)*([\w.]+: error: |([\w.]+\.)?\w*(Error|Exception): ).*\S", re.MULTILINE)
_ERRORS_SHOWN = 3
_ADVICE = (
    (
        r"leave no GPU memory for the KV cache|Not enough memory\. Please try to increase --mem-fraction-static",
        "weights and key-value cache do not fit into rollout.sglang.args.mem_fraction_static of a device: raise it, use"
        " a larger tp_size, or give the servers devices of their own.",
    ),
    (
        r"OutOfMemoryError|out of memory\b|can't allocate memory|exit code: -9\b",
        "a device, or the machine, is full: see what else uses it (a trainer on the same devices keeps what it holds"
        " without rollout.colocated), use a larger tp_size, or lower rollout.sglang.args.mem_fraction_static.",
    ),
    (
        r"Model architectures \[.*\] are not supported",
        "this sglang does not serve the model of model.path: use another version, or rollout.engine: local.",
    ),
    (
        r"No module named '(triton|sgl_kernel|flashinfer)",
        "SGLang's CUDA packages are not there: on a machine without a GPU take rollout.sglang from"
        " configs/quickstart_sglang.yaml (`make sglang-cpu`).",
    ),
)


def own_error(log: str) -> str:
    """The last different error lines of a server's log, which the noise of its end can have pushed out of the tail, and
    what to do about the cause that they tell. "" where there is none."""
    found = list(dict.fromkeys(match.group(0).strip() for match in _ERROR_LINE.finditer(log)))
    lines = found[-_ERRORS_SHOWN:]
    if not lines:
        return ""
    advice = next((fix for cause, fix in _ADVICE if re.search(cause, "\n".join(lines))), None)
    return "\n".join(["\nIts errors:", *lines, *([f"What to do: {advice}"] if advice else [])])

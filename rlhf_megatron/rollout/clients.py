"""The client of an engine by its kind."""

from __future__ import annotations

from pathlib import Path

from rlhf_megatron.rollout.engine import Engine, EngineAddress
from rlhf_megatron.rollout.local.client import LocalEngine


def connect(address: EngineAddress, transfer_dir: Path) -> Engine:
    """A client. `transfer_dir`: where weight buckets and receipts lie."""
    if address.kind == "sglang":
        from rlhf_megatron.rollout.sglang.client import SGLangEngine

        return SGLangEngine(address, transfer_dir)
    return LocalEngine(address)

"""Stock SGLang's server on device cuda, up to its weights: launch arguments, memory saver, and
whole weight syncs from an actor on device cuda, with receipts of what stands in it. Nothing is
generated: its kernels have no form for a CPU.

    make .venv-sglang-cuda/.installed                                # 8.6 GB
    .venv-cuda/bin/python -m tools.cuda_rehearsal --cases servers
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing import reductions

from rlhf_megatron.config.cuda_environment import set_missing_variables
from rlhf_megatron.config.schema import (
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SGLangConfig,
    TrainerConfig,
)
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.ranks.parallel.world import destroy_world
from rlhf_megatron.rollout.engine_interface import EngineAddress, WeightTransport
from rlhf_megatron.rollout.engine_kinds import connect_engine
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.sglang.sglang_launch import start_sglang_engines
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang-cuda" / "bin" / "python"
MODEL = ROOT / "examples" / "quickstart" / "warm_model"
TRANSPORTS: tuple[WeightTransport, ...] = ("tensor", "process_group", "disk")
ARGUMENTS: dict[str, object] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "enable_memory_saver": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 4096,
    "grammar_backend": "none",
}
FROM_HERE = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TRITON_LIBCUDA_PATH",
    "TORCHDYNAMO_DISABLE",
)


@contextmanager
def trainer() -> Iterator[InlineWorkerGroup]:
    """The host of a run on device cuda, in this process."""
    from rlhf_megatron.runtime.rank_roles import RoleBuilder

    place = TrainerConfig(runtime="inline", n_gpus_per_node=1, device="cuda")
    rollout = RolloutConfig(engine="sglang", sglang=SGLangConfig(args=ARGUMENTS))
    config = RunConfig(
        model=ModelConfig(path=str(MODEL), dtype="float32"), trainer=place, rollout=rollout
    )
    set_missing_variables(os.environ, place, rollout, [config.actor.megatron])
    group = InlineWorkerGroup(RoleBuilder(config), backend="nccl")
    try:
        yield group
    finally:
        group.close()
        destroy_world()


def weights(group: InlineWorkerGroup) -> dict[str, str]:
    """Digests of the actor's weights under their Hugging Face names."""
    actor: Any = group._host._roles["actor"]  # type: ignore[union-attr]
    found = {}
    for rule, whole in actor.export_shards():
        found |= {
            hf.name: format_digest(digest_tensor(one.cpu()))
            for hf, one in zip(rule.hf_tensors, rule.to_hf(whole), strict=True)
        }
    return found


def change(group: InlineWorkerGroup) -> None:
    """As an update would."""
    actor: Any = group._host._roles["actor"]  # type: ignore[union-attr]
    with torch.no_grad():
        for _, tensor in actor.export_shards():
            tensor.add_(0.05 * torch.randn_like(tensor))


def sync(
    group: InlineWorkerGroup,
    address: EngineAddress,
    transfer: Path,
    transport: WeightTransport,
    version: int,
) -> int:
    """A whole sync. Returns the version that the server has."""
    change(group)
    fleet = EngineFleet([connect_engine(address, transfer)], 120.0, 0)
    made = WeightSync(
        RoleProxies(group).host,
        fleet,
        transfer,
        1 << 20,
        "float32",
        version,
        transport=transport,
        model_path=MODEL,
    )
    with mock.patch.object(reductions, "reduce_tensor", wraps=reductions.reduce_tensor) as lent:
        figures = made()
    assert bool(lent.call_count) == (transport == "tensor"), (
        f"{transport}: {lent.call_count} references to memory"
    )
    (engine,) = fleet.live_engines
    assert (
        engine.get_served_version() == made.policy_version
        and engine.get_weight_digests() == weights(group)
    ), transport
    print(
        f"{transport}: version {made.policy_version}, {figures['sync/bytes_moved']:.0f} bytes",
        flush=True,
    )
    return made.policy_version


def main() -> int:
    """Prints a line a sync."""
    if not PYTHON.is_file():
        print(f"SKIPPED: there is no {PYTHON}; `make .venv-sglang-cuda/.installed` makes it.")
        return 0
    env = {name: os.environ[name] for name in FROM_HERE if name in os.environ}
    env |= {name: value for name, value in os.environ.items() if name.startswith("NULLCUDA_")}
    env |= {"NULLCUDA_KERNELS": "skip", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    with tempfile.TemporaryDirectory() as name, trainer() as group:
        folder = Path(name)
        (transfer := folder / "transfer").mkdir()
        start = time.monotonic()
        with start_sglang_engines(
            MODEL, 1, folder, python=str(PYTHON), transfer_dir=transfer, dtype="float32",
            arguments=ARGUMENTS, env=env,
            startup_timeout_s=600.0,
        ) as servers:  # fmt: skip
            (address,) = servers.addresses
            print(f"started in {time.monotonic() - start:.0f} s", flush=True)
            version = 0
            for transport in TRANSPORTS:
                version = sync(group, address, transfer, transport, version)
            engine = connect_engine(address, transfer)
            engine.release_memory()
            engine.resume_memory()
            print("memory released and resumed", flush=True)
            sync(group, address, transfer, "tensor", version)
    print(
        "what stands in stock SGLang is what the actor has, by IPC, NCCL, files, and after its"
        " memory was released"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

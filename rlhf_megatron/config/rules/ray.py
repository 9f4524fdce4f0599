"""Rules of the section `ray`.

Also: Rules on engines under Ray, which says where their servers run and what devices they have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.source import Loaded

RUNTIME = "trainer.runtime"
DEVICES = "CUDA_VISIBLE_DEVICES"


def engine_devices(loaded: Loaded) -> Iterator[Problem]:
    c = loaded.config
    if c.trainer.runtime != "ray" or c.rollout.engine != "sglang" or c.rollout.endpoints:
        return
    keys = [f"rollout.sglang.args.{name}" for name in c.rollout.sglang.args if name.replace("-", "_") == "base_gpu_id"]
    keys += [f"rollout.sglang.env.{DEVICES}"] if DEVICES in c.rollout.sglang.env else []
    for key in keys:
        yield Problem(
            f"{key} names devices, but with {RUNTIME} ray each server sees those that Ray gives it; remove it.", (key,)
        )


RUNTIME = "trainer.runtime"


ADDRESS = "ray.address"
OLDEST_RAY = (2, 54)  # before it anybody who reached the dashboard could delete jobs (CVE-2026-27482)
_HOST_AND_PORT = re.compile(r"[^/\s]+:\d{1,5}")


def idle_ray_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """See `config.ignored`."""
    is_ray = config.trainer.runtime == "ray"
    yield not is_ray, ("ray",), RUNTIME, "set that to ray"
    has_engines = not config.rollout.endpoints
    yield is_ray and not has_engines, ("ray.num_cpus_per_engine",), "rollout.endpoints", "let the run start its engines"
    yield is_ray and config.ray.address is not None, ("ray.dashboard",), ADDRESS, "leave the address out"


def address(loaded: Loaded) -> Iterator[Problem]:
    value = loaded.config.ray.address
    if value is not None and (problem := wrong_address(ADDRESS, value)):
        yield Problem(problem, (ADDRESS,))


def wrong_address(name: str, value: str) -> str:
    """Empty: it is right. Ray Client (ray://) runs the driver's calls elsewhere, where the run directory is not."""
    if value == "auto" or _HOST_AND_PORT.fullmatch(value):
        return ""
    if "://" in value:
        why = "names a service of Ray, but the driver must run on a machine of the cluster"
        fix = "submit the run there (ray job submit), or write HOST:PORT of the head's GCS"
    else:
        why, fix = "must be HOST:PORT, or auto", "write the address that ray start --head says, such as 10.0.0.1:6379"
    return f"{name} ({value}) {why}; {fix}."


RAY_RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (address, engine_devices)

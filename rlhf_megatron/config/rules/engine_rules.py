"""Rules on engines (endpoints, weight transport, router, devices that they share with the trainer)
and on the section `ray`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
    register_rule,
)
from rlhf_megatron.config.rules.engine_machines import COLOCATED
from rlhf_megatron.config.rules.part_rules import find_registered_part, has_engine_setting
from rlhf_megatron.config.rules.run_rules import needs_reference
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.registry import load_registry

RUNTIME = "trainer.runtime"
ADDRESS = "ray.address"
DEVICES = "CUDA_VISIBLE_DEVICES"
# before it anybody who reached the dashboard could delete jobs (CVE-2026-27482)
OLDEST_RAY = 2, 54
_HOST_AND_PORT = re.compile(r"[^/\s]+:\d{1,5}")


@register_rl_rule
def check_engines(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of the section `rollout` on engines: capabilities of the engine kind, min_p
    with seeds, endpoints and their number, router, quantization with transport disk, SGLang
    arguments with leading dashes, and a dtype wider than the model's.
    """
    c = loaded.config
    yield from _check_engine_capabilities(c)
    yield from _check_min_p_with_seeds(c)
    yield from _check_endpoints(c)
    yield from _check_router(c)
    yield make_problem_if(
        c.rollout.endpoints
        and loaded.is_set("rollout.num_engines")
        and c.rollout.num_engines != len(c.rollout.endpoints),
        f"rollout.num_engines ({c.rollout.num_engines}) must be the number of rollout.endpoints"
        f" ({len(c.rollout.endpoints)}); remove rollout.num_engines.",
        ("rollout.num_engines", "rollout.endpoints"),
    )
    yield make_problem_if(
        c.rollout.quantization and c.rollout.weight_transport == "disk",
        (
            "rollout.weight_transport (disk) writes model directories of rollout.dtype, and no"
            f" rollout.quantization ({c.rollout.quantization}); use tensor or process_group."
        ),
        ("rollout.weight_transport", "rollout.quantization"),
    )
    for name in c.rollout.sglang.args:
        if name.startswith("-"):
            plain = name.lstrip("-")
            key = f"rollout.sglang.args.{name}"
            yield ConfigProblem(
                f"{key} must be written without leading dashes; use {plain}.", (key,)
            )
    # under fsdp weights that learn, and weights with merged adapters, are float32 until they are
    # cast for the engine: a float32 engine has other values than a bfloat16 engine
    yield make_problem_if(
        c.rollout.dtype == "float32"
        and c.model.dtype == "bfloat16"
        and c.actor.backend == "megatron",
        (
            "rollout.dtype (float32) must not be wider than model.dtype (bfloat16): the engine"
            " would spend twice the memory on the same values; remove rollout.dtype or set"
            " model.dtype: float32."
        ),
        ("rollout.dtype", "model.dtype"),
    )


@register_rl_rule
def check_engine_arguments(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each setting that the kind of engine refuses. Where the run attaches to
    running servers yield nothing: the servers report refused settings at the start of the run.
    """
    c = loaded.config
    entry = find_registered_part("engine", loaded.config.rollout.engine)
    if entry is not None and not c.rollout.endpoints:
        for key, text in entry.build.find_refused_settings(c.rollout, c.trainer.deterministic):
            yield ConfigProblem(text, (key,))


@register_idle_rule
def list_idle_engine_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield an entry for each group of settings of engine servers; its first value says whether the
    group is ignored, because the run attaches to running servers or starts its own ones.
    """
    is_attached = bool(config.rollout.endpoints)
    balancer = find_registered_part("balancer", config.rollout.router)
    of_balancer = balancer.build.setting_keys if balancer is not None else ()
    keys = ("rollout.sglang.api_key_file", "rollout.sglang.admin_api_key_file")
    yield (
        not is_attached,
        keys,
        "rollout.endpoints",
        "name the servers that want these keys in {switch}",
    )
    fix = "start the servers with them"
    yield is_attached, ("rollout.sglang.args",), "rollout.endpoints", fix
    own = tuple(
        key for key in ("rollout.sglang.python", "rollout.sglang.env") if key not in of_balancer
    )
    yield is_attached, own, "rollout.endpoints", fix
    restarts = "rollout.max_engine_restarts"
    fix = "let the run start the servers"
    yield is_attached and restarts not in of_balancer, (restarts,), "rollout.endpoints", fix


def _check_endpoints(config: RunConfig) -> OptionalProblems:
    """Yield problems of rollout.endpoints: an address that is no plain http(s)://HOST:PORT, a
    server that is named twice, another machine with transport tensor, and settings for servers that
    the run starts itself. Also refuse the variable of the transfer directory in rollout.sglang.env.
    """
    key = "rollout.endpoints"
    seen = dict[tuple[str, int], str]()
    for url in config.rollout.endpoints:
        place = parse_endpoint_address(url)
        if place is None:
            yield ConfigProblem(
                (
                    f"{key} ({url}) must be http://HOST:PORT or https://HOST:PORT and nothing more;"
                    " correct it."
                ),
                (key,),
            )
        elif place in seen:
            yield ConfigProblem(
                f"{key} ({url}) is the same server as {seen[place]}; name each once.", (key,)
            )
        else:
            seen[place] = url
            yield make_problem_if(
                config.rollout.weight_transport == "tensor" and not is_local_host(place[0]),
                (
                    f"{key} ({url}) is on another machine, which rollout.weight_transport (tensor)"
                    " does not reach; use process_group or disk, or write 127.0.0.1 if it is"
                    " this machine."
                ),
                (key, "rollout.weight_transport"),
            )
    yield make_problem_if(
        config.rollout.endpoints and config.rollout.colocated,
        (
            "rollout.colocated (true) needs servers that the run starts on its own devices, but"
            " rollout.endpoints names running ones; remove either."
        ),
        ("rollout.colocated", key),
    )
    yield make_problem_if(
        config.rollout.endpoints and config.rollout.quantization,
        (
            f"rollout.quantization ({config.rollout.quantization}) is of servers that the run"
            " starts, but rollout.endpoints names running ones; remove either."
        ),
        ("rollout.quantization", key),
    )
    name = "RLHF_MEGATRON_TRANSFER_DIR"
    yield make_problem_if(
        name in config.rollout.sglang.env,
        f"rollout.sglang.env.{name} is set by the run; set rollout.transfer_dir.",
        (f"rollout.sglang.env.{name}",),
    )


def _check_router(config: RunConfig) -> OptionalProblems:
    """Yield a problem if the router needs more engines than the run has."""
    balancer = find_registered_part("balancer", config.rollout.router)
    yield make_problem_if(
        balancer is not None and balancer.build.min_engines > count_engines(config),
        (
            f"rollout.router ({config.rollout.router}) has nothing to choose with one engine;"
            " remove rollout.router, or set rollout.num_engines or rollout.endpoints to more."
        ),
        ("rollout.router", "rollout.num_engines", "rollout.endpoints"),
    )


def count_engines(config: RunConfig) -> int:
    """Return the number of engines of the run, which are the endpoints it attaches to, or else the
    engines it starts.
    """
    return len(config.rollout.endpoints) or config.rollout.num_engines


def parse_endpoint_address(url: str) -> tuple[str, int] | None:
    """Return (host, port) of a server's URL, the same for one server however the URL is written: a
    loopback host becomes 127.0.0.1, and a missing port the default of the scheme. Return None where
    the URL is not a plain http or https address of a server.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError:
        return None
    is_plain = parts.path in ("", "/") and not (
        parts.query or parts.fragment or parts.username or parts.password
    )
    if parts.scheme not in ("http", "https") or not host or not is_plain:
        return None
    return "127.0.0.1" if is_local_host(host) else host, port or (
        443 if parts.scheme == "https" else 80
    )


def is_local_host(host: str) -> bool:
    """Return whether a host is this machine, judged by its text alone: a loopback address or
    "localhost".
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_engine_capabilities(config: RunConfig) -> OptionalProblems:
    """Yield a problem for each of endpoints, router, weight transport and quantization that the
    chosen engine does not support, with the engines that do; and for transport process_group on
    several machines if the engine must run beside the trainer. Yield nothing for an unknown engine
    or router.
    """
    engine = find_registered_part("engine", config.rollout.engine)
    balancer = find_registered_part("balancer", config.rollout.router)
    if engine is None or balancer is None:
        return
    engines = load_registry("engine")
    transport = config.rollout.weight_transport
    quantization = config.rollout.quantization
    setting = balancer.build.required_engine_setting
    checks: tuple[tuple[str, object, Callable[[Any], bool]], ...] = (
        (
            "endpoints",
            list(config.rollout.endpoints),
            lambda kind: kind.can_attach or not config.rollout.endpoints,
        ),
        ("router", config.rollout.router, lambda kind: not setting or setting in kind.setting_keys),
        ("weight_transport", transport, lambda kind: transport in kind.weight_transports),
        (
            "quantization",
            quantization,
            lambda kind: quantization is None or quantization in kind.quantizations,
        ),
    )
    for name, value, fits in checks:
        if not fits(engine.build):
            able = " or ".join(other for other in engines if fits(engines.get(other).build))
            yield ConfigProblem(
                (
                    f"rollout.{name} ({value}) needs rollout.engine {able}, which is"
                    f" {config.rollout.engine}; set rollout.engine to {able}, or remove"
                    f" rollout.{name}."
                ),
                (f"rollout.{name}", "rollout.engine"),
            )
    yield make_problem_if(
        transport == "process_group"
        and not engine.build.can_run_elsewhere
        and config.trainer.nnodes > 1,
        (
            "rollout.weight_transport (process_group) brings parts of tensors to rollout.engine"
            f" {config.rollout.engine} on one machine, from trainer.nnodes 1; use tensor or disk."
        ),
        ("rollout.weight_transport", "rollout.engine", "trainer.nnodes"),
    )


def _check_min_p_with_seeds(config: RunConfig) -> OptionalProblems:
    """Yield a problem if evaluation uses min_p while SGLang draws with seeds: the server does not
    support that draw and would stop in the first evaluation.
    """
    min_p = config.rollout.val_kwargs.min_p
    argument = "enable_deterministic_inference"
    if (
        not has_engine_setting(config.rollout, "rollout.sglang")
        or min_p == 0
        or config.rollout.val_kwargs.temperature == 0
    ):
        return
    is_set = {
        name.replace("-", "_"): value for name, value in config.rollout.sglang.args.items()
    }.get(argument, False)
    if is_set or config.trainer.deterministic:
        key = f"rollout.sglang.args.{argument}" if is_set else "trainer.deterministic"
        yield ConfigProblem(
            (
                f"rollout.val_kwargs.min_p ({min_p:g}) cannot be used where SGLang draws by seeds"
                f" ({key}); set min_p to 0 and use top_p, or give up the seeds."
            ),
            ("rollout.val_kwargs.min_p", key),
        )


@register_rl_rule
def check_colocation(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of rollout.colocated: transport process_group, a router that does not work
    with colocated engines, and a reference on the actor's ranks that keeps its parameters in device
    memory.
    """
    c = loaded.config
    if not c.rollout.colocated:
        return
    yield make_problem_if(
        c.rollout.weight_transport == "process_group",
        (
            "rollout.weight_transport (process_group) needs a device for each of its ranks, but"
            f" with {COLOCATED} trainer and engine are on the same ones; use tensor or disk."
        ),
        ("rollout.weight_transport", COLOCATED),
    )
    balancer = find_registered_part("balancer", c.rollout.router)
    if balancer is not None and balancer.build.colocation_problem:
        yield ConfigProblem(
            (
                f"rollout.router ({c.rollout.router}) would {balancer.build.colocation_problem}"
                f" ({COLOCATED}); use balancer."
            ),
            ("rollout.router", COLOCATED),
        )
    yield make_problem_if(
        needs_reference(c) and not c.reference.num_ranks and not c.reference.param_offload,
        (
            f"reference.param_offload (false) must be true with {COLOCATED}: the reference would"
            " keep memory that the engines are to use; set reference.param_offload to true."
        ),
        ("reference.param_offload", COLOCATED),
    )


@register_rl_rule
def check_ray_engine_devices(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each setting that names devices for an SGLang server (base_gpu_id,
    CUDA_VISIBLE_DEVICES) under the runtime ray, where Ray chooses the devices.
    """
    c = loaded.config
    if (
        c.trainer.runtime != "ray"
        or not has_engine_setting(c.rollout, "rollout.sglang")
        or c.rollout.endpoints
    ):
        return
    keys = [
        f"rollout.sglang.args.{name}"
        for name in c.rollout.sglang.args
        if name.replace("-", "_") == "base_gpu_id"
    ]
    keys += [f"rollout.sglang.env.{DEVICES}"] if DEVICES in c.rollout.sglang.env else []
    for key in keys:
        yield ConfigProblem(
            (
                f"{key} names devices, but with {RUNTIME} ray each server sees those that Ray gives"
                f" it; remove {key}."
            ),
            (key,),
        )


@register_idle_rule
def list_idle_ray_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield an entry for each group of settings of the section `ray`; its first value says whether
    the configuration ignores that group.
    """
    is_ray = config.trainer.runtime == "ray"
    yield not is_ray, ("ray",), RUNTIME, "set {switch} to ray"
    has_engines = not config.rollout.endpoints
    yield (
        is_ray and not has_engines,
        ("ray.num_cpus_per_engine",),
        "rollout.endpoints",
        "let the run start its engines",
    )
    yield (
        is_ray and config.ray.address is not None,
        ("ray.dashboard",),
        ADDRESS,
        "leave the address out",
    )
    num_actors = config.ray.reward_actors
    of_one = ("ray.num_cpus_per_reward_actor",)
    yield (
        is_ray and num_actors == 0,
        of_one,
        "ray.reward_actors",
        "give {switch} a number of actors",
    )


@register_rule
def check_ray_address(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if ray.address is set and is not HOST:PORT or auto."""
    value = loaded.config.ray.address
    if value is not None and (problem := describe_ray_address_problem(ADDRESS, value)):
        yield ConfigProblem(problem, (ADDRESS,))


def describe_ray_address_problem(name: str, value: str) -> str:
    """Return why `value` is no usable address of a Ray cluster, as a sentence that begins with the
    setting's `name`; "" if it is HOST:PORT or auto. Ray Client (ray://) is refused, because it runs
    the driver's calls elsewhere, where the run directory is not.
    """
    if value == "auto" or _HOST_AND_PORT.fullmatch(value):
        return ""
    if "://" in value:
        why = "names a service of Ray, but the driver must run on a machine of the cluster"
        fix = "submit the run there (ray job submit), or write HOST:PORT of the head's GCS"
    else:
        why = "must be HOST:PORT, or auto"
        fix = "write the address that ray start --head says, such as 10.0.0.1:6379"
    return f"{name} ({value}) {why}; {fix}."

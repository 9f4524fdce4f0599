"""The environment that servers start in: its interpreter and sglang's version, what the trainer
forbids, which GPUs each server takes. Imports no torch.

Servers see all devices that the run sees, and count from `base-gpu-id`: a device has one number in
trainer and engine, and an engine can open memory that a trainer rank shares.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from packaging.version import InvalidVersion, Version

from rlhf_megatron.config.cuda_environment import ALLOCATOR_SETTINGS
from rlhf_megatron.config.rules.batch_rules import list_divisors
from rlhf_megatron.config.schema import SGLangConfig
from rlhf_megatron.config.schema.rollout_sections import SIZES_OF_SGLANG
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.install_hints import format_install_command, format_sglang_cpu_hint
from rlhf_megatron.rollout.sglang.sglang_arguments import (
    ARGUMENTS_QUERY,
    DETERMINISTIC,
    RUN_ARGUMENTS,
    CheckedArguments,
    ServerOption,
    check_arguments,
    encode_options,
    parse_options,
)
from rlhf_megatron.write_errors import write_text_file

logger = logging.getLogger(__name__)

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
CPU_ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"
BASE_GPU_ID = "base-gpu-id"

OLDEST_SGLANG = "0.5.21"  # the first with the weight-update session endpoints
TESTED_VERSIONS = ("0.5.21",)  # what the tests ran on
_DP_SIZE_REASON = (
    "copies of the model in one server are not all reached by a weight sync (ranks of"
    " enable-dp-attention are)"
)
DP_HEAD = "enable-dp-lm-head"
# one copy, whose ranks share the experts and not their requests
DP_ATTENTION = "enable-dp-attention"

# Argument -> (values that will do, why no others, what to do instead).
ARGUMENT_LIMITS: dict[str, tuple[tuple[object, ...], str, str]] = {
    "dp-size": (
        (None, 1),
        _DP_SIZE_REASON,
        "use rollout.num_engines (or more endpoints) and dp-size 1",
    ),
    "pp-size": ((None, 1), "a weight sync goes to the ranks of one pipeline stage", "use tp-size"),
    "speculative-algorithm": (
        (None, ""),
        "the draft model would keep weights of former policies",
        "start it without speculative decoding",
    ),
    "enable-lora": (
        (None, False),
        "the policy is the base model's weights alone",
        "start it without LoRA",
    ),
    "lora-paths": (
        (None, [], {}),
        "the policy is the base model's weights alone",
        "start it without LoRA",
    ),
    "quantization": (
        (None, "", "unquant"),
        "what stands in the engine must be what the trainer sent",
        "start it without quantization (a run that starts it can set rollout.quantization)",
    ),
    "disaggregation-mode": (
        (None, "null"),
        "prefill and decode must be one server",
        "start it without",
    ),
    "encoder-only": ((None, False), "it must generate", "start it without"),
    "is-embedding": ((None, False), "it must generate", "start it without"),
}

# the list of arguments takes the server's interpreter seconds; kept here by version
OPTIONS_CACHE_DIR = Path(".cache")
_INSTALL_ADVICE = (
    f"install it there (pip install 'sglang>={OLDEST_SGLANG}'; without a GPU:"
    f" {format_sglang_cpu_hint()})"
)
_INTERPRETER_TIMEOUT_S = 300.0
MEMORY_SAVER = "enable-memory-saver"
# or CUDA graphs keep their memory when the rest is given back
RELEASE_GRAPHS_VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
_VERSION_CODE = "import importlib.metadata as m; print(m.version('sglang'))"
_NCCL_CODE = (  # "none": a torch without CUDA, whose groups are gloo's
    "import torch; cuda = torch.version.cuda and torch.distributed.is_nccl_available();"
    " print(torch.__version__, '.'.join(map(str, torch.cuda.nccl.version())) if cuda else 'none')"
)


@dataclass(frozen=True)
class MachineGpus:
    """GPUs of the machine that the servers run on."""

    # to this process; 0: none, or only the servers' environment knows of them
    num_visible_gpus: int = 0
    num_trainer_gpus: int = 0  # of those, the first: one a rank of the trainer
    # somebody says where servers run, and they may span machines
    is_placed_by_launcher: bool = False
    is_shared: bool = False  # rollout.colocated: trainer and servers take turns


def runs_on_cpu(arguments: Mapping[str, object], env: Mapping[str, str]) -> bool:
    """Return whether a server with these arguments, by name, and this environment from the user
    runs on the CPU.
    """
    return arguments.get("device") == "cpu" or env.get(CPU_ENGINE_VARIABLE) == "1"


def assign_gpus(
    arguments: Mapping[str, object],
    env: Mapping[str, str],
    num_engines: int,
    machine_gpus: MachineGpus,
) -> list[dict[str, object]]:
    """Return for each server the argument that gives it its devices; empty where the user sets the
    devices, where there are none, or where a launcher assigns them.

    Raise ValueError where there are too few GPUs.
    """
    nothing: list[dict[str, object]] = [{} for _ in range(num_engines)]
    if runs_on_cpu(arguments, env) or BASE_GPU_ID in arguments:
        return nothing
    given = env.get(VISIBLE_DEVICES)
    num_visible = (
        len([part for part in given.split(",") if part.strip()])
        if given is not None
        else machine_gpus.num_visible_gpus
    )
    if num_visible == 0:
        return nothing
    start = 0 if given is not None or machine_gpus.is_shared else machine_gpus.num_trainer_gpus
    span = count_engine_gpus_per_machine(arguments)
    if start + num_engines * span > num_visible:
        raise ValueError(_explain_too_few_gpus(span, num_engines, num_visible, start, given))
    return [{BASE_GPU_ID: start + index * span} for index in range(num_engines)]


def count_engine_gpus_per_machine(arguments: Mapping[str, object]) -> int:
    """Return the number of GPUs that one server takes on one machine. The count is tp-size / nnodes
    x gpu-id-step: GPUs that the step skips count, too.
    """
    ranks = _read_whole_number(arguments, "tp-size") // _read_whole_number(arguments, "nnodes")
    return ranks * _read_whole_number(arguments, "gpu-id-step")


def _read_whole_number(arguments: Mapping[str, object], argument_name: str) -> int:
    """Return the argument as a whole number; 1 where it is not set."""
    return int(str(arguments.get(argument_name, 1)))


def _explain_too_few_gpus(
    gpus_per_engine: int,
    num_engines: int,
    num_visible: int,
    num_trainer_gpus: int,
    visible_devices: str | None,
) -> str:
    """Return the message for too few GPUs, with the numbers and the fix."""
    needed = (
        f"rollout.num_engines ({num_engines}) x tp-size ({gpus_per_engine}) ="
        f" {num_engines * gpus_per_engine} GPUs"
    )
    if visible_devices is not None:
        return (
            f"{needed} are more than rollout.sglang.env.{VISIBLE_DEVICES} ({visible_devices})"
            " names; name as many, or lower either (or set rollout.sglang.args.base_gpu_id for"
            " servers that share devices)."
        )
    of_trainer = (
        f" beside the trainer's {num_trainer_gpus} (trainer.n_gpus_per_node)"
        if num_trainer_gpus
        else ""
    )
    shared = " let both take turns (rollout.colocated: true)," if num_trainer_gpus else ""
    return (
        f"{needed} are needed{of_trainer}, but {num_visible} are visible; lower either,{shared} or"
        f" name the devices in rollout.sglang.env.{VISIBLE_DEVICES}."
    )


def check_sglang_version(version: str, location: str) -> str | None:
    """Return None for a tested version, or a warning for a newer one. `location` names the
    environment in messages. Raise ValueError for a version that is too old or cannot be read.
    """
    try:
        found = Version(version)
    except InvalidVersion:
        raise ValueError(
            f"sglang in {location} says that its version is {version!r}; use a released one."
        ) from None
    if found < Version(OLDEST_SGLANG):
        raise ValueError(
            f"sglang in {location} is {version}, but {OLDEST_SGLANG} or newer is needed"
            " (weight-update sessions); upgrade it there."
        )
    if found > max(map(Version, TESTED_VERSIONS)):
        return (
            f"sglang in {location} is {version}, which is newer than what was tested"
            f" ({', '.join(TESTED_VERSIONS)}); what it can do is asked, not taken for granted."
        )
    return None


def find_unfit_arguments(arguments: Mapping[str, object]) -> Iterator[tuple[str, object, str, str]]:
    """Yield (argument, value, reason, fix) for each argument that makes a server unfit for
    training. `arguments` are by name, with dashes or underscores.
    """
    plain = {name.replace("_", "-"): value for name, value in arguments.items()}
    for name, (allowed, why, fix) in ARGUMENT_LIMITS.items():
        value = plain.get(name)
        if name == "dp-size" and plain.get(DP_ATTENTION) is True:
            continue
        if not any(value == good and type(value) is type(good) for good in allowed):
            yield name, value, why, fix


@dataclass(frozen=True)
class SGLangEnvironment:
    """A checked environment in which servers can be started."""

    python: str  # absolute, or found on PATH
    version: str
    server_env: dict[str, str]  # of the servers, search paths absolute
    arguments: CheckedArguments  # of the user, and what the run's settings ask for
    device_arguments: list[dict[str, object]]  # per server: arguments that give it GPUs
    warning: str | None = None  # about the version


def check_sglang_environment(
    python: str | None,
    arguments: Mapping[str, object],
    env: Mapping[str, str],
    cache_dir: Path = OPTIONS_CACHE_DIR,
    is_deterministic: bool = False,
    num_engines: int = 1,
    machine_gpus: MachineGpus | None = None,
) -> SGLangEnvironment:
    """Check the interpreter, the version and the arguments of `rollout.sglang`, and return what a
    start needs; `python` None is this interpreter. Start no server. `is_deterministic` (of the
    trainer) and `machine_gpus` add the arguments that servers need for them.

    Raise ValueError with the fix: no interpreter, no sglang or an old one in it, an argument that
    sglang does not know or that training cannot have, one that `is_deterministic` forbids, too few
    GPUs.
    """
    machine_gpus = machine_gpus or MachineGpus()
    found = find_interpreter(python)
    full_env = make_search_paths_absolute(env)
    version = run_in_interpreter(
        found,
        _VERSION_CODE,
        full_env,
        f"{found} has no sglang; {_INSTALL_ADVICE}, or set rollout.engine: local.",
    )
    warning = check_sglang_version(version, found)
    known = _load_known_options(found, version, full_env, cache_dir) if arguments else []
    of_user = check_arguments(arguments, known, version)
    for name, value, why, fix in find_unfit_arguments(of_user.value_by_option):
        raise ValueError(f"rollout.sglang.args.{name} ({value!r}) cannot be: {why}; {fix}.")
    if (
        count := _read_whole_number(of_user.value_by_option, "nnodes")
    ) > 1 and not machine_gpus.is_placed_by_launcher:
        raise ValueError(
            f"rollout.sglang.args.nnodes ({count}) needs several machines, which only the engines"
            " of a run under torchrun or Ray have; remove it, or start such a server by hand and"
            " name it in rollout.endpoints."
        )
    added: dict[str, object] = {}
    if is_deterministic:
        added |= make_deterministic_arguments(of_user.value_by_option, env)
    if machine_gpus.is_shared and not runs_on_cpu(of_user.value_by_option, env):
        added |= make_colocation_arguments(of_user.value_by_option, {**os.environ, **env})
        full_env = {RELEASE_GRAPHS_VARIABLE: "true", **full_env}
    complete = CheckedArguments(
        {**of_user.value_by_option, **added},
        {
            **of_user.file_settings,
            **{name: value for name, value in added.items() if name not in of_user.value_by_option},
        },
        of_user.command_words,
    )
    devices = assign_gpus(complete.value_by_option, env, num_engines, machine_gpus)
    return SGLangEnvironment(found, version, full_env, complete, devices, warning)


def check_nccl_versions(python: str | None, env: Mapping[str, str]) -> None:
    """Compare torch and NCCL of the servers' environment with this environment's, for a
    communicator of ranks and servers.

    Log a warning for a difference. Raise ValueError where NCCL differs in more than a patch
    release.
    """
    theirs = find_interpreter(python)
    if theirs == sys.executable:
        return
    own_torch, own_nccl = run_in_interpreter(
        sys.executable, _NCCL_CODE, {}, "this environment has no torch"
    ).split()
    torch, nccl = run_in_interpreter(
        theirs, _NCCL_CODE, make_search_paths_absolute(env), f"{theirs} has no torch"
    ).split()
    said = (
        f"{theirs} has torch {torch} with NCCL {nccl}, this environment torch {own_torch} with"
        f" NCCL {own_nccl}"
    )
    if "none" not in (own_nccl, nccl) and own_nccl.split(".")[:2] != nccl.split(".")[:2]:
        raise ValueError(
            "rollout.weight_transport (process_group) puts ranks and servers into one NCCL"
            f" communicator: {said}. Install the same torch in both, or use tensor or disk."
        )
    if (own_torch, own_nccl) != (torch, nccl):
        logger.warning("%s; process_group is tested with equal versions.", said)


def find_refused_arguments(
    section: SGLangConfig, is_deterministic: bool, is_shared: bool
) -> Iterator[tuple[str, str]]:
    """Yield (full key, message) for each argument of rollout.sglang that no version of SGLang may
    have in training. `is_shared`: engines share devices with the trainer (rollout.colocated).
    """
    aliases = {other: names[0] for names in SIZES_OF_SGLANG for other in names}
    names = {aliases.get(plain := name.replace("_", "-"), plain): name for name in section.args}
    values: dict[str, object] = {name: section.args[key] for name, key in names.items()}
    for name in sorted(names.keys() & RUN_ARGUMENTS.keys()):
        key = f"rollout.sglang.args.{names[name]}"
        yield key, f"{key} is set by the run: {RUN_ARGUMENTS[name]}; remove it."
    for name, value, why, fix in find_unfit_arguments(values):
        key = f"rollout.sglang.args.{names[name]}"
        yield key, f"{key} ({value!r}) cannot be: {why}; {fix}."
    for name, problem in _find_size_problems(values):
        key = f"rollout.sglang.args.{names[name]}"
        yield key, f"{key} ({values[name]!r}) {problem}."
    wanted = (
        [(DETERMINISTIC, partial(make_deterministic_arguments, values, section.env))]
        if is_deterministic
        else []
    )
    if is_shared and not runs_on_cpu(values, section.env):
        wanted.append((MEMORY_SAVER, partial(make_colocation_arguments, values, section.env)))
    for name, look in wanted:
        try:
            look()
        except ValueError as error:
            yield f"rollout.sglang.args.{names.get(name, name)}", str(error)


def _find_size_problems(value_by_argument: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield (argument, problem) for each size with which SGLang would not start, or which it would
    ignore.
    """
    sizes = dict.fromkeys(("tp-size", "ep-size", "dp-size", "moe-dense-tp-size"), 1)
    for name in sizes:
        if (value := value_by_argument.get(name)) is not None:
            if not str(value).isdecimal() or int(str(value)) == 0:
                yield name, "must be a whole number from 1"
                return
            sizes[name] = int(str(value))
    tp = sizes["tp-size"]
    is_dp = value_by_argument.get(DP_ATTENTION) is True
    for name in ("ep-size", "dp-size") if is_dp else ("ep-size",):
        if tp % sizes[name]:
            yield (
                name,
                f"must divide tp-size ({tp}); use one of {', '.join(map(str, list_divisors(tp)))}",
            )
    if sizes["moe-dense-tp-size"] not in (1, tp):
        yield "moe-dense-tp-size", f"must be 1 or tp-size ({tp})"
    if is_dp and sizes["dp-size"] == 1:
        yield (
            DP_ATTENTION,
            (
                "needs dp-size, the number of groups of ranks that serve requests of their"
                " own, above 1"
            ),
        )
    if value_by_argument.get(DP_HEAD) is True and not is_dp:
        yield DP_HEAD, f"needs {DP_ATTENTION}; set it, with dp-size, or leave this out"


def find_interpreter(python: str | None) -> str:
    """Return the path of the interpreter, a relative one taken from the working directory; None is
    this interpreter. Raise ValueError where it is missing, or this environment has no sglang.
    """
    if python is None:
        if importlib.util.find_spec("sglang") is None:
            raise ValueError(
                "rollout.engine (sglang) needs sglang in this environment; install it"
                f" ({format_install_command('sglang')}), name the interpreter of another"
                " environment in"
                f" rollout.sglang.python (without a GPU: {format_sglang_cpu_hint()} makes"
                " .venv-sglang/bin/python), or set"
                " rollout.engine: local."
            )
        return sys.executable
    found = shutil.which(python)
    if found is None:
        raise ValueError(
            f"rollout.sglang.python ({python}) must be an executable; name the interpreter of an"
            f" environment that has sglang (without a GPU: {format_sglang_cpu_hint()} makes"
            " .venv-sglang/bin/python), or set rollout.engine: local."
        )
    return os.path.abspath(found)  # links are kept: a virtual environment is known by the link


def make_search_paths_absolute(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with an absolute PYTHONPATH, because not every process of a server stays in this
    directory.
    """
    paths = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(":") if path]
    return {**env, "PYTHONPATH": ":".join(paths)} if paths else dict(env)


def make_deterministic_arguments(
    arguments: Mapping[str, object], env: Mapping[str, str]
) -> dict[str, object]:
    """Return the arguments that keep a sample from depending on the samples beside it. `arguments`
    are by `ServerOption.name`.

    Raise ValueError where that is impossible: on a CPU, or where the user has switched it off.
    """
    if runs_on_cpu(arguments, env):
        raise ValueError(
            "trainer.deterministic needs batch-invariant kernels of rollout.engine sglang, which"
            " it has not on a CPU; use rollout.engine: local there, or set"
            " trainer.deterministic: false."
        )
    if arguments.get(DETERMINISTIC, True) is not True:
        raise ValueError(
            "trainer.deterministic needs rollout.sglang.args.enable_deterministic_inference, which"
            f" is set to {arguments[DETERMINISTIC]!r}; remove it, or set"
            " trainer.deterministic: false."
        )
    return {DETERMINISTIC: True}


def make_colocation_arguments(
    arguments: Mapping[str, object], env: Mapping[str, str]
) -> dict[str, object]:
    """Return the arguments by which servers can give their memory to the trainer. `arguments` are
    by `ServerOption.name`; `env` is the run's environment with the user's settings for servers over
    it. Raise ValueError where one of them prevents that.
    """
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in env.get(name, "").lower():
            raise ValueError(
                f"{name} ({env[name]}) must not have expandable_segments with rollout.colocated:"
                " engines can neither open the trainer's memory then nor give theirs back; take it"
                " out, or set rollout.colocated: false."
            )
    if arguments.get(MEMORY_SAVER, True) is not True:
        raise ValueError(
            "rollout.colocated needs rollout.sglang.args.enable_memory_saver, which is set to"
            f" {arguments[MEMORY_SAVER]!r}; remove it, or set rollout.colocated: false."
        )
    return {MEMORY_SAVER: True}


def _load_known_options(
    python: str, version: str, env: Mapping[str, str], cache_dir: Path
) -> list[ServerOption]:
    """Return the options of the installed sglang, from the cache file or from its interpreter, and
    write the cache file. Raise ValueError where sglang cannot be imported.
    """
    # what a version takes depends on what is beside it
    place_of = hashlib.sha256(python.encode()).hexdigest()[:12]
    file = cache_dir / f"sglang-{version}-{place_of}.json"
    with contextlib.suppress(OSError, ValueError):
        return parse_options(file.read_text())
    answer = run_in_interpreter(
        python, ARGUMENTS_QUERY, env, f"sglang {version} in {python} cannot be imported"
    ).splitlines()[-1]
    known = parse_options(answer)
    with contextlib.suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        write_text_file(aside, encode_options(known))
        aside.rename(file)
    return known


def run_in_interpreter(python: str, code: str, env: Mapping[str, str], problem: str) -> str:
    """Run `code` in the interpreter and return what it prints, stripped. Raise ValueError with
    `problem` and the last line of the error where it fails.
    """
    try:
        done = subprocess.run(
            [python, "-c", code],
            env=make_import_environment({**os.environ, **env}),
            capture_output=True,
            text=True,
            timeout=_INTERPRETER_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(
            f"{python} cannot be run: {error}; name another interpreter in rollout.sglang.python."
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"{problem.rstrip('.')} ({last}).")
    return done.stdout.strip()

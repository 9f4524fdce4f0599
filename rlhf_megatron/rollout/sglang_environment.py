"""The environment that has sglang: is it there, is it new enough, does it know the arguments it shall get."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

OLDEST = "0.5.21"  # the first with the weight-update session endpoints
CACHE = Path(".cache")  # the list of arguments takes the server's interpreter seconds; kept here by version
OWN_ARGUMENTS = {  # what the run itself must know or set, and what to do instead
    "model-path": "set model.path",
    "host": "servers listen on 127.0.0.1",
    "port": "a free port is taken",
    "config": "write the arguments themselves into rollout.sglang.args",
    "admin-api-key": "a fresh key is made for every server",
    "api-key": "a fresh key is made for every server",
    "custom-weight-loader": "weight syncs go through the run's own",
}
_INSTALL = "install it there (`make sglang-cpu` on a machine without a GPU, else pip install 'rlhf-megatron[sglang]')"
_TIMEOUT_S = 300.0
DETERMINISTIC = "enable-deterministic-inference"
_VERSION_CODE = "import importlib.metadata as m; print(m.version('sglang'))"
_ARGUMENTS_CODE = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([action.option_strings for action in parser._actions]))
"""


@dataclass(frozen=True)
class SGLangEnvironment:
    python: str  # absolute, or found on PATH
    version: str
    env: dict[str, str]  # of the servers, search paths absolute
    arguments: dict[str, object]  # of the user, under the first of their names, without dashes


def check_sglang(
    python: str | None,
    arguments: Mapping[str, object],
    env: Mapping[str, str],
    cache: Path = CACHE,
    deterministic: bool = False,
) -> SGLangEnvironment:
    """Look at the environment of `rollout.sglang`; `python` None: this one. Starts no server. `deterministic`: of the
    trainer; it adds to the arguments what the servers need for it.

    Raises ValueError with the fix: no interpreter, no sglang or an old one in it, an argument that it does not know,
    one that `deterministic` forbids.
    """
    found = find_python(python)
    full_env = absolute_env(env)
    version = _run(found, _VERSION_CODE, full_env, f"{found} has no sglang; {_INSTALL}, or set rollout.engine: local.")
    if Version(version) < Version(OLDEST):
        raise ValueError(
            f"sglang in {found} is {version}, but {OLDEST} or newer is needed (weight-update sessions); upgrade it"
            " there."
        )
    known = _known_arguments(found, version, full_env, cache) if arguments else []
    found_arguments = canonical(arguments, known, version)
    if deterministic:
        found_arguments |= deterministic_arguments(found_arguments, env)
    return SGLangEnvironment(found, version, full_env, found_arguments)


def find_python(python: str | None) -> str:
    """The interpreter, relative paths taken from the working directory. Raises ValueError where it is missing."""
    if python is None:
        if importlib.util.find_spec("sglang") is None:
            raise ValueError(
                "rollout.engine (sglang) needs sglang in this environment; install it (pip install"
                " 'rlhf-megatron[sglang]'), name the interpreter of another environment in rollout.sglang.python"
                " (`make sglang-cpu` makes .venv-sglang/bin/python), or set rollout.engine: local."
            )
        return sys.executable
    found = shutil.which(python)
    if found is None:
        raise ValueError(
            f"rollout.sglang.python ({python}) must be an executable; name the interpreter of an environment that has"
            " sglang (`make sglang-cpu` makes .venv-sglang/bin/python), or set rollout.engine: local."
        )
    return os.path.abspath(found)  # links are kept: a virtual environment is known by the link


def absolute_env(env: Mapping[str, str]) -> dict[str, str]:
    """The same with an absolute PYTHONPATH: not every process of a server stays in this directory."""
    paths = [os.path.abspath(path) for path in env.get("PYTHONPATH", "").split(":") if path]
    return {**env, "PYTHONPATH": ":".join(paths)} if paths else dict(env)


def canonical(arguments: Mapping[str, object], known: list[list[str]], version: str) -> dict[str, object]:
    """The arguments under the first of their names. `known`: the names of each argument, without dashes.

    Raises ValueError for a name that is unknown (with the nearest one), given twice, or set by the run itself.
    """
    first = {name: names[0] for names in known for name in names}
    result: dict[str, object] = {}
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if name not in first:
            near = difflib.get_close_matches(name, first, n=1) or [n for n in first if n.startswith(f"{name}-")]
            hint = f"did you mean {near[0]}?" if near else "`python -m sglang.launch_server --help` lists them."
            raise ValueError(f"rollout.sglang.args.{key} is no argument of sglang {version}; {hint}")
        name = first[name]
        if name in OWN_ARGUMENTS:
            raise ValueError(f"rollout.sglang.args.{key} is set by the run: {OWN_ARGUMENTS[name]}; remove it.")
        if name in result:
            raise ValueError(f"rollout.sglang.args.{key} is given twice, under two names; remove one.")
        result[name] = value
    return result


def deterministic_arguments(arguments: Mapping[str, object], env: Mapping[str, str]) -> dict[str, object]:
    """What servers need so that a sample does not depend on what is decoded beside it. `arguments`: canonical.

    Raises ValueError where they cannot: on a CPU, or where the user has switched it off.
    """
    if arguments.get("device") == "cpu" or env.get("SGLANG_USE_CPU_ENGINE") == "1":
        raise ValueError(
            "trainer.deterministic needs batch-invariant kernels of rollout.engine sglang, which it has not on a CPU;"
            " use rollout.engine: local there, or set trainer.deterministic: false."
        )
    if arguments.get(DETERMINISTIC, True) is not True:
        raise ValueError(
            "trainer.deterministic needs rollout.sglang.args.enable_deterministic_inference, which is set to"
            f" {arguments[DETERMINISTIC]!r}; remove it, or set trainer.deterministic: false."
        )
    return {DETERMINISTIC: True}


def _known_arguments(python: str, version: str, env: Mapping[str, str], cache: Path) -> list[list[str]]:
    file = cache / f"sglang-{version}-arguments.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(file.read_text())
    words = f"sglang {version} in {python} cannot be imported"
    answer = _run(python, _ARGUMENTS_CODE, env, words).splitlines()[-1]
    known = [[name.lstrip("-") for name in sorted(names, key=lambda n: -len(n))] for names in json.loads(answer)]
    known = [names for names in known if names]
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(known))
        aside.rename(file)
    return known


def _run(python: str, code: str, env: Mapping[str, str], problem: str) -> str:
    """What `code` prints. Raises ValueError with `problem` and the last line of the error."""
    try:
        done = subprocess.run(
            [python, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(
            f"{python} cannot be run: {error}; name another interpreter in rollout.sglang.python."
        ) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"{problem.rstrip('.')} ({last}).")
    return done.stdout.strip()

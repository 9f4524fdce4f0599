"""The command that starts a SGLang server by hand, as a run would start it, for runs that attach to it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from rlhf_megatron.rollout.sglang_environment import SGLangEnvironment
from rlhf_megatron.rollout.sglang_network import INIT_METHOD
from rlhf_megatron.rollout.sglang_process import search_path, settings_of
from rlhf_megatron.rollout.sglang_server.loader import TRANSFER_DIR

KEY_FILE = "engine.key"
SETTINGS_FILE = "engine-key.yaml"


def shell_command(
    installed: SGLangEnvironment, model_path: Path | str, dtype: str, transfer_dir: Path, port: int
) -> str:
    """Lines for a shell: a key in a file of mode 0600 (a command line can be seen by all users of the machine), then
    the server itself, in the foreground. A run on this machine attaches with that key file."""
    given = {**settings_of(installed, model_path, dtype), "port": port}
    words = [installed.python, "-m", "sglang.launch_server", "--config", SETTINGS_FILE]
    for name, value in given.items():
        words += _words(name, value)
    variables = {
        **{name: value for name, value in installed.env.items() if name != "PYTHONPATH"},
        "PYTHONPATH": search_path(installed.env),
        TRANSFER_DIR: str(transfer_dir),
    }
    return "\n".join(
        [
            f"(umask 077; {shlex.quote(installed.python)} -c 'import secrets; print(secrets.token_hex(32))' \\",
            f" > {KEY_FILE}",
            f' printf "api-key: %s\\nadmin-api-key: %s\\n" "$(cat {KEY_FILE})" "$(cat {KEY_FILE})" > {SETTINGS_FILE})',
            f'{INIT_METHOD}="file://$(mktemp -u)" \\',
            *(f"{line} \\" for line in _assignments(variables)),
            shlex.join([*words, *installed.arguments.words]),
        ]
    )


def _words(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    items = value if isinstance(value, list) else [value]
    return [f"--{name}", *(item if isinstance(item, str) else json.dumps(item) for item in items)]


def _assignments(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(value)}" for name, value in variables.items()]

"""A run seen from outside: where its processes listen, and what of its secrets can be
read by others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end_tools import DP2, MARKER, ONE_RANK, overrides, processes_with, write_config
from listening import is_loopback, listening
from places import ROOT

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.key_paths import list_leaf_keys
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.resume_changes import flatten_config_yaml
from rlhf_megatron.config.schema import RunConfig, SGLangConfig
from rlhf_megatron.config.secrets import REDACTED, is_secret_key, redact_secrets, reveal_secrets
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.runtime.torchrun.torchrun_stores import AddressBoundStore

TIMEOUT_S = 300.0


def role(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    for name, words in (
        ("engine", "local.local_server"),
        ("agent", "torchrun.agent"),
        ("controller", "controller"),
        ("route store", "runtime.route_store"),
        *(("ray", words) for words in ("raylet", "gcs_server", "ray::", "/ray/", "ray/_private")),
    ):
        if words in command:
            return name
    return "host" if "rlhf_megatron train" in command else f"other: {command[:200]}"


# whoever listens in a run on one machine -> the beginning of its row in docs/security.md
ROWS_OF_LISTENERS = {
    "engine": "| bundled engine | 127.0.0.1",
    "agent": "| torch's rendezvous store, in the launcher | 127.0.0.1",
    "controller": "| controller | 127.0.0.1",
    "host": "| gloo, NCCL between ranks | the loopback interface",
    "route store": "| stores of routes, on machines with engines",
    "ray": "| Ray's servers (GCS, raylet, its agents, every worker) of a cluster that",
}
LAUNCHERS = {
    "torchrun": DP2,
    "inline": ONE_RANK,
    "ray": {**DP2, "trainer.runtime": "ray"},
}


def test_the_table_is_read_as_the_kernel_writes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as two:
        expected = {f"127.0.0.1 {one.getsockname()[1]}", f"0.0.0.0 {two.getsockname()[1]}"}
        assert expected <= set(listening(os.getpid()))
    assert not expected & set(listening(os.getpid()))
    assert is_loopback("127.0.0.1 80") and is_loopback("::1 80")
    assert (
        not is_loopback("0.0.0.0 80")
        and not is_loopback(":: 80")
        and not is_loopback("10.0.0.1 80")
    )


def test_torchs_store_listens_where_it_is_told_to() -> None:
    store = AddressBoundStore("127.0.0.1", 0, 1, True)
    assert [
        address for address in listening(os.getpid()) if address.endswith(f" {store.port}")
    ] == [f"127.0.0.1 {store.port}"]
    client = AddressBoundStore("127.0.0.1", store.port, 1, False)
    store.set("key", "value")
    assert client.get("key") == b"value"


@dataclass(frozen=True)
class Observed:
    """A run of two ranks, looked at while it went on."""

    directory: Path
    exit_code: int
    listening: dict[str, set[str]]  # role -> addresses
    commands: frozenset[str]  # command lines of all its processes


REWARD = """
import os
def score(response, api_key, judge):
    assert api_key == "PLANTED-in-params" and judge["password"] == "PLANTED-deeper"
    return float(response[:1] == "0")
"""
PLANTED = {
    name: f"PLANTED-{name}"
    for name in ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")
}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe_run(tmp_path_factory.mktemp("observed"), LAUNCHERS["torchrun"])


def observe_run(directory: Path, settings_of_launcher: dict[str, Any]) -> Observed:
    config = write_config(directory)
    marker = uuid.uuid4().hex
    (directory / "score.py").write_text(REWARD)
    kwargs = {"api_key": "PLANTED-in-params", "judge": {"password": "PLANTED-deeper"}}
    settings = yaml.safe_load(config.read_text())
    settings["reward"] = {
        "name": "function",
        "params": {"path": "score.py:score", "kwargs": kwargs},
    }
    settings["trainer"]["save_freq"] = 1
    config.write_text(yaml.safe_dump(settings))
    strange = ("TORCHELASTIC_", "MASTER_", "GLOO_")
    given = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    command = [sys.executable, "-m", "rlhf_megatron", "train", str(config)]
    command += overrides(settings_of_launcher)
    listening_at: dict[str, set[str]] = {}
    commands = set()
    with (directory / "console").open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={
                **given,
                **PLANTED,
                MARKER: marker,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            },
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            for pid in processes_with(f"{MARKER}={marker}"):
                with contextlib.suppress(OSError):
                    commands.add(
                        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    )
                    # a process without a command line is just ending
                    if (addresses := listening(pid)) and role(pid) != "other: ":
                        listening_at.setdefault(role(pid), set()).update(addresses)
            time.sleep(0.2)
    finally:
        for pid in {process.pid, *processes_with(f"{MARKER}={marker}")}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        exit_code = process.wait()
    assert exit_code == 0, (directory / "console").read_text()[-3000:]
    return Observed(directory, exit_code, listening_at, frozenset(commands))


@pytest.mark.dist
def test_a_run_listens_on_loopback_addresses_only(observed: Observed) -> None:
    seen = observed.listening
    # torch's store, gloo, the bundled server
    assert {"agent", "host", "engine"} <= seen.keys(), seen
    assert not {
        who: bad for who, all_ in seen.items() if (bad := [a for a in all_ if not is_loopback(a)])
    }, seen


def assert_named_listeners(seen: dict[str, set[str]]) -> None:
    """Whoever listens has a row in the documents, and listens on this machine only."""
    document = (ROOT / "docs" / "security.md").read_text()
    for role_name, addresses in seen.items():
        assert role_name in ROWS_OF_LISTENERS, (role_name, addresses)
        assert ROWS_OF_LISTENERS[role_name] in document
        assert all(map(is_loopback, addresses)), (role_name, addresses)


@pytest.mark.dist
def test_whoever_listens_is_named_in_the_documents(observed: Observed) -> None:
    assert_named_listeners(observed.listening)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_whoever_listens_under_other_launchers_is_named(tmp_path: Path, launcher: str) -> None:
    seen = observe_run(tmp_path, LAUNCHERS[launcher]).listening
    assert "engine" in seen and ("ray" in seen) == (launcher == "ray")
    assert_named_listeners(seen)


@pytest.mark.dist
def test_secrets_stand_in_no_file_and_no_command_line(observed: Observed) -> None:
    run_dir = observed.directory / "runs" / "tiny"
    tokens = {path: path.read_text() for path in run_dir.rglob("*.token")}
    assert len(tokens) == 1 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in tokens)
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    wanted = {
        "config.yaml",
        "summary.json",
        "metrics.jsonl",
        "trace.json",
        "attempts.jsonl",
        "engine0.log",
        "rank0.log",
    }
    assert wanted <= names, names
    for path in [*files, observed.directory / "console"]:
        content = path.read_bytes()
        assert b"PLANTED" not in content, path
        assert not [
            token for where, token in tokens.items() if where != path and token.encode() in content
        ], path
    assert any("local.local_server" in command for command in observed.commands)
    for command in observed.commands:
        assert "PLANTED" not in command and not any(token in command for token in tokens.values())


@pytest.mark.dist
def test_the_written_configuration_loads_and_asks_for_its_secrets(observed: Observed) -> None:
    written = observed.directory / "runs" / "tiny" / "config.yaml"
    params = read_run_config(written).config.reward.params
    assert params["kwargs"] == {"api_key": REDACTED, "judge": {"password": REDACTED}}
    with pytest.raises(ConfigError, match=r"kwargs\.api_key is <redacted>(?s:.*)give it again"):
        reveal_secrets(read_run_config(written).config, {})
    (observed.directory / "again.yaml").write_text(
        f"extends: {written}\nreward: {{params: {{kwargs: {{api_key: a, judge:"
        " {password: b}}}}\n"
    )
    again = reveal_secrets(read_run_config(observed.directory / "again.yaml").config, {})
    assert again.reward.params["kwargs"] == {"api_key": "a", "judge": {"password": "b"}}
    assert flatten_config_yaml(render_config_yaml(again)) == flatten_config_yaml(
        written.read_text()
    )  # no change for a run that goes on


def test_the_engines_environment_comes_back_from_the_environment() -> None:
    config = replace(
        RunConfig(),
        rollout=replace(
            RunConfig().rollout, sglang=SGLangConfig(env={"HF_TOKEN": "x", "OMP_NUM_THREADS": "1"})
        ),
    )
    hidden = redact_secrets(config)
    assert hidden.rollout.sglang.env == {"HF_TOKEN": REDACTED, "OMP_NUM_THREADS": "1"}
    assert redact_secrets(hidden) == hidden and config.rollout.sglang.env["HF_TOKEN"] == "x"
    assert reveal_secrets(hidden, {"HF_TOKEN": "y"}).rollout.sglang.env == {
        "HF_TOKEN": "y",
        "OMP_NUM_THREADS": "1",
    }
    with pytest.raises(ConfigError, match="set HF_TOKEN in the environment"):
        reveal_secrets(hidden, {})


def test_names_of_secrets() -> None:
    env = "rollout.sglang.env"
    params = "reward.params"
    secret = (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "PGPASSWORD",
        "MY_KEY",
        "GITHUB_PAT",
        "DB_PASSWORD",
    )
    assert [name for name in secret if not is_secret_key(f"{env}.{name}")] == []
    for name in (
        "api_key",
        "apiKey",
        "api-key",
        "token",
        "clientSecret",
        "password",
        "judge.hf_token",
        "credentials",
    ):
        assert is_secret_key(f"{params}.{name}"), name
    for name in (
        "answer_key",
        "prompt_key",
        "bos_token",
        "stop_token",
        "num_tokens",
        "tokenizer",
        "keyword",
        "author",
    ):
        assert not is_secret_key(f"{params}.{name}"), name
    for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "KEYBOARD", "PATH"):
        assert not is_secret_key(f"{env}.{name}"), name
    assert not [key for key in list_leaf_keys(RunConfig) if is_secret_key(key)]


@pytest.mark.parametrize(
    "override", ["rollout.sglang.env.HF_TOKEN=x", "rollout.sglang.env={HF_TOKEN: x}"]
)
def test_secrets_are_refused_on_the_command_line(tmp_path: Path, override: str) -> None:
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(
        ConfigError, match=r"rollout\.sglang\.env\.HF_TOKEN: every user .* set it in the file"
    ):
        read_run_config(tmp_path / "run.yaml", [override])

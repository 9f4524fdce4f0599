"""`rlhf-megatron engine RUN.yaml`: the SGLang servers of a run, started and owned by this command,
for runs that attach to them; or the command that starts one by hand.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from functools import partial
from pathlib import Path

import yaml

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.part_rules import has_engine_setting
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.engine_kinds import SGLangEngineKind
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.fleet.server_process import (
    EngineServers,
    launch_here,
    make_throttled_progress,
    write_token_file,
)
from rlhf_megatron.rollout.sglang.sglang_environment import check_sglang_environment
from rlhf_megatron.rollout.sglang.sglang_launch import make_shell_command
from rlhf_megatron.rollout.transports.transfer_dir import get_default_parent
from rlhf_megatron.stop import RunStopped, StopRequest
from rlhf_megatron.write_errors import write_text_file

ENDPOINTS_FILE = "endpoints.yaml"
_POLL_S = 0.5


def run_engine_command(args: argparse.Namespace) -> int:
    """Start the servers of a configuration, print how to attach to them, and wait. Return 0 after a
    stop signal, 1 if a server ends. With --print only print the command that starts a server by
    hand. Raise ValueError for a configuration without SGLang servers of its own, and where servers
    fail to start.
    """
    config = load_run_config(args.config, args.overrides).config
    if not has_engine_setting(config.rollout, "rollout.sglang") or config.rollout.endpoints:
        raise ValueError(
            f"{args.config} must have rollout.engine: sglang and no rollout.endpoints: this"
            " command starts the servers that other runs attach to."
        )
    if args.port is not None:
        print(_format_start_command(config, args.port))
        return 0
    directory = (
        args.out
        or Path(config.trainer.default_local_dir) / f"{config.trainer.experiment_name}-engines"
    )
    return _serve_engines(config, directory.absolute())


def _format_start_command(config: RunConfig, port: int) -> str:
    """Return the shell command that starts one server of this configuration at `port` by hand."""
    sglang = config.rollout.sglang
    installed = check_sglang_environment(
        sglang.python, sglang.args, sglang.env, is_deterministic=config.trainer.deterministic
    )
    dtype = EngineSetup.from_config(config).dtype
    quantization = config.rollout.quantization
    return make_shell_command(
        installed, config.model.path, dtype, quantization, _get_transfer_parent_dir(config), port
    )


def _get_transfer_parent_dir(config: RunConfig) -> Path:
    """Return the directory in which runs make their transfer directories."""
    return (
        Path(config.rollout.transfer_dir).absolute()
        if config.rollout.transfer_dir
        else get_default_parent()
    )


def _serve_engines(config: RunConfig, directory: Path) -> int:
    """Start the servers with logs and a key in `directory`, write the attach settings, and wait.
    Return 0 after SIGTERM or SIGINT, 1 if a server ends. Raise ValueError where the servers fail to
    start.
    """
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    directory.mkdir(parents=True, exist_ok=True)
    key_file = directory / "key"
    try:
        setup = EngineSetup.from_config(config)
        key = write_token_file(key_file)
        progress = make_throttled_progress(partial(print, flush=True), stop.raise_if_requested)
        with SGLangEngineKind().start_own_servers(
            setup, directory, _get_transfer_parent_dir(config), progress, launch_here, key
        ) as servers:
            _write_attach_settings(config, servers, directory, key_file)
            return _wait_for_end(servers, stop)
    except EngineError as error:
        raise ValueError(str(error)) from error
    except RunStopped:
        return 0


def _write_attach_settings(
    config: RunConfig, servers: EngineServers, directory: Path, key_file: Path
) -> None:
    """Write the settings file that a run extends to attach to the servers, and print
    how to do so.
    """
    rollout: dict[str, object] = {
        "endpoints": [address.url for address in servers.addresses],
        "transfer_dir": str(_get_transfer_parent_dir(config)),
        "sglang": {"api_key_file": str(key_file)},
    }
    path = directory / ENDPOINTS_FILE
    write_text_file(path, yaml.safe_dump({"rollout": rollout}, sort_keys=False))
    print(f"logs: {directory / 'engines'}")
    print(f"To attach, extend this file after the run's own (extends: [RUN.yaml, {path}]):")
    print(path.read_text(), end="")
    print("The engines end with this command (Ctrl-C).", flush=True)


def _wait_for_end(servers: EngineServers, stop: StopRequest) -> int:
    """Wait until a stop is requested, and return 0; print the reason and return 1 as soon as a
    server has ended.
    """
    while not stop.is_requested:
        for address in servers.addresses:
            words = servers.describe_exit(address.name)
            if words is not None:
                print(f"{address.name} ({address.url}): {words}", file=sys.stderr)
                return 1
        time.sleep(_POLL_S)
    return 0

"""`rlhf-megatron engine RUN.yaml`: the SGLang servers of a run, started and owned by this command, for runs that attach
to them; or the command that starts one by hand."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from functools import partial
from pathlib import Path

import yaml

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.parts import reads
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.resharding.transfer_dir import default_parent
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.rollout.fleet.process import EngineServers, here, now_and_then, write_token
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.rollout.kinds import SGLangKind
from rlhf_megatron.rollout.sglang.environment import check_sglang
from rlhf_megatron.rollout.sglang.process import shell_command
from rlhf_megatron.stop import RunStopped, StopRequest

ENDPOINTS = "endpoints.yaml"
_POLL_S = 0.5


def engine(args: argparse.Namespace) -> int:
    """Starts the servers, says how to attach, and waits until it is told to stop (exit code 0) or one ends (1)."""
    config = load_run_config(args.config, args.overrides).config
    if not reads(config.rollout, "rollout.sglang") or config.rollout.endpoints:
        raise ValueError(
            f"{args.config} must have rollout.engine: sglang and no rollout.endpoints: this command starts the servers"
            " that other runs attach to."
        )
    if args.port is not None:
        print(_command(config, args.port))
        return 0
    directory = args.out or Path(config.trainer.default_local_dir) / f"{config.trainer.experiment_name}-engines"
    return _serve(config, directory.absolute())


def _command(config: RunConfig, port: int) -> str:
    sglang = config.rollout.sglang
    installed = check_sglang(sglang.python, sglang.args, sglang.env, deterministic=config.trainer.deterministic)
    dtype, quantization = EngineSetup.of(config).dtype, config.rollout.quantization
    return shell_command(installed, config.model.path, dtype, quantization, _shared(config), port)


def _shared(config: RunConfig) -> Path:
    """Return the directory in which runs make their transfer directories."""
    return Path(config.rollout.transfer_dir).absolute() if config.rollout.transfer_dir else default_parent()


def _serve(config: RunConfig, directory: Path) -> int:
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stop.request(signal.Signals(received).name))
    directory.mkdir(parents=True, exist_ok=True)
    key_file = directory / "key"
    try:
        setup, key = EngineSetup.of(config), write_token(key_file)
        progress = now_and_then(partial(print, flush=True), stop.check)
        with SGLangKind().serve(setup, directory, _shared(config), progress, here, key) as servers:
            _say_how(config, servers, directory, key_file)
            return _watch(servers, stop)
    except EngineError as error:
        raise ValueError(str(error)) from error
    except RunStopped:
        return 0


def _say_how(config: RunConfig, servers: EngineServers, directory: Path, key_file: Path) -> None:
    """Write a settings file that a run can extend to attach to the servers, and print how."""
    rollout: dict[str, object] = {
        "endpoints": [address.url for address in servers.addresses],
        "transfer_dir": str(_shared(config)),
        "sglang": {"api_key_file": str(key_file)},
    }
    path = directory / ENDPOINTS
    path.write_text(yaml.safe_dump({"rollout": rollout}, sort_keys=False))
    print(f"logs: {directory / 'engines'}")
    print(f"To attach, extend this file after the run's own (extends: [RUN.yaml, {path}]):")
    print(path.read_text(), end="")
    print("The engines end with this command (Ctrl-C).", flush=True)


def _watch(servers: EngineServers, stop: StopRequest) -> int:
    while not stop.is_requested:
        for address in servers.addresses:
            words = servers.ending(address.name)
            if words is not None:
                print(f"{address.name} ({address.url}): {words}", file=sys.stderr)
                return 1
        time.sleep(_POLL_S)
    return 0

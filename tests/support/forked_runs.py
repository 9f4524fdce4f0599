"""`rlhf-megatron train` in processes that are forked off one that has imported everything: a whole
run takes seconds.

    with ForkServer(tmp_path) as server:
        result = server.train(config, {"trainer.seed": 2}, faults="kill@loop.step_begins:step=3")

A run is the real program with the runtime `inline`, in a session of its own, and ends as a process
does: by a code or a signal. Its bundled engine is the real server too, forked in place of started;
it notes the seed of every sample that it is asked for, so that a test can count what was
generated twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import warm
from end_to_end_tools import ONE_RANK, overrides
from places import ROOT, SUPPORT

TIMEOUT_S = 240.0
# file to which the engine writes the seeds that it is asked for
SEEDS_ENV = "RLHF_MEGATRON_TEST_SEEDS"
SETTINGS = {
    **ONE_RANK,
    "trainer.deterministic": True,
    "trainer.save_freq": 2,
    "trainer.save_hf": True,
    "trainer.total_training_steps": 5,
    "trainer.test_freq": 2,
    "trainer.logger": ["jsonl", "console"],
}
NO_RESULT = ("timing_", "perf/", "checkpoint/")
NO_RESULTS = ("seconds", "sync/seconds")


@dataclass(frozen=True)
class Attempt:
    """A process that has ended."""

    code: int  # negative: the signal that ended it
    console: str
    seconds: float
    run_dir: Path

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, without what is not repeated: times, and what follows from them."""
        rows = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        return [
            {k: v for k, v in row.items() if not k.startswith(NO_RESULT) and k not in NO_RESULTS}
            for row in rows
        ]

    def weights(self) -> bytes:
        return (self.run_dir / "hf" / "model.safetensors").read_bytes()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def starts(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.run_dir / "attempts.jsonl").read_text().splitlines())
        return [line for line in lines if line["kind"] == "start"]


class ForkServer:
    """A context manager. `directory`: for the consoles of the runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._count = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{SUPPORT}"}
        with (directory / "server").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()

    def train(
        self,
        config: Path,
        settings: dict[str, Any] | None = None,
        *options: str,
        faults: str = "",
        command: str = "train",
        kill_after_s: float = TIMEOUT_S,
    ) -> Attempt:
        """One process. Faults of a run directory act once, whichever process meets them.
        `settings`: over SETTINGS. `kill_after_s`: from its start to its SIGKILL.
        """
        self._count += 1
        console = self.directory / f"console{self._count}"
        settings = {**SETTINGS, **(settings or {})}
        name = settings.get("trainer.experiment_name", "tiny")
        environment = {SEEDS_ENV: str(config.parent / "seeds")}
        if faults:
            environment |= {
                "RLHF_MEGATRON_FAULTS": faults,
                "RLHF_MEGATRON_FAULTS_DIR": str(config.parent / "faults"),
            }
        request = {
            "argv": [command, str(config), *overrides(settings), *options],
            "environment": environment,
            "console": str(console),
            "kill_after_s": kill_after_s,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        start = time.monotonic()
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, (self.directory / "server").read_text()
        code = int(answer)
        run_dir = config.parent / "runs" / name
        return Attempt(code, console.read_text(), time.monotonic() - start, run_dir)

    def until_it_ends(
        self,
        config: Path,
        settings: dict[str, Any] | None = None,
        *,
        faults: str,
        command: str = "train",
    ) -> list[Attempt]:
        """Started again as long as it is killed."""
        attempts = [self.train(config, settings, faults=faults, command=command)]
        while attempts[-1].code == -signal.SIGKILL:
            attempts.append(self.train(config, settings, faults=faults, command=command))
        return attempts


def asked_seeds(config: Path) -> Counter[int]:
    """How often each sample was asked of an engine of the runs of `config`, by seed."""
    path = config.parent / "seeds"
    return Counter(map(int, path.read_text().split())) if path.exists() else Counter()


class ForkedServer:
    """Stands for `rollout.fleet.server_process.ServerProcess`: the bundled server in a process that
    is forked off this one.
    """

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str]) -> None:
        assert command[1:3] == ["-m", "rlhf_megatron.rollout.local.local_server"], command
        self.name = name
        self.log = log
        self.exit_code_seen: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.closerange(3, 256)  # as exec does; the lock of the run is among them
            os.environ.update(env)
            _end_with(lambda: _serve_engine(command[3:]))

    @property
    def exit_code(self) -> int | None:
        if self.exit_code_seen is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.exit_code_seen = os.waitstatus_to_exitcode(status) if pid else None
        return self.exit_code_seen

    def read_log_tail(self, num_lines: int = 20) -> str:
        try:  # a restart may have given the log its number
            return "\n".join(self.log.read_text().splitlines()[-num_lines:])
        except FileNotFoundError:
            return ""

    def send_signal(self, signal_number: int) -> None:
        os.killpg(self.pid, signal_number)

    def archive_log(self) -> None:
        from rlhf_megatron.rollout.fleet.server_process import archive_log

        archive_log(self.log)

    def request_stop(self) -> None:
        if self.exit_code is None:
            os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.exit_code is None:
            os.killpg(self.pid, signal.SIGKILL)
        while self.exit_code is None:
            time.sleep(0.01)

    stop = kill


def _serve_engine(arguments: list[str]) -> int:
    from rlhf_megatron.rollout.local import local_server
    from rlhf_megatron.rollout.local.decode_service import DecodeService

    generate = DecodeService.submit_generate

    def noting(self: DecodeService, requests: Any, *others: Any) -> Any:
        with open(os.environ[SEEDS_ENV], "a") as file:
            file.write("".join(f"{seed}\n" for request in requests for seed in request.seeds))
        return generate(self, requests, *others)

    DecodeService.submit_generate = noting  # type: ignore[method-assign]
    return local_server.main(arguments)


def _run(request: dict[str, Any]) -> int:
    from rlhf_megatron.cli.main import main
    from rlhf_megatron.rollout.fleet import server_process

    os.setsid()
    console = os.open(request["console"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(console, 1)
    os.dup2(console, 2)
    os.environ.update(request["environment"])
    warm.renew()
    server_process.ServerProcess = ForkedServer  # type: ignore[assignment, misc]
    return main(request["argv"])


def _end_with(function: Any) -> None:
    """Of a forked process: nothing of its parent's is closed or flushed."""
    code = 70
    try:
        code = function()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import_everything() -> None:
    import importlib

    for name in (
        *(
            "cli.main",
            "cli.train_command",
            "jobs.train_job",
            "controller.scheduler.training_run",
            "controller.scheduler.run_replay",
            "controller.preflight",
            "runtime.inline_worker_group",
        ),
        *("runtime.rank_roles", "runtime.stop_signals"),
        *("rollout.local.local_server", "rollout.local.batch_generator"),
        *("rollout.local.local_model", "rollout.local.weight_receiver"),
        "rollout.fleet.server_process",
    ):
        importlib.import_module(f"rlhf_megatron.{name}")
    for name in ("matplotlib.pyplot", "transformers.models.qwen3.modeling_qwen3"):
        importlib.import_module(name)


def main() -> None:
    """Reads requests, answers each with the exit code of its run."""
    os.environ["MPLBACKEND"] = "Agg"
    answers = os.dup(1)
    os.dup2(2, 1)  # what the imports print is no answer
    _import_everything()
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _end_with(partial(_run, request))
        deadline = time.monotonic() + request["kill_after_s"]
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.02)
        os.write(answers, f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
    os._exit(0)  # taking all modules apart takes seconds


if __name__ == "__main__":
    main()

"""Servers of a reward model that the run starts: stock SGLang, watched, started again at the same address, put to sleep
while others have their devices. They stand where the launcher places them. A model with one label gives numbers, a
judge (`served.judge`) writes verdicts.

SGLang gives the head of a Qwen2 or Qwen3 classifier a bias, which transformers' checkpoints lack, and leaves it as it
was made: random, another one on each replica. It is served from a directory of links that adds the bias 0.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file

from rlhf_megatron.checkpoint.hf_reader import INDEX, HFReader, read_json
from rlhf_megatron.config.schema import RewardModelConfig, RewardTermConfig
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.resharding.shards import EngineLayout
from rlhf_megatron.rewards.endpoint import EndpointError
from rlhf_megatron.rewards.scorers.llm_judge import PROBE as JUDGE_PROBE
from rlhf_megatron.rewards.scorers.llm_judge import certainty_of
from rlhf_megatron.rewards.scorers.reward_server import PROBE, TOLERANCE, compare, number_of
from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.process import EngineServers, Place, Progress, here, write_private
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.environment import Machine, SGLangEnvironment, check_sglang, on_cpu
from rlhf_megatron.rollout.sglang.meeting import MeetingPlace, Ports, loopback
from rlhf_megatron.rollout.sglang.process import SGLangLaunch

logger = logging.getLogger(__name__)
WITHOUT_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
HEAD, BIAS = "score.weight", "score.bias"
BIAS_FILE = "score_bias.safetensors"
FOLDER, SERVER = "reward_servers", "reward"  # in the run directory; begins their names
SCORE, CHAT = "/classify", "/v1/chat/completions"
JUDGE_TOLERANCE = 0.5  # of a log-prob: half-precision kernels differ by less, lost or other weights by more
MEMORY_S = 120.0  # to release memory, or to get it
CPU_BACKUP = "enable-weights-cpu-backup"  # or the weights of a server that slept come back without contents


def check_served(setup: EngineSetup, model: RewardModelConfig) -> None:
    """Raises ValueError where servers of the reward model cannot be started. Starts none."""
    load_tokenizer(str(model.path))
    _environment(setup, model)


class ModelServers:
    """A context manager, which stops the servers in the end. Thread-safe."""

    def __init__(
        self,
        setup: EngineSetup,
        model: RewardModelConfig,
        run_dir: Path,
        progress: Progress | None = None,
        place: Place = here,
    ) -> None:
        """Start all, and have each score a text. `setup`: of the run's engines.

        Raises ValueError for what a user can mend, EngineError where a server does not start.
        """
        self.rollout, self.model = setup.rollout, model
        self._folder = run_dir / FOLDER
        self.num_restarts = 0
        self._is_judge = self.model.served.judge is not None
        self._tolerance = JUDGE_TOLERANCE if self._is_judge else TOLERANCE
        self._probe_ids = list(load_tokenizer(Path(str(self.model.path))).encode(PROBE))
        self._lock = threading.RLock()  # held by who starts a server again, or puts them to sleep
        self._is_asleep = False
        self._given_up: set[str] = set()
        self._has_ended = threading.Event()
        launches = server_launches(setup, model, run_dir)
        self.servers = EngineServers([*map(place, launches)], self.rollout.startup_timeout_s, progress)
        try:
            for launch, address in zip(launches, self.servers.addresses, strict=True):
                launch.port = urlsplit(address.url).port  # for good: rewards know it
                write_private(self._key_of(address), address.token)
            self._scores = {address.name: self._score(address) for address in self.servers.addresses}
            compare(self._scores, self._tolerance)
        except EndpointError as error:
            self.servers.stop()
            raise ValueError(str(error)) from error
        except BaseException:
            self.servers.stop()
            raise
        self._watch = threading.Thread(target=self._keep, name="reward-servers", daemon=True)

    def __enter__(self) -> ModelServers:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self.servers.stop()
        self._watch.join()

    def _key_of(self, address: EngineAddress) -> Path:
        return self._folder / f"{address.name}.key"

    def term(self) -> RewardTermConfig:
        """Return the reward by which they score samples."""
        model, rollout, path = self.model, self.rollout, CHAT if self._is_judge else SCORE
        params: dict[str, Any] = {
            "servers": [
                {"url": f"{address.url}{path}", "key_file": str(self._key_of(address))}
                for address in self.servers.addresses
            ],
            "patience_s": rollout.startup_timeout_s + rollout.health_interval_s,  # so long one that ended is away
        }
        if model.served.judge is not None:
            return RewardTermConfig("llm_judge", model.weight, params | model.served.judge)
        params |= {"ending": model.served.ending, "tokenizer": model.path}
        params |= {"mean": model.mean, "std": model.std, "activation": model.activation}
        return RewardTermConfig("reward_server", model.weight, params)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the run so far."""
        return {"reward/server_restarts": float(self.num_restarts), "reward/servers": float(len(self._live()))}

    def sleep(self) -> None:
        """The servers give their devices' memory back; one that does not is ended. Safe to call twice."""
        with self._lock:
            if self._is_asleep:
                return
            for address in self._live():
                try:  # a server ends itself when it is asked to before it has put its last batch away
                    HttpClient(address).post(f"/flush_cache?timeout={MEMORY_S / 2:g}", {}, MEMORY_S)
                    HttpClient(address).post("/release_memory_occupation", {}, MEMORY_S)
                except EngineError as error:
                    logger.warning("%s does not give its memory back, and is ended: %s", address.name, error)
                    self.servers.kill(address.name)
            self._is_asleep = True

    def wake(self) -> None:
        """Undo `sleep`: each scores as before, or is started again. Safe to call twice."""
        with self._lock:
            if not self._is_asleep:
                return
            self._is_asleep = False
            for address in self._live():
                try:
                    HttpClient(address).post("/resume_memory_occupation", {}, MEMORY_S)
                    self._check(address)
                except (EngineError, EndpointError) as error:
                    self._restart(address, str(error))

    def _live(self) -> list[EngineAddress]:
        return [one for one in self.servers.addresses if self.servers.ending(one.name) is None]

    def _check(self, address: EngineAddress) -> None:
        score, before = self._score(address), self._scores[address.name]
        if abs(score - before) > self._tolerance * max(1.0, abs(before)):
            raise EngineError(
                f"{address.name} gives a probe {score:g} and gave it {before:g}: its weights have changed."
            )

    def _score(self, address: EngineAddress) -> float:
        """Return the score of a probe; of a judge, the log-prob of its first token."""
        client, limit_s = HttpClient(address), self.rollout.health_timeout_s
        if self._is_judge:
            return certainty_of(client.post(CHAT, JUDGE_PROBE, limit_s), address.url)
        return number_of(client.post(SCORE, {"input_ids": self._probe_ids}, limit_s), address.url)

    def _keep(self) -> None:
        """Start servers again that have ended, or do not score as they did."""
        while not self._has_ended.wait(self.rollout.health_interval_s):
            for address in self.servers.addresses:
                with self._lock:
                    if self._is_asleep or self._has_ended.is_set() or address.name in self._given_up:
                        continue
                    if (why := self._trouble(address)) is not None:
                        self._restart(address, why)

    def _trouble(self, address: EngineAddress) -> str | None:
        try:
            self._check(address)
        except (EngineError, EndpointError) as error:
            return self.servers.ending(address.name) or str(error)
        return None

    def _restart(self, address: EngineAddress, why: str) -> None:
        """Restart a server, at most `rollout.max_engine_restarts` times in all; then the others score alone."""
        most = self.rollout.max_engine_restarts
        if self._has_ended.is_set():
            return
        if self.num_restarts >= most:
            self._given_up.add(address.name)
            self.servers.kill(address.name)
            logger.error("%s is left out: %s. rollout.max_engine_restarts (%d) are used up.", address.name, why, most)
            return
        self.num_restarts += 1
        logger.warning("%s is started again: %s", address.name, why)
        try:
            found = self.servers.restart(address.name)
            if found.url != address.url:
                raise EngineError(
                    f"it got another port ({found.url}) than rewards ask ({address.url}); the others score"
                )
            self._check(found)
        except (EngineError, EndpointError) as error:
            logger.error("%s was not started again: %s", address.name, error)


def with_bias(model: Path, target: Path, is_made: bool = False) -> Path:
    """Return the directory to serve: `model`, or `target`, where that needs a bias 0 of the head: links to its files.
    `is_made`: another process has made it, if this machine sees its folder."""
    reader = HFReader(model)
    architectures = read_json(model / "config.json").get("architectures") or ()
    if not set(WITHOUT_BIAS).intersection(architectures) or BIAS in reader.names:
        return model
    if is_made and (target / INDEX).exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    for file in [*target.iterdir()]:
        file.unlink()
    for file in model.iterdir():
        if file.name != INDEX:
            (target / file.name).symlink_to(file.resolve())
    weight_map = {name: reader.file_of(name) for name in reader.names} | {BIAS: BIAS_FILE}
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({BIAS: torch.zeros(reader.shape_of(HEAD)[0])}, target / BIAS_FILE, {"format": "pt"})
    return target


def _environment(setup: EngineSetup, model: RewardModelConfig) -> SGLangEnvironment:
    """Raises ValueError."""
    served = model.served
    try:
        return check_sglang(
            served.python, served.args, served.env, num_engines=served.num_servers, machine=_machine(setup)
        )
    except ValueError as error:
        text = str(error).replace("rollout.sglang.", "reward_model.served.")
        text = text.replace("rollout.num_engines", "reward_model.served.num_servers")
        raise ValueError(text.replace("rollout.engine: local", "reward_model.served.num_servers: 0")) from error


def _machine(setup: EngineSetup) -> Machine:
    """This machine's GPUs: the trainer's ranks and the engines take the first of them."""
    rollout = setup.rollout
    given = {name.replace("_", "-"): value for name, value in rollout.sglang.args.items()}
    found = setup.machine(is_placed=setup.trainer.runtime == "ray" or setup.trainer.nnodes > 1)
    taken = found.num_trainer
    if not rollout.endpoints and not on_cpu(given, rollout.sglang.env):
        taken += rollout.num_engines * EngineLayout.of(rollout).tp
    return replace(found, num_trainer=taken)


def server_launches(
    setup: EngineSetup, model: RewardModelConfig, run_dir: Path, is_made: bool = False
) -> list[SGLangLaunch]:
    """Return how each server is started. `is_made`: see `with_bias`. Raises ValueError."""
    served, installed, folder = model.served, _environment(setup, model), run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    files = with_bias(Path(str(model.path)), folder / "model", is_made)
    if installed.warning is not None:
        logger.warning("%s", installed.warning)
    of_user = installed.arguments.values
    own: dict[str, object] = {
        "model-path": str(files.absolute()),
        "host": "127.0.0.1",
        "dtype": served.dtype or setup.model.dtype,
    }
    if served.judge is None:
        own |= {"is-embedding": True, "skip-tokenizer-init": True}
    if setup.rollout.colocated and not on_cpu(of_user, served.env):
        own[CPU_BACKUP] = True
    settings = {name: value for name, value in own.items() if name not in of_user} | installed.arguments.settings
    ports, meeting_place, key = Ports(), MeetingPlace(), secrets.token_hex(32)
    return [
        SGLangLaunch(
            name=f"{SERVER}{index}",
            folder=folder,
            installed=installed,
            settings={**settings, **devices},
            env=installed.env,
            interfaces=loopback(served.env, os.environ, is_one_machine=True),
            transfer_dir=folder,
            ports=ports,
            meeting_place=meeting_place,
            key=key,
            is_engine=False,
        )
        for index, devices in enumerate(installed.devices)
    ]

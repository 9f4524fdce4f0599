"""Servers of a reward model that the run starts: stock SGLang, watched, started again at the same
address, put to sleep while others have their devices. They stand where the launcher places them. A
model with one label gives numbers, a judge (`served.judge`) writes verdicts.

SGLang gives the head of a Qwen2 or Qwen3 classifier a bias, which transformers' checkpoints lack,
and leaves it as it was made: random, another one on each replica. It is served from a directory of
links that adds the bias 0. Of a Llama or Gemma 2 classifier SGLang drops a bias that the files
have: the run adds it to the scores. A token classifier of one label, which SGLang does not know, is
served as the sequence classifier of the same tensors.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from rlhf_megatron.config.schema import RewardModelConfig, RewardTermConfig
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.data.vocabulary_size import require_all_tokens_known
from rlhf_megatron.rewards.reward_endpoint import RewardEndpointError
from rlhf_megatron.rewards.scorers.llm_judge import PROBE as JUDGE_PROBE
from rlhf_megatron.rewards.scorers.llm_judge import read_first_log_prob
from rlhf_megatron.rewards.scorers.reward_server import (
    PROBE,
    TOLERANCE,
    check_same_scores,
    read_single_score,
)
from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    compute_stall_limit_s,
)
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.fleet.server_process import (
    EngineServers,
    LaunchPlacement,
    StartProgress,
    launch_here,
    write_private_file,
)
from rlhf_megatron.rollout.fleet.server_watch import RestartBudget
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.rollout.sglang.rendezvous import (
    PortAllocator,
    RendezvousFiles,
    make_loopback_environment,
)
from rlhf_megatron.rollout.sglang.sglang_environment import (
    MachineGpus,
    SGLangEnvironment,
    check_sglang_environment,
    runs_on_cpu,
)
from rlhf_megatron.rollout.sglang.sglang_launch import SGLangServerLaunch
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config, read_json_object
from rlhf_megatron.weights.shard_plan import EngineLayout
from rlhf_megatron.weights.tensor_file import write_tensor_file
from rlhf_megatron.weights.value_model import (
    BIAS,
    SEQUENCE_CLASSIFIER,
    SGLANG_HEADS_WITH_BIAS,
    SGLANG_HEADS_WITHOUT_BIAS,
    TOKEN_CLASSIFIER,
    WEIGHT,
    needs_zero_bias,
    read_head_bias,
    warn_of_dropped_bias,
)
from rlhf_megatron.weights.weight_sets import INDEX
from rlhf_megatron.write_errors import write_text_file

logger = logging.getLogger(__name__)
BIAS_FILE = "score_bias.safetensors"
FOLDER = "reward_servers"  # in the run directory
SERVER = "reward"  # begins their names
SCORE = "/classify"
CHAT = "/v1/chat/completions"
# of a log-prob: half-precision kernels differ by less, lost or other weights by more
JUDGE_TOLERANCE = 0.5
MEMORY_S = 120.0  # to release memory, or to get it
# or the weights of a server that slept come back without contents
CPU_BACKUP = "enable-weights-cpu-backup"


def check_model_servers(engine_setup: EngineSetup, reward_model: RewardModelConfig) -> None:
    """Raise ValueError where servers of the reward model could not be started, without starting
    any.
    """
    path = Path(str(reward_model.path))
    vocab_size = read_json_object(path / "config.json").get("vocab_size")
    tokenizer = load_tokenizer(str(path))
    if isinstance(vocab_size, int):
        remedy = "put the tokenizer of this model into the directory"
        require_all_tokens_known(tokenizer.vocab_size, vocab_size, str(path), remedy)
    if reward_model.served.judge is None:
        warn_of_dropped_bias(path)
    else:
        check_judge_weights(path)
    _check_server_environment(engine_setup, reward_model)


def check_judge_weights(model_dir: Path) -> None:
    """Check the files of a language model that servers read by themselves. Raise ValueError for
    files that do not fit config.json, such as a head that the servers would leave out. The files of
    a family that has no weight table here are not checked.
    """
    try:
        table = make_weight_table(read_hf_config(model_dir))
    except ValueError as error:
        logger.info("the weights of %s are not checked: %s", model_dir, error)
        return
    HFReader(model_dir).check_against_table(table)


class RewardModelServers:
    """The running servers of the reward model. A context manager, which stops the servers at the
    end. Thread-safe.
    """

    def __init__(
        self,
        engine_setup: EngineSetup,
        reward_model: RewardModelConfig,
        run_dir: Path,
        progress: StartProgress | None = None,
        place: LaunchPlacement = launch_here,
    ) -> None:
        """Start all servers, wait until they are healthy, and let each score a text. A server that
        is killed while it starts is started again, `rollout.max_engine_restarts` times at most over
        all. `engine_setup` is that of the run's engines.

        Raise ValueError for what a user can fix, EngineError where a server does not start.
        """
        self.rollout_config = engine_setup.rollout
        self.reward_model = reward_model
        self._server_dir = run_dir / FOLDER
        self._longest_probe_s = 0.0  # of the probes that were answered
        self._is_judge = self.reward_model.served.judge is not None
        self._tolerance = JUDGE_TOLERANCE if self._is_judge else TOLERANCE
        self._probe_ids = list(load_tokenizer(Path(str(self.reward_model.path))).encode(PROBE))
        self._lock = threading.RLock()  # held by who starts a server again, or puts them to sleep
        self._is_asleep = False
        self._abandoned_names: set[str] = set()
        self._has_ended = threading.Event()
        self._dropped_bias = (
            0.0 if self._is_judge else find_dropped_bias(Path(str(self.reward_model.path)))
        )
        launches = make_server_launches(engine_setup, reward_model, run_dir)
        self.servers = EngineServers(
            [*map(place, launches)],
            self.rollout_config.startup_timeout_s,
            progress,
            self.rollout_config.max_engine_restarts,
        )
        self.num_restarts = self.servers.num_start_restarts
        self._restart_budget = RestartBudget(
            self.rollout_config.max_engine_restarts, self.num_restarts
        )
        try:
            for launch, address in zip(launches, self.servers.addresses, strict=True):
                launch.fixed_port = urlsplit(address.url).port  # for good: rewards know it
                write_private_file(self._find_key_file(address), address.token)
            self._probe_scores = {
                address.name: self._score_probe(address) for address in self.servers.addresses
            }
            check_same_scores(self._probe_scores, self._tolerance)
        except RewardEndpointError as error:
            self.servers.stop()
            raise ValueError(str(error)) from error
        except BaseException:
            self.servers.stop()
            raise
        self._watch_thread = threading.Thread(
            target=self._restart_failed_servers, name="reward-servers", daemon=True
        )

    def __enter__(self) -> RewardModelServers:
        """Start the thread that restarts failed servers."""
        self._watch_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the servers and the thread."""
        self._has_ended.set()
        self.servers.stop()
        self._watch_thread.join()

    def _find_key_file(self, address: EngineAddress) -> Path:
        """Return the path of the file with the server's key."""
        return self._server_dir / f"{address.name}.key"

    def make_reward_term(self) -> RewardTermConfig:
        """Return the reward term by which these servers score samples: llm_judge for a judge, else
        reward_server.
        """
        model = self.reward_model
        rollout = self.rollout_config
        path = CHAT if self._is_judge else SCORE
        params: dict[str, Any] = {
            "servers": [
                {"url": f"{address.url}{path}", "key_file": str(self._find_key_file(address))}
                for address in self.servers.addresses
            ],
            "patience_s": rollout.startup_timeout_s
            + rollout.health_interval_s,  # so long one that ended is away
        }
        if model.served.judge is not None:
            return RewardTermConfig("llm_judge", model.weight, params | model.served.judge)
        params |= {"ending": model.served.ending, "tokenizer": model.path}
        params |= {"skip_special_tokens": model.served.skip_special_tokens}
        params |= make_score_params(model, self._dropped_bias)
        return RewardTermConfig("reward_server", model.weight, params)

    def collect_metrics(self) -> dict[str, float]:
        """Return the number of restarts so far and the number of servers that run."""
        return {
            "reward/server_restarts": float(self.num_restarts),
            "reward/servers": float(len(self._list_live_addresses())),
        }

    def sleep(self) -> None:
        """Make the servers release their devices' memory; end a server that does not. Safe to call
        twice.
        """
        with self._lock:
            if self._is_asleep:
                return
            for address in self._list_live_addresses():
                # a server ends itself when it is asked to before it has put its last batch away
                try:
                    HttpClient(address).post(f"/flush_cache?timeout={MEMORY_S / 2:g}", {}, MEMORY_S)
                    HttpClient(address).post("/release_memory_occupation", {}, MEMORY_S)
                except EngineError as error:
                    logger.warning(
                        "%s does not give its memory back, and is ended: %s", address.name, error
                    )
                    self.servers.kill_server(address.name)
            self._is_asleep = True

    def wake(self) -> None:
        """Make the servers take their memory back after `sleep`. A server that does not score the
        probe as before is restarted. Safe to call twice.
        """
        with self._lock:
            if not self._is_asleep:
                return
            self._is_asleep = False
            for address in self._list_live_addresses():
                try:
                    HttpClient(address).post("/resume_memory_occupation", {}, MEMORY_S)
                    self._check_probe_score(address)
                except (EngineError, RewardEndpointError) as error:
                    self._restart_server(address, str(error))

    def _list_live_addresses(self) -> list[EngineAddress]:
        """Return the addresses of the servers whose processes run."""
        return [
            one for one in self.servers.addresses if self.servers.describe_exit(one.name) is None
        ]

    def _check_probe_score(self, address: EngineAddress) -> None:
        """Raise EngineError where the server scores the probe differently than at its start,
        RewardEndpointError where it gives no score.
        """
        score = self._score_probe(address)
        before = self._probe_scores[address.name]
        if abs(score - before) > self._tolerance * max(1.0, abs(before)):
            raise EngineError(
                f"{address.name} gives a probe {score:g} and gave it {before:g}: its weights"
                " have changed."
            )

    def _score_probe(self, address: EngineAddress) -> float:
        """Return the server's score of a probe; for a judge, the log-prob of its first token."""
        client = HttpClient(address)
        # the probe waits behind the step that is under way, which may be long
        limit_s = compute_stall_limit_s(self.rollout_config.health_timeout_s, self._longest_probe_s)
        began_at = time.monotonic()
        if self._is_judge:
            score = read_first_log_prob(client.post(CHAT, JUDGE_PROBE, limit_s), address.url)
        else:
            answer = client.post(SCORE, {"input_ids": self._probe_ids}, limit_s)
            score = read_single_score(answer, address.url)
        self._longest_probe_s = max(self._longest_probe_s, time.monotonic() - began_at)
        return score

    def _restart_failed_servers(self) -> None:
        """Restart, in a thread, servers that have ended or do not score as at their start, until
        the servers stop. Do nothing while they sleep.
        """
        while not self._has_ended.wait(self.rollout_config.health_interval_s):
            for address in self.servers.addresses:
                with self._lock:
                    if (
                        self._is_asleep
                        or self._has_ended.is_set()
                        or address.name in self._abandoned_names
                    ):
                        continue
                    if (why := self._find_trouble(address)) is not None:
                        self._restart_server(address, why)

    def _find_trouble(self, address: EngineAddress) -> str | None:
        """Return why the server must be restarted, or None where it scores the probe as before."""
        try:
            self._check_probe_score(address)
        except (EngineError, RewardEndpointError) as error:
            return self.servers.describe_exit(address.name) or str(error)
        return None

    def _restart_server(self, address: EngineAddress, reason: str) -> None:
        """Restart a server; a failure is logged. After `rollout.max_engine_restarts` restarts of
        all servers together, kill it and leave it out.
        """
        most = self.rollout_config.max_engine_restarts
        if self._has_ended.is_set():
            return
        if not self._restart_budget.take_restart():
            self._abandoned_names.add(address.name)
            self.servers.kill_server(address.name)
            logger.error(
                "%s is left out: %s. rollout.max_engine_restarts (%d) are used up.",
                address.name,
                reason,
                most,
            )
            return
        self.num_restarts += 1
        logger.warning("%s is started again: %s", address.name, reason)
        try:
            found = self.servers.restart_server(address.name)
            if found.url != address.url:
                raise EngineError(
                    f"it got another port ({found.url}) than rewards ask ({address.url}); the"
                    " others score"
                )
            self._check_probe_score(found)
        except (EngineError, RewardEndpointError) as error:
            logger.error("%s was not started again: %s", address.name, error)


def make_score_params(model: RewardModelConfig, dropped_bias: float) -> dict[str, Any]:
    """Return the parameters of `reward_server` that make rewards of the servers' scores, which lack
    `dropped_bias`: a mean that is lower by the bias adds the bias.
    """
    mean = model.mean - dropped_bias
    return {"mean": mean, "std": model.std, "activation": model.activation}


def make_served_model_dir(model_dir: Path, target_dir: Path, may_exist: bool = False) -> Path:
    """Return the directory to serve: `model_dir`, or where the model is a token classifier or its
    head needs a bias of 0, `target_dir`, which gets links to the model's files, the bias and the
    name of the class. With `may_exist` use a `target_dir` that another process has made, if this
    machine sees it.
    """
    reader = HFReader(model_dir)
    hf_config = read_json_object(model_dir / "config.json")
    served_config = {**hf_config, "architectures": _list_served_classes(hf_config)}
    is_renamed = served_config["architectures"] != (hf_config.get("architectures") or [])
    lacks_bias = needs_zero_bias(served_config) and BIAS not in reader.names
    if not is_renamed and not lacks_bias:
        return model_dir
    if may_exist and (target_dir / INDEX).exists():
        return target_dir
    target_dir.mkdir(parents=True, exist_ok=True)
    for file in [*target_dir.iterdir()]:
        file.unlink()
    for file in model_dir.iterdir():
        if file.name != INDEX and not (is_renamed and file.name == "config.json"):
            (target_dir / file.name).symlink_to(file.resolve())
    if is_renamed:
        write_text_file(target_dir / "config.json", json.dumps(served_config, indent=2) + "\n")
    weight_map = {name: reader.get_file_name(name) for name in reader.names}
    if lacks_bias:
        weight_map[BIAS] = BIAS_FILE
        num_labels = reader.read_shape(WEIGHT)[0]
        write_tensor_file(target_dir / BIAS_FILE, {BIAS: torch.zeros(num_labels)}, {"format": "pt"})
    write_text_file(target_dir / INDEX, json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target_dir


def _list_served_classes(hf_config: Mapping[str, Any]) -> list[str]:
    """Return the architectures of config.json under which SGLang serves the model: a token
    classifier's name becomes that of the sequence classifier, where SGLang has one.
    """
    names = [str(name) for name in hf_config.get("architectures") or ()]
    known_classes = SGLANG_HEADS_WITH_BIAS | SGLANG_HEADS_WITHOUT_BIAS
    renamed = [name.replace(TOKEN_CLASSIFIER, SEQUENCE_CLASSIFIER) for name in names]
    return [
        other if other in known_classes else name
        for name, other in zip(names, renamed, strict=True)
    ]


def find_dropped_bias(model_dir: Path) -> float:
    """Return the bias of the head that SGLang drops from each score of the model; 0.0 where it
    reads the bias, or where there is none.
    """
    classes = _list_served_classes(read_json_object(model_dir / "config.json"))
    if SGLANG_HEADS_WITHOUT_BIAS.isdisjoint(classes):
        return 0.0
    bias = read_head_bias(HFReader(model_dir))
    if bias:
        logger.warning(
            "%s has a %s of %g, which SGLang's %s drops; the run adds it to the servers' scores.",
            model_dir,
            BIAS,
            bias,
            ", ".join(classes),
        )
    return bias


def _check_server_environment(
    engine_setup: EngineSetup, reward_model: RewardModelConfig
) -> SGLangEnvironment:
    """Return the environment in which the servers run. Raise ValueError, in terms of
    reward_model.served, where they cannot run.
    """
    served = reward_model.served
    try:
        return check_sglang_environment(
            served.python,
            served.args,
            served.env,
            num_engines=served.num_servers,
            machine_gpus=_describe_machine(engine_setup),
        )
    except ValueError as error:
        text = str(error).replace("rollout.sglang.", "reward_model.served.")
        text = text.replace("rollout.num_engines", "reward_model.served.num_servers")
        raise ValueError(
            text.replace("rollout.engine: local", "reward_model.served.num_servers: 0")
        ) from error


def _describe_machine(engine_setup: EngineSetup) -> MachineGpus:
    """Return this machine's GPUs, of which the trainer's ranks and the engines take the first."""
    rollout = engine_setup.rollout
    given = {name.replace("_", "-"): value for name, value in rollout.sglang.args.items()}
    found = engine_setup.make_machine_gpus(
        is_placed_by_launcher=engine_setup.trainer.runtime == "ray"
        or engine_setup.trainer.nnodes > 1
    )
    taken = found.num_trainer_gpus
    if not rollout.endpoints and not runs_on_cpu(given, rollout.sglang.env):
        taken += rollout.num_engines * EngineLayout.from_rollout_config(rollout).tp
    return replace(found, num_trainer_gpus=taken)


def make_server_launches(
    engine_setup: EngineSetup,
    reward_model: RewardModelConfig,
    run_dir: Path,
    may_exist: bool = False,
) -> list[SGLangServerLaunch]:
    """Return a launch for each server, and write the served directory of the model where one is
    needed (`may_exist`: see `make_served_model_dir`). Raise ValueError where the servers cannot
    run.
    """
    served = reward_model.served
    installed = _check_server_environment(engine_setup, reward_model)
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    files = make_served_model_dir(Path(str(reward_model.path)), folder / "model", may_exist)
    if installed.warning is not None:
        logger.warning("%s", installed.warning)
    of_user = installed.arguments.value_by_option
    own: dict[str, object] = {
        "model-path": str(files.absolute()),
        "host": "127.0.0.1",
        "dtype": served.dtype or engine_setup.model.dtype,
    }
    if served.judge is None:
        own |= {"is-embedding": True, "skip-tokenizer-init": True}
    if engine_setup.rollout.colocated and not runs_on_cpu(of_user, served.env):
        own[CPU_BACKUP] = True
    settings = {
        name: value for name, value in own.items() if name not in of_user
    } | installed.arguments.file_settings
    ports = PortAllocator()
    meeting_place = RendezvousFiles()
    key = secrets.token_hex(32)
    return [
        SGLangServerLaunch(
            name=f"{SERVER}{index}",
            folder=folder,
            environment=installed,
            settings={**settings, **devices},
            server_env=installed.server_env,
            interface_env=make_loopback_environment(served.env, os.environ, is_one_machine=True),
            transfer_dir=folder,
            port_allocator=ports,
            rendezvous_files=meeting_place,
            shared_key=key,
            is_engine=False,
        )
        for index, devices in enumerate(installed.device_arguments)
    ]

"""Reward models and judges behind stock SGLang servers of the run: scores by transformers, one
killed, all slept.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from config_samples import VALID
from places import MODEL, SUPPORT
from reward_model_tools import VERDICT, Scored
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, needs_sglang, sglang_python
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import RewardConfig, RunConfig
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.service import reward_model_servers
from rlhf_megatron.rewards.service.reward_model_servers import RewardModelServers
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer
from rlhf_megatron.rollout.engine_interface import EngineAddress
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.runtime.torchrun.machine_keeper import MachineKeeper
from rlhf_megatron.runtime.torchrun.machine_servers import ServerMachines
from rlhf_megatron.weights.hf_reader import HFReader

pytestmark = [pytest.mark.long, pytest.mark.sglang, needs_sglang]
ENDING = "="


def run_config(directory: Path, **rollout: object) -> RunConfig:
    path = directory / "run.yaml"
    served = {
        "num_servers": 2,
        "dtype": "float32",
        "ending": ENDING,
        "python": str(sglang_python()),
    }
    arguments = {**CPU_ARGUMENTS, "context_length": 64, "disable_radix_cache": True}
    path.write_text(
        yaml.safe_dump(
            {
                **yaml.safe_load(VALID),
                "reward": {"name": "overlong", "params": {"max_len": 4, "buffer": 4}},
                "reward_model": {
                    "path": str(directory / "judge"),
                    "weight": 2.0,
                    "mean": 0.1,
                    "std": 3.0,
                    "served": {**served, "args": arguments, "env": CPU_ENV},
                },
            }
        )
    )
    config = read_run_config(path).config
    limits = {"startup_timeout_s": STARTUP_S, "health_interval_s": 1.0, "health_timeout_s": 60.0}
    return replace(config, rollout=replace(config.rollout, **limits, **rollout))


def servers_of(config: RunConfig, folder: Path) -> RewardModelServers:
    return RewardModelServers(EngineSetup.from_config(config), config.reward_model, folder)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """As the job reward-model or transformers writes it, without a bias of the head."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(
        AutoConfig.from_pretrained(MODEL, num_labels=1)
    ).eval()
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder / "judge")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / "judge")
    assert "score.bias" not in HFReader(folder / "judge").names
    return folder, model


def samples(count: int) -> list[RewardSample]:
    draw = random.Random(1)
    texts = ["".join(draw.choices("0123456789+", k=draw.randrange(1, 30))) for _ in range(count)]
    return [
        RewardSample(f"{number % 9}+", text, "", "s", "stop", 2)
        for number, text in enumerate(texts)
    ]


def by_transformers(model: PreTrainedModel, asked: list[RewardSample]) -> list[float]:
    tokenizer = load_tokenizer(MODEL)
    with torch.no_grad():
        return [
            model(
                torch.tensor([tokenizer.encode(one.prompt + one.response + ENDING)])
            ).logits.item()
            for one in asked
        ]


def await_true(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTUP_S
    while not claim():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_keeper_on_another_machine(judge: tuple[Path, PreTrainedModel]) -> None:
    """What torchrun starts there: it makes its own launches, and a server comes back at its
    address with its key.
    """
    folder, model = judge
    config = run_config(folder)
    served = replace(config.reward_model.served, machines=(1,), num_servers=1)
    config = replace(config, reward_model=replace(config.reward_model, served=served))
    with closing(
        MachineKeeper(ServerMachines.from_config(config), 1, folder, "127.0.0.1")
    ) as keeper:

        def begun(is_again: bool) -> EngineAddress:
            keeper.handle_order(1, "reward0", "begin", [0, folder, is_again, ""])
            await_true(lambda: keeper.collect_reports()["reward0"].address is not None)
            found = keeper.collect_reports()["reward0"].address
            assert found is not None
            return found

        def score(address: EngineAddress) -> float:
            return HttpClient(address).post("/classify", {"input_ids": [3, 5, 7]}, 60.0)[
                "embedding"
            ][0]

        address = begun(is_again=False)
        with torch.no_grad():
            wanted = model(torch.tensor([[3, 5, 7]])).logits.item()
        assert score(address) == pytest.approx(wanted, abs=1e-5)
        keeper.handle_order(1, "reward0", "kill", [])
        assert begun(is_again=True) == address and score(address) == pytest.approx(wanted, abs=1e-5)


def test_servers_under_ray(judge: tuple[Path, PreTrainedModel]) -> None:
    """In a program of its own: actors start the servers, of which one is killed."""
    folder, model = judge
    asked = samples(20)
    (folder / "asked.json").write_text(json.dumps([asdict(one) for one in asked]))
    command = [
        sys.executable,
        str(SUPPORT / "ray_reward_servers_program.py"),
        str(folder / "run.yaml"),
        str(folder),
    ]
    run_config(folder)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=4 * STARTUP_S, check=True, cwd=SUPPORT
    )
    told = json.loads(done.stdout.strip().splitlines()[-1])
    wanted = [(score - 0.1) / 3 for score in by_transformers(model, asked)]
    assert told["first"] == pytest.approx(wanted, abs=1e-5) and told["killed"] == pytest.approx(
        wanted, abs=1e-5
    )
    assert told["num_restarts"] == 1 and told["urls"] == told["urls_again"]
    assert told["slept"] == told["woken"], "bitwise"


def test_two_servers(judge: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = judge
    asked = samples(60)
    wanted = by_transformers(model, asked)
    with servers_of(run_config(folder), folder) as servers:
        config = RewardConfig(name="overlong", params={"max_len": 4, "buffer": 4}, num_workers=4)
        with make_reward_scorer(config, folder / "log", servers.make_reward_term()) as scorer:

            def scores() -> list[float]:
                results = scorer(asked)
                assert {result.status for result in results} == {"ok"}
                parts = [result.parts["reward_model"] for result in results]
                assert [result.score for result in results] == pytest.approx(
                    [2 * p - 0.5 for p in parts]
                )
                return parts

            first = scores()
            assert first == pytest.approx([(score - 0.1) / 3 for score in wanted], abs=1e-5)
            assert statistics.pstdev(first) > 1e-2

            addresses = servers.servers.addresses
            servers.servers.get_process("reward0").send_signal(signal.SIGKILL)
            assert scores() == pytest.approx(first, abs=1e-5), "every sample, by the other"
            await_true(lambda: servers.num_restarts == 1 and servers._lock.acquire(blocking=False))
            servers._lock.release()
            assert servers.servers.addresses == addresses, "those that know them need not be told"

            def directly() -> list[float]:
                answers = [
                    HttpClient(one).post("/classify", {"input_ids": [3, 5, 7]}, 60.0)
                    for one in addresses
                ]
                return [answer["embedding"][0] for answer in answers]

            before = directly()
            assert before[0] == pytest.approx(before[1], abs=1e-6)
            servers.sleep()
            servers.sleep()
            servers.wake()
            assert directly() == before and scores() == pytest.approx(first, abs=1e-5)

            monkeypatch.setattr(reward_model_servers, "MEMORY_S", 2.0)
            servers.servers.get_process("reward1").send_signal(signal.SIGSTOP)
            servers.sleep()
            assert servers.servers.describe_exit("reward1") is not None, (
                "one that keeps its memory is ended, which gives it"
            )
            servers.wake()
            assert scores() == pytest.approx(first, abs=1e-5)
            await_true(
                lambda: servers.num_restarts == 2 and len(servers._list_live_addresses()) == 2
            )


def test_a_judge(tmp_path: Path) -> None:
    """The verdict is the digit that the model writes; another character is masked, as is text that
    it cannot spell.
    """
    judge = Scored(tmp_path / "judge", is_judge=True)
    shutil.copy(MODEL / "tokenizer.json", tmp_path / "judge")  # one that spells no other text
    config = run_config(tmp_path)
    arguments = {**config.reward_model.served.args, "skip_server_warmup": True}
    served = replace(config.reward_model.served, judge=VERDICT, ending="", args=arguments)
    config = replace(
        config, reward_model=replace(config.reward_model, served=served, mean=0.0, std=1.0)
    )
    asked = samples(40)
    wanted = [judge.score(one.prompt + one.response) for one in asked]
    assert len(set(wanted)) > 4 and None in wanted

    with servers_of(config, tmp_path) as servers:
        rewards = RewardConfig(name="zero", num_workers=4, max_error_rate=1.0)
        with make_reward_scorer(rewards, tmp_path / "log", servers.make_reward_term()) as scorer:

            def verdicts() -> list[float | None]:
                results = scorer(asked)
                assert {result.status for result in results} == {"ok", "masked:no_verdict"}
                return [result.parts.get("reward_model") for result in results]

            first = verdicts()
            assert first == pytest.approx(wanted)
            start = time.monotonic()
            [strange] = scorer([replace(asked[0], response="\u00e9")])
            assert strange.status == "masked:refused" and "answered 500" in strange.error
            assert time.monotonic() - start < STARTUP_S, (
                "not for as long as servers may take to come back"
            )
            before = [servers._score_probe(address) for address in servers.servers.addresses]
            assert before[0] == pytest.approx(before[1], abs=1e-5) and before[0] < 0.0
            servers.servers.get_process("reward1").send_signal(signal.SIGKILL)
            assert verdicts() == first, "every sample, by the other"
            await_true(lambda: servers.num_restarts == 1 and servers._lock.acquire(blocking=False))
            servers._lock.release()
            servers.sleep()
            servers.wake()
            assert [
                servers._score_probe(address) for address in servers.servers.addresses
            ] == pytest.approx(before, abs=1e-5)
            assert servers.num_restarts == 1 and verdicts() == first

"""Trainer and engines take turns: in what order memory changes hands, and that a run is the
same as without.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from config_samples import VALID
from end_to_end_tools import DP2, ONE_RANK, Finished, train, write_config
from places import ROOT
from sglang_tools import needs_sglang
from test_sglang_run import THREE_STEPS, rows_of
from test_sglang_run import train as train_shipped

from benchmarks.chaos.cases import REFERENCE_SETTINGS, choose
from benchmarks.chaos.matrix import run_case, undisturbed
from benchmarks.chaos.task import write_task
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.controller.observe.metrics import metric_catalogue as metric_names
from rlhf_megatron.controller.sync.device_turns import ColocatedDeviceTurns, find_largest_memory
from rlhf_megatron.ranks.workers.rank_reports import MemoryReport
from rlhf_megatron.rollout.engine_interface import MEMORY_PARTS, InferenceEngine
from rlhf_megatron.runtime.role_proxies import RoleProxies

# --- the order ------------------------------------------------------------------------------------


class Hosts:
    """A WorkerGroup that writes down what it is asked. `fails_at`: a method that raises, once."""

    def __init__(self, log: list[str], layouts: Sequence[str] = ("actor",)) -> None:
        self.layouts = dict.fromkeys(layouts)
        self.log = log
        self.fails_at = ""

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        answer: Future[list[Any]] = Future()
        if method.endswith("memory_report"):
            answer.set_result([MemoryReport(100, 60, 0, 0, 7), MemoryReport(90, 80, 0, 0, 9)])
            return answer
        only = " read-only" if arguments.get("is_read_only") else ""
        self.log.append(f"{method} {' '.join(arguments['parts'])}{only}")
        if method == self.fails_at:
            self.fails_at = ""
            raise RuntimeError("a rank has failed")
        answer.set_result([None, None])
        return answer


class Fleet:
    """The memory verbs of an EngineFleet."""

    live_engines: tuple[InferenceEngine, ...] = ()

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def release_memory(self, parts: Sequence[str] = MEMORY_PARTS) -> None:
        self.log.append(f"engines release {' '.join(parts)}")

    def resume_memory(self, parts: Sequence[str] = MEMORY_PARTS) -> None:
        self.log.append(f"engines resume {' '.join(parts)}")


def make(
    roles: Sequence[str] = ("actor",), layouts: Sequence[str] = ("actor",)
) -> tuple[ColocatedDeviceTurns, list[str], Hosts]:
    """And what was asked of hosts and engines; weights that are sent again stand
    there as "stream".
    """
    log: list[str] = []
    hosts = Hosts(log, layouts)
    workers = RoleProxies(hosts)
    turns = ColocatedDeviceTurns([getattr(workers, role) for role in roles], None, Fleet(log))

    def resend() -> None:
        turns.prepare_weight_stream()
        log.append("stream")
        turns.finish_weight_stream()

    turns.resend_weights = resend
    return turns, log, hosts


TO_TRAINER = ["engines release weights kv_cache", "actor.onload gradients optimizer parameters"]
BEFORE_STREAM = ["actor.offload gradients optimizer", "engines resume weights"]
AFTER_STREAM = ["actor.offload gradients optimizer parameters", "engines resume weights kv_cache"]


def test_a_step() -> None:
    turns, log, _ = make()
    turns.give_devices_to_engines()
    assert log == [], "it is the engines' turn when they have been made"
    turns.give_devices_to_trainer()
    turns.give_devices_to_trainer()
    assert log == TO_TRAINER
    log.clear()
    turns.prepare_weight_stream()
    turns.finish_weight_stream()
    turns.give_devices_to_engines()
    assert log == BEFORE_STREAM + AFTER_STREAM


def test_without_a_new_policy_the_engines_get_the_same_weights_again() -> None:
    """After a checkpoint, or a step that trained the critic only. The critic leaves before the
    stream, all of it.
    """
    turns, log, _ = make(roles=("actor", "critic"))
    turns.give_devices_to_trainer()
    assert log == [*TO_TRAINER, "critic.onload gradients optimizer parameters"]
    log.clear()
    turns.give_devices_to_engines()
    before = [BEFORE_STREAM[0], "critic.offload gradients optimizer parameters", BEFORE_STREAM[1]]
    assert log == [*before, "stream", *AFTER_STREAM]
    log.clear()
    turns.give_devices_to_engines()
    assert log == []


def test_weights_for_an_engine_that_was_started_again_while_others_generate() -> None:
    """The engines' own weights stay, and the trainer's parameters are not copied again
    when they leave.
    """
    turns, log, _ = make(roles=("actor", "critic"))
    turns.prepare_weight_stream()
    assert log == ["engines release kv_cache", "actor.onload parameters read-only"]
    log.clear()
    turns.finish_weight_stream()
    assert log == AFTER_STREAM
    log.clear()
    turns.give_devices_to_engines()
    assert log == []


class Scorers:
    """The memory verbs of ModelServers."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def sleep(self) -> None:
        self.log.append("scorers sleep")

    def wake(self) -> None:
        self.log.append("scorers wake")


def test_servers_of_a_reward_model_have_the_devices_between_engines_and_trainer() -> None:
    """Where a group is generated after some were scored, weights come from the trainer, whose
    turn it is before.
    """
    turns, log, _ = make()
    turns._scorers = Scorers(log)  # type: ignore[assignment]
    turns.give_devices_to_scorers()
    turns.give_devices_to_scorers()
    assert log == ["engines release weights kv_cache", "scorers wake"]
    log.clear()
    turns.give_devices_to_engines()
    assert log == ["scorers sleep", *TO_TRAINER, *BEFORE_STREAM, "stream", *AFTER_STREAM]
    log.clear()
    turns.give_devices_to_scorers()
    turns.give_devices_to_trainer()
    assert log == ["engines release weights kv_cache", "scorers wake", "scorers sleep", *TO_TRAINER]


@pytest.mark.parametrize("failing", ["actor.onload", "actor.offload"])
def test_after_an_error_on_the_way_the_trainer_can_still_come_back_to_save(failing: str) -> None:
    turns, log, hosts = make()
    if failing == "actor.offload":
        turns.give_devices_to_trainer()
    hosts.fails_at = failing
    with pytest.raises(RuntimeError, match="a rank has failed"):
        if failing == "actor.offload":
            turns.prepare_weight_stream()
        else:
            turns.give_devices_to_trainer()
    log.clear()
    turns.give_devices_to_trainer()
    assert log == TO_TRAINER


def test_memory_is_the_most_that_a_rank_holds() -> None:
    """By hand. Two ranks with two models each: 100 + 30 and 90 + 50 bytes; a process of a GPU says
    what it holds.
    """
    on_cpu = [
        [MemoryReport(100, 60, 0, 0, 7), MemoryReport(30, 1, 0, 0, 7)],
        [MemoryReport(90, 80, 0, 0, 9), MemoryReport(50, 0, 0, 0, 9)],
    ]
    assert find_largest_memory(on_cpu) == {
        "device_bytes": 140,
        "host_bytes": 9,
        "offloaded_bytes": 80,
    }
    on_gpu = [[MemoryReport(100, 60, 500, 900, 7), MemoryReport(30, 1, 500, 900, 7)]]
    assert find_largest_memory(on_gpu) == {
        "device_bytes": 500,
        "host_bytes": 7,
        "offloaded_bytes": 61,
        "used_bytes": 900,
    }


def test_metrics_of_the_turns_since_the_last_time() -> None:
    turns, _, _ = make(roles=("actor", "critic"), layouts=("actor", "critic"))
    turns.give_devices_to_trainer()
    turns.give_devices_to_engines()
    metrics = turns.take_metrics()
    phases = ("training", "sync", "generation")
    assert {key for key in metrics if key.startswith("memory/")} == {
        f"memory/{phase}_{what}_bytes"
        for phase in phases
        for what in ("device", "host", "offloaded")
    }
    assert metrics["memory/sync_device_bytes"] == 100, "the critic has ranks of its own"
    assert all(metric_names.find_metric(key) is not None for key in metrics)
    assert turns.take_metrics() == {"timing_s/turns": 0.0}


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["trainer.nnodes=2"],
            (
                "rollout.colocated (true) needs an engine on each machine with ranks, 0 to 1,"
                " and no other"
            ),
        ),
        (
            ["rollout.engine=sglang", "rollout.weight_transport=process_group"],
            "rollout.weight_transport (process_group) needs a device for each of its ranks",
        ),
        (
            ["rollout.engine=sglang", "rollout.router=sglang", "rollout.num_engines=2"],
            "rollout.router (sglang) would take engines for dead",
        ),
        (
            ["rollout.engine=sglang", "rollout.endpoints=[http://127.0.0.1:30000]"],
            "rollout.colocated (true) needs servers that the run starts",
        ),
        (
            ["actor.use_kl_loss=true"],
            "reference.param_offload (false) must be true with rollout.colocated",
        ),
    ],
)
def test_what_cannot_take_turns_is_refused(
    tmp_path: Path, overrides: list[str], words: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(VALID)
    found = validate_config(read_run_config(path, ["rollout.colocated=true", *overrides]))
    assert len([problem for problem in found if words in problem]) == 1, found
    without = validate_config(read_run_config(path, overrides))
    assert len(found) == len(without) + 1, "one rule is broken"


# --- whole runs -----------------------------------------------------------------------------------

COLOCATED = {"rollout.colocated": True}
BITWISE = {"trainer.deterministic": True, "trainer.save_hf": True}
NOT_COMPARED = (
    "timing_",
    "perf/",
    "memory/",
    "seconds",
    "sync/seconds",
    "checkpoint/seconds",
    "checkpoint/num_bytes",
)
TP2 = {"trainer.n_gpus_per_node": 2, "tp": 2, "pp": 1}
REFERENCE = {"actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1, "reference.param_offload": True}


def both(
    directory: Path, settings: dict[str, Any], base: Path | None = None
) -> tuple[Finished, Finished]:
    """The same run, without and with colocation."""
    runs = []
    for name, more in (("apart", {}), ("colocated", COLOCATED)):
        place = directory / name
        place.mkdir()
        config = write_config(place, **({} if base is None else {"base": base}))
        run = train(config, BITWISE | settings | more)
        assert run.exit_code == 0 and run.left_over() == [], run.console
        runs.append(run)
    return runs[0], runs[1]


def check_equal(apart: Finished, colocated: Finished) -> None:
    for kind in ("warmup", "step", "evaluation"):
        rows = [[bare(row) for row in run.rows(kind)] for run in (apart, colocated)]
        assert rows[0] == rows[1] and rows[0], kind
    names = sorted(
        str(path.relative_to(apart.run_dir)) for path in apart.run_dir.glob("hf*/*.safetensors")
    )
    assert names
    for name in names:
        digests = [
            hashlib.sha256((run.run_dir / name).read_bytes()).digest() for run in (apart, colocated)
        ]
        assert digests[0] == digests[1], name


def bare(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(NOT_COMPARED)}


@pytest.mark.dist
def test_the_trainer_holds_nothing_while_the_engines_generate(tmp_path: Path) -> None:
    """One process. The last evaluation comes after a checkpoint,
    when the trainer has the devices.
    """
    run = train(
        write_config(tmp_path),
        ONE_RANK | COLOCATED | {"trainer.save_freq": 2, "warmup.test_freq": 1},
    )
    assert run.exit_code == 0 and run.left_over() == [], run.console
    assert [row["policy/version"] for row in run.rows("step")] == [5, 6] and len(
        run.rows("evaluation")
    ) == 2
    check_memory(run)


@pytest.mark.dist
@pytest.mark.long
def test_a_colocated_run_is_bit_for_bit_one_that_is_not(tmp_path: Path) -> None:
    """Two tp ranks, a reference, checkpoints, evaluations in the warm-up, between steps and
    after the last one.
    """
    often = {
        "trainer.save_freq": 2,
        "trainer.test_samples": 8,
        "warmup.max_steps": 2,
        "warmup.test_freq": 1,
    }
    apart, colocated = both(tmp_path, TP2 | REFERENCE | often | {"trainer.test_freq": 1})
    check_equal(apart, colocated)
    assert not any(key.startswith("memory/") for row in apart.rows("step") for key in row)
    check_memory(colocated)


def check_memory(run: Finished) -> None:
    for row in run.rows("step"):
        keys = row.keys() - {"kind", "step", "seconds"}
        assert [key for key in sorted(keys) if metric_names.find_metric(key) is None] == []
        held = {
            name: row[f"memory/{name}_device_bytes"] for name in ("training", "sync", "generation")
        }
        engine = {name: row[f"memory/{name}_engine_bytes"] for name in held}
        # In float32 gradients and two moments are as large as the parameters each; step counts
        # are a few bytes.
        assert (
            held["generation"] == 0 and 4 * held["sync"] <= held["training"] < 4.01 * held["sync"]
        )
        assert engine["training"] == 0 and 0 < engine["sync"] <= engine["generation"]
        assert row["memory/generation_offloaded_bytes"] >= 0.75 * held["training"]


LONG_RUNS = [
    pytest.param(
        DP2
        | {
            "actor.megatron.use_distributed_optimizer": True,
            "actor.megatron.overlap_grad_reduce": True,
        }
        | {
            "actor.megatron.overlap_param_gather": True,
            "model.dtype": "bfloat16",
            "trainer.save_freq": 1,
        },
        None,
        id="dp2 bf16 overlapped",
    ),
    pytest.param(
        ONE_RANK
        | {"critic.num_ranks": 0, "trainer.critic_warmup": 1, "trainer.total_training_steps": 3}
        | {
            "trainer.val_before_train": False,
            "reference.param_offload": True,
            "algorithm.use_kl_in_reward": True,
        },
        ROOT / "configs" / "quickstart_ppo_pool.yaml",
        id="critic on the same rank",
    ),
    pytest.param(
        {"trainer.n_gpus_per_node": 4, "tp": 1, "pp": 2, "trainer.critic_warmup": 1}
        | {
            "trainer.total_training_steps": 3,
            "trainer.save_freq": 1,
            "actor.megatron.pipeline_model_parallel_size": 2,
        },
        ROOT / "configs" / "quickstart_ppo_pool.yaml",
        id="critic on ranks of its own",
    ),
    pytest.param(
        {"trainer.n_gpus_per_node": 4, "tp": 2, "pp": 2} | REFERENCE | {"rollout.num_engines": 2},
        None,
        id="tp2 pp2 two engines",
    ),
    pytest.param(TP2 | {"rollout.weight_transport": "disk"}, None, id="tp2 through files"),
]


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize(("settings", "base"), LONG_RUNS)
def test_in_other_layouts_and_with_a_critic(
    tmp_path: Path, settings: dict[str, Any], base: Path | None
) -> None:
    check_equal(*both(tmp_path, settings, base))


DISTURBED = (
    "inline/kill/turns.before_restore",
    "tp2/kill_controller/turns.before_stream",
    "tp2/kill_controller/turns.after_stream",
    "tp2/colocated/",
)


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize("case", choose(list(DISTURBED), []), ids=lambda case: case.name)
def test_a_disturbed_colocated_run_ends_as_one_that_is_apart_and_was_left_alone(
    case: Any, tmp_path: Path
) -> None:
    """Killed and resumed, its engine killed in each turn, told to stop: bit for bit."""
    config = write_task(tmp_path)
    settings = {key: value for key, value in case.settings.items() if key in REFERENCE_SETTINGS}
    reference = undisturbed(config, case.layout, tmp_path / "undisturbed", settings)
    assert run_case(case, config, reference, tmp_path / "case").problems == []


@needs_sglang
@pytest.mark.sglang
@pytest.mark.dist
@pytest.mark.long
def test_stock_sglang_takes_the_orders_of_each_turn(tmp_path: Path) -> None:
    """On a CPU it keeps its memory: what is shown is that it serves the weights of each sync
    after its turns.

    A checkpoint after step 2: the same version is sent twice.
    """
    saving = ("rollout.colocated=true", "trainer.save_freq=2", "trainer.desync_freq=1")
    run_dir = train_shipped("quickstart_sglang", tmp_path, *THREE_STEPS, *saving)
    steps = rows_of(run_dir, "step")
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert [row["policy/version"] for row in steps] == [2, 3, 4] and {
        row["policy/lag"] for row in steps
    } == {0}
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-4 for row in steps)
    assert {row["rollout/engine_failures"] for row in steps} == {0}
    assert {row["memory/generation_device_bytes"] for row in steps} == {0}
    assert len(rows_of(run_dir, "evaluation")) == 1

"""Rules on how engines are got: started or running ones, their keys, their router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from config_samples import VALID

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import (
    find_config_problems,
    list_file_problems,
    validate_config,
)
from rlhf_megatron.config.yaml_nodes import LoadedConfig

Load = Callable[..., LoadedConfig]
SGLANG = VALID.replace("engine: local", "engine: sglang")
ONE = "rollout.endpoints=['http://127.0.0.1:1']"
TWO = "rollout.endpoints=['http://127.0.0.1:1', 'http://localhost:2/']"
AFAR = "rollout.endpoints=['https://gpu7:30000']"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A base file and overrides, as a configuration."""

    def of(base: str, *overrides: str) -> LoadedConfig:
        path = tmp_path / "run.yaml"
        path.write_text(base)
        return read_run_config(path, list(overrides))

    return of


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [ONE],
        [TWO, "rollout.num_engines=2", "rollout.router=sglang", "rollout.sglang.python=python"],
        [TWO, "rollout.router=sglang", "rollout.max_engine_restarts=1"],
        [ONE, "rollout.sglang.api_key_file=key", "rollout.sglang.admin_api_key_file=admin"],
        [AFAR, "rollout.weight_transport=process_group"],
        [AFAR, "rollout.weight_transport=disk"],
        ["rollout.num_engines=2", "rollout.router=sglang"],
        ["rollout.sglang.env={CUDA_VISIBLE_DEVICES: '1'}", "rollout.sglang.args={tp_size: 1}"],
    ],
)
def test_engines_that_can_be(load: Load, overrides: list[str]) -> None:
    assert validate_config(load(SGLANG, *overrides)) == []


@pytest.mark.parametrize(
    ("base", "overrides", "expected"),
    [
        (
            VALID,
            [ONE],
            (
                "rollout.endpoints (['http://127.0.0.1:1']) needs rollout.engine sglang, which"
                " is local; set rollout.engine to sglang, or remove rollout.endpoints."
            ),
        ),
        (
            VALID,
            ["rollout.router=sglang", "rollout.num_engines=2"],
            "rollout.router (sglang) needs rollout.engine sglang, which is local",
        ),
        (
            SGLANG,
            [ONE, "rollout.num_engines=2"],
            "rollout.num_engines (2) must be the number of rollout.endpoints (1); remove"
            " rollout.num_engines.",
        ),
        (
            SGLANG,
            ["rollout.endpoints=['gpu7:30000']"],
            (
                "rollout.endpoints (gpu7:30000) must be http://HOST:PORT or https://HOST:PORT and"
                " nothing more; correct it."
            ),
        ),
        (
            SGLANG,
            ["rollout.endpoints=['http://127.0.0.1:1/v1']"],
            "rollout.endpoints (http://127.0.0.1:1/v1) must be http://HOST:PORT",
        ),
        (
            SGLANG,
            ["rollout.endpoints=['http://127.0.0.1:1','http://localhost:1/']"],
            (
                "rollout.endpoints (http://localhost:1/) is the same server as http://127.0.0.1:1;"
                " name each once."
            ),
        ),
        (
            SGLANG,
            [AFAR],
            (
                "rollout.endpoints (https://gpu7:30000) is on another machine, which"
                " rollout.weight_transport (tensor) does not reach; use process_group or disk, or"
                " write 127.0.0.1 if it is this machine."
            ),
        ),
        (
            SGLANG,
            [ONE, "rollout.colocated=true"],
            (
                "rollout.colocated (true) needs servers that the run starts on its own devices, but"
                " rollout.endpoints names running ones; remove either."
            ),
        ),
        (
            SGLANG,
            [ONE, "rollout.router=sglang"],
            (
                "rollout.router (sglang) has nothing to choose with one engine; remove"
                " rollout.router, or set rollout.num_engines or rollout.endpoints to more."
            ),
        ),
        (
            SGLANG,
            ["rollout.router=sglang"],
            "rollout.router (sglang) has nothing to choose with one engine",
        ),
        (
            SGLANG,
            [ONE, "rollout.sglang.args={tp_size: 2}"],
            (
                "rollout.sglang.args.tp_size (2) would be ignored because rollout.endpoints is"
                " ['http://127.0.0.1:1']; remove rollout.sglang.args.tp_size, or start the"
                " servers with them."
            ),
        ),
        (
            SGLANG,
            [ONE, "rollout.sglang.python=python"],
            "rollout.sglang.python (python) would be ignored because rollout.endpoints is",
        ),
        (
            SGLANG,
            [ONE, "rollout.sglang.env={A: b}"],
            "rollout.sglang.env.A (b) would be ignored because rollout.endpoints is",
        ),
        (
            SGLANG,
            [ONE, "rollout.max_engine_restarts=1"],
            (
                "rollout.max_engine_restarts (1) would be ignored because rollout.endpoints is"
                " ['http://127.0.0.1:1']; remove rollout.max_engine_restarts, or let the run"
                " start the servers."
            ),
        ),
        (
            SGLANG,
            ["rollout.sglang.api_key_file=key"],
            (
                "rollout.sglang.api_key_file (key) would be ignored because rollout.endpoints"
                " is []; remove rollout.sglang.api_key_file, or name the servers that want"
                " these keys in rollout.endpoints."
            ),
        ),
        (
            SGLANG,
            ["rollout.sglang.admin_api_key_file=key"],
            (
                "rollout.sglang.admin_api_key_file (key) would be ignored because"
                " rollout.endpoints is []"
            ),
        ),
        (
            SGLANG,
            ["rollout.sglang.env={RLHF_MEGATRON_TRANSFER_DIR: /x}"],
            (
                "rollout.sglang.env.RLHF_MEGATRON_TRANSFER_DIR is set by the run;"
                " set rollout.transfer_dir."
            ),
        ),
        (
            SGLANG,
            ["rollout.sglang.args={--tp-size: 2}"],
            "rollout.sglang.args.--tp-size must be written without leading dashes; use tp-size.",
        ),
        (
            SGLANG,
            ["rollout.dtype=float32", "model.dtype=bfloat16"],
            "rollout.dtype (float32) must not be wider than model.dtype (bfloat16)",
        ),
    ],
)
def test_engines_that_cannot_be(load: Load, base: str, overrides: list[str], expected: str) -> None:
    (problem,) = validate_config(load(base, *overrides))
    assert problem.replace(f"{Path.cwd()}/", "").startswith(expected)


def test_float32_engines_of_a_bfloat16_model_are_for_the_backend_fsdp(load: Load) -> None:
    """There the weights are float32 until they are sent; Megatron's are bfloat16."""
    given = ["rollout.dtype=float32", "model.dtype=bfloat16"]
    for backend, is_refused in (("megatron", True), ("fsdp", False)):
        found = validate_config(load(VALID, *given, f"actor.backend={backend}"))
        assert any("rollout.dtype" in str(problem) for problem in found) == is_refused, found


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ([], "64 on one machine"),
        (["trainer.runtime=ray"], "64 on one machine"),
        (["rollout.engine_machines=[0,1]"], "128 on 2 machines"),
        (
            [
                "rollout.engine=sglang",
                "rollout.sglang.args={nnodes: 2, tp_size: 2}",
                "rollout.weight_transport=disk",
                "rollout.engine_machines=[0,1]",
            ],
            "64 on 2 machines",
        ),
    ],
)
def test_more_engines_than_a_machine_can_start(load: Load, overrides: list[str], most: str) -> None:
    transport = "rollout.weight_transport=process_group"
    problems = find_config_problems(load(VALID, transport, *overrides, "rollout.num_engines=4096"))
    (text,) = (str(problem) for problem in problems if "num_engines (4096)" in str(problem))
    assert f"rollout.num_engines (4096) must be at most {most}: each engine is a process" in text
    fits = load(VALID, transport, *overrides, "rollout.num_engines=64")
    assert not any("num_engines" in str(problem) for problem in find_config_problems(fits))


def test_engines_of_a_cluster_of_ray_are_not_counted_by_machines(load: Load) -> None:
    ray = ["trainer.runtime=ray", "ray.address=auto", "rollout.weight_transport=process_group"]
    problems = find_config_problems(load(VALID, *ray, "rollout.num_engines=500"))
    assert not any("num_engines" in str(problem) for problem in problems)


def test_bundled_engines_take_parts_of_tensors_over_process_groups(load: Load) -> None:
    """On the trainer's one machine, from either backend."""
    given = "rollout.weight_transport=process_group"
    for backend in ("megatron", "fsdp"):
        found = validate_config(load(VALID, given, f"actor.backend={backend}"))
        assert not any(given.partition("=")[0] in str(problem) for problem in found), found
    words = (
        "rollout.weight_transport (process_group) brings parts of tensors to rollout.engine local"
        " on one machine"
    )
    assert any(
        words in str(problem) for problem in validate_config(load(VALID, given, "trainer.nnodes=2"))
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout.weight_transport=disk"],
            "rollout.weight_transport (disk) writes model directories of rollout.dtype",
        ),
        (
            [ONE],
            (
                "rollout.quantization (fp8) is of servers that the run starts, but"
                " rollout.endpoints names running ones"
            ),
        ),
    ],
)
def test_fp8_needs_servers_of_the_run_and_a_way_to_them(
    load: Load, overrides: list[str], expected: str
) -> None:
    assert validate_config(load(SGLANG, "rollout.quantization=fp8")) == []
    found = validate_config(load(SGLANG, "rollout.quantization=fp8", *overrides))
    assert any(str(problem).startswith(expected) for problem in found), found


def test_a_base_file_may_say_how_servers_would_be_started(load: Load, tmp_path: Path) -> None:
    """A later file names running ones: the settings of the earlier one are idle, and nobody
    expects them to act.
    """
    base = SGLANG.replace(
        "engine: sglang", "engine: sglang, sglang: {python: x, args: {tp_size: 2}}"
    )
    (tmp_path / "base.yaml").write_text(base)
    assert (
        validate_config(load("extends: base.yaml\nrollout: {endpoints: ['http://127.0.0.1:1']}"))
        == []
    )


def test_key_files_are_looked_at_with_the_other_files(load: Load, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret")
    key.chmod(0o644)
    loaded = load(
        SGLANG,
        ONE,
        f"rollout.sglang.api_key_file={key}",
        f"rollout.sglang.admin_api_key_file={tmp_path}/no",
    )
    problems = [
        str(problem)
        for problem in list_file_problems(loaded)
        if str(problem).startswith("rollout.")
    ]
    assert problems[0].startswith(
        f"rollout.sglang.api_key_file ({key}) must belong to you and have mode 0600; run chmod"
    )
    assert problems[1].startswith(
        f"rollout.sglang.admin_api_key_file ({tmp_path}/no) cannot be read: No such file or"
    )
    key.chmod(0o600)
    assert not [
        problem for problem in list_file_problems(loaded) if ".api_key_file" in str(problem)
    ]

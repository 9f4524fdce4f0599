"""The user's SGLang arguments against those of a version, how they are told to the server, and
which GPUs it takes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from sglang_tools import CPU_ENV, needs_sglang, sglang_python

from rlhf_megatron.rollout.sglang.sglang_arguments import (
    CheckedArguments,
    ServerOption,
    check_arguments,
    encode_options,
    parse_options,
)
from rlhf_megatron.rollout.sglang.sglang_environment import (
    MachineGpus,
    assign_gpus,
    check_sglang_environment,
)

OPTIONS = [
    ServerOption(("help", "h"), "help", "_HelpAction", 0),
    ServerOption(("tp-size", "tensor-parallel-size"), "tp_size", "_StoreAction", type="int"),
    ServerOption(("mem-fraction-static",), "mem_fraction_static", "_StoreAction", type="float"),
    ServerOption(("port",), "port", "_StoreAction", type="int"),
    ServerOption(("device",), "device", "_StoreAction", type="str"),
    ServerOption(
        ("attention-backend",),
        "attention_backend",
        "_StoreAction",
        type="str",
        choices=("fa3", "triton"),
    ),
    ServerOption(("disable-radix-cache",), "disable_radix_cache", "_StoreTrueAction", 0),
    ServerOption(("dllm-fdfo", "no-dllm-fdfo"), "dllm_fdfo", "BooleanOptionalAction", 0),
    ServerOption(("cuda-graph-bs",), "cuda_graph_bs_decode", "_StoreAction", "+", "int"),
    ServerOption(("extra-metric-labels",), "extra_metric_labels", "_StoreAction", type="loads"),
    ServerOption(("forward-hooks",), "forward_hooks", "_StoreAction", type="json_list_type"),
    ServerOption(("disable-cuda-graph",), "disable_cuda_graph", "DeprecatedStoreTrueAction", 0),
]


def check(arguments: dict[str, object]) -> CheckedArguments:
    return check_arguments(arguments, OPTIONS, "0.5.21")


def test_aliases_become_one_name() -> None:
    assert check({"tensor_parallel_size": 2, "device": "cpu"}).value_by_option == {
        "tp-size": 2,
        "device": "cpu",
    }
    assert check({"cuda_graph_bs": [1]}).value_by_option == {"cuda-graph-bs": [1]}


def test_how_values_are_told() -> None:
    found = check(
        {
            "tp_size": 2,
            "disable_radix_cache": True,
            "disable_cuda_graph": True,
            "dllm_fdfo": False,
            "cuda_graph_bs": [1, 2],
            "extra_metric_labels": {"a": "b"},
            "forward_hooks": [{"name": "x"}],
            "attention_backend": None,
        }
    )
    assert found.file_settings == {
        "tp-size": 2,
        "cuda-graph-bs": [1, 2],
        "extra-metric-labels": '{"a": "b"}',
        "forward-hooks": '[{"name": "x"}]',
    }
    assert found.command_words == (
        "--disable-radix-cache",
        "--disable-cuda-graph",
        "--no-dllm-fdfo",
    )
    assert "attention-backend" not in found.value_by_option
    assert check({"disable_radix_cache": False, "dllm_fdfo": True}).command_words == (
        "--dllm-fdfo",
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            {"attention_backed": "x"},
            r"args.attention_backed is no argument of sglang 0.5.21; did you mean attention-ba",
        ),
        (
            {"zzz": 1},
            (
                r"args.zzz is no argument of sglang 0.5.21; `python -m sglang.launch_server"
                r" --help` lists them"
            ),
        ),
        ({"tp": 1}, r"args.tp is no argument of sglang 0.5.21; did you mean tp-size"),
        ({"port": 1}, r"args.port is set by the run: a free port is taken; remove it"),
        ({"tp_size": 1, "tensor-parallel-size": 2}, r"args.tensor-parallel-size is given twice"),
        ({"tp_size": "two"}, r"args.tp_size \('two'\) must be a whole number for sglang 0.5.21"),
        ({"tp_size": 1.5}, r"args.tp_size \(1.5\) must be a whole number"),
        ({"tp_size": True}, r"args.tp_size \(True\) must be a whole number"),
        (
            {"tp_size": [1]},
            r"args.tp_size \(\[1\]\) must be one value for sglang 0.5.21, not a list",
        ),
        ({"mem_fraction_static": "most"}, r"args.mem_fraction_static \('most'\) must be a number"),
        (
            {"attention_backend": "fa33"},
            r"\('fa33'\) must be one of fa3, triton for sglang 0.5.21; did you mean fa3",
        ),
        (
            {"disable_radix_cache": "yes"},
            r"args.disable_radix_cache \('yes'\) must be true or false",
        ),
        ({"cuda_graph_bs": [1, "x"]}, r"args.cuda_graph_bs \('x'\) must be a whole number"),
        ({"cuda_graph_bs": []}, r"args.cuda_graph_bs \(\[\]\) must have an entry"),
        ({"extra_metric_labels": "{a"}, r"args.extra_metric_labels \('{a'\) must be JSON"),
    ],
)
def test_wrong_arguments_are_told_with_the_fix(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(arguments)


def test_the_list_of_arguments_survives_its_file() -> None:
    assert parse_options(encode_options(OPTIONS)) == OPTIONS
    for text in ("[]x", '[{"names": []}]', "[1]"):
        with pytest.raises(ValueError):
            parse_options(text)


def test_each_server_gets_devices_of_its_own() -> None:
    assert assign_gpus({"tp-size": 2}, {}, 2, MachineGpus(8, 4)) == [
        {"base-gpu-id": 4},
        {"base-gpu-id": 6},
    ]
    assert assign_gpus({"tp-size": 2}, {}, 2, MachineGpus(4, 4, is_shared=True)) == [
        {"base-gpu-id": 0},
        {"base-gpu-id": 2},
    ]
    assert assign_gpus({"gpu-id-step": 2}, {}, 2, MachineGpus(8, 4)) == [
        {"base-gpu-id": 4},
        {"base-gpu-id": 6},
    ]
    assert assign_gpus({}, {"CUDA_VISIBLE_DEVICES": "6,7"}, 2, MachineGpus(8, 8)) == [
        {"base-gpu-id": 0},
        {"base-gpu-id": 1},
    ]
    assert assign_gpus({}, {"CUDA_VISIBLE_DEVICES": "3"}, 1, MachineGpus()) == [{"base-gpu-id": 0}]


@pytest.mark.parametrize(
    "arguments, env, machine",
    [
        ({}, {}, MachineGpus()),  # no GPU is seen
        ({"base-gpu-id": 3}, {}, MachineGpus(2, 2)),  # the user says it
        ({"device": "cpu"}, {}, MachineGpus(2, 2)),
        ({}, {"SGLANG_USE_CPU_ENGINE": "1"}, MachineGpus(2, 2)),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, MachineGpus(2, 2)),
    ],
)
def test_where_devices_are_not_ours_to_give(
    arguments: dict[str, object], env: dict[str, str], machine: MachineGpus
) -> None:
    assert assign_gpus(arguments, env, 2, machine) == [{}, {}]


def test_too_few_devices() -> None:
    with pytest.raises(
        ValueError,
        match=r"num_engines \(2\) x tp-size \(2\) = 4 GPUs are needed beside the trainer's 6",
    ):
        assign_gpus({"tp-size": 2}, {}, 2, MachineGpus(8, 6))
    with pytest.raises(
        ValueError, match=r"3 GPUs are needed, but 2 are visible; lower either, or name the devices"
    ):
        assign_gpus({}, {}, 3, MachineGpus(2, 2, is_shared=True))
    with pytest.raises(
        ValueError, match=r"are more than rollout.sglang.env.CUDA_VISIBLE_DEVICES \(1,2\) names"
    ):
        assign_gpus({"tp-size": 4}, {"CUDA_VISIBLE_DEVICES": "1,2"}, 1, MachineGpus(8, 0))


READ = """
import json, sys
from sglang.srt.server_args import ServerArgs, prepare_server_args
found = prepare_server_args(sys.argv[1:])
print(json.dumps({name: getattr(found, name) for name in NAMES}))
"""
GIVEN: dict[str, object] = {
    "tp_size": 2,
    "data_parallel_size": 1,
    "mem_fraction_static": 0.25,
    "attention_backend": "torch_native",
    "disable_radix_cache": True,
    "disable_overlap_schedule": False,
    "dllm_fdfo": False,
    "gc_threshold": [700, 10, 10],
    "allowed_media_domains": ["a.example", "b.example"],
    "extra_metric_labels": {"a": "b c"},
    "forward_hooks": [{"name": "x y"}],
    "context_length": "16k",
    "log_level": "warning",
    "random_seed": None,
}


@needs_sglang
@pytest.mark.sglang
@pytest.mark.long
def test_arguments_arrive_as_they_were_given(tmp_path: Path) -> None:
    """SGLang's own parser reads what a server would get."""
    found = check_sglang_environment(str(sglang_python()), GIVEN, CPU_ENV, tmp_path)
    (tmp_path / "settings.yaml").write_text(
        yaml.safe_dump({"model-path": "model", **found.arguments.file_settings})
    )
    fields = [name.replace("data_parallel", "dp") for name in GIVEN]
    command = [
        found.python,
        "-c",
        READ.replace("NAMES", repr(fields)),
        "--config",
        str(tmp_path / "settings.yaml"),
    ]
    env = {**CPU_ENV, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, *found.arguments.command_words],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    expected = {**GIVEN, "context_length": 16000}
    assert yaml.safe_load(done.stdout.splitlines()[-1]) == dict(
        zip(fields, expected.values(), strict=True)
    )

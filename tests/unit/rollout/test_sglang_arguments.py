"""The user's SGLang arguments against those of a version, how they are told to the server, and which GPUs it takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from sglang_tools import CPU_ENV, needs_sglang, sglang_python

from rlhf_megatron.rollout.sglang.arguments import Arguments, Option, as_text, checked, options_from
from rlhf_megatron.rollout.sglang.environment import Machine, check_sglang, place

OPTIONS = [
    Option(("help", "h"), "help", "_HelpAction", 0),
    Option(("tp-size", "tensor-parallel-size"), "tp_size", "_StoreAction", type="int"),
    Option(("mem-fraction-static",), "mem_fraction_static", "_StoreAction", type="float"),
    Option(("port",), "port", "_StoreAction", type="int"),
    Option(("device",), "device", "_StoreAction", type="str"),
    Option(("attention-backend",), "attention_backend", "_StoreAction", type="str", choices=("fa3", "triton")),
    Option(("disable-radix-cache",), "disable_radix_cache", "_StoreTrueAction", 0),
    Option(("dllm-fdfo", "no-dllm-fdfo"), "dllm_fdfo", "BooleanOptionalAction", 0),
    Option(("cuda-graph-bs",), "cuda_graph_bs_decode", "_StoreAction", "+", "int"),
    Option(("extra-metric-labels",), "extra_metric_labels", "_StoreAction", type="loads"),
    Option(("forward-hooks",), "forward_hooks", "_StoreAction", type="json_list_type"),
    Option(("disable-cuda-graph",), "disable_cuda_graph", "DeprecatedStoreTrueAction", 0),
]


def check(arguments: dict[str, object]) -> Arguments:
    return checked(arguments, OPTIONS, "0.5.21")


def test_aliases_become_one_name() -> None:
    assert check({"tensor_parallel_size": 2, "device": "cpu"}).values == {"tp-size": 2, "device": "cpu"}
    assert check({"cuda_graph_bs": [1]}).values == {"cuda-graph-bs": [1]}


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
    assert found.settings == {
        "tp-size": 2,
        "cuda-graph-bs": [1, 2],
        "extra-metric-labels": '{"a": "b"}',
        "forward-hooks": '[{"name": "x"}]',
    }
    assert found.words == ("--disable-radix-cache", "--disable-cuda-graph", "--no-dllm-fdfo")
    assert "attention-backend" not in found.values
    assert check({"disable_radix_cache": False, "dllm_fdfo": True}).words == ("--dllm-fdfo",)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            {"attention_backed": "x"},
            r"args.attention_backed is no argument of sglang 0.5.21; did you mean attention-ba",
        ),
        ({"zzz": 1}, r"args.zzz is no argument of sglang 0.5.21; `python -m sglang.launch_server --help` lists them"),
        ({"tp": 1}, r"args.tp is no argument of sglang 0.5.21; did you mean tp-size"),
        ({"port": 1}, r"args.port is set by the run: a free port is taken; remove it"),
        ({"tp_size": 1, "tensor-parallel-size": 2}, r"args.tensor-parallel-size is given twice"),
        ({"tp_size": "two"}, r"args.tp_size \('two'\) must be a whole number for sglang 0.5.21"),
        ({"tp_size": 1.5}, r"args.tp_size \(1.5\) must be a whole number"),
        ({"tp_size": True}, r"args.tp_size \(True\) must be a whole number"),
        ({"tp_size": [1]}, r"args.tp_size \(\[1\]\) must be one value for sglang 0.5.21, not a list"),
        ({"mem_fraction_static": "most"}, r"args.mem_fraction_static \('most'\) must be a number"),
        ({"attention_backend": "fa33"}, r"\('fa33'\) must be one of fa3, triton for sglang 0.5.21; did you mean fa3"),
        ({"disable_radix_cache": "yes"}, r"args.disable_radix_cache \('yes'\) must be true or false"),
        ({"cuda_graph_bs": [1, "x"]}, r"args.cuda_graph_bs \('x'\) must be a whole number"),
        ({"cuda_graph_bs": []}, r"args.cuda_graph_bs \(\[\]\) must have an entry"),
        ({"extra_metric_labels": "{a"}, r"args.extra_metric_labels \('{a'\) must be JSON"),
    ],
)
def test_wrong_arguments_are_told_with_the_fix(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(arguments)


def test_the_list_of_arguments_survives_its_file() -> None:
    assert options_from(as_text(OPTIONS)) == OPTIONS
    for text in ("[]x", '[{"names": []}]', "[1]"):
        with pytest.raises(ValueError):
            options_from(text)


def test_each_server_gets_devices_of_its_own() -> None:
    assert place({"tp-size": 2}, {}, 2, Machine(8, 4)) == [{"base-gpu-id": 4}, {"base-gpu-id": 6}]
    assert place({"tp-size": 2}, {}, 2, Machine(4, 4, is_shared=True)) == [{"base-gpu-id": 0}, {"base-gpu-id": 2}]
    assert place({"gpu-id-step": 2}, {}, 2, Machine(8, 4)) == [{"base-gpu-id": 4}, {"base-gpu-id": 6}]
    assert place({}, {"CUDA_VISIBLE_DEVICES": "6,7"}, 2, Machine(8, 8)) == [{"base-gpu-id": 0}, {"base-gpu-id": 1}]
    assert place({}, {"CUDA_VISIBLE_DEVICES": "3"}, 1, Machine()) == [{"base-gpu-id": 0}]


@pytest.mark.parametrize(
    "arguments, env, machine",
    [
        ({}, {}, Machine()),  # no GPU is seen
        ({"base-gpu-id": 3}, {}, Machine(2, 2)),  # the user says it
        ({"device": "cpu"}, {}, Machine(2, 2)),
        ({}, {"SGLANG_USE_CPU_ENGINE": "1"}, Machine(2, 2)),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, Machine(2, 2)),
    ],
)
def test_where_devices_are_not_ours_to_give(
    arguments: dict[str, object], env: dict[str, str], machine: Machine
) -> None:
    assert place(arguments, env, 2, machine) == [{}, {}]


def test_too_few_devices() -> None:
    with pytest.raises(
        ValueError, match=r"num_engines \(2\) x tp-size \(2\) = 4 GPUs are needed beside the trainer's 6"
    ):
        place({"tp-size": 2}, {}, 2, Machine(8, 6))
    with pytest.raises(ValueError, match=r"3 GPUs are needed, but 2 are visible; lower either, or name the devices"):
        place({}, {}, 3, Machine(2, 2, is_shared=True))
    with pytest.raises(ValueError, match=r"are more than rollout.sglang.env.CUDA_VISIBLE_DEVICES \(1,2\) names"):
        place({"tp-size": 4}, {"CUDA_VISIBLE_DEVICES": "1,2"}, 1, Machine(8, 0))


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
    found = check_sglang(str(sglang_python()), GIVEN, CPU_ENV, tmp_path)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"model-path": "model", **found.arguments.settings}))
    fields = [name.replace("data_parallel", "dp") for name in GIVEN]
    command = [found.python, "-c", READ.replace("NAMES", repr(fields)), "--config", str(tmp_path / "settings.yaml")]
    env = {**CPU_ENV, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([*command, *found.arguments.words], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = {**GIVEN, "context_length": 16000}
    assert yaml.safe_load(done.stdout.splitlines()[-1]) == dict(zip(fields, expected.values(), strict=True))

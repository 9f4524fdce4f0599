"""Weights on disk change layout and come back bit for bit; what is broken is named; nothing
half-written stays.
"""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from table_samples import FAMILIES, LLAMA3_ROPE, SMALL_QWEN3, THREE_KV_HEADS, random_state, tied

from benchmarks.parity.cases import EXPERT_FAMILIES, make_state
from benchmarks.parity.fused_experts import fused
from rlhf_megatron.cli.main import main
from rlhf_megatron.weights.conversion.conversion_targets import RankFilesTarget
from rlhf_megatron.weights.conversion.conversion_writer import convert_model, write_hf_directory
from rlhf_megatron.weights.conversion.stored_model import StoredModel, open_stored_model
from rlhf_megatron.weights.conversion.weight_comparison import verify_weight_bits
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_writer import TensorSpec, open_hf_directory_writer
from rlhf_megatron.weights.megatron_dir import MegatronReader, make_disk_layout
from rlhf_megatron.weights.megatron_keys import KeyNaming

CONFIG = {**SMALL_QWEN3, "torch_dtype": "bfloat16"}
LLAMA = {**CONFIG, "model_type": "llama", "tie_word_embeddings": True}


def make_hf(directory: Path, config: dict, max_bytes: int = 1 << 30) -> Path:
    """bfloat16 weights, the final norm in float32 as some checkpoints have it."""
    state = random_state(config)
    kinds = {name: "float32" if name == "model.norm.weight" else "bfloat16" for name in state}
    tensors = {name: tensor.to(getattr(torch, kinds[name])) for name, tensor in state.items()}
    specs = [TensorSpec(name, kinds[name], tuple(t.shape)) for name, t in tensors.items()]
    (directory.parent / "companions").mkdir(exist_ok=True)
    (directory.parent / "companions" / "tokenizer.json").write_text("{}")
    with open_hf_directory_writer(
        directory, specs, config, directory.parent / "companions", max_bytes
    ) as writer:
        for name, tensor in tensors.items():
            writer.write_tensor(name, tensor)
    return directory


def write_megatron(
    model: StoredModel, out: Path, tp: int, pp: int, dtype: str | None = None, **axes: int
) -> dict[str, str]:
    items = model.make_conversion_items(dtype, tp)
    return convert_model(
        model, items, RankFilesTarget(model, items, make_disk_layout(tp, pp, **axes)), out
    )


def verify(
    source: StoredModel, out: Path, digests: dict[str, str], dtype: str | None = None
) -> None:
    verify_weight_bits(source, source.make_conversion_items(dtype), open_stored_model(out), digests)


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))
        for n in a
    )


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["qwen3", "tied llama"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4)])
def test_round_trip_is_bitwise(tmp_path: Path, config: dict, tp: int, pp: int) -> None:
    hf = make_hf(tmp_path / "hf", config, max_bytes=7000)
    source = open_stored_model(hf, is_strict=True)
    digests = write_megatron(source, tmp_path / "megatron", tp, pp)
    verify(source, tmp_path / "megatron", digests)
    files = sorted(p.name for p in (tmp_path / "megatron").glob("*.safetensors"))
    assert files == sorted(f"tp{t}_pp{p}.safetensors" for t in range(tp) for p in range(pp))
    middle = open_stored_model(tmp_path / "megatron")
    verify(middle, tmp_path / "back", write_hf_directory(middle, tmp_path / "back"))
    assert same(read_all(tmp_path / "back"), read_all(hf))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_over_three_ranks(tmp_path: Path, name: str, is_tied: bool) -> None:
    """Three key-value heads at tp 3 and a vocabulary that 3 does not divide, by the command
    line and back.
    """
    config = {
        **FAMILIES[name],
        **THREE_KV_HEADS,
        "hidden_size": 18,
        "vocab_size": 20,
        "torch_dtype": "bfloat16",
    }
    config = tied(config) if is_tied else config
    config |= {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}
    hf = make_hf(tmp_path / "hf", config, max_bytes=7000)
    megatron = tmp_path / "m"
    back = tmp_path / "back"
    layout = ["--tp", "3", "--pp", "2", "--verify"]
    assert main(["convert", str(hf), "--to", "ranks", "--out", str(megatron), *layout]) == 0
    held = [load_file(megatron / f"tp{tp}_pp1.safetensors") for tp in range(3)]
    rule = next(
        r
        for r in make_weight_table(config, 3)
        if r.megatron_name == "decoder.layers.3.self_attention.linear_qkv.weight"
    )
    full = rule.to_megatron(*(read_all(hf)[tensor.name] for tensor in rule.hf_tensors))
    assert torch.equal(torch.cat([shard[rule.megatron_name] for shard in held]), full)
    assert main(["convert", str(megatron), "--out", str(back), "--verify"]) == 0
    assert same(read_all(back), read_all(hf))
    assert json.loads((back / "config.json").read_text()) == config


def test_biases_of_a_rank(tmp_path: Path) -> None:
    """Two key-value heads a rank at tp 2; what is added after the sum over ranks
    is whole on both.
    """
    hf = read_all(make_hf(tmp_path / "hf", FAMILIES["biased llama"]))
    write_megatron(open_stored_model(tmp_path / "hf"), tmp_path / "m", 2, 1)
    first, second = (load_file(tmp_path / "m" / f"tp{tp}_pp0.safetensors") for tp in range(2))
    q, k, v = (hf[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv")
    expected = [q[12:18], k[6:9], v[6:9], q[18:], k[9:], v[9:]]
    assert torch.equal(
        second["decoder.layers.1.self_attention.linear_qkv.bias"], torch.cat(expected)
    )
    gate, up = (hf[f"model.layers.1.mlp.{part}_proj.bias"] for part in ("gate", "up"))
    assert torch.equal(
        second["decoder.layers.1.mlp.linear_fc1.bias"], torch.cat([gate[20:], up[20:]])
    )
    for ours, theirs in (
        ("self_attention.linear_proj", "self_attn.o_proj"),
        ("mlp.linear_fc2", "mlp.down_proj"),
    ):
        for held in (first, second):
            assert torch.equal(
                held[f"decoder.layers.1.{ours}.bias"], hf[f"model.layers.1.{theirs}.bias"]
            )


def test_shards_are_what_a_rank_holds(tmp_path: Path) -> None:
    hf = read_all(make_hf(tmp_path / "hf", CONFIG))
    write_megatron(open_stored_model(tmp_path / "hf"), tmp_path / "m", 2, 2)
    first = load_file(tmp_path / "m" / "tp1_pp0.safetensors")
    last = load_file(tmp_path / "m" / "tp1_pp1.safetensors")
    embedding = first["embedding.word_embeddings.weight"]
    assert (
        torch.equal(embedding[:10], hf["model.embed_tokens.weight"][11:])
        and embedding[10].eq(0).all()
    )
    assert {n.split(".")[2] for n in first if "layers." in n} == {"0", "1"}
    assert {n.split(".")[2] for n in last if "layers." in n} == {"2", "3"}
    fc2 = last["decoder.layers.3.mlp.linear_fc2.weight"]
    assert torch.equal(fc2, hf["model.layers.3.mlp.down_proj.weight"][:, 20:])
    assert "output_layer.weight" in last and "output_layer.weight" not in first
    assert last["decoder.final_layernorm.weight"].dtype == torch.float32


def test_reshard_equals_direct_conversion(tmp_path: Path) -> None:
    """tp4 pads the vocabulary to 24 rows, tp2 to 22."""
    hf = open_stored_model(make_hf(tmp_path / "hf", CONFIG))
    write_megatron(hf, tmp_path / "a", 4, 1)
    source = open_stored_model(tmp_path / "a")
    verify(source, tmp_path / "b", write_megatron(source, tmp_path / "b", 2, 4))
    write_megatron(hf, tmp_path / "direct", 2, 4)
    for file in (tmp_path / "direct").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


def stored(family: str) -> dict[str, torch.Tensor]:
    """As files have the tensors: those of GPT-OSS have the experts of a layer in one."""
    return fused(make_state(family)) if family == "gpt_oss" else make_state(family)


@pytest.mark.parametrize(
    ("axes", "files"),
    [
        ({"tp": 2, "pp": 2, "vpp": 2}, {f"tp{t}_pp{p}" for t in range(2) for p in range(2)}),
        (
            {"tp": 2, "pp": 2, "ep": 4, "etp": 1},
            {f"tp{t}_pp{p}" for t in range(2) for p in range(2)}
            | {f"ep{e}_etp0_pp{p}" for e in range(4) for p in range(2)},
        ),
        ({"tp": 1, "pp": 3, "ep": 2, "etp": 2, "first_layers": 1, "last_layers": 1}, None),
    ],
)
@pytest.mark.parametrize("family", ["qwen3_moe_plain", "deepseek_v3", "gpt_oss"])
def test_experts_at_any_layout(
    tmp_path: Path, family: str, axes: dict[str, int], files: set[str] | None
) -> None:
    """Layers by turns under virtual stages, experts in files of their own where they lie in
    another order.
    """
    (tmp_path / "hf").mkdir()
    save_file(stored(family), tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(EXPERT_FAMILIES[family]))
    source = open_stored_model(tmp_path / "hf")
    digests = write_megatron(source, tmp_path / "m", **axes)
    if files is not None:
        assert {path.stem for path in (tmp_path / "m").glob("*.safetensors")} == files
    if "vpp" in axes:  # chunks of a layer each: ranks 0, 1, 0, 1
        held = load_file(tmp_path / "m" / "tp1_pp0.safetensors")
        assert {name.split(".")[2] for name in held if "layers." in name} == {"0", "2"}
    verify(source, tmp_path / "m", digests)
    write_hf_directory(open_stored_model(tmp_path / "m"), tmp_path / "back")
    assert same(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))


def test_cast(tmp_path: Path) -> None:
    hf = make_hf(tmp_path / "hf", CONFIG)
    source = open_stored_model(hf)
    verify(
        source,
        tmp_path / "m",
        write_megatron(source, tmp_path / "m", 2, 1, dtype="float32"),
        "float32",
    )
    expected = {name: tensor.float() for name, tensor in read_all(hf).items()}
    write_hf_directory(open_stored_model(tmp_path / "m"), tmp_path / "back")
    assert same(read_all(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "float32"


def test_megatron_directory_loads_into_a_model_of_another_layout(tmp_path: Path) -> None:
    make_hf(tmp_path / "hf", CONFIG)
    source = open_stored_model(tmp_path / "hf")
    write_megatron(source, tmp_path / "m", 4, 2)
    reader = MegatronReader(tmp_path / "m")
    for rule in (
        *make_weight_table(CONFIG, 2),
        *make_weight_table(CONFIG, 2, impl="transformer_engine"),
    ):
        assert reader.get_dtype_name(rule) == source.source.get_dtype_name(rule)
        for mine, theirs in zip(
            reader.read_hf_tensors(rule), source.source.read_hf_tensors(rule), strict=True
        ):
            assert torch.equal(mine, theirs)


class TestRefused:
    @pytest.fixture
    def megatron(self, tmp_path: Path) -> Path:
        make_hf(tmp_path / "hf", CONFIG)
        write_megatron(open_stored_model(tmp_path / "hf"), tmp_path / "m", 2, 2)
        return tmp_path / "m"

    def test_layout_that_does_not_divide(self, tmp_path: Path) -> None:
        source = open_stored_model(make_hf(tmp_path / "hf", CONFIG))
        with pytest.raises(ValueError, match=r"tensor parallel size 3 does not divide"):
            write_megatron(source, tmp_path / "m", 3, 1)
        with pytest.raises(ValueError, match=r"number of layers \(4\) must be a multiple"):
            write_megatron(source, tmp_path / "m", 1, 3)
        assert not (tmp_path / "m").exists()

    def test_target_that_is_not_empty(self, megatron: Path) -> None:
        with pytest.raises(ValueError, match="exists already; remove it"):
            write_megatron(open_stored_model(megatron), megatron, 1, 1)

    def test_changed_value(self, megatron: Path) -> None:
        tensors = load_file(megatron / "tp1_pp1.safetensors")
        tensors["decoder.layers.2.mlp.linear_fc1.weight"][0, 0] += 1
        save_file(tensors, megatron / "tp1_pp1.safetensors")
        with pytest.raises(
            ValueError, match=r"layers\.2\.mlp\.gate_proj\.weight has digest .* changed or damaged"
        ):
            write_hf_directory(open_stored_model(megatron), megatron.parent / "back")
        assert sorted(p.name for p in megatron.parent.iterdir()) == ["companions", "hf", "m"]

    def test_verify_finds_a_wrong_replica_and_a_wrong_shard(self, megatron: Path) -> None:
        """A norm's copy on tp rank 1 is not what any reader of tp rank 0 would notice."""
        source = open_stored_model(megatron.parent / "hf")
        digests = dict(MegatronReader(megatron).manifest.digests)
        verify(source, megatron, digests)
        tensors = load_file(megatron / "tp1_pp0.safetensors")
        tensors["decoder.layers.1.input_layernorm.weight"][3] = 2
        save_file(tensors, megatron / "tp1_pp0.safetensors")
        with pytest.raises(
            ValueError, match=r"layers\.1\.input_layernorm\.weight at tp rank 1 is not the one"
        ):
            verify(source, megatron, digests)
        with pytest.raises(ValueError, match=r"embed_tokens\.weight has digest .*, not 0000"):
            verify(source, megatron, digests | {"model.embed_tokens.weight": "0" * 16})

    def test_missing_truncated_and_reshaped_files(self, megatron: Path) -> None:
        file = megatron / "tp0_pp1.safetensors"
        content = file.read_bytes()
        tensors = load_file(file)
        file.write_bytes(content[:-1])
        with pytest.raises(ValueError, match=r"tp0_pp1\.safetensors is truncated or corrupt"):
            open_stored_model(megatron)
        file.unlink()
        with pytest.raises(
            ValueError, match=r"tp0_pp1\.safetensors is missing, though manifest\.json says tp2 pp2"
        ):
            open_stored_model(megatron)
        tensors["decoder.final_layernorm.weight"] = torch.ones(25)
        del tensors["output_layer.weight"]
        save_file(tensors, file)
        reader = MegatronReader(megatron)
        head = reader.table[-1]
        norm = reader.table[-2]
        with pytest.raises(ValueError, match=r"tp0_pp1\.safetensors lacks output_layer\.weight"):
            reader.read_hf_tensors(head)
        with pytest.raises(
            ValueError, match=r"final_layernorm\.weight has shape \(25,\), expected \(24,\)"
        ):
            reader.read_hf_tensors(norm)

    def test_manifest_of_another_format(self, megatron: Path) -> None:
        raw = json.loads((megatron / "manifest.json").read_text())
        (megatron / "manifest.json").write_text(json.dumps({**raw, "format_version": 9}))
        with pytest.raises(ValueError, match="this version reads"):
            open_stored_model(megatron)

    def test_types_that_differ_inside_one_megatron_tensor(self, tmp_path: Path) -> None:
        hf = make_hf(tmp_path / "hf", CONFIG)
        tensors = read_all(hf)
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].float()
        save_file(tensors, hf / "model.safetensors")
        with pytest.raises(
            ValueError, match=r"types bfloat16, float32 but become the one tensor .*linear_fc1"
        ):
            write_megatron(open_stored_model(hf), tmp_path / "m", 1, 1)
        write_megatron(open_stored_model(hf), tmp_path / "m", 1, 1, dtype="bfloat16")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf(tmp_path / "hf", CONFIG)
    m = tmp_path / "m"
    assert (
        main(["convert", str(hf), "--to", "ranks", "--out", str(m), "--tp", "2", "--verify"]) == 0
    )
    assert "read back and compared." in capsys.readouterr().out
    assert (
        main(["convert", str(m), "--to", "ranks", "--out", str(tmp_path / "n"), "--pp", "4"]) == 0
    )
    assert main(["convert", str(tmp_path / "n"), "--out", str(tmp_path / "back")]) == 0
    assert same(read_all(tmp_path / "back"), read_all(hf))
    capsys.readouterr()
    assert main(["convert", str(hf), "--to", "ranks", "--out", str(m)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert (
        main(["convert", str(hf), "--to", "ranks", "--out", str(tmp_path / "x"), "--tp", "0"]) == 1
    )
    assert "--tp is 0; it must be positive" in capsys.readouterr().err
    assert main(["convert", str(hf), "--out", str(tmp_path / "x"), "--tp", "2"]) == 1
    assert "--tp would be ignored by --to hf" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "no"), "--out", str(tmp_path / "x")]) == 1
    assert "is not a directory" in capsys.readouterr().err


def test_module_of_tools_runs_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tools.checkpoint_convert`, in this process."""
    hf = make_hf(tmp_path / "hf", CONFIG)
    words = [str(hf), "--to", "ranks", "--out", str(tmp_path / "m")]
    monkeypatch.setattr(sys, "argv", ["tools.checkpoint_convert", *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("tools.checkpoint_convert", run_name="__main__")
    assert end.value.code == 0 and (tmp_path / "m" / "tp0_pp0.safetensors").exists()


def test_layers_are_stacked_where_all_are_alike() -> None:
    """As Megatron-LM's defaults have it: of some families here the first layer has no experts."""
    families = EXPERT_FAMILIES.items()
    stacked = {
        name
        for name, config in families
        if KeyNaming.from_table(make_weight_table(config), "local").num_stacked_layers
    }
    assert stacked == {"qwen3_moe_plain", "mixtral", "gpt_oss"} < {name for name, _ in families}
    assert (
        KeyNaming.from_table(make_weight_table(CONFIG), "local").num_stacked_layers
        == CONFIG["num_hidden_layers"]
    )
    assert (
        KeyNaming.from_table(
            make_weight_table(CONFIG), "local", use_stacked_layers=False
        ).num_stacked_layers
        == 0
    )


def test_layers_that_predict_further_tokens_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through both conversions, under a cast as well, with digests; their router's bias
    stays float32.
    """
    config = {**EXPERT_FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 1}
    ahead = {
        "model.layers.4.eh_proj.weight": torch.randn(4, 8).bfloat16(),
        "model.layers.4.mlp.gate.e_score_correction_bias": torch.randn(16),
        "model.layers.4.mlp.experts.3.up_proj.weight": torch.randn(3, 4).bfloat16(),
    }
    (tmp_path / "hf").mkdir()
    save_file({**make_state("deepseek_v3"), **ahead}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    digests = write_megatron(
        open_stored_model(tmp_path / "hf", is_strict=True), tmp_path / "megatron", 2, 2
    )
    assert "model.layers.4.* are frozen: they are not trained" in caplog.text
    manifest = json.loads((tmp_path / "megatron" / "manifest.json").read_text())
    assert ahead.keys() <= manifest["digests"].keys()
    verify(open_stored_model(tmp_path / "hf"), tmp_path / "megatron", digests)
    again = open_stored_model(tmp_path / "megatron")
    write_megatron(again, tmp_path / "again", 1, 1)
    write_hf_directory(
        open_stored_model(tmp_path / "again"), tmp_path / "back", max_shard_bytes=20000
    )
    assert same(read_all(tmp_path / "back"), read_all(tmp_path / "hf"))
    write_hf_directory(again, tmp_path / "half", "float16")
    half = read_all(tmp_path / "half")
    kinds = [half[name].dtype for name in ahead]
    assert kinds == [torch.float16, torch.float32, torch.float16]

    kept = load_file(tmp_path / "megatron" / "kept.safetensors")
    kept["model.layers.4.eh_proj.weight"][0, 0] += 1
    save_file(kept, tmp_path / "megatron" / "kept.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.layers\.4\.eh_proj\.weight has digest .* was changed or damaged"
    ):
        write_hf_directory(open_stored_model(tmp_path / "megatron"), tmp_path / "other")

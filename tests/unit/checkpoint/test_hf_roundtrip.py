"""Hugging Face directories: read, refused when broken, loaded at every layout and written
back bit for bit.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from table_samples import SMALL_QWEN3
from torch import nn

from rlhf_megatron.ranks.checkpoint.model_weights import iterate_local_shards, load_hf_weights
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config
from rlhf_megatron.weights.hf_writer import (
    SafetensorsWriter,
    TensorSpec,
    open_hf_directory_writer,
    plan_weight_files,
    write_config_and_tokenizer,
)
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_sets import INDEX
from rlhf_megatron.weights.weight_source import generate_random_hf_tensors, make_random_source
from rlhf_megatron.weights.weight_table import (
    WeightRule,
    join_shards,
    select_stage_rules,
    split_tensor,
)

CONFIG = {**SMALL_QWEN3, "initializer_range": 0.5}
TIED = {**CONFIG, "tie_word_embeddings": True}
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4)]


def write_model(
    directory: Path, config: dict, dtype: torch.dtype = torch.bfloat16, max_bytes: int = 1 << 30
) -> dict:
    tensors = {
        name: tensor.to(dtype) for name, tensor in generate_random_hf_tensors(config, seed=3)
    }
    specs = [
        TensorSpec(n, str(dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()
    ]
    with open_hf_directory_writer(directory, specs, config, max_shard_bytes=max_bytes) as writer:
        for name in reversed(tensors):
            writer.write_tensor(name, tensors[name])
    return tensors


class Stage(nn.Module):
    """The module tree of one GPTModel chunk on one rank: names, shapes and layer numbers without
    the arithmetic.
    """

    def __init__(self, rules: list[WeightRule], tp_size: int, tied_copy: torch.Size | None) -> None:
        super().__init__()
        layers = sorted({rule.layer for rule in rules if rule.layer is not None})
        for rule in rules:
            shape = split_tensor(
                rule.split, torch.empty(rule.megatron_shape, device="meta"), tp_size
            )[0].shape
            path = rule.megatron_name.split(".")
            if rule.layer is not None:
                path[2] = str(layers.index(rule.layer))
            self._put(path, nn.Parameter(torch.full(shape, torch.nan)))
        for local, layer in enumerate(layers):
            self.decoder.layers.get_submodule(str(local)).layer_number = layer + 1
        if layers:
            self.decoder.layers = nn.ModuleList(self.decoder.layers.children())
        if tied_copy is not None:
            self._put(["output_layer", "weight"], nn.Parameter(torch.full(tied_copy, torch.nan)))

    def _put(self, path: list[str], parameter: nn.Parameter) -> None:
        module: nn.Module = self
        for part in path[:-1]:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(path[-1], parameter)


def make_stage(config: dict, tp_size: int, pp_size: int, stage: int) -> Stage:
    table = make_weight_table(config, tp_size)
    rules = list(select_stage_rules(table, stage, ParallelLayout(pp_size, pp=pp_size)))
    embedding = torch.Size((table[0].megatron_shape[0] // tp_size, config["hidden_size"]))
    has_copy = config["tie_word_embeddings"] and pp_size > 1 and stage == pp_size - 1
    return Stage(rules, tp_size, embedding if has_copy else None)


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(("tp_size", "pp_size"), LAYOUTS)
def test_hf_to_every_layout_and_back_is_bitwise(
    tmp_path: Path, config: dict, tp_size: int, pp_size: int
) -> None:
    tensors = write_model(tmp_path / "hf", config)
    table = make_weight_table(config, tp_size)
    reader = HFReader(tmp_path / "hf")
    reader.check_against_table(table, is_strict=True)
    exported: dict[str, torch.Tensor] = {}
    for pp in range(pp_size):
        per_rank = []
        for tp in range(tp_size):
            model = make_stage(config, tp_size, pp_size, pp)
            load_hf_weights([model], table, reader, tp, tp_size)
            assert not any(p.isnan().any() for p in model.parameters())
            per_rank.append(list(iterate_local_shards([model], table)))
            if config["tie_word_embeddings"] and pp == pp_size - 1 and pp_size > 1:
                shard = split_tensor(
                    "rows", table[0].to_megatron(tensors["model.embed_tokens.weight"]), tp_size
                )[tp]
                assert torch.equal(model.output_layer.weight, shard.float())
        for column in zip(*per_rank, strict=True):
            rule = column[0][0]
            for hf, tensor in zip(
                rule.hf_tensors,
                rule.to_hf(join_shards(rule.split, [t for _, t in column])),
                strict=True,
            ):
                assert hf.name not in exported
                exported[hf.name] = tensor.to(torch.bfloat16)
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(exported[name].view(torch.int16), tensor.view(torch.int16)), name


def test_virtual_chunks_and_wrappers(tmp_path: Path) -> None:
    """Two chunks of one rank (stages 0 and 2 of 4), wrapped as DDP wraps them."""
    write_model(tmp_path / "hf", CONFIG, torch.float32)
    table = make_weight_table(CONFIG)
    chunks = []
    for stage in (0, 2):
        wrapper = nn.Module()
        wrapper.module = make_stage(CONFIG, 1, 4, stage)
        chunks.append(wrapper)
    load_hf_weights(chunks, table, HFReader(tmp_path / "hf"), 0, 1)
    layers = {rule.layer for rule, _ in iterate_local_shards(chunks, table)}
    assert layers == {None, 0, 2}


def test_random_source_loads_like_a_directory() -> None:
    model = make_stage(CONFIG, 2, 1, 0)
    load_hf_weights([model], make_weight_table(CONFIG, 2), make_random_source(CONFIG, 3), 1, 2)
    head = dict(generate_random_hf_tensors(CONFIG, 3))["lm_head.weight"]
    assert torch.equal(model.output_layer.weight[:10], head[11:])
    assert model.output_layer.weight[10].eq(0).all()


def test_model_that_differs_from_the_table_is_refused(tmp_path: Path) -> None:
    wide = make_stage({**CONFIG, "intermediate_size": 80}, 1, 1, 0)
    with pytest.raises(
        ValueError, match=r"linear_fc1.weight: .* shape \(160, 24\), the table's shard \(80, 24\)"
    ):
        load_hf_weights([wide], make_weight_table(CONFIG), make_random_source(CONFIG, 1), 0, 1)
    model = make_stage(CONFIG, 1, 1, 0)
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="no rule for the parameters extra"):
        load_hf_weights([model], make_weight_table(CONFIG), make_random_source(CONFIG, 1), 0, 1)


def test_sharded_directory_is_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "hf", CONFIG, max_bytes=6000)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys() and all(
        torch.equal(read[n], t) for n, t in tensors.items()
    )
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in tensors.values())
    assert (
        HFReader(tmp_path / "hf").check_against_table(make_weight_table(CONFIG), is_strict=True)
        is None
    )


def test_transformers_loads_what_we_write(tmp_path: Path) -> None:
    import transformers

    tensors = write_model(tmp_path / "hf", TIED, torch.float32, max_bytes=9000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def test_mixed_types_in_one_file(tmp_path: Path) -> None:
    specs = [
        TensorSpec("a", "bfloat16", (3,)),
        TensorSpec("b", "float32", (2, 2)),
        TensorSpec("c", "float16", (1,)),
    ]
    writer = SafetensorsWriter(tmp_path / "x.safetensors", specs)
    values = {s.name: torch.arange(4.0)[: torch.Size(s.shape).numel()].view(s.shape) for s in specs}
    for spec in specs:
        writer.write_tensor(spec.name, values[spec.name].to(getattr(torch, spec.dtype)))
    writer.close()
    read = load_file(tmp_path / "x.safetensors")
    assert [str(read[n].dtype) for n in "abc"] == [
        "torch.bfloat16",
        "torch.float32",
        "torch.float16",
    ]
    assert all(torch.equal(read[n].float(), values[n]) for n in "abc")


def test_files_are_filled_in_order() -> None:
    specs = [TensorSpec(str(i), "float32", (n,)) for i, n in enumerate((10, 10, 100, 5))]
    files = plan_weight_files(specs, max_shard_bytes=100)
    assert [[s.name for s in members] for members in files.values()] == [["0", "1"], ["2"], ["3"]]
    assert [
        len(members) for members in plan_weight_files(specs[:2], max_shard_bytes=80).values()
    ] == [2], "80 bytes fit in 80"


class TestBrokenDirectories:
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        write_model(tmp_path / "hf", CONFIG, max_bytes=6000)
        return tmp_path / "hf"

    def change(self, directory: Path, name: str, tensor: torch.Tensor | None) -> None:
        file = json.loads((directory / INDEX).read_text())["weight_map"][name]
        tensors = load_file(directory / file)
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
        save_file(tensors, directory / file)

    def refused(self, directory: Path, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HFReader(directory).check_against_table(make_weight_table(CONFIG))

    def test_missing_tensor(self, model: Path) -> None:
        index = json.loads((model / INDEX).read_text())
        del index["weight_map"]["model.norm.weight"], index["weight_map"]["lm_head.weight"]
        (model / INDEX).write_text(json.dumps(index))
        self.refused(
            model,
            (
                r"model.norm.weight \(24,\) is missing; tensor lm_head.weight \(21, 24\) is"
                r" missing. Fetch"
            ),
        )

    def test_tensor_that_the_index_promises(self, model: Path) -> None:
        self.change(model, "model.norm.weight", None)
        self.refused(
            model,
            r"model.norm.weight is not in model-000.*, though model.safetensors.index.json says so",
        )

    def test_shape(self, model: Path) -> None:
        self.change(model, "model.layers.1.mlp.up_proj.weight", torch.zeros(41, 24))
        message = r"up_proj.weight in model-.* has shape \(41, 24\), expected \(40, 24\)"
        self.refused(model, message)
        rule = next(
            r
            for r in make_weight_table(CONFIG)
            if r.megatron_name == "decoder.layers.1.mlp.linear_fc1.weight"
        )
        with pytest.raises(ValueError, match=message):
            HFReader(model).read_hf_tensors(rule)

    def test_type(self, model: Path) -> None:
        self.change(model, "model.norm.weight", torch.zeros(24, dtype=torch.int8))
        self.refused(model, "model.norm.weight in .* has type I8, supported are F32, BF16, F16")

    def test_missing_file(self, model: Path) -> None:
        next(model.glob("model-00002-*")).unlink()
        self.refused(
            model, "model-00002.* is missing, though model.safetensors.index.json names it"
        )

    def test_truncated_file(self, model: Path) -> None:
        file = next(model.glob("model-00001-*"))
        file.write_bytes(file.read_bytes()[:-7])
        self.refused(model, r"model-00001.* bytes\) is truncated or corrupt")

    def test_corrupt_header(self, model: Path) -> None:
        file = next(model.glob("model-00001-*"))
        file.write_bytes(b"\x10\0\0\0\0\0\0\0not a json header" + file.read_bytes())
        self.refused(model, r"model-00001.* is truncated or corrupt")

    def test_index_that_leaves_the_directory(self, model: Path) -> None:
        (model / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
        self.refused(model, "must be a plain name in the same directory")

    def test_unexpected_tensor_is_an_error(self, model: Path) -> None:
        reader = HFReader(model)
        with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens"):
            reader.check_against_table(make_weight_table(TIED))
        with pytest.raises(ValueError, match=r"not part of this model: lm_head.weight"):
            reader.check_against_table(make_weight_table(TIED), is_strict=True)

    def test_no_weights_no_index_no_config(self, model: Path) -> None:
        (model / INDEX).unlink()
        self.refused(model, "safetensors files but no model.safetensors.index.json")
        (model / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
            read_hf_config(model)
        shutil.rmtree(model)
        self.refused(model, r"has no \*.safetensors")
        with pytest.raises(ValueError, match=r"config.json does not exist"):
            read_hf_config(model)


def test_writer_leaves_nothing_behind_after_an_error(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "float32", (2,))]
    with (
        pytest.raises(RuntimeError, match="stop"),
        open_hf_directory_writer(tmp_path / "hf", specs, CONFIG) as writer,
    ):
        writer.write_tensor("a", torch.zeros(2))
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="exists already; remove it or choose another directory"):
        write_model(tmp_path / "full", CONFIG)


def test_companions_are_copied_and_the_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "LICENSE",
        "notes.txt",
        "model.safetensors",
    ):
        (tmp_path / "from" / name).write_text(name)
    # a buffer keeps its own type
    specs = [TensorSpec("a", "bfloat16", (2,)), TensorSpec("bias", "float32", (1,))]
    with open_hf_directory_writer(
        tmp_path / "hf", specs, CONFIG, companions_directory=tmp_path / "from"
    ) as writer:
        writer.write_tensor("a", torch.ones(2, dtype=torch.bfloat16))
        writer.write_tensor("bias", torch.ones(1))
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == [
        "LICENSE",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {
        **CONFIG,
        "torch_dtype": "bfloat16",
    }


def test_a_tokenizer_of_its_own_comes_whole(tmp_path: Path) -> None:
    """No file of the model's tokenizer stays beside it; what is no tokenizer's comes along."""
    model = tmp_path / "model"
    tokenizer = tmp_path / "tokenizer"
    files = {
        model: ["tokenizer.json", "merges.txt", "chat_template.jinja", "generation_config.json"],
        tokenizer: ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "a.txt"],
    }
    for directory, names in files.items():
        directory.mkdir()
        for name in names:
            (directory / name).write_text(directory.name)
    for own, expected in (
        (tokenizer, {"tokenizer.json": "tokenizer", "tokenizer_config.json": "tokenizer"}),
        (None, dict.fromkeys(["tokenizer.json", "merges.txt", "chat_template.jinja"], "model")),
    ):
        target = tmp_path / f"written with {own}".replace("/", "_")
        target.mkdir()
        write_config_and_tokenizer(target, CONFIG, {"bfloat16"}, model, own)
        (target / "config.json").unlink()
        written = {path.name: path.read_text() for path in target.iterdir()}
        assert written == {**expected, "generation_config.json": "model"}

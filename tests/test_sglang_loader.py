"""The module that runs inside the server, on plain modules with SGLang's parameter names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rollout_tools import write_buckets
from torch import Tensor, nn

from rlhf_megatron.resharding.digest import as_hex, digest
from rlhf_megatron.rollout.sglang_server import loader

Q, K, V = torch.arange(8.0).view(4, 2), torch.full((2, 2), 7.0), torch.full((2, 2), -7.0)
GATE, UP, DOWN = torch.ones(3, 2), torch.full((3, 2), 2.0), torch.full((2, 3), 3.0)
EMBED, HEAD = torch.arange(10.0).view(5, 2), torch.full((5, 2), 0.5)
WEIGHTS = {
    "embed.weight": EMBED,
    "attn.q_proj.weight": Q,
    "attn.k_proj.weight": K,
    "attn.v_proj.weight": V,
    "mlp.gate_proj.weight": GATE,
    "mlp.up_proj.weight": UP,
    "mlp.down_proj.weight": DOWN,
    "lm_head.weight": HEAD,
}
EXPERT_WEIGHTS = {
    f"mlp.experts.{e}.{part}.weight": tensor * (e + 1)
    for e in range(2)
    for part, tensor in (("gate_proj", GATE), ("up_proj", UP), ("down_proj", DOWN))
}


def module(**parameters: Tensor) -> nn.Module:
    """Names with __ for dots."""
    root = nn.Module()
    for name, tensor in parameters.items():
        *path, last = name.split("__")
        place = root
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, nn.Parameter(tensor))
    return root


def dense(is_tied: bool) -> nn.Module:
    """What SGLang holds after a load: fused parts, the vocabulary padded to 8 rows."""
    pad = torch.zeros(3, 2)
    model = module(
        embed__weight=torch.cat([EMBED, pad]),
        attn__qkv_proj__weight=torch.cat([Q, K, V]),
        mlp__gate_up_proj__weight=torch.cat([GATE, UP]),
        mlp__down_proj__weight=DOWN.clone(),
    )
    head = module(weight=torch.cat([HEAD, pad]))
    model.add_module("lm_head", model.get_submodule("embed") if is_tied else head)
    return model


def hex_of(weights: dict[str, Tensor]) -> dict[str, str]:
    return {name: as_hex(digest(tensor)) for name, tensor in weights.items()}


def test_digests_are_found_in_fused_and_padded_parameters(tmp_path: Path) -> None:
    found: dict[str, str | None] = {}
    for manifest in write_buckets(WEIGHTS, tmp_path, 1, num_buckets=4):  # cut inside the fused parts
        found |= loader.standing_digests(dense(is_tied=False), manifest)
    assert found == hex_of(WEIGHTS)


def test_a_swapped_row_or_an_old_part_shows(tmp_path: Path) -> None:
    (manifest,) = write_buckets(WEIGHTS, tmp_path, 1, num_buckets=1)
    model = dense(is_tied=False)
    with torch.no_grad():
        model.get_parameter("attn.qkv_proj.weight")[[4, 6]] = model.get_parameter("attn.qkv_proj.weight")[[6, 4]]
    found = loader.standing_digests(model, manifest)
    assert {name for name, value in found.items() if value != hex_of(WEIGHTS)[name]} == {
        "attn.k_proj.weight",
        "attn.v_proj.weight",
    }


def test_a_head_that_the_engine_ties_is_not_found(tmp_path: Path) -> None:
    """So a trainer that sends one of its own is told, where the server would drop it without a word."""
    (manifest,) = write_buckets(WEIGHTS, tmp_path, 1, num_buckets=1)
    assert loader.standing_digests(dense(is_tied=True), manifest)["lm_head.weight"] is None


def test_digests_of_experts(tmp_path: Path) -> None:
    experts = module(
        mlp__experts__w13_weight=torch.stack([torch.cat([GATE, UP]), torch.cat([GATE, UP]) * 2]),
        mlp__experts__w2_weight=torch.stack([DOWN, DOWN * 2]),
    )
    (manifest,) = write_buckets(EXPERT_WEIGHTS, tmp_path, 1, num_buckets=1)
    assert loader.standing_digests(experts, manifest) == hex_of(EXPERT_WEIGHTS)
    assert loader.incomplete(experts, set(EXPERT_WEIGHTS)) is None
    missing = set(EXPERT_WEIGHTS) - {"mlp.experts.1.up_proj.weight"}
    assert loader.incomplete(experts, missing) == "1 of 2 parameters never came whole: mlp.experts.w13_weight."


def test_what_never_came_is_named() -> None:
    assert loader.incomplete(dense(is_tied=False), set(WEIGHTS)) is None
    assert loader.incomplete(dense(is_tied=True), set(WEIGHTS) - {"lm_head.weight"}) is None
    found = loader.incomplete(dense(is_tied=False), {"embed.weight", "attn.q_proj.weight", "mlp.gate_proj.weight"})
    assert found == (
        "4 of 5 parameters never came whole: attn.qkv_proj.weight, lm_head.weight, mlp.down_proj.weight and others."
    )


def test_a_changed_byte_is_refused_with_place_and_name(tmp_path: Path) -> None:
    (manifest,) = write_buckets(WEIGHTS, tmp_path, 1, num_buckets=1)
    path = tmp_path / manifest.file
    assert torch.equal(loader.read_bucket(path, manifest)["attn.q_proj.weight"], Q)
    raw = bytearray(path.read_bytes())
    raw[manifest.tensors[1].offset] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"bucket 0 of actor dp0 pp0 tp0, tensor 'attn.q_proj.weight': digest"):
        loader.read_bucket(path, manifest)
    path.write_bytes(raw[:-1])
    with pytest.raises(ValueError, match=r"has 215 bytes, the manifest says 216"):
        loader.read_bucket(path, manifest)


def test_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a bucket that was loaded, of a commit that is incomplete, of a bucket that failed, and of the commit after."""
    monkeypatch.setenv(loader.TRANSFER_DIR, str(tmp_path))
    monkeypatch.setattr(loader, "_tensor_parallel", lambda: (0, 1))
    model = dense(is_tied=False)
    monkeypatch.setattr(type(model), "load_weights", lambda self, weights: None, raising=False)

    def order(receipt: str, **what: str) -> dict[str, object]:
        text = json.dumps({**what, "receipt": receipt}).encode()
        loader.load(model, [("order", torch.frombuffer(bytearray(text), dtype=torch.uint8))])
        return json.loads((tmp_path / f"{receipt}.0").read_text())

    first, second = write_buckets(WEIGHTS, tmp_path, 1)
    assert order("r-1", manifest=first.to_json())["digests"] == hex_of(dict(list(WEIGHTS.items())[:4]))
    missing = order("r-c1", receipts="r-")["error"]
    assert (
        missing == "3 of 5 parameters never came whole: lm_head.weight, mlp.down_proj.weight, mlp.gate_up_proj.weight."
    )
    for path in tmp_path.glob("r-c1*"):
        path.unlink()
    (tmp_path / second.file).unlink()
    assert "FileNotFoundError" in str(order("r-2", manifest=second.to_json())["error"])
    assert "FileNotFoundError" in str(order("r-c2", receipts="r-")["error"])


def test_a_server_that_is_older_than_the_run_finds_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.TRANSFER_DIR, str(tmp_path))
    assert loader.transfer_dir("run-1") == tmp_path / "run-1"
    assert loader.transfer_dir(tmp_path.name) == tmp_path
    assert loader.transfer_dir(None) == tmp_path
    for name in ("", "..", "a/b", "/"):
        with pytest.raises(ValueError, match="is not the plain name of a directory"):
            loader.transfer_dir(name)


def test_a_model_is_described_by_the_names_of_its_configuration() -> None:
    model = dense(is_tied=True)
    model.config = SimpleNamespace(vocab_size=5, hidden_size=2, num_hidden_layers=1, other=3)
    assert loader.describe(model) == {
        "vocab_size": 5,
        "hidden_size": 2,
        "num_hidden_layers": 1,
        "dtype": "float32",
    }


def test_an_order_that_cannot_be_answered_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader, "_tensor_parallel", lambda: (0, 1))
    order = torch.frombuffer(bytearray(b'{"describe": true, "receipt": "r", "directory": "gone"}'), dtype=torch.uint8)
    monkeypatch.delenv(loader.TRANSFER_DIR, raising=False)
    loader.load(dense(is_tied=True), [("order", order)])
    assert "an order cannot be carried out: RLHF_MEGATRON_TRANSFER_DIR" in caplog.text
    monkeypatch.setenv(loader.TRANSFER_DIR, str(tmp_path))
    loader.load(dense(is_tied=True), [("order", order)])
    assert "a receipt cannot be written" in caplog.text
    (tmp_path / "gone").mkdir()
    loader.load(dense(is_tied=True), [("order", order)])
    assert json.loads((tmp_path / "gone" / "r.0").read_text()) == {"error": None, "model": {"dtype": "float32"}}

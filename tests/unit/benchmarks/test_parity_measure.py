"""Figures by hand, from tensors in memory and from dumps; a tampered dump must be found."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.parity.dumps import Dumps, other_than_dumps, run_name
from benchmarks.parity.measure import Result, Row, measure
from benchmarks.parity.recompute import main as recompute

START = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([2.0])}
MASK = torch.tensor([False, True, True])


def result(shift: float, dtype: torch.dtype = torch.float32) -> Result:
    """A result that is off by `shift` in one place of every quantity. Tensor "b" is exact."""
    column = torch.tensor([9.0, -1.0, -2.0 + shift])
    tensors = {
        "log_probs": column,
        "entropies": -column,
        "log_probs_after": column + 1,
        "grad_norms": torch.tensor([5.0 + shift, 10.0]),
        "gradient/0/a": torch.tensor([3.0 + shift, 4.0]),
        "gradient/0/b": torch.tensor([0.5]),
        "gradient/1/a": torch.tensor([6.0 + shift, 8.0]),
        "gradient/1/b": torch.tensor([0.5]),
        "weights/a": START["a"] + torch.tensor([0.75, 1.0 + shift]),
        "weights/b": START["b"] + 1,
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


EXACT = result(0.0, torch.float64)
SINGLE = result(0.25)


def rows(found: Result) -> dict[str, Row]:
    return {
        row.quantity: row for row in measure("f", "l", "c", START, MASK, EXACT, [SINGLE], [found])
    }


def test_figures_are_those_of_the_definition() -> None:
    found = rows(result(0.5))
    assert (found["log_probs"].error, found["log_probs"].float32_error) == (0.5, 0.25)
    assert (found["log_probs_after"].error, found["entropies"].error) == (0.5, 0.5)
    assert (found["gradient"].tensor, found["gradient"].error) == ("a", pytest.approx(0.5 / 5))
    assert found["gradient"].bar == pytest.approx(3 * 0.25 / 5)
    assert found["update"].error == pytest.approx(0.5 / 1.25), (
        "relative to the update, not to the weights"
    )
    assert (found["grad_norm"].tensor, found["grad_norm"].error) == (
        "step 0",
        pytest.approx(0.5 / 5),
    )
    assert found["grad_norm"].float32_error == pytest.approx(0.25 / (25 + 0.25) ** 0.5), (
        "of the whole gradient"
    )
    assert all(row.ok for row in found.values())


@pytest.mark.parametrize("shift, is_ok", [(0.74, True), (0.76, False), (float("nan"), False)])
def test_three_times_the_error_of_float32_is_the_bar(shift: float, is_ok: bool) -> None:
    assert {row.quantity for row in rows(result(shift)).values() if row.ok == is_ok} >= {
        "log_probs",
        "gradient",
    }
    assert rows(result(shift))["update"].ok == is_ok


def test_float32_s_own_error_is_the_root_mean_square_of_its_draws() -> None:
    """Of 0.1 and 0.7 it is 0.5: one lucky draw alone would make a bar of 0.3 instead of 1.5."""
    for draws, own in (([0.1, 0.7], 0.5), ([0.1], 0.1), ([0.1, float("nan")], float("nan"))):
        measured = measure(
            "f", "l", "c", START, MASK, EXACT, [result(draw) for draw in draws], [result(1.4)]
        )
        found = {row.quantity: row for row in measured}
        for quantity, size in (("log_probs", 1), ("gradient", 5), ("update", 1.25)):
            assert found[quantity].float32_error == pytest.approx(own / size, nan_ok=True, rel=1e-6)
            assert found[quantity].ok == (own == 0.5)


def test_runs_of_a_layout_count_by_their_root_mean_square(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 0.1, 0.7 and 0.8 it is 0.616, under the bar of 0.75. What wrote the dumps and what
    reads them agree.
    """
    shifts = (0.8, 0.1, 0.7)
    report = dump(tmp_path, *map(result, shifts))
    found = {row["quantity"]: row for row in json.loads(report.read_text())["rows"]}
    assert (
        found["log_probs"]["error"] == pytest.approx((1.14 / 3) ** 0.5)
        and found["log_probs"]["num_runs"] == 3
    )
    assert not rows(result(0.8))["log_probs"].ok and all(row["ok"] for row in found.values())
    assert recompute([str(tmp_path), "--against", str(report)]) == 0
    assert "0 over the bar, 0 unlike the file" in capsys.readouterr().out


def test_tokens_outside_of_the_mask_do_not_count() -> None:
    other = result(0.0)
    other["log_probs"][0] = 100.0
    assert rows(other)["log_probs"].error == 0


def test_the_worst_tensor_is_the_one_nearest_to_its_own_bar() -> None:
    other = result(0.5)
    other["gradient/0/b"] = torch.tensor([0.501])  # a smaller error, but float32 has none there
    assert (rows(other)["gradient"].tensor, rows(other)["gradient"].ok) == ("b", False)


def test_a_copy_must_be_equal_bit_for_bit() -> None:
    other = result(0.0)
    other["copies/dp1_tp0/a"] = other["weights/a"].clone()
    assert (rows(other)["copies"].ok, rows(other)["copies"].error) == (True, 0.0)
    other["copies/dp1_tp0/a"][1] += 2.0**-22
    found = rows(other)["copies"]
    assert (found.ok, found.tensor, found.error) == (False, "a (dp1_tp0)", 2.0**-22)


def dump(directory: Path, *runs: Result, name: str = "one_rank") -> Path:
    """Dumps of one family, and the result file beside them."""
    dumps = Dumps(directory)
    batch: dict[str, Tensor] = {"response_mask": MASK}
    dumps.inputs("f", "actor", START, batch)
    written = [
        ("float64", EXACT),
        ("float32_0", SINGLE),
        *((run_name(name, n), run) for n, run in enumerate(runs)),
    ]
    for result_name, tensors in written:
        dumps.result("f", "actor", "c", result_name, tensors)
    layouts = {name: {"families": ["f"], "critic_families": []}}
    dumps.describe({"families": {"f": {}}, "layouts": layouts, "cuts": {"c": {}}, "failures": []})
    report = directory / "parity.json"
    found_rows = [
        asdict(row) for row in measure("f", name, "c", START, MASK, EXACT, [SINGLE], runs)
    ]
    report.write_text(json.dumps({"rows": found_rows}))
    return report


def test_recompute_agrees_with_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(0.5)
    found["copies/dp1_tp0/a"] = found["weights/a"].clone()
    report = dump(tmp_path, found)
    assert recompute([str(tmp_path), "--against", str(report)]) == 0
    assert "7 quantities, 10 figures: 0 over the bar, 0 unlike the file" in capsys.readouterr().out


VALUE_START = {
    "a": START["a"],
    "score.weight": torch.tensor([[3.0, 0.0]]),
    "score.bias": torch.tensor([1.0]),
}


def value_result(
    shift: float, bias_shift: float = 0.0, dtype: torch.dtype = torch.float32
) -> Result:
    """A critic's, off by `shift` in one place of every quantity,
    the head's bias by `bias_shift`.
    """
    tensors = {
        "values": torch.tensor([9.0, -1.0, -2.0 + shift]),
        "values_after": torch.tensor([9.0, -1.0, -2.0 + shift]),
        "grad_norms": torch.tensor([13.0 + shift]),
        "gradient/0/a": torch.tensor([0.0, 12.0 + shift]),
        "gradient/0/score.weight": torch.tensor([[3.0 + shift, 0.0]]),
        "gradient/0/score.bias": torch.tensor([4.0 + bias_shift]),
        "weights/a": START["a"] + torch.tensor([0.75, 1.0 + shift]),
        "weights/score.weight": VALUE_START["score.weight"] + torch.tensor([[0.0, 3.0 + shift]]),
        "weights/score.bias": VALUE_START["score.bias"] + 4.0 + bias_shift,
    }
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def test_a_critic_s_head_is_one_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Float32 is right about the bias by luck: alone its bar would be 0. With the weight it
    is 3 x 0.25 / 5.
    """
    exact = value_result(0.0, dtype=torch.float64)
    single = value_result(0.25)
    found = {}
    for name, result_of in (("near", value_result(0.25, 0.5)), ("far", value_result(0.25, 1.0))):
        measured = measure(
            "f", name, "c", VALUE_START, MASK, exact, [single], [result_of], "critic"
        )
        found[name] = {row.quantity: row for row in measured}
    assert set(found["far"]) == {
        "values",
        "values_after",
        "value_gradient",
        "value_update",
        "value_grad_norm",
    }
    near = found["near"]["value_gradient"]
    far = found["far"]["value_gradient"]
    assert (near.tensor, near.ok, far.tensor, far.ok) == ("score", True, "score", False)
    assert near.error == pytest.approx((0.25**2 + 0.5**2) ** 0.5 / 5) and near.bar == pytest.approx(
        0.15
    )
    assert [row.quantity for row in found["far"].values() if not row.ok] == [
        "value_gradient",
        "value_update",
    ]

    dumps = Dumps(tmp_path)
    dumps.inputs("f", "critic", VALUE_START, {"response_mask": MASK})
    for name, tensors in (
        ("float64", exact),
        ("float32_0", single),
        ("far", value_result(0.25, 1.0)),
    ):
        dumps.result("f", "critic", "c", name, tensors)
    layouts = {"far": {"families": [], "critic_families": ["f"]}}
    dumps.describe({"families": {"f": {}}, "layouts": layouts, "cuts": {"c": {}}, "failures": []})
    report = tmp_path / "parity.json"
    report.write_text(json.dumps({"rows": [asdict(row) for row in found["far"].values()]}))
    assert recompute([str(tmp_path), "--against", str(report)]) == 1
    assert "5 quantities, 7 figures: 2 over the bar, 0 unlike the file" in capsys.readouterr().out


def test_recompute_finds_a_miss_without_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, result(0.76))
    assert recompute([str(tmp_path)]) == 1
    assert (
        "MISS f one_rank c log_probs log_probs: 7.600e-01 > 3 x 2.500e-01"
        in capsys.readouterr().out
    )


def test_recompute_finds_a_file_that_says_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = dump(tmp_path, result(0.5))
    Dumps(tmp_path).result("f", "actor", "c", "one_rank", result(0.25))
    assert recompute([str(tmp_path), "--against", str(report)]) == 1
    assert (
        "gradient') a: 1.000000e-01 in the file, 5.000000e-02 in the dumps"
        in capsys.readouterr().out
    )


def test_recompute_names_a_cell_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump(tmp_path, result(0.5))
    run = json.loads((tmp_path / "run.json").read_text())
    run["layouts"]["tp2"] = {"families": [], "critic_families": []}
    run["failures"] = [{"family": "f", "layout": "tp2", "error": "rank 1 hung"}]
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert recompute([str(tmp_path)]) == 1
    assert "FAILED f tp2" in capsys.readouterr().out


def test_a_run_takes_the_place_of_one_that_was_ended_and_of_nothing_else(tmp_path: Path) -> None:
    Dumps(tmp_path).inputs("mixtral", "critic", VALUE_START, {"response_mask": MASK})
    assert other_than_dumps(tmp_path) is None
    (tmp_path / "model.safetensors").touch()
    assert other_than_dumps(tmp_path) == "model.safetensors"

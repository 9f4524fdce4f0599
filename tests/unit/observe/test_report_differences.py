"""`rlhf-megatron report A B` names every difference of two runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from report_samples import Page, evaluation_row, step_row, write_run_dir

from rlhf_megatron.cli.main import main
from rlhf_megatron.controller.observe.report.run_differences import compare_runs
from rlhf_megatron.controller.observe.report.run_files import read_run_files

LOCK = {
    "packages": {"python": "3.11.2", "torch": "2.13.0"},
    "digests": {
        "model.path config.json": "0123456789abcdef",
        "data.train_files[0]": "1111111111111111",
    },
}


def make(path: Path, reward: float = 0.5, lock: object = LOCK, **more: float) -> Path:
    rows = [
        evaluation_row(0, 0.2, 0.1, 0.3),
        step_row(1, 0.25),
        *(step_row(step, reward, **more) for step in (2, 3, 4)),
    ]
    made = write_run_dir(path, [*rows, evaluation_row(4, reward, reward - 0.05, reward + 0.05)])
    if lock is not None:
        (made / "config.lock.yaml").write_text(yaml.safe_dump({"lock": lock}))
    return made


def test_equal_runs_are_called_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(tmp_path / "one")
    other = make(tmp_path / "other", **{"timing_s/step": 9.0, "perf/mfu": 0.1})
    assert main(["report", str(one), str(other), "--open", "no"]) == 0
    said = capsys.readouterr().out
    assert "settings, versions and files are the same\n" in said
    assert "curves are the same, bit for bit, in all 6 rows that both have\n" in said
    text = Page((one / "report-compare" / "index.html").read_text()).text
    assert "What differs" in text and "Settings, versions and files are the same." in text


def test_every_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(tmp_path / "one")
    lock = {
        "packages": {"python": "3.11.2", "torch": "2.12.0"},
        "digests": {
            "model.path config.json": "0123456789abcdef",
            "data.train_files[0]": "2222222222222222",
        },
    }
    other = make(tmp_path / "other", reward=0.75, lock=lock, **{"actor/entropy": 0.3})
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("0.001", "0.1").replace("seed: 1", "seed: 2"))
    assert main(["report", str(one), str(other), "--open", "no"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in (
        "setting actor.optim.lr: 0.001 | 0.1",
        "setting trainer.seed: 1 | 2",
        "version torch: 2.13.0 | 2.12.0",
        "file data.train_files[0]: 1111111111111111 | 2222222222222222",
        # Newcombe, of [0.45, 0.55] and [0.7, 0.8]: 0.25 -+ sqrt(0.05^2 + 0.05^2).
        (
            "held-out accuracy: 0.500 [0.450, 0.550] | 0.750 [0.700, 0.800], difference +0.250"
            " [+0.179, +0.321]"
        ),
        # Two steps of 8 samples with deviation 0.5: half 1.96 x sqrt(2 x 0.25 / 8) / 2; of the
        # difference x sqrt 2.
        (
            "reward, last 2 steps: 0.500 [0.255, 0.745] | 0.750 [0.505, 0.995], difference +0.250"
            " [-0.096, +0.596]"
        ),
        "curves first differ at step 2: critic/rewards/mean, actor/entropy",
    ):
        assert line in lines, lines
    assert not [
        line
        for line in lines
        if "python" in line or "config.json" in line or "settings, versions" in line
    ]
    text = Page((one / "report-compare" / "index.html").read_text()).text
    assert (
        "actor.optim.lr" in text
        and "2222222222222222" in text
        and "+0.250 [+0.179, +0.321]" in text
    )


def test_a_metric_whose_interval_leaves_0_out_is_named(tmp_path: Path) -> None:
    """It is 2.5 and 2 at the last steps of one run, 4.5 and 4 in the other: t(2) x
    sqrt(2 x 0.125 / 2).
    """
    runs = []
    for name, shift in (("one", 0.0), ("other", 2.0)):
        rows = [
            step_row(step, 0.5, **{"actor/entropy": 1 + step / 2 + shift}) for step in (1, 2, 3)
        ]
        runs.append(
            write_run_dir(
                tmp_path / name, [*rows, step_row(4, 0.5, **{"actor/entropy": 2.0 + shift})]
            )
        )
    found = compare_runs(*map(read_run_files, runs))
    reward, entropy = found.curve_differences
    assert (reward.name, reward.is_significant, entropy.name, entropy.difference.value) == (
        "reward, last 2 steps",
        False,
        "actor/entropy",
        2.0,
    )
    assert entropy.difference.low == pytest.approx(2 - 4.302653 * 0.125**0.5, abs=1e-5)
    assert found.notes == tuple(
        f"{name} has no config.lock.yaml: its versions and files cannot be compared"
        for name in ("one", "other")
    )


BOOKKEEPING = ("training/global_step", "training/epoch", "policy/version", "checkpoint/step")


def test_what_only_counts_the_run_on_is_no_difference(tmp_path: Path) -> None:
    """A run that was resumed has other counts of syncs and checkpoints, and learns the same."""
    runs = [
        write_run_dir(
            tmp_path / name,
            [
                step_row(step, 0.5, **dict.fromkeys(BOOKKEEPING, shift + step))
                for step in range(1, 9)
            ],
        )
        for name, shift in (("one", 0.0), ("other", 40.0))
    ]
    found = compare_runs(*map(read_run_files, runs))
    assert found.first_difference_text == (
        "curves are the same, bit for bit, in all 8 rows that both have"
    )
    assert [curve.name for curve in found.curve_differences] == ["reward, last 4 steps"]


def rise(step: int) -> dict[str, float]:
    """A metric that grows with the steps, equally in each run."""
    return {"actor/entropy": float(step), "actor/grad_norm": 2.0 + step / 8}


def test_a_longer_run_is_compared_at_the_last_common_step(tmp_path: Path) -> None:
    """Both are the same run; the second goes on, and its reward and held-out score rise."""
    runs = []
    for name, num_steps in (("one", 4), ("other", 12)):
        rows = [step_row(step, step / 16, **rise(step)) for step in range(1, num_steps + 1)]
        held_out = [
            evaluation_row(step, step / 16, step / 16, step / 16 + 0.1)
            for step in range(0, num_steps + 1, 2)
        ]
        runs.append(write_run_dir(tmp_path / name, [*rows, *held_out]))
    found = compare_runs(*map(read_run_files, runs))
    assert [(c.name, c.first_estimate, c.second_estimate) for c in found.curve_differences] == [
        (c.name, c.first_estimate, c.first_estimate) for c in found.curve_differences
    ]
    assert [curve.name for curve in found.curve_differences] == [
        "held-out accuracy at step 4",
        "reward, last 2 steps up to step 4",
    ]
    assert found.curve_differences[0].first_estimate.value == 0.25
    assert found.notes[-1] == (
        "one ends at step 4, other at step 12: curves are compared at step 4, the last that both"
        " have"
    )
    same = compare_runs(read_run_files(runs[1]), read_run_files(runs[1]))
    assert [curve.name for curve in same.curve_differences] == [
        "held-out accuracy",
        "reward, last 6 steps",
    ]


def test_runs_that_were_never_evaluated_at_one_step_say_so(tmp_path: Path) -> None:
    runs = [
        write_run_dir(
            tmp_path / name, [step_row(1, 0.5), step_row(2, 0.5), evaluation_row(at, 0.5, 0.4, 0.6)]
        )
        for name, at in (("one", 1), ("other", 2))
    ]
    found = compare_runs(*map(read_run_files, runs))
    assert [curve.name for curve in found.curve_differences] == ["reward, last 1 step"]
    assert found.notes[-1] == (
        "the runs were not evaluated at a common step: their held-out scores are not compared"
    )


def test_scores_between_0_and_1_are_no_accuracy(tmp_path: Path) -> None:
    runs = [
        write_run_dir(
            tmp_path / name,
            [step_row(1, 0.5), evaluation_row(1, 0.5, 0.4, 0.6, **{"val/binary_scores": binary})],
        )
        for name, binary in (("one", 1.0), ("other", 0.0))
    ]
    files = [read_run_files(path) for path in runs]
    for first, second, name in ((0, 0, "accuracy"), (0, 1, "score"), (1, 1, "score")):
        found = compare_runs(files[first], files[second])
        assert found.curve_differences[0].name == f"held-out {name}"

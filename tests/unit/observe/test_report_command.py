"""`rlhf-megatron report`: where it writes, what it says, several runs, pictures, errors."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from report_samples import (
    Page,
    evaluation_row,
    mismatch_line,
    sample,
    step_row,
    write_lines,
    write_run_dir,
)

from rlhf_megatron.cli.main import main
from rlhf_megatron.controller.observe.report.chart_catalogue import REPORT_SECTIONS
from rlhf_megatron.controller.observe.report.comparison_page import (
    find_differing_settings,
    group_runs,
    make_comparison_charts,
    render_comparison_page,
)
from rlhf_megatron.controller.observe.report.report_writer import (
    escape_matplotlib_text,
    write_report,
)
from rlhf_megatron.controller.observe.report.run_files import read_run_files
from rlhf_megatron.controller.observe.run_summary import draw_loss_curve, draw_reward_curve


def colours_of(path: Path) -> tuple[tuple[int, int], int]:
    """Size of a picture, and how many different colours it has."""
    image = pytest.importorskip("PIL.Image").open(path).convert("RGB")
    return image.size, len(image.getcolors(maxcolors=1 << 24))


def test_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    lines = [mismatch_line(1, {"stop": [1, 2, 3]})]
    path = write_run_dir(
        tmp_path / "run", samples=[sample(1)], mismatch=lines, summary={"steps": 2, "seconds": 9.0}
    )
    assert main(["report", str(path), "--open", "no"]) == 0
    said = capsys.readouterr().out
    assert f"report: {path / 'report' / 'index.html'}" in said and said.startswith(
        "run: finished at step 2 of 4\n"
    )
    pictures = sorted(p.name for p in (path / "report").glob("*.png"))
    assert (
        pictures
        == ["lengths.png", "mismatch.png", "policy.png", "reward.png", "time.png"][-len(pictures) :]
    )
    assert {"mismatch.png", "policy.png", "reward.png", "time.png"} <= set(pictures)
    for name in pictures:
        (width, height), num_colours = colours_of(path / "report" / name)
        assert width > 500 and height > 300 and num_colours > 20, name
    page = Page((path / "report" / "index.html").read_text())
    assert [
        a["href"] for tag, a in page.tags if tag == "a" and str(a["href"]).endswith(".png")
    ] == [
        name
        for name in ("reward.png", "policy.png", "time.png", "mismatch.png")
        if name in pictures
    ]
    assert sorted(p.name for p in (path / "report").iterdir()) == sorted([*pictures, "index.html"])


def test_a_watched_report_follows_the_run_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run_dir(tmp_path / "run")
    pages = []

    def sleep(seconds: float) -> None:
        """What the run does meanwhile: a step, then its end."""
        pages.append((path / "report" / "index.html").read_text())
        assert seconds == 7
        if len(pages) == 1:
            write_lines(path / "metrics.jsonl", [step_row(step, 0.5) for step in (1, 2, 3)])
        else:
            (path / "summary.json").write_text('{"steps": 3, "seconds": 9.0}')

    monkeypatch.setattr("time.sleep", sleep)
    assert main(["report", str(path), "--open", "no", "--watch", "7"]) == 0
    said = capsys.readouterr().out
    assert "step 2 of 4 was written less than" in said and said.endswith(
        "run: finished at step 3 of 4\n"
    )
    reload = '<meta http-equiv="refresh" content="7">'
    assert [reload in page for page in pages] == [True, True] and pages[0] != pages[1]
    assert reload not in (path / "report" / "index.html").read_text()


def test_it_can_be_made_again_and_elsewhere(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "run")
    out = tmp_path / "a" / "b"
    for _ in range(2):
        assert main(["report", str(path), "--out", str(out), "--open", "no"]) == 0
    assert (out / "index.html").is_file() and not (path / "report").exists()


def test_without_matplotlib_there_is_the_page_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    path = write_run_dir(tmp_path / "run")
    assert main(["report", str(path), "--open", "no"]) == 0
    assert "no pictures: install matplotlib (pip install -e '.[demo]')" in capsys.readouterr().out
    assert [p.name for p in (path / "report").iterdir()] == ["index.html"]
    assert "matplotlib was not installed" in Page((path / "report" / "index.html").read_text()).text


def test_errors_end_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run_dir(tmp_path / "run")
    (tmp_path / "taken").write_text("")
    for arguments, message in (
        (
            ["report", str(tmp_path / "nothing")],
            "nothing is not there; give the directory of a run, such as runs/quick",
        ),
        (
            ["report", str(path), str(tmp_path)],
            "is not the directory of a run (no metrics.jsonl, no config.yaml); below",
        ),
        (["report", str(path), "--out", str(tmp_path / "taken")], "cannot write the report to"),
    ):
        assert main([*arguments, "--open", "no"]) == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_notes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run_dir(tmp_path / "run")
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"kind')
    assert main(["report", str(path), "--open", "no"]) == 0
    assert "note: metrics.jsonl: the last line is cut off and left out" in capsys.readouterr().out


def make_seeds(tmp_path: Path) -> list[Path]:
    """Two seeds of one configuration, one run of another."""
    paths = []
    for name, seed, last, rate in (
        ("base-seed1", 1, 0.5, "0.001"),
        ("base-seed2", 2, 0.7, "0.001"),
        ("fast", 1, 0.9, "0.1"),
    ):
        rows = [
            evaluation_row(0, 0.2, 0.1, 0.3),
            step_row(1, 0.25),
            step_row(2, last),
            evaluation_row(2, last, 0.4, 0.95),
        ]
        paths.append(write_run_dir(tmp_path / name, rows, seed=seed))
        config = (paths[-1] / "config.yaml").read_text()
        (paths[-1] / "config.yaml").write_text(config.replace("0.001", rate))
    return paths


def test_seeds_are_one_configuration(tmp_path: Path) -> None:
    groups = group_runs([read_run_files(path) for path in make_seeds(tmp_path)])
    assert [(g.label, len(g.runs)) for g in groups] == [("base (2 runs)", 2), ("fast", 1)]
    assert find_differing_settings(groups) == [("actor.optim.lr", ["0.001", "0.1"])]
    reward = make_comparison_charts(groups, "reward")[0]
    assert [(s.label, s.is_faint, s.colour_index, s.values) for s in reward.series] == [
        ("base (2 runs)", True, 0, (0.25, 0.5)),
        ("base (2 runs)", True, 0, (0.25, 0.7)),
        ("base (2 runs)", False, 0, (0.25, 0.6)),
        ("fast", False, 1, (0.25, 0.9)),
    ]
    mean = reward.series[2]
    single = reward.series[3]
    # Deviation 0.141421, t(1) = 12.706205: half width 12.706205 x 0.141421 / sqrt(2) = 1.270620.
    assert mean.low is not None and mean.high is not None and single.low is not None
    assert (mean.low[1], mean.high[1]) == pytest.approx((0.6 - 1.27062, 0.6 + 1.27062), abs=1e-5)
    assert single.low[1] == pytest.approx(0.9 - 1.959964 * 0.5 / 8**0.5, abs=1e-5)


def test_a_mean_stops_where_a_run_stops(tmp_path: Path) -> None:
    paths = make_seeds(tmp_path)[:2]
    write = [step_row(1, 0.25), step_row(2, 0.5), step_row(3, 1.0)]
    longer = write_run_dir(tmp_path / "base-seed3", write, seed=3)
    (group,) = group_runs([read_run_files(path) for path in (*paths, longer)])
    mean = make_comparison_charts([group], "reward")[0].series[-1]
    assert mean.steps == (1, 2) and mean.values == (0.25, pytest.approx(0.566667))


def test_the_page_of_several_runs(tmp_path: Path) -> None:
    paths = make_seeds(tmp_path)
    assert main(["report", *map(str, paths), "--open", "no"]) == 0
    html = (paths[0] / "report-compare" / "index.html").read_text()
    page = Page(html)
    assert html == render_comparison_page(
        [read_run_files(path) for path in paths], sorted_pictures(page)
    )
    text = page.text
    assert "base (2 runs) · fast" in text and "3 runs, 2 configurations" in text
    # 0.9 - 0.6, no interval against a single run
    assert "0.600 [-0.671, 1.871]" in text and "+0.300" in text
    assert "base-seed2" in text and "interrupted" not in text
    figures = [a["data-chart"] for tag, a in page.tags if tag == "figure"]
    assert sorted(map(str, figures)) == sorted(page.data["charts"]) and "samples" not in page.data


def sorted_pictures(page: Page) -> list[str] | None:
    """Those that the page links to, in its order."""
    names = [
        str(a["href"]) for tag, a in page.tags if tag == "a" and str(a["href"]).endswith(".png")
    ]
    return names or None


def test_labels_of_pictures() -> None:
    assert (
        escape_matplotlib_text("_a$b$\x00") == r" _a\$b\$" + "\ufffd"
        and len(escape_matplotlib_text("x" * 500)) == 60
    )


ODD_VALUES = {
    "zero": lambda step: 0.0,
    "below": lambda step: -float(step),
    "no_number": lambda step: math.nan,
    "huge": lambda step: 1e150 * (-1) ** step,
    "tiny": lambda step: 1e-320 * step,
    "mixed": lambda step: (0.0, -1.0, 5.0)[step % 3],
}


def write_odd_run(path: Path, value: Callable[[int], float], num_steps: int) -> Path:
    """A run whose metrics of all charts have these values."""
    keys = [
        key for section in REPORT_SECTIONS for spec in section.charts for key in spec.metric_keys
    ]
    keys = [key.replace("<", "").replace(">", "") for key in keys]
    rows = []
    for step in range(1, num_steps + 1):
        rows.append(step_row(step, 0.5) | {key: value(step) for key in keys})
        held_out = {key: value(step) for key in keys if key.startswith("val/")}
        rows.append({"kind": "evaluation", "step": step, "seconds": 1.0, **held_out})
    lines = [mismatch_line(1, {"stop": [0, 0, 0]}), mismatch_line(2, {"stop": [1, 0, 0]})]
    return write_run_dir(path, rows, mismatch=lines)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_pictures_of_odd_numbers_are_drawn_without_warnings(tmp_path: Path, num_steps: int) -> None:
    pytest.importorskip("matplotlib")
    runs = [write_odd_run(tmp_path / name, value, num_steps) for name, value in ODD_VALUES.items()]
    for run_dirs in ([runs[0]], [runs[1]], runs[:2], runs):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            written = write_report(run_dirs, tmp_path / "out")
        assert [str(warning.message) for warning in caught] == []
        assert not [note for note in written.notes if "matplotlib" in note], written.notes


def test_characters_that_the_font_lacks_are_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = write_run_dir(tmp_path / "\u4e2d\u6587")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["report", str(path), "--open", "no"]) == 0
        points = [(1, 0.5), (2, 0.75)]
        draw_reward_curve(tmp_path / "curve.png", "\u4e2d", points, [])
        draw_loss_curve(tmp_path / "loss.png", "\u4e2d", points, [])
    assert [str(warning.message) for warning in caught] == []
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert note.startswith("note: the pictures have boxes for characters that matplotlib's font")
    assert "\u4e2d" in note and "\u6587" in note and note.endswith("the page shows them")


def test_the_status_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of 4.5 s: two of four are done."""
    running = write_run_dir(tmp_path / "running")
    stopped = write_run_dir(tmp_path / "stopped")
    ends = [
        {"kind": "start", "time": 1.0},
        {"kind": "end", "time": 2.0, "reason": "stopped: SIGTERM to the controller"},
    ]
    write_lines(stopped / "attempts.jsonl", ends)
    assert main(["status", str(running), str(stopped)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{running}: running, step 2 of 4 done ")
    assert lines[1] == "  about 9 s left for 2 steps, as long as the last ones"
    assert lines[2].startswith("  reward ") and lines[2].endswith(" at step 2")
    assert f"{stopped}: stopped after step 2 of 4: SIGTERM to the controller" in lines
    assert main(["status", str(tmp_path / "gone")]) == 1

"""Run directories as they are found: complete, older, cut off, damaged, or no run at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from report_samples import (
    evaluation_row,
    mismatch_line,
    sample,
    step_row,
    write_lines,
    write_run_dir,
)

from rlhf_megatron.cli.main import main
from rlhf_megatron.controller.observe.report.run_files import read_run_files
from rlhf_megatron.controller.observe.report.run_overview import (
    describe_layouts,
    determine_run_status,
    list_changed_settings,
)
from rlhf_megatron.controller.observe.report.run_page import read_asset, render_run_page

TRACE = """[
{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "x"}},
{"name": "generate", "cat": "stage", "ph": "X", "ts": 5000000, "dur": 3000000, "pid": 1, "tid": 1, \
"args": {"step": 1}},
{"name": "actor.update", "cat": "call", "ph": "X", "ts": 8500000, "dur": 500000, "tid": 2, "args": \
{"step": 1}},
{"name": "step 1", "cat": "step", "ph": "X", "ts": 5000000, "dur": 4500000, "pid": 1, "tid": 0, \
"args": {"step": 1}},
"""


def test_rows_are_those_of_the_files(tmp_path: Path) -> None:
    rows = [evaluation_row(0, 0.2, 0.1, 0.3), step_row(1, 0.25), step_row(2, 0.75)]
    run = read_run_files(
        write_run_dir(
            tmp_path / "a",
            rows,
            samples=[sample(1)],
            mismatch=[mismatch_line(1, {"stop": [1, 2, 3]})],
        )
    )
    for found, written in zip([*run.evaluations, *run.steps], rows, strict=True):
        assert {
            "kind": found.kind,
            "step": found.step,
            "seconds": found.run_seconds,
            **found.metrics,
        } == written
    assert vars(run.samples[0]) == sample(1)
    (line,) = run.mismatch_steps
    assert (
        line.edges == (0.0, 1e-6, 1e-5, 1e-4)
        and line.groups[0].counts == (1, 2, 3)
        and line.worst[0].token == "7"
    )
    assert run.notes == () and set(run.absence_reasons) == {
        "trace.json",
        "summary.json",
        "held_out_samples.jsonl",
    }


def test_samples_of_an_older_run_tell_less(tmp_path: Path) -> None:
    told = sample(2, version_spans=[[1, 0, 1], [2, 1, 2]], num_retractions=4)
    older = {
        k: v
        for k, v in sample(1).items()
        if k not in ("version_spans", "num_cached_tokens", "num_retractions")
    }
    broken = sample(3, version_spans=[[1, 0]])
    run = read_run_files(write_run_dir(tmp_path / "a", samples=[older, told, broken]))
    assert [(s.version_spans, s.num_cached_tokens, s.num_retractions) for s in run.samples] == [
        ((), None, None),
        (((1, 0, 1), (2, 1, 2)), 3, 4),
    ]
    assert run.notes == ("samples.jsonl: 1 line(s) left out that cannot be read (line 3)",)


@pytest.mark.parametrize("ending", ["", "]\n", '{"name": "labels", "ph": "M", "args": {}}\n]\n'])
def test_a_trace_may_be_open_at_its_end(tmp_path: Path, ending: str) -> None:
    run = read_run_files(write_run_dir(tmp_path / "a", trace=TRACE + ending))
    assert [
        (s.name, s.start_s, s.seconds, s.step, s.is_whole_step, s.is_host_call) for s in run.spans
    ] == [
        ("generate", 0.0, 3.0, 1, False, False),
        ("step 1", 0.0, 4.5, 1, True, False),
        ("actor.update", 3.5, 0.5, 1, False, True),
    ]
    assert run.notes == ()


def test_cut_off_and_broken_lines_are_left_out_with_a_note(tmp_path: Path) -> None:
    path = write_run_dir(
        tmp_path / "a",
        samples=[sample(1), sample(2)],
        mismatch=[mismatch_line(1, {"stop": [1, 2, 3]})],
    )
    (path / "trace.json").write_text(TRACE + '{"name": "upd')
    for name in ("metrics", "samples"):
        file = path / f"{name}.jsonl"
        file.write_bytes(file.read_bytes()[:-9])
    lines = (path / "mismatch.jsonl").read_text()
    (path / "mismatch.jsonl").write_text(
        f'{lines}nonsense\n{{"step": 2, "edges": [3, 1], "groups": []}}\n[1]\n' + lines
    )
    run = read_run_files(path)
    assert (
        [row.step for row in run.steps] == [1]
        and len(run.samples) == 1
        and len(run.mismatch_steps) == 2
    )
    assert len(run.spans) == 3
    assert run.notes == (
        "metrics.jsonl: the last line is cut off and left out",
        "trace.json: 1 event(s) left out that are cut off or cannot be read",
        "samples.jsonl: the last line is cut off and left out",
        "mismatch.jsonl: 3 line(s) left out that cannot be read (line 2, 3, 4)",
    )


def test_bytes_that_are_no_text_and_deep_nesting_do_no_harm(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "a")
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00{\n" + b"[" * 100000 + b"\n")
    run = read_run_files(path)
    assert len(run.steps) == 2 and "2 line(s)" in run.notes[0]


def test_numbers_that_are_not_finite_are_kept_apart_from_missing_ones(tmp_path: Path) -> None:
    rows = [
        step_row(1, 0.5, **{"actor/grad_norm": float("nan")}),
        step_row(2, 0.5, **{"actor/grad_norm": None}),
    ]
    line = mismatch_line(1, {"stop": [0, 0, 1]})
    line["groups"][0]["max"] = line["worst"][0]["difference"] = line["worst"][0]["engine"] = None
    run = read_run_files(write_run_dir(tmp_path / "a", rows, mismatch=[line]))
    assert [str(row.metrics["actor/grad_norm"]) for row in run.steps] == ["nan", "nan"]
    assert (
        run.mismatch_steps[0].groups[0].max
        == run.mismatch_steps[0].worst[0].difference
        == float("inf")
    )


@pytest.mark.parametrize("number", ["1e309", "-1e309", "1e308", "9" * 400, "9" * 5000, "Infinity"])
@pytest.mark.parametrize(
    "name", ["actor/grad_norm", "critic/rewards/mean", "seconds", "val/accuracy"]
)
def test_numbers_that_no_figure_can_be_are_left_out_and_counted(
    tmp_path: Path, number: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [evaluation_row(0, 0.2, 0.1, 0.3), step_row(1, 0.25), step_row(2, 0.75)]
    rows[0 if name.startswith("val/") else 2][name] = "@"
    path = write_run_dir(tmp_path / "a", rows)
    file = path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"@"', number))
    line = 1 if name.startswith("val/") else 3
    note = (
        "metrics.jsonl: 1 number(s) left out that are not finite or beyond 1e+150"
        f" ({name} in line {line})"
    )
    run = read_run_files(path)
    assert run.notes == (note,) and len(run.steps) == 2
    if name == "actor/grad_norm":
        assert [str(row.metrics[name]) for row in run.steps] == ["2.0", "nan"]
    assert main(["status", str(path)]) == 0
    assert f"note: {note}" in capsys.readouterr().out
    assert render_run_page(run, None)


@pytest.mark.parametrize("file_name", ["metrics.jsonl", "samples.jsonl", "mismatch.jsonl"])
@pytest.mark.parametrize("value", ["1e309", "9" * 400, "[" * 50_000 + "]" * 50_000])
def test_a_line_whose_step_is_none_is_left_out_and_counted(
    tmp_path: Path, file_name: str, value: str
) -> None:
    path = write_run_dir(
        tmp_path / "a",
        samples=[sample(1), sample(2)],
        mismatch=[mismatch_line(step, {"stop": [1, 2, 3]}) for step in (1, 2)],
    )
    file = path / file_name
    file.write_text(file.read_text().replace('"step": 2', f'"step": {value}'))
    run = read_run_files(path)
    line = 3 if file_name == "metrics.jsonl" else 2
    assert run.notes == (f"{file_name}: 1 line(s) left out that cannot be read (line {line})",)
    assert render_run_page(run, None)


def test_files_beside_the_metrics_may_be_damaged(tmp_path: Path) -> None:
    trace = TRACE.replace('"ts": 8500000', '"ts": 1e309') + '{"ph": "X", "ts": ' + "[" * 50_000
    path = write_run_dir(
        tmp_path / "a",
        samples=[sample(1, response="half \ud800", reward=float("inf"))],
        summary={"steps": 2, "seconds": 10**400, "layouts": {"actor": "tp2 \udfff"}},
        trace=trace,
    )
    (path / "attempts.jsonl").write_text(
        '{"kind": "start", "time": 1.0, "resumed_from_step": null}\n'
        + f'{{"kind": "end", "time": 1e309}}\n{{"kind": "end", "time": {"9" * 400}}}\n'
        + '{"kind": "end", "time": 5.0, "seconds": "x"}\n'
        + f'{{"kind": {"[" * 50_000}\n'
        + '{"kind": "end", "time": 9.0, "reason": "failed: \\ud800 \\ud83d\\ude00"}\n'
    )
    run = read_run_files(path)
    assert [line["time"] for line in run.attempts] == [1.0, 9.0]
    assert run.attempts[1]["reason"] == "failed: \ufffd \U0001f600"
    assert run.summary == {"steps": 2, "seconds": None, "layouts": {"actor": "tp2 \ufffd"}}
    assert run.samples[0].response == "half \ufffd" and run.samples[0].reward is None
    assert run.notes == (
        "summary.json: 1 number(s) left out that are not finite or beyond 1e+150 (seconds)",
        "trace.json: 2 event(s) left out that are cut off or cannot be read",
        "samples.jsonl: 1 number(s) left out that are not finite or beyond 1e+150"
        " (reward in line 1)",
    )
    render_run_page(run, None).encode()
    (path / "summary.json").write_text("[" * 50_000)
    assert "summary.json: not a JSON object; left out" in read_run_files(path).notes


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    run = read_run_files(
        write_run_dir(
            tmp_path / "a", [step_row(1, 0.1), step_row(2, 0.2), step_row(2, 0.9), step_row(3, 0.3)]
        )
    )
    assert [(row.step, row.metrics["critic/rewards/mean"]) for row in run.steps] == [
        (1, 0.1),
        (2, 0.9),
        (3, 0.3),
    ]
    assert "written again" in run.notes[0]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    write_run_dir(tmp_path / "parent" / "inner")
    late = write_run_dir(tmp_path / "late")
    (late / "metrics.jsonl").unlink()
    blank = write_run_dir(tmp_path / "blank")
    (blank / "metrics.jsonl").write_text('{"kind": "st')
    odd = write_run_dir(tmp_path / "odd")
    (odd / "metrics.jsonl").unlink()
    (odd / "metrics.jsonl").mkdir()
    for name, message in (
        ("absent", "is not there; give the directory of a run"),
        ("file", "is a file; give the directory of a run"),
        ("empty", r"is not the directory of a run \(no metrics.jsonl, no config.yaml\)\."),
        ("parent", "below it are inner"),
        ("late", "has no metrics.jsonl; a report is made of it: add jsonl to trainer.logger"),
        ("blank", "has no complete line; a report needs the first step"),
        ("odd", "cannot read .*metrics.jsonl: Is a directory; make it a readable file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_run_files(tmp_path / name)


def test_how_a_run_ended(tmp_path: Path) -> None:
    done = read_run_files(
        write_run_dir(
            tmp_path / "done", summary={"steps": 2, "seconds": 9.0, "layout": "tp2 pp1 dp2"}
        )
    )
    assert (determine_run_status(done).state, determine_run_status(done).text) == (
        "finished",
        "finished at step 2 of 4",
    )
    assert describe_layouts(done) == "tp2 pp1 dp2"
    path = write_run_dir(tmp_path / "open")
    assert determine_run_status(read_run_files(path)).state == "running"
    os.utime(path / "metrics.jsonl", (1e9, 1e9))
    stopped = read_run_files(path)
    assert (
        determine_run_status(stopped).text
        == "interrupted after step 2 of 4: no summary.json and no error in its logs"
    )
    (path / "logs").mkdir()
    aftermath = (
        "2026-01-01 10:00:00,1 [actor dp0 pp0 tp0] ERROR runtime.service: ended in actor.update,"
        " forward:\n  line\n"
    )
    (path / "logs" / "rank0.log").write_text(aftermath)
    assert determine_run_status(read_run_files(path)).state == "interrupted"
    cause = (
        "2026-01-01 10:00:01,1 [actor dp0 pp0 tp1] ERROR runtime.service: x failed\nTraceback\n"
        "ValueError: y\n"
    )
    (path / "logs" / "rank1.log").write_text(
        cause + "2026-01-01 10:00:02,1 [actor dp0 pp0 tp1] INFO y: bye\n"
    )
    failed = read_run_files(path)
    assert determine_run_status(failed).text == "failed after step 2 of 4"
    assert failed.log_errors == ("logs/rank1.log\n" + cause.rstrip(),)


@pytest.mark.parametrize(
    ("reason", "word", "text"),
    [
        (
            "stopped: SIGTERM to [controller]",
            "stopped",
            "stopped after step 2 of 4: SIGTERM to [controller]",
        ),
        ("failed: a: b", "failed", "failed after step 2 of 4: a: b"),
        ("complete", "finished", "finished at step 2 of 4"),
        (None, "running", "no summary yet; step 2 of 4 was written less than 3 minutes ago"),
    ],
)
def test_attempts_tell_how_a_run_ended(
    tmp_path: Path, reason: str | None, word: str, text: str
) -> None:
    path = write_run_dir(tmp_path / "run")
    lines = [
        {"kind": "start", "time": 1.0},
        {"kind": "end", "time": 2.0, "reason": "failed: the attempt before"},
    ]
    lines += [{"kind": "start", "time": 3.0}]
    write_lines(
        path / "attempts.jsonl",
        lines + ([{"kind": "end", "time": 4.0, "reason": reason}] if reason else []),
    )
    found = determine_run_status(read_run_files(path))
    assert (found.state, found.text) == (word, text)
    assert f".pill.{word}" in read_asset("report.css")


def test_all_layouts_of_a_resumed_run_are_told(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "run")
    told = [
        {"actor": "tp2 pp1 dp2"},
        {"actor": "tp2 pp1 dp2"},
        {"actor": "tp1 pp2 dp2", "critic": "tp1 pp1 dp1"},
    ]
    write_lines(
        path / "attempts.jsonl", [{"kind": "start", "time": 1.0, "layouts": one} for one in told]
    )
    assert (
        describe_layouts(read_run_files(path))
        == "actor tp2 pp1 dp2, then actor tp1 pp2 dp2, critic tp1 pp1 dp1"
    )


def test_an_older_run_has_the_defaults_with_which_it_ran(tmp_path: Path) -> None:
    """A decay in a configuration that does not say where it ends was written before that could be
    said.
    """
    path = write_run_dir(tmp_path / "a")
    config = path / "config.yaml"
    for style, ends in (("cosine", "at_last_step"), ("constant", None)):
        tree = yaml.safe_load(config.read_text())
        tree["actor"]["optim"]["lr_decay_style"] = style
        config.write_text(yaml.safe_dump(tree))
        values = {s.key: s.value for s in list_changed_settings(read_run_files(path))}
        assert values.get("actor.optim.lr_decay_ends") == ends


def test_settings_that_differ_from_the_defaults(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "a")
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text + "  not_any_more: 3\n")
    found = {s.key: (s.value, s.default) for s in list_changed_settings(read_run_files(path))}
    assert found == {
        "model.path": ("models/tiny", "''"),
        # the file has no such setting: the run was of a version without it
        "data.add_special_tokens": ("false", "true"),
        "data.train_batch_size": ("4", "256"),
        "actor.megatron.tensor_model_parallel_size": ("2", "1"),
        "actor.optim.lr": ("0.001", "1e-06"),
        "rollout.engine": ("local", "sglang"),
        "rollout.n": ("2", "8"),
        "trainer.n_gpus_per_node": ("4", "8"),
        "trainer.total_training_steps": ("4", "100"),
        "trainer.not_any_more": ("3", ""),
    }


def test_a_configuration_that_cannot_be_read_is_shown_as_text(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "a")
    (path / "config.yaml").write_text("model: [\n")
    run = read_run_files(path)
    assert (
        run.config is None and run.config_text == "model: [\n" and list_changed_settings(run) == []
    )
    assert run.notes == ("config.yaml: not valid YAML; shown as text only",)


def test_a_summary_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    path = write_run_dir(tmp_path / "a")
    (path / "summary.json").write_text(json.dumps([1]))
    run = read_run_files(path)
    assert run.summary is None and run.notes == ("summary.json: not a JSON object; left out",)

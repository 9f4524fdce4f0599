"""TensorBoard, console, and which settings they show; event files are read back with
TensorBoard's own readers.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from places import MODEL, ROOT
from scheduler_samples import train_batch

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.show import select_notable_settings
from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationResult, SetResult
from rlhf_megatron.controller.observe.loggers import console, is_batch_view_step
from rlhf_megatron.controller.observe.loggers.console import (
    CONSOLE_COLUMNS,
    keep_columns_that_fit,
    select_console_columns,
)
from rlhf_megatron.controller.observe.loggers.tensorboard import format_sample_as_markdown
from rlhf_megatron.controller.observe.metrics.batch_metrics import make_logged_samples
from rlhf_megatron.controller.observe.run_facts import (
    MAIN_SETTINGS,
    SETTINGS_WITHOUT_INFLUENCE,
    RunFacts,
    make_run_facts,
)
from rlhf_megatron.controller.observe.tracker import RunTracker, compute_evaluation_metrics
from rlhf_megatron.data.tokenizer import load_tokenizer

SAID = {"actor/num_epochs": 1.0, "rollout/num_samples": 10.0}
SETTINGS: dict[str, Any] = {
    "actor.optim.lr": 1e-4,
    "rollout.n": 16,
    "reward.name": "exact",
    "data.shuffle": False,
}


def with_critic():
    batch = train_batch(10)
    columns = {
        "values": torch.arange(65.0),
        "returns": torch.arange(65.0) * 2,
        "entropies": torch.ones(65),
    }
    return replace(
        batch,
        **columns,
        rewards=torch.tensor([0.0] * 5 + [1.0] * 4 + [9.0]),
        reward_statuses=MASKED,
    )


MASKED = ("ok",) * 9 + ("masked:aborted",)


def track(tracker: RunTracker, steps: int, **said: float) -> None:
    for step in range(1, steps + 1):
        with tracker.track_step(step):
            tracker.set_step_batch(with_critic(), SAID | said)


def events_of(run_dir: Path, histograms: int = 0):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = str(run_dir / "tensorboard" / "run")
    found = EventAccumulator(path, size_guidance={"histograms": histograms, "tensors": 0})
    found.Reload()
    return found


def test_histograms_are_those_of_the_columns(tmp_path: Path) -> None:
    with RunTracker(tmp_path, ("tensorboard",), total_steps=1) as tracker:
        track(tracker, 1)
    events = events_of(tmp_path)
    names = (
        "rewards",
        "response_length",
        "advantages",
        "log_prob_difference",
        "mismatch_ratio",
        "values",
        "returns",
    )
    assert set(events.Tags()["histograms"]) == {f"histogram/{name}" for name in (*names, "entropy")}

    def of(name: str):
        return events.Histograms(f"histogram/{name}")[0].histogram_value

    rewards = of("rewards")  # the masked sample's 9 is none
    assert (rewards.num, rewards.min, rewards.max, rewards.sum) == (9, 0.0, 1.0, 4.0)
    assert (of("response_length").num, of("response_length").sum) == (10, 55.0)
    # sample i has i + 1 response tokens; engine and trainer differ by i on each, with ratio exp(-i)
    difference = of("log_prob_difference")
    assert (difference.num, difference.min, difference.max) == (55, 0.0, 9.0)
    assert difference.sum == sum(i * (i + 1) for i in range(10))
    assert of("mismatch_ratio").max == 1.0 and of("mismatch_ratio").min == pytest.approx(
        2.71828**-9, rel=1e-4
    )
    counts = dict(zip(difference.bucket_limit, difference.bucket, strict=True))
    # 1 token of sample 0 and 2 of sample 1
    assert sum(count for limit, count in counts.items() if limit <= 1.5) == 3
    assert of("returns").sum == 2 * of("values").sum and of("values").num == 55


@pytest.mark.parametrize(
    ("total", "count"), [(1, 1), (200, 200), (201, 102), (1000, 201), (1003, 169)]
)
def test_large_things_are_logged_some_200_times_at_most(total: int, count: int) -> None:
    steps = [step for step in range(1, total + 1) if is_batch_view_step(step, total)]
    assert len(steps) == count and steps[0] == 1 and steps[-1] == total


def test_histograms_and_texts_have_their_steps(tmp_path: Path) -> None:
    with RunTracker(tmp_path, ("tensorboard",), total_steps=900) as tracker:  # every 5th
        track(tracker, 11)
    events = events_of(tmp_path)
    assert [e.step for e in events.Histograms("histogram/rewards")] == [1, 5, 10]
    assert [e.step for e in events.Tensors("samples/text_summary")] == [1, 5, 10]
    assert len(events.Scalars("critic/rewards/mean")) == 11


def test_a_column_without_a_finite_number_has_no_histogram(tmp_path: Path) -> None:
    with RunTracker(tmp_path, ("tensorboard",), total_steps=1) as tracker, tracker.track_step(1):
        batch = with_critic()
        half = torch.where(torch.arange(65) % 2 == 0, float("inf"), 1.0)
        tracker.set_step_batch(
            replace(batch, values=torch.full((65,), float("nan")), returns=half), SAID
        )
    events = events_of(tmp_path)
    assert "histogram/values" not in events.Tags()["histograms"]
    assert events.Histograms("histogram/returns")[0].histogram_value.max == 1.0


def test_a_sample_is_text_and_never_markup() -> None:
    batch = replace(
        with_critic(),
        responses=("<b>bold</b>\n# title\n\n```\n| a |",) * 10,
        prompts=("x" * 5000,) * 10,
    )
    (sample,) = make_logged_samples(1, batch, 1, seed=0)
    text = format_sample_as_markdown(sample)
    block = text.split("response\n\n")[1].split("\n\nlabel")[0]
    assert block == "    <b>bold</b>\n    # title\n    \n    ```\n    | a |"
    assert "x" * 2000 + " … (5000 characters)" in text and "x" * 2001 not in text
    assert text.startswith("**best**: reward 1 (ok), ")
    assert format_sample_as_markdown(
        replace(sample, reward=None, status="masked:aborted")
    ).startswith("**best**: no reward (masked:")


def session_groups(logdir: Path) -> list[Any]:
    """What the HPARAMS tab asks for: its plugin's own handlers over the event files."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(logdir))
    context = backend_context.Context(
        TBContext(logdir=str(logdir), data_provider=provider, multiplexer=multiplexer)
    )
    request = RequestContext()
    known = ("", context.hparams_metadata(RequestContext(), ""))
    experiment = context.experiment_from_metadata(request, known[0], True, known[1], [])
    asked = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_UNKNOWN],
        col_params=[api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos],
        slice_size=10,
    )
    handler = list_session_groups.Handler(request, context, "", asked)
    return [experiment, *sorted(handler.run().session_groups, key=lambda group: group.name)]


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("kind"))


def test_the_hparams_tab_shows_settings_and_final_metrics(tmp_path: Path) -> None:
    for name, facts in (
        ("a", SETTINGS),
        ("b", SETTINGS | {"actor.optim.lr": 2e-4, "critic.lr": 1.0}),
    ):
        (tmp_path / name).mkdir()
        with RunTracker(
            tmp_path / name, ("tensorboard",), 3, RunFacts(name, settings=facts)
        ) as tracker:
            track(
                tracker,
                3 if name == "a" else 2,
                **{"actor/entropy_loss": 0.5 if name == "a" else 0.25},
            )
    experiment, first, second = session_groups(tmp_path)
    assert {key: value_of(value) for key, value in first.hparams.items()} == SETTINGS
    assert value_of(second.hparams["critic.lr"]) == 1.0
    assert {info.name for info in experiment.hparam_infos} == {*SETTINGS, "critic.lr"}, (
        "also what the second run set"
    )
    assert [
        info.name.tag for info in experiment.metric_infos if info.name.tag == "critic/rewards/mean"
    ]
    metrics = [
        {m.name.tag: (m.training_step, m.value) for m in group.metric_values}
        for group in (first, second)
    ]
    assert metrics[0]["critic/rewards/mean"] == (3, pytest.approx(4 / 9))
    assert [m["actor/entropy_loss"] for m in metrics] == [(3, 0.5), (2, 0.25)]


@pytest.mark.parametrize(
    ("how", "status"),
    [("ends", "STATUS_SUCCESS"), ("fails", "STATUS_FAILURE"), ("dies", "STATUS_UNKNOWN")],
)
def test_the_hparams_tab_shows_how_a_run_ended(tmp_path: Path, how: str, status: str) -> None:
    from tensorboard.plugins.hparams import api_pb2

    tracker = RunTracker(tmp_path, ("tensorboard",), 3, RunFacts(settings=SETTINGS))
    track(tracker, 1)
    if how != "dies":
        tracker.__exit__(KeyError if how == "fails" else None)
    _, group = session_groups(tmp_path)
    assert api_pb2.Status.Name(group.sessions[0].status) == status
    if how == "dies":
        tracker.__exit__(None)


def test_settings_are_what_was_set_and_the_main_ones() -> None:
    config = read_run_config(
        ROOT / "configs" / "quickstart.yaml",
        ["trainer.experiment_name=other", "data.shuffle=false", "actor.optim.betas=[0.9,0.99]"],
    ).config
    found = select_notable_settings(config, MAIN_SETTINGS, SETTINGS_WITHOUT_INFLUENCE)
    assert set(MAIN_SETTINGS) <= set(found)
    assert found["trainer.seed"] == 1, "a main one, though at its default"
    assert found["data.shuffle"] is False and found["actor.optim.lr"] == 2e-4
    assert found["actor.policy_loss.params.clip_ratio_c"] == 3.0, (
        "entries of a free mapping one by one"
    )
    assert found["actor.optim.betas"] == "[0.9, 0.99]"
    assert not {"trainer.experiment_name", "actor.ppo_epochs", "rollout.top_p"} & set(found)
    assert all(isinstance(value, bool | int | float | str) for value in found.values())
    facts = make_run_facts(config, "other.1", load_tokenizer(MODEL))
    assert (facts.run_name, facts.project_name, facts.num_samples_logged) == (
        "other.1",
        "rlhf_megatron",
        6,
    )
    assert facts.config["actor"]["optim"]["lr"] == 2e-4 and "critic" not in facts.config, (
        "what is in use"
    )
    json.dumps(facts.config, allow_nan=False)
    assert facts.decode_tokens is not None
    end = load_tokenizer(MODEL).eos_token_id
    assert facts.decode_tokens([*load_tokenizer(MODEL).encode("12"), end]) == "12<eos>"


def step_metrics(**more: float) -> dict[str, float]:
    metrics = {
        column.metric_key: 1.0
        for column in CONSOLE_COLUMNS
        if column.metric_key and not column.is_optional
    }
    metrics |= {
        "reward/source/addition/mean": 0.5,
        "reward/source/chain_sum_of_many_terms/mean": 0.25,
    }
    return metrics | more


CRITIC = {"critic/vf_loss": 0.125, "critic/vf_explained_var": 0.75}


def test_columns_of_a_critic_and_of_sources_are_there_where_they_are() -> None:
    titles = [column.title for column in select_console_columns(set(step_metrics(**CRITIC)))]
    assert titles[:5] == ["step", "reward", "addition", "chain_sum_o…", "mixed"]
    assert titles[titles.index("grad") + 1 :][:3] == ["vf_loss", "vf_ev", "length"]
    plain = [column.title for column in select_console_columns({"reward/source/addition/mean"})]
    assert plain == [column.title for column in CONSOLE_COLUMNS if not column.is_optional], (
        "one source is the reward itself"
    )


@pytest.mark.parametrize("width", [20, 40, 80, 120, 300])
@pytest.mark.parametrize("keys", [set(), set(step_metrics(**CRITIC))])
def test_columns_fit_the_terminal_in_their_order(width: int, keys: set[str]) -> None:
    every = select_console_columns(keys)
    kept = keep_columns_that_fit(every, width)
    assert len(" ".join("x" * column.width for column in kept)) <= width
    assert [column for column in every if column in kept] == list(kept)
    titles = [column.title for column in kept]
    assert titles[:2] == ["step", "reward"]
    if width == 80:
        assert {"entropy", "length", "step s"} <= set(titles) and (
            {"vf_loss", "vf_ev"} <= set(titles)
        ) == bool(keys)
    if width == 300:
        assert kept == every


class Terminal:
    """stdout of a terminal, as far as rich asks."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


def test_no_line_is_wider_than_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.text import Text

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with RunTracker(tmp_path, ("console",), total_steps=2) as tracker:
        tracker.show_stage("engine0 starts (12 s) [a] " + "word " * 30)
        deadline = time.monotonic() + 120
        # a thread of rich's draws now and then
        while "engine0" not in terminal.text and time.monotonic() < deadline:
            time.sleep(0.05)
        tracker.log_metrics(1, "step", step_metrics(**CRITIC))
        tracker.show_stage("update")
        tracker.log_metrics(2, "step", step_metrics(**CRITIC))
    plain = Text.from_ansi(terminal.text.replace("\r", "\n")).plain
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert "engine0 starts (12 s) [a] word" in plain and "2/2" in plain and "vf_loss" in plain


def test_a_log_is_told_where_a_quiet_run_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps took 100 s and 140 s: the three to come take 6 minutes."""
    monkeypatch.setattr(console, "MAX_QUIET_S", 0.2)
    said = ""
    with RunTracker(tmp_path, ("console",), total_steps=5) as tracker:
        for step, seconds in ((1, 100.0), (2, 140.0)):
            tracker.log_metrics(step, "step", step_metrics() | {"timing_s/step": seconds})
        tracker.show_stage("generate")
        deadline = time.monotonic() + 120
        while (
            "generate: 2 of 5 steps done, about 6 min 00 s left\n" not in said
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
            said += capsys.readouterr().out
    assert "generate: 2 of 5 steps done, about 6 min 00 s left\n" in said


def test_the_header_comes_again_when_the_table_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunTracker(tmp_path, ("console",), total_steps=3) as tracker:
        for step in (1, 2):
            tracker.log_metrics(step, "step", step_metrics())
        tracker.log_metrics(3, "step", step_metrics(**CRITIC))
        tracker.log_metrics(4, "step", step_metrics())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["step", "1", "2", "step", "3", "4"]
    row = dict(zip(lines[3], lines[4], strict=False))  # headers of two words come after these
    assert (row["vf_loss"], row["vf_ev"], row["addition"]) == ("1.25e-01", "0.75", "0.500")
    assert dict(zip(lines[3], lines[5], strict=False))["vf_loss"] == "-", "a step without"


def of_set(name: str, mean: float, low: float | None) -> SetResult:
    best = ((1, mean), (2, 0.75), (4, 0.9))
    return SetResult(name, 20, 4, 1, mean, 0.2, best, low, low and 0.7, 12.0, 0.1)


def test_evaluation_sets_in_metrics_and_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = EvaluationResult(
        0.5, 0.4, 0.6, 40, 12.0, (), (of_set("sums", 0.625, 0.5), of_set("digits", 0.375, None))
    )
    metrics = compute_evaluation_metrics(result)
    assert metrics["val/binary_scores"] == 0.0
    assert {key: value for key, value in metrics.items() if key.startswith("val/sums/")} == {
        "val/sums/mean@4": 0.625,
        "val/sums/std@4": 0.2,
        "val/sums/best@2": 0.75,
        "val/sums/best@4": 0.9,
        "val/sums/low": 0.5,
        "val/sums/high": 0.7,
        "val/sums/num_items": 20.0,
        "val/sums/num_masked": 1.0,
        "val/sums/response_length": 12.0,
    }
    assert "val/digits/low" not in metrics and metrics["val/accuracy"] == 0.5
    with RunTracker(tmp_path, ("console",), total_steps=3) as tracker:
        tracker.log_evaluation(5, result)
        tracker.log_evaluation(6, replace(result, sets=result.sets[:1], has_binary_scores=True))
    assert capsys.readouterr().out.splitlines() == [
        "step 5: held-out score 0.500 [0.400, 0.600] on 40 items",
        "    sums 0.625  digits 0.375",
        "step 6: held-out accuracy 0.500 [0.400, 0.600] on 40 items",
    ]

"""`rlhf-megatron generate` and `evaluate` as users run them: engines and the job itself are
killed on the way.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end_tools import ONE_RANK, train, write_config
from places import ROOT
from program_jobs import Job, run
from special_token_tokenizers import KINDS, write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlhf_megatron.cli.main import main
from rlhf_megatron.controller.evaluation.held_out_evaluation import estimate_best_of_k
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.jobs.generation.answer_file import read_answer_rows

pytestmark = pytest.mark.dist
MODEL = ROOT / "examples" / "quickstart" / "warm_model"
SMALL = (
    "trainer.deterministic=true",
    "trainer.device=cpu",
    "rollout.max_num_seqs=16",
    "rollout.health_interval_s=0.2",
    "rollout.num_engines=2",
)
SAMPLED = ("-n", "3", "--temperature", "1.0", "--max-tokens", "4", *SMALL)


def write_prompts(path: Path, count: int) -> Path:
    rows = [
        {"prompt": f"{i // 100:02d}+{i % 100:02d}=", "answer": f"{i // 100 + i % 100:03d}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with prompts and the answers of a job that was left alone."""
    directory = tmp_path_factory.mktemp("whole")
    write_prompts(directory / "prompts.jsonl", 300)
    run(
        directory,
        "generate",
        str(MODEL),
        "prompts.jsonl",
        *SAMPLED,
        "--tokens",
        "--out",
        "answers.jsonl",
    )
    return directory


def test_killed_engines_and_a_killed_job_lose_and_double_nothing(
    whole: Path, tmp_path: Path
) -> None:
    words = ("generate", str(MODEL), str(whole / "prompts.jsonl"), *SAMPLED, "--tokens")
    answers = tmp_path / "answers.jsonl"
    job = Job(tmp_path, *words, "--out", "answers.jsonl")
    try:
        job.wait_for_answers(answers, 1)
        os.kill(job.engines()[0], signal.SIGKILL)
        job.wait_for_answers(answers, 60)
        job.process.kill()
    finally:
        assert job.end() == -signal.SIGKILL
    with answers.open("ab") as file:
        file.write(b'{"index": 299, "respon')  # the end of a line that was being written
    assert 60 <= answers.read_bytes().count(b"\n") < 300
    console = run(tmp_path, *words, "--out", "answers.jsonl")
    assert (
        "of 300 prompts have an answer already" in console and "answers to 300 prompts" in console
    )
    assert answers.read_bytes() == (whole / "answers.jsonl").read_bytes(), "bit for bit, in order"
    assert [row["index"] for row in read_answer_rows(answers)] == list(range(300))


@pytest.mark.long
def test_random_kills_hangs_and_a_killed_job_over_two_thousand_prompts(tmp_path: Path) -> None:
    """Five engines are killed and three hang, until their time is over, while they answer; the job
    itself is killed at about half. The file is that of a job left alone.
    """
    write_prompts(tmp_path / "prompts.jsonl", 2000)
    words = (
        "generate",
        str(MODEL),
        "prompts.jsonl",
        "--temperature",
        "1.0",
        "--max-tokens",
        "8",
        *SMALL,
    )
    words = (
        *words,
        "rollout.num_engines=3",
        "rollout.max_num_seqs=2",
        "rollout.request_timeout_s=15",
    )
    words = (*words, "rollout.max_engine_restarts=100", "rollout.request_retries=20")
    run(tmp_path, *words, "--out", "whole.jsonl")
    draw = random.Random(7)
    answers = tmp_path / "answers.jsonl"
    is_killed = False
    faults = [signal.SIGKILL] * 5 + [signal.SIGSTOP] * 3
    draw.shuffle(faults)
    for attempt in range(2):
        job = Job(tmp_path, *words, "--out", "answers.jsonl")
        deadline = time.monotonic() + 600
        try:
            while job.process.poll() is None:
                assert time.monotonic() < deadline, job.console.read_text()
                count = answers.read_bytes().count(b"\n") if answers.exists() else 0
                if count >= 1000 and not is_killed:
                    job.process.kill()
                    is_killed = True
                engines = (
                    job.engines()
                    if job.console.read_text().count("engine(s) serve") > attempt + 1
                    else []
                )
                if len(engines) > 1 and count and faults and draw.random() < 0.5:
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(engines), faults[-1])
                        faults.pop()
                time.sleep(0.3)
        finally:
            code = job.end()
    console = job.console.read_text()
    assert code == 0 and is_killed and not faults, (len(faults), console)
    assert [row["index"] for row in read_answer_rows(answers)] == list(range(2000))
    assert answers.read_bytes() == (tmp_path / "whole.jsonl").read_bytes(), "each once, bit for bit"


def test_a_stopped_job_says_how_it_goes_on(whole: Path, tmp_path: Path) -> None:
    words = (
        "generate",
        str(MODEL),
        str(whole / "prompts.jsonl"),
        *SAMPLED,
        "--out",
        "answers.jsonl",
    )
    job = Job(tmp_path, *words)
    job.wait_for_answers(tmp_path / "answers.jsonl", 1)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75 and "the same command goes on" in job.console.read_text()
    refused = run(tmp_path, *words, "trainer.seed=7", code=1)
    assert (
        "has answers of another job (seed: 1 there, 7 here)" in refused and "--overwrite" in refused
    )


def test_evaluate_counts_as_brute_force_does(whole: Path, tmp_path: Path) -> None:
    console = run(whole, "evaluate", "answers.jsonl", "--json", str(tmp_path / "figures.json"))
    found: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())["sets"][0]
    right = [
        [text.strip() == row["answer"] for text in row["responses"]]
        for row in read_answer_rows(whole / "answers.jsonl")
    ]
    assert found["scores"] == [[float(r) for r in item] for item in right]
    assert found["mean"] == pytest.approx(sum(map(sum, right)) / 900, abs=1e-12)
    best = {f["k"]: f["value"] for f in found["figures"] if f["name"] == "best"}
    assert best[2] == pytest.approx(
        sum(estimate_best_of_k([float(r) for r in item], 2) for item in right) / 300, abs=1e-12
    )
    assert best[3] == pytest.approx(sum(any(item) for item in right) / 300, abs=1e-12)
    assert f"{found['mean']:6.4f}" in console


def test_the_loss_of_a_file_is_that_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By source and over all, by the token; again without engines from the file
    that was written.
    """
    write_prompts(tmp_path / "first.jsonl", 7)
    rows = [
        {"prompt": "1+", "answer": "2=3" * (i % 3 + 1), "data_source": "second"} for i in range(5)
    ]
    (tmp_path / "second.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        "--loss",
        "first.jsonl",
        "second.jsonl",
        *SMALL,
        "rollout.num_engines=1",
        "--json",
        "figures.json",
    )
    console = run(tmp_path, "evaluate", str(MODEL), *words)
    found = json.loads((tmp_path / "figures.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = load_tokenizer(MODEL)
    sums: dict[str, list[tuple[float, int]]] = {"first": [], "second": []}
    for name, pairs in sums.items():
        for row in map(json.loads, (tmp_path / f"{name}.jsonl").open()):
            prompt = tokenizer.encode(row["prompt"])
            ids = (*tokenizer.encode(row["answer"]), tokenizer.eos_token_id)
            labels = torch.tensor([[*[-100] * len(prompt), *ids]])
            with torch.no_grad():
                pairs.append(
                    (
                        float(model(torch.tensor([[*prompt, *ids]]), labels=labels).loss)
                        * len(ids),
                        len(ids),
                    )
                )
    sums["all"] = sums["first"] + sums["second"]
    for figures in found["sets"]:
        total, count = map(sum, zip(*sums[figures["name"]], strict=True))
        assert (
            figures["loss"] == pytest.approx(total / count, abs=1e-5)
            and figures["num_tokens"] == count
        )
        assert figures["low"] < figures["loss"] < figures["high"]
        assert figures["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert [figures["name"] for figures in found["sets"]] == ["first", "second", "all"]
    assert found["loss"] == found["sets"][-1]["loss"] and f"{found['loss']:.5f}" in console
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", f"{MODEL.name}-loss.jsonl", "--loss"]) == 0
    assert capsys.readouterr().out.splitlines() == console.splitlines()[-5:-1]
    assert main(["evaluate", str(MODEL), "--loss", "first.jsonl", "--temperature", "0"]) == 1
    assert "without --temperature; leave that out" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model_with_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokenizer writes <s> before text and </s> behind it."""
    kind = next(kind for kind in KINDS if kind.name == "byte-level both")
    directory = write_tokenizer(tmp_path_factory.mktemp("bos") / "model", kind)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=json.loads((directory / "config.json").read_text())["vocab_size"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def test_plain_prompts_begin_with_what_the_tokenizer_writes(
    model_with_bos: Path, tmp_path: Path
) -> None:
    """The ids and the greedy answer are those of transformers for the ids of its own call, less
    the token that ends a text.
    """
    text = "What is the sum of 12 + 34 = "
    row = {"prompt": text, "answer": "46"}
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    greedy = ("--temperature", "0", "--max-tokens", "6", *SMALL, "rollout.num_engines=1")
    words = ("generate", str(model_with_bos), "q.jsonl", *greedy, "rollout.dtype=float32")
    console = run(tmp_path, *words, "--tokens", "--out", "answers.jsonl")
    assert "prompts begin with '<s>', which the tokenizer writes before text" in console
    (answer,) = read_answer_rows(tmp_path / "answers.jsonl")
    reference = AutoTokenizer.from_pretrained(model_with_bos)
    prompt_ids = reference(text).input_ids[:-1]
    assert answer["prompt_ids"] == prompt_ids and prompt_ids[0] == reference.bos_token_id
    model = AutoModelForCausalLM.from_pretrained(model_with_bos, dtype=torch.float32)
    generated = model.generate(
        torch.tensor([prompt_ids]), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    expected = generated[0, len(prompt_ids) :].tolist()
    assert answer["token_ids"][0] == expected[: len(answer["token_ids"][0])]


def test_the_loss_of_texts_is_that_of_transformers_own_call(
    model_with_bos: Path, tmp_path: Path
) -> None:
    texts = ["What is the sum of 12 + 34 = 46 ?", "I don't know"]
    rows = [{"text": text} for text in texts]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--loss", "d.jsonl", *SMALL, "rollout.num_engines=1", "--json", "figures.json")
    run(tmp_path, "evaluate", str(model_with_bos), *words, "rollout.dtype=float32")
    found = json.loads((tmp_path / "figures.json").read_text())
    reference = AutoTokenizer.from_pretrained(model_with_bos)
    model = AutoModelForCausalLM.from_pretrained(model_with_bos, dtype=torch.float32)
    total = num_tokens = 0.0
    for text in texts:
        ids = reference(text, return_tensors="pt").input_ids
        with torch.no_grad():
            total += float(model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        num_tokens += ids.shape[1] - 1
    assert found["num_tokens"] == num_tokens
    assert found["loss"] == pytest.approx(total / num_tokens, abs=1e-5)


def test_a_ready_task_brings_questions_reward_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The set is a small copy of the real one's form; its settings can be said otherwise."""
    copy = tmp_path / "copy"
    model = tmp_path / "model"
    copy.mkdir()
    questions = [{"problem": f"{i}+{i}=", "answer": f"{2 * i:03d}"} for i in range(12)]
    (copy / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content.split()[0] }}{% endfor %}"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prepare", "math500", "--from", str(copy)]) == 0
    words = (
        "--task",
        "math500",
        "--max-tokens",
        "8",
        *SMALL,
        "rollout.num_engines=1",
        "--json",
        "figures.json",
    )
    run(tmp_path, "evaluate", "model", *words)
    (found,) = json.loads((tmp_path / "figures.json").read_text())["sets"]
    assert (found["name"], found["num_items"], found["num_samples"]) == ("math500", 12, 4)
    rows = list(read_answer_rows(tmp_path / "model-math500.jsonl"))
    assert [row["answer"] for row in rows] == [f"{2 * i:03d}" for i in range(12)]
    asked = json.loads((tmp_path / "model-math500.jsonl.job" / "job.json").read_text())["sampling"]
    assert (asked["n"], asked["temperature"], asked["top_p"]) == (4, 0.6, 0.95)
    assert main(["evaluate", "model", str(copy / "test.jsonl"), "--task", "math500"]) == 1
    assert "--task math500 brings its questions" in capsys.readouterr().err


def test_two_files_are_compared_prompt_by_prompt(whole: Path) -> None:
    greedy = ("--temperature", "0", "--max-tokens", "4", *SMALL)
    run(whole, "generate", str(MODEL), "prompts.jsonl", *greedy, "--out", "greedy.jsonl")
    console = run(whole, "evaluate", "answers.jsonl", "greedy.jsonl").splitlines()[-1]
    means = []
    for name in ("answers.jsonl", "greedy.jsonl"):
        rows = list(read_answer_rows(whole / name))
        means.append(
            [
                sum(t.strip() == r["answer"] for t in r["responses"]) / len(r["responses"])
                for r in rows
            ]
        )
    difference = sum(b - a for a, b in zip(*means, strict=True)) / 300
    assert (
        console.startswith(f"greedy.jsonl minus answers.jsonl: {difference:+.4f} [")
        and "over 300 items" in console
    )


def test_a_run_s_checkpoints_have_the_figures_of_its_own_evaluations(tmp_path: Path) -> None:
    """Along its steps, to the last digit, with engines that are started once; and of
    one step alone.
    """
    settings = {"trainer.deterministic": True, "trainer.save_freq": 1, "trainer.test_freq": 1}
    trained = train(write_config(tmp_path), ONE_RANK | settings)
    assert trained.exit_code == 0 and not (trained.run_dir / "hf").exists(), trained.console
    own = {row["step"]: row for row in trained.rows("evaluation")}
    words = ("--every-step", "--out", "answers", "--json", "figures.json", "--report", "page.html")
    console = run(tmp_path, "evaluate", str(trained.run_dir), *words)
    found = json.loads((tmp_path / "figures.json").read_text())["steps"]
    assert len(found) > 1 and {figures["step"] for figures in found} <= own.keys()
    for figures in found:
        row = own[figures["step"]]
        assert figures["sets"][0]["num_items"] == row["val/num_items"]
        assert [figures[name] for name in ("mean", "low", "high")] == [
            row[f"val/accuracy{ending}"] for ending in ("", "_low", "_high")
        ]
    assert console.count("engine(s) serve") == 1
    html = (tmp_path / "page.html").read_text()
    assert html.count("<h2>step") == len(found) and "mean score over steps" in html
    step = str(found[0]["step"])
    run(
        tmp_path,
        "evaluate",
        str(trained.run_dir),
        "--step",
        step,
        "--out",
        "one.jsonl",
        "--json",
        "one.json",
    )
    assert (tmp_path / "one.jsonl").read_bytes() == (
        tmp_path / "answers" / f"step_{int(step):06d}.jsonl"
    ).read_bytes()
    assert json.loads((tmp_path / "one.json").read_text())["mean"] == found[0]["mean"]

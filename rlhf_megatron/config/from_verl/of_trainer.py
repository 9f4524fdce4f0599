"""Section trainer: how long, where, how often saved and tested, what is written."""

from __future__ import annotations

from typing import get_args

from rlhf_megatron.config.from_verl.draft import Draft
from rlhf_megatron.config.from_verl.of_data import at_home
from rlhf_megatron.config.keys import field_types
from rlhf_megatron.config.schema import TrainerConfig

LOGGERS = {"file": "jsonl", "jsonl": "jsonl"}


def total_steps(draft: Draft) -> int | None:
    """Of verl's loop: as written, or epochs over so many rows as the user told."""
    g = draft.given
    steps = g.look("trainer.total_training_steps")
    if steps is not None:
        return steps if isinstance(steps, int) and steps > 0 else None
    epochs, size, rows = g.look("trainer.total_epochs"), g.look("data.train_batch_size"), draft.told.train_rows
    if rows is None or not all(isinstance(value, int) and value > 0 for value in (epochs, size)):
        return None
    return rows // size * epochs or None


def trainer(draft: Draft) -> None:
    g = draft.given
    _length(draft)
    for name in ("nnodes", "n_gpus_per_node", "val_before_train", "resume_mode"):
        draft.copy(f"trainer.{name}")
    for name in ("save_freq", "test_freq"):
        value = g.whole(f"trainer.{name}", low=-1)
        if value is not None:
            never = "never: 0 here, -1 there" if value == -1 else ""
            draft.copy(f"trainer.{name}", value=max(value, 0), note=never)
    if g.get("trainer.resume_from_path") not in (None, False):
        note = "a directory that this trainer wrote: checkpoints of verl are not read"
        draft.put("trainer.resume_from_path", g.get("trainer.resume_from_path"), ("trainer.resume_from_path",), note)
    for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        key = f"trainer.{name}"
        if g.get(key) is not None:
            sizes = [g.whole(f"trainer.max_{role}_ckpt_to_keep", low=0) or 0 for role in ("actor", "critic")]
            draft.put("trainer.max_ckpt_to_keep", max(sizes), (key,), "one checkpoint holds actor and critic")
    if g.get("actor.megatron.seed") is not None:
        draft.put("trainer.seed", g.get("actor.megatron.seed"), ("actor.megatron.seed",))
    g.ignore("critic.megatron.seed", "reference.megatron.seed")
    _names(draft)
    _loggers(draft)
    _checkpoints(draft)
    dumps = [name for name in ("rollout_data_dir", "validation_data_dir") if g.get(f"trainer.{name}")]
    if dumps:
        note = "batches of each step, under the run directory"
        draft.put("trainer.record", True, tuple(f"trainer.{name}" for name in dumps), note)
    if g.get("trainer.device") not in (None, "cuda", "cpu"):
        draft.leave("trainer.device", "devices are cuda and cpu")
    elif g.has("trainer.device"):
        draft.copy("trainer.device")


def _length(draft: Draft) -> None:
    g, key = draft.given, "trainer.total_training_steps"
    g.ignore(key, "trainer.total_epochs")
    steps = total_steps(draft)
    if steps is None:
        if g.look(key) is not None:
            g.whole(key)
        epochs = f"{g.look('trainer.total_epochs')} epochs"
        source = "" if g.has("trainer.total_epochs") else " (verl's default)"
        draft.ask(
            f"trainer.total_training_steps: {epochs}{source} of a file whose rows are not known; tell them with"
            " --train-rows N, or give trainer.total_training_steps=N."
        )
    elif g.look(key) is not None:
        draft.put(key, steps, (key,))
    else:
        epochs, size = g.look("trainer.total_epochs"), g.look("data.train_batch_size")
        note = f"{draft.told.train_rows} rows // data.train_batch_size {size}, x {epochs} epochs"
        draft.put(key, steps, ("trainer.total_epochs",), note)


def _names(draft: Draft) -> None:
    g = draft.given
    name = g.text("trainer.experiment_name") if g.get("trainer.experiment_name") is not None else None
    if name is not None:
        plain = name.strip("/").replace("/", "_")
        note = "a directory name: / became _" if plain != name else ""
        draft.put("trainer.experiment_name", plain, ("trainer.experiment_name",), note)
    if g.get("trainer.project_name") is not None:
        draft.put("trainer.project_name", g.text("trainer.project_name"), ("trainer.project_name",))
    parent = g.text("trainer.default_local_dir") if g.get("trainer.default_local_dir") is not None else None
    if parent is not None:
        note = "experiment_name is put below it"
        short = parent.rstrip("/")
        if name and short.endswith(f"/{name}"):
            short = short.removesuffix(f"/{name}")
        draft.put("trainer.default_local_dir", at_home(draft, short), ("trainer.default_local_dir",), note)


def _loggers(draft: Draft) -> None:
    key = "trainer.logger"
    value = draft.given.get(key)
    if value is None:
        return
    known = get_args(get_args(field_types(TrainerConfig)["logger"])[0])
    names = [LOGGERS.get(str(name), str(name)) for name in (value if isinstance(value, list) else [value])]
    kept = list(dict.fromkeys(name for name in names if name in known))
    lost = [name for name in names if name not in known]
    note = f"without {', '.join(lost)}, which is not there" if lost else ""
    if "jsonl" not in kept:
        kept.append("jsonl")  # reports and resumed runs read it
    draft.put(key, kept, (key,), note)


def _checkpoints(draft: Draft) -> None:
    g = draft.given
    for role in ("actor", "critic"):
        contents = f"{role}.checkpoint.save_contents"
        if role == "actor" and isinstance(g.look(contents), list) and "hf_model" in g.look(contents):
            draft.put("trainer.save_hf", True, (contents,), "at the end of the run; checkpoints are always whole")
        if role == "actor" and g.get(f"{role}.checkpoint.async_save") is not None:
            draft.put("trainer.async_save", g.flag("actor.checkpoint.async_save"), ("actor.checkpoint.async_save",))
        g.ignore(f"{role}.checkpoint.*")

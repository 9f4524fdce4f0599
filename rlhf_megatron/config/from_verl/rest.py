"""What no rule has dealt with: settings of the same name here, and those without counterpart, with the reason."""

from __future__ import annotations

import difflib
from typing import Any

from rlhf_megatron.config.from_verl.defaults import DEFAULTS
from rlhf_megatron.config.from_verl.draft import Draft, default_of, free_mapping
from rlhf_megatron.config.keys import leaf_keys
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.verl_names import VERL_NAMES, VerlName, entry_of

LEARNING = ("actor", "algorithm", "critic", "data", "distillation", "model", "reference", "reward", "rollout")
"""Sections in which an unknown setting may change what is learnt."""

FOLLOWERS = {
    "critic.model.tokenizer_path": "model.path",
    **{f"{role}.rollout_n": "rollout.n" for role in ("actor", "critic", "reference")},
}


def rest(draft: Draft) -> None:
    for key in draft.given.rest():
        if key.rpartition(".")[2] == "_target_":
            draft.given.ignore(key)
        elif (key in leaf_keys(RunConfig) and draft.given.look(key) is None is default_of(key)) or _follows(draft, key):
            draft.given.ignore(key)
            draft.num_off += 1
        elif free_mapping(key):
            draft.copy(key)
        else:
            _leave(draft, key)


def _follows(draft: Draft, key: str) -> bool:
    """verl's copies of other settings, as long as they are that."""
    other = FOLLOWERS.get(key)
    return other is not None and draft.given.look(key) == draft.given.look(other)


def _leave(draft: Draft, key: str) -> None:
    entry, value = entry_of(key), draft.given.get(key)
    if entry is None:
        reason = f"unknown; {near(key)}" if near(key) else "unknown"
        draft.leave(key, reason, learns=not is_off(value) and key.partition(".")[0] in LEARNING)
    elif is_off(value) or value in entry.off or not _is_switched_on(draft, entry):
        draft.num_off += 1
    else:
        draft.leave(key, reason_of(entry), entry.learns)


def reason_of(entry: VerlName) -> str:
    """Of a setting without counterpart, or whose counterpart is something else."""
    note = entry.note.removesuffix("; remove it")
    if entry.target is None:
        return note
    return f"see {entry.target}: {note}" if note else f"see {entry.target}"


def _is_switched_on(draft: Draft, entry: VerlName) -> bool:
    return not entry.switch or not is_off(draft.given.look(entry.switch))


def is_off(value: Any) -> bool:
    """A value that asks for nothing."""
    return value is None or value is False or value in ("", "null", "none", "None", "disabled", 0, [], {}, -1)


def near(key: str) -> str:
    """What a misspelt setting of verl may have meant, as a sentence or ""."""
    known = (
        {entry.name for entry in VERL_NAMES if not entry.name.endswith("*")} | set(DEFAULTS) | set(leaf_keys(RunConfig))
    )
    section, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    found = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    best = [siblings[found[0]]] if found else difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    return f"did you mean {best[0]}?" if best else ""

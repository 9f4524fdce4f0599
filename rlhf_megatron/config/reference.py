"""The reference of all settings as Markdown, made from the schema (docs/config.md)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

from rlhf_megatron.config.keys import field_types, leaves, value_of
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.schema.fields import ANY, NOT_NEGATIVE
from rlhf_megatron.config.show import as_text
from rlhf_megatron.config.verl_names import RENAMED_SECTIONS, VERL_NAMES

HEAD = """\
# Configuration

Made by `rlhf-megatron config reference --write docs/config.md` from `rlhf_megatron/config/schema`; do not edit.

A run is one YAML file and, where wanted, overrides:

    rlhf-megatron config check configs/quickstart.yaml                         # find everything that is wrong
    rlhf-megatron config show  configs/quickstart.yaml actor.optim.lr=1e-5     # each value and where it came from
    rlhf-megatron train        configs/quickstart.yaml actor.optim.lr=1e-5

- `extends: base.yaml` (or a list) at the top of a file takes over another file, found relative to this one. Later wins:
  defaults, then the bases in order, then the file, then the command line.
- Sections and the free mappings (`params`, `task_params`, `args`, `env`) merge key by key; lists are replaced. An empty
  mapping (`params: {}`) clears what a base has set.
- The value of an override is YAML: `data.train_files=[a.jsonl,b.jsonl]`, `trainer.seed=7`, `rollout.dtype=null`.
- Scalars follow YAML 1.2: `1e-4` is a number; `yes` and `on` are text, write `true`.
- An unknown key, a wrong type, a contradiction and a setting that would be ignored are errors, all listed at once,
  before anything is started (exit code 2). What a later layer switched off may stay configured in an earlier one.
- Paths are relative to the working directory, that of `extends` to its file.
"""


def reference() -> str:
    """The whole document."""
    return HEAD + "".join(_sections()) + "".join(_entries()) + "".join(_verl())


def _sections() -> Iterator[str]:
    section = None
    for leaf in leaves(RunConfig):
        here, _, name = leaf.key.rpartition(".")
        if here != section:
            section = here
            yield f"\n## {section}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        default = as_text(value_of(RunConfig(), leaf.key))
        limits = "" if leaf.bounds in (ANY, NOT_NEGATIVE) else f" ({leaf.bounds})"
        meaning = leaf.doc + limits
        yield f"| `{name}` | {_cell(type_name(leaf.type))} | `{_cell(default)}` | {_cell(meaning)} |\n"


def _entries() -> Iterator[str]:
    """Sections that are entries of a list or mapping, which have no key path of their own."""
    for leaf in leaves(RunConfig):
        for kind in get_args(leaf.type):
            if not (isinstance(kind, type) and is_dataclass(kind)):
                continue
            yield f"\n## an entry of {leaf.key}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
            types_ = field_types(kind)
            for field in fields(kind):
                value = field.default if field.default_factory is MISSING else field.default_factory()
                default = "" if value is MISSING else f"`{_cell(as_text(value))}`"
                meaning = _cell(field.metadata["doc"])
                yield f"| `{field.name}` | {_cell(type_name(types_[field.name]))} | {default} | {meaning} |\n"


def _verl() -> Iterator[str]:
    yield "\n## Coming from verl\n\nOther keys have the names of verl.\n\n"
    yield "| verl | here | note |\n|---|---|---|\n"
    for old, new in RENAMED_SECTIONS:
        yield f"| `{old}.*` | `{new}.*` | |\n"
    for entry in VERL_NAMES:
        yield f"| `{entry.name}` | {f'`{entry.target}`' if entry.target else '-'} | {_cell(entry.note)} |\n"


def type_name(kind: Any) -> str:
    """A type as a reader of YAML would say it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is Literal:
        return ", ".join(str(argument) for argument in arguments)
    if origin in (tuple, list):
        if origin is tuple and arguments[-1] is not Ellipsis:
            return f"list of {len(arguments)}: {', '.join(type_name(argument) for argument in arguments)}"
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping to {type_name(arguments[1])}" if is_dataclass(arguments[1]) else "mapping"
    if is_dataclass(kind):
        return f"`{{{', '.join(field.name for field in fields(kind))}}}`"
    names = {type(None): "null", int: "whole number", float: "number", bool: "true or false", str: "text", Any: "any"}
    return names[kind]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

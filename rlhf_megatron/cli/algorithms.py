"""`rlhf-megatron algorithms`: what is registered, with parameters, needs, and the papers that the sources name."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import Any

from rlhf_megatron.algorithms import aggregate
from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES, kl
from rlhf_megatron.config.correction import PRESETS
from rlhf_megatron.config.keys import field_types
from rlhf_megatron.config.reference import type_name
from rlhf_megatron.config.rules.parts import ESTIMATOR, LOSS, OF_ESTIMATORS, OF_LOSSES
from rlhf_megatron.config.show import as_text
from rlhf_megatron.registry import Entry, Registry
from rlhf_megatron.rewards.scorers import OWN_PROCESS, REWARDS
from rlhf_megatron.scheduler.schedules import SCHEDULES
from rlhf_megatron.verl.algorithm import KL_TYPES, LOSSES

OF_VERL = LOSSES | KL_TYPES
"""Names of verl -> ours."""

WIDTH, INDENT = 118, 24
_PAPER = re.compile(r'(?:"([^"]+)"[\s,]*)?\(?arXiv\s+(\d{4}\.\d{4,5})|"([^"]+)"\s+\(([A-Z][a-z]+ \d{4})\)')

_FIELD = re.compile(r"    (\w+): .*?(?:(?<=\s)#[ ](.+))?\Z")


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    default: str | None  # as one writes it; None: it must be given
    doc: str


@dataclass(frozen=True)
class Paper:
    title: str  # "" where the source names the number only
    arxiv: str  # number; author and year of a paper that is not there

    @property
    def place(self) -> str:
        return f"arXiv {self.arxiv}" if self.arxiv[0].isdigit() else self.arxiv


@dataclass(frozen=True)
class Part:
    """Something that a configuration names."""

    name: str
    kind: str
    key: str  # setting that names it
    summary: str
    text: str = ""  # what its file says of it
    parameters: tuple[Parameter, ...] = ()
    needs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # of the needs, what a run does not compute
    papers: tuple[Paper, ...] = ()


def algorithms(args: argparse.Namespace) -> None:
    """Print all parts, or those of one name. Raises ValueError with the nearest name if there is none."""
    chosen = list(parts())
    if args.name is not None:
        names = {part.name: part.name for part in chosen} | OF_VERL
        if args.name not in names:
            near = difflib.get_close_matches(args.name, names)
            hint = f"near to it: {', '.join(near)}" if near else "`rlhf-megatron algorithms` lists all"
            raise ValueError(f"no part is called {args.name!r}; {hint}.")
        chosen = [part for part in chosen if part.name == names[args.name]]
    if args.json:
        sys.stdout.write(json.dumps([asdict(part) for part in chosen], indent=2, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(table(chosen, with_parameters=args.name is not None))


def parts() -> Iterator[Part]:
    """Return the parts by kind, in the order of their names."""
    yield from _registered(ADV_ESTIMATORS, ESTIMATOR, OF_ESTIMATORS)
    yield from _registered(POLICY_LOSSES, LOSS, {*OF_LOSSES, "ref_log_probs"})
    for name in aggregate.AGGREGATIONS:
        yield Part(name, "aggregation", "actor.loss_agg_mode", _line_of(aggregate.__doc__, name))
    for name in kl.KL_TYPES:
        base = name.removesuffix(kl.STRAIGHT)
        straight = f"the value of {base}, the gradient of k2" if base != name else ""
        yield Part(name, "KL estimator", "actor.kl_loss_type", straight or _line_of(kl.__doc__, name))
    for name, settings in PRESETS.items():
        yield Part(name, "rollout correction", "algorithm.rollout_correction.preset", _preset(settings))
    yield from _registered(REWARDS, "reward.name", {OWN_PROCESS})
    yield from _registered(SCHEDULES, "schedule.name", set())


def _preset(settings: Mapping[str, Any]) -> str:
    """Describe what a preset sets, in the order of the configuration, without settings that do nothing."""
    none, found = PRESETS["disabled"], []
    for name, value in settings.items():
        is_needed = name == "rollout_is_threshold" and settings["rollout_is"] is not None
        if value != none[name] or is_needed or (name == "loss_type" and settings["mode"] == "bypass"):
            found.append(f"{name}={','.join(value) if isinstance(value, tuple) else value}")
    return ", ".join(found) or "metrics only"


def _registered(registry: Registry[Any], key: str, provided: set[str]) -> Iterator[Part]:
    for name in registry:
        entry = registry.get(name)
        text = inspect.getdoc(inspect.getmodule(entry.build)) or inspect.getdoc(entry.build) or ""
        yield Part(
            name,
            registry.kind,
            key,
            _line_of(text, name) or _first_sentence(text),
            text,
            tuple(_parameters(entry)),
            entry.needs,
            tuple(sorted(set(entry.needs) - provided)),
            tuple(Paper(" ".join((a or b).split()), arxiv or older) for a, arxiv, b, older in _PAPER.findall(text)),
        )


def _parameters(entry: Entry[Any]) -> Iterator[Parameter]:
    if entry.params is None:
        return
    comments = _comments(entry.params)
    for field in fields(entry.params):
        kind = field_types(entry.params)[field.name]
        yield Parameter(field.name, type_name(kind), _default(field), comments.get(field.name, ""))


def _default(field: Field[Any]) -> str | None:
    if field.default is MISSING and field.default_factory is MISSING:
        return None
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return as_text(value)


def _comments(cls: type) -> dict[str, str]:
    """Field -> the comment behind it, those lines above it, or that behind its default on a line of its own; where the
    source is at hand."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except OSError:
            continue
        above: list[str] = []
        last = ""
        for line in source.splitlines():
            if match := _FIELD.match(line):
                last = match[1]
                found[last] = match[2] or " ".join(above) or found.get(last, "")
            elif last and not found[last] and line.startswith(" " * 8):
                found[last] = line.partition("  # ")[2]
            else:
                last = ""
            above = [*above, line.strip(" #")] if line.startswith("    # ") else []
    return found


def _first_sentence(text: str) -> str:
    """The docstring's first paragraph up to its first full stop."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


def _line_of(text: str | None, name: str) -> str:
    """Return the line about a name in the table of a module's docstring, or ""."""
    match = re.search(rf"^    {re.escape(name)}[ ]+(.+)$", text or "", re.MULTILINE)
    return re.sub(r"\s{2,}", "  ", match[1]) if match else ""


def table(chosen: list[Part], with_parameters: bool) -> str:
    lines: list[str] = []
    kind = ""
    for part in chosen:
        if part.kind != kind:
            kind = part.kind
            lines += ["", f"{kind} ({part.key})"] if lines else [f"{kind} ({part.key})"]
        if with_parameters and part.text:
            lines += [f"  {part.name}", "", *textwrap.indent(part.text, "    ").splitlines(), ""]
        elif len(part.name) > INDENT - 4:
            lines += [f"  {part.name}", *_wrapped(" " * INDENT, part.summary)]
        else:
            lines += _wrapped(f"  {part.name:<{INDENT - 3}} ", part.summary)
        lines += _details(part, with_parameters)
    return "\n".join(lines) + "\n"


def _details(part: Part, with_parameters: bool) -> Iterator[str]:
    empty = " " * INDENT
    if with_parameters:
        for one in part.parameters:
            default = "must be given" if one.default is None else f"default {one.default}"
            yield from _wrapped(f"{empty}{one.name}: ", f"{one.type}, {default}{'; ' if one.doc else ''}{one.doc}")
    elif part.parameters:
        settings = [one.name if one.default is None else f"{one.name}={one.default}" for one in part.parameters]
        yield from _wrapped(f"{empty}parameters: ", ", ".join(settings))
    if part.needs:
        state = f"; no run computes {', '.join(part.missing)}" if part.missing else ""
        yield from _wrapped(f"{empty}needs: ", ", ".join(part.needs) + state)
    for paper in part.papers if with_parameters else ():
        yield from _wrapped(f"{empty}paper: ", f"{paper.title + ', ' if paper.title else ''}{paper.place}")
    if part.papers and not with_parameters:
        yield f"{empty}papers: {', '.join(paper.place for paper in part.papers)}"


def _wrapped(start: str, text: str) -> list[str]:
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * (INDENT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [start.rstrip()]

"""`rlhf-megatron algorithms`: what is registered, with parameters, needs, and the papers that the
sources name.
"""

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

from rlhf_megatron.algorithms import loss_aggregation
from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES, kl_estimators
from rlhf_megatron.config.key_paths import resolve_field_types
from rlhf_megatron.config.reference import describe_type
from rlhf_megatron.config.rollout_correction_rules import PRESETS
from rlhf_megatron.config.rules.part_rules import ESTIMATOR, LOSS, OF_ESTIMATORS, OF_LOSSES
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.controller.scheduler.schedules import SCHEDULES
from rlhf_megatron.jobs.from_verl.verl_algorithm import KL_TYPES, LOSSES
from rlhf_megatron.registry import Registry, RegistryEntry
from rlhf_megatron.rewards.scorers import OWN_PROCESS, REWARDS

OUR_NAME_BY_VERL_NAME = LOSSES | KL_TYPES
"""Names of verl -> ours."""

LINE_WIDTH = 118
TEXT_INDENT = 24
_PAPER_PATTERN = re.compile(
    r'(?:"([^"]+)"[\s,]*)?\(?arXiv\s+(\d{4}\.\d{4,5})|"([^"]+)"\s+\(([A-Z][a-z]+ \d{4})\)'
)

_FIELD_PATTERN = re.compile(r"    (\w+): .*?(?:(?<=\s)#[ ](.+))?\Z")


@dataclass(frozen=True)
class PartParameter:
    name: str
    type: str
    default: str | None  # as one writes it; None: it must be given
    doc: str


@dataclass(frozen=True)
class CitedPaper:
    title: str  # "" where the source names the number only
    arxiv: str  # number; author and year of a paper that is not there

    @property
    def citation(self) -> str:
        """Return "arXiv NUMBER", or author and year for a paper that is not on arXiv."""
        return f"arXiv {self.arxiv}" if self.arxiv[0].isdigit() else self.arxiv


@dataclass(frozen=True)
class RegisteredPart:
    """A registered part that a configuration can name."""

    name: str
    kind: str
    key: str  # setting that names it
    summary: str
    text: str = ""  # what its file says of it
    parameters: tuple[PartParameter, ...] = ()
    needs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # of the needs, what a run does not compute
    papers: tuple[CitedPaper, ...] = ()


def run_algorithms_command(args: argparse.Namespace) -> None:
    """Print all parts, or the parts of one name (ours or verl's) with their parameters. Raise
    ValueError, with the nearest names, if no part has that name.
    """
    chosen = list(iter_registered_parts())
    if args.name is not None:
        names = {part.name: part.name for part in chosen} | OUR_NAME_BY_VERL_NAME
        if args.name not in names:
            near = difflib.get_close_matches(args.name, names)
            hint = (
                f"near to it: {', '.join(near)}" if near else "`rlhf-megatron algorithms` lists all"
            )
            raise ValueError(f"no part is called {args.name!r}; {hint}.")
        chosen = [part for part in chosen if part.name == names[args.name]]
    if args.json:
        sys.stdout.write(
            json.dumps([asdict(part) for part in chosen], indent=2, ensure_ascii=False) + "\n"
        )
    else:
        sys.stdout.write(format_parts_table(chosen, shows_parameters=args.name is not None))


def iter_registered_parts() -> Iterator[RegisteredPart]:
    """Yield all parts by kind, each kind in the order of its registry: estimators, policy losses,
    aggregations, KL estimators, rollout corrections, rewards and schedules.
    """
    yield from _iter_registry_parts(ADV_ESTIMATORS, ESTIMATOR, OF_ESTIMATORS)
    yield from _iter_registry_parts(POLICY_LOSSES, LOSS, {*OF_LOSSES, "ref_log_probs"})
    for name in loss_aggregation.AGGREGATIONS:
        yield RegisteredPart(
            name,
            "aggregation",
            "actor.loss_agg_mode",
            _find_table_line(loss_aggregation.__doc__, name),
        )
    for name in kl_estimators.KL_TYPES:
        base = name.removesuffix(kl_estimators.STRAIGHT_THROUGH_SUFFIX)
        straight = f"the value of {base}, the gradient of k2" if base != name else ""
        yield RegisteredPart(
            name,
            "KL estimator",
            "actor.kl_loss_type",
            straight or _find_table_line(kl_estimators.__doc__, name),
        )
    for name, settings in PRESETS.items():
        yield RegisteredPart(
            name,
            "rollout correction",
            "algorithm.rollout_correction.preset",
            _describe_preset(settings),
        )
    yield from _iter_registry_parts(REWARDS, "reward.name", {OWN_PROCESS})
    yield from _iter_registry_parts(SCHEDULES, "schedule.name", set())


def _describe_preset(settings: Mapping[str, Any]) -> str:
    """Return the settings of a rollout correction preset as "name=value, ...", without those that
    do nothing; "metrics only" if none is left.
    """
    none = PRESETS["disabled"]
    found = []
    for name, value in settings.items():
        is_needed = name == "rollout_is_threshold" and settings["rollout_is"] is not None
        if (
            value != none[name]
            or is_needed
            or (name == "loss_type" and settings["mode"] == "bypass")
        ):
            found.append(f"{name}={','.join(value) if isinstance(value, tuple) else value}")
    return ", ".join(found) or "metrics only"


def _iter_registry_parts(
    registry: Registry[Any], setting_key: str, provided_needs: set[str]
) -> Iterator[RegisteredPart]:
    """Yield the parts of a registry. `setting_key` is the setting that names such a part, and
    `provided_needs` are the columns that a run computes; other needs become the part's `missing`.
    """
    for name in registry:
        entry = registry.get(name)
        text = inspect.getdoc(inspect.getmodule(entry.build)) or inspect.getdoc(entry.build) or ""
        yield RegisteredPart(
            name,
            registry.kind,
            setting_key,
            _find_table_line(text, name) or _extract_first_sentence(text),
            text,
            tuple(_iter_parameters(entry)),
            entry.needs,
            tuple(sorted(set(entry.needs) - provided_needs)),
            tuple(
                CitedPaper(" ".join((a or b).split()), arxiv or older)
                for a, arxiv, b, older in _PAPER_PATTERN.findall(text)
            ),
        )


def _iter_parameters(entry: RegistryEntry[Any]) -> Iterator[PartParameter]:
    """Yield the parameters of a registered part, with types, defaults and the comments of their
    fields; nothing for a part without parameters.
    """
    if entry.params is None:
        return
    comments = _read_field_comments(entry.params)
    for field in fields(entry.params):
        kind = resolve_field_types(entry.params)[field.name]
        yield PartParameter(
            field.name, describe_type(kind), _format_default(field), comments.get(field.name, "")
        )


def _format_default(field: Field[Any]) -> str | None:
    """Return the default of a dataclass field as YAML, or None for a required field."""
    if field.default is MISSING and field.default_factory is MISSING:
        return None
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return format_yaml_value(value)


def _read_field_comments(cls: type) -> dict[str, str]:
    """Return field name -> comment from the source of a dataclass and its bases: the comment behind
    the field, the comment lines above it, or the comment behind its default on a line of its own. A
    class without source contributes nothing.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = inspect.getsource(base)
        except OSError:
            continue
        above: list[str] = []
        last = ""
        for line in source.splitlines():
            if match := _FIELD_PATTERN.match(line):
                last = match[1]
                found[last] = match[2] or " ".join(above) or found.get(last, "")
            elif last and not found[last] and line.startswith((" " * 8, "    ]", "    )")):
                found[last] = line.partition("  # ")[2]
            else:
                last = ""
            above = [*above, line.strip(" #")] if line.startswith("    # ") else []
    return found


def _extract_first_sentence(text: str) -> str:
    """Return the first paragraph of a docstring up to its first full stop."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph, maxsplit=1)[0]


def _find_table_line(text: str | None, name: str) -> str:
    """Return the row for `name` in the table of a module's docstring, joined to one line; ""
    without such a row.
    """
    # A row goes on in the lines below it that stand further to the right than a name does.
    pattern = rf"^    {re.escape(name)}[ ]+(.+(?:\n {{5,}}\S.*)*)$"
    match = re.search(pattern, text or "", re.MULTILINE)
    if match is None:
        return ""
    joined = re.sub(r"\n[ ]+", " ", match[1])
    return re.sub(r"[ ]{2,}", "  ", joined)


def format_parts_table(parts: list[RegisteredPart], shows_parameters: bool) -> str:
    """Return the listing of the parts under a heading for each kind; with `shows_parameters`, the
    whole text and parameters of each part instead of its summary.
    """
    lines: list[str] = []
    kind = ""
    for part in parts:
        if part.kind != kind:
            kind = part.kind
            lines += ["", f"{kind} ({part.key})"] if lines else [f"{kind} ({part.key})"]
        if shows_parameters and part.text:
            lines += [f"  {part.name}", "", *textwrap.indent(part.text, "    ").splitlines(), ""]
        elif len(part.name) > TEXT_INDENT - 4:
            lines += [f"  {part.name}", *_wrap_text(" " * TEXT_INDENT, part.summary)]
        else:
            lines += _wrap_text(f"  {part.name:<{TEXT_INDENT - 3}} ", part.summary)
        lines += _format_part_details(part, shows_parameters)
    return "\n".join(lines) + "\n"


def _format_part_details(part: RegisteredPart, shows_parameters: bool) -> Iterator[str]:
    """Yield the indented lines below a part: its parameters, needs, and papers."""
    empty = " " * TEXT_INDENT
    if shows_parameters:
        for one in part.parameters:
            default = "must be given" if one.default is None else f"default {one.default}"
            yield from _wrap_text(
                f"{empty}{one.name}: ", f"{one.type}, {default}{'; ' if one.doc else ''}{one.doc}"
            )
    elif part.parameters:
        settings = [
            one.name if one.default is None else f"{one.name}={one.default}"
            for one in part.parameters
        ]
        yield from _wrap_text(f"{empty}parameters: ", ", ".join(settings))
    if part.needs:
        state = f"; no run computes {', '.join(part.missing)}" if part.missing else ""
        yield from _wrap_text(f"{empty}needs: ", ", ".join(part.needs) + state)
    for paper in part.papers if shows_parameters else ():
        yield from _wrap_text(
            f"{empty}paper: ", f"{paper.title + ', ' if paper.title else ''}{paper.citation}"
        )
    if part.papers and not shows_parameters:
        yield f"{empty}papers: {', '.join(paper.citation for paper in part.papers)}"


def _wrap_text(first_indent: str, text: str) -> list[str]:
    """Return the text wrapped to the width of the listing, with `first_indent` before the first
    line; at least one line.
    """
    lines = textwrap.wrap(
        text,
        LINE_WIDTH,
        initial_indent=first_indent,
        subsequent_indent=" " * (TEXT_INDENT + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [first_indent.rstrip()]

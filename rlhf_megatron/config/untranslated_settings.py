"""The section `untranslated` of a file that `config from-verl` wrote: settings of verl that change
what is trained and that could not be translated.

Every line of the section is a problem of the configuration until the user removes the line: no
value of another file and no override does that. The section is no part of RunConfig.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.config.unsupported_features import FEATURES_BY_NAME, REMOVE_LINE
from rlhf_megatron.config.yaml_nodes import MappingNode, Node, ScalarNode, convert_to_plain

UNTRANSLATED = "untranslated"
OVERRIDE_HINT = (
    "An override lifts no refusal: remove the lines of `untranslated` in the file that `config"
    " from-verl` wrote"
)
_MAX_VALUE = 80  # characters of a value in a message


def format_untranslated_entry(name: str, value: Any, feature: str, reason: str) -> str:
    """Return the line of the section for one setting, as YAML without indentation. `value` is None
    for a setting that the file of verl does not have.
    """
    fields = {} if value is None else {"value": value}
    fields |= {"feature": feature, "reason": reason}
    entry = ", ".join(f"{field}: {_format_flow_value(text)}" for field, text in fields.items())
    return f"{format_yaml_value(name)}: {{{entry}}}"


def _format_flow_value(value: Any) -> str:
    """Return a value as YAML that may stand in one line between braces."""
    text = format_yaml_value([value])[1:-1]
    return text if "\n" not in text else json.dumps(value)


def find_untranslated_problems(section: Node) -> Iterator[ConfigProblem]:
    """Yield a problem for each line of the section `untranslated`; none for an empty section."""
    if isinstance(section, ScalarNode) and section.value is None:
        return
    if not isinstance(section, MappingNode):
        yield ConfigProblem(
            f"{UNTRANSLATED} must be a mapping of settings of verl, as `config from-verl` writes"
            " it; remove it to train without them.",
            (UNTRANSLATED,),
            str(section.origin),
        )
        return
    for name, node in section.items.items():
        yield ConfigProblem(
            f"{UNTRANSLATED}: {_describe_entry(name, convert_to_plain(node))}",
            (f"{UNTRANSLATED}.{name}",),
            str(node.origin),
        )


def _describe_entry(name: str, entry: Any) -> str:
    """Return a sentence on one setting: its value, why it has no counterpart, and how to go on. An
    entry that a user wrote in another form counts as the value of the setting.
    """
    fields = entry if isinstance(entry, dict) and "feature" in entry else {"value": entry}
    value = format_yaml_value(fields["value"]) if "value" in fields else ""
    shown = value if len(value) <= _MAX_VALUE else value[: _MAX_VALUE - 3] + "..."
    subject = f"{name} ({shown})" if shown else name
    feature = FEATURES_BY_NAME.get(str(fields.get("feature")))
    reason = fields.get("reason") or (feature.reason if feature else "it has no counterpart")
    if feature is None and "feature" in fields:
        return (
            f"{subject} had no counterpart when the file was written, and {fields['feature']} is"
            f" supported now; translate verl's file again, or {REMOVE_LINE}."
        )
    advice = feature.advice if feature else REMOVE_LINE
    if reason.endswith("?"):
        return f"{subject}: {reason} {advice[0].upper()}{advice[1:]}."
    return f"{subject}: {reason}; {advice}."

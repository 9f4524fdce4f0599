"""1 when the response is JSON that fits a schema (the label, or one of all), else 0, by the
library jsonschema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlhf_megatron.install_hints import format_install_command
from rlhf_megatron.rewards.scorers.answer_params import find_last_block
from rlhf_megatron.rewards.scorers.reward_types import (
    MALFORMED,
    OWN_PROCESS,
    REWARDS,
    RewardResult,
    RewardSample,
    make_masked_result,
)

SIMPLE: tuple[Any, ...] = (None, {}, [], "", 0)
MULTIPLE_KEYWORDS = ("multipleOf", "divisibleBy")  # the second one of draft 3


@dataclass(frozen=True)
class JsonSchemaParams:
    schema: dict[str, Any] = field(default_factory=dict)  # empty: each label is a schema

    def __post_init__(self) -> None:
        """Raise ValueError where `schema` is not a JSON schema."""
        if self.schema:
            _make_validator(json.dumps(self.schema))

    def prepare(self) -> None:
        """Import the library jsonschema. Raise ValueError when it is not installed."""
        _make_validator("{}")


@lru_cache(maxsize=64)
def _make_validator(schema: str) -> Any:
    """Return the validator of a schema, of draft 2020-12 or of the draft that `$schema` names.
    Raise ValueError for text that is no schema, or without the library jsonschema.
    """
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import extend, validator_for
        from referencing import Registry
    except ImportError as error:
        raise ValueError(
            f"the reward json_schema needs a package that is not there ({error});"
            f" {format_install_command('json-schema')}."
        ) from error
    parsed_schema = json.loads(schema)
    kind = validator_for(parsed_schema, default=Draft202012Validator)
    try:
        kind.check_schema(parsed_schema)
    except SchemaError as error:
        raise ValueError(f"schema at {error.json_path}: {error.message:.200}.") from error
    checks = {name: _check_multiple for name in MULTIPLE_KEYWORDS if name in kind.VALIDATORS}
    # which fetches nothing
    return extend(kind, checks)(
        parsed_schema, format_checker=kind.FORMAT_CHECKER, registry=Registry()
    )


def _check_multiple(validator: Any, divisor: Any, instance: Any, _: Any) -> Iterator[Any]:
    """Yield an error where a number is no multiple of the divisor, both as decimals: 19.99 is a
    multiple of 0.01, which the library, dividing floats, denies.
    """
    from jsonschema import ValidationError

    if not validator.is_type(instance, "number"):
        return
    is_infinite = isinstance(instance, float) and not math.isfinite(instance)
    if is_infinite or _read_decimal(instance) % _read_decimal(divisor) != 0:
        yield ValidationError(f"{instance!r:.80} is not a multiple of {divisor}")


def _read_decimal(number: int | float) -> Fraction:
    """Return the number that JSON's text of it says, not the float that is nearest to it."""
    return Fraction(number) if isinstance(number, int) else Fraction(repr(number))


@REWARDS.register("json_schema", JsonSchemaParams, needs=(OWN_PROCESS,))
def score_json_schema(sample: RewardSample, params: JsonSchemaParams) -> RewardResult:
    """Score 1 where the JSON in the response fits the schema, else 0. Read the last fenced block,
    marked as JSON or not at all, or without a block the whole response. A response that is no JSON
    is malformed; a label that is no schema masks the sample.
    """
    try:
        validator = _make_validator(json.dumps(params.schema) if params.schema else sample.label)
    except (ValueError, TypeError) as error:
        return make_masked_result("bad_label", f"The label is no schema: {error}")
    from referencing.exceptions import Unresolvable

    block = find_last_block(sample.response, ("json",))
    try:
        value = json.loads(
            sample.response if block is None else block, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError):
        return RewardResult(0.0, MALFORMED)
    try:
        return RewardResult(float(validator.is_valid(value)))
    except Unresolvable as error:  # a $ref that leads nowhere
        return make_masked_result("bad_label", f"The schema cannot be followed: {error}")
    except RecursionError as error:
        if _is_endless_schema(validator):
            return make_masked_result("bad_label", f"The schema leads in circles: {error}")
        return RewardResult(0.0)  # the value is too deep


def _is_endless_schema(validator: Any) -> bool:
    """Return whether a schema refers to itself without going deeper into the value."""
    try:
        for simple in SIMPLE:
            validator.is_valid(simple)
    except RecursionError:
        return True
    return False


def _refuse_constant(text: str) -> Any:
    """Raise ValueError for NaN and Infinity, which Python's parser would accept."""
    raise ValueError(f"{text} is no JSON")

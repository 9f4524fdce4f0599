"""What a stock SGLang server must be for this trainer: its version, and what it must not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import InvalidVersion, Version

OLDEST = "0.5.21"  # the first with the weight-update session endpoints
TESTED = ("0.5.21",)  # what the tests ran on
_OF_DATA_PARALLEL = "copies of the model in one server are not all reached by a weight sync"


# Argument -> (values that will do, why no others, what to do instead).
LIMITS: dict[str, tuple[tuple[object, ...], str, str]] = {
    "dp-size": ((None, 1), _OF_DATA_PARALLEL, "use rollout.num_engines (or more endpoints) and dp-size 1"),
    "pp-size": ((None, 1), "a weight sync goes to the ranks of one pipeline stage", "use tp-size"),
    "speculative-algorithm": (
        (None, ""),
        "the draft model would keep weights of former policies",
        "start it without speculative decoding",
    ),
    "enable-lora": ((None, False), "the policy is the base model's weights alone", "start it without LoRA"),
    "lora-paths": ((None, [], {}), "the policy is the base model's weights alone", "start it without LoRA"),
    "quantization": (
        (None, "", "unquant"),
        "what stands in the engine must be what the trainer sent",
        "start it without quantization",
    ),
    "disaggregation-mode": ((None, "null"), "prefill and decode must be one server", "start it without"),
    "encoder-only": ((None, False), "it must generate", "start it without"),
    "is-embedding": ((None, False), "it must generate", "start it without"),
}


def check_version(version: str, place: str) -> str | None:
    """None, or a warning about a version that no test has seen. `place`: where it is. Raises ValueError."""
    try:
        found = Version(version)
    except InvalidVersion:
        raise ValueError(f"sglang in {place} says that its version is {version!r}; use a released one.") from None
    if found < Version(OLDEST):
        raise ValueError(
            f"sglang in {place} is {version}, but {OLDEST} or newer is needed (weight-update sessions); upgrade it"
            " there."
        )
    if found > max(map(Version, TESTED)):
        return (
            f"sglang in {place} is {version}, which is newer than what was tested ({', '.join(TESTED)}); what it can do"
            " is asked, not taken for granted."
        )
    return None


def unfit(arguments: Mapping[str, object]) -> Iterator[tuple[str, object, str, str]]:
    """(argument, its value, why that cannot be, the fix) for each that stands against training. `arguments`: by name,
    with dashes or underscores."""
    plain = {name.replace("_", "-"): value for name, value in arguments.items()}
    for name, (allowed, why, fix) in LIMITS.items():
        value = plain.get(name)
        if not any(value == good and type(value) is type(good) for good in allowed):
            yield name, value, why, fix

"""What is said at start of the parts of responses that decoding or the prompt takes away from
rewards: tags that the chat template writes already, and tags that are special tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.data.response_texts import THOUGHT_TAG
from rlhf_megatron.rewards.scorers.remote_rewards import RemoteRewardParams
from rlhf_megatron.rewards.scorers.reward_types import (
    ResponseReadingParams,
    RewardSample,
    list_named_tokens,
    select_special_tokens,
)
from rlhf_megatron.rewards.scorers.user_function import FunctionParams
from rlhf_megatron.rewards.service.reward_components import (
    RewardComponent,
    load_reward_components,
)

MAX_NAMES = 4  # special tokens that a line names


class ReadingReporter:
    """Says of samples that come from elsewhere, once, what `describe_response_reading` says."""

    def __init__(
        self, components: Iterable[RewardComponent], report_line: Callable[[str], object]
    ) -> None:
        """Make a reporter that calls `report_line` with each new line."""
        self._components = [*components]
        self._report_line = report_line
        self._prefixes: set[str] = set()
        self._token_names: set[str] = set()
        self._reported_lines: set[str] = set()

    def report_samples(self, samples: Sequence[RewardSample]) -> None:
        """Report what is new in these samples."""
        prefixes = {sample.response_prefix for sample in samples if sample.response_prefix}
        token_names = {name for sample in samples for _, name in sample.special_tokens}
        if prefixes <= self._prefixes and token_names <= self._token_names:
            return
        self._prefixes |= prefixes
        self._token_names |= token_names
        for line in describe_response_reading(
            self._components, sorted(self._prefixes), sorted(self._token_names)
        ):
            if line not in self._reported_lines:
                self._reported_lines.add(line)
                self._report_line(line)


def describe_configured_reading(
    config: RewardConfig, prefixes: Sequence[str], token_names: Sequence[str]
) -> list[str]:
    """Return the lines of `describe_response_reading` for the rewards of a configuration. Return
    none where the rewards cannot be loaded, which other checks report.
    """
    try:
        components = load_reward_components(config)
    except ConfigError:
        return []
    return describe_response_reading([*components], prefixes, token_names)


def describe_response_reading(
    components: Sequence[RewardComponent], prefixes: Sequence[str], token_names: Sequence[str]
) -> list[str]:
    """Return lines on what the rewards read of a response beyond its decoded text; none where there
    is nothing else.

    `prefixes`: what the rendered prompts write of the answer, "" for nothing; `token_names`: the
    tokenizer's special tokens, or those that the responses have.
    """
    written = sorted({prefix for prefix in prefixes if prefix})
    some = "" if len(written) == len(set(prefixes)) else "some of "
    lines = [_describe_prefix(prefix, some, components) for prefix in written]
    for component in components:
        if isinstance(component.params, ResponseReadingParams):
            lines += _describe_special_tokens(component, component.params, token_names)
    return lines


def _describe_prefix(prefix: str, some: str, components: Sequence[RewardComponent]) -> str:
    """Return the line on prompts that end with the beginning of the answer."""
    readers = [
        _name_component(component)
        for component in components
        if isinstance(component.params, ResponseReadingParams)
        and component.params.reads_response_prefix
    ]
    functions = _name_components_of_type(components, FunctionParams)
    clients = _name_components_of_type(components, RemoteRewardParams)
    verb = "reads" if len(readers) == 1 else "read"
    line = f"{some}the rendered prompts end with {prefix!r}; " + (
        f"{', '.join(readers)} {verb} that in front of each response"
        if readers
        else "no reward reads that in front of a response"
    )
    if functions:
        line += f"; {', '.join(functions)} may take it as the argument response_prefix"
    if clients:
        line += f"; {', '.join(clients)} sends it to the servers, which say what they read"
    return line


def _name_components_of_type(components: Sequence[RewardComponent], params_type: type) -> list[str]:
    """Return the names of the rewards whose parameters are of this type."""
    return [
        _name_component(component)
        for component in components
        if isinstance(component.params, params_type)
    ]


def _describe_special_tokens(
    component: RewardComponent, params: ResponseReadingParams, token_names: Sequence[str]
) -> Iterator[str]:
    """Yield the line on the special tokens that a reward reads, or that it lacks."""
    place = _name_component(component)
    named_tokens = list_named_tokens(params, token_names)
    names = _join_names(named_tokens)
    are_tokens = _state_that_tokens_are_special(named_tokens)
    if params.skip_special_tokens and named_tokens:
        yield (
            f"{place}: the pattern names {names}, {are_tokens}; skip_special_tokens (true) leaves"
            f" {_choose_pronoun(named_tokens)} out of each response, so the pattern cannot match"
            " there: remove that setting"
        )
    elif params.skip_special_tokens:
        thoughts = [name for name in token_names if THOUGHT_TAG.fullmatch(name)]
        if thoughts:
            yield (
                f"{place} reads each response without {_join_names(thoughts)},"
                f" {_state_that_tokens_are_special(thoughts)}; skip_special_tokens: false shows"
                f" {_choose_pronoun(thoughts)}"
            )
    elif params.skip_special_tokens is False:
        if select_special_tokens(params, token_names):
            yield f"{place} reads each response with its special tokens"
    elif named_tokens:
        yield (
            f"{place}: the pattern names {names}, {are_tokens}; the reward reads each response with"
            f" {_choose_pronoun(named_tokens)}"
        )


def _state_that_tokens_are_special(names: Sequence[str]) -> str:
    """Return the words that say what these tokens are."""
    return f"{'a special token' if len(names) == 1 else 'special tokens'} of this tokenizer"


def _choose_pronoun(names: Sequence[str]) -> str:
    """Return the pronoun that stands for these tokens."""
    return "it" if len(names) == 1 else "them"


def _name_component(component: RewardComponent) -> str:
    """Return the words by which a line names a reward: its key and its name."""
    return f"{component.config_key} ({component.entry.name})"


def _join_names(names: Sequence[str]) -> str:
    """Return the names as an enumeration, of which many are counted."""
    shown = [*names[:MAX_NAMES]]
    if len(names) > MAX_NAMES:
        shown.append(f"{len(names) - MAX_NAMES} others")
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)

"""Problems of the library reasoning-gym (https://github.com/open-thought/reasoning-gym), generated,
none downloaded.

The question is the prompt, the answer the label (empty where a problem has many answers), and
`extra` holds the whole entry of the library, by which the reward `reasoning_gym` scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.data.data_rows import PromptRow, TaskRows
from rlhf_megatron.data.tasks import TASKS
from rlhf_megatron.install_hints import format_install_command

EXTRA_KEY = "reasoning_gym"
MAX_DRAWS = 20  # a problem wanted: so many are looked at before the dataset counts as too small


@dataclass(frozen=True)
class ReasoningGymTaskParams:
    dataset: str  # name of one of the library's tasks, e.g. chain_sum
    # of that task, but for size and seed; see the library
    config: dict[str, Any] = field(default_factory=dict)
    size: int = 10_000  # training problems
    num_val: int = 500  # problems held out; no question of theirs is trained on
    seed: int = 123  # of the problems
    template: str = "{question}"  # the prompt; {question} stands in it

    def __post_init__(self) -> None:
        """Raise ValueError for a size below 1, a template without {question}, and a config that
        sets size or seed.
        """
        for name, value in (("size", self.size), ("num_val", self.num_val)):
            if value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1.")
        if "{question}" not in self.template:
            raise ValueError(
                f"template ({self.template!r}) must have {{question}} in it, where the"
                " question goes."
            )
        taken = sorted({"size", "seed"} & set(self.config))
        if taken:
            raise ValueError(
                f"config ({taken}) must not set {' or '.join(taken)}; they stand beside it."
            )


@TASKS.register("reasoning_gym", ReasoningGymTaskParams)
def generate_reasoning_gym_rows(params: ReasoningGymTaskParams) -> TaskRows:
    """Return `size` training and `num_val` held-out problems of the library reasoning-gym, all with
    different questions, in the order in which they are drawn.

    Raise ValueError when the library is missing, when it refuses the parameters, and when it has
    too few different problems.
    """
    wanted = params.size + params.num_val
    rows: dict[str, PromptRow] = {}
    for index, entry in _draw_entries(params, MAX_DRAWS * wanted):
        rows.setdefault(entry["question"], _make_prompt_row(params, index, entry))
        if len(rows) == wanted:
            break
    if len(rows) < wanted:
        raise ValueError(
            f"reasoning-gym's {params.dataset} has {len(rows)} different problems in"
            f" {MAX_DRAWS * wanted} that were drawn, but size + num_val ({params.size} +"
            f" {params.num_val}) is {wanted}; ask for fewer, or for larger problems by `config`."
        )
    ordered = tuple(rows.values())
    return TaskRows(train=ordered[params.num_val :], held_out=ordered[: params.num_val])


def _draw_entries(
    params: ReasoningGymTaskParams, num_entries: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (index, entry) of the first `num_entries` problems of the library's dataset. Raise
    ValueError as `_check_json_scoring` does.
    """
    dataset = make_reasoning_gym_dataset(
        params.dataset, {**params.config, "seed": params.seed, "size": num_entries}
    )
    for index in range(num_entries):
        entry = dataset[index]
        if index == 0:
            _check_json_scoring(params.dataset, dataset, entry)
        yield index, entry


def _check_json_scoring(dataset_name: str, dataset: Any, entry: dict[str, Any]) -> None:
    """Raise ValueError for a task that the library scores otherwise after the entry went through
    JSON.
    """
    answer = entry["answer"]
    read = json.loads(json.dumps(entry))
    if answer is not None and dataset.score_answer(answer, entry) != dataset.score_answer(
        answer, read
    ):
        raise ValueError(
            f"dataset ({dataset_name!r}) cannot be used: reasoning-gym scores it wrongly once it"
            " has been stored."
        )


def _make_prompt_row(
    params: ReasoningGymTaskParams, index: int, entry: dict[str, Any]
) -> PromptRow:
    """Return an entry of the library as a prompt row; `extra` holds the whole entry."""
    extra = json.dumps(
        {EXTRA_KEY: {"dataset": params.dataset, "config": params.config, "entry": entry}}
    )
    prompt = params.template.replace("{question}", entry["question"])
    return PromptRow(
        prompt,
        entry["answer"] or "",
        params.dataset,
        f"{params.dataset} {params.seed}: {index}",
        extra,
    )


def make_reasoning_gym_dataset(dataset_name: str, config: dict[str, Any]) -> Any:
    """Return the library's dataset. Raise ValueError for a name or config that the library does not
    know, or when the library is missing.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"reasoning-gym is not there ({error}); {format_install_command('reasoning-gym')},"
            " which needs a C compiler."
        ) from error
    if dataset_name not in DATASETS:
        raise ValueError(
            f"dataset ({dataset_name!r}) must be one of"
            f" reasoning-gym's {', '.join(sorted(DATASETS))}."
        )
    try:
        return reasoning_gym.create_dataset(dataset_name, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"config ({config}) is not one of reasoning-gym's {dataset_name}: {error}"
        ) from error

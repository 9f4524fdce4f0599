"""Generated arithmetic: all problems of a size, a fixed part of them held out."""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf_megatron.data.data_rows import PromptRow, TaskRows
from rlhf_megatron.data.tasks import TASKS

Operation = Literal["add", "sub", "mul"]
OPERATIONS = {"add": ("+", operator.add), "sub": ("-", operator.sub), "mul": ("*", operator.mul)}


@dataclass(frozen=True)
class AdditionParams:
    num_digits: int = 2  # of each summand
    num_val: int = 2000  # problems held out
    split_seed: int = 123  # of the order in which problems are dealt to the two sets

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range."""
        if not 1 <= self.num_digits <= 3:
            raise ValueError(f"num_digits ({self.num_digits}) must be 1, 2 or 3.")
        _check_num_val(self.num_val, 10 ** (2 * self.num_digits) - 1)


@TASKS.register("addition", AdditionParams)
def generate_addition_rows(params: AdditionParams) -> TaskRows:
    """Return problems of zero-padded addition, "07+45=" -> "052": all pairs of summands, shuffled;
    the first `num_val` are held out.
    """
    width = params.num_digits
    numbers = range(10**width)
    rows = [
        PromptRow(
            f"{a:0{width}d}+{b:0{width}d}=",
            f"{a + b:0{width + 1}d}",
            "addition",
            f"addition: {a}+{b}",
        )
        for a in numbers
        for b in numbers
    ]
    random.Random(params.split_seed).shuffle(rows)
    return _split_held_out(rows, params.num_val)


@dataclass(frozen=True)
class FewShotAdditionParams:
    # sub: the result is 1..9, what is taken away 1..9
    operation: tuple[Operation, ...] | Operation = "add"
    num_val: int = 20  # of the 81 problems of an operation, held out
    num_shots: int = 3  # solved problems before the question, of its operation
    shots_seed: int = 5  # of the solved problems, the same in every prompt
    split_seed: int = 123

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range, and for repeated operations."""
        if self.num_shots < 0:
            raise ValueError(f"num_shots ({self.num_shots}) must be at least 0.")
        if not self.operations or len(set(self.operations)) < len(self.operations):
            raise ValueError(
                f"operation ({list(self.operations)}) must name one or more that differ; use"
                " [add, sub, mul]."
            )
        for operation in self.operations:
            _check_num_val(
                self.num_val, 81 - max(1, len(set(_draw_solved_problems(self, operation))))
            )

    @property
    def has_own_shots(self) -> bool:
        """Return whether the prompts hold solved problems."""
        return self.num_shots > 0

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Return the operations as a tuple, also where one is set."""
        return (self.operation,) if isinstance(self.operation, str) else self.operation


@TASKS.register("few_shot_addition", FewShotAdditionParams)
def generate_few_shot_addition_rows(params: FewShotAdditionParams) -> TaskRows:
    """One-digit problems behind solved ones, for a pretrained model:
    "2+3=5\\n4+8=12\\n...7+6=" -> "13".

    A problem that stands solved in the prompt is never held out. Each of several operations has its
    own source name.
    """
    parts = [_generate_operation_rows(params, operation) for operation in params.operations]
    return TaskRows(
        train=tuple(row for part in parts for row in part.train),
        held_out=tuple(row for part in parts for row in part.held_out),
    )


def _generate_operation_rows(params: FewShotAdditionParams, operation: Operation) -> TaskRows:
    """Return the rows of one operation. Problems that are solved in the prompt are sorted last, so
    that they are not held out.
    """
    sign, compute = OPERATIONS[operation]
    solved = _draw_solved_problems(params, operation)
    shots = "".join(f"{a}{sign}{b}={compute(a, b)}\n" for a, b in solved)
    source = f"few_shot_{operation}"
    problems = [_order_operands(operation, x, y) for x in range(1, 10) for y in range(1, 10)]
    random.Random(params.split_seed).shuffle(problems)
    # stable: solved ones last, out of the held-out part
    problems.sort(key=lambda problem: problem in solved)
    rows = [
        PromptRow(f"{shots}{a}{sign}{b}=", str(compute(a, b)), source, f"{source}: {a}{sign}{b}")
        for a, b in problems
    ]
    return _split_held_out(rows, params.num_val)


def _order_operands(operation: Operation, x: int, y: int) -> tuple[int, int]:
    """Return the operands of the problem for x and y; for "sub" they are (x + y, x), so that the
    result is y.
    """
    return (x + y, x) if operation == "sub" else (x, y)


def _draw_solved_problems(
    params: FewShotAdditionParams, operation: Operation
) -> list[tuple[int, int]]:
    """Return the problems that are solved in every prompt."""
    chance = random.Random(params.shots_seed)
    return [
        _order_operands(operation, chance.randint(1, 9), chance.randint(1, 9))
        for _ in range(params.num_shots)
    ]


def _check_num_val(num_val: int, max_num_val: int) -> None:
    """Raise ValueError unless `num_val` is from 1 to `max_num_val`."""
    if not 1 <= num_val <= max_num_val:
        raise ValueError(
            f"num_val ({num_val}) must be from 1 to {max_num_val}, so that both sets have problems."
        )


def _split_held_out(rows: Sequence[PromptRow], num_val: int) -> TaskRows:
    """Hold out the first `num_val` rows; the others train."""
    return TaskRows(train=tuple(rows[num_val:]), held_out=tuple(rows[:num_val]))

"""Labels of mathematics that math-verify reads whole, with a right and a wrong answer to each.

The answers are right and wrong by construction: the generator draws the numbers of a label,
writes another spelling of the same value, and writes one that differs in one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from random import Random


@dataclass(frozen=True)
class GeneratedLabel:
    """A label and what the answers to it must score."""

    kind: str
    label: str
    right: str  # within the box; scores 1
    wrong: str  # scores 0


def _draw_integer(random: Random) -> tuple[str, str, str]:
    """Return an integer, the same with commas between thousands, and its successor."""
    value = random.choice((1, -1)) * random.randrange(10 ** random.randrange(1, 8))
    return str(value), f"{value:,}", str(value + 1)


def _draw_decimal(random: Random) -> tuple[str, str, str]:
    """Return a decimal number, the same as a fraction, and another."""
    digits = random.randrange(1, 5)
    value = Fraction(random.randrange(-99_999, 99_999), 10**digits)
    other = value + 1
    fraction = f"{value.numerator}/{value.denominator}"
    return f"{float(value):.{digits}f}", fraction, f"{float(other):.{digits}f}"


def _draw_fraction(random: Random) -> tuple[str, str, str]:
    """Return a fraction, the same with both parts doubled, and another."""
    numerator = random.randrange(1, 200)
    denominator = random.randrange(2, 100)
    sign = random.choice(("", "-"))
    right = f"{sign}\\frac{{{2 * numerator}}}{{{2 * denominator}}}"
    wrong = f"{sign}\\frac{{{numerator + 1}}}{{{denominator}}}"
    if random.random() < 0.5:
        return f"{sign}{numerator}/{denominator}", right, wrong
    command = random.choice(("\\frac", "\\dfrac"))
    return f"{sign}{command}{{{numerator}}}{{{denominator}}}", right, wrong


def _draw_tuple(random: Random) -> tuple[str, str, str]:
    """Return a tuple of three or four integers, the same without blanks, and another."""
    values = [random.randrange(-50, 50) for _ in range(random.randrange(3, 5))]
    changed = [*values[:-1], values[-1] + 1]
    return (
        f"({', '.join(map(str, values))})",
        f"\\left({','.join(map(str, values))}\\right)",
        f"({', '.join(map(str, changed))})",
    )


def _draw_interval(random: Random) -> tuple[str, str, str]:
    """Return an interval, the same with other blanks, and one with another end."""
    low = random.randrange(-50, 50)
    high = low + random.randrange(2, 50)
    opening = random.choice("[(")
    closing = random.choice("])")
    if random.random() < 0.3:
        return f"[{low}, \\infty)", f"\\left[{low},\\infty\\right)", f"[{low + 1}, \\infty)"
    return (
        f"{opening}{low}, {high}{closing}",
        f"\\left{opening}{low},{high}\\right{closing}",
        f"{opening}{low}, {high + 1}{closing}",
    )


def _draw_set(random: Random) -> tuple[str, str, str]:
    """Return a set of integers, the same in another order, and another."""
    values = random.sample(range(-30, 30), 3)
    changed = [*values[:-1], 31]
    return (
        f"\\{{{', '.join(map(str, values))}\\}}",
        f"\\{{{','.join(map(str, reversed(values)))}\\}}",
        f"\\{{{','.join(map(str, changed))}\\}}",
    )


def _draw_polynomial(random: Random) -> tuple[str, str, str]:
    """Return a quadratic polynomial as a product, the same multiplied out, and another."""
    variable = random.choice("xynabk")
    first, second = (random.randrange(1, 20) for _ in range(2))
    rest = f"{variable}^2+{first + second}{variable}"
    return (
        f"({variable}+{first})({variable}+{second})",
        f"{rest}+{first * second}",
        f"{rest}+{first * second + 1}",
    )


def _draw_linear_term(random: Random) -> tuple[str, str, str]:
    """Return a linear expression in two variables, the same in another order, and another."""
    first, second = random.sample("xynabk", 2)
    factor, other = (random.randrange(2, 30) for _ in range(2))
    return (
        f"{factor}{first} - {other}{second}",
        f"-{other}{second}+{factor}{first}",
        f"{factor}{first}-{other + 1}{second}",
    )


def _draw_root(random: Random) -> tuple[str, str, str]:
    """Return an integer times a root, the same under the root, and another."""
    factor = random.randrange(2, 20)
    radicand = random.choice((2, 3, 5, 6, 7, 10, 11, 13))
    return (
        f"{factor}\\sqrt{{{radicand}}}",
        f"\\sqrt{{{factor * factor * radicand}}}",
        f"{factor + 1}\\sqrt{{{radicand}}}",
    )


def _draw_multiple_of_pi(random: Random) -> tuple[str, str, str]:
    """Return a fraction of pi, the same with pi behind it, and another."""
    factor = random.randrange(1, 30)
    divisor = random.randrange(2, 13)
    return (
        f"\\frac{{{factor}\\pi}}{{{divisor}}}",
        f"\\frac{{{factor}}}{{{divisor}}}\\pi",
        f"\\frac{{{factor + 1}\\pi}}{{{divisor}}}",
    )


def _draw_power(random: Random) -> tuple[str, str, str]:
    """Return a power, its value, and another."""
    base = random.randrange(2, 13)
    exponent = random.randrange(2, 7)
    return f"{base}^{{{exponent}}}", str(base**exponent), str(base**exponent + 1)


def _draw_percentage(random: Random) -> tuple[str, str, str]:
    """Return a percentage, the same as a decimal number, and another."""
    value = random.randrange(1, 100)
    return f"{value}\\%", f"{value / 100:.2f}", f"{value + 1}\\%"


def _draw_equation(random: Random) -> tuple[str, str, str]:
    """Return the value of a variable as an equation, the value alone, and another."""
    value = random.randrange(-99, 99)
    return f"{random.choice('xyn')}={value}", str(value), str(value + 1)


def _draw_complex_number(random: Random) -> tuple[str, str, str]:
    """Return a complex number, the same with its parts exchanged, and another."""
    real, imaginary = (random.randrange(2, 30) for _ in range(2))
    return f"{real}+{imaginary}i", f"{imaginary}i+{real}", f"{real}+{imaginary + 1}i"


def _draw_difference(random: Random) -> tuple[str, str, str]:
    """Return a difference of two integers with a hyphen, its value, and its first term."""
    first, second = (random.randrange(1, 99) for _ in range(2))
    return f"{first}-{second}", str(first - second), str(first)


KINDS: dict[str, Callable[[Random], tuple[str, str, str]]] = {
    "integer": _draw_integer,
    "decimal": _draw_decimal,
    "fraction": _draw_fraction,
    "tuple": _draw_tuple,
    "interval": _draw_interval,
    "set": _draw_set,
    "polynomial": _draw_polynomial,
    "linear": _draw_linear_term,
    "root": _draw_root,
    "pi": _draw_multiple_of_pi,
    "power": _draw_power,
    "percentage": _draw_percentage,
    "equation": _draw_equation,
    "complex": _draw_complex_number,
    "difference": _draw_difference,
}


def generate_labels(count: int, seed: int) -> Iterator[GeneratedLabel]:
    """Yield `count` labels, the kinds in turns."""
    random = Random(seed)
    kinds = list(KINDS.items())
    for place in range(count):
        kind, draw = kinds[place % len(kinds)]
        yield GeneratedLabel(kind, *draw(random))

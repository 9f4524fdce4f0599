"""Samples of the reward benchmark: good ones, and bad ones of every kind with the status that
each must get.

`similarity` is the user's function of it, called in worker processes
as benchmarks/reward_samples.py:similarity.
"""

from __future__ import annotations

import difflib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from rlhf_megatron.rewards.scorers import RewardSample


@dataclass(frozen=True)
class Bad:
    """One sample in a hundred of such a kind. `make` numbers its samples,
    so that no two are equal.
    """

    kind: str
    make: Callable[[int], RewardSample]
    statuses: tuple[str, ...]  # one of these is right


def sample(response: str, label: str, source: str = "benchmark") -> RewardSample:
    return RewardSample("", response, label, source, "stop", len(response))


def similarity(response: str, label: str, source: str) -> object:
    """A reward of some milliseconds of plain Python: how alike two texts are. A response may order
    its own misdeed.
    """
    match response.partition(" ")[0]:
        case "hang":
            time.sleep(3600)
        case "burn":
            while True:
                pass
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError(response)
        case "garbage":
            return [float("nan"), None, "1", 1e300, {"score": None}, object()][
                int(response.split()[1]) % 6
            ]
    return difflib.SequenceMatcher(None, response, label, autojunk=False).ratio()


def texts(count: int, seed: int) -> list[RewardSample]:
    chance = random.Random(seed)
    words = [
        "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8)))
        for _ in range(300)
    ]
    samples = []
    for _ in range(count):
        label = chance.choices(words, k=80)
        response = [word if chance.random() < 0.7 else chance.choice(words) for word in label]
        samples.append(sample(" ".join(response), " ".join(label)))
    return samples


def answers(count: int, seed: int) -> list[RewardSample]:
    """Answers as mathematics problems have them, a third in the label's notation, a third in
    another, a third wrong.
    """
    chance = random.Random(seed)
    forms: list[Callable[[int, int], tuple[str, str]]] = [
        lambda a, b: (rf"\frac{{{a}}}{{{b}}}", f"{a}/{b}"),
        lambda a, b: (f"{a}", rf"\frac{{{2 * a}}}{{2}}"),
        lambda a, b: (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"),
        lambda a, b: (rf"x^2+{a}x+{b}", rf"{b}+x({a}+x)"),
        lambda a, b: (f"({a}, {b})", f"({a},{b})"),
        lambda a, b: (rf"\{{{a},{b}\}}", rf"\{{{b},{a}\}}"),
        lambda a, b: (f"[{a},{a + b})", f"[{a}, {a + b})"),
        lambda a, b: (rf"\frac{{{a}\pi}}{{{b}}}", rf"{a}\pi/{b}"),
        lambda a, b: (f"{a / 4}", rf"\frac{{{a}}}{{4}}"),
        lambda a, b: (rf"{a}^{{{b % 20}}}", f"{a ** (b % 20)}"),
    ]
    samples = {}
    while len(samples) < count:
        form, a, b = chance.choice(forms), chance.randint(2, 999), chance.randint(2, 999)
        label, other = form(a, b)
        wrong = form(a, b + 1)[0] if form(a, b + 1)[0] != label else form(a + 1, b)[0]
        answer = chance.choice([label, other, wrong])
        samples[answer, label] = sample(rf"We find that it is \boxed{{{answer}}}.", label)
    return list(samples.values())


OF_FUNCTION = (
    Bad("hanging", lambda i: sample(f"hang {i}", "x"), ("timeout",)),
    Bad("raising", lambda i: sample(f"raise {i}", "x"), ("masked:KeyError",)),
    Bad("garbage", lambda i: sample(f"garbage {i}", "x"), ("masked:bad_result",)),
    Bad("killing", lambda i: sample(f"kill {i}", "x"), ("masked:worker_died",)),
)
OF_BURNING = ("timeout", "masked:overloaded")  # the second on a machine that has much other work
BURNING = (Bad("hanging", lambda i: sample(f"burn {i}", "x"), OF_BURNING), *OF_FUNCTION[1:])

BOMBS = (
    r"9^{{9^{{9^{{{}}}}}}}",
    r"10^{{10^{{1{}}}}}",
    "(" * 20 + "{}" + ")" * 20,
    r"(({}!)!)!",
    r"\binom{{1{}00000}}{{50000}}",
)
GARBAGE = (r"\boxed{{}} {}", "}} {{ {}" + "x" * 300, r"}}{{ {}", r"\frac{{{}", "&& {} ;; %%")


def boxed(templates: tuple[str, ...], label: str = "42") -> Callable[[int], RewardSample]:
    return lambda i: sample(rf"\boxed{{{templates[i % len(templates)].format(10 + i)}}}", label)


OF_MATH = (
    Bad(
        "hanging", boxed(BOMBS), ("malformed",)
    ),  # the library alone takes over 1.4 s, mostly for ever, for each
    Bad("raising", boxed(("{}",), label=""), ("masked:bad_label",)),
    Bad(
        "garbage",
        lambda i: sample(GARBAGE[i % len(GARBAGE)].format(i), "4242"),
        ("malformed", "ok"),
    ),
)
ENDLESS = (
    Bad(
        "hanging",
        boxed((r"\sum_{{n=1}}^{{\infty}} \frac{{\sin n}}{{n^{{{}}}}}",)),
        ("timeout", "masked:overloaded"),
    ),
    *OF_MATH[1:],
)

"""Which failures may pass, and the pauses between tries."""

from __future__ import annotations

import time

import pytest

from rlhf_megatron.retry import RetryPauses, may_pass, parse_retry_after


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, True),
        *((status, True) for status in (408, 425, 429, 500, 502, 503, 504, 529)),
        *((status, False) for status in (400, 401, 403, 404, 413, 422, 501, 505, 301)),
    ],
)
def test_may_pass(status: int | None, expected: bool) -> None:
    assert may_pass(status) == expected


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("7", 7.0),
        (" 7 ", 7.0),
        ("3600", 60.0),
        ("-1", 0.0),
        ("\N{SUPERSCRIPT TWO}", 0.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0),
    ],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert parse_retry_after(header) == seconds


def test_pauses_double_up_to_the_longest() -> None:
    pauses = RetryPauses(1e9, 0.25, 15.0, draw=lambda: 0.5)
    pauses.start_try()
    found = [pauses.choose_pause() for _ in range(9)]
    assert found == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]
    assert pauses.num_retries == 9
    pauses.num_retries = 5000
    assert pauses.choose_pause() == 15.0
    assert pauses.choose_pause(retry_after_s=40.0) == 40.0


def test_pauses_vary() -> None:
    pauses = RetryPauses(1e9, 8.0, 8.0)
    pauses.start_try()
    drawn = [pauses.choose_pause() or 0.0 for _ in range(200)]
    assert min(drawn) >= 4.0 and max(drawn) <= 12.0 and len(set(drawn)) > 100


def test_a_try_that_would_come_too_late_is_not_made() -> None:
    pauses = RetryPauses(10.0, 4.0, 4.0, draw=lambda: 0.5)
    pauses.start_try()
    assert pauses.choose_pause() == 4.0
    assert pauses.choose_pause(retry_after_s=11.0) is None
    assert pauses.num_retries == 1
    # the first try counts, not later ones
    pauses = RetryPauses(0.05, 0.04, 0.04, draw=lambda: 0.5)
    pauses.start_try()
    time.sleep(0.06)
    pauses.start_try()
    assert pauses.choose_pause() is None

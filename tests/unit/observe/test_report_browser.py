"""The watched report in a real browser: the page follows the run by itself, and fits a
narrow screen.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from report_samples import evaluation_row, sample, step_row, write_lines, write_run_dir

from rlhf_megatron.cli.main import main

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        BROWSER is None, reason="no Chromium or Chrome is installed (apt-get install chromium)"
    ),
]
LIMIT_S = 180.0
ROWS = [evaluation_row(0, 0.2, 0.1, 0.3), step_row(1, 0.25), step_row(2, 0.5)]


class Tab:
    """The one page of a headless browser, over its own protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=LIMIT_S)
            if answer.get("id") == self._number:
                return answer.get("result", {})  # {} while a page gives way to the next

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found.get("result", {}).get("value")

    async def until(self, expression: str, is_there: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + LIMIT_S
        while not is_there(found := await self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} stays {str(found)[:2000]}"
            await asyncio.sleep(0.1)
        return found


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Path]:
    """Of the file in which the browser says where it listens."""
    profile = tmp_path / "profile"
    words = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ]
    words += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(
        [str(BROWSER), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as browser:
        yield profile / "DevToolsActivePort"
        browser.kill()


def test_the_page_follows_the_run_and_fits_a_narrow_screen(tmp_path: Path, address: Path) -> None:
    run = write_run_dir(tmp_path / "run", ROWS, samples=[sample(1)])
    watch = threading.Thread(
        target=main, args=(["report", str(run), "--open", "no", "--watch", "1"],), daemon=True
    )
    watch.start()
    try:
        asyncio.run(_look(run, address))
    finally:
        (run / "summary.json").write_text('{"steps": 3, "seconds": 9.0}')  # the watch ends
        watch.join(LIMIT_S)
    assert not watch.is_alive()


async def _look(run: Path, address: Path) -> None:
    page = run / "report" / "index.html"
    deadline = time.monotonic() + LIMIT_S
    while not (page.exists() and address.exists() and address.read_text().count("\n")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    port = address.read_text().splitlines()[0]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            (tab_at,) = [
                each["webSocketDebuggerUrl"]
                for each in await answer.json()
                if each["type"] == "page"
            ]
        async with session.ws_connect(tab_at) as socket:
            tab = Tab(socket)
            await tab.call("Page.navigate", url=page.as_uri())
            text = "document.body.innerText"
            drawn = "document.querySelectorAll('figure canvas').length"
            assert "step 3 of 4" not in await tab.until(
                text, lambda found: "step 2 of 4" in (found or "")
            )
            assert await tab.until(drawn, lambda count: (count or 0) > 3)
            write_lines(run / "metrics.jsonl", [*ROWS, step_row(3, 0.75)])
            await tab.until(text, lambda found: "step 3 of 4" in (found or ""))
            await tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=400,
                height=800,
                deviceScaleFactor=1,
                mobile=False,
            )
            await tab.until("innerWidth", lambda width: width == 400)
            assert await tab.value(
                "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            )
            assert await tab.until(drawn, lambda count: (count or 0) > 3)
            widest = (
                "Math.max(...[...document.querySelectorAll('figure')].map(f =>"
                " f.getBoundingClientRect().right))"
            )
            assert await tab.value(f"{widest} <= document.documentElement.clientWidth")
            (run / "summary.json").write_text('{"steps": 3, "seconds": 9.0}')
            await tab.until(text, lambda found: "finished at step 3 of 4" in (found or ""))
            assert await tab.value("document.querySelector('meta[http-equiv=refresh]') === null")

"""A page in a headless Chromium, driven through its DevTools protocol: clicks, keys, touch, what the console holds."""

import asyncio
import base64
import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.browser import Browser

_PATIENCE = 300


class Page:
    """A tab.

    Args:
        reader: what Chromium writes to its pipe.
        pipe: pipe that Chromium reads.
    """

    def __init__(self, reader: asyncio.StreamReader, pipe: int) -> None:
        self._stream, self._pipe = reader, pipe
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}
        self.console: list[str] = []
        """Complaints about the page's scripts, its policy and its requests."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            try:
                told = json.loads((await self._stream.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError:
                return
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.console.append(json.dumps(told["params"])[:500])

    async def attach(self) -> None:
        """Choose the tab that Chromium has opened."""
        tab: list[str] = []
        while not tab:
            found = (await self.do("Target.getTargets"))["targetInfos"]
            tab = [each["targetId"] for each in found if each["type"] == "page"]
        self._session = await self.do("Target.attachToTarget", targetId=tab[0], flatten=True)

    async def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        sent = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._pipe, json.dumps(sent).encode() + b"\0")
        answer = await asyncio.wait_for(self._answers[number], _PATIENCE)
        assert "error" not in answer, f"{method}: {answer}"
        result: dict[str, Any] = answer["result"]
        return result

    async def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        done = await self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def wait_for(self, condition: str) -> None:
        """Wait until JavaScript is true."""
        for _ in range(10 * _PATIENCE):
            if await self.value(f"Boolean({condition})"):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(
            f"{condition} has not become true; the page: {await self.value('document.body.innerText')}"
        )

    async def open(self, address: str) -> None:
        await self.do("Page.navigate", url=address)
        await self.wait_for("document.readyState === 'complete' && document.querySelector('#about').textContent")

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.do("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        codes = {"Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "Tab": 9, "End": 35}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        await self.do("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        await self.do("Input.dispatchKeyEvent", type="keyUp", **about)

    async def screenshot(self, file: Path, *, whole: bool = True) -> None:
        shot = await self.do("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def open_page(browser: Browser, width: int, height: int, *, dark: bool = False) -> AsyncIterator[Page]:
    """Start Chromium with one tab of this size; below 700 pixels it is a phone's, with touch."""
    phone = width < 700
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    command = [browser.program, *options, f"--user-data-dir={browser.profile}", "about:blank"]
    (its_input, pipe), (output, its_output) = os.pipe(), os.pipe()
    # Its pipes are files 3 and 4.
    words = ["bash", "-c", f'exec "$@" 3<&{its_input} 4>&{its_output}', "bash", *command]
    process = subprocess.Popen(
        words, pass_fds=(its_input, its_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(its_input)
    os.close(its_output)
    try:
        # A screenshot is one message.
        reader = asyncio.StreamReader(limit=1 << 30)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb")
        )
        page = Page(reader, pipe)
        await page.attach()
        for domain in ("Page", "Runtime", "Log"):
            await page.do(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        await page.do("Emulation.setDeviceMetricsOverride", **size)
        await page.do("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.do("Emulation.setEmulatedMedia", features=[scheme])
        yield page
    finally:
        process.terminate()
        process.wait(timeout=_PATIENCE)
        os.close(pipe)

"""A real browser for tests: Debian's chromium without a window, spoken to over its debugging pipe (no package needed)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60.0


class Browser:
    """One process; each `open` is a fresh tab."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.profile = tempfile.TemporaryDirectory(prefix="meshwright-browser-", ignore_cleanup_errors=True)
        to_read, self._write = _high_pipe()
        self._read, to_write = _high_pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
        command = [CHROMIUM, *options, "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *command],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)
        os.close(self._read)
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.profile.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer; what the browser says meanwhile is kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, address: str, width: int = 1200, height: int = 900, *, dark: bool = False) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        for room in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{room}.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        tab.call("Page.navigate", url=address)
        tab.until("document.documentElement?.dataset.ready === 'yes'")
        return tab


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are not 3 and 4: these are the browser's."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


class Tab:
    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str) -> None:
        end = time.monotonic() + PATIENCE
        while not self.ask(condition):
            assert time.monotonic() < end, f"never came true: {condition}"
            time.sleep(0.05)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> str:
        """Move the pointer onto an element; what the tip says then."""
        box = self.ask(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); node.scrollIntoView({{block: 'center'}});"
            " const box = node.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
        )
        left, top, width, height = box
        place = {"x": left + across * width, "y": top + down * height}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        shown: str = self.ask("(n => n.style.display === 'none' ? '' : n.textContent)(document.getElementById('tip'))")
        return shown

    def drag(self, selector: str, begin: float, end: float) -> None:
        """Press at one share of an element's width and let go at another."""
        self.hover(selector, begin)
        left, top, width, height = self.ask(
            f"(b => [b.left, b.top, b.width, b.height])(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind, share in (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end)):
            place = {"x": left + share * width, "y": top + height / 2}
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def click(self, selector: str) -> None:
        self.ask(f"document.querySelector({json.dumps(selector)}).click()")

    def screenshot(self, path: Path) -> Path:
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    @property
    def complaints(self) -> list[str]:
        """What the console says as warnings and errors, and exceptions nobody caught."""
        found = []
        for event in self._events():
            method, about = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"]))
            elif method == "Log.entryAdded" and about["entry"]["level"] in ("warning", "error"):
                found.append(about["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and about["type"] in ("warning", "error"):
                found.append(str(about["args"]))
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in self.browser.events if event.get("sessionId") == self.session]

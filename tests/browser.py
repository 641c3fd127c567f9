"""A real headless Chromium for tests, driven over its DevTools pipe: no driver, no extra package.

``find_chromium`` gives the program or None; ``Browser`` opens pages, clicks, types, reads the DOM and the console, and
takes screenshots. Messages are JSON with a NUL at the end, to file descriptor 3 and from file descriptor 4 of the
browser.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip
# becomes the browser with the two pipes as descriptors 3 and 4, whatever numbers they had before
_WITH_PIPES = (
    "import fcntl, os, sys; read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]); "
    "os.dup2(read, 3); os.dup2(write, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
PATIENCE = 90.0  # seconds for one answer: a browser on a busy two-core machine starts slowly


def find_chromium() -> str | None:
    """The browser's path: HEADRANK_CHROMIUM, or the first known name on PATH."""
    wanted = os.environ.get("HEADRANK_CHROMIUM")
    return wanted or next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def chromium_or_skip() -> str:
    """The browser's path, or a skip that says how to get one."""
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium: install Debian's package 'chromium' or set HEADRANK_CHROMIUM")
    return path


class Browser:
    """One tab. Everything the page logs as an error, and every exception it throws, is collected in ``errors``."""

    def __init__(self, program: str) -> None:
        """Start the browser and attach to a new tab."""
        self._profile = tempfile.TemporaryDirectory(prefix="headrank-chromium-", ignore_cleanup_errors=True)
        to_read, self._to_browser = os.pipe()
        self._from_browser, to_write = os.pipe()
        command = [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._number, self._buffer, self._session = 0, b"", None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._session = None
            os.write(self._to_browser, json.dumps({"id": 0, "method": "Browser.close"}).encode() + b"\0")
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._to_browser)
            os.close(self._from_browser)
            self._profile.cleanup()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call one DevTools method and return its result; events that arrive meanwhile are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self, method: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        with selectors.DefaultSelector() as selector:
            selector.register(self._from_browser, selectors.EVENT_READ)
            while b"\0" not in self._buffer:
                assert selector.select(max(0.0, deadline - time.monotonic())), (
                    f"the browser did not answer {method} within {PATIENCE:.0f} s"
                )
                data = os.read(self._from_browser, 1 << 20)
                assert data, f"the browser ended while answering {method}"
                self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        name, values = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.errors.append(
                str(
                    values["exceptionDetails"].get("exception", {}).get("description")
                    or values["exceptionDetails"]["text"]
                )
            )
        elif name == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.errors.append(values["entry"]["text"])
        elif name == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.errors.append(str([argument.get("value") for argument in values["args"]]))
        elif name == "Network.requestWillBeSent" and not values["request"]["url"].startswith("data:"):
            self.requests.append(values["request"]["url"])

    def open(self, page: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a file or an http address and wait until it has loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        url = page.resolve().as_uri() if isinstance(page, Path) else page
        self.send("Page.navigate", url=url)
        deadline = time.monotonic() + PATIENCE
        while (
            self.value("document.readyState") != "complete"
            or self.value("location.protocol") != f"{url.partition(':')[0]}:"
        ):
            assert time.monotonic() < deadline, f"{page} did not finish loading"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def centre(self, selector: str) -> tuple[float, float]:
        """The middle of the first element that matches, scrolled into view."""
        found = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center'}); const r = e.getClientRects()[0]; return [r.x + r.width / 2, r.y "
            "+ r.height / 2]; })()"
        )
        assert found, f"nothing matches {selector}"
        return found[0], found[1]

    def hover(self, selector: str) -> None:
        """Move the mouse there."""
        x, y = self.centre(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """A real click: move, press, release."""
        x, y = self.centre(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="none" if kind == "mouseMoved" else "left",
                clickCount=1,
            )

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """Press and release one key, by its DevTools name."""
        codes = {
            "Tab": 9,
            "Enter": 13,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
            "Home": 36,
            "End": 35,
            " ": 32,
        }
        number = code or codes.get(key, 0)
        typed = text or {"Enter": "\r", " ": " "}.get(key, "")
        self.send(
            "Input.dispatchKeyEvent",
            type="keyDown",
            key=key,
            code=key,
            windowsVirtualKeyCode=number,
            **({"text": typed} if typed else {}),
        )
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=number)

    def names(self, role: str) -> list[str]:
        """The accessible names of all elements of a role, as a screen reader gets them."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        return [
            node.get("name", {}).get("value", "")
            for node in nodes
            if not node["ignored"] and node.get("role", {}).get("value") == role
        ]

    def screenshot(self, path: Path, *, full: bool = False) -> Path:
        """A PNG of the window, or of the whole page."""
        data = (
            self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)["data"]
            if not full
            else self._full_page()
        )
        path.write_bytes(base64.b64decode(data))
        return path

    def _full_page(self) -> str:
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        return self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)["data"]

"""A headless Chromium that a test drives by the DevTools protocol over two pipes: no port, no library.

Messages are JSON objects that end with a zero byte (--remote-debugging-pipe: it reads descriptor 3 and writes 4).
"""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120.0
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-extensions --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
).split()


class Navigated(Exception):
    """The page went away while a command was carried out."""


def found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; `requests` are the addresses that it asked for, `errors` its exceptions and what its console reports."""

    def __init__(self, profile: Path) -> None:
        program = found()
        assert program is not None
        child_reads, self._write = os.pipe()
        self._read, child_writes = os.pipe()

        def place() -> None:  # in the child: dup2 of high copies, for the pipes may be 3 and 4 themselves
            reads, writes = os.dup(child_reads), os.dup(child_writes)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = self._process.pid
        os.close(child_reads)
        os.close(child_writes)
        self._buffer, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise Navigated(answer["error"])
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        params = message.get("params", {})
        method = message.get("method")
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded += 1
        return message

    def open(self, path: Path) -> float:
        """Load a file and return the seconds until its load event."""
        before, start = self._loaded, time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._loaded == before:
            self._next()
        return time.monotonic() - start

    def evaluate(self, code: str) -> Any:
        """Return the value of a JavaScript expression, awaited where it is a promise."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        theme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def mouse(self, kind: str, x: float, y: float, *, clicks: int = 0) -> None:
        button = "none" if kind == "mouseMoved" and not clicks else "left"
        self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(clicks > 0), clickCount=clicks
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def pdf(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))

    def close(self) -> None:
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

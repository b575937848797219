"""A real Chromium, driven through its own protocol over a pipe: no driver program, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe
    --hide-scrollbars --force-color-profile=srgb --font-render-hinting=none
""".split()
PROGRAM = "chromium"
_WAIT_S = 60
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40, "ArrowRight": 39, " ": 32}


class Browser:
    """One Chromium with a profile of its own."""

    def __init__(self, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # they must become 3 and 4, which may be taken now
        high = [os.dup2(fd, fd + 200) for fd in (to_read, to_write)]

        def place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.log = (profile / "log").open("wb")
        self._process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            preexec_fn=place,
            pass_fds=(3, 4),
            env=os.environ | {"HOME": str(profile)},
        )
        for fd in (to_read, to_write, *high):
            os.close(fd)
        self._number = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _WAIT_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            piece = os.read(self._from, 1 << 20) if ready else b""
            assert piece, f"Chromium does not answer: {Path(self.log.name).read_text()[-2000:]}"
            self._unread += piece
        raw, _, self._unread = self._unread.partition(b"\0")
        return json.loads(raw)

    def page(self, width: int = 1100, height: int = 760, *, dark: bool = False) -> Page:
        """Open a tab with cookies and storage of the whole profile."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, target, width, height, dark=dark)

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        os.close(self._to)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)
        self.log.close()


class Page:
    """One tab."""

    def __init__(
        self, browser: Browser, session: str, target: str, width: int, height: int, *, dark: bool
    ) -> None:
        self.browser, self.session = browser, session
        self.target = target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # visible, next to other tabs too
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def js(self, code: str) -> Any:
        """Evaluate an expression, a promise too; return its value."""
        options = dict.fromkeys(("awaitPromise", "returnByValue", "userGesture"), True)
        reply = self.call("Runtime.evaluate", expression=code, **options)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def fill(self, selector: str, text: str) -> None:
        """Focus an input and type."""
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.type(text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select box."""
        box = f"document.querySelector({json.dumps(selector)})"
        event = "new Event('change', {bubbles: true})"
        self.js(f"{box}.value = {json.dumps(value)}; {box}.dispatchEvent({event})")

    def all(self, selector: str, expression: str) -> list[Any]:
        """Return the value of an expression about each `one` of the elements."""
        elements = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.js(f"{elements}.map((one) => {expression})")

    def wait(self, code: str, seconds: float = _WAIT_S) -> Any:
        """Wait until an expression is true; return its value."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):
                if value := self.js(f"((value) => (value instanceof Node ? true : value))({code})"):
                    return value
            assert time.monotonic() < deadline, f"{code}\n{self.text()[-3000:]}"
            time.sleep(0.02)

    def see(self, text: str) -> None:
        """Wait until the page shows text; what is scrolled out of view has no `innerText`."""
        self.wait(f"document.body.textContent.includes({json.dumps(text)})")

    def text(self) -> str:
        return self.js("document.body.innerText")

    def click(self, selector: str, text: str = "") -> None:
        """Click the first element of a selector that shows words, once it is there."""
        self.wait(
            f"(() => {{ const found = [...document.querySelectorAll({json.dumps(selector)})].find((one) =>"
            f" !one.disabled && one.textContent.includes({json.dumps(text)})); found?.click(); return !!found; }})()"
        )

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def key(self, key: str, modifiers: int = 0) -> None:
        """Press a key; `modifiers`: 1 Alt, 2 Ctrl, 8 Shift."""
        name = key if len(key) > 1 else f"Key{key.upper()}"
        event = {"key": key, "code": name, "modifiers": modifiers}
        event["windowsVirtualKeyCode"] = KEYS.get(key, ord(key[0].upper()))
        text = {"text": "\r"} if key == "Enter" and not modifiers else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def shot(self, path: Path) -> None:
        """Write a picture of the page."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def problems(self) -> list[str]:
        """Return what the console holds against the page: errors, exceptions, refusals by the CSP."""
        entries = [event["entry"] for event in self._events("Log.entryAdded")]
        errors = [entry for entry in entries if entry["level"] == "error"]
        messages = [f"{entry['text']} {entry.get('url', '')}" for entry in errors]
        exceptions = self._events("Runtime.exceptionThrown")
        return messages + [json.dumps(event["exceptionDetails"])[:500] for event in exceptions]

    def requests(self) -> list[str]:
        """Return the URLs that the page has requested."""
        return [event["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def _events(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of this tab's events so far."""
        self.js("0")  # its answer comes after earlier events
        events = (event for event in self.browser.events if event.get("sessionId") == self.session)
        return [event["params"] for event in events if event["method"] == method]


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Run Chromium until the block ends."""
    profile.mkdir()
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()

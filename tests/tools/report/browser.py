"""A headless Chromium, driven over a pair of pipes: `--remote-debugging-pipe` needs neither a port nor a package."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # refused to root otherwise
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {"desk": 1200, "tablet": 700, "phone": 360, "small phone": 320}


class Browser:
    """One tab. `call` runs a command of the DevTools protocol; events of the page are collected in `events`."""

    def __init__(self, profile):
        program = next(filter(None, map(shutil.which, NAMES)), None)
        assert program, f"none of {', '.join(NAMES)} is installed: `make test-all` installs chromium"
        command_read, self._write = _high_pipe()
        self._read, answer_write = _high_pipe()

        def place():
            os.dup2(command_read, 3)
            os.dup2(answer_write, 4)

        self._log = open(profile / "chromium.log", "wb")  # noqa: SIM115 - closed with the browser
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        os.close(command_read)
        os.close(answer_write)
        self._rest, self._last, self._session = b"", 0, None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._log.close()

    def call(self, method, **params):
        self._last += 1
        order = {"id": self._last, "method": method, "params": params}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._last:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self.events.append(message)

    def open(self, path, width, height=900, scheme="light"):
        """Load a file on a screen of this width and colour scheme, and forget earlier events."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 + phone, mobile=phone
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.wait("Page.loadEventFired")

    def wait(self, method):
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key, code):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requests(self):
        """Every address that the page has requested."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def complaints(self):
        """Everything that was logged or thrown."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event for event in self.events if event.get("method") in kinds]

    def _next(self, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "chromium does not answer"
            got = os.read(self._read, 1 << 16)
            assert got, "chromium has exited"
            self._rest += got
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def _high_pipe():
    """A pipe whose file descriptors are above 9, so that they cannot collide with 3 and 4."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends

"""A headless Chromium over its debugging pipe: what a page does when it is opened and touched."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# What a page without scripts of its own never does.
TOLD = {
    "Page.javascriptDialogOpening": lambda p: f"dialog {p['message']}",
    "Page.windowOpen": lambda p: f"window {p['url']}",
    "Page.downloadWillBegin": lambda p: f"download {p['url']}",
    "Runtime.consoleAPICalled": lambda p: "console",
    "Runtime.exceptionThrown": lambda p: "exception",
    "Page.frameRequestedNavigation": lambda p: f"navigation {p['url'][:80]}",
}
# Everything is opened, pointed at and focused; what a stranger's text could have made is counted.
TOUCH = """
(() => {
  const frames = [...document.querySelectorAll('iframe')].map(f => f.contentDocument);
  const documents = [document, ...frames.filter(Boolean)], bad = [];
  const all = documents.flatMap(d => [...d.querySelectorAll('*')]);
  for (const e of all) {
    if (e.tagName === 'DETAILS') e.open = true;
    for (const kind of ['mouseover', 'mouseenter', 'mousedown', 'focus', 'pointerover', 'toggle'])
      e.dispatchEvent(new Event(kind, {bubbles: true}));
    if (e.focus) e.focus();
    for (const a of e.attributes) if (a.name.startsWith('on')) bad.push(e.tagName + ' ' + a.name);
    if (e.tagName === 'A' && !/^[^:]*$/.test(e.getAttribute('href'))) bad.push(e.outerHTML);
  }
  const names = ['script', 'img', 'object', 'embed', 'link', 'base', 'form', 'input', 'button',
                 'video', 'audio', 'iframe:not([sandbox])'].join(',');
  for (const d of documents) for (const e of d.querySelectorAll(names)) bad.push(e.tagName);
  return JSON.stringify({bad, elements: all.length, title: document.title});
})()
"""


def path() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """`open(page)` -> (what the page did, what `TOUCH` says)."""

    def __init__(self, folder: Path):
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()

        def fds():  # the pipe's ends are 3 and 4 in the browser
            os.dup2(os.dup(to_read), 3)
            os.dup2(os.dup(to_write), 4)

        # Both numbers may be taken by the pipes themselves: they are moved out of the way.
        to_read, to_write = (os.dup2(fd, 100 + i) for i, fd in enumerate((to_read, to_write)))
        command = [
            path(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-dev-shm-usage",
        ]
        self.process = subprocess.Popen(
            command,
            preexec_fn=fds,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        os.set_blocking(self._read, False)
        self._buffer, self._number, self._events = b"", 0, []

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._read)
        os.close(self._write)

    def open(self, page: Path, wait_s: float = 0.5) -> tuple[list[str], dict]:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self._call(f"{domain}.enable", session)
        self._events = []
        address = page.resolve().as_uri()
        self._call("Page.navigate", session, url=address)
        self._until("Page.loadEventFired", session)
        said = self._call("Runtime.evaluate", session, expression=TOUCH)["result"]
        self._pump(wait_s)
        did = []
        for event in self._events:
            name, params = event["method"], event.get("params", {})
            if name in TOLD:
                did.append(TOLD[name](params))
            elif name == "Network.requestWillBeSent" and params["request"]["url"] != address:
                did.append(f"request {params['request']['url'][:80]}")
        did = [one for one in did if one != "navigation about:srcdoc"]  # the page's own frame
        self._call("Target.closeTarget", targetId=target)
        return did, json.loads(said["value"])

    def measure(self, page: Path, expression: str, width: int) -> object:
        """The value of an expression in a page, in a window of so many pixels."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._call("Page.enable", session)
        size = dict(width=width, height=900, deviceScaleFactor=1, mobile=True)
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        self._events = []
        self._call("Page.navigate", session, url=page.resolve().as_uri())
        self._until("Page.loadEventFired", session)
        said = self._call("Runtime.evaluate", session, expression=expression)["result"]
        self._call("Target.closeTarget", targetId=target)
        return said["value"]

    def _call(self, method: str, session: str | None = None, **params) -> dict:
        self._number += 1
        number = self._number
        request = {"id": number, "method": method, "params": params}
        request |= {"sessionId": session} if session else {}
        os.write(self._write, json.dumps(request).encode() + b"\0")
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            for message in self._pump(0.02):
                if message.get("id") == number:
                    assert "error" not in message, (method, message["error"])
                    return message["result"]
        raise TimeoutError(f"the browser does not answer {method}")

    def _until(self, name: str, session: str) -> None:
        ends = time.monotonic() + 60
        while not any(e["method"] == name and e.get("sessionId") == session for e in self._events):
            assert time.monotonic() < ends, f"no {name}"
            self._pump(0.05)

    def _pump(self, seconds: float) -> list[dict]:
        """Reads what the browser says for so long; returns answers, keeps events."""
        answers, ends = [], time.monotonic() + seconds
        while True:
            try:
                self._buffer += os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
            *whole, self._buffer = self._buffer.split(b"\0")
            for text in whole:
                message = json.loads(text)
                if "method" not in message:
                    answers.append(message)
                    continue
                self._events.append(message)
                if message["method"] == "Page.javascriptDialogOpening":  # else the page waits
                    self._answer(message)
            if time.monotonic() >= ends or answers:
                return answers

    def _answer(self, message: dict) -> None:
        self._number += 1
        request = {
            "id": self._number,
            "method": "Page.handleJavaScriptDialog",
            "params": {"accept": True},
            "sessionId": message["sessionId"],
        }
        os.write(self._write, json.dumps(request).encode() + b"\0")

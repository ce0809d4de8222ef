"""A headless Chromium, driven by the DevTools protocol over a pipe: no port, no other library.

Nothing of it is left behind: it keeps its files in a folder that its caller removes, and dies with its caller.
"""

import base64
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time

FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions", "--disable-domain-reliability", "--metrics-recording-only",
    "--disable-client-side-phishing-detection", "--disable-features=Translate,OptimizationHints,MediaRouter",
    "--no-proxy-server", "--password-store=basic", "--use-mock-keychain", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--hide-scrollbars", "--remote-debugging-pipe",
    # What moves would be drawn again and again.
    "--force-prefers-reduced-motion",
]


def find():
    """The path of Chromium; None if there is none. Debian's wrapper script is passed by."""
    for path in ("/usr/lib/chromium/chromium", shutil.which("chromium"), shutil.which("google-chrome")):
        if path and os.access(path, os.X_OK):
            return path
    return None


class ScriptError(Exception):
    """What a script in a page throws."""


class Browser:
    """Speaks to one Chromium. Not thread-safe."""

    def __init__(self, folder):
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        # Chromium reads descriptor 3 and writes 4. High copies first, so that the two cannot collide with others.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (to_browser, from_browser)]

        def set_up():
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        environment = {**os.environ,
                       **dict.fromkeys(("HOME", "TMPDIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), folder)}
        with open(os.path.join(folder, "chromium.log"), "w") as log:
            self.process = subprocess.Popen(
                [find(), *FLAGS, f"--user-data-dir={folder}/profile", "about:blank"], env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, close_fds=False, preexec_fn=set_up, start_new_session=True)
        for fd in (to_browser, from_browser, *high):
            os.close(fd)
        self.buffer = b""
        self.answers = {}
        self.last_id = 0
        self.pages = {}

    def receive(self, deadline):
        """Takes the messages that come until the deadline, at least one; raises if there is none."""
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self.reader, 1 << 20)
            if not data:
                raise RuntimeError("Chromium is gone")
            self.buffer += data
        *messages, self.buffer = self.buffer.split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self.answers[message["id"]] = message
            elif message.get("sessionId") in self.pages:
                self.pages[message["sessionId"]].on_event(message["method"], message["params"])

    def post(self, method, parameters, session=None):
        """Sends without waiting; gives the number of the message."""
        self.last_id += 1
        message = {"id": self.last_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.writer, data):]
        return self.last_id

    def call(self, method, session=None, seconds=120, **parameters):
        number = self.post(method, parameters, session)
        deadline = time.monotonic() + seconds
        while number not in self.answers:
            self.receive(deadline)
        answer = self.answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url, width=1280, height=900, doctored=None):
        """A new page in a profile of its own. `doctored`: see Page."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context, doctored)
        self.pages[session] = page
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        if doctored:
            page.call("Fetch.enable", patterns=[{"urlPattern": f"*{path}"} for path in doctored])
        page.resize(width, height)
        page.call("Page.navigate", url=url)
        return page

    def close(self):
        try:
            self.call("Browser.close", seconds=10)
            self.process.wait(10)
        except (OSError, RuntimeError, TimeoutError, subprocess.TimeoutExpired):
            pass
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: itself and its children
            self.process.wait()
        os.close(self.reader)
        os.close(self.writer)


class Page:
    """One tab. Remembers what went wrong in it and what it asked for."""

    def __init__(self, browser, session, context, doctored):
        self.browser = browser
        self.session = session
        self.context = context
        self.doctored = doctored or {}  # path -> JSON that the page gets instead of the server's
        self.complaints = []            # errors and warnings of the console, exceptions, failed requests
        self.requests = []              # URLs

    def call(self, method, **parameters):
        return self.browser.call(method, session=self.session, **parameters)

    def on_event(self, method, event):
        # Chromium gives up its requests when the machine gets another network, say a container's; the page asks again.
        if "ERR_NETWORK_CHANGED" in (event.get("errorText") or event.get("entry", {}).get("text", "")):
            return
        if method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {event['args']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {event['exceptionDetails']}")
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {event['entry']['text']} {event['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        elif method == "Network.loadingFailed":
            self.complaints.append(f"request failed: {event['errorText']}")
        elif method == "Network.responseReceived" and event["response"]["status"] >= 400:
            self.complaints.append(f"status {event['response']['status']} of {event['response']['url']}")
        elif method == "Fetch.requestPaused":
            path = next(path for path in self.doctored if event["request"]["url"].endswith(path))
            body = base64.b64encode(json.dumps(self.doctored[path]).encode()).decode()
            self.browser.post("Fetch.fulfillRequest", {
                "requestId": event["requestId"], "responseCode": 200, "body": body,
                "responseHeaders": [{"name": "Content-Type", "value": "application/json"}]}, self.session)

    def eval(self, script):
        """The value of a JavaScript expression, a promise's once it is there."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise ScriptError(f"{script}: {details.get('exception', details).get('description', details)}")
        return result["result"].get("value")

    def wait(self, script, seconds=120):
        """Waits until an expression is true in the page (and does not throw: things may still be missing); gives its value."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                value = self.eval(script)
            except ScriptError as error:
                value, last = None, error
            else:
                last = value
            if value:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds} s still {last}: {script}")
            time.sleep(0.1)

    def close(self):
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
        del self.browser.pages[self.session]

    def text(self, selector):
        return self.eval(f"document.querySelector({json.dumps(selector)}).textContent")

    def key(self, key, modifiers=0):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, " ": 32}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": modifiers}
        if key == "Enter":
            event["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])

    def point(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features):
        """prefer(color_scheme="dark", reduced_motion="reduce")"""
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()])

    def screenshot(self, path, whole=True):
        """A PNG of the page, or of what is in view."""
        options = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = base64.b64decode(self.call("Page.captureScreenshot", **options)["data"])
        with open(path, "wb") as file:
            file.write(data)

"""Headless Chromium for tests, and an edge over the fake engine that it can reach."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import ASGIApp

from .frontend import FakeEngine

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
)


def chromium() -> tuple[str, str]:
    """Paths of browser and driver; skips the test where they are not installed."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        reason = "Chromium and chromedriver (Debian: chromium, chromium-driver) are not installed"
        if os.environ.get("OUTRIDER_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    return browser, driver


@contextmanager
def open_browser() -> Iterator[Any]:
    """A driver with a fresh profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    browser, driver = chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in (*_FLAGS, f"--user-data-dir={Path(profile)}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        opened = webdriver.Chrome(options=options, service=Service(driver))
        try:
            yield opened
        finally:
            opened.quit()


def resize(browser: Any, width: int, height: int, *, mobile: bool = False) -> None:
    """Sets the size of the page itself."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(browser: Any, scheme: str) -> None:
    """Sets the system's preference: light or dark."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
    return value


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """The application on a port of its own; its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@dataclass
class Site:
    """A page in a browser, and the engine behind it."""

    engine: FakeEngine
    browser: Any
    url: str
    keys: set[str]
    seen: list[str | None]  # `Authorization` of the calls

    def all(self, selector: str) -> list[Any]:
        return self.browser.find_elements("css selector", selector)

    def one(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        return self.one(selector).get_attribute("textContent")

    def script(self, code: str, *args: Any) -> Any:
        return self.browser.execute_script(code, *args)

    def open(self, fragment: str = "") -> None:
        self.browser.get("about:blank")
        self.browser.get(self.url + fragment)
        until(lambda: self.text("#state") != "connecting")

    def reset(self) -> None:
        """Opens the page as for a first visit, set to send completions of a text."""
        self.open()
        self.script("localStorage.clear()")
        self.open()
        self.choose("#kind", "completion")

    def choose(self, selector: str, value: str) -> None:
        """Takes an option of a list."""
        self.one(f'{selector} option[value="{value}"]').click()

    def write(self, selector: str, text: str) -> None:
        field = self.one(selector)
        field.clear()
        field.send_keys(text)

    def picture(self, name: str) -> None:
        """Keeps what is seen, if OUTRIDER_SCREENSHOTS names a folder."""
        folder = os.environ.get("OUTRIDER_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.browser.save_screenshot(str(Path(folder) / f"{name}.png"))

    def run(self, button: str = "#run", max_tokens: int = 30) -> None:
        self.write("#max_tokens", str(max_tokens))
        count = len(self.all("#history tbody tr"))
        self.one(button).click()
        more = 2 if button == "#compare" else 1
        until(lambda: len(self.all("#history tbody tr")) == count + more)
        until(lambda: self.one("#run").is_enabled())

    def tile(self, name: str, tiles: str = "#figures") -> str:
        names = [each.get_attribute("textContent") for each in self.all(f"{tiles} dt")]
        values = self.all(f"{tiles} dd:nth-of-type(1)")
        return values[names.index(name)].get_attribute("textContent")

    def errors(self) -> list[str]:
        """Of the console; a blocked script or style would be there."""
        found = self.browser.get_log("browser")
        return [each["message"] for each in found if each["level"] == "SEVERE"]

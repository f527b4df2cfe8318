"""A real browser, where the machine has one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver

REQUIRED = os.environ.get("VALUEPATH_REQUIRE_BROWSER") == "1"


def _found(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@contextmanager
def browser(profile: Path, width: int = 1200, height: int = 900) -> Iterator[webdriver.Chrome]:
    """A headless Chromium without any network, its console kept.

    Skips the test where there is no Chromium, or fails it where one is required.
    """
    binary = _found("chromium", "chromium-browser", "google-chrome")
    driver = _found("chromedriver")
    if binary is None or driver is None:
        missing = "Chromium" if binary is None else "chromedriver"
        reason = f"{missing} is not installed (Debian: apt-get install chromium chromium-driver): the page was not opened"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        f"--user-data-dir={profile}",
        f"--window-size={width},{height}",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # whatever the page would fetch fails
        "--disable-dev-shm-usage",
        "--disable-gpu",
    ):
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # root has no sandbox to be in
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    try:
        yield session
    finally:
        session.quit()

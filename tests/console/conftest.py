"""A browser for the console's page. All tests here are skipped, with the reason, where there is none."""

import os
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from served import Served

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
TIMEOUT_MS = 120_000


@pytest.fixture(scope="module")  # Playwright's event loop runs until it is closed, and other modules have their own
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright for Python: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox needs rights that containers do not have; the pages are this repository's own.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        found = driver.chromium.launch(executable_path=CHROMIUM, args=[*options, "--disable-dev-shm-usage"])
        yield found
        found.close()


@pytest.fixture
def served(browser, tmp_path):  # without a browser nothing needs to start
    with Served(tmp_path) as running:
        yield running


@pytest.fixture
def open_page(browser):
    """Opens the console; the test fails if the page has an error or asks for anything from elsewhere."""
    contexts, problems = [], []

    def open_at(address, *, width=1440, height=900, theme="light", motion="reduce"):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion=motion
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda entry: problems.append(entry.text) if "Content Security" in entry.text else None)
        root = address.partition("/console/")[0]
        page.on("request", lambda request: None if request.url.startswith(root) else problems.append(request.url))
        page.goto(address)
        return page

    yield open_at
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")  # a handler at work would fail in the next test
        context.close()
    assert not problems

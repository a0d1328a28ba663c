"""Looks at the built site in a browser, without a network: start page, search, a table on a narrow screen, and errors of any script.

python docs/look_at_site.py build/site
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

START, SYMPTOM, TABLE = "docs/index.html", "docs/troubleshooting.html", "docs/comparison.html"
WANTED = "hangs"
"""A symptom that the search leads to."""

PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


def main() -> None:
    site = Path(sys.argv[1]).resolve()
    if not (site / START).is_file():
        raise SystemExit(f"There is no site in {site}: nox -s docs builds it.")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("Nobody has looked at the site: install Chromium, and run nox -s docs again.")
    errors: list[str] = []
    with served(site) as server, sync_playwright() as playwright:
        address = f"http://127.0.0.1:{server.server_port}/"
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=DESK)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("requestfailed", lambda request: errors.append(f"not found: {request.url}"))
        page.on(
            "request",
            lambda request: request.url.startswith((address, "data:")) or errors.append(f"asks outside: {request.url}"),
        )
        found = search(page, address)
        for name in (START, SYMPTOM, TABLE):
            for viewport in (DESK, PHONE):
                page.set_viewport_size(viewport)
                look(page, address + name, errors)
        browser.close()
    if errors:
        raise SystemExit("\n".join(errors))
    print(
        f"{WANTED!r} is found on {found} pages, among them {SYMPTOM}; three pages fit a desk and a phone, and ask nobody outside."
    )


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None: ...


@contextmanager
def served(site: Path) -> Iterator[ThreadingHTTPServer]:
    """The site at a free port of this machine, as a host would give it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def search(page: Page, address: str) -> int:
    """How many pages have the symptom; the page of symptoms has to be one."""
    page.goto(f"{address}search.html?q={WANTED}")
    page.wait_for_selector("#search-results li a")
    page.wait_for_load_state("networkidle")  # it reads each page that it has found
    found = page.eval_on_selector_all("#search-results li a", "links => links.map(link => link.href)")
    if not any(SYMPTOM in link for link in found):
        raise SystemExit(f"The search for {WANTED!r} does not lead to {SYMPTOM}, but to {found}.")
    return len({link.partition("#")[0] for link in found})


def look(page: Page, address: str, errors: list[str]) -> None:
    """Notes a page without a heading, or one that is wider than its window: tables scroll by themselves."""
    page.goto(address)
    if not page.inner_text("h1").strip():
        errors.append(f"{address} has no heading")
    beyond = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    if beyond > 0:
        errors.append(f"{address} is {beyond} pixels wider than a window of {page.viewport_size}")


if __name__ == "__main__":
    main()

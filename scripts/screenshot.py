"""Opens a page in headless Chromium, fails if it asks for anything or writes an error to the console, and draws it.

    python scripts/screenshot.py report.html report.png [WIDTH HEIGHT]

Chromium is Debian's package.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BROWSER = "not an origin"


def opened(
    page: Path, picture: Path | None = None, width: int = 1100, height: int = 1500
) -> tuple[list[str], list[str]]:
    """The addresses that a page asks for beside its own, and what it writes to the console."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "net.json"
        drawn = Path(folder) / "page.png" if picture is None else picture.absolute()
        command = [
            chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
            "--enable-logging=stderr", "--v=0", f"--user-data-dir={folder}/profile", f"--log-net-log={log}",
            f"--window-size={width},{height}", f"--screenshot={drawn}", page.absolute().as_uri(),
        ]  # fmt: skip
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        asked = [url for url in requests(json.loads(log.read_text())) if not url.startswith(page.absolute().as_uri())]
    return asked, [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]


def requests(log: dict[str, Any]) -> list[str]:
    """Addresses of all requests of Chromium's network log that a page made, not the browser for itself."""
    kinds = {number: name for name, number in log["constants"]["logEventTypes"].items()}
    started = (event["params"] for event in log["events"] if kinds[event["type"]] == "URL_REQUEST_START_JOB")
    return [one["url"] for one in started if one.get("initiator", BROWSER) != BROWSER]


if __name__ == "__main__":
    asked, said = opened(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
    print("\n".join([*asked, *said]) or "no request, nothing on the console")
    sys.exit(bool(asked or said))

"""A real browser without a window."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Browser:
    program: str
    profile: Path

    def run(self, address: str, width: int, *options: str) -> subprocess.CompletedProcess[str]:
        settings = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            "--enable-logging=stderr",
            f"--user-data-dir={self.profile}",
            f"--window-size={width},1600",
        ]
        command = [self.program, *settings, *options, address]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)


@pytest.fixture
def browser(tmp_path: Path) -> Browser:
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return Browser(program, tmp_path / "profile")

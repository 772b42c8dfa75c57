"""What the documentation shows runs as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

PAGES = [Path(__file__).parent / "pages" / "python.md", Path(__file__).parents[3] / "docs" / "python.md"]


def test_the_page_s_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = next(page for page in PAGES if page.is_file())
    programs = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(programs) >= 7
    names: dict[str, object] = {"__name__": os.fspath(page)}
    for program in programs:
        exec(compile(program, os.fspath(page), "exec"), names)
    assert "Paris" in capsys.readouterr().out

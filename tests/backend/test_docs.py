# SPDX-License-Identifier: Apache-2.0
"""Every picture and page that the pages link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_guide_has_its_pictures():
    guide = (REPOSITORY / "docs" / "artists-guide.md").read_text(encoding="utf-8")
    assert len(re.findall(r"!\[[^\]]+\]\(images/", guide)) >= 5

"""docs/invariants.md names tests that exist and the seeded bugs that there are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "invariants.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    """A promise does not outlive its test: each `file::test` is there."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 40
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), f"{file} is named in docs/invariants.md and does not exist"
        found = re.search(rf"^(?:def {test}\(|class {test}\b|{test} = )", path.read_text(), re.MULTILINE)
        assert found, f"{file} has no {test}, which docs/invariants.md names"


def test_every_promise_has_a_test_or_says_why_not() -> None:
    """P1 to P16 and R1 to R14 are all there, and each names a test or is open with a reason."""
    parts = dict(re.findall(r"^\*\*([PR]\d+)\b(.*?)(?=^\*\*[PR]\d|^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
    assert set(parts) == {f"P{i}" for i in range(1, 17)} | {f"R{i}" for i in range(1, 15)}
    for name, text in parts.items():
        assert "::" in text or re.search(r"Open[:,] \w+", text), f"{name} has neither a test nor a reason"


def test_every_fault_seen_elsewhere_has_a_test_or_says_why_not() -> None:
    """All 49 kinds of fault are there, in order, and each names a test or the sentence why it cannot occur."""
    part = PAGE.split("## What has broken elsewhere")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+) \|$", part, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 50))
    for number, seen_in, fault, held in rows:
        assert seen_in, number
        assert fault, number
        assert "::" in held or (held[0].isupper() and held.endswith(".")), f"fault {number} has neither test nor reason"


def test_every_seeded_bug_is_listed() -> None:
    """The page lists the seeded bugs of tests/core/mutants.py, and no others."""
    sys.path.insert(0, str(ROOT / "tests" / "core"))
    try:
        from mutants import EQUIVALENT, MUTANTS
    finally:
        sys.path.pop(0)
    seen, unseen = PAGE.split("## Seeded bugs")[1].split("These edits change nothing")
    assert re.findall(r"^- (.*)$", seen, re.MULTILINE) == [mutant.name for mutant in MUTANTS]
    listed = re.findall(r"^- (.*)$", unseen, re.MULTILINE)
    assert listed == [f"{mutant.name}. {why}" for mutant, why in EQUIVALENT]

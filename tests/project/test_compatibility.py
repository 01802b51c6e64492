"""The page on versions of torch is what tests/support/compatibility.py writes."""

import pytest
from support import compatibility


def test_a_page_is_read_as_it_was_written():
    rows = {
        version: {head: f"{head} of {version}" for head in compatibility.HEADS} | {"torch": version}
        for version in ("2.13.0", "2.15.0")
    }
    assert compatibility.rows_of(compatibility.page_of(rows)) == rows


def test_the_page_names_every_version_and_every_difference():
    """If this fails: python3 tests/support/compatibility.py --page"""
    page = compatibility.PAGE.read_text("utf-8")
    rows = compatibility.rows_of(page)
    assert list(rows) == compatibility.VERSIONS
    assert page == compatibility.page_of(rows)


@pytest.mark.parametrize(
    "printed, expected",
    [
        (
            "....\n= 2 failed, 30 passed, 4 xfailed, 5 deselected, 1 error in 61.20s (0:01:01) =\n",
            {"passed": "30", "failed": "3", "xfailed": "4", "skipped": "0", "deselected": "5"},
        ),
        (
            "FAILED tests/x.py - 3 failed in 2s\n1 skipped, 12 passed in 0.50s\n",
            {"passed": "12", "failed": "0", "xfailed": "0", "skipped": "1", "deselected": "0"},
        ),
        ("make: *** [test] Error 1\n", dict.fromkeys(compatibility.COUNTS, "?")),
    ],
)
def test_the_counts_are_those_of_the_last_line_of_pytest(printed, expected):
    assert compatibility.counts(printed) == expected


def test_a_version_is_right_if_every_step_is_and_no_test_fails():
    row = dict.fromkeys(compatibility.STEPS, "ok") | dict.fromkeys(compatibility.COUNTS, "0")
    assert compatibility.is_right(row)
    assert not compatibility.is_right(row | {"demo": compatibility.in_words(False)})
    assert not compatibility.is_right(row | {"failed": "1"})
    assert not compatibility.is_right(row | {"failed": "?"})

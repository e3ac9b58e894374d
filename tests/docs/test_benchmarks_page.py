"""`make benchmarks` finds a place for every table, and replaces nothing else."""

import doctest
import importlib.util

import pytest

from benchmarks import __main__ as page


def test_every_benchmark_exists_and_has_a_place():
    text = page.PAGE.read_text()
    for name in page.NAMES:
        assert importlib.util.find_spec(f"benchmarks.{name}"), name
        assert f"<!-- {name} 1 -->" in text, name
    assert "<!-- machine 1 -->" in text and "<!-- minutes 1 -->" in text


def test_a_table_replaces_the_one_before_and_nothing_else():
    text = "before\n<!-- a 1 -->\n| old |\n<!-- end -->\nbetween\n<!-- a 2 -->\n| kept |\n<!-- end -->\n"
    found = page.replaced(text, "a", 1, "| new \\1 |")
    assert found == text.replace("| old |", "| new \\1 |")
    with pytest.raises(ValueError, match="has no place `<!-- b 1 -->`"):
        page.replaced(text, "b", 1, "| new |")


def test_tables_are_found():
    assert doctest.testmod(page).failed == 0
    assert page.tables("x\n| a |\n|---|\n| 1 |\n\ntext\n\n| b |\n|---|\n") == ["| a |\n|---|\n| 1 |", "| b |\n|---|"]

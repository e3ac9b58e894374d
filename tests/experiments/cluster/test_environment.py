"""Seconds in environment variables: numbers, and answers to what is none."""

import re

import pytest

from looptape.experiments.cluster import environment
from looptape.experiments.launch.options import Refused

NAME = "LOOPTAPE_HEARTBEAT_SECONDS"


@pytest.mark.parametrize("text, expected", [(None, 20.0), ("", 20.0), (" 2.5 ", 2.5), ("0", 0.0)])
def test_seconds_are_read(text, expected, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    if text is not None:
        monkeypatch.setenv(NAME, text)
    assert environment.seconds(NAME, 20) == expected


@pytest.mark.parametrize(
    "text, zero, wanted",
    [
        ("abc", True, "a number of seconds, or 0 for never"),
        ("-1", True, "a number of seconds, or 0 for never"),
        ("inf", True, "a number of seconds, or 0 for never"),
        ("nan", False, "a number of seconds above 0"),
        ("0", False, "a number of seconds above 0"),
    ],
)
def test_other_texts_are_refused(text, zero, wanted, monkeypatch):
    monkeypatch.setenv(NAME, text)
    match = f"{NAME} is '{text}'; it must be {wanted}. Use e.g. {NAME}=20, or leave it out."
    with pytest.raises(Refused, match=re.escape(match)):
        environment.seconds(NAME, 20, zero)

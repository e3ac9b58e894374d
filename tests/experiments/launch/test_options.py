"""Options: what is read, written and refused."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looptape import launch
from looptape.experiments.launch.options import Option, from_text, options, to_text


@dataclasses.dataclass(frozen=True)
class Sample(launch.Config):
    steps: int = 7
    depth: int = launch.option(2, "layers", least=1, most=9)
    rate: float = launch.option(0.5, "a rate", above=0, below=1)
    limit: float | None = launch.option(None, "a limit", above=0)
    shape: str = launch.option("round", "a shape", choices=("round", "square"))
    flat: bool = launch.option(False, "whether it is flat")


def test_a_field_with_another_default_keeps_its_meaning():
    inherited, own = options(launch.Config)["steps"], options(Sample)["steps"]
    assert dataclasses.replace(own, default=inherited.default) == inherited
    assert own.default == 7 and own.least == 1 and own.resume == "accept"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "`steps` is 0; it must be at least 1. Its default is 7."),
        ({"depth": 10}, "`depth` is 10; it must be at least 1 and at most 9. Its default is 2."),
        ({"rate": 1.0}, "`rate` is 1.0; it must be above 0 and below 1. Its default is 0.5."),
        ({"rate": float("nan")}, "`rate` is nan; it must be above 0 and below 1. Its default is 0.5."),
        ({"limit": -1.0}, "`limit` is -1.0; it must be above 0, or none. Its default is None."),
        ({"shape": "sqare"}, "`shape` is 'sqare'; it must be one of round, square. Did you mean 'square'?"),
        ({"depth": 2.5}, "`depth` is 2.5; it must be an integer (at least 1 and at most 9). Its default is 2."),
        ({"depth": True}, "`depth` is True; it must be an integer (at least 1 and at most 9). Its default is 2."),
        ({"flat": 1}, "`flat` is 1; it must be true or false. Its default is false."),
        ({"rate": None}, "`rate` is None; it must be a number (above 0 and below 1). Its default is 0.5."),
        ({"loss_weights": {"error": 2}}, "`loss_weights` is {'error': 2}; it must be text. Its default is empty."),
        ({"loss_weights": "error"}, "`loss_weights` is 'error': 'error' is not of the form name=value."),
        ({"combiner": "pcgrid"}, "did you mean 'pcgrad'"),
        ({"combiner": "gradnorm", "combiner_args": "alfa=1"}, "did you mean 'alpha'"),
        ({"combiner": "gradnorm", "combiner_args": "alfa=1"}, "it must be one of ['alpha', 'learning_rate', 'relat"),
        ({"combiner": "gradnorm", "combiner_args": "alpha=much"}, "the same kind as the defaults {'alpha': 1.5}"),
        ({"combiner": "gradnorm", "combiner_args": "alpha=-1"}, "`alpha` is -1; it must be at least 0"),
        (
            {"combiner": "pcgrid"},
            "'softadapt', 'stch', 'uncertainty', 'upgrad', 'weighted_sum'",
        ),
        ({"strategy": "mirrored:0"}, "it must be none, mirrored, or mirrored:N with N at least 1"),
        ({"profile": "30-20", "workdir": "x"}, "it must be from-to, two steps, the first at least 1"),
        ({"profile": "2-3"}, "`profile` is set without `workdir`"),
        ({"evaluate_averaged": True}, "`evaluate_averaged` is set without `ema_decay`"),
        ({"loss_weights": "error=much"}, "`loss_weights` gives 'error' the weight 'much'; it must be a number"),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_allowed(given, message):
    with pytest.raises((ValueError, TypeError)) as error:
        Sample(**given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("steps", "1e4", 10_000),
        ("steps", "12", 12),
        ("rate", "1e-3", 0.001),
        ("limit", "none", None),
        ("limit", "2", 2.0),
        ("flat", "true", True),
        ("flat", "0", False),
        ("shape", "square", "square"),
    ],
)
def test_texts_are_read(name, text, value):
    found = from_text(options(Sample)[name], text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(("name", "text"), [("steps", "1.5"), ("steps", "x"), ("rate", "much"), ("flat", "perhaps")])
def test_texts_that_are_no_value_are_refused(name, text):
    with pytest.raises(ValueError, match=f"`{name}` is '{text}'; it must be"):
        from_text(options(Sample)[name], text)


@given(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**12), 10**12)))
def test_numbers_survive_the_round_trip_through_text(value):
    kind = int if isinstance(value, int) else float
    assert from_text(Option("x", kind, True, None, ""), to_text(value)) == value


def test_other_types_are_refused_by_name():
    @dataclasses.dataclass(frozen=True)
    class Odd(launch.Config):
        sizes: tuple = launch.option((1, 2), "sizes")

    with pytest.raises(TypeError, match="`sizes` of Odd is annotated .*tuple.*Use a str with `parse`"):
        Odd()


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Sample().steps = 3

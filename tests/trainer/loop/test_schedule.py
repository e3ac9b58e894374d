"""Which steps are probed: the early ones and the multiples, as a function of the step alone."""

import pytest

from looptape.trainer.loop.schedule import next_probe


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (50, [1, 2, 5, 10, 20, 50, 100]),
        (4, [1, 2, 4, 8, 12]),
        (10, [1, 2, 5, 10, 20, 30]),
        (1, [1, 2, 3, 4]),
        (3, [1, 2, 3, 6]),
    ],
)
def test_the_start_is_probed_beside_the_multiples(every, expected):
    found, step = [], 0
    while len(found) < len(expected):
        step = next_probe(step, every)
        found.append(step)
    assert found == expected
    for step in range(expected[-1]):  # a resumed run comes from anywhere
        assert next_probe(step, every) == min(probe for probe in expected if probe > step)

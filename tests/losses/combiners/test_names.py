import pytest

from looptape import losses
from looptape.losses import combiner_from_name


@pytest.mark.parametrize("name", ["gradnorm", "GradNorm", "grad_norm", "GRAD-NORM"])
def test_spelling_does_not_matter(name):
    combiner = combiner_from_name(name, alpha=0.5, update_every=7)
    assert isinstance(combiner, losses.GradNorm) and combiner.alpha == 0.5 and combiner.gradients_every == 7


def test_unknown_name_lists_the_choices_and_the_nearest():
    with pytest.raises(
        ValueError,
        match=r"'gradnrom' is not a combiner; did you mean 'gradnorm'\?.*'pcgrad'.*'famo'|'famo'.*'pcgrad'",
    ):
        combiner_from_name("gradnrom")


def test_unknown_name_without_a_near_one():
    with pytest.raises(ValueError, match="'xyz' is not a combiner; it must be one of"):
        combiner_from_name("xyz")


def test_unknown_argument_lists_the_choices_and_the_nearest():
    message = r"'alhpa' is not an argument of the combiner 'gradnorm'; did you mean 'alpha'\?.*'learning_rate'"
    with pytest.raises(ValueError, match=message):
        combiner_from_name("gradnorm", alhpa=1.5)


def test_a_combiner_without_arguments():
    with pytest.raises(ValueError, match=r"'alpha' is not an argument of the combiner 'weighted_sum'"):
        combiner_from_name("weighted_sum", alpha=1.5)


def test_direction_methods_take_two_guards_only():
    assert losses.PCGrad.arguments() == ["seed", "warmup_steps", "moving_average"]
    assert losses.MGDA.arguments() == ["normalize", "warmup_steps", "moving_average"]
    with pytest.raises(ValueError, match="'clip' is not an argument"):
        combiner_from_name("mgda", clip=(0, 1))


def test_a_value_of_the_wrong_kind():
    with pytest.raises(
        ValueError, match=r"'gradnorm' was given \{'alpha': 'much'\}.*defaults \{'alpha': 1.5\}.*Correct"
    ):
        combiner_from_name("gradnorm", alpha="much")

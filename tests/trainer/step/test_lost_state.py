"""Random numbers in hooks: resumed exactly, or named before the first step."""

import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from looptape import Trainer
from looptape.trainer.variables import OWN_CALL
from tests.reliability.tools import REPOSITORY, Killed, Killer
from tests.trainer.tools import assert_identical_weights, linear_model

DATA = tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat()


class Noisy(Trainer):
    """Trains on noise that `draw` makes."""

    def __init__(self, draw, **options):
        keras.utils.set_random_seed(2)
        super().__init__(linear_model(), keras.optimizers.SGD(0.1), **options)
        self.draw, self.own = draw, tf.random.Generator.from_seed(3)
        self.seeds = keras.random.SeedGenerator(4)

    def compute_losses(self, batch, training):
        return {"error": tf.square(self.model(batch + self.draw(self, tf.shape(batch))) - 1.0)[:, 0]}


def fit(trainer, workdir=None, steps=7, callbacks=()):
    trainer.fit(DATA, steps=steps, workdir=workdir, checkpoint_every=3, callbacks=callbacks, progress=False)
    return trainer


RESUMED = {
    "unseeded": lambda trainer, shape: keras.random.normal(shape),
    "seeded": lambda trainer, shape: keras.random.normal(shape, seed=trainer.seeds),
    "generator": lambda trainer, shape: trainer.own.normal(shape),
    "stateless": lambda trainer, shape: tf.random.stateless_normal(shape, [1, trainer.step]),
}


@pytest.mark.parametrize("how", RESUMED)
def test_what_a_checkpoint_holds_is_resumed_exactly(how, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        whole = fit(Noisy(RESUMED[how]), tmp_path / "whole")
        dying = Noisy(RESUMED[how])
        with pytest.raises(Killed):
            fit(dying, tmp_path / "killed", callbacks=[Killer(dying, 5)])
        assert_identical_weights(whole.model, fit(Noisy(RESUMED[how]), tmp_path / "killed").model)


def test_what_it_cannot_hold_is_named(tmp_path):
    def draw(trainer, shape):
        return tf.random.normal(shape) + tf.random.uniform(shape)

    with pytest.warns(
        UserWarning, match=r"RandomStandardNormal \(tf\.random\.normal\), RandomUniform \(tf\.random\.unif"
    ):
        fit(Noisy(draw), tmp_path, steps=1)
    fit(Noisy(draw), steps=1)  # without a checkpoint there is nothing to warn of


FIRST = """
import keras, tensorflow as tf
from looptape import Trainer

class First(Trainer):
    def compute_losses(self, batch, training):
        return {"error": tf.square(self.model(batch + keras.random.normal(tf.shape(batch))))[:, 0]}

ones = keras.initializers.Ones()
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer=ones)])
First(model, "sgd").fit(tf.data.Dataset.from_tensors(tf.ones([4, 3])).repeat(), steps=2, progress=False)
print("trained")
"""


def test_an_unseeded_draw_may_be_the_first_of_the_process():
    done = subprocess.run([sys.executable, "-c", FIRST], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "trained" in done.stdout, done.stderr[-2000:]


def test_candidates_that_are_sampled_are_named(tmp_path):
    def draw(trainer, shape):
        sampled = tf.random.uniform_candidate_sampler(tf.zeros([1, 1], tf.int64), 1, 4, True, 8)[0]
        return tf.cast(sampled[:1], tf.float32)

    with pytest.warns(UserWarning, match="The update draws random numbers by UniformCandidateSampler; "):
        fit(Noisy(draw), tmp_path)


@pytest.mark.parametrize("call", ["numpy_function", "py_function"])
def test_python_code_is_named_unless_it_is_declared_stateless(call, tmp_path):
    """Looptape's own calls of Python, as of a recurrent layer's eager actions, are not."""
    random = np.random.default_rng(1)

    def draw(trainer, shape):
        return tf.ensure_shape(getattr(tf, call)(lambda: np.float32(random.normal()), [], tf.float32), [])

    with pytest.warns(UserWarning, match=f"calls Python by `tf.{call}`; .*Keep it in a `tf.Variable`"):
        fit(Noisy(draw), tmp_path / "named", steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(Noisy(draw), steps=1)  # nothing is lost without a work directory
        stateless = lambda trainer, shape: tf.numpy_function(lambda x: x, [1.0], tf.float32, stateful=False)  # noqa: E731
        own = lambda trainer, shape: tf.numpy_function(lambda x: x, [1.0], tf.float32, name=OWN_CALL)  # noqa: E731
        for name, function in {"stateless": stateless, "own": own}.items():
            fit(Noisy(lambda *arguments, f=function: tf.ensure_shape(f(*arguments), [])), tmp_path / name, steps=1)


def test_a_table_that_the_update_changes_is_refused_before_the_first_step(tmp_path):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    def draw(trainer, shape):
        table.insert([trainer.step], [1.0])
        return 0.0

    trainer = Noisy(draw)
    message = "The update changes a table or a queue .LookupTableInsertV2.; .* Keep its contents in a `tf.Variable`"
    for call in (lambda: fit(trainer, tmp_path), lambda: trainer.fast_dev_run(DATA), lambda: trainer.overfit(DATA)):
        with pytest.raises(ValueError, match=message):
            call()
    assert table.size().numpy() == 0
    assert fit(trainer, steps=3).step.numpy() == 3  # nothing is lost without a work directory
    assert table.size().numpy() == 3

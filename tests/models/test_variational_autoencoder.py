"""The code of the autoencoder, against its Gaussian."""

import numpy as np

from looptape.models import (
    VariationalAutoencoder,
)


def test_the_code_of_an_autoencoder_is_drawn_from_its_gaussian():
    """With an encoder that ignores its input and a decoder that is the identity, the outputs are the draws."""
    model = VariationalAutoencoder((2,), 2, (), seed=3)
    mean, deviation = np.array([1.0, -2.0]), np.array([2.0, 0.5])
    model.encoder.set_weights([np.zeros((2, 4)), np.concatenate([mean, 2 * np.log(deviation)])])
    model.decoder.set_weights([np.eye(2), np.zeros(2)])
    inputs = np.zeros((20_000, 2), np.float32)
    drawn = np.asarray(model(inputs, training=True)["reconstruction"])
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=0.05)
    np.testing.assert_allclose(drawn.std(axis=0), deviation, rtol=0.03)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03
    settled = model(inputs[:3], training=False)
    np.testing.assert_allclose(settled["reconstruction"], np.broadcast_to(mean, (3, 2)), atol=1e-6)
    np.testing.assert_allclose(settled["latent"], np.broadcast_to([1, -2, np.log(4), np.log(0.25)], (3, 4)), atol=1e-6)
    np.testing.assert_allclose(model.generate(np.array([[0.0, 3.0]])), [[0.5, 1 / (1 + np.exp(-3))]], rtol=1e-5)

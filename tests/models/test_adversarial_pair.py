"""Generator and discriminator have their own variables."""

import numpy as np

from looptape.models import (
    AdversarialPair,
)


def test_generator_and_discriminator_have_their_own_variables():
    pair = AdversarialPair(2, 3, (8,))
    parts = [{id(v) for v in part.trainable_variables} for part in (pair.generator, pair.discriminator)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {id(v) for v in pair.trainable_variables}
    latents = np.ones((5, 3), np.float32)
    examples = pair.generator(latents)
    assert examples.shape == (5, 2)
    np.testing.assert_array_equal(pair(latents), pair.discriminator(examples))

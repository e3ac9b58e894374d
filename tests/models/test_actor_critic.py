"""Policy and value, on separate or shared layers."""

import numpy as np
import tensorflow as tf

from looptape.models import (
    ActorCritic,
)


def test_a_policy_starts_nearly_uniform():
    model = ActorCritic(4, 3)
    outputs = model(np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32))
    assert outputs["value"].shape == (50,)
    np.testing.assert_allclose(tf.nn.softmax(outputs["policy"]), np.full((50, 3), 1 / 3), atol=0.02)


def test_actor_and_critic_share_their_layers_only_if_told():
    apart, together = ActorCritic(4, 3, (8,)), ActorCritic(4, 3, (8,), shared=True)
    assert apart.count_params() - together.count_params() == 4 * 8 + 8

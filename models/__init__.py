"""Recurrent layers and cells on Looptape's own loop, and small models."""

from looptape._checkout import one_package
from looptape.models.actor_critic import ActorCritic
from looptape.models.adversarial_pair import AdversarialPair
from looptape.models.language_model import LanguageModel
from looptape.models.physics_informed_network import PhysicsInformedNetwork
from looptape.models.recurrent.identity_rnn_cell import IdentityRNNCell
from looptape.models.recurrent.loop_rnn import LoopRNN
from looptape.models.recurrent.minimal_gated_cell import MinimalGatedCell
from looptape.models.recurrent.orthogonal_rnn_cell import OrthogonalRNNCell
from looptape.models.shared_trunk import SharedTrunk
from looptape.models.variational_autoencoder import VariationalAutoencoder

one_package(__name__)
del one_package

__all__ = [
    "ActorCritic",
    "AdversarialPair",
    "IdentityRNNCell",
    "LanguageModel",
    "LoopRNN",
    "MinimalGatedCell",
    "OrthogonalRNNCell",
    "PhysicsInformedNetwork",
    "SharedTrunk",
    "VariationalAutoencoder",
]

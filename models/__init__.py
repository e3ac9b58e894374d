"""Loop-based recurrent layers, cells for them, and small models."""

from models.actor_critic import ActorCritic
from models.adversarial_pair import AdversarialPair
from models.identity_rnn_cell import IdentityRNNCell
from models.language_model import LanguageModel
from models.loop_rnn import LoopRNN
from models.minimal_gated_cell import MinimalGatedCell
from models.orthogonal_rnn_cell import OrthogonalRNNCell
from models.physics_informed_network import PhysicsInformedNetwork
from models.shared_trunk import SharedTrunk
from models.variational_autoencoder import VariationalAutoencoder

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

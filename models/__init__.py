"""Loop-based recurrent layers and small models."""

from models.loop_rnn import LoopRNN

__all__ = ["LoopRNN"]

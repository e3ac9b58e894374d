"""Recurrent loops with a backward loop of their own, and the Keras layers that run on them."""

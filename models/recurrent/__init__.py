"""Recurrent cells, and the layer that runs any cell on Looptape's own loop."""

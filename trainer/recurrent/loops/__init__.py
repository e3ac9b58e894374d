"""The recurrent loops, forwards and backwards, and the cells that they run."""

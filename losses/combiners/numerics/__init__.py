"""Numerical methods of the combiners: K x K matrices in float64, and random draws."""

"""The TensorBoard plugin `gradient_flow`: the gradient of every time step, over training.

Imports neither tensorflow nor keras nor any other package of ours. `metadata` is what writer and reader
share.
"""

from looptape._checkout import one_package

one_package(__name__)

"""One file per experiment, launched by `python -m experiments.<name>`; `python -m experiments` lists them."""

import os
import sys

from experiments import quiet

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Only where a person launches an experiment: the list of experiments needs no TensorFlow.
if quiet.launched(sys.orig_argv):
    quiet.import_tensorflow()

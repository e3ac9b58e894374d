"""One file per experiment, launched by `looptape run <name>`; `looptape list` lists them."""

import os
import sys

from looptape import _quiet
from looptape._checkout import one_package

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Only where a person launches an experiment: the list of experiments needs no TensorFlow.
if _quiet.launched(sys.orig_argv):
    _quiet.import_tensorflow()
one_package(__name__)

"""`python -m looptape.experiments.cluster`, the same as `looptape cluster`."""

import sys

from looptape.experiments.cluster import local

if __name__ == "__main__":
    sys.exit(local.main(sys.argv[1:]))

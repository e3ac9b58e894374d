"""`python -m looptape …`, the same as the command `looptape …`."""

import sys

from looptape._command import main

if __name__ == "__main__":
    sys.exit(main())

"""Lists the experiments with a line each, as `looptape list` does."""

from looptape.experiments.tools import listing

if __name__ == "__main__":
    print(listing.text())

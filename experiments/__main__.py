"""`python -m experiments` lists the experiments with a line each."""

from experiments import listing

if __name__ == "__main__":
    print(listing.text())

"""Runs every benchmark, one after another.

python -m benchmarks
"""

from benchmarks import accumulation, combiners, overhead, probe_every


def main():
    for benchmark in (overhead, accumulation, combiners, probe_every):
        print(f"\n## {benchmark.__name__}\n")
        benchmark.main()


if __name__ == "__main__":
    main()

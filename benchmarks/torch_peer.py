"""A recurrent layer and a readout in PyTorch; `benchmarks.recurrent` drives it, in an interpreter of its own.

Reads numbers of updates from its standard input, a line each, and answers each with the seconds they took.
"""

import sys
import time

import torch


def main(kind, batch, length, features, units, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer, readout = getattr(torch.nn, kind)(features, units, batch_first=True), torch.nn.Linear(units, 1)
    optimizer = torch.optim.Adam([*layer.parameters(), *readout.parameters()], 1e-3)
    x = torch.randn(batch, length, features)
    y = x[:, 0, :1].clone()
    print(f"ready torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(readout(layer(x)[0][:, -1]), y)
            loss.backward()
            optimizer.step()
        print(f"seconds {time.perf_counter() - start}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

"""The small models of `benchmarks.peers` in PyTorch, by a bare loop or by Lightning; driven by that module.

    python torch_models.py PyTorch|Lightning mlp|cnn|lstm THREADS

A process of its own, in an interpreter of its own. Reads numbers of updates from its standard input, a line each, and
answers each with the seconds they took. Both read the same `DataLoader`; neither logs.
"""

import logging
import sys
import time
import warnings

import numpy as np
import torch


class LSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.readout = torch.nn.LSTM(2, 64, batch_first=True), torch.nn.Linear(64, 1)

    def forward(self, x):
        return self.readout(self.lstm(x)[0][:, -1])


def network(name):
    if name == "lstm":
        return LSTM()
    if name == "mlp":
        layer = torch.nn.Linear
        return torch.nn.Sequential(layer(32, 64), torch.nn.ReLU(), layer(64, 64), torch.nn.ReLU(), layer(64, 1))
    blocks = []
    for inputs, outputs in ((1, 16), (16, 32)):
        blocks += [torch.nn.Conv2d(inputs, outputs, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    return torch.nn.Sequential(*blocks, torch.nn.Flatten(), torch.nn.Linear(800, 1))


def batches(name):
    """As `benchmarks.overhead` and `benchmarks.peers` have them."""
    rng = np.random.default_rng(0)
    shape = {"mlp": (6400, 32), "cnn": (640, 1, 28, 28), "lstm": (640, 100, 2)}[name]
    x = rng.normal(size=shape).astype("float32")
    y = x.reshape(len(x), -1)[:, :1]  # the first number of each example
    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, y)))
    return torch.utils.data.DataLoader(dataset, 64 if name == "mlp" else 32, drop_last=True)


def bare(model, loader):
    """run(updates) -> seconds."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def run(updates):
        start, made = time.perf_counter(), 0
        while made < updates:
            for x, y in loader:
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                made += 1
                if made == updates:
                    break
        return time.perf_counter() - start

    return run


def by_lightning(model, loader):
    """run(updates) -> seconds between the first and the last update."""
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # advice about data loaders

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = model

        def training_step(self, batch, index):
            x, y = batch
            return torch.nn.functional.mse_loss(self.network(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-3)

        def on_train_start(self):
            self.start = time.perf_counter()

        def on_train_end(self):
            self.seconds = time.perf_counter() - self.start

    module = Module()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)

    def run(updates):
        lightning.Trainer(max_steps=updates, accelerator="cpu", **off).fit(module, loader)
        return module.seconds

    return run


def main(peer, name, threads):
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    run = (bare if peer == "PyTorch" else by_lightning)(network(name), batches(name))
    print(f"ready torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        print(f"seconds {run(int(line))}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

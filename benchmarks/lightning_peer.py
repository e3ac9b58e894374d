"""The small models of `benchmarks.overhead` in PyTorch, trained by Lightning; driven by `benchmarks.peers`.

A process of its own, because TensorFlow and PyTorch cannot always be loaded into one. Reads numbers of updates from its
standard input, a line each, and answers each with the seconds they took.
"""

import logging
import sys
import time
import warnings

import lightning
import numpy as np
import torch


def mlp():
    layer = torch.nn.Linear
    return torch.nn.Sequential(layer(32, 64), torch.nn.ReLU(), layer(64, 64), torch.nn.ReLU(), layer(64, 1))


class LSTM(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.readout = torch.nn.LSTM(2, 64, batch_first=True), torch.nn.Linear(64, 1)

    def forward(self, x):
        return self.readout(self.lstm(x)[0][:, -1])


def arrays(name):
    """As `benchmarks.overhead` has them."""
    rng = np.random.default_rng(0)
    if name == "mlp":
        x = rng.normal(size=(6400, 32)).astype("float32")
        return x, x[:, :1]
    x = rng.normal(size=(640, 100, 2)).astype("float32")
    return x, x[:, 0, :1]


class Module(lightning.LightningModule):
    """Squared error by Adam; keeps the time between the first and the last update."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.network(x), y)
        self.log("error", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

    def on_train_start(self):
        self.start = time.perf_counter()

    def on_train_end(self):
        self.seconds = time.perf_counter() - self.start


def main(name):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # advice about data loaders
    torch.set_num_threads(2)
    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays(name)))
    loader = torch.utils.data.DataLoader(dataset, 64 if name == "mlp" else 32, drop_last=True)
    module = Module(mlp() if name == "mlp" else LSTM())
    print(f"ready lightning {lightning.__version__}, torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        lightning.Trainer(
            max_steps=int(line),
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, loader)
        print(f"seconds {module.seconds}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

"""`Trainer.fit` against PyTorch Lightning on the same small models: time per update, interleaved in one process.

python -m benchmarks.peers        (needs `pip install lightning`; says so and ends where it is not installed)

Lightning is PyTorch, with kernels of its own: the ratio says what a user waits, not which loop is leaner. Both log
losses, neither writes files here but Looptape its event files.
"""

import importlib.util
import os
import tempfile
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np

from benchmarks.measure import interleave, machine, row, table
from benchmarks.overhead import looptape, lstm, lstm_data, mlp, mlp_data

ROUNDS = 9


def lightning_fit(make_network, arrays, batch_size):
    """A contestant: seconds of so many updates by `lightning.Trainer.fit`, first and last update included."""
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = make_network(torch)

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

    dataset = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
    loader = torch.utils.data.DataLoader(dataset, batch_size, drop_last=True)
    module = Module()

    def run(updates):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about data loaders
            lightning.Trainer(
                max_steps=updates,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            ).fit(module, loader)
        return module.seconds

    return run


def torch_mlp(torch):
    layer = torch.nn.Linear
    return torch.nn.Sequential(layer(32, 64), torch.nn.ReLU(), layer(64, 64), torch.nn.ReLU(), layer(64, 1))


def torch_lstm(torch):
    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.readout = torch.nn.LSTM(2, 64, batch_first=True), torch.nn.Linear(64, 1)

        def forward(self, x):
            return self.readout(self.lstm(x)[0][:, -1])

    return Network()


def arrays_of(dataset):
    parts = list(dataset.as_numpy_iterator())
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def compare(name, make_model, dataset, make_network, batch_size, per_call, updates):
    with tempfile.TemporaryDirectory() as workdir:
        contestants = {
            "Trainer.fit": looptape(make_model(), dataset.repeat(), per_call, workdir),
            "Lightning": lightning_fit(make_network, arrays_of(dataset), batch_size),
        }
        for run in contestants.values():
            run(2 * per_call)
        times = interleave({key: (lambda run=run: run(updates) / updates) for key, run in contestants.items()}, ROUNDS)
    for key, values in times.items():
        print(f"{name}: {key} {1e6 * np.median(values):.0f} µs per update")
    return [name, *row(times, "Trainer.fit", "Lightning", 1.0)]


def main():
    if importlib.util.find_spec("lightning") is None:
        print("Skipped: Lightning is not installed. `pip install lightning` to compare with it.")
        return
    import lightning
    import torch

    rows = [
        compare("MLP 32-64-64-1, batch 64", mlp, mlp_data(), torch_mlp, 64, 100, 300),
        compare("LSTM 64, batch 32, T 100", lstm, lstm_data(), torch_lstm, 32, 25, 50),
    ]
    print(machine(), f"lightning {lightning.__version__}, torch {torch.__version__}")
    print(table(["model", "compared", "ratio", "spread", "limit", "reached"], rows))


if __name__ == "__main__":
    main()

"""Loggers for services: MLflow and Weights & Biases. Their packages are optional extras."""

import contextlib
import html
import importlib
import io
import json
import os
import tempfile

import numpy as np

from looptape.trainer.loggers.interface import Audio, Histogram, Logger, Picture

_METRICS_PER_CALL, _LONGEST_NAME = 1000, 250  # MLflow takes no more


class Service(Logger):
    """A run of a service that a resumed `fit` continues.

    The id of the run and the last step sent of every tag are kept in `<workdir>/<name>.json`. Rows that were sent
    already are not sent again: a resumed run repeats them bit for bit. After a return to a checkpoint
    (`on_nonfinite="restore"`) the service keeps the rows of the abandoned updates, because it cannot take them back.

    Args:
        config: {name: value} to be shown with the run.
    """

    name, package = "", ""

    def __init__(self, config=None):
        self.config = dict(config or {})
        self._service = _imported(self.package)
        self._file, self._state, self._is_new = None, {}, True
        self._ended: dict = {}  # the state at the end of the latest `fit`, continued where there is no work directory

    def open(self, workdir, step):
        if self._state:  # going back to a checkpoint: the service has its rows
            return
        self._file = None if workdir is None else os.path.join(workdir, f"{self.name}.json")
        known = self._ended if step and self._file is None else {}
        if self._file is not None and step and os.path.exists(self._file):
            with open(self._file) as file:
                known = json.load(file)
        self._is_new = not known
        self._state = {"id": self._begin(known.get("id")), "sent": known.get("sent", {}), "pending": None}
        if known.get("pending"):  # the process was killed while it sent this row
            tags, at = known["pending"]
            self._state["sent"].update({tag: at for tag in tags if self._arrived(tag, at)})
        self._keep()

    def write(self, run, step, values):
        if run == "config":
            if self._is_new:
                self._configure(values)
            return
        sent = self._state["sent"]
        new = {f"{run}/{tag}": value for tag, value in values.items() if step > sent.get(f"{run}/{tag}", -1)}
        if not new:
            return
        self._state["pending"] = list(new), step
        self._keep()
        self._send(step, new)
        self._state["pending"] = None  # in the file when the next row is sent, or at the end
        sent.update(dict.fromkeys(new, step))

    def close(self):
        if self._state:
            self._keep()
            self._ended, self._state = self._state, {}
            self._end(self._ended["id"])

    def _keep(self):
        if self._file is None:
            return
        with open(self._file + ".tmp", "w") as file:
            json.dump(self._state, file)
        os.replace(self._file + ".tmp", self._file)

    def _begin(self, known):
        """Begins a run, or continues the known one. Returns its id."""
        raise TypeError(f"{type(self).__name__} has no method `_begin(known)`. Write one.")

    def _configure(self, values):
        """Sends the configuration of a new run."""

    def _send(self, step, values):
        raise TypeError(f"{type(self).__name__} has no method `_send(step, values)`. Write one.")

    def _arrived(self, tag, step):
        """Whether the service has this value, or may have it: it must not get it twice."""
        return True

    def _end(self, known):
        """Ends the run of this id."""


class MLflow(Service):
    """A run of MLflow: scalars as metrics, the configuration as parameters, pictures, sounds and texts as artifacts.

    Vectors per time step and histograms are left out. `MLFLOW_TRACKING_URI` or `tracking_uri` sets the destination.

    Args:
        experiment: MLflow experiment in which the run appears.
        run_name: name of the run.
        tracking_uri: as in `mlflow.set_tracking_uri`.
        config: {name: value}, logged as parameters.
    """

    name, package = "mlflow", "mlflow"

    def __init__(self, experiment="looptape", run_name=None, tracking_uri=None, config=None):
        super().__init__(config)
        self._experiment, self._run_name = experiment, run_name
        self._client = self._service.MlflowClient(tracking_uri=tracking_uri)

    def _begin(self, known):
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            return known
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        return self._client.create_run(experiment, run_name=self._run_name).info.run_id

    def _configure(self, values):
        for name, value in values.items():
            self._client.log_param(self._state["id"], _allowed(name), value)

    def _send(self, step, values):
        own = self._state["id"]
        metric, now = self._service.entities.Metric, self._service.utils.time.get_current_time_millis()
        scalars = [metric(_allowed(tag), value, now, step) for tag, value in values.items() if isinstance(value, float)]
        for begin in range(0, len(scalars), _METRICS_PER_CALL):
            self._client.log_batch(own, metrics=scalars[begin : begin + _METRICS_PER_CALL])
        for tag, value in values.items():
            if isinstance(value, str):
                self._client.log_text(own, value, f"{_allowed(tag)}/{step}.md")
            elif isinstance(value, Picture):
                self._client.log_image(own, _opened(value), f"{_allowed(tag)}/{step}.png")
            elif isinstance(value, Audio):
                with _wav_file(value, str(step)) as path:
                    self._client.log_artifact(own, path, _allowed(tag))

    def _arrived(self, tag, step):
        # Artifacts come again under the same name and replace themselves.
        history = self._client.get_metric_history(self._state["id"], _allowed(tag))
        return any(each.step == step for each in history)

    def _end(self, known):
        self._client.set_terminated(known)


class WandB(Service):
    """A run of Weights & Biases: scalars, vectors and histograms, pictures, sounds, texts and the configuration.

    `WANDB_MODE` or `mode` decides whether it is sent or stays on the disk.

    Args:
        project: W&B project in which the run appears.
        run_name: name of the run.
        mode: "online" or "offline"; W&B's setting by default.
        config: {name: value}.
    """

    name, package = "wandb", "wandb"

    def __init__(self, project="looptape", run_name=None, mode=None, config=None):
        super().__init__(config)
        self._options = {"project": project, "name": run_name, "mode": mode}
        self._wandb_run = None

    def _begin(self, known):
        where = None if self._file is None else os.path.dirname(self._file)
        resuming = {"id": known, "resume": "allow"} if known else {}
        self._wandb_run = self._service.init(
            config=self.config, dir=where, reinit="create_new", **resuming, **self._options
        )
        # The loop's own step as the axis of every chart: rows of `train` and `eval` come in no common order.
        self._wandb_run.define_metric("step")
        self._wandb_run.define_metric("*", step_metric="step")
        return self._wandb_run.id

    def _send(self, step, values):
        with contextlib.ExitStack() as files:
            converted = {tag: self._converted(value, files) for tag, value in values.items()}
            self._wandb_run.log({"step": step, **converted})

    def _converted(self, value, files):
        if isinstance(value, Picture):
            return self._service.Image(_opened(value))
        if isinstance(value, Audio):
            return self._service.Audio(files.enter_context(_wav_file(value, "audio")))
        if isinstance(value, Histogram):
            left, right, counts = value.buckets.T
            edges = np.append(left, right[-1:])
            return self._service.Histogram(np_histogram=(counts.tolist(), edges.tolist())) if counts.size else None
        if isinstance(value, np.ndarray):
            finite = value[np.isfinite(value)]
            return self._service.Histogram(finite.tolist()) if finite.size else None
        return self._service.Html(f"<pre>{html.escape(value)}</pre>") if isinstance(value, str) else value

    def _end(self, known):
        self._wandb_run.finish()


def _imported(package):
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ImportError(
            f"This logger needs {package}, which is not installed. Run `pip install looptape[{package}]`."
        ) from None


@contextlib.contextmanager
def _wav_file(audio, name):
    """The path of a file with a sound, which exists inside the context."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, f"{name}.wav")
        with open(path, "wb") as file:
            file.write(audio.wav)
        yield path


def _opened(picture):
    from PIL import Image

    return Image.open(io.BytesIO(picture.png))


def _allowed(tag):
    """A tag that MLflow takes: of its characters, a plain path, and not too long.

    >>> _allowed("eval/top[5]"), _allowed("train//../loss")
    ('eval/top_5_', 'train/loss')
    """
    tag = "".join(each if each.isalnum() or each in "_-. /" else "_" for each in tag)
    parts = [part for part in tag.split("/") if part.strip(".")]
    return "/".join(parts)[-_LONGEST_NAME:].strip("/") or "_"

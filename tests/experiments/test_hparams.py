"""Flags in TensorBoard, read back through TensorBoard's own reader."""

import dataclasses

import pytest
from tensorboard import context
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

from experiments import hparams, launch
from experiments.options import run_values
from tests.experiments import tools
from tests.experiments.tools import Config, run


class Board:
    """TensorBoard's HParams backend on a log directory."""

    def __init__(self, logdir):
        multiplexer = plugin_event_multiplexer.EventMultiplexer()
        multiplexer.AddRunsFromDirectory(str(logdir))
        multiplexer.Reload()
        self.multiplexer = multiplexer
        self.provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
        self._backend = backend_context.Context(base_plugin.TBContext(data_provider=self.provider))
        self._request = context.RequestContext()

    def experiment(self):
        request = api_pb2.GetExperimentRequest()
        return get_experiment.Handler(self._request, self._backend, "", request).run()

    def groups(self):
        experiment = self.experiment()
        columns = [api_pb2.ColParams(metric=info.name) for info in experiment.metric_infos]
        columns += [api_pb2.ColParams(hparam=info.name) for info in experiment.hparam_infos]
        statuses = [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING, api_pb2.STATUS_UNKNOWN]
        request = api_pb2.ListSessionGroupsRequest(
            allowed_statuses=statuses, col_params=columns, start_index=0, slice_size=100
        )
        return list_session_groups.Handler(self._request, self._backend, "", request).run().session_groups


def plain(value):
    return getattr(value, value.WhichOneof("kind"))


@pytest.mark.parametrize("below", [".", "run"])  # --logdir is the workdir, or the directory above
def test_flags_and_results_reach_the_tab(tmp_path, below):
    config = Config(workdir=str(tmp_path / below), learning_rate=0.05, clip_norm=None, jit_compile=True)
    results = launch.run(config, tools.build, name="line", show=False)
    board = Board(tmp_path)
    names = {info.name for info in board.experiment().hparam_infos}
    assert names == {"experiment", *run_values(config)}
    (group,) = board.groups()
    values = {name: plain(value) for name, value in group.hparams.items()}
    assert values["experiment"] == "line"
    assert values["learning_rate"] == 0.05 and values["jit_compile"] is True and values["clip_norm"] == "none"
    (session,) = group.sessions
    assert session.status == api_pb2.STATUS_SUCCESS
    metrics = {metric.name.tag: metric for metric in session.metric_values}
    assert metrics["loss/error"].value == pytest.approx(results["error"])
    assert metrics["loss/error"].training_step == 4


def test_runs_of_two_experiments_lie_side_by_side(tmp_path):
    """No option of either vanishes, as it would if one of them were declared for the whole log directory."""

    @dataclasses.dataclass(frozen=True)
    class Circle(tools.Config):
        radius: float = launch.option(1.0, "of the circle")

    run(workdir=str(tmp_path / "a"))
    launch.run(Circle(workdir=str(tmp_path / "b"), radius=2.5), tools.build, name="circle", show=False)
    board = Board(tmp_path)
    names = {info.name for info in board.experiment().hparam_infos}
    assert {"radius", "slope", "learning_rate"} <= names
    found = sorted(plain(group.hparams["experiment"]) for group in board.groups())
    assert found == ["circle", "line"]


def test_runs_that_differ_in_their_seed_are_one_group(tmp_path):
    run(workdir=str(tmp_path / "a"), seed=0)
    run(workdir=str(tmp_path / "b"), seed=1)
    run(workdir=str(tmp_path / "c"), seed=1, slope=1.0)
    assert sorted(len(group.sessions) for group in Board(tmp_path).groups()) == [1, 2]


def test_a_resumed_run_shows_its_present_flags_once(tmp_path):
    run(workdir=str(tmp_path), learning_rate=0.1)
    run(workdir=str(tmp_path), learning_rate=0.02, steps=6)
    (group,) = Board(tmp_path).groups()
    assert plain(group.hparams["learning_rate"]) == 0.02 and plain(group.hparams["steps"]) == 6
    (metric,) = [m for m in group.sessions[0].metric_values if m.name.tag == "loss/error"]
    assert metric.training_step == 6


def test_a_failed_run_is_marked(tmp_path):
    def breaks(config):
        experiment = tools.build(config)
        experiment.trainer.fit = None
        return experiment

    with pytest.raises(TypeError):
        launch.run(Config(workdir=str(tmp_path)), breaks, name="line", show=False)
    (group,) = Board(tmp_path).groups()
    assert group.sessions[0].status == api_pb2.STATUS_FAILURE


def test_the_flags_are_a_text(tmp_path):
    run(workdir=str(tmp_path), slope=2.0)
    board = Board(tmp_path)
    (event,) = board.multiplexer.Tensors("eval", "flags")
    (shown,) = event.tensor_proto.string_val
    assert "| --slope | **2.0** | 3.0 |" in shown.decode() and "| --steps | 4 | 4 |" in shown.decode()


def test_a_group_is_named_by_everything_but_the_seed():
    one, other = (hparams.group(Config(seed=seed), "line") for seed in (0, 1))
    assert one == other != hparams.group(Config(slope=1.0), "line")

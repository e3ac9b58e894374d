"""Flags in TensorBoard, read back through TensorBoard's own reader."""

import dataclasses

import pytest
from tensorboard import context
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

from looptape import launch
from looptape.experiments.records import hparams
from tests.experiments import line
from tests.experiments.line import Config, run


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
    config = Config(workdir=str(tmp_path / below), learning_rate=0.05, jit_compile=True)
    results = launch.run(config, line.build, name="line", show=False)
    board = Board(tmp_path)
    names = {info.name for info in board.experiment().hparam_infos}
    assert names == {"learning_rate", "jit_compile"}, "not at their defaults"
    (group,) = board.groups()
    values = {name: plain(value) for name, value in group.hparams.items()}
    assert group.name.endswith(" line")
    assert values["learning_rate"] == 0.05 and values["jit_compile"] is True
    (session,) = group.sessions
    assert session.status == api_pb2.STATUS_SUCCESS
    metrics = {metric.name.tag: metric for metric in session.metric_values}
    assert metrics["loss/error"].value == pytest.approx(results["error"])
    assert metrics["loss/error"].training_step == 4


def test_runs_of_two_experiments_lie_side_by_side(tmp_path):
    """No option of either vanishes, as it would if one of them were declared for the whole log directory."""

    @dataclasses.dataclass(frozen=True)
    class Circle(line.Config):
        radius: float = launch.option(1.0, "of the circle")

    run(workdir=str(tmp_path / "a"), slope=1.5)
    launch.run(Circle(workdir=str(tmp_path / "b"), radius=2.5), line.build, name="circle", show=False)
    board = Board(tmp_path)
    names = {info.name for info in board.experiment().hparam_infos}
    assert {"radius", "slope"} <= names
    assert sorted(group.name for group in board.groups()) == ["radius=2.5 circle", "slope=1.5 line"]


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
        experiment = line.build(config)
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


def test_a_group_is_named_by_what_sets_it_apart_but_not_by_the_seed():
    one, other = (hparams.group(Config(seed=seed), "line") for seed in (0, 1))
    assert one == other == "line"
    assert hparams.group(Config(slope=1.0), "line") == "slope=1.0 line"


def test_a_run_of_a_sweep_shows_the_flags_of_the_grid(monkeypatch):
    monkeypatch.setenv("LOOPTAPE_SWEPT_FLAGS", "slope,steps")
    config = Config(slope=3.0, learning_rate=0.05)  # slope is at its default in this run of the sweep
    assert hparams.hparams(config, "line") == {"slope": 3.0, "steps": config.steps}


def test_only_flags_that_are_not_at_their_defaults_are_columns():
    assert hparams.hparams(Config(), "line") == {"experiment": "line"}
    assert hparams.hparams(Config(seed=3), "line") == {"seed": 3}
    watched = Config(slope=1.0, log_every=1, probe_every=5, health_every=5, eval_every=2)
    assert hparams.hparams(watched, "line") == {"slope": 1.0}, "watching a run does not set it apart"
    assert hparams.group(watched, "line") == "slope=1.0 line"


def test_the_horizon_is_among_the_metrics(tmp_path):
    """TensorBoard takes a session's metrics from its own run, where the results are."""
    from looptape.experiments import adding_problem

    options = {"length": 4, "units": 2, "eval_examples": 10, "jit_compile": False, "probe_every": 2}
    config = adding_problem.Config(steps=2, workdir=str(tmp_path), **options)
    launch.run(config, adding_problem.build, name="adding_problem", show=False)
    (group,) = Board(tmp_path).groups()
    (horizon,) = [m.value for m in group.sessions[0].metric_values if m.name.tag.endswith("/horizon")]
    assert 1 <= horizon <= 4

"""The charts that TensorBoard's custom scalars show, read back by TensorBoard itself."""

import json

import keras
import pytest
from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.custom_scalar import custom_scalars_plugin
from tensorboard.plugins.scalar import scalars_plugin

from looptape import Trainer
from tests.trainer.tools import dataset, linear_model, mse, read_events, regression

X, Y = regression(16)
LAYOUT = "custom_scalars__config__"


def fit(workdir, losses, steps=4, **options):
    trainer = Trainer(linear_model(), keras.optimizers.SGD(0.05), losses, **options)
    trainer.fit(dataset(X, Y, batch=8).repeat(), steps=steps, log_every=2, workdir=workdir, progress=False)
    return trainer


def plugin(workdir):
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(workdir))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(workdir))
    plugins = {}
    context = base_plugin.TBContext(data_provider=provider, logdir=str(workdir), plugin_name_to_instance=plugins)
    plugins["scalars"] = scalars_plugin.ScalarsPlugin(context)
    return custom_scalars_plugin.CustomScalarsPlugin(context)


def charts(board):
    """{title: (patterns, {tag: [value, …]})} as the browser would get them."""
    layout = json.loads(board.layout_impl(RequestContext(), ""))
    found = {}
    for category in layout["category"]:
        for chart in category["chart"]:
            (pattern,) = chart["multiline"]["tag"]
            answer = board.scalars_impl(RequestContext(), "train", pattern, "")
            assert answer["regex_valid"]
            found[category["title"], chart["title"]] = {
                tag: [value for _, _, value in points] for tag, points in answer["tag_to_events"].items()
            }
    return found


def test_each_loss_has_a_chart_and_their_weights_share_one(tmp_path):
    pair = {"square": mse(), "a+b": keras.losses.MeanAbsoluteError()}
    fit(tmp_path, pair, loss_weights={"square": 0.5, "a+b": 2.0})
    found = charts(plugin(tmp_path))
    assert set(found["losses", "square, unweighted"]) == {"loss/square"}
    assert set(found["losses", "a+b, unweighted"]) == {"loss/a+b"}
    assert found["losses", "weights of the losses"] == {"loss_weight/square": [0.5] * 2, "loss_weight/a+b": [2.0] * 2}
    written = [float(row["loss/square"]) for _, row in read_events(tmp_path / "train") if "loss/square" in row]
    assert found["losses", "square, unweighted"]["loss/square"] == pytest.approx(written)
    assert ("losses", "gradient norms") not in found


def test_gradient_norms_have_a_chart_where_they_are_measured(tmp_path):
    fit(tmp_path, {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()}, probe_every=2)
    found = charts(plugin(tmp_path))["losses", "gradient norms"]
    assert set(found) == {"optimizer/gradient_norm/square", "optimizer/gradient_norm/absolute"}
    assert all(len(values) == 3 for values in found.values()), "steps 1, 2 and 4"


def test_it_is_written_once_per_run(tmp_path):
    pair = {"square": mse(), "absolute": keras.losses.MeanAbsoluteError()}
    fit(tmp_path, pair)
    fit(tmp_path, pair, steps=6)
    fit(tmp_path, pair, steps=6)
    steps = [step for step, row in read_events(tmp_path / "train") if LAYOUT in row]
    assert steps == [0]
    assert charts(plugin(tmp_path))["losses", "square, unweighted"].keys() == {"loss/square"}


def test_one_loss_needs_no_layout(tmp_path):
    fit(tmp_path, {"square": mse()})
    assert not any(LAYOUT in row for _, row in read_events(tmp_path / "train"))

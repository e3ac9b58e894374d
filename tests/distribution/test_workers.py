"""Two processes on loopback against one device, and what happens when one of them is lost."""

import os
import re
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from looptape.experiments.cluster import joining
from looptape.trainer.checkpoints import store as checkpoints
from tests.distribution import cases, processes
from tests.distribution.processes import assert_equal
from tests.trainer.tools import read_events

IN_EVERY_RUN = "accumulation"  # Adam, three micro-batches per update, averages, masks, metrics


def on_one_device(case, workdir, steps=cases.UPDATES):
    trainer = cases.made(None, **cases.CASES[case])
    history = trainer.fit(
        cases.shuffled(),
        steps=steps,
        eval_dataset=cases.held_out(),
        eval_every=20,
        log_every=10,
        workdir=workdir,
        progress=False,
    ).history
    return trainer, history


@pytest.mark.parametrize(
    "case", [name if name == IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.long) for name in cases.REPLICATED]
)
def test_two_processes_equal_one_device(case, tmp_path):
    first, second = processes.run_workers(case, tmp_path)
    assert_equal(first, second)  # bit for bit between the two
    assert first["connections"]
    trainer, history = on_one_device(case, tmp_path / "one")
    for index, variable in enumerate(trainer.model.variables):
        np.testing.assert_allclose(first[f"weight{index}"], variable.numpy(), rtol=0, atol=1e-6, err_msg=variable.path)
    for name, values in history.items():
        np.testing.assert_allclose(first[f"history/{name}"], values, rtol=2e-5, err_msg=name)
    # One set of files, the chief's, as one device leaves it.
    assert sorted(os.listdir(tmp_path / "run")) == sorted(os.listdir(tmp_path / "one"))
    rows = [dict(read_events(path / "train")) for path in (tmp_path / "run", tmp_path / "one")]
    assert list(rows[0]) == list(rows[1]) == [0, 10, 20, 30, 40] and rows[0][40].keys() == rows[1][40].keys()
    assert len([name for name in os.listdir(tmp_path / "run" / "train") if "tfevents" in name]) == 1
    path, _ = checkpoints.Store(str(tmp_path / "run" / "checkpoints")).newest()
    assert path.endswith("40")


@pytest.mark.long
def test_resume_from_two_processes_to_two_and_to_one(tmp_path):
    case = "accumulation"
    whole = processes.run_workers(case, tmp_path / "whole")[0]
    processes.run_workers(case, tmp_path / "again", steps=15)
    shutil.copytree(tmp_path / "again", tmp_path / "one")
    again = processes.run_workers(case, tmp_path / "again")[0]
    assert_equal(whole, again)
    trainer, _ = on_one_device(case, tmp_path / "one" / "run")
    assert trainer._engine.counters.step == 40
    for index, variable in enumerate(trainer.model.variables):
        np.testing.assert_allclose(whole[f"weight{index}"], variable.numpy(), rtol=0, atol=1e-6)


@pytest.mark.long
def test_resume_from_one_process_to_two(tmp_path):
    case = "accumulation"
    whole, history = on_one_device(case, tmp_path / "whole")
    on_one_device(case, tmp_path / "more" / "run", steps=15)
    first, second = processes.run_workers(case, tmp_path / "more")
    assert_equal(first, second)
    # The row of step 15, at which the first run ended, is there: the second went on and did not begin anew.
    assert [step for step, _ in read_events(tmp_path / "more" / "run" / "train")] == [0, 10, 15, 20, 30, 40]
    for index, variable in enumerate(whole.model.variables):
        np.testing.assert_allclose(first[f"weight{index}"], variable.numpy(), rtol=0, atol=1e-6)
    for index, variable in enumerate(whole.optimizer.variables):
        np.testing.assert_allclose(first[f"optimizer{index}"], variable.numpy(), rtol=0, atol=1e-6)
    for name, values in history.items():  # of the last 20 updates; a `fit` that ends ends an epoch
        np.testing.assert_allclose(first[f"history/{name}"][-1], values[-1], rtol=2e-5, err_msg=name)


def by_index_on_one_device(workdir, steps=cases.UPDATES):
    trainer = cases.made(None, **cases.CASES["indexed"])
    options = {"eval_dataset": cases.by_index(batch_size=7, shuffle=False), "eval_every": 20, "workdir": workdir}
    history = trainer.fit(cases.by_index(), steps=steps, log_every=10, progress=False, **options).history
    return {f"weight{i}": v.numpy() for i, v in enumerate(trainer.model.variables)}, history


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3, 4])
def test_workers_that_read_their_own_rows_equal_one_device(count, tmp_path):
    """Batches and evaluation batches that do not divide: 13, 13, 10 and 7, 7, 7, 7, 7, 1."""
    reached = processes.run_workers("indexed", tmp_path, count=count)
    for other in reached[1:]:
        assert_equal(reached[0], other)
    expected, history = by_index_on_one_device(tmp_path / "one")
    assert_equal(expected, reached[0], 1e-6)
    for name, values in history.items():
        np.testing.assert_allclose(reached[0][f"history/{name}"], values, rtol=2e-5, err_msg=name)


@pytest.mark.long
def test_a_stateful_layer_on_workers_that_read_their_own_rows_equals_one_device(tmp_path):
    """Each worker keeps the states of its six rows of twelve."""
    first, second = processes.run_workers("stateful", tmp_path)
    assert_equal(first, second)
    trainer, data = cases.made(None, **cases.CASES["stateful"]), cases.batched(12)
    options = {"eval_dataset": data, "eval_every": 20, "log_every": 10, "progress": False}
    history = trainer.fit(data.repeat(), steps=40, **options).history
    for index, variable in enumerate(trainer.model.variables):
        np.testing.assert_allclose(first[f"weight{index}"], variable.numpy(), rtol=0, atol=1e-6, err_msg=variable.path)
    for name, values in history.items():
        np.testing.assert_allclose(first[f"history/{name}"], values, rtol=2e-5, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 4])
def test_batches_smaller_than_the_number_of_workers_equal_one_device(count, tmp_path):
    reached = processes.run_workers("few", tmp_path, count=count)
    for other in reached[1:]:
        assert_equal(reached[0], other)
    trainer = cases.made(None, **cases.CASES["few"])
    options = {"eval_dataset": cases.held_out(), "eval_every": 20, "log_every": 10, "progress": False}
    history = trainer.fit(cases.shuffled(batch=2), steps=cases.UPDATES, **options).history
    for index, variable in enumerate(trainer.model.variables):
        np.testing.assert_allclose(reached[0][f"weight{index}"], variable.numpy(), rtol=0, atol=1e-6)
    for name, values in history.items():
        np.testing.assert_allclose(reached[0][f"history/{name}"], values, rtol=2e-5, err_msg=name)


@pytest.mark.long
def test_pipelines_that_shard_themselves_equal_their_joint_batches_and_resume(tmp_path):
    first, second = processes.run_workers("sharded", tmp_path / "whole")
    assert_equal(first, second)
    processes.run_workers("sharded", tmp_path / "parts", steps=17)
    assert_equal(first, processes.run_workers("sharded", tmp_path / "parts")[0])
    # One device on what both workers' batches are together.
    data = cases.sharded()
    shards = [data.function(rank, 2).repeat() for rank in range(2)]
    joint = tf.data.Dataset.zip(tuple(shards)).map(
        lambda *parts: tuple(tf.concat(leaves, 0) for leaves in zip(*parts, strict=True))
    )
    trainer = cases.made(None, **cases.CASES["sharded"])
    trainer.fit(joint, steps=cases.UPDATES, log_every=10, progress=False)
    for index, variable in enumerate(trainer.model.variables):
        np.testing.assert_allclose(first[f"weight{index}"], variable.numpy(), rtol=0, atol=1e-6)


@pytest.mark.long
def test_tensorflow_can_send_instead(tmp_path):
    first, second = processes.run_workers("by tensorflow", tmp_path)
    assert_equal(first, second)
    assert not first["connections"] and not second["connections"]
    trainer = cases.made(None, **cases.CASES["by tensorflow"])
    trainer.fit(cases.shuffled(), steps=cases.UPDATES, log_every=10, progress=False)
    for index, variable in enumerate(trainer.model.variables):
        np.testing.assert_allclose(first[f"weight{index}"], variable.numpy(), rtol=0, atol=1e-6)


@pytest.mark.long
def test_workers_that_would_send_in_different_ways_are_refused(tmp_path):
    with processes.started([processes.worker("differing", tmp_path)] * 2, tmp_path) as both:
        codes = processes.wait(both)
    assert codes[0] not in (0, None, joining.LOST) and codes[1] not in (0, None, joining.LOST)
    for rank, own in enumerate(("auto", "tensorflow")):
        told = rf"The workers differ in communication: workers \[1\] .* on worker {rank} .* it is '{own}'"
        assert re.search(told, processes.log(tmp_path, rank)), processes.log(tmp_path, rank)[-2000:]


@pytest.mark.long
def test_rounded_gradients_stay_near_one_device_and_equal_between_workers(tmp_path):
    first, second = processes.run_workers("bfloat16", tmp_path)
    assert_equal(first, second)
    trainer = cases.made(None, **cases.CASES["bfloat16"])  # alone, nothing is sent and nothing rounded
    trainer.fit(cases.shuffled(), steps=cases.UPDATES, log_every=10, progress=False)
    gaps = [np.abs(first[f"weight{i}"] - v.numpy()).max() for i, v in enumerate(trainer.model.variables)]
    assert 1e-6 < max(gaps) < 0.01, gaps  # 40 updates of Adam moved the weights by up to 0.12


@pytest.mark.long
def test_indexed_data_resume_with_more_and_fewer_workers(tmp_path):
    """On one device up to step 9, with three workers to 20, with two to the end; off the boundary of a pass."""
    expected, _ = by_index_on_one_device(tmp_path / "whole")
    by_index_on_one_device(tmp_path / "run", steps=9)
    processes.run_workers("indexed", tmp_path, steps=20, count=3)
    first, second = processes.run_workers("indexed", tmp_path, count=2)
    assert_equal(first, second)
    assert_equal(expected, first, 1e-6)
    assert [step for step, _ in read_events(tmp_path / "run" / "train")] == [0, 9, 10, 20, 30, 40]


@pytest.mark.long
@pytest.mark.parametrize("victim, fault", [(1, "SIGKILL"), (0, "SIGKILL"), (1, "SIGSTOP"), (0, "SIGSTOP")])
def test_the_survivor_of_a_loss_ends_and_a_new_start_is_bit_equal(victim, fault, tmp_path):
    """With dropout, BatchNorm, averages, accumulation, clipping and a shuffle."""
    whole = processes.run_workers("everything", tmp_path / "whole")[0]
    path = tmp_path / "lost"
    path.mkdir()
    survivor = 1 - victim
    with processes.started([processes.worker("everything", path)] * 2, path, TEST_PAUSE="0.2") as both:
        processes.until_step(path, 12, both)
        os.kill(both[victim].pid, getattr(signal, fault))
        begun = time.monotonic()
        code = processes.wait([both[survivor]], 60)[0]
        seconds = time.monotonic() - begun
    print(f"{fault} of worker {victim}: the other ended after {seconds:.1f} s with code {code}", file=sys.stderr)
    assert code == joining.LOST and seconds <= (10 if fault == "SIGKILL" else 30)
    told = (
        rf"worker {survivor} of 2 \(localhost:\d+\) has lost another worker after step 1\d. Start all workers again .*"
    )
    assert re.search(told + r"at the checkpoint of step (7|14)\.", processes.log(path, survivor))
    again = processes.run_workers("everything", path)
    assert_equal(whole, again[0])
    assert_equal(whole, again[1])


@pytest.mark.long
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_a_worker_is_lost_while_another_waits_for_its_gradients(fault, tmp_path):
    """In an exchange, where TensorFlow notices nothing: a closed connection tells, or silence of the heartbeat."""
    with processes.started([processes.worker("waiting", tmp_path)] * 2, tmp_path) as both:
        end = time.monotonic() + processes.LIMIT
        while not (tmp_path / "hangs").exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(3)  # the first worker uses what the second one had made before
        assert processes.wait(both, 0) == [None, None]
        os.kill(both[1].pid, getattr(signal, fault))
        begun = time.monotonic()
        code = processes.wait(both[:1], 60)[0]
        seconds = time.monotonic() - begun
    print(f"{fault} in an exchange: the other ended after {seconds:.1f} s with code {code}", file=sys.stderr)
    log = processes.log(tmp_path, 0)
    assert code == joining.LOST and seconds <= (10 if fault == "SIGKILL" else 30), log[-2000:]
    told = r"worker 0 of 2 \(localhost:\d+\) has lost another worker after step \d+\. Start all workers again .*"
    assert re.search(told + r"at the checkpoint of step 7\. Lost between worker 0 and 1", log), log[-2000:]


@pytest.mark.long
def test_a_worker_whose_main_thread_hangs_is_named_and_given_up(tmp_path):
    """In its data function; its heartbeat answers."""
    limits = {"LOOPTAPE_HEARTBEAT_SECONDS": "3", "LOOPTAPE_HANG_SECONDS": "8"}
    with processes.started([processes.worker("waiting", tmp_path)] * 2, tmp_path, **limits) as both:
        assert processes.wait(both[:1]) == [joining.LOST], processes.log(tmp_path, 0)[-2000:]
    log = processes.log(tmp_path, 0)
    assert (tmp_path / "hangs").exists()
    assert re.search(
        r"worker 0 has waited \d s for workers \[1\], which are alive but late; it gives up after 8 s", log
    )
    told = r"worker 0 of 2 \(localhost:\d+\) has lost another worker after step \d+\. Start all workers again .*"
    assert re.search(told + r"has waited for workers \[1\] for 8 s, in which they answered but did nothing", log), log


@pytest.mark.long
def test_sigterm_to_one_worker_stops_all_at_one_step(tmp_path):
    whole = processes.run_workers("everything", tmp_path / "whole")[0]
    path = tmp_path / "stopped"
    path.mkdir()
    with processes.started([processes.worker("everything", path)] * 2, path, TEST_PAUSE="0.1") as both:
        processes.until_step(path, 10, both)
        os.kill(both[1].pid, signal.SIGTERM)
        assert processes.wait(both, 60) == [143, 143]
    assert_equal(whole, processes.run_workers("everything", path)[0])


@pytest.mark.long
def test_a_nan_on_the_second_worker_only_is_skipped_by_both(tmp_path):
    """Two updates of six: nothing of them is in the weights, the statistics or the optimizer of either."""
    first, second = processes.run_workers("nan", tmp_path, steps=6)
    assert_equal(first, second)
    assert (first["step"], first["skipped"], second["skipped"], first["optimizer0"]) == (6, 2, 2, 4)
    assert all(np.isfinite(value).all() for name, value in first.items() if name.startswith("weight"))


@pytest.mark.long
@pytest.mark.parametrize("case", ["other data", "unseeded", "other index"])
def test_workers_with_other_data_are_refused(case, tmp_path):
    with processes.started([processes.worker(case, tmp_path)] * 2, tmp_path) as both:
        codes = processes.wait(both)
    assert 0 not in codes and None not in codes
    assert "The workers differ in data: workers [1] differ from worker 0" in processes.log(tmp_path, 1)
    assert "seed every shuffle" in processes.log(tmp_path, 1)
    assert not (tmp_path / "run" / "checkpoints").exists() or not os.listdir(tmp_path / "run" / "checkpoints")


@pytest.mark.long
@pytest.mark.parametrize(
    "case, told",
    [
        (
            "ends earlier",
            r"The workers differ in the number of batches: the data of some end before those of the others",
        ),
        ("evaluates fewer", r"The workers differ in the number of batches: the data of some end before"),
        ("other example", r"The workers differ in data: workers \[1\] "),
        ("evaluates other", r"The workers differ in data to evaluate: workers \[1\] "),
        ("evaluates other later", r"The workers differ in data to evaluate: workers \[1\] "),
        ("evaluates other by index", r"The workers differ in data to evaluate: workers \[1\] "),
    ],
)
def test_workers_whose_data_differ_later_or_in_number_are_refused(case, told, tmp_path):
    with processes.started([processes.worker(case, tmp_path)] * 2, tmp_path) as both:
        codes = processes.wait(both, 120)
    assert codes[0] not in (0, None, joining.LOST) and codes[1] not in (0, None, joining.LOST), codes
    for rank in range(2):
        assert re.search(told, processes.log(tmp_path, rank)), processes.log(tmp_path, rank)[-2000:]


def experiment(*flags):
    return [
        *(sys.executable, "-m", "experiments.adding_problem", "--strategy=multi_worker", "--steps=2", "--length=4"),
        *("--units=2", "--jit_compile=false", "--probe_every=0", "--eval_examples=10", *flags),
    ]


def test_workers_with_different_flags_are_refused(tmp_path):
    commands = [experiment("--seed=0"), experiment("--seed=1")]
    with processes.started(commands, tmp_path) as both:
        assert processes.wait(both) == [2, 2]
    for rank in range(2):
        assert "different flags: worker 0 has --seed=0, worker 1 has --seed=1. Start all" in processes.log(
            tmp_path, rank
        )


def test_the_installed_tensorflow_lets_losses_be_noticed_sooner():
    """By a private name: without it, survivors of a loss end later than the guide says."""
    present = context.context()
    with joining._losses_noticed_within(2.5):
        assert present.configure_coordination_service.keywords == {"heartbeat_timeout_in_ms": 2500}
    assert present.configure_coordination_service.__func__ is context.Context.configure_coordination_service

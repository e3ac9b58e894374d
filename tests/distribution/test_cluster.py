"""The launcher, with workers that are small programs: what it sets, passes on, kills and starts again."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from looptape.experiments.cluster import joining, local, tf_config
from looptape.experiments.launch.verify_resume import compare
from looptape.trainer.distribution.workers import WorkerLost
from tests.distribution import processes

ALIVE = "import os, sys, time, json, signal; open(os.environ['LOOPTAPE_HEARTBEAT'], 'w').write('7'); "
RANK = "rank = json.loads(os.environ['TF_CONFIG'])['task']['index']; "


def launch(*options, code, **popen):
    command = [sys.executable, "-m", "looptape", "cluster", *options, "--", sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=processes.variables(), **pipes, **popen)


def ended(process, limit=200):
    """(exit code, standard output, standard error); the launcher is killed if it does not end."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def test_every_worker_gets_its_place_and_its_log(tmp_path):
    code = ALIVE + "print(os.environ['TF_CONFIG'])"
    status, out, err = ended(launch("--workers=3", f"--logs={tmp_path}", code=code))
    assert status == 0, err
    configs = [json.loads((tmp_path / f"worker-{rank}.log").read_text()) for rank in range(3)]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert all(config["cluster"]["worker"] == addresses for config in configs) and len(set(addresses)) == 3
    assert json.loads(out) == configs[0]  # the chief's words are shown, the others' are kept only


def test_a_loss_starts_all_again_and_names_rank_and_step(tmp_path):
    """Worker 1 kills itself at the first start; worker 0, which waits for it and ignores SIGTERM, is killed."""
    code = (
        ALIVE
        + RANK
        + f"mark = {str(tmp_path / 'mark')!r}; first = not os.path.exists(mark); "
        + "rank == 1 and first and (open(mark, 'w').close(), os.kill(os.getpid(), 9)); "
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300 if first else 0); print('done', rank)"
    )
    begun = time.monotonic()
    options = ("--workers=2", "--grace_seconds=1", f"--logs={tmp_path}")
    status, out, err = ended(launch(*options, code=code))
    assert status == 0, err
    assert time.monotonic() - begun < 150, "worker 0 was killed, not waited for"
    assert "worker 1 ended after step 7 with code 137 (SIGKILL)" in err
    assert "restarting all workers (1 of at most 3)" in err
    assert "done 0" in out and "done 1" in (tmp_path / "worker-1.log").read_text()


def test_ports_are_kept_for_the_workers():
    """Nobody gets them before a worker that shares them, as TensorFlow does with TF_GRPC_REUSE_PORT, and it can."""
    code = (
        ALIVE
        + RANK
        + "import errno, socket; assert os.environ['TF_GRPC_REUSE_PORT'] == 'true'; "
        + "port = int(json.loads(os.environ['TF_CONFIG'])['cluster']['worker'][rank].split(':')[1]); "
        + "assert socket.socket().connect_ex(('localhost', port)) == errno.ECONNREFUSED; "
        + "assert isinstance(stolen(socket, port), OSError); "
        + "own = socket.socket(); own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); "
        + "own.bind(('', port)); own.listen(); socket.create_connection(('localhost', port)); print('connected')"
    )
    thief = (
        "def stolen(socket, port):\n"
        "    try:\n"
        "        socket.socket().bind(('', port))\n"
        "    except OSError as error:\n"
        "        return error\n"
    )
    status, out, err = ended(launch("--workers=2", "--restarts=0", code=thief + code))
    assert status == 0 and "connected" in out, out + err


def test_new_starts_have_a_limit():
    # Both end by themselves, in whatever order: who is still there after the grace is killed, and counts as lost.
    status, _, err = ended(launch("--workers=2", "--restarts=2", "--grace_seconds=20", code=ALIVE + "sys.exit(3)"))
    assert status == 3 and err.count("restarting all workers") == 2 and "gave up after 2 restarts" in err


def test_wrong_flags_are_not_tried_again():
    status, _, err = ended(launch("--workers=2", code=ALIVE + "print('--x is no flag'); sys.exit(2)"))
    assert status == 2 and "restarting" not in err and "say why" in err


def test_a_worker_that_does_not_find_the_others_ends_the_start_at_its_deadline():
    code = (
        "import os, json, time; " + RANK + "rank == 0 and open(os.environ['LOOPTAPE_HEARTBEAT'], 'w'); time.sleep(300)"
    )
    begun = time.monotonic()
    status, _, err = ended(launch("--workers=2", "--start_seconds=2", "--restarts=0", code=code))
    assert status in (75, 137) and 2 <= time.monotonic() - begun < 150
    # Worker 0 may be slow to start, too; the seconds are those at which somebody looked.
    assert re.search(r"workers \[(0, )?1\] had not connected to the others after \d+ s", err), err


def test_workers_that_hang_are_killed():
    code = ALIVE + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    status, _, err = ended(launch("--workers=2", "--hang_seconds=1", "--restarts=0", code=code))
    assert status in (75, 137) and "worker 0 runs, after step 7, but gave no sign of life for 1 s" in err


@pytest.mark.parametrize("stubborn", [False, True])
def test_signals_go_to_all_workers(tmp_path, stubborn):
    answer = "signal.SIG_IGN" if stubborn else "lambda *_: (print('stopped', flush=True), sys.exit(143))"
    code = ALIVE + f"signal.signal(signal.SIGTERM, {answer}); print('ready', flush=True); time.sleep(300)"
    process = launch("--workers=2", "--grace_seconds=1", f"--logs={tmp_path}", code=code)
    logs = [tmp_path / f"worker-{rank}.log" for rank in range(2)]
    end = time.monotonic() + 200
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 143 and "restarting" not in err
    assert [("stopped" in log.read_text()) for log in logs] == [not stubborn] * 2
    assert ("1 s after SIGTERM to all" in err) == stubborn


WRONG = {
    "no command": (["--workers=2"], "there is no command; write it after --"),
    "an empty command": (["--workers=2", "--"], "the command after -- is empty"),
    "no workers": (["--workers=0", "--", "true"], "'0' was given; it must be a number of at least 1"),
    "words": (["--workers=two", "--", "true"], "'two' was given; it must be a number of at least 1"),
    "how many": (["--", "true"], "required: --workers"),
    "restarts": (["--workers=2", "--restarts=-1", "--", "true"], "at least 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_of_the_launcher(name, capsys):
    arguments, message = WRONG[name]
    with pytest.raises(SystemExit) as error:
        local.parse(arguments)
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_a_command_that_is_not_there(capsys, tmp_path):
    kept = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        options, command = local.parse(["--workers=2", f"--logs={tmp_path}", "--", "/nowhere/python"])
        assert local.run(options, command) == 127
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), kept, strict=True):
            signal.signal(number, handler)
    assert "'/nowhere/python' cannot be started" in capsys.readouterr().err


def test_an_experiment_gets_the_strategy_unless_it_has_one():
    command = ["python", "-m", "experiments.adding_problem"]
    assert local.parse(["--workers=2", "--", *command])[1] == [*command, "--strategy=multi_worker"]
    own = [*command, "--strategy=none"]
    assert local.parse(["--workers=2", "--", *own])[1] == own


GOOD = tf_config.make(["a:1", "b:2"], 1)
MALFORMED = {
    "not set": (None, "TF_CONFIG is not set"),
    "not JSON": ("{cluster: 3", "cannot be read .*it must be like"),
    "no task": ('{"cluster": {"worker": ["a:1"]}}', "KeyError: 'task'"),
    "a list": ("[1]", "cannot be read"),
    "no port": (GOOD.replace("a:1", "a"), "addresses of 'worker'; it must be a list of 'host:port'"),
    "a text": ('{"cluster": {"worker": "a:1"}, "task": {"type": "worker", "index": 0}}', "must be a list"),
    "an index too large": (GOOD.replace('"index": 1', '"index": 2'), "'worker' number 2, .*Number the workers from 0"),
    "a parameter server": (GOOD.replace('"worker": [', '"ps": ["c:1"], "worker": ['), r"kinds \['ps'\]"),
    "an address twice": (GOOD.replace("b:2", "a:1"), "an address twice"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_tf_config(name):
    text, message = MALFORMED[name]
    with pytest.raises(ValueError, match=message):
        tf_config.check(text)


def test_tf_config_is_read_as_tensorflow_counts():
    assert tf_config.check(GOOD) == (2, 1)
    with_chief = {"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}
    assert tf_config.check(json.dumps(with_chief)) == (2, 1)


def test_an_experiment_says_what_is_wrong_with_tf_config(tmp_path):
    command = [sys.executable, "-m", "experiments.adding_problem", "--strategy=multi_worker"]
    environment = {**processes.variables(), "TF_CONFIG": "{}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert "adding_problem: `strategy` is multi_worker: TF_CONFIG is '{}', which cannot be read" in done.stderr


ENDS = {
    "the body": (None, 0, ""),
    "a loss": (WorkerLost("has lost another"), 75, "program.py: has lost another"),
    "a stop": (SystemExit(143), 143, ""),
    "an exit": (SystemExit(), 0, ""),
    "a text": (SystemExit("no such file"), 1, "no such file"),
    "Ctrl-C": (KeyboardInterrupt(), 130, ""),
    "an error": (ValueError("a reason"), 1, "ValueError: a reason"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_of_ones_own_ends_with_the_codes_of_an_experiment(name, monkeypatch, capsys):
    class Left(Exception):
        """In place of the end of this process."""

    def leave(code):
        raise Left(code)

    error, code, told = ENDS[name]
    monkeypatch.setenv("TF_CONFIG", GOOD)
    monkeypatch.setattr(joining, "join", lambda: "the strategy")
    monkeypatch.setattr(joining, "_PULL_SECONDS", 0.0)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["/somewhere/program.py"])
    with pytest.raises(Left) as left, joining.joined() as strategy:
        assert strategy == "the strategy"
        if error is not None:
            raise error
    assert left.value.args == (code,)
    err = capsys.readouterr().err
    assert told in err and bool(told) == bool(err)


EXPERIMENT = [sys.executable, "-m", "experiments.adding_problem", "--strategy=multi_worker"]


@pytest.mark.long
@pytest.mark.parametrize("program", ["experiment", "own"])
def test_a_missing_worker_ends_the_wait(program, tmp_path):
    """Without the launcher, too: neither an experiment nor a program of one's own waits for ever."""
    command = EXPERIMENT if program == "experiment" else processes.worker("sgd", tmp_path)
    with processes.started([command, ["sleep", "600"]], tmp_path, LOOPTAPE_START_SECONDS="8") as both:
        begun = time.monotonic()
        assert processes.wait(both[:1], 90)[0] not in (None, 0)
        assert time.monotonic() - begun < 60
    assert "worker 0 of 2 waits up to 8 s for the others" in processes.log(tmp_path, 0)


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_of_an_experiment_is_started_again_and_the_result_is_bit_equal(victim, tmp_path):
    flags = (
        *("--steps=40", "--length=6", "--units=4", "--jit_compile=false", "--probe_every=0", "--eval_examples=20"),
        *("--checkpoint_every=5", "--log_every=10", "--eval_every=20"),
    )

    def run(name, kill):
        logs = tmp_path / name / "logs"
        command = [sys.executable, "-m", "looptape", "cluster", "--workers=2", f"--logs={logs}", "--"]
        command += [sys.executable, "-m", "experiments.adding_problem", *flags, f"--workdir={tmp_path / name / 'run'}"]
        process = subprocess.Popen(command, env=processes.variables(), stderr=subprocess.PIPE, text=True)
        if kill:
            _kill_after(process, logs / f".heartbeat-{victim}", victim, 12)
        status, _, err = ended(process, 300)
        assert status == 0, err
        return err

    run("whole", False)
    assert "restarting all workers (1 of at most 3)" in run("killed", True)
    assert compare(*(str(tmp_path / name / "run" / "checkpoints") for name in ("whole", "killed"))) == []


def _kill_after(launcher, heartbeat, rank, step):
    end = time.monotonic() + 200
    while time.monotonic() < end and launcher.poll() is None:
        text = heartbeat.read_text() if heartbeat.exists() else ""
        if text.isdigit() and int(text) >= step:
            break
        time.sleep(0.01)
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                mine = str(heartbeat).encode() in file.read()
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if mine and parent == launcher.pid:
            os.kill(int(name), signal.SIGKILL)
            return
    raise AssertionError("no process to kill")

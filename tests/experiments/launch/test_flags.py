"""Flags: made from a config, parsed, shown by --help."""

import importlib
import os
import sys

import pytest
from absl import flags

from looptape.experiments import adding_problem
from looptape.experiments.launch import flags as launch_flags
from tests.experiments.line import Config

GOLDEN = os.path.join(os.path.dirname(__file__), "adding_problem_help.txt")


def parse(*arguments, config_class=Config):
    values = flags.FlagValues()
    launch_flags.define(config_class, "line", "A line.", values)
    return launch_flags.parse_config(config_class, ["line", *arguments], values)


def test_without_flags_the_defaults_hold():
    assert parse() == Config()


def test_flags_become_a_config():
    config = parse(
        "--slope=-2.5", "--steps=1e2", "--clip_norm=none", "--jit_compile", "--nodeterministic", "--seed", "3"
    )
    assert config == Config(slope=-2.5, steps=100, clip_norm=None, jit_compile=True, seed=3)


def test_round_trip_through_a_flag_file(tmp_path):
    config = Config(
        slope=0.1 + 0.2,
        ema_decay=0.99,
        loss_weights="error=0.5",
        learning_rate=1e-20,
        eval_every=None,
        jit_compile=True,
        init_from="some where",
        combiner="gradnorm",
        combiner_args="alpha=0.5",
    )
    path = tmp_path / "flags.txt"
    path.write_text("\n".join(launch_flags.flag_lines(config)))
    assert parse(f"--flagfile={path}") == config
    assert parse(f"--flagfile={path}", "--slope=1.0").slope == 1.0


def test_a_flag_file_leaves_out_where_and_how_a_run_is_kept():
    lines = launch_flags.flag_lines(Config(workdir="here", print_config=True, accept_changes=True))
    assert not [line for line in lines if line.startswith(("--workdir", "--print_config", "--accept_changes"))]
    assert "--steps=4" in lines


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--slop=1", "--slop is not a flag; did you mean --slope? --help lists them all."),
        ("--lerning_rate=1", "--lerning_rate is not a flag; did you mean --learning_rate? --help lists them all."),
        ("--xyzzy=1", "--xyzzy is not a flag; --help lists them all."),
        ("--slope=11", "`slope` is 11.0; it must be at most 10.0. Its default is 3.0."),
        ("--steps=many", "`steps` is 'many'; it must be an integer (at least 1). Its default is 4."),
        ("--optimizer=adan", "`optimizer` is 'adan'; it must be one of adam, adamw"),
        ("--jit_compile=perhaps", "jit_compile"),
        ("--loggers=csv,jsnl", "'jsnl' is not a logger. Use some of csv, jsonl, mlflow, wandb, separated by commas."),
        ("more", "['more'] was given without a flag; an experiment accepts only flags. Write --name=value."),
    ],
)
def test_what_cannot_be_is_answered(argument, message):
    with pytest.raises(flags.Error) as error:
        parse(argument)
    assert message in str(error.value)


def test_help_is_as_it_was():
    """Golden output. To renew it: `looptape run adding_problem --help` in a terminal of 80 columns."""
    shown = launch_flags.help_text(adding_problem.Config, "adding_problem", adding_problem.__doc__, width=80)
    with open(GOLDEN) as file:
        assert shown + "\n" == file.read()


def test_help_lists_own_flags_apart_from_common_ones():
    shown = launch_flags.help_text(Config, "line", "A line.", width=100)
    own, _, common = shown.partition("The run:")
    assert "--slope=3.0" in own and "--steps" not in own
    assert "--steps=4" in common and "--slope" not in common
    titles = [line for line in common.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["The update:", "The machine:", "Logging, evaluation, checkpoints:", "Debugging:"]


@pytest.mark.parametrize("name", ["adding_problem", "helmholtz", "gan", "char_lm"])
def test_help_fits_80_columns(name):
    module = importlib.import_module(f"looptape.experiments.{name}")
    shown = launch_flags.help_text(module.Config, name, module.__doc__)
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("flag", ["--help", "--helpshort"])
def test_help_flags_print_and_stop(flag, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(flag)
    assert stop.value.code == 0
    assert "Flags of line:" in capsys.readouterr().out


def test_flags_are_key_flags_and_made_only_at_launch():
    values = flags.FlagValues()
    assert "slope" not in flags.FLAGS and "slope" not in values
    launch_flags.define(Config, "line", "A line.", values)
    key = {flag.name for flag in values.get_key_flags_for_module(sys.argv[0])}
    assert {"slope", "steps", "workdir"} <= key
    assert "slope" not in flags.FLAGS


def test_two_experiments_can_be_imported_and_defined_apart():
    first, second = flags.FlagValues(), flags.FlagValues()
    launch_flags.define(Config, "line", "", first)
    launch_flags.define(adding_problem.Config, "adding_problem", "", second)
    assert "slope" in first and "slope" not in second

"""The command `looptape`: what each word does, and what is answered to a wrong one."""

import contextlib
import email.message
import importlib.metadata
import os
import subprocess
import sys
import webbrowser

import pytest

from looptape import _command
from looptape.experiments.tools import listing
from tests.experiments.line import REPOSITORY, own_project

MAIN = '\nif __name__ == "__main__":\n    launch.main(Config, build)\n'
COMPLETE = '"""Mine."""\nclass Config: ...\ndef build(config): ...\n' + MAIN


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *arguments):
    assert _command.main(list(arguments)) == 2
    return capsys.readouterr().err


def test_it_explains_itself(capsys):
    for arguments in ([], ["--help"]):
        assert _command.main(arguments) == 0
        shown = capsys.readouterr().out
        assert all(f"looptape {name}" in shown for name in _command._COMMANDS)


@pytest.mark.parametrize("name", _command._COMMANDS)
def test_every_command_has_help(name):
    """By a process, because absl and argparse end it; none of them needs TensorFlow for it."""
    program = (
        "import sys\nsys.modules['tensorflow'] = None\n"
        f"from looptape import _command\nsys.exit(_command.main([{name!r}, '--help']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and done.stderr == ""  # absl's --help ends with 1
    assert f"looptape {name}" in done.stdout


def test_misspelt_words_get_the_nearest(capsys, here):
    assert "'swep' is not a command; it must be one of list, run" in (said := refused(capsys, "swep"))
    assert "Did you mean `looptape sweep`?" in said
    assert "Did you mean `looptape run mine.py`?" in refused(capsys, "mine.py")
    assert "Did you mean 'adding_problem'?" in refused(capsys, "run", "adding_problm")
    (here / "mine.py").write_text(COMPLETE)
    assert "Did you mean 'mine.py'?" in refused(capsys, "run", "mien.py")
    assert "flags come after it" in refused(capsys, "run", "--steps=3")
    assert "takes one directory" in refused(capsys, "list", "nowhere")


def test_the_list_has_the_files_of_this_directory(capsys, here):
    (here / "mine.py").write_text(COMPLETE)
    (here / "broken.py").write_text("def build(:\n")
    assert _command.main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "In this directory:\n  looptape run mine.py" in shown and "looptape run adding_problem" in shown
    assert "broken" not in shown


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.py",
            "def build(config): ...\n" + MAIN,
            "'a.py' has no `Config`; an experiment needs one for its flags; write",
        ),
        ("a.py", "class Config: ...\n" + MAIN, "'a.py' has no `build`; an experiment needs one for the trainer and"),
        ("a.py", "class Config: ...\ndef build(config): ...\n", "does nothing when it is run; it must launch itself"),
        ("a.py", "def build(:\n", "is not valid Python: invalid syntax"),
        ("a.txt", COMPLETE, "'a.txt' is not a Python file; an experiment is a file that ends in .py. Rename it"),
        ("b/a.py", COMPLETE, "'a.py' does not exist; an experiment is one Python file. Write one with `looptape new"),
        ("a.py/b.py", COMPLETE, "'a.py' is a directory; an experiment is one Python file"),
        ("a", COMPLETE, "'a' is not a Python file"),
    ],
)
def test_what_is_not_an_experiment_is_answered(name, text, message, here, capsys):
    path = here / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    target = "a" if name == "a" else "a.txt" if name == "a.txt" else "a.py"
    assert message in refused(capsys, "run", target)


def test_a_file_named_looptape_is_answered(here, capsys):
    (here / "mine.py").write_text(COMPLETE)
    (here / "looptape.py").write_text("")
    assert "looptape.py has the name of this package; experiments next to it" in refused(capsys, "run", "mine.py")
    assert "hides this package; choose a name" in refused(capsys, "new", "looptape.py")


def test_experiments_are_found_by_name_path_and_module(here):
    (here / "project").mkdir()
    (here / "project" / "mine.py").write_text(COMPLETE)
    assert listing.find("gan").command[1:] == ["-m", "looptape.experiments.gan"]
    assert listing.find("project/mine.py").command[1:] == ["project/mine.py"]
    found = listing.find("project.mine")
    assert found.command[1:] == ["-m", "project.mine"] and found.name == "mine"


def test_without_tensorflow_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(sys, "argv", ["looptape"])
    assert "Looptape is not fully installed here. Reinstall it with `pip install looptape`." in refused(
        capsys, "run", "adding_problem"
    )


def test_errors_of_an_experiment_are_shown_as_they_are(here):
    (here / "mine.py").write_text("import looptape.nonsense\n" + COMPLETE)
    program = "import sys\nfrom looptape import _command\nsys.exit(_command.main(['run', 'mine.py']))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=own_project(here), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.endswith("No module named 'looptape.nonsense'\n")


def test_a_new_experiment_is_not_written_over_another_file(here, capsys):
    assert _command.main(["new", "mine.py"]) == 0
    text = (here / "mine.py").read_text()
    assert "'mine.py' already exists and is not overwritten. Choose" in refused(capsys, "new", "mine.py")
    assert (here / "mine.py").read_text() == text and max(map(len, text.splitlines())) <= 120
    assert "does not end in .py; an experiment is a Python file" in refused(capsys, "new", "mine")
    assert "is not a name that Python can import" in refused(capsys, "new", "my-file.py")
    assert "takes one path" in refused(capsys, "new")


@pytest.mark.long
def test_a_new_experiment_is_swept_run_as_a_module_and_listed(tmp_path):
    (tmp_path / "project").mkdir()
    environment = own_project(tmp_path)

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run("-m", "looptape", "new", "project/mine.py")
    assert "--units=3\n" in run("-m", "project.mine", "--print_config", "--units=3")
    sweep = ["--experiment=project.mine", "--workdir=swept", "--grid=units=3,4", "--metric=error", "--jobs=2"]
    shown = run("-m", "looptape", "sweep", *sweep, "--", "--steps=4", "--length=3")
    assert shown.count("  finished\n") == 2 and "units=3" in shown
    assert sorted(os.listdir(tmp_path / "swept")) == ["units=3", "units=4"]
    run("-m", "looptape", "checkpoints", "swept/units=3")


def test_docs_opens_the_site_or_says_where_the_guides_are(capsys, here, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(_command, "__file__", str(here / "looptape" / "_command.py"))
    for headers, address in (
        ([], "python -m pydoc looptape"),
        ([("Home-page", "https://a.org")], "They are at https://a.org."),
        ([("Project-URL", "Source, https://b.org"), ("Project-URL", "Documentation, https://c.org")], "https://c.org."),
    ):
        package = email.message.Message()
        for name, value in headers:
            package[name] = value
        monkeypatch.setattr(importlib.metadata, "metadata", lambda name, package=package: package)
        assert _command.main(["docs"]) == 0 and not opened
        shown = capsys.readouterr().out
        assert "does not include the guides" in shown and address in shown
    assert "so they have no path. Read them at https://c.org" in refused(capsys, "docs", "--path")
    assert "'--open' was given; `looptape docs` takes only --path" in refused(capsys, "docs", "--open")
    (here / "docs").mkdir()
    (here / "docs" / "first-run.md").touch()
    assert _command.main(["docs"]) == 0 and not opened
    assert capsys.readouterr().out.startswith(f"{here / 'docs'}\n")
    (here / "build" / "site").mkdir(parents=True)
    site = here / "build" / "site" / "index.html"
    site.touch()
    assert _command.main(["docs", "--path"]) == 0 and not opened
    assert capsys.readouterr().out == f"{site}\n"
    assert _command.main(["docs"]) == 0 and opened == [site.as_uri()]


@pytest.mark.parametrize("command", ["sweep", "compare-combiners", "cluster", "ray"])
def test_help_of_commands_with_processes_fits_into_80_columns(command):
    line = [sys.executable, "-m", "looptape", command, "--help"]
    shown = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}).stdout
    assert f"looptape {command}" in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("command", [[], ["list"], ["checkpoints"], ["report"], ["export"], ["docs"], ["new"]])
def test_help_fits_into_80_columns(command, capsys):
    with contextlib.suppress(SystemExit):
        _command.main([*command, "--help"])
    shown = capsys.readouterr().out
    assert "looptape" in shown and max(map(len, shown.splitlines())) <= 80

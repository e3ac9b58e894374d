"""What the launchers of several workers take after `--`: an experiment by name, path or module, or a command."""

import pytest

from looptape.experiments.cluster import local, ray

COMPLETE = """class Config: ...
def build(config): ...
if __name__ == "__main__":
    launch.main(Config, build)
"""


def test_launchers_take_experiments_and_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(COMPLETE)
    strategy = "--strategy=multi_worker"

    def command(*arguments):
        return local.parse(["--workers=2", "--", *arguments])[1]

    assert command("gan", "--steps=1")[1:] == ["-m", "looptape.experiments.gan", "--steps=1", strategy]
    assert command("mine.py")[1:] == ["mine.py", strategy]
    assert command("python", "mine.py") == ["python", "mine.py", strategy]
    assert command("python", "-c", "1") == ["python", "-c", "1"]
    assert command("sleep", "1") == ["sleep", "1"]
    assert ray.command(["mine.py", "--steps=2"])[1:] == ["mine.py", "--steps=2", strategy]
    for main in (local.parse, ray.main):
        with pytest.raises(SystemExit) as stop:
            main(["--workers=2", "--", "adding_problm"])
        assert stop.value.code == 2 and "Did you mean 'adding_problem'?" in capsys.readouterr().err

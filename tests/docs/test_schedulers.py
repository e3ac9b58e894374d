"""The examples for schedulers in docs/scale-out.md, as far as they can be tried without a cluster."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from looptape.experiments.cluster import tf_config

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scale-out.md").read_text()
[SLURM] = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) if "SBATCH" in block]
[KUBERNETES] = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)


def executable(directory, name, text):
    path = directory / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def run_script(text, directory, **variables):
    """Runs a script with fakes for `looptape`, `scontrol` and `srun`. Returns what the fakes wrote."""
    executable(directory, "looptape", f'echo "$TF_CONFIG" >> {directory}/configs; echo "$@" >> {directory}/flags')
    executable(
        directory, "scontrol", f'[ "$1" = show ] && printf "n1\\nn2\\nn3\\nn4\\n" || echo "$@" >> {directory}/asked'
    )
    executable(directory, "srun", 'shift; for rank in 0 1 2 3; do SLURM_PROCID=$rank "$@" || exit $?; done')
    own = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", "-c", text], env=own, capture_output=True, text=True, check=False, timeout=30)
    read = lambda name: (directory / name).read_text().splitlines() if (directory / name).exists() else []  # noqa: E731
    return done, read("configs"), read("flags"), read("asked")


def test_slurm_gives_each_task_its_tf_config(tmp_path):
    subprocess.run(["bash", "-n"], input=SLURM, text=True, check=True)
    _, configs, flags, asked = run_script(SLURM, tmp_path, SLURM_JOB_NODELIST="n[1-4]", SLURM_JOB_ID="77")
    assert [tf_config.check(config) for config in configs] == [(4, rank) for rank in range(4)]
    assert json.loads(configs[2])["cluster"]["worker"] == ["n1:2222", "n2:2222", "n3:2222", "n4:2222"]
    assert all("--strategy=multi_worker" in line for line in flags) and not asked


def test_slurm_does_not_requeue_wrong_flags(tmp_path):
    wrong = SLURM.replace("exec looptape run", "exit 2; exec looptape run")
    _, _, _, asked = run_script(wrong, tmp_path, SLURM_JOB_NODELIST="n[1-4]", SLURM_JOB_ID="77")
    assert not asked


def test_slurm_requeues_a_job_that_failed(tmp_path):
    failing = SLURM.replace("exec looptape run", "false; exit 75; exec looptape run")
    _, configs, _, asked = run_script(failing, tmp_path, SLURM_JOB_NODELIST="n[1-4]", SLURM_JOB_ID="77")
    assert not configs and asked == ["requeue 77"]


def test_kubernetes_gives_each_pod_its_tf_config(tmp_path):
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(KUBERNETES)
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["completions"] == spec["parallelism"] == 2 and pod["restartPolicy"] == "Never"
    [rule] = spec["podFailurePolicy"]["rules"]  # needs `restartPolicy: Never`
    assert rule == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    found = []
    for index in range(spec["completions"]):
        directory = tmp_path / str(index)
        directory.mkdir()
        done, configs, _, _ = run_script(container["args"][0], directory, JOB_COMPLETION_INDEX=str(index))
        assert done.returncode == 0, done.stderr
        assert container["command"] == ["bash", "-c"]
        found.append("\n".join(configs))
    assert [tf_config.check(config) for config in found] == [(2, 0), (2, 1)]
    host = json.loads(found[0])["cluster"]["worker"][1]
    assert host == f"{job['metadata']['name']}-1.{pod['subdomain']}:2222"  # an indexed pod's name, in its subdomain

"""Which Ray a command joins, and that a dead address is found out within seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from outrider.cluster import local_ray
from outrider.config import EngineConfig
from outrider.errors import ConfigError
from outrider.tests.helpers.ports import free_port


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(local_ray, "_CONNECT_TIMEOUT_S", 0.3)


@pytest.fixture
def left_behind(monkeypatch):
    """What `ray start` wrote down as this machine's cluster."""

    def write(address: str | None) -> None:
        monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda _: address)

    return write


@pytest.fixture
def mute_port():
    """A port that takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_without_a_cluster_a_new_one_is_started(left_behind, monkeypatch):
    left_behind(None)
    assert local_ray.find_ray() is None
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert local_ray.find_ray() is None


FINDS = "import sys; from outrider.cluster.local_ray import find_ray; print(find_ray(), {})"


def test_ray_is_not_imported_where_none_was_left(tmp_path, monkeypatch):
    """Nor is one that was left missed: the file is where Ray looks for it."""
    from ray._common.utils import get_ray_address_file

    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
        assert str(local_ray._address_file()) == get_ray_address_file(None)
        monkeypatch.setenv(name, str(tmp_path))
        assert str(local_ray._address_file()) == get_ray_address_file(None)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    command = [sys.executable, "-c", FINDS.format("'ray' in sys.modules")]
    assert subprocess.check_output(command, text=True).split() == ["None", "False"]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")
    assert subprocess.check_output(command, text=True).split() == ["None", "True"]


def test_a_cluster_that_has_ended_is_not_joined(left_behind, monkeypatch):
    """Nothing is waited for where nothing listens any more."""
    monkeypatch.setattr(local_ray, "_answers", lambda address: pytest.fail("it was asked"))
    left_behind(f"127.0.0.1:{free_port()}")
    assert local_ray.find_ray() is None
    with pytest.raises(ConfigError, match="address: no Ray is running on this machine"):
        local_ray.find_ray("auto")


def test_a_dead_address_is_an_error(mute_port, monkeypatch):
    for port in (free_port(), mute_port):
        with pytest.raises(ConfigError, match=f"address: no Ray answers at 127.0.0.1:{port}"):
            local_ray.find_ray(f"127.0.0.1:{port}")
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"address: no Ray answers at 127.0.0.1:{port}"):
            local_ray.find_ray()
    with pytest.raises(ConfigError, match="not host:port"):
        local_ray.find_ray("nonsense")


def test_whatever_ray_raises_becomes_one_message(monkeypatch, config):
    import ray

    def init(**options):
        raise Exception("Failed to start\n  the GCS")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ConfigError, match="^address: cannot start Ray on this machine: Failed to "):
        local_ray.start_ray(config)


JOIN = """
import ray
from outrider import LLM
with LLM({model!r}, num_kv_blocks=64) as llm:
    llm.generate([[1, 2]], use_tqdm=False)
    print(ray.get_runtime_context().gcs_address)
"""


def test_a_cluster_that_ends_while_it_is_asked_says_nothing(monkeypatch):
    import ray
    from ray.exceptions import LocalRayletDiedError

    def fail(*_, **__):
        raise LocalRayletDiedError

    monkeypatch.setattr(local_ray, "_joined", lambda _: nullcontext())
    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: Mock())
    monkeypatch.setattr(ray, "get", fail)
    assert local_ray.worker_niceness("10.0.0.1:6379") == 0


@pytest.mark.ray
@pytest.mark.slow
def test_a_running_cluster_is_joined(monkeypatch):
    """`generate` and `LLM` beside `ray start --head`, without an address; the cluster lives on."""
    import outrider

    model = str(Path(outrider.__file__).resolve().parent / "demo" / "models" / "draft")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="or", dir="/tmp") as folder:  # short: it names sockets
        # A folder of its own, so that it is not what other programs of this machine find.
        env = {**os.environ, "RAY_TMPDIR": folder, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        ray_command = Path(sys.executable).with_name("ray")  # PATH need not hold the environment
        start = f"start --head --block --num-cpus 2 --port {port} --include-dashboard false"
        head = subprocess.Popen([ray_command, *start.split()], env=env, stdout=subprocess.DEVNULL)
        try:
            monkeypatch.setattr(local_ray, "_CONNECT_TIMEOUT_S", 60.0)
            assert local_ray._answers(f"127.0.0.1:{port}")
            wait_for(Path(folder, "ray", "ray_current_cluster"))
            generate = ["-m", "outrider", "generate", "-m", model, "--num-kv-blocks", "64", "x"]
            for command in (generate, ["-c", JOIN.format(model=model)]):
                done = subprocess.run(
                    [sys.executable, *command], env=env, capture_output=True, text=True, timeout=240
                )
                assert done.returncode == 0, done.stderr
                assert head.poll() is None
            # Ray's own lines may follow.
            assert any(line.endswith(f":{port}") for line in done.stdout.splitlines())
        finally:
            head.terminate()
            head.wait(60)


def wait_for(path: Path) -> None:
    """Until `ray start` has written down where it is."""
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"no {path}")


def test_variables_of_ray_are_those_it_reads_and_a_users_own_stay(monkeypatch):
    """Replicas then wake less often for metrics, and deaths are noticed sooner."""
    import ray

    own = "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"
    monkeypatch.setattr(os, "environ", {own: "700"})
    local_ray.set_ray_variables()
    assert os.environ == {**local_ray.RAY_VARIABLES, own: "700"}
    constants = Path(ray.__file__).with_name("serve") / "_private" / "constants.py"
    assert f'get_env_int(\n    "{own}", 100' in constants.read_text()


@pytest.mark.ray
def test_workers_of_a_ray_that_is_started_here_wait_for_no_other_process(tmp_path):
    """Ray itself starts them at niceness 15, which `outrider check` says."""
    import ray

    config = EngineConfig.load({"model": str(tmp_path)})
    assert local_ray.start_ray(config, address="local")
    try:
        assert ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote()) == os.nice(0)
    finally:
        ray.shutdown()


def test_what_a_failed_test_leaves_of_ray_is_ended(request, monkeypatch):
    """Unless a fixture of several tests has started it."""
    owners = request.config.pluginmanager.get_plugin("ray-owners")
    with monkeypatch.context() as patched:
        ray, started = Mock(), [object()]
        patched.setitem(sys.modules, "ray", ray)
        patched.setitem(sys.modules, "ray.serve", ray.serve)
        patched.setattr(owners, "fixtures", started)
        for is_owned in (True, False):
            if not is_owned:
                started.clear()
            ray.serve.shutdown.side_effect = RuntimeError("its controller is gone")
            teardown = owners.pytest_runtest_teardown()
            next(teardown)
            with pytest.raises(StopIteration):
                teardown.send(None)
            ended = [] if is_owned else [call.serve.shutdown(), call.shutdown()]
            assert [each for each in ray.mock_calls if "shutdown" in each[0]] == ended

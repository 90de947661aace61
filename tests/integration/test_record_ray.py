"""Ray: what actors generate is on the one tape, in a cluster of the job and in one that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rolltape import store
from rolltape.recorder import ray as binding
from rolltape.recorder.options import Options
from rolltape.recorder.session import Session
from tests.integration.conftest import ROOT, TINY_MOE

pytestmark = pytest.mark.engine
pytest.importorskip("ray", reason="ray is not installed")

ENV = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("ROLLTAPE", "RAY_ADDRESS"))},
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SCRIPT = [sys.executable, str(ROOT / "examples/rollout_ray.py"), "--model", str(TINY_MOE)]
RECORD = [sys.executable, "-m", "rolltape", "record"]


def run(*args: str | Path, env: dict[str, str] = ENV) -> subprocess.CompletedProcess[str]:
    command = [str(a) for a in args]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def tokens(sequence: Any) -> list[int]:
    found: list[int] = sequence.tokens.values.tolist()
    return found


def events(tape: store.Tape) -> set[str]:
    return set(tape.table("events").column("kind").to_pylist())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: Any) -> Iterator[str]:
    """Address of a cluster whose processes know nothing of a recording."""
    # sockets are below the folder, and their names have to be short
    folder = Path("/tmp") / f"rt-{os.getpid()}"
    start = "start --head --block --port=6399 --num-cpus=2 --include-dashboard=false"
    command = [sys.executable, "-m", "ray.scripts.scripts", *start.split()]
    child = subprocess.Popen(
        [*command, f"--temp-dir={folder}"],
        env={k: v for k, v in ENV.items() if k != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    seen = []
    for line in child.stdout:
        seen.append(line)
        if "Ray runtime started" in line:
            break
    else:
        pytest.fail("no cluster: " + "".join(seen[-5:]))
    yield "127.0.0.1:6399"
    child.terminate()
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
    child.stdout.close()
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def test_actors_of_a_job_that_starts_ray_and_one_that_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--longest", "4000", "--deadline", "10", "--max-new-tokens", "12", "--out", out]
    said = run(*RECORD, "-o", tmp_path / "tape", "--", *SCRIPT, *options).stderr
    returned = json.loads(out.read_text())
    assert returned.count(None) == 1  # the last prompt was too long
    tape = store.open(tmp_path / "tape")
    whole = [s for s in tape if s.finish == "length"]
    assert sorted(map(tokens, whole)) == sorted(r for r in returned if r is not None)
    # of the actor that was killed: open, and what it had flushed is kept, routes and all
    (cut,) = [s for s in tape if s.finish == "open"]
    assert cut.info["length"] is None and len(tokens(cut)) > cut.prompt_len
    kept = cut.routes()
    assert kept is not None and kept.valid[: cut.prompt_len].all()
    assert len({s.key.engine for s in tape}) == 2
    assert {row["adapter"] for row in tape.table("engines").to_pylist()} == {"transformers"}
    assert "INCOMPLETE: 1 sequence never closed" in said
    assert "hook_error" not in events(tape)


def test_actors_of_a_running_cluster_that_share_no_disk(cluster: str, tmp_path: Path) -> None:
    moto = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        keys = {"access_key": "key", "secret_key": "secret", "region": "us-east-1"}
        options = {**keys, "endpoint_override": f"{host}:{port}", "scheme": "http"}
        boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        ).create_bucket(Bucket="tapes")
        flags = [word for item in options.items() for word in ("--storage-option", *item)]
        out = tmp_path / "out.json"
        job = [*SCRIPT, "--address", cluster, "--max-new-tokens", "8", "--out", out]
        run(*RECORD, "-o", "s3://tapes/a", *flags, "--", *job)
        tape = store.open("s3://tapes/a", storage_options=options)
        assert sorted(map(tokens, tape)) == sorted(json.loads(out.read_text()))
        assert {s.finish for s in tape} == {"length"}
    finally:
        server.stop()


def test_without_recording_a_job_says_nothing_to_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ROLLTAPE_TAPE", raising=False)
    kwargs = {"address": "127.0.0.1:1", "runtime_env": {"pip": ["x"]}}
    assert binding._with_switches((), kwargs) is kwargs


def test_a_worker_that_does_not_see_the_tape_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session(tmp_path / "elsewhere", Options())
    session.put(lambda writer: None, nbytes=1, gap={})
    session.close()
    said = capsys.readouterr().err
    assert "recording stopped: NotATapeError" in said and "docs/injection.md" in said
    assert not (tmp_path / "elsewhere").exists()


# -- the runtime environment --------------------------------------------------------------

JOB = {"ROLLTAPE_TAPE": "/t", "ROLLTAPE_LEVEL": "tokens", "ROLLTAPE_PROCS": "/p", "HOME": "/h"}


def test_only_our_switches_go_along() -> None:
    sent = binding.runtime_env(None, JOB)["env_vars"]
    assert sent.pop("PYTHONPATH").endswith("/inject:${PYTHONPATH}")
    assert sent.pop("ROLLTAPE_JOINED_PATH") == "1"
    assert sent == {
        "ROLLTAPE_TAPE": "/t",
        "ROLLTAPE_LEVEL": "tokens",
        "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "ROLLTAPE_",
    }
    assert binding.runtime_env({"pip": ["x"]}, {"HOME": "/h"}) == {"pip": ["x"]}


def test_what_the_job_says_stays() -> None:
    given = {
        "working_dir": "/w",
        "env_vars": {"PYTHONPATH": "/mine", "ROLLTAPE_LEVEL": "layers", "A": "b"},
    }
    before = json.dumps(given)
    result = binding.runtime_env(given, {**JOB, "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY": "MY_"})
    assert json.dumps(given) == before
    assert result["working_dir"] == "/w"
    sent = result["env_vars"]
    assert sent["PYTHONPATH"].endswith("/inject:/mine")
    assert (sent["ROLLTAPE_LEVEL"], sent["A"]) == ("layers", "b")
    assert sent["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] == "MY_,ROLLTAPE_"


def test_what_was_submitted_with_the_job_is_not_said_twice() -> None:
    """Ray refuses a variable that both the submission and `ray.init` set."""
    from ray.runtime_env.runtime_env import _merge_runtime_env

    submitted = {"env_vars": {"ROLLTAPE_TAPE": "/t", "PYTHONPATH": "/x"}}
    env = {**JOB, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": submitted})}
    added = binding.runtime_env(None, env)
    assert not set(added["env_vars"]) & set(submitted["env_vars"])
    assert _merge_runtime_env(submitted, added) is not None


@pytest.mark.parametrize(
    ("args", "kwargs", "starts"),
    [
        (("local",), {}, True),
        ((), {"address": "local"}, True),
        ((), {"address": "10.0.0.1:6379"}, False),
        ((), {"address": "ray://10.0.0.1:10001"}, False),
    ],
)
def test_a_job_that_starts_ray_is_told_from_one_that_joins(
    args: Any, kwargs: Any, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    assert ray.__version__
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert binding._starts_ray(args, kwargs) is starts


def test_init_is_wrapped_once_and_unwrapped() -> None:
    import pickle

    import ray
    from ray import cloudpickle

    original = ray.init
    assert binding.bind()
    try:
        assert not binding.bind()
        assert ray.init is not original and ray._private.worker.init is ray.init
        # a task that mentions it is sent by name, not by value
        assert len(cloudpickle.dumps(ray.init)) < 200
        assert pickle.loads(pickle.dumps(ray.init)) is ray.init
    finally:
        binding.unbind()
    assert ray.init is original and ray._private.worker.init is original


@pytest.mark.parametrize("theirs", ["", ":/mine"])
def test_an_empty_pythonpath_leaves_the_working_folder_out(tmp_path: Path, theirs: str) -> None:
    """Ray joins the two and cannot leave out the separator."""
    (tmp_path / "procs").mkdir()
    inject = str(Path(binding.__file__).parent / "inject")
    env = {
        **{k: v for k, v in ENV.items() if k != "PYTHONPATH"},
        "PYTHONPATH": f"{inject}:{theirs.lstrip(':')}",
        "ROLLTAPE_TAPE": str(tmp_path),
        "ROLLTAPE_JOINED_PATH": "1",
    }
    code = "import os, sys; print(os.environ['PYTHONPATH']); print(os.getcwd() in sys.path[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[:2] == [inject + theirs, "False"], done.stderr

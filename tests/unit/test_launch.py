"""`rolltape record` runs a command as if it were not there, and always leaves a sealed tape."""

import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import rolltape
from rolltape import store
from rolltape.recorder.cli import record
from rolltape.recorder.injection import INJECT, prepended
from rolltape.recorder.launch import Job, _Bounded, with_python
from rolltape.recorder.options import Options
from rolltape.recorder.output import default_output, expand, prepare_output, short_name
from rolltape.recorder.settings import FLAGS
from rolltape.recorder.summary import summarize
from rolltape.recorder.tensorrt_llm.identity import copies
from rolltape.store.places import LocalPlace

ROOT = Path(rolltape.__file__).parents[1]
RECORD = (sys.executable, "-m", "rolltape", "record")
PYTHON = shlex.quote(sys.executable)

#: A job that records two sequences without an engine: one finished, one that stays open.
WRITES = """
import os, signal, sys, time
from rolltape.store import TapeWriter, new_uuid, token_digest
import numpy as np
engine = new_uuid()
writer = TapeWriter(os.environ["ROLLTAPE_TAPE"])
writer.append("engines", {
    "engine": engine, "writer": writer.id, "role": "rollout", "adapter": "double",
    "host": os.uname().nodename, "pid": os.getpid(), "started_ns": time.time_ns(),
})
for request, finish in (("a", "stop"), ("b", "open")):
    ids = np.arange(5, dtype="u4")
    key = {"engine": engine, "request": request, "sample": 0, "pass": 0}
    for how in ("open", finish):
        writer.append("sequences", {
            **key, "prompt_len": 2, "finish": how, "length": 5 if how == "stop" else None,
        })
    writer.append("tokens", {**key, "start": 0, "n": 5, "ids": [ids]})
writer.append("events", {
    "writer": writer.id, "t_ns": 1, "kind": "gap", "n": 7, "detail": "{}",
})
writer.flush()
"""
DIES = WRITES + "os.kill(os.getpid(), signal.SIGKILL)\n"
ENDS = WRITES + "writer.close()\n"


def environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("ROLLTAPE_")}
    return {**env, "PYTHONPATH": str(ROOT), **more}


@pytest.fixture(autouse=True)
def no_endless_wait() -> Iterator[None]:
    """These tests wait for other processes: fail instead of waiting for ever."""

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError("the test took 60 s")

    old = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 60, 5)  # again, for a clean-up that waits as well
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


@pytest.fixture
def job(tmp_path: Path) -> "Jobs":
    return Jobs(tmp_path)


class Jobs:
    """Runs `rolltape record` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tape = folder / "tape"

    def script(self, text: str, name: str = "job.py") -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def run(
        self, *args: str | Path, output: str | None = "tape", **how: Any
    ) -> subprocess.CompletedProcess[str]:
        options = [] if output is None else ["-o", output]
        how.setdefault("env", environment())
        return subprocess.run(
            [*RECORD, *options, *map(str, args)],
            cwd=self.folder,
            text=True,
            capture_output=True,
            timeout=60,
            **how,
        )

    def start(self, *args: str | Path, **how: Any) -> "subprocess.Popen[str]":
        how.setdefault("env", environment())
        return subprocess.Popen(
            [*RECORD, "-o", "tape", *map(str, args)],
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **how,
        )

    def seal(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.tape / "seal.json").read_text())
        return content


# -- exit status --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 7, 255])
def test_exit_status_is_that_of_the_command(job: Jobs, code: int) -> None:
    done = job.run("--", "sh", "-c", f"exit {code}")
    assert done.returncode == code
    assert f"rolltape: the command exited with {code}" in done.stderr
    assert job.seal()["status"]["exit"] == code


@pytest.mark.parametrize(
    ("name", "status"), [("TERM", -signal.SIGTERM), ("SEGV", -signal.SIGSEGV), ("KILL", 137)]
)
def test_dies_of_the_signal_that_killed_the_command(job: Jobs, name: str, status: int) -> None:
    done = job.run("--", "sh", "-c", f"kill -{name} $$")
    assert done.returncode == status
    assert f"killed by SIG{name}" in done.stderr
    assert job.seal()["status"]["signal"] == f"SIG{name}"


def test_a_missing_command_is_127_and_leaves_no_tape(job: Jobs) -> None:
    done = job.run("--", "no-such-command-anywhere")
    assert done.returncode == 127
    assert done.stderr == "rolltape: no-such-command-anywhere: command not found\n"
    assert not job.tape.exists()


def test_a_command_that_cannot_be_executed_is_126(job: Jobs) -> None:
    job.script("plain text", "text").chmod(0o644)
    assert job.run("--", "./text").returncode == 126
    assert not job.tape.exists()


@pytest.mark.parametrize(
    ("text", "why"), [("#!/no/such/interpreter\n", "#! is missing"), ("no header\n", "format")]
)
def test_a_script_that_the_kernel_refuses_is_126(job: Jobs, text: str, why: str) -> None:
    job.script(text, "script").chmod(0o755)
    done = job.run("--", "./script")
    assert done.returncode == 126
    assert why in done.stderr
    assert job.seal()["status"]["exit"] == 126


def test_a_closed_stderr_does_not_cost_the_exit_status(job: Jobs) -> None:
    line = shlex.join([*RECORD, "-o", "tape", "--", "sh", "-c", "exit 7"])
    done = subprocess.run(["sh", "-c", f"{line} 2>&-"], cwd=job.folder, env=environment())
    assert done.returncode == 7
    assert job.seal()["status"]["exit"] == 7


def test_exit_status_survives_a_parent_that_ignores_its_children(job: Jobs) -> None:
    done = job.run(
        "--",
        "sh",
        "-c",
        "exit 3",
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    )
    assert done.returncode == 3


# -- transparency -------------------------------------------------------------------------

FACTS = """
import json, os, resource, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
facts = {
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "umask": os.umask(0),
    "limits": {n: resource.getrlimit(getattr(resource, n))
               for n in dir(resource) if n.startswith("RLIMIT_")},
    "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
    "files": sorted(os.listdir("/proc/self/fd")), "env": dict(os.environ),
    "third": os.pread(9, 100, 0).decode(), "executable": sys.executable,
    "group": os.getpgrp() == os.getpgid(os.getppid()), "nice": os.nice(0),
}
print(json.dumps(facts))
"""


def test_the_command_sees_what_it_would_see_without_us(job: Jobs) -> None:
    job.script(FACTS, "facts.py")
    (job.folder / "nine").write_text("inherited")
    args = ["a b", "--", "-o", "x", "--append", ""]
    line = f"umask 027; ulimit -n 200; exec 9<nine; {{}} {PYTHON} facts.py {shlex.join(args)}"
    seen = []
    for prefix in ("", shlex.join([*RECORD, "-q", "-o", "tape", "--"])):
        command = ["sh", "-c", line.format(prefix)]
        env = environment(LC_ALL="", LANG="")
        done = subprocess.run(command, cwd=job.folder, env=env, stdout=subprocess.PIPE, check=True)
        seen.append(json.loads(done.stdout))
    plain, recorded = seen
    added = {k: v for k, v in recorded["env"].items() if plain["env"].get(k) != v}
    assert recorded.pop("env").keys() - plain.pop("env").keys() == added.keys() - {"PYTHONPATH"}
    ours = ("ROLLTAPE_", "TLLM_ROLLTAPE_")
    assert all(k.startswith(ours) for k in added if k != "PYTHONPATH")
    assert added["PYTHONPATH"] == f"{INJECT}{os.pathsep}{ROOT}"
    recorded["path"].remove(str(INJECT))
    assert recorded == plain
    assert plain["third"] == "inherited"
    assert plain["argv"][1:] == args


def test_what_python_sets_for_itself_in_the_c_locale_stays_with_us(job: Jobs) -> None:
    env = {k: v for k, v in environment().items() if not k.startswith(("LC_", "LANG"))}
    code = "import os; print('LC_CTYPE' in os.environ)"
    in_python = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert in_python.stdout == b"True\n"  # else there is nothing to hide
    assert "LC_CTYPE" not in job.run("-q", "--", "env", env=env).stdout
    given = job.run("-q", "--overwrite", "--", "env", env={**env, "LC_CTYPE": "C.UTF-8"})
    assert "LC_CTYPE=C.UTF-8\n" in given.stdout


def test_stdin_and_stdout_pass_through(job: Jobs) -> None:
    text = "line one\nline two without end"
    done = job.run("-q", "--", "cat", input=text)
    assert done.stdout == text


def test_a_command_under_nohup_still_ignores_hangup(job: Jobs) -> None:
    look = "print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    done = job.run(
        "--",
        sys.executable,
        "-c",
        f"import signal; {look}",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["train.py", "-x"], (sys.executable, "train.py", "-x")),
        (["-m", "pkg.mod", "a"], (sys.executable, "-m", "pkg.mod", "a")),
        (["torchrun", "train.py"], ("torchrun", "train.py")),
        (["python3", "-m", "x"], ("python3", "-m", "x")),
    ],
)
def test_scripts_and_modules_get_python_in_front(
    command: list[str], expected: tuple[str, ...]
) -> None:
    assert with_python(command) == expected


def test_a_script_needs_no_separator(job: Jobs) -> None:
    job.script("import sys; print(sys.argv)")
    done = job.run("job.py", "-o", "mine", "--", "-q")
    assert done.stdout == "['job.py', '-o', 'mine', '--', '-q']\n"


def test_a_module_runs_with_python(job: Jobs) -> None:
    job.script("import sys; print(sys.argv[1:])", "jobmodule.py")
    assert job.run("--", "-m", "jobmodule", "x").stdout == "['x']\n"


# -- terminal and signals -----------------------------------------------------------------


class Terminal:
    """`rolltape record` in the foreground of a terminal of its own."""

    def __init__(self, folder: Path, *args: str, env: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*RECORD, "-o", "tape", *args],
            cwd=folder,
            env=env,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)

    def until(self, text: str) -> str:
        """What is printed up to and including `text`."""
        seen = ""
        while text not in seen:
            seen += self.read()
        return seen

    def read(self) -> str:
        assert select.select([self.master], [], [], 30)[0], "nothing printed for 30 s"
        return os.read(self.master, 4096).decode()

    def end(self) -> tuple[int, str]:
        """Exit status in the manner of subprocess, and the rest of the output."""
        rest = ""
        while True:
            try:
                rest += self.read()
            except OSError:  # EIO: the last process has closed the terminal
                break
        os.close(self.master)
        return self.process.wait(timeout=30), rest


def test_the_command_keeps_the_terminal(job: Jobs) -> None:
    script = job.script("import os; print([os.isatty(i) for i in range(3)], os.ttyname(0))")
    terminal = Terminal(job.folder, "--", str(script), env=environment())
    status, text = terminal.end()
    assert status == 0
    assert "[True, True, True] /dev/pts/" in text


@pytest.mark.parametrize(("more", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colour_only_where_it_is_wanted(job: Jobs, more: dict[str, str], coloured: bool) -> None:
    env = environment(TERM="xterm")
    env.pop("NO_COLOR", None)
    _, text = Terminal(job.folder, "--", "true", env={**env, **more}).end()
    assert ("\x1b[" in text) is coloured
    assert "recording to tape" in text


#: Waits on a pipe that signals write to: one that arrives before the read is not lost.
CATCHES = """
import os, signal, sys
def stop(number, frame):
    print("cleaning up", flush=True)
    sys.exit(7)
signal.signal(signal.SIGINT, stop)
end, signals = os.pipe()
os.set_blocking(signals, False)
signal.set_wakeup_fd(signals)
print("ready", flush=True)
os.read(end, 1)
"""
DEFAULT = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
print("ready", flush=True)
signal.pause()
"""


def test_on_ctrl_c_the_handler_of_the_command_decides(job: Jobs) -> None:
    script = job.script(CATCHES)
    terminal = Terminal(job.folder, "--", str(script), env=environment())
    terminal.until("ready")
    os.write(terminal.master, b"\x03")
    status, text = terminal.end()
    assert "cleaning up" in text
    assert status == 7
    assert job.seal()["status"]["exit"] == 7


def test_on_ctrl_c_without_a_handler_both_die_of_it(job: Jobs) -> None:
    terminal = Terminal(job.folder, "--", str(job.script(DEFAULT)), env=environment())
    terminal.until("ready")
    os.write(terminal.master, b"\x03")
    status, _ = terminal.end()
    assert status == -signal.SIGINT
    assert job.seal()["status"]["signal"] == "SIGINT"


COUNTS = """
import signal
wanted = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
while wanted:
    print("waiting", flush=True)
    number = signal.sigwait(wanted)
    wanted.remove(number)
    print(number.name, flush=True)
raise SystemExit(9)
"""


@pytest.fixture
def hangup_is_heard() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, by us and by all that we start."""
    old = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, old)


@pytest.mark.usefixtures("hangup_is_heard")
def test_termination_and_user_signals_reach_the_command(job: Jobs) -> None:
    with job.start("--", job.script(COUNTS)) as process:
        assert process.stdout is not None
        for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.Signals[name])
            assert process.stdout.readline() == f"{name}\n"
        process.communicate(timeout=30)
    assert process.returncode == 9
    assert job.seal()["status"]["exit"] == 9


#: `rolltape record`, but sealing first says that it began and then waits for a file `go`.
SLOW_SEAL = """
import pathlib, time
import rolltape.recorder.launch as launch
from rolltape.cli import main
seal = launch.seal
def slow(*args, **options):
    pathlib.Path("sealing").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return seal(*args, **options)
launch.seal = slow
"""


def slow_seal(job: Jobs, *, patch: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SLOW_SEAL + patch + "main()", "record", "-o", "tape", "--"]
    return subprocess.Popen(
        [*command, "sh", "-c", "exit 5"],
        cwd=job.folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_second_sigterm_does_not_cut_sealing_short(job: Jobs) -> None:
    with slow_seal(job) as process:
        while not (job.folder / "sealing").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        (job.folder / "go").touch()
        process.communicate(timeout=30)
    assert process.returncode == 5
    assert job.seal()["status"]["exit"] == 5


def test_sealing_that_hangs_is_given_up(job: Jobs) -> None:
    with slow_seal(job, patch="launch.SEAL_SECONDS = 0.1\n") as process:
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 5
    assert "sealing did not end within" in stderr
    assert not (job.tape / "seal.json").exists()


def test_bounded_work_hands_over_its_value_or_error() -> None:
    assert _Bounded(lambda: 3, 10).value == 3
    assert isinstance(_Bounded(lambda: [][1], 10).error, IndexError)
    never = threading.Event()
    stuck = _Bounded(never.wait, 0.01)
    assert stuck.hung
    never.set()


# -- sealing and the summary --------------------------------------------------------------


def test_a_killed_job_leaves_a_sealed_tape_with_all_that_was_flushed(job: Jobs) -> None:
    done = job.run("--", job.script(DIES))
    assert done.returncode == 137
    assert "2 sequences (1 open, 1 stop), 10 tokens" in done.stderr
    assert "from 4 shards that a dead process had left open" in done.stderr
    seal = job.seal()
    assert seal["live"] == []
    assert len(seal["recovered"]) == 4
    tape = store.open(job.tape)
    assert [s.finish for s in tape] == ["stop", "open"]
    assert all(s.tokens.values.tolist() == [0, 1, 2, 3, 4] for s in tape)
    assert tape.problems == []


def test_the_summary_says_what_is_on_the_tape(job: Jobs) -> None:
    job.script("import subprocess, sys; subprocess.run([sys.executable, 'inner.py'])", "outer.py")
    job.script(ENDS, "inner.py")
    done = job.run("-v", "--summary-json", "summary.json", "outer.py")
    text = done.stderr.splitlines()
    assert text[0] == "rolltape: recording to tape"
    assert all(line.startswith("rolltape: ") for line in text)
    assert any("2 sequences (1 open, 1 stop), 10 tokens, 0.0 MB on disk" in t for t in text)
    assert any(
        "1 gap (7 tokens dropped); 2 Python processes: 1 recording, 1 not" in t for t in text
    )
    assert any("not recording: no engine was seen to" in t and "outer.py" in t for t in text)
    assert any("recorded: process " in t and t.endswith("inner.py") for t in text)
    assert text[-2:] == [
        "rolltape: next: rolltape replay tape -o tape.replay --on transformers --mode score",
        "rolltape: next: rolltape view tape",
    ]
    summary = json.loads((job.folder / "summary.json").read_text())
    assert summary["status"] == 0
    assert summary["sealed"] is True
    assert summary["command"]["signal"] is None
    found = summary["recorded"]
    assert found["by_finish"] == {"open": 1, "stop": 1}
    assert (found["tokens"], found["gaps"], found["gap_tokens"]) == (10, 1, 7)
    assert found["processes"]["seen"] == 2
    assert [p["argv0"] for p in found["processes"]["not_recording"]] == ["outer.py"]
    assert found["bytes"] > sum(f.stat().st_size for f in job.tape.glob("tokens/*"))


def test_what_is_set_is_said_where_it_says_something(job: Jobs) -> None:
    done = job.run("-v", "--top-logprobs", "3", "--", job.script(ENDS))
    said = [line for line in done.stderr.splitlines() if line.startswith("rolltape: set ")]
    assert [line.split()[2].partition("=")[0] for line in said] == [
        "PYTHONPATH", "ROLLTAPE_TAPE", "ROLLTAPE_TOP_LOGPROBS",
    ]  # fmt: skip


def test_processes_that_did_not_record_are_named_without_asking(job: Jobs) -> None:
    inner = job.script(ENDS, "inner.py")
    idle = f"{PYTHON} -c 1; " * 4
    done = job.run("--", "sh", "-c", f"{idle} {PYTHON} {inner}")
    said = [line for line in done.stderr.splitlines() if "not recording: " in line]
    assert len(said) == 3 and said[-1].endswith("not recording: 2 more, see -v")
    assert "5 Python processes: 1 recording, 4 not" in done.stderr
    alone = job.run("--overwrite", "--", inner)
    assert "1 recording, 0 not" in alone.stderr and "not recording" not in alone.stderr


def test_the_next_command_names_a_folder_that_is_free(job: Jobs) -> None:
    (job.folder / "tape.replay").mkdir()
    done = job.run("--", job.script(ENDS))
    assert "next: rolltape replay tape -o tape.replay-2 --on" in done.stderr


def test_a_closing_row_counts_wherever_its_shard_stands(job: Jobs) -> None:
    store.create_tape(job.tape, role="rollout")
    key = {"engine": "e" * 32, "request": "r", "sample": 0, "pass": 0, "prompt_len": 1}
    with store.TapeWriter(job.tape) as writer:
        for finish in ("open", "stop", "open"):
            writer.append("sequences", {**key, "finish": finish})
    assert summarize(LocalPlace(job.tape), job.tape / "procs").sequences == {"stop": 1}


def test_an_empty_recording_says_why(job: Jobs) -> None:
    done = job.run("--", "true")
    assert "nothing was recorded: no Python process loaded the recorder" in done.stderr
    assert "next:" not in done.stderr
    done = job.run("--overwrite", "--", sys.executable, "-c", "pass")
    assert "1 Python process loaded the recorder, and none of them generated with a" in done.stderr
    done = job.run("--overwrite", "--", sys.executable, "-I", "-c", "pass")
    assert "no Python process loaded the recorder" in done.stderr
    assert "--inject pth reaches -E and -I" in done.stderr


def test_quiet_is_silent_when_all_is_well(job: Jobs) -> None:
    assert job.run("-q", "--", job.script(ENDS)).stderr == ""


def test_strict_fails_a_job_whose_recording_is_empty_or_has_gaps(job: Jobs) -> None:
    done = job.run("--strict", "--", "true")
    assert done.returncode == 70
    assert "--strict: nothing was recorded" in done.stderr
    done = job.run("--strict", "--overwrite", "--", job.script(ENDS))
    assert done.returncode == 70
    assert "--strict: gaps and faults in the recording: 1" in done.stderr
    whole = job.script(ENDS.replace('"kind": "gap"', '"kind": "notice"'), "whole.py")
    assert job.run("--strict", "--overwrite", "--", whole).returncode == 0
    assert job.run("--strict", "--overwrite", "--", "false").returncode == 1


GRANDPARENT = """
import os, subprocess, sys
from pathlib import Path
child = subprocess.Popen(
    [sys.executable, "writer.py"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
)
assert child.stdout.readline() == b"written\\n"
os._exit(0)
"""


def test_shards_of_processes_that_outlive_the_command_stay_live(job: Jobs) -> None:
    os.mkfifo(job.folder / "go")
    os.mkfifo(job.folder / "gone")
    job.script(
        WRITES
        + "print('written', flush=True)\nopen('go').read()\nopen('gone', 'w')\n"
        + "writer.close()\n",
        "writer.py",
    )
    done = job.run("--", job.script(GRANDPARENT))
    assert done.returncode == 0
    assert "still write 4 shards" in done.stderr
    assert "2 sequences" in done.stderr
    assert len(job.seal()["live"]) == 4
    (job.folder / "go").write_text("")
    # the writer holds `gone` open until it ends, after its shards have their names
    (job.folder / "gone").read_text()
    again = job.run("--append", "--", "true")
    assert again.returncode == 0
    assert job.seal()["live"] == []
    assert len(store.open(job.tape)) == 2


def test_a_tape_that_the_job_removes_costs_no_exit_status(job: Jobs) -> None:
    done = job.run("--", "sh", "-c", 'rm -r "$ROLLTAPE_TAPE"; exit 4')
    assert done.returncode == 4
    assert "could not seal" in done.stderr


# -- where to record ----------------------------------------------------------------------


def test_templates_are_filled_in() -> None:
    env = {"RANK": "3"}
    host, pid = os.uname().nodename, os.getpid()
    assert expand("t/{host}-{pid}-{env:RANK}-{time}", env, now=0.0) == (
        f"t/{host}-{pid}-3-19700101T000000Z"
    )
    assert expand("t/%h-%p-%q{RANK}-100%%-5%", env) == f"t/{host}-{pid}-3-100%-5%"


@pytest.mark.parametrize(
    ("template", "message"),
    [("{rank}", r"\{rank\} does not exist"), ("{env:NO}", "NO is not set"), ("%q{NO}", "NO is")],
)
def test_a_template_that_cannot_be_filled_is_refused(template: str, message: str) -> None:
    with pytest.raises(store.UsageError, match=message):
        expand(template, {})


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python3", "-u", "a/rollout.py", "b.py"], "rollout"),
        (["python", "-m", "pkg.rollout", "x"], "pkg.rollout"),
        (["vllm", "serve"], "vllm"),
        (["./odd name!"], "odd-name"),
        ([], "job"),
    ],
)
def test_the_default_name_says_what_ran(command: list[str], name: str) -> None:
    assert short_name(command) == name
    pattern = rf"runs/19700101T000000Z-{re.escape(name)}-[0-9a-f]{{6}}"
    assert re.fullmatch(pattern, default_output(command, now=0.0))


def test_without_o_the_tape_goes_to_runs(job: Jobs) -> None:
    assert job.run("--", "true", output=None).returncode == 0
    (tape,) = (job.folder / "runs").iterdir()
    assert store.kind_of(tape) == "tape"


def test_an_existing_folder_is_refused_before_anything_runs(job: Jobs) -> None:
    job.tape.mkdir()
    (job.tape / "precious").write_text("x")
    for option in ([], ["--append"], ["--overwrite"]):
        done = job.run(*option, "--", "touch", "ran")
        assert done.returncode == 2, option
        assert done.stderr.startswith("rolltape: error: ")
    assert (job.tape / "precious").read_text() == "x"
    assert not (job.folder / "ran").exists()


def test_overwrite_refuses_a_tape_with_foreign_files(job: Jobs) -> None:
    store.create_tape(job.tape, role="rollout")
    (job.tape / "notes.txt").write_text("x")
    with pytest.raises(store.TapeExistsError, match=r"notes\.txt is not part of a tape"):
        prepare_output(LocalPlace(job.tape), overwrite=True)
    assert (job.tape / "tape.json").exists()


def test_overwrite_refuses_a_tape_that_is_being_recorded(job: Jobs) -> None:
    store.create_tape(job.tape, role="rollout")
    with store.TapeWriter(job.tape) as writer:
        writer.append("events", {"writer": writer.id, "t_ns": 1, "kind": "notice"})
        writer.flush()
        with pytest.raises(store.TapeExistsError, match="is being recorded"):
            prepare_output(LocalPlace(job.tape), overwrite=True)
    prepare_output(LocalPlace(job.tape), overwrite=True)
    assert not job.tape.exists()


def test_an_empty_folder_is_taken(job: Jobs) -> None:
    job.tape.mkdir()
    assert job.run("--", "true").returncode == 0


def test_append_adds_a_part_and_keeps_the_history(job: Jobs) -> None:
    assert job.run("--", job.script(ENDS)).returncode == 0
    header = (job.tape / "tape.json").read_bytes()
    done = job.run("--append", "--", job.script(ENDS, "second.py"))
    assert done.returncode == 0
    assert "4 sequences (2 open, 2 stop)" in done.stderr
    assert "this part added 2 sequences" in done.stderr
    assert "1 Python process: 1 recording, 0 not" in done.stderr
    assert (job.tape / "tape.json").read_bytes() == header
    status = job.seal()["status"]
    assert status["argv"][-1].endswith("second.py")
    assert [part["argv"][-1].endswith("job.py") for part in status["earlier"]] == [True]
    assert len(store.open(job.tape)) == 4


# -- options and variables ----------------------------------------------------------------


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("ROLLTAPE_") or n in FLAGS]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")

    def call(*args: str) -> Result:
        return CliRunner().invoke(record, args, standalone_mode=False)

    yield call
    assert list(tmp_path.iterdir()) == []


def variables(result: Result) -> dict[str, str]:
    """What is printed, without the copies for the workers of MPI pools, which must be complete."""
    assert result.exception is None, result.exception
    found = dict(line.split("=", 1) for line in result.stdout.splitlines())
    plain = {name: value for name, value in found.items() if not name.startswith("TLLM_")}
    assert found == plain | copies(plain)
    return plain


def test_print_env_shows_the_variables_and_starts_nothing(invoke: Any, tmp_path: Path) -> None:
    assert variables(invoke("--print-env", "-o", "t", "--", "touch", "ran")) == {
        "PYTHONPATH": f"{INJECT}:/elsewhere",
        "ROLLTAPE_TAPE": str(tmp_path / "t"),
        "ROLLTAPE_LEVEL": "routing",
        "ROLLTAPE_LAYERS": "0",
        "ROLLTAPE_SKETCHES": "0",
        "ROLLTAPE_ON_FULL": "drop",
        "ROLLTAPE_QUEUE_MB": "256",
        "ROLLTAPE_FSYNC": "0",
        "ROLLTAPE_STRICT": "0",
        "ROLLTAPE_TOP_LOGPROBS": "0",
        "ROLLTAPE_PROFILE_KERNELS": "0",
        "ROLLTAPE_MAX_BYTES": "0",
        "ROLLTAPE_PACKAGE": str(rolltape.__file__),
    }


def test_an_option_of_an_earlier_choice_does_not_reach_the_command(tmp_path: Path) -> None:
    stale = {"ROLLTAPE_STEPS": "5:6", "TLLM_ROLLTAPE_STEPS": "5:6", "ROLLTAPE_SAMPLE_RATE": "0.1"}
    env = {**stale, "ROLLTAPE_STORAGE_OPTIONS": "{}", "HOME": "/h"}
    job = Job(command=("true",), tape=str(tmp_path), options=Options(sample_rate=0.5), env=env)
    found = job.environment
    assert "ROLLTAPE_STEPS" not in found and "TLLM_ROLLTAPE_STEPS" not in found
    assert found["ROLLTAPE_SAMPLE_RATE"] == found["TLLM_ROLLTAPE_SAMPLE_RATE"] == "0.5"
    assert (found["HOME"], found["ROLLTAPE_STORAGE_OPTIONS"]) == ("/h", "{}")


def test_options_become_variables(invoke: Any) -> None:
    options = "--layers 3 --sketches 5 --on-full block --queue-mb 8 --fsync --strict --inject pth"
    found = variables(invoke("--print-env", "-o", "t", *options.split()))
    found.pop("ROLLTAPE_TAPE")
    found.pop("ROLLTAPE_PACKAGE")
    assert found == {
        "ROLLTAPE_LEVEL": "layers",
        "ROLLTAPE_LAYERS": "3",
        "ROLLTAPE_SKETCHES": "5",
        "ROLLTAPE_TOP_LOGPROBS": "0",
        "ROLLTAPE_PROFILE_KERNELS": "0",
        "ROLLTAPE_MAX_BYTES": "0",
        "ROLLTAPE_ON_FULL": "block",
        "ROLLTAPE_QUEUE_MB": "8",
        "ROLLTAPE_FSYNC": "1",
        "ROLLTAPE_STRICT": "1",
    }


def test_flags_that_change_numbers_are_told_to_every_process(
    invoke: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_DETERMINISTIC", "true")
    found = variables(invoke("--print-env", "-o", "t", "--sample-rate", "0.5", "--steps", "2:4"))
    assert found["ROLLTAPE_LAUNCH_ENV"] == '{"FORCE_DETERMINISTIC": "true"}'
    assert (found["ROLLTAPE_SAMPLE_RATE"], found["ROLLTAPE_STEPS"]) == ("0.5", "2:4")


def test_a_list_of_allowed_plugins_gets_ours(invoke: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "theirs, other")
    monkeypatch.setenv("SGLANG_PLUGINS", "rolltape")
    found = variables(invoke("--print-env", "-o", "t"))
    assert found["VLLM_PLUGINS"] == "theirs,other,rolltape"
    assert "SGLANG_PLUGINS" not in found


def test_the_command_line_outranks_the_environment(
    invoke: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLTAPE_LEVEL", "tokens")
    monkeypatch.setenv("ROLLTAPE_QUEUE_MB", "9")
    found = variables(invoke("--print-env", "-o", "t"))
    assert (found["ROLLTAPE_LEVEL"], found["ROLLTAPE_QUEUE_MB"]) == ("tokens", "9")
    assert variables(invoke("--print-env", "-o", "t", "--layers", "2"))["ROLLTAPE_LEVEL"] == (
        "layers"
    )
    monkeypatch.setenv("ROLLTAPE_LAYERS", "4")
    found = variables(invoke("--print-env", "-o", "t", "--level", "routing"))
    assert (found["ROLLTAPE_LEVEL"], found["ROLLTAPE_LAYERS"]) == ("routing", "0")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no command"),
        (["-o", "t", "--level", "tokens", "--layers", "2", "true"], "needs --level layers"),
        (["-o", "t", "--level", "layers", "true"], "needs --layers N"),
        (["--append", "true"], "--append needs -o"),
        (["-o", "t", "--append", "--overwrite", "true"], "exclude each other"),
        (["-o", "nosuch://bucket/t", "true"], "nosuch://"),
        (["-q", "-v", "true"], "exclude each other"),
        (["--env", "--", "true"], "takes no command"),
    ],
)
def test_what_does_not_go_together_is_refused(invoke: Any, args: list[str], message: str) -> None:
    result = invoke(*args)
    assert isinstance(result.exception, store.UsageError)
    assert message in str(result.exception)


def test_env_records_a_job_that_cannot_be_wrapped(job: Jobs) -> None:
    job.script(ENDS)
    start = shlex.join([*RECORD, "--env", "-o", "tape"])
    line = f'eval "$({start})" && {PYTHON} job.py'
    done = subprocess.run(
        ["sh", "-c", line], cwd=job.folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "seal it after the job: rolltape record --append" in done.stderr
    assert store.open(job.tape).seal is None
    assert job.run("--append", "--", "true").returncode == 0
    tape = store.open(job.tape)
    assert tape.seal is not None
    assert len(tape) == 2


def test_the_header_says_where_the_recording_comes_from(job: Jobs) -> None:
    job.run("--", "echo", "--api-key", "sesame", env=environment(OMP_NUM_THREADS="1"))
    header = (job.tape / "tape.json").read_text()
    facts = json.loads(header)["provenance"]
    assert facts["argv"] == ["echo", "--api-key", "***"]
    assert facts["cwd"] == str(job.folder)
    assert facts["env"]["OMP_NUM_THREADS"] == "1"
    assert facts["env"]["ROLLTAPE_LEVEL"] == "routing"
    assert "sesame" not in header + (job.tape / "seal.json").read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, [INJECT]),
        ("", [INJECT]),
        ("/a", [INJECT, "/a"]),
        (f"/a:{INJECT}", [INJECT, "/a", INJECT]),
        (f"{INJECT}:/a", [INJECT, "/a"]),
    ],
)
def test_the_inject_folder_stands_in_front_of_pythonpath(
    before: str | None, after: list[Any]
) -> None:
    assert prepended(before) == ":".join(map(str, after))

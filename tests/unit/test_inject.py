"""The import hook: in every Python process of a job, unnoticed by the job, cheap, harmless."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rolltape
from rolltape import store
from rolltape.recorder.injection import INJECT, InjectionError, interpreter_of, pth_file

ROOT = Path(rolltape.__file__).parents[1]

#: An "engine" and a "recorder" for it; the hook is told of them by the user's own sitecustomize.
FILES = {
    "fake_engine.py": "import sys\nname = 'engine'\nspec_at_import = __spec__.loader\nbound = 0\n",
    "fake_recorder.py": """
import sys
def bind():
    engine = sys.modules["fake_engine"]
    assert engine.name == "engine"
    engine.bound += 1
def fails():
    raise LookupError("no such\\n thing")
def leaves():
    sys.exit(3)
""",
    "sitecustomize.py": """
import sys
sys.user_site = True
if "_rolltape_hook" in sys.modules:
    sys.modules["_rolltape_hook"].watch({"fake_engine": "fake_recorder:bind"})
""",
}


class Jobs:
    """Runs Python with the hook on PYTHONPATH, as `rolltape record` would start it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tape = store.create_tape(folder / "tape", role="rollout")
        (self.tape / "procs").mkdir()
        for name, text in FILES.items():
            (folder / name).write_text(text)

    def watch(self, target: str) -> None:
        path = self.folder / "sitecustomize.py"
        path.write_text(path.read_text().replace("fake_recorder:bind", target))

    def env(self, *, hook: bool = True, **more: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("ROLLTAPE_")}
        folders = [str(INJECT), str(self.folder), str(ROOT)]
        if hook:
            env["ROLLTAPE_TAPE"] = str(self.tape)
        return {**env, "PYTHONPATH": ":".join(folders if hook else folders[1:]), **more}

    def python(
        self, *args: str, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *args],
            cwd=self.folder,
            env=env or self.env(),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def output(self, code: str, **how: Any) -> str:
        done = self.python("-c", code, **how)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def heartbeats(self) -> list[dict[str, Any]]:
        files = [p for p in (self.tape / "procs").iterdir() if p.name[0].isdigit()]
        return [json.loads(p.read_text()) for p in files]

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in (self.tape / "procs").glob("note-*")]


@pytest.fixture
def job(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """The hook's module, loaded here but not started."""
    spec = importlib.util.spec_from_file_location("hook_here", INJECT / "_rolltape_hook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- start-up -----------------------------------------------------------------------------


def test_start_up_loads_the_hook_and_nothing_else(job: Jobs) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    plain = set(job.output(code, env=job.env(hook=False)).split())
    hooked = set(job.output(code).split())
    assert hooked - plain == {"_rolltape_hook"}
    heavy = {"numpy", "pyarrow", "asyncio", "torch", "wrapt", "click", "json", "typing", "re"}
    assert not hooked & (heavy - plain)
    assert {"rolltape", "numpy", "pyarrow", "asyncio", "torch", "wrapt", "click"} & hooked == set()


def test_without_the_switch_nothing_happens(job: Jobs) -> None:
    env = job.env()
    del env["ROLLTAPE_TAPE"]
    code = "import sys; print('_rolltape_hook' in sys.modules, sys.user_site)"
    assert job.output(code, env=env) == "False True\n"
    assert job.heartbeats() == []


def test_each_process_leaves_a_heartbeat(job: Jobs) -> None:
    (job.folder / "main.py").write_text("import os; print(os.getpid(), os.getppid())")
    done = job.python("main.py")
    (beat,) = job.heartbeats()
    assert [beat["pid"], beat["ppid"]] == [int(n) for n in done.stdout.split()]
    assert beat["executable"] == sys.executable
    assert beat["argv0"] == "main.py"
    assert beat["helper"] is False
    (file,) = (job.tape / "procs").iterdir()
    assert file.name == f"{beat['pid']}-{beat['start_ns']}"


@pytest.mark.parametrize("break_it", ["remove", "file", "read-only"])
def test_a_heartbeat_that_cannot_be_written_is_no_ones_problem(job: Jobs, break_it: str) -> None:
    procs = job.tape / "procs"
    procs.rmdir()
    if break_it == "file":
        procs.write_text("")
    if break_it == "read-only":
        procs.symlink_to("/proc/self")
    assert job.output("import fake_engine; print(fake_engine.bound)") == "1\n"


def test_heartbeats_do_not_disturb_the_tape(job: Jobs) -> None:
    job.output("pass")
    assert store.seal(job.tape)["shards"] == []
    assert len(store.open(job.tape)) == 0


@given(st.text() | st.text(st.characters(categories=("Cs",))))
def test_heartbeats_are_json_whatever_the_names(hook: ModuleType, text: str) -> None:
    facts = {text: text, "n": -3, "yes": True, "no": False}
    parsed = json.loads(hook._json(facts))
    # JSON pairs surrogates up, so compare what the pairs mean
    same = json.loads(json.dumps(facts))
    assert parsed == same
    assert hook._json(facts).isascii()


# -- the hook -----------------------------------------------------------------------------


def test_the_recorder_is_called_once_after_the_engine_has_been_imported(job: Jobs) -> None:
    code = """
import sys
assert "fake_recorder" not in sys.modules
import fake_engine, importlib
print(fake_engine.bound)
import fake_engine
importlib.reload(fake_engine)
print(fake_engine.bound)
"""
    assert job.output(code) == "1\n0\n"


def test_the_engine_keeps_its_own_loader(job: Jobs) -> None:
    code = """
import fake_engine as e, inspect
print(type(e.__loader__).__name__, e.__spec__.loader is e.__loader__,
      e.spec_at_import is e.__loader__, "name = 'engine'" in inspect.getsource(e))
"""
    assert job.output(code) == "SourceFileLoader True True True\n"


def test_looking_for_the_engine_does_not_set_the_hook_off(job: Jobs) -> None:
    code = """
import importlib.util, sys
spec = importlib.util.find_spec("fake_engine")
name = spec.loader.get_filename("fake_engine")
print(name.endswith("fake_engine.py"), name == spec.origin)
print("fake_recorder" in sys.modules)
import fake_engine
print(fake_engine.bound)
"""
    assert job.output(code) == "True True\nFalse\n1\n"


def test_an_engine_that_is_already_imported_is_bound_at_once(job: Jobs) -> None:
    code = """
import fake_engine, _rolltape_hook
_rolltape_hook.watch({"fake_engine": "fake_recorder:bind"})
print(fake_engine.bound)
"""
    assert job.output(code) == "2\n"


def test_an_engine_that_fails_to_import_stays_watched(job: Jobs) -> None:
    (job.folder / "fake_engine.py").write_text(
        "import sys\nif not hasattr(sys, 'ready'): raise ImportError('not yet')\n"
        "name = 'engine'\nbound = 0\n"
    )
    code = """
import sys
try:
    import fake_engine
except ImportError as error:
    print(error)
sys.ready = True
import fake_engine
print(fake_engine.bound)
"""
    assert job.output(code) == "not yet\n1\n"


def test_other_import_hooks_and_ours_work_together(job: Jobs) -> None:
    code = """
import importlib.util, sys
class Asks:  # as wrapt's does: hands the question back to importlib, hence to all of us
    busy = False
    def find_spec(self, name, path=None, target=None):
        if name != "fake_engine" or self.busy:
            return None
        self.busy = True
        try:
            return importlib.util.find_spec(name)
        finally:
            self.busy = False
class Skips:  # as ours does: asks everybody but itself
    def find_spec(self, name, path=None, target=None):
        if name == "fake_engine":
            specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self)
            return next((s for s in specs if s is not None), None)
sys.meta_path.insert(0 if sys.argv[1] == "first" else 1, {"a": Asks, "s": Skips}[sys.argv[2]]())
import fake_engine
print(fake_engine.bound, type(fake_engine.__loader__).__name__)
"""
    for place, kind in itertools.product(("first", "second"), "as"):
        done = job.python("-c", code, place, kind)
        assert (done.stdout, done.stderr) == ("1 SourceFileLoader\n", "")


# -- faults -------------------------------------------------------------------------------

MANY = """
import subprocess, sys
for _ in range(3):
    code = "import fake_engine; print(fake_engine.name)"
    subprocess.run([sys.executable, "-c", code], check=True)
import fake_engine
print("done")
"""


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("fake_recorder:fails", "fake_recorder:fails failed: LookupError: no such thing ("),
        ("fake_recorder:leaves", "fake_recorder:leaves failed: SystemExit: 3 ("),
        ("fake_recorder:absent", "fake_recorder:absent failed: AttributeError: "),
        ("no_recorder.here:bind", f"no_recorder is not importable by {sys.executable}; "),
    ],
)
def test_a_fault_is_one_line_for_the_whole_job(job: Jobs, target: str, line: str) -> None:
    job.watch(target)
    done = job.python("-c", MANY)
    assert done.returncode == 0
    assert done.stdout == "engine\n" * 3 + "done\n"
    assert done.stderr.startswith(f"rolltape: {line}")
    assert done.stderr.count("\n") == 1
    (note,) = job.notes()
    assert note["about"] == target
    assert done.stderr == f"rolltape: {note['text']}\n"


def test_a_fault_without_a_tape_to_note_it_in_is_still_said(job: Jobs) -> None:
    job.watch("fake_recorder:fails")
    (job.tape / "procs").rmdir()
    done = job.python("-c", "import fake_engine")
    assert done.returncode == 0
    assert done.stderr.count("LookupError") == 1


def test_strict_hands_the_fault_to_the_job(job: Jobs) -> None:
    job.watch("fake_recorder:fails")
    done = job.python("-c", "import fake_engine", env=job.env(ROLLTAPE_STRICT="1"))
    assert done.returncode == 1
    assert "RuntimeError: rolltape: fake_recorder:fails failed: LookupError" in done.stderr


def test_the_launcher_puts_faults_on_the_tape(job: Jobs) -> None:
    job.watch("fake_recorder:fails")
    env = {k: v for k, v in job.env().items() if not k.startswith("ROLLTAPE_")}
    command = ["record", "-o", "other", "--summary-json", "s.json", "--", sys.executable]
    done = job.python("-m", "rolltape", *command, "-c", "import fake_engine", env=env)
    assert done.returncode == 0
    assert "nothing was recorded: the recorder failed" in done.stderr
    tape = store.open(job.folder / "other")
    (event,) = tape.rows("events")
    assert event["kind"] == "hook_error"
    assert json.loads(event["detail"])["hook"] == "fake_recorder:fails"
    summary = json.loads((job.folder / "s.json").read_text())["recorded"]
    assert summary["hook_errors"] == 1
    assert "LookupError" in summary["messages"][0]
    assert list((job.folder / "other" / "procs").glob("note-*")) == []


# -- the user's sitecustomize -------------------------------------------------------------


def test_the_next_sitecustomize_runs_and_the_path_is_whole(job: Jobs) -> None:
    code = "import sys, sitecustomize; print(sys.user_site, sitecustomize.__file__, *sys.path[1:3])"
    expected = f"True {job.folder / 'sitecustomize.py'} {INJECT} {job.folder}\n"
    assert job.output(code) == expected


@pytest.mark.parametrize(
    "text", ["raise ValueError('mine')", "import no_such_module_of_mine", "syntax error"]
)
def test_a_failing_sitecustomize_fails_as_it_would_without_us(job: Jobs, text: str) -> None:
    (job.folder / "sitecustomize.py").write_text(text)
    code = "import sys; print('sitecustomize' in sys.modules)"
    plain = job.python("-c", code, env=job.env(hook=False))
    hooked = job.python("-c", code)
    assert plain.stderr != ""
    assert (hooked.returncode, hooked.stdout, hooked.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )
    assert len(job.heartbeats()) == 1


def test_without_another_sitecustomize_there_is_none(job: Jobs) -> None:
    (job.folder / "sitecustomize.py").unlink()
    code = """
import sys
print("sitecustomize" in sys.modules, "_rolltape_hook" in sys.modules)
try:
    import sitecustomize
except ImportError as error:
    print(error.name)
"""
    assert job.output(code, env=job.env(hook=False)) == "False False\nsitecustomize\n"
    assert job.output(code) == "False True\nsitecustomize\n"


def test_two_inject_folders_do_not_chase_each_other(job: Jobs, tmp_path: Path) -> None:
    other = tmp_path / "other" / "inject"
    other.mkdir(parents=True)
    for file in INJECT.glob("*.py"):
        (other / file.name).write_bytes(file.read_bytes())
    path = f"{INJECT}:{other}:{job.folder}"
    env = job.env(PYTHONPATH=path)
    assert job.output("import sys, fake_engine as e; print(e.bound, sys.user_site)", env=env) == (
        "1 True\n"
    )
    assert len(job.heartbeats()) == 1


# -- reach --------------------------------------------------------------------------------

CHILDREN = """
import multiprocessing, subprocess, sys

def bound(queue):
    import fake_engine
    queue.put(fake_engine.bound)

if __name__ == "__main__":
    how = sys.argv[1]
    if how == "subprocess":
        code = "import fake_engine; print(fake_engine.bound)"
        sys.exit(subprocess.run([sys.executable, "-c", code]).returncode)
    context = multiprocessing.get_context(how)
    queue = context.SimpleQueue()
    process = context.Process(target=bound, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
"""


@pytest.mark.parametrize(
    ("how", "beats"), [("subprocess", 2), ("fork", 1), ("spawn", 2), ("forkserver", 1)]
)
def test_children_are_reached(job: Jobs, how: str, beats: int) -> None:
    (job.folder / "main.py").write_text(CHILDREN)
    done = job.python("main.py", how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert len([b for b in job.heartbeats() if not b["helper"]]) == beats


def test_children_whose_pythonpath_is_built_from_sys_path_are_reached(job: Jobs) -> None:
    scripts = job.folder / "scripts"
    scripts.mkdir()
    (scripts / "main.py").write_text("""
import os, subprocess, sys
env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
code = "import fake_engine; print(fake_engine.bound)"
sys.exit(subprocess.run([sys.executable, "-c", code], env=env).returncode)
""")
    done = job.python("scripts/main.py")
    assert (done.stdout, done.stderr) == ("1\n", "")


# -- pth ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python of its own, so that no file goes into the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("venv")
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, timeout=60)
    return folder / "bin" / "python"


def pth_files(python: Path) -> list[str]:
    return [p.name for p in python.parents[1].glob("lib/*/site-packages/rolltape*")]


def record_pth(job: Jobs, *command: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in job.env(hook=False).items() if not k.startswith("ROLLTAPE_")}
    args = ["-m", "rolltape", "record", "-o", "recorded", "--inject", "pth", "--", *command]
    return job.python(*args, env=env)


@pytest.mark.parametrize("flag", ["-E", "-I", "-s"])
def test_pth_reaches_isolated_pythons_and_is_removed(job: Jobs, venv: Path, flag: str) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(job.folder)!r})
hook = sys.modules["_rolltape_hook"]
hook.watch({{"fake_engine": "fake_recorder:bind"}})
import fake_engine
print(fake_engine.bound, {str(INJECT)!r} in sys.path)
import os, glob
print(len(glob.glob({str(venv.parents[1])!r} + "/lib/*/site-packages/rolltape*.pth")))
"""
    done = record_pth(job, str(venv), flag, "-c", code)
    assert done.stdout == "1 False\n1\n", done.stderr
    assert done.returncode == 0
    assert "1 Python process loaded the recorder" in done.stderr
    assert pth_files(venv) == []


def test_pth_is_removed_when_the_job_is_killed(job: Jobs, venv: Path) -> None:
    done = record_pth(job, str(venv), "-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == 137
    assert pth_files(venv) == []


def test_pth_only_waits_in_other_jobs(job: Jobs, venv: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "ROLLTAPE_TAPE")}
    code = "import sys; print(*sorted(sys.modules))"
    plain = set(subprocess.check_output([venv, "-c", code], env=env, text=True).split())
    engine = "import sys\nhook = '_rolltape_hook' in sys.modules\n"
    (job.folder / "tensorrt_llm.py").write_text(engine)
    with pth_file(str(venv)) as file:
        assert file.suffix == ".pth"
        found = set(subprocess.check_output([venv, "-c", code], env=env, text=True).split())
        code = f"import sys; sys.path.append({str(job.folder)!r}); import tensorrt_llm as t"
        code += f"; print(t.hook, {str(INJECT)!r} in sys.path)"
        done = subprocess.run([venv, "-c", code], env=env, capture_output=True, text=True)
    assert found - plain == {"_rolltape_late"}
    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert job.heartbeats() == []
    assert not file.exists()


#: What a worker of an MPI pool sees: no variable at start, and ours, prefixed, before its task is
#: unpickled, which imports the engine.
LATE = """
import os, sys
assert "_rolltape_hook" not in sys.modules and "ROLLTAPE_TAPE" not in os.environ
sys.path[:0] = [{folder!r}, {root!r}]
os.environ["TLLM_ROLLTAPE_TAPE"], os.environ["TLLM_ROLLTAPE_LEVEL"] = {tape!r}, "tokens"
os.environ["TLLM_ROLLTAPE_LAYERS"], os.environ["ROLLTAPE_LAYERS"] = "1", "0"
import fake_engine as before, tensorrt_llm
print(before.bound, sorted(n + "=" + v for n, v in os.environ.items() if n[:9] == "ROLLTAPE_"))
sys.modules["_rolltape_hook"].watch({{"tensorrt_llm.part": "fake_recorder:part"}})
import tensorrt_llm.part
print(tensorrt_llm.part.bound, {inject!r} in sys.path)
"""


#: As a worker may find out, before that, whether the engine is installed.
ASK = """sys.path[:0] = [{folder!r}]
from importlib.util import find_spec
assert find_spec("tensorrt_llm") is not None and "tensorrt_llm" not in sys.modules
sys.path.remove({folder!r})
"""


@pytest.mark.parametrize("asked", ["", ASK], ids=["not asked", "asked"])
def test_pth_adopts_variables_that_arrive_late(job: Jobs, venv: Path, asked: str) -> None:
    package = job.folder / "tensorrt_llm"
    package.mkdir()
    (package / "__init__.py").write_text("import os\nassert os.environ['ROLLTAPE_TAPE']\n")
    (package / "part.py").write_text("bound = 0\n")
    with (job.folder / "fake_recorder.py").open("a") as file:
        file.write("def part():\n    sys.modules['tensorrt_llm.part'].bound += 1\n")
    where = {"folder": str(job.folder), "root": str(ROOT), "tape": str(job.tape)}
    code = LATE.replace("sys.path[:0]", asked + "sys.path[:0]")
    env = {k: v for k, v in job.env(hook=False).items() if k != "PYTHONPATH"}
    with pth_file(str(venv)):
        done = subprocess.run(
            [venv, "-c", code.format(**where, inject=str(INJECT))],
            env=env,
            capture_output=True,
            text=True,
        )
    adopted = ["ROLLTAPE_LAYERS=0", "ROLLTAPE_LEVEL=tokens", f"ROLLTAPE_TAPE={job.tape}"]
    assert (done.stdout, done.stderr) == (f"0 {adopted}\n1 False\n", "")
    assert len(job.heartbeats()) == 1


def test_pth_is_removed_after_an_error(venv: Path) -> None:
    def interrupted() -> None:
        with pth_file(str(venv)):
            assert len(pth_files(venv)) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert pth_files(venv) == []


def test_pth_for_a_python_that_does_not_run_is_refused_before_anything_starts(job: Jobs) -> None:
    broken = job.folder / "python3"
    broken.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    broken.chmod(0o755)
    done = record_pth(job, str(broken), "-c", "pass")
    assert done.returncode == 2
    assert "rolltape: error: --inject pth" in done.stderr
    assert "-I fails: broken" in done.stderr
    assert not (job.folder / "recorded").exists()


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    for name, first in {
        "python3.11": "",
        "tool": f"#!{tmp_path}/python3.11 -u\n",
        "env_tool": "#!/usr/bin/env -S VAR=1 python3.11\n",
        "shell_tool": "#!/bin/sh\n",
        "python": "",
    }.items():
        (tmp_path / name).write_text(first)
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "interpreter"),
    [
        ("python3.11", "python3.11"),
        ("tool", "python3.11"),
        ("env_tool", "python3.11"),
        ("shell_tool", "python"),
        ("not-there", "python"),
    ],
)
def test_the_interpreter_of_a_command_is_found(
    programs: Path, command: str, interpreter: str
) -> None:
    found = interpreter_of([command], {"PATH": str(programs)})
    assert found == str(programs / interpreter)


def test_a_command_without_any_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InjectionError, match="no Python interpreter found for 'make'"):
        interpreter_of(["make"], {"PATH": str(tmp_path)})


def test_a_clone_beside_the_script_does_not_stand_in_for_the_package(tmp_path: Path) -> None:
    """`~/rollout.py` beside `~/rolltape`, a clone: the usual way to try it."""
    (tmp_path / "rolltape" / "store").mkdir(parents=True)  # a namespace package, to Python
    (tmp_path / "engine.py").write_text("")
    (tmp_path / "rollout.py").write_text(
        "import sys\n"
        f"sys.path.append({str(INJECT)!r})\n"
        "import _rolltape_hook as hook\n"
        "hook.watch({'engine': 'rolltape.store.writer:new_uuid'})\n"
        "import engine, rolltape\n"
        "print(rolltape.__version__, rolltape.store.__name__)\n"
    )
    package = Path(rolltape.__file__)
    env = {**os.environ, "ROLLTAPE_PACKAGE": str(package), "ROLLTAPE_TAPE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "rollout.py")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == f"{rolltape.__version__} rolltape.store", done.stderr

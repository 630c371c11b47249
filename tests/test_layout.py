"""What importing each package loads, and that our package names live beside others'."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "simpy", "pandas", "pyarrow", "matplotlib", "rich", "yaml", "transformers")


def loaded_by(statement: str) -> set[str]:
    """The top-level names of HEAVY that a fresh interpreter has loaded after `statement`."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout))


@pytest.mark.parametrize("package", ["engine", "engine.core", "sim", "traces", "kernels", "experiments"])
def test_importing_a_package_loads_nothing_heavy(package: str) -> None:
    """Importing any of our packages loads no tensor library, no event loop and no data frames."""
    assert loaded_by(f"import {package}") == set()


def test_loading_a_trace_needs_no_torch() -> None:
    """Reading and generating traces works on a plain install, which brings no torch."""
    assert loaded_by("import traces.readers, traces.generate, traces.stats") & {"torch", "simpy", "matplotlib"} == set()


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    """transformers looks for a package named `kernels`; beside ours it finds none it can use, and its models import."""
    pytest.importorskip("transformers", reason="transformers is not installed (extra `dev`)")
    code = (
        "import kernels\n"
        "from transformers.utils import is_kernels_available\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "import transformers.integrations.hub_kernels\n"
        "print(kernels.__file__)\n"
        "print(is_kernels_available())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    path, available = ran.stdout.split()
    assert path.replace("\\", "/").endswith("kernels/__init__.py")
    assert "site-packages/kernels" not in path.replace("\\", "/")
    assert available == "False"

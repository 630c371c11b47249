"""The simulator beside AISimulate, the fastest public one, doing the same work in the same minutes: `make bench-peers`.

AISimulate (Rust, Apache-2.0) comes as a wheel, which is put into an environment of its own: $KVTWIN_PEERS_DIR, or
~/.cache/kvtwin/peers. The work is that of sim.py. It offers two kinds of step times, and both are run: `polynomial`, a
formula, as ours is, and `default`, a lookup in its database of measured kernels. Exit code 2, with one sentence, where
the wheel cannot be had.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from simcommand import BLOCKS, MAX_NUM_SEQS, OUTPUT, PROMPT, RATE, Took, loop_s, simulate, table, took, workload  # noqa: E402

PACKAGE = "aisimulate==0.12.0.dev2"

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Llama-2-7B, so that nothing is fetched from a hub."""


def folder() -> Path:
    return Path(os.environ.get("KVTWIN_PEERS_DIR") or Path.home() / ".cache" / "kvtwin" / "peers").expanduser()


def environment() -> Path | None:
    """The command of AISimulate, made if it is not there; None: it cannot be had."""
    venv = folder() / "venv"
    command, stamp = venv / "bin" / "aisimulate", venv / ".done"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == PACKAGE and command.is_file():
        return command
    print(f"Installing {PACKAGE} into {venv} (about a minute) ...", file=sys.stderr)
    python = venv / "bin" / "python"
    for step in (
        [sys.executable, "-m", "venv", str(venv)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE],
    ):
        try:
            done = subprocess.run(step, capture_output=True, text=True, check=False)
        except OSError:
            return None
        if done.returncode:
            return None
    stamp.write_text(PACKAGE, encoding="utf-8")
    return command


def peer(command: Path, work: Path, num: int, timing: str) -> Took:
    """AISimulate on `num` requests, its report written."""
    model = work / "llama-2-7b"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    worker = {
        "scheduler": {"max_batched_tokens": 2048, "max_sequences": MAX_NUM_SEQS},
        "timing": {"type": timing},
        "kv_cache": {"block_size": 16, "prefix_caching": True, "capacity": {"type": "fixed", "blocks": BLOCKS}},
    }
    description = {
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": PROMPT, "output_tokens": OUTPUT},
            "load": {"type": "poisson", "requests_per_second": RATE, "seed": 0},
            "stop": {"requests": num},
        },
        "engine": {
            "mode": "aggregated",
            "model": str(model),
            "hardware": "a100_sxm",
            "backend": "vllm",
            "backend_version": "current",
            "context_length": 4096,
            "workers": {"aggregated": worker},
        },
    }
    path = work / "aisimulate.yaml"
    path.write_text(json.dumps(description), encoding="utf-8")  # JSON is YAML
    out = ["--output-dir", str(work / "aisimulate"), "--overwrite", "--format", "json"]
    return took([str(command), "predict", "-c", str(path), *out])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000", help="numbers of requests (default: %(default)s)")
    parser.add_argument("--default-timing-up-to", type=int, default=10_000, help="requests with its database at most")
    args = parser.parse_args()
    command = environment()
    if command is None:
        print(f"{PACKAGE} cannot be installed here; give a network with PyPI, or set PIP_INDEX_URL.", file=sys.stderr)
        return 2
    rows = [["", "requests", "user s", "wall s", "peak MB", "req/CPU-s"]]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for num in (int(size) for size in args.sizes.split(",")):
            runs = [
                ("kvtwin", simulate(workload(work, num), work / "out")),
                ("kvtwin, Python sources", simulate(workload(work, num), work / "out", pure=True)),
                ("AISimulate, polynomial", peer(command, work, num, "polynomial")),
            ]
            if num <= args.default_timing_up_to:
                runs.append(("AISimulate, database", peer(command, work, num, "default")))
            for title, one in runs:
                if one.code:
                    last = one.errors.strip().splitlines()[-1:] or ["no message"]
                    print(f"{title} failed on {num} requests: {last[0]}", file=sys.stderr)
                    return 2
                rows.append(
                    [
                        title,
                        f"{num:,}",
                        f"{one.user_s:.2f}",
                        f"{one.wall_s:.2f}",
                        f"{one.peak_mb:.0f}",
                        f"{num / one.user_s:,.0f}",
                    ]
                )
    print(f"Whole commands, start-up included. Ten million additions in a Python loop: {loop_s():.2f} CPU-seconds.")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

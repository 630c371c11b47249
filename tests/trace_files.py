"""A small file of every format that traces can be read in, as text, for tests of what all of them have in common."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import traces

__all__ = ["sample_files"]

_AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
_TEXTS = {
    "azure-2023": _AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47,39,9\n",
    "azure-2024": _AZURE + "2024-05-12 00:00:00.004102+00:00,216,5\n2024-05-12 00:00:20+00:00,300,30\n",
    "burstgpt": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "100.0,aa,43,GPT-4,906,46,952,Conversation log\n161.0,bb,2,ChatGPT,36,29,65,Conversation log\n"
    ),
    "vidur": "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,37,4\n4.314579,396,10\n",
    "servegen-pmf": "field,tokens,probability\ninput_tokens,12,0.6\ninput_tokens,20,0.4\noutput_tokens,3,1\n",
}
_ROWS: dict[str, list[dict[str, object]]] = {
    "llmservingsim": [
        {"input_toks": 3, "output_toks": 2, "arrival_time_ns": 5, "input_tok_ids": [7, 8, 9], "output_tok_ids": [1, 2]},
        {"input_toks": 6, "output_toks": 4, "arrival_time_ns": 9, "input_tok_ids": [7, 8, 9, 1, 2, 5]},
    ],
    "ragpulse": [
        {
            "timestamp": "82",
            "input_length": 31,
            "output_length": 19,
            "hash_ids": {
                "sys_prompt": [8302],
                "passages_ids": [1, 2],
                "history": [],
                "web_search": [],
                "user_input": [3],
            },
            "session_id": "a",
        }
    ],
    "agent-calls": [
        {"set": "a", "session": "x", "turn": 0, "dt_us": 0, "in_chars": 130, "out_chars": 9, "hashes": [1, 2]},
        {"set": "a", "session": "x", "turn": 1, "dt_us": 20, "in_chars": 192, "out_chars": 0, "hashes": [1, 2, 3]},
    ],
    "bailian": [
        {
            "chat_id": 159,
            "parent_chat_id": -1,
            "timestamp": 61.114,
            "input_length": 40,
            "output_length": 13,
            "type": "text",
            "turn": 1,
            "hash_ids": [1, 2, 3],
        }
    ],
    "mooncake": [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 700, "output_length": 4, "hash_ids": [0, 3]},
    ],
    "aiperf": [
        {
            "metadata": {"request_start_ns": 1796068592547932407, "was_cancelled": False},
            "metrics": {"input_sequence_length": {"value": 64}, "output_sequence_length": {"value": 32}},
        }
    ],
}
_OBJECTS: dict[str, object] = {
    "sharegpt": [
        {"id": "x", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi there"}]}
    ],
    "vllm-bench": {
        "num_prompts": 2,
        "request_throughput": 9.7,
        "input_lens": [84, 85],
        "output_lens": [16, 8],
        "start_times": [2027.5, 2028.75],
        "errors": ["", ""],
    },
    "guidellm": {
        "metadata": {"guidellm_version": "0.8.1"},
        "benchmarks": [
            {"requests": {"successful": [{"prompt_tokens": 64, "output_tokens": 16, "request_start_time": 1.5}]}}
        ],
    },
    "genai-bench": {
        "aggregated_metrics": {},
        "individual_request_metrics": [{"num_input_tokens": 62, "num_output_tokens": 16, "error_code": None}],
    },
}


def sample_files(folder: Path) -> dict[str, Path]:
    """Writes the samples; returns the path of each format's."""
    texts = dict(_TEXTS)
    texts |= {name: "".join(json.dumps(row) + "\n" for row in rows) for name, rows in _ROWS.items()}
    texts |= {name: json.dumps(value, indent=1) + "\n" for name, value in _OBJECTS.items()}
    paths = {}
    for name, text in texts.items():
        paths[name] = folder / f"{name}.txt"
        paths[name].write_text(text)
    paths["servegen-pmf"] = paths["servegen-pmf"].rename(folder / "m_length_pmf.csv")
    (folder / "m_rate_10min.csv").write_text(
        "t_s,total_rate_rps,rate_weighted_client_cv,active_clients,top_client_share\n0,0.1,2.5,2,0.6\n"
    )
    paths["servegen-pool"] = folder / "pool.tar"
    with tarfile.open(paths["servegen-pool"], "w") as archive:
        for member, text in (
            ("chunk-0-trace.csv", "0,0.1,1.0,Gamma,1.0,5.0\r\n600,0,0,,0,0\r\n"),
            (
                "chunk-0-dataset.json",
                json.dumps({"0": {"input_tokens": "{45: 0.5, 6: 0.5}", "output_tokens": "{9: 1}"}}),
            ),
        ):
            info = tarfile.TarInfo(f"pool/{member}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    own = traces.make_trace([0, 9], [4, 6], [1, 2])
    for name, ending in (("kvtwin-parquet", "parquet"), ("kvtwin-jsonl", "jsonl")):
        paths[name] = folder / f"own.{ending}"
        traces.save(own, paths[name])
    return paths

"""Packs a public trace of a serving cluster for the simulator: ``python scripts/bench/data/pack_served.py TRACE NAME``.

TRACE is Azure's ``AzureLLMInferenceTrace_*.csv`` or Mooncake's ``*_trace.jsonl``, plain or gzip. Arrivals in milliseconds since
the first one, prompt and answer in tokens: nothing else is kept. Written to ``orchestrator/sim/served_NAME.json.xz``; source,
licence and citation in its header are typed in here.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import lzma
import sys
from pathlib import Path

ABOUT = {
    "azure_code": {
        "source": "Azure/AzurePublicDataset, commit b469a113, data/AzureLLMInferenceTrace_code.csv",
        "licence": "CC-BY-4.0",
        "cite": "Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024",
    },
    "mooncake_conversation": {
        "source": "kvcache-ai/Mooncake, commit 3b5a5941, FAST25-release/traces/conversation_trace.jsonl",
        "licence": "Apache-2.0",
        "cite": "Qin et al., Mooncake: Trading More Storage for Less Computation, FAST 2025",
    },
}


def rows(text: str) -> list[tuple[int, int, int]]:
    """(milliseconds, prompt, answer), in order."""
    if text.startswith("{"):
        lines = [json.loads(line) for line in text.splitlines()]
        found = [(int(line["timestamp"]), int(line["input_length"]), int(line["output_length"])) for line in lines]
    else:
        found = []
        for line in csv.DictReader(text.splitlines()):
            at = datetime.datetime.fromisoformat(line["TIMESTAMP"][:26])
            found.append((round(at.timestamp() * 1000), int(line["ContextTokens"]), int(line["GeneratedTokens"])))
    found.sort()
    return [(at - found[0][0], prompt, answer) for at, prompt, answer in found]


def main() -> None:
    """Pack."""
    trace, name = Path(sys.argv[1]), sys.argv[2]
    data = trace.read_bytes()
    text = (gzip.decompress(data) if trace.suffix == ".gz" else data).decode()
    packed = {**ABOUT[name], "columns": ["milliseconds", "prompt tokens", "answer tokens"], "rows": rows(text)}
    target = Path(__file__).parents[3] / "orchestrator" / "sim" / "coserving" / f"served_{name}.json.xz"
    target.write_bytes(
        lzma.compress(json.dumps(packed, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    )
    print(target.name, len(packed["rows"]), "requests,", target.stat().st_size, "bytes")


if __name__ == "__main__":
    main()

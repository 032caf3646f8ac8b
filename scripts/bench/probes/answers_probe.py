"""What a model answers greedily to held-out questions of a config's task in one turn, by transformers. Prints JSON.

``python -m scripts.bench.probes.answers_probe MODEL FIRST COUNT CONFIG OVERRIDE...``: of the questions from number FIRST on, a
row each: what it said, whether that is right, whether it is well formed (it ended, and ``task.chat.answer`` is in it).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from orchestrator.api import Prompt
from orchestrator.config import load_config
from orchestrator.runtime.preflight import make_task
from orchestrator.tasks.chat_task import ChatTask

_BATCH = 32


def main(arguments: list[str]) -> None:
    """See the module."""
    folder, first, count, config, *overrides = arguments
    task = make_task(load_config(Path(config), overrides))
    assert isinstance(task, ChatTask)
    prompts = list(islice(task.prompts("heldout", 0), int(first), int(first) + int(count)))
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    form = re.compile(load_config(Path(config), overrides).task.chat.answer, re.DOTALL)
    print(json.dumps({"rows": asyncio.run(_rows(task, model, prompts, form))}))


async def _rows(task: ChatTask, model: Any, prompts: list[Prompt], form: re.Pattern[str]) -> list[dict[str, Any]]:
    rows = []
    for begin in range(0, len(prompts), _BATCH):
        part = prompts[begin : begin + _BATCH]
        environments = [task.environment() for _ in part]
        contexts = [(await one.reset(prompt)).token_ids for one, prompt in zip(environments, part, strict=True)]
        for prompt, one, said in zip(part, environments, _said(task, model, contexts), strict=True):
            text = task.chat.text(said).strip()
            ended = said[-1] in task.chat.stop_ids
            reward = (await one.step(said)).reward
            await one.close()
            row = {"question": prompt.payload, "said": text, "right": reward > 0.5}
            rows.append(row | {"well_formed": ended and form.search(text) is not None})
    return rows


def _said(task: ChatTask, model: Any, contexts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Rows are padded on the left, where attention does not look."""
    widest = max(map(len, contexts))
    padded = torch.tensor([[task.pad_id] * (widest - len(ids)) + list(ids) for ids in contexts])
    mask = torch.tensor([[0] * (widest - len(ids)) + [1] * len(ids) for ids in contexts])
    with torch.no_grad():
        out = model.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=task.max_response_tokens,
            eos_token_id=sorted(task.chat.stop_ids),
            pad_token_id=task.pad_id,
        )
    answers = []
    for ids in out[:, widest:].tolist():
        end = next((place + 1 for place, token in enumerate(ids) if token in task.chat.stop_ids), len(ids))
        answers.append(tuple(ids[:end]))
    return answers


if __name__ == "__main__":
    main(sys.argv[1:])

"""Sections of a config: a data set of the user's (task.name = "dataset")."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from orchestrator.settings.section import Positive, Section

Target = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
Weight = Annotated[float, Field(allow_inf_nan=False)]


class DataSection(Section):
    """See docs/recipes/data_set.md. Paths are those of the folder that the run starts in."""

    file: str = ""  # NAME.jsonl, NAME.parquet, or hf:FOLDER (hf:FOLDER:SPLIT), a Hugging Face data set on this disk
    heldout: str = (
        ""  # the same, of rows that are never trained on; empty: a fifth of `file`, by the hash of the prompt
    )
    prompt: str = "prompt"  # column: text, or a list of messages
    answer: str = "answer"  # column passed to the reward: text or a number
    columns: tuple[str, ...] = ()  # more columns passed to it
    # module:function, called with what the policy said, the answer, and the row; or several, each with its weight
    reward: Target | dict[Target, Weight] = {}
    tokenizer: str = ""  # a Hugging Face folder with a chat template; empty: characters, for the tiny model
    system: str = ""  # instructions before every prompt; empty: the template's own, if any
    prompt_tokens: Positive = 512  # of a prompt in its template, at most
    skip_long: bool = False  # leave longer prompts out; false: they are an error
    response_tokens: Positive = 256  # of an answer, at most

    @property
    def rewards(self) -> dict[str, float]:
        """Functions by name, with their weights."""
        return {self.reward: 1.0} if isinstance(self.reward, str) else dict(self.reward)

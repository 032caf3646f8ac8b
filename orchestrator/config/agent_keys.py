"""Sections of a config: an agent program that makes the trajectories (task.name = "agent")."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.settings.section import Positive, PositiveSeconds, Section


class AgentSection(Section):
    """See docs/agents.md. Paths are those of the folder that the run starts in."""

    command: tuple[str, ...] = ()  # the program and its arguments, started in its working folder
    files: tuple[str, ...] = ()  # files and folders that are copied there for every trajectory
    readable: tuple[str, ...] = ()  # folders of this machine that it may read, at the same path: a virtual environment
    variables: dict[str, str] = {}  # environment variables beside OPENAI_BASE_URL, OPENAI_API_KEY and AGENT_PROMPT
    prompts: str = ""  # a file with one start state per line
    tokenizer: str = ""  # a Hugging Face folder with a chat template; empty: characters, for the tiny model
    max_turns: Positive = 8  # answers of the policy in a trajectory
    response_tokens: Positive = 64  # of an answer
    context_tokens: Positive = 512  # of a context with its answer
    reward: Literal["output", "exit"] = "output"  # what the reward is: the last line that it prints, or its exit code
    zero_exit: Annotated[int, Field(ge=1, le=125)] = 1  # with reward = "exit": the exit code for a reward of 0
    own_sampling: bool = False  # use the temperature and top_p that the agent asks for, not the run's
    tool_calls: bool = True  # find <tool_call> in what the policy wrote
    request_seconds: PositiveSeconds = 600.0  # for one answer
    concurrent: Positive = 16  # open requests per trajectory
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of the endpoint, on loopback; 0: a free one
    body_mb: Positive = 8  # of one request
    memory_mb: Positive = 512  # of the program
    cpu_seconds: Positive = 60  # of each of its processes
    processes: Positive = 64  # with their threads

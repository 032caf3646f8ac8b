"""What the sections of a config share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import InitErrorDetails, PydanticCustomError

Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # also a part of a URL


class Section(BaseModel):
    """Base of all sections: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def violation(name: str, value: object, fix: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("conflict", "{fix}", {"fix": fix}), loc=(name,), input=value)

"""What all closed records of settings share: the base class, and errors that say field, value and fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from orchestrator.api import ConfigError
from orchestrator.settings.config_mistakes import mistakes_in

Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # also a part of a URL


Conflict = tuple[str, object, str]  # field (with dots within the section), value, what to do


class Section(BaseModel):
    """Base of all sections: closed, immutable, and without conflicts. ``table``: where it stands in a run's config."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    table: ClassVar[tuple[str, ...]] = ()

    def conflicts(self) -> Iterable[Conflict]:
        """Of values that are right by themselves, those that are not beside each other."""
        return ()

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        found = [
            InitErrorDetails(type=PydanticCustomError("conflict", "{fix}", {"fix": fix}), loc=(name,), input=value)
            for name, value, fix in self.conflicts()
        ]
        if found:
            raise ValidationError.from_exception_data(type(self).__name__, found)
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Strict: an unknown key is a ConfigError, and so is what a run's config would be refused for, in its words."""
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise config_error(error, cls, cls.table) from None


def config_error(error: ValidationError, model: type[BaseModel], prefix: tuple[str, ...] = ()) -> ConfigError:
    """One error that lists every violation of ``model``; ``prefix``: the tables that it lies in."""
    problems = mistakes_in(error, model, prefix)
    field, value, fix = problems[0]
    fix += "".join(f"\n  {ConfigError(name, ShortValue(item), how)}" for name, item, how in problems[1:])
    return ConfigError(field, ShortValue(value), fix)


class ShortValue:
    """A value whose repr does not flood the terminal; a whole section has none."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return _short(self.value)


def _short(value: object) -> str:
    text = "" if isinstance(value, BaseModel | dict) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

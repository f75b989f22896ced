"""How answers are sampled, and what they are rewarded for: sections `sampling` and `reward`."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from hyperpod_ft.config import reward_schema
from hyperpod_ft.config.fields import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Revision,
    Section,
    matches,
    refuse_bool,
    shortened,
)

# The kit's own functions: the keys that each needs, and those that it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "exact_match": (("column",), ()),
    "regex": (("pattern",), ("match",)),
    "json": ((), ("json_schema",)),
    "math_verify": (("column",), ()),
    "length": ((), ("min_length", "max_length")),
}
_OWN = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_]\w*)")


class Sampling(Section):
    """The answers that a training learns from (dataset.format prompt)."""

    generations: Annotated[PositiveInt, Field(ge=2)] = Field(
        8, description="Answers to each prompt. Not for distillation, which samples one."
    )
    max_completion_length: PositiveInt = Field(
        256, description="Tokens of an answer, at most, after a prompt of at most dataset.max_length."
    )
    beta: NonNegativeFloat = Field(0.0, description="Weight of the KL divergence from the base model; 0: none.")
    temperature: PositiveFloat = Field(1.0, description="Temperature of the sampling.")


class Reward(Section):
    """What answers are rewarded for (training.objective grpo or rloo): the weighted sum is an answer's reward."""

    function: Annotated[str, Field(min_length=1)] = Field(
        description="`exact_match` (the answer equals a column, except for surrounding white space), `math_verify`"
        " (its last number or LaTeX expression equals that of a column), `regex`, `json` (valid JSON), `length` (within"
        " limits): 1 if so, else 0. Or your own `rewards.py:function`: `function(prompt, completion, /, **columns)`"
        " returns a number, or None where it does not apply."
    )
    name: Annotated[str, matches(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", "a name of letters, digits, _ and -")] | None = Field(
        None, description="Name in metrics and reports; by default the function's."
    )
    weight: Annotated[float, BeforeValidator(refuse_bool), Field(ge=-1e9, le=1e9)] = Field(
        1.0, description="Factor in the sum, negative for what is not wanted."
    )
    column: str | None = Field(
        None, description="`exact_match`, `math_verify`: the column of the dataset with the expected answer."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="`json`: the JSON schema that the answer must follow, for example `{type: object}`."
    )
    pattern: str | None = Field(None, description="`regex`: the regular expression, as Python's `re` reads it.")
    match: Literal["full", "search"] = Field(
        "full", description="`regex`: whether it matches the whole answer, or is found in it."
    )
    min_length: NonNegativeInt = Field(0, description="`length`: the smallest number of characters.")
    max_length: NonNegativeInt | None = Field(None, description="`length`: the largest.")
    timeout: PositiveFloat = Field(10.0, description="Seconds that a call may take.")
    revision: Revision | None = Field(None, description="Digest of your file; set by the kit.")

    @property
    def file(self) -> str | None:
        """The file of the user's function; None for one of the kit's."""
        own = _OWN.fullmatch(self.function)
        return own["file"] if own else None

    @property
    def function_name(self) -> str:
        return self.function.rpartition(":")[2]

    @property
    def known_as(self) -> str:
        """Its name in metrics."""
        return self.name or self.function_name

    @model_validator(mode="after")
    def _has_its_keys(self) -> "Reward":
        if self.function not in _KEYS and self.file is None:
            raise ValueError(
                f"function: {shortened(self.function)} is neither one of {', '.join(_KEYS)} nor of the form"
                " rewards.py:function"
            )
        needed, possible = _KEYS.get(self.function, ((), ()))
        if missing := [key for key in needed if getattr(self, key) is None]:
            raise ValueError(f"{missing[0]}: is missing; function {self.function} needs it")
        for key in sorted({key for keys in _KEYS.values() for of in keys for key in of}.difference(needed, possible)):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: has no effect with function {shortened(self.function)}; remove it")
        if self.function == "length" and self.max_length is None and not self.min_length:
            raise ValueError("max_length: is missing; set it, or min_length")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError("max_length: is smaller than min_length; correct one of them")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"pattern: is not a regular expression: {error}; correct it") from error
        if self.json_schema is not None and (wrong := reward_schema.problem(self.json_schema)):
            raise ValueError(f"json_schema: {wrong}; correct it")
        if self.revision is not None and self.file is None:
            raise ValueError("revision: is for the file of a function of your own; remove it")
        return self

"""The types of fields in the files users write: what a value may be, and how an error shows a wrong one."""

import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from hyperpod_ft.config.secrets import holds_secret

_SHOWN = 80  # characters of a user's text that an error repeats

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = _SHOWN
_repr.maxlevel, _repr.maxlist, _repr.maxdict = 3, 10, 10


def shortened(text: str, length: int = _SHOWN) -> str:
    """A text as errors repeat it: at most `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def shown(value: object) -> str:
    """A value as errors repeat it: its repr, at most 80 characters."""
    return shortened(_repr.repr(value))


def matches(pattern: str, words: str) -> AfterValidator:
    """Refuses any other string and says what it must be in `words`."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


# Written on an `#SBATCH` line: only text that a shell and sbatch read as one plain word.
SlurmWord = Annotated[
    str,
    matches(r"[A-Za-z0-9][A-Za-z0-9._,+-]{0,127}", "a word of at most 128 letters, digits and . _ , + -"),
]
TimeLimit = Annotated[
    str,
    matches(
        r"\d+-\d{1,2}(:\d{2}){0,2}|\d+(:\d{2}){0,2}",
        "a Slurm time limit, [days-]hours:minutes:seconds, as in 08:00:00",
    ),
]

_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_UNSAFE_PATH = re.compile(r"[^\w ./@+=,:~-]")


def time_limit_seconds(limit: str) -> int:
    """Seconds of a Slurm time limit: minutes[:seconds], hours:minutes:seconds or days-hours[:minutes[:seconds]]."""
    days, dash, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def plain_path(value: str) -> str:
    if bad := _UNSAFE_PATH.search(value):
        raise ValueError(f"contains {bad.group()!r}; use letters, digits, spaces and ./@+=,:~-_ only")
    return value


def no_control_characters(value: str) -> str:
    if _CONTROL_CHARACTER.search(value):
        raise ValueError("contains a line break or another control character")
    return value


PlainPath = Annotated[str, StringConstraints(min_length=1), AfterValidator(plain_path)]
Source = Annotated[str, StringConstraints(min_length=1), AfterValidator(no_control_characters)]
Revision = Annotated[str, matches(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", "a commit, tag or branch")]


def _package_repository(value: str) -> str:
    if holds_secret(value):
        raise ValueError("contains a password; put it into ~/.netrc")
    if value.startswith("/"):
        return plain_path(value)
    if not re.fullmatch(r"(https?|file)://[A-Za-z0-9._~:/%+-]+", value):
        raise ValueError("must be the URL of a package index, or an absolute path to a directory of wheels")
    return value


PackageRepository = Annotated[str, AfterValidator(_package_repository)]


def refuse_bool(value: Any) -> Any:
    # pydantic would read `true` as 1
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


# Far above any sensible value, and below what overflows in torch and Slurm.
PositiveInt = Annotated[int, BeforeValidator(refuse_bool), Field(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, BeforeValidator(refuse_bool), Field(ge=0, le=2**31 - 1)]
Share = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, lt=1)]
NonNegativeFloat = Annotated[float, BeforeValidator(refuse_bool), Field(ge=0, le=1e9, allow_inf_nan=False)]
PositiveFloat = Annotated[float, BeforeValidator(refuse_bool), Field(ge=1e-9, le=1e9, allow_inf_nan=False)]


class Section(BaseModel):
    """A section of such a file: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def flattened(values: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Each value by its whole key, such as `section.key`; lists, and mappings without a key, are values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}{separator}{below}": one for below, one in flattened(value, separator).items()}
        else:
            flat[key] = value
    return flat


# Names of AWS, in cluster files and run files; patterns as botocore's models.
Region = Annotated[str, matches(r"[a-z]{2,4}(-[a-z]+)+-\d", "an AWS region, such as us-west-2")]
RoleArn = Annotated[str, matches(r"arn:aws[a-z-]*:iam::\d{12}:role/?[a-zA-Z_0-9+=,.@\-_/]+", "the ARN of a role")]
Subnet = Annotated[str, matches(r"subnet-[0-9a-f]{8,17}", "the id of a subnet")]
SecurityGroup = Annotated[str, matches(r"sg-[0-9a-f]{8,17}", "the id of a security group")]
FileSystemId = Annotated[str, matches(r"fs-[0-9a-f]{8,17}", "the id of a file system")]
TrainingPlanArn = Annotated[
    str, matches(r"arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:\d{12}:training-plan/.+", "the ARN of a training plan")
]

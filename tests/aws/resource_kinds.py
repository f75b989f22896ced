"""Types of resources in a CloudFormation stack: how to create, delete and, for some, change one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.aws.world import Region

Properties = dict[str, Any]


@dataclass(frozen=True)
class Context:
    region: Region
    logical_id: str
    stack_name: str
    stack_id: str
    tags: tuple[tuple[str, str], ...]

    def client(self, service: str) -> Any:
        return self.region.client(service)

    def all_tags(self, properties: Properties) -> list[dict[str, str]]:
        own = [(t["Key"], t["Value"]) for t in properties.get("Tags", [])]
        system = [
            ("aws:cloudformation:stack-name", self.stack_name),
            ("aws:cloudformation:stack-id", self.stack_id),
            ("aws:cloudformation:logical-id", self.logical_id),
        ]
        return [{"Key": key, "Value": value} for key, value in dict([*self.tags, *own, *system]).items()]


Create = Callable[[Context, Properties], tuple[str, dict[str, Any]]]
Delete = Callable[[Context, str, Properties], None]
Update = Callable[[Context, str, Properties], None]


@dataclass(frozen=True)
class Kind:
    create: Create
    delete: Delete
    update: Update | None = None


def unique_name(context: Context) -> str:
    """A name in the form that CloudFormation generates when the template gives none."""
    suffix = context.stack_id.rpartition("/")[2].replace("-", "")[:12].upper()
    return f"{context.stack_name}-{context.logical_id}-{suffix}"[:64]


def deletion(service: str, method: str, argument: str) -> Delete:
    return lambda context, identifier, _: getattr(context.client(service), method)(**{argument: identifier}) and None

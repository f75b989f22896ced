"""CloudFormation templates, as far as the stand-in needs them: short forms, intrinsic functions, conditions, order."""

import re
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from typing import Any

import yaml

from tests.aws.wire import AwsError

_VARIABLE = re.compile(r"\$\{([^!}][^}]*)\}")


class _Loader(yaml.CSafeLoader):
    """CSafeLoader with CloudFormation's tags: `!Sub x` is {"Fn::Sub": x}."""


def _tagged(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode):
        value: Any = loader.construct_scalar(node)
    elif isinstance(node, yaml.SequenceNode):
        value = loader.construct_sequence(node, deep=True)
    else:
        value = loader.construct_mapping(node, deep=True)
    if suffix == "GetAtt" and isinstance(value, str):
        value = value.split(".", 1)
    return {suffix if suffix in ("Ref", "Condition") else f"Fn::{suffix}": value}


_Loader.add_multi_constructor("!", _tagged)
# A policy's "Version: 2012-10-17" is a string in CloudFormation and a date in YAML.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse(text: str) -> dict[str, Any]:
    try:
        template = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise AwsError("ValidationError", f"Template format error: {error}") from error
    if not isinstance(template, dict) or "Resources" not in template:
        raise AwsError("ValidationError", "Template format error: At least one Resources member must be defined.")
    return template


def parameters_of(template: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    declared = template.get("Parameters", {})
    if unknown := given.keys() - declared.keys():
        raise AwsError("ValidationError", f"Parameters: [{', '.join(sorted(unknown))}] do not exist in the template")
    values: dict[str, Any] = {}
    for name, rules in declared.items():
        if name not in given and "Default" not in rules:
            raise AwsError("ValidationError", f"Parameters: [{name}] must have values")
        value = str(given.get(name, rules.get("Default")))
        if "AllowedValues" in rules and value not in [str(allowed) for allowed in rules["AllowedValues"]]:
            raise AwsError("ValidationError", f"Parameter '{name}' must be one of AllowedValues")
        if "AllowedPattern" in rules and not re.fullmatch(rules["AllowedPattern"], value):
            raise AwsError("ValidationError", f"Parameter '{name}' must match pattern {rules['AllowedPattern']}")
        if rules["Type"] == "Number" and not rules.get("MinValue", float(value)) <= float(value) <= rules.get(
            "MaxValue", float(value)
        ):
            raise AwsError("ValidationError", f"Parameter '{name}' is out of range")
        values[name] = value
    return values


class Resolver:
    """Evaluates expressions, given the parameters and the attributes of resources."""

    def __init__(
        self, template: dict[str, Any], variables: dict[str, Any], attribute: Callable[[str, str], Any]
    ) -> None:
        """`attribute(logical id, name)`: of a resource that exists; an empty name means its Ref."""
        self._template, self._variables, self._attribute = template, variables, attribute

    def condition(self, name: str) -> bool:
        return bool(self.value(self._template["Conditions"][name]))

    def value(self, expression: Any) -> Any:
        if isinstance(expression, list):
            return [v for v in map(self.value, expression) if v is not _NO_VALUE]
        if not isinstance(expression, dict):
            return expression
        if len(expression) == 1:
            name, argument = next(iter(expression.items()))
            if name in _FUNCTIONS:
                return _FUNCTIONS[name](self, argument)
        resolved = {key: self.value(value) for key, value in expression.items()}
        return {key: value for key, value in resolved.items() if value is not _NO_VALUE}

    def reference(self, name: str) -> Any:
        if name == "AWS::NoValue":
            return _NO_VALUE
        return self._variables[name] if name in self._variables else self._attribute(name, "")

    def attribute(self, argument: list[str]) -> Any:
        return self._attribute(argument[0], argument[1])

    def substitute(self, argument: Any) -> str:
        text, local = argument if isinstance(argument, list) else (argument, {})

        def found(match: re.Match[str]) -> str:
            name = match[1]
            if name in local:
                return str(self.value(local[name]))
            return str(self.attribute(name.split(".", 1)) if "." in name else self.reference(name))

        return _VARIABLE.sub(found, text).replace("${!", "${")


_NO_VALUE = object()
_FUNCTIONS: dict[str, Callable[[Resolver, Any], Any]] = {
    "Ref": Resolver.reference,
    "Fn::GetAtt": Resolver.attribute,
    "Fn::Sub": Resolver.substitute,
    "Fn::If": lambda r, a: r.value(a[1] if r.condition(a[0]) else a[2]),
    "Fn::Equals": lambda r, a: str(r.value(a[0])) == str(r.value(a[1])),
    "Fn::Not": lambda r, a: not r.value(a[0]),
    "Fn::Split": lambda r, a: r.value(a[1]).split(a[0]),
    "Fn::Select": lambda r, a: r.value(a[1])[int(a[0])],
}


def order(resources: dict[str, Any]) -> list[str]:
    """Logical ids, each after all that it refers to."""
    graph = {name: set(_named(resource, resources)) - {name} for name, resource in resources.items()}
    return list(TopologicalSorter(graph).static_order())


def _named(value: Any, resources: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, list):
        for member in value:
            yield from _named(member, resources)
    elif isinstance(value, dict):
        for key, member in value.items():
            if key == "DependsOn":
                yield from (name for name in ([member] if isinstance(member, str) else member) if name in resources)
            elif key == "Ref" and member in resources:
                yield member
            elif key == "Fn::GetAtt" and member[0] in resources:
                yield member[0]
            elif key == "Fn::Sub":
                text = member[0] if isinstance(member, list) else member
                yield from (n for v in _VARIABLE.findall(text) if (n := v.partition(".")[0]) in resources)
                if isinstance(member, list):
                    yield from _named(member[1], resources)
            else:
                yield from _named(member, resources)

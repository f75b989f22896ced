"""YAML as users' files have it: the scalars of YAML 1.2, plain values only, and limits on how large they may become.

Every limit is checked while the text is composed, before an alias is expanded: eight lines of nested aliases can stand
for gigabytes.
"""

import re
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from hyperpod_ft.config.fields import shortened, shown
from hyperpod_ft.errors import UserError

MAX_CHARACTERS = 1_000_000  # of a file, and of its scalars once aliases are expanded
MAX_NODES = 10_000  # keys, values and lists, once aliases are expanded
MAX_DEPTH = 20
_MAX_DIGITS = 100

_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+0123456789."),
}
_TAGS = {f"tag:yaml.org,2002:{name}" for name in (*_SCALARS, "str", "seq", "map")}


class _Size(NamedTuple):
    """The size of a node with its aliases expanded."""

    nodes: int
    characters: int
    height: int


class _Refused(yaml.MarkedYAMLError):
    """A file that YAML allows and this reader does not."""

    def __init__(self, problem: str, mark: yaml.Mark, remedy: str = "correct the YAML") -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.remedy = remedy


class _Loader(yaml.SafeLoader):
    """Scalars as YAML 1.2's core schema reads them, no duplicate keys, and no more than the limits.

    PyYAML's 1.1 rules read 24:00:00 as 86400, 1e-4 as a string and `no` as false.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name

    def __init__(self, text: str, *, limited: bool) -> None:
        super().__init__(text)
        self._limited = limited
        self._sizes: dict[int, _Size] = {}  # by id of the node, once it is complete
        self._nodes = self._characters = self._depth = self._deepest = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        nodes, characters, deepest = self._nodes, self._characters, self._deepest
        self._depth += 1
        self._deepest = self._depth
        self._nodes += 1
        self._check_limits(mark)
        node = super().compose_node(parent, index)
        if is_alias:
            size = self._sizes.get(id(node))
            if size is None:
                raise _Refused("an alias inside the value it refers to", mark, "write the value out")
            self._nodes, self._characters = nodes + size.nodes, characters + size.characters
            self._deepest += size.height
        else:
            if node is not None and node.tag not in _TAGS:
                raise _Refused(f"{shortened(node.tag)} is not a supported type of value", mark)
            if isinstance(node, yaml.ScalarNode):
                node.value = _unicode(node.value, mark)
                self._characters += len(node.value)
            self._sizes[id(node)] = _Size(
                self._nodes - nodes, self._characters - characters, self._deepest - self._depth
            )
        self._check_limits(mark)
        self._depth -= 1
        self._deepest = max(deepest, self._deepest)
        return node

    def _check_limits(self, mark: yaml.Mark) -> None:
        for what, size, limit in (
            ("levels of nesting", self._deepest, MAX_DEPTH),
            ("keys and values, with aliases expanded", self._nodes, MAX_NODES),
            ("characters, with aliases expanded", self._characters, MAX_CHARACTERS),
        ):
            if self._limited and size > limit:
                raise _Refused(f"more than {limit:,} {what}", mark, "make it smaller")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _Refused(f"key {shown(key)} is not a string", key_node.start_mark)
            if key in seen:
                raise _Refused(f"key {shown(key)} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _unicode(text: str, mark: yaml.Mark) -> str:
    """The text with each pair of surrogates as one character: so JSON, which is YAML too, escapes an emoji.

    Half a pair is refused: no file can hold it and no tokenizer takes it.
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise _Refused("a \\u escape that is half of a surrogate pair", mark, "write the character itself") from error


for _tag, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), list(_first))


def _decimal(loader: _Loader, node: yaml.ScalarNode) -> int:
    digits = loader.construct_scalar(node)
    if len(digits) > _MAX_DIGITS:
        raise _Refused(f"a number with {len(digits):,} digits", node.start_mark, "put text in quotation marks")
    return int(digits)  # 1.1 would read 010 as octal


_Loader.add_constructor("tag:yaml.org,2002:int", _decimal)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read back as text."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # in single quotes, a line break would be an empty line; in double ones, an emoji would be escaped
    is_short = "\n" in text and len(text) <= 80 and max(text) <= "\uffff"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if is_short else None)


_Dumper.add_representer(str, _text)


def dump(config: BaseModel) -> str:
    """A text that `read` and pydantic read back as the same config."""
    return dump_values(config.model_dump(mode="json"))


def dump_values(values: dict[str, Any]) -> str:
    """A text that `read` reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def read(text: str, where: str, *, limited: bool = True) -> Any:
    """The value of a YAML text: nothing but dicts, lists, strings, numbers, booleans and None.

    Raises UserError, which names `where` and the line. `limited=False` is for what `dump` wrote: it adds every default.
    """
    if limited and len(text) > MAX_CHARACTERS:
        raise UserError(f"{where}: longer than {MAX_CHARACTERS:,} characters", "make it smaller")
    try:
        return _Loader(text, limited=limited).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        remedy = error.remedy if isinstance(error, _Refused) else "correct the YAML"
        raise UserError(f"{where}{line}: {shortened(error.problem or error.context or '')}", remedy) from error
    # The constructors of !!bool, !!int and !!float raise these; the reader, for characters that YAML excludes.
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:
        raise UserError(f"{where}: {shortened(str(error))}", "correct the YAML") from error

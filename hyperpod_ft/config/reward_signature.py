"""Whether a file has a function that can be called as a reward: read, not executed."""

import ast
from pathlib import Path

from hyperpod_ft.errors import UserError


def check(key: str, file: Path, name: str) -> None:
    """Raise UserError unless the file has a `def name(prompt, completion, /, **columns)`; `key`: of the run file."""
    form = f"def {name}(prompt, completion, /, **columns)"
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except OSError as error:
        raise UserError(f"{key}: cannot read {file}: {error.strerror}", "correct the path") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{key}: {file} is not valid Python{where}: {error}", "correct it") from error
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
    if not found:
        raise UserError(f"{key}: {file} defines no function {name} at its top level", f"write it as {form}")
    given, line = found[-1].args, f"{file} line {found[-1].lineno}"
    positional = [*given.posonlyargs, *given.args]
    if isinstance(found[-1], ast.AsyncFunctionDef) or len(positional) < 2 or len(given.posonlyargs) > 2:
        raise UserError(f"{key}: {line}: {name} is not a function of a prompt and a completion", f"write {form}")
    if given.kwarg is None:
        raise UserError(f"{key}: {line}: {name} does not take all columns of a row", f"write {form}")

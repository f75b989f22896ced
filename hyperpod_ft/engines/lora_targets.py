"""The error for a LoRA target that an engine does not find in the model."""

from collections.abc import Iterable

from hyperpod_ft.errors import UserError


def no_such_module(target: str, names: Iterable[str]) -> UserError:
    """`names`: the modules that can have adapters; the error lists the last parts of their names."""
    known = sorted({name.rpartition(".")[2] for name in names})
    return UserError(f"lora.target_modules: {target!r} matches no module of the model", f"it has {', '.join(known)}")

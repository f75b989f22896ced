"""How training runs: one engine per software stack, all behind `interface.Engine`.

Importing this package imports no torch; an engine's modules are imported when its training starts.
"""

import importlib
from typing import cast

from hyperpod_ft.config.run_config import EngineName
from hyperpod_ft.engines.interface import Engine
from hyperpod_ft.planning.engine_rules import module_of


def engine(name: EngineName) -> Engine:
    """The engine of that name."""
    return cast(Engine, importlib.import_module(module_of(name)))

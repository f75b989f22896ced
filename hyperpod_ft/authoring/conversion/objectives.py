"""What another tool's file is for, as an objective of a run file, and the keys of TRL's trainers that go with it.

An entry of `OBJECTIVES` adds one: the tools' tables already tell its files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperpod_ft.authoring.conversion.foreign_file import Conversion, Rule, changes, housekeeping, number, text, used
from hyperpod_ft.config import reward_signature
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.trl.settings import SETTINGS, Values

_ONE_LENGTH = "dataset.max_length counts prompt and answers together"
_ONE_STEP = "answers are used for one step"


@dataclass(frozen=True)
class KnownObjective:
    """An objective of a run file."""

    learning_rate: float  # TRL's default
    format: str | None = None  # of its rows, which no other objective has
    validates: bool = True
    rewards: bool = False  # whether functions score its answers
    rules: Mapping[str, Rule] = field(default_factory=dict)  # of TRL's keys that are keys of a run file
    defaults: Mapping[str, Any] = field(default_factory=dict)  # TRL's, where the kit's differ


def _iterations(conversion: Conversion, key: str) -> None:
    if conversion.number(key) != 1:
        conversion.changes[key] = _ONE_STEP


_OF_ANSWERS: Mapping[str, Rule] = {
    "max_completion_length": number("sampling.max_completion_length"),
    "max_prompt_length": number("dataset.max_length"),
    "temperature": number("sampling.temperature"),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), changes(_ONE_STEP)),
    "num_iterations": _iterations,
}
_OF_REWARDS: Mapping[str, Rule] = {
    **_OF_ANSWERS,
    "beta": number("sampling.beta"),
    "num_generations": number("sampling.generations"),
    **dict.fromkeys(("reward_funcs", "reward_weights"), used),
    "reward_model_name_or_path": changes("rewards are functions: the kit asks no reward model"),
}
_OF_PREFERENCES: Mapping[str, Rule] = dict.fromkeys(
    ("max_prompt_length", "max_completion_length"), changes(_ONE_LENGTH)
)
OBJECTIVES: Mapping[str, KnownObjective] = {
    "sft": KnownObjective(2e-5, rules={"max_completion_length": changes(_ONE_LENGTH)}),
    "dpo": KnownObjective(
        1e-6,
        "preference",
        rules={
            **_OF_PREFERENCES,
            "beta": number("dpo.beta"),
            "label_smoothing": number("dpo.label_smoothing"),
        },
    ),
    "kto": KnownObjective(
        1e-6,
        "unpaired-preference",
        rules={
            **_OF_PREFERENCES,
            **{key: number(f"kto.{key}") for key in ("beta", "desirable_weight", "undesirable_weight")},
        },
    ),
    "reward": KnownObjective(1e-4, "preference", rules=_OF_PREFERENCES),
    "grpo": KnownObjective(
        1e-6,
        "prompt",
        validates=False,
        rewards=True,
        rules={**_OF_REWARDS, "scale_rewards": used},
        defaults={"sampling.max_completion_length": 512},
    ),
    "rloo": KnownObjective(
        1e-6,
        "prompt",
        validates=False,
        rewards=True,
        rules=_OF_REWARDS,
        defaults={"sampling.max_completion_length": 512, "sampling.generations": 2, "sampling.beta": 0.05},
    ),
    "distillation": KnownObjective(
        1e-6,
        "prompt",
        validates=False,
        rules={
            **_OF_ANSWERS,
            "beta": number("teacher.beta"),
            "teacher_model_name_or_path": text("teacher.source"),
            "teacher_model_revision": text("teacher.revision"),
        },
        defaults={"sampling.max_completion_length": 512},
    ),
}


def require(key: str, objective: str) -> str:
    """The objective, which `key` of the file shows. Raises UserError when the kit does not have it."""
    if objective not in OBJECTIVES:
        raise UserError(f"{key}: is for objective {objective}", the_kit_has())
    return objective


def the_kit_has() -> str:
    *others, last = OBJECTIVES
    return f"the kit has {', '.join(others)} and {last}, on text (image-text models too)"


def trl_rules(objective: str) -> dict[str, Rule]:
    """The rules for keys of TRL's trainer of an objective: those of the run file's own sections, and of section trl.

    What every trainer has, such as the optimizer, is not for section trl, which needs engine trl; vLLM needs GPUs.
    """
    settings = {name: kind for name, kind in SETTINGS[objective].items() if "vllm" not in name}
    common = {name for name in settings if all(of.get(name) == settings[name] for of in SETTINGS.values())}
    of_section = {name: _setting(settings[name]) for name in settings if name not in common}
    return of_section | dict(OBJECTIVES[objective].rules)


def named_rules(objective: str, names: Mapping[str, str]) -> dict[str, Rule]:
    """The same by another tool's names for some of TRL's keys: `names` has TRL's by its own."""
    rules, otherwise = trl_rules(objective), housekeeping(f"has no effect with objective {objective}")
    return {key: rules.get(name, otherwise) for key, name in names.items()}


def _setting(kind: Values) -> Rule:
    """A setting of section trl, by its kind there. Its value is checked with the run file's."""

    def rule(conversion: Conversion, key: str) -> None:
        value = conversion.values[key]
        if kind is bool:
            value = conversion.is_on(key)
        elif kind in (int, float):
            value = conversion.number(key) if kind is float else int(conversion.number(key))
        elif isinstance(kind, list) and not isinstance(value, list):
            value = [value]
        conversion.draft.set(f"trl.{key}", value)

    return rule


def set_objective(conversion: Conversion, objective: str) -> None:
    """What more than one key decides, and the defaults of TRL's trainer."""
    draft, known = conversion.draft, OBJECTIVES[objective]
    if objective != "sft":
        draft.set("training.objective", objective)
    for key, value in known.defaults.items():
        draft.default(key, value, "TRL's default")


# TRL's functions, by the kit's: a pattern is looked for, not compared with the whole answer
_REWARDS: Mapping[str, Mapping[str, Any]] = {
    "accuracy_reward": {"function": "math_verify", "column": "solution"},
    "think_format_reward": {
        "function": "regex",
        "pattern": r"(?s)\A<think>(?!.*<think>).*?</think>",
        "match": "search",
    },
}


def set_rewards(conversion: Conversion, values: Mapping[str, Any], where: str = "") -> None:
    """Section reward, of `values` with TRL's names. Raises UserError for a function that the kit cannot call."""
    key = f"{where}reward_funcs"
    names, weights = _listed(values.get("reward_funcs")), _listed(values.get("reward_weights"))
    if not names:
        raise UserError(f"{key}: is missing", "name the functions that reward answers")
    rewards = []
    for place, name in enumerate(names):
        reward = _reward(conversion, key, str(name))
        rewards.append(reward | ({"weight": weights[place]} if place < len(weights) else {}))
    conversion.draft.set("reward", rewards)
    scaled = values.get("scale_rewards")
    if scaled is not None:
        old = {True: "group", False: "none"}[scaled] if isinstance(scaled, bool) else scaled
        conversion.draft.set("trl.scale_rewards", old)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _reward(conversion: Conversion, key: str, name: str) -> dict[str, Any]:
    if name in _REWARDS:
        if name == "accuracy_reward":
            conversion.changes[key] = "accuracy_reward is math_verify, which also takes numbers that are not in LaTeX"
        return {**_REWARDS[name], "name": name}
    module, _, function = name.rpartition(".")
    form = f"def {function}(prompt, completion, /, **columns)"
    if not module:
        raise UserError(
            f"{key}: the kit has no function {name}",
            f"write it in a file rewards.py, as {form}, and name it rewards.{function}",
        )
    written = Path(*module.split(".")).with_suffix(".py")
    file = conversion.find(str(written))
    if file is None:
        raise UserError(
            f"{key}: {name} is in {written}, which is neither here nor beside the file", f"write {form} there"
        )
    reward_signature.check(key, file.resolve(), function)
    return {"function": f"{file.resolve()}:{function}"}

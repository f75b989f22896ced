"""Section `eval` of a run file: benchmarks of EleutherAI's lm-evaluation-harness for the base and the tuned model."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hyperpod_ft.config.fields import NonNegativeInt, PlainPath, PositiveInt, Revision, Section, matches

# Names of tasks, groups and tags; the harness would read `*` and `?` as patterns.
TaskName = Annotated[
    str, matches(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", "the name of one task: letters, digits and . _ + -")
]


class Eval(Section):
    """Benchmarks of lm-evaluation-harness for the base and the tuned model. Stage `eval` exists only with it."""

    tasks: tuple[TaskName, ...] = Field(
        min_length=1,
        max_length=100,
        description="Names of tasks, groups or tags of lm-evaluation-harness, or of the YAML files in `include_path`.",
    )
    num_fewshot: NonNegativeInt | None = Field(
        None, le=1000, description="Number of solved examples before each question; each task's own if not set."
    )
    limit: PositiveInt | None = Field(
        None,
        description="Only the first questions of each task, for a trial: the scores are then no benchmark results.",
    )
    batch_size: PositiveInt | Literal["auto"] = Field(
        1, description="Questions that the model reads at once; `auto` chooses the most that fit an accelerator."
    )
    apply_chat_template: bool = Field(
        False,
        description="Write the questions with the tuned model's chat template, for both models. Set it for a model"
        " that was tuned on chats.",
    )
    include_path: PlainPath | None = Field(
        None,
        description="Directory of your own tasks: YAML files, their Python functions and their data. It is copied to"
        " `cluster.root`; paths in the YAML files are relative to it.",
    )
    include_revision: Revision | None = Field(
        None, description="Digest of `include_path`, `local-...`; the kit sets it when it resolves the run file."
    )
    allow_code_execution: bool = Field(
        False,
        description="Allow tasks that run code written by the models, such as `humaneval` and `mbpp`, on the node, as"
        " your user. Without it they are refused.",
    )
    python: PlainPath | None = Field(
        None,
        description="Path of an interpreter that has lm-evaluation-harness (`lm_eval`), torch, transformers and this"
        " kit's packages. If not set, stage `tasks` creates a virtual environment below `cluster.root` that adds"
        " lm-evaluation-harness to the run's environment.",
    )

    @field_validator("tasks")
    @classmethod
    def _each_task_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := next((name for name in value if value.count(name) > 1), None):
            raise ValueError(f"{repeated} is listed twice; remove one")
        return value

"""The certificate of a model: what stage certify proved of its kind, and what a run may ask of it.

The stage belongs to engines torch and trl. It trains a small random model of the same config.json on CPUs; what fails
there is refused, except that documents may have to train in rows of their own.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.engine_rules import limits_of
from hyperpod_ft.planning.layout import Degrees, Layout
from hyperpod_ft.planning.trl.settings import attention


@dataclass(frozen=True)
class Certificate:
    """Facts of the record of stage certify."""

    not_packed: str = ""  # why documents do not share rows; empty: they train there as they do alone
    not_proven: str = ""  # why there was no small model to prove anything with
    target_parameters: tuple[str, ...] = ()  # PEFT's, of the adapters; those of shared experts are such too
    # of engine trl, with method full
    not_sharded: str = ""  # why ranks do not divide the weights
    unreached: str = ""  # a parameter that gets no gradient, so that several ranks do not train

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Certificate | None":
        """The certificate in a record's facts; None when they are damaged."""
        try:
            return _CERTIFICATE.validate_python(facts)
        except ValueError:
            return None

    def __str__(self) -> str:
        """What follows from it, for plans and logs."""
        if self.not_proven:
            return f"nothing is proven: {self.not_proven}"
        proven = "a small model of this kind trains, and what is trained loads as it was"
        return f"{proven}; {f'one example a row: {self.not_packed}' if self.not_packed else 'examples share rows'}"

    def check(self, config: RunConfig, degrees: Degrees) -> None:
        """Raise UserError for several documents, or ranks, in a row of a model that cannot have them.

        And for an endpoint that cannot serve the adapters, and experts of which it is not known that ranks divide them.
        """
        if self.target_parameters and config.deploy and config.deploy.model == "adapter":
            raise UserError(
                "deploy.model: vLLM is not known to serve adapters with target_parameters, as this model's need for"
                f" {', '.join(self.target_parameters)}",
                "set it to merged",
            )
        if self.not_proven and degrees.expert_parallel > 1:
            raise UserError(f"parallelism.expert_parallel: {self.not_proven}", "set it to 1")
        if config.engine == "trl":
            self._check_trl(config, degrees)
        if not self.not_packed:
            return
        if config.dataset.has_preferences and config.engine == "torch":
            raise UserError(
                "training.objective: dpo trains both completions of a pair in one row, and this model's rows hold one"
                f" example each: {self.not_packed}",
                "choose a model of another type",
            )
        if config.dataset.packing in ("bfd", "wrapped"):
            raise UserError(
                f"dataset.packing: {config.dataset.packing} is not possible with this model: {self.not_packed}",
                "set it to auto",
            )
        if degrees.context_parallel > 1:
            raise UserError(
                "parallelism.context_parallel: the rows of this model cannot be divided, since engine torch does not"
                f" compute its attention: {self.not_packed}",
                "set it to 1",
            )

    def _check_trl(self, config: RunConfig, degrees: Degrees) -> None:
        """Raise UserError for what only a small model would prove, and rows that engine trl joins."""
        training = config.training
        if self.not_proven and training.objective != "sft":
            raise UserError(
                f"training.objective: {training.objective}: {self.not_proven}",
                "set it to sft, or choose a model of another type",
            )
        if self.not_proven and training.method == "full" and degrees.data_parallel > 1:
            raise UserError(f"training.method: full on several ranks: {self.not_proven}", "set it to lora")
        joins = training.objective == "sft" and not config.dataset.images and "flash" in attention(config)
        if self.not_packed and joins and training.micro_batch_size > 1:
            raise UserError(
                f"training.micro_batch_size: flash attention takes all rows as one, with this model: {self.not_packed}",
                "set it to 1, or choose another attention with trl.model_init_kwargs",
            )

    def check_layout(self, layout: Layout) -> None:
        """Raise UserError for ranks that would wait for one another, or whose checkpoints could not be used.

        DDP waits for each gradient. Of a parameter without one, sharded checkpoints lack the optimizer's state, which
        accelerate asks for when training resumes.
        """
        if layout.degrees.data_parallel == 1:
            return
        not_sharded = self.not_sharded if layout.sharding.by_layer else ""
        if reason := f"{self.unreached} gets no gradient" if self.unreached else not_sharded:
            raise UserError(
                f"parallelism.sharding: {layout.sharding} is not possible with this model: {reason}",
                f"{'' if self.unreached else 'set it to replicated, or '}set training.method to lora, or use one rank"
                " or engine torch",
            )


_CERTIFICATE = TypeAdapter(Certificate)


@contextlib.contextmanager
def naming_trl(config: RunConfig, degrees: Degrees, model_config: Mapping[str, Any]) -> Iterator[None]:
    """Let an error of another engine name engine trl as a remedy, if it takes the run; its certificate decides."""
    try:
        yield
    except UserError as error:
        wrong = error.problem.partition(":")[0]
        if config.engine == "trl" or wrong not in ("model.source", "training.objective"):  # wrong with any engine
            raise
        other, limits = config.model_copy(update={"engine": "trl"}), limits_of("trl")
        try:
            limits.check_settings(other)
            limits.check_degrees(other, degrees)
            limits.check_model_config(other, degrees, model_config)
        except UserError:
            raise error from None
        raise UserError(error.problem, f"{error.remedy}, or try engine: trl") from error

"""What training minimizes: a mean over label tokens, or over pairs of completions."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import logsigmoid

from hyperpod_ft.config.run_config import RunConfig
from hyperpod_ft.config.sections.training import Dpo
from hyperpod_ft.engines.batches import Batch, PackedSplit, PreferenceSplit, Seq2SeqBatch
from hyperpod_ft.engines.torch import devices
from hyperpod_ft.engines.torch.model import language_model
from hyperpod_ft.engines.torch.model.context_parallel import SequenceChunk
from hyperpod_ft.engines.torch.model.t5 import model as t5
from hyperpod_ft.errors import UserError


class Objective:
    """A loss, as sums over batches that are divided by a count over all ranks and micro batches of a step.

    This one is cross entropy, a mean over label tokens.
    """

    metrics: tuple[str, ...] = ()
    """What is measured besides the loss, by the names in metrics.jsonl."""

    def __init__(self, chunk: SequenceChunk) -> None:
        """`chunk`: the part of each row that is this rank's."""
        self._chunk = chunk

    def open(self, directory: Path) -> PackedSplit:
        """A split of the prepared dataset. Raises UserError when it is damaged or empty."""
        return PackedSplit(directory)

    def count(self, split: PackedSplit, rows: NDArray[np.int64], where: str) -> int:
        """What the sums over these rows are divided by. Raises UserError, about the rows of `where`, when it is 0."""
        tokens = split.label_tokens(rows)
        if not tokens:
            raise UserError(
                f"{where}: its rows have no token that counts in the loss", "check dataset.loss_on and the data"
            )
        return tokens

    def inputs(self, batch: Batch | Seq2SeqBatch, device: torch.device, compiled: bool) -> dict[str, torch.Tensor]:
        """The arguments of `sums`, on `device`, from a batch on the CPU. `compiled`: the model's layers are."""
        if isinstance(batch, Seq2SeqBatch):
            return t5.inputs(batch, device, compiled)
        return language_model.inputs(batch, device, compiled, self._chunk)

    def sums(self, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss, which can be differentiated, and the metrics, summed over a batch: fp32 [1 + metrics]."""
        loss: torch.Tensor = module(**inputs)
        return loss[None]


class DirectPreference(Objective):
    """Direct preference optimization (Rafailov et al., arXiv:2305.18290), a mean over pairs.

    A completion's reward is beta log(p / p_ref), with its probability by the model as it is and as it was before
    training. The loss of a pair is -log sigmoid(m) of its margin m, the chosen reward less the rejected one; with label
    smoothing e it is -(1 - e) log sigmoid(m) - e log sigmoid(-m) (conservative DPO, as in the authors' implementation).
    """

    # TRL's names
    metrics = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")

    def __init__(self, dpo: Dpo) -> None:
        self._dpo = dpo

    def open(self, directory: Path) -> PreferenceSplit:
        return PreferenceSplit(directory)

    def count(self, split: PackedSplit, rows: NDArray[np.int64], where: str) -> int:
        assert isinstance(split, PreferenceSplit)
        pairs = int(split.pairs(rows).sum())
        if not pairs:
            raise UserError(f"{where}: its rows hold no pair of completions", "check dataset.source")
        return pairs

    def inputs(self, batch: Batch | Seq2SeqBatch, device: torch.device, compiled: bool) -> dict[str, torch.Tensor]:
        assert isinstance(batch, Batch) and batch.reference is not None
        reference = {"reference": devices.copied_to(device, batch.reference)}
        return language_model.inputs(batch, device, compiled, by_document=True) | reference

    def sums(self, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        arguments = {name: value for name, value in inputs.items() if name != "reference"}
        return self.of_log_probabilities(-module(**arguments), inputs["reference"])

    def of_log_probabilities(self, model: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The sums, from log-probabilities fp32 [2 pairs]: chosen, rejected, chosen and so on."""
        chosen, rejected = (self._dpo.beta * (model - reference)).view(-1, 2).unbind(1)
        margins, smoothing = chosen - rejected, self._dpo.label_smoothing
        losses = -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)
        metrics = (chosen, rejected, margins, (margins > 0).float())
        return torch.stack([losses.sum(), *(metric.detach().sum() for metric in metrics)])


def objective_of(config: RunConfig, chunk: SequenceChunk) -> Objective:
    """The objective of a run. `chunk`: the part of each row that is this rank's."""
    return DirectPreference(config.dpo) if config.training.objective == "dpo" else Objective(chunk)

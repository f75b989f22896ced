"""ROUGE of the model's greedy answers to validation samples, as it is in the middle of its training.

The answers are those that stage generate gives with the same weights: by the forward passes of the model's own classes.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict

from transformers import PreTrainedModel

from hyperpod_ft import heartbeat
from hyperpod_ft.data import tokenizer as tokenizers
from hyperpod_ft.data.prepared import PreparedDataset
from hyperpod_ft.engines.interface import TrainingTask
from hyperpod_ft.engines.ranks import Ranks
from hyperpod_ft.errors import UserError
from hyperpod_ft.evaluation import greedy, rouge


class ValidationRouge:
    """The first validation samples of a run with an encoder-decoder, divided over the ranks."""

    def __init__(self, task: TrainingTask, ranks: Ranks, samples: int) -> None:
        """Raises UserError when the dataset has no sample, or the model no usable tokenizer."""
        self._ranks, self._tokenizer = ranks, tokenizers.load(task.base_model)
        self._max_new_tokens = task.config.generate.max_new_tokens
        self._at_once = task.config.training.micro_batch_size  # takes less memory than to train on as many
        found = PreparedDataset(task.dataset).samples("validation")[:samples]
        if not found:
            raise UserError(
                f"training.validate_rouge_rows: {task.dataset} holds out no sample", "raise dataset.validation_share"
            )
        longest = task.config.dataset.max_length
        self._sources = [_cut(tokenizers.source_ids(self._tokenizer, sample.prompt), longest) for sample in found]
        self._expected = [sample.completion for sample in found]

    def measure(self, model: PreTrainedModel, step: int) -> dict[str, float]:
        """The means over the samples, equal on all ranks, by their names in metrics.jsonl. Collective.

        `model`: whole on this rank, after `step` steps; it stays as it is.
        """
        own = range(self._ranks.rank, len(self._sources), self._ranks.world_size)
        with _answering(model):
            asked = [self._sources[number] for number in own]
            found = dict(greedy.answered(model, self._tokenizer, asked, self._max_new_tokens, self._at_once))
        answers = {number: found[place].text for place, number in enumerate(own)}
        every = dict(pair for of_rank in self._ranks.gather(f"rouge/{step}", [*answers.items()]) for pair in of_rank)
        scores = rouge.mean([(every[number], expected) for number, expected in enumerate(self._expected)])
        return {f"validation_{name}": value for name, value in asdict(scores).items()}


def _cut(source: list[int], longest: int) -> list[int]:
    """As training cuts it: its end, EOS, stays."""
    return source if len(source) <= longest else [*source[: longest - 1], source[-1]]


@contextlib.contextmanager
def _answering(model: PreTrainedModel) -> Iterator[None]:
    """Without dropout, and without the forward passes that training has put in place of those of the classes.

    Those take packed rows and return a loss; compiled ones would get a graph for each length. Each token is a beat.
    """
    replaced = {module: vars(module).pop("forward") for module in model.modules() if "forward" in vars(module)}
    settings = model.generation_config
    beats = model.register_forward_pre_hook(lambda *_: heartbeat.beat())
    model.eval()
    yield
    model.train()
    beats.remove()
    model.generation_config = settings
    for module, forward in replaced.items():
        module.forward = forward

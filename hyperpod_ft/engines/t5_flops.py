"""Model FLOPs of training a T5, as flops.py counts them for decoders.

Tokens of the encoder pass its layers and the key and value matrices of the decoder's attention to them; tokens of the
decoder its other matrices and the output matrix. Attention over k keys adds 12 * H * Q * k operations to each query.
"""

from hyperpod_ft.config.sections.dataset import Dataset
from hyperpod_ft.planning.encoder_decoder.t5_shape import T5Shape


def flops_per_token(shape: T5Shape, dataset: Dataset, targets: frozenset[str], rank: int | None) -> float:
    """Operations to train on a row, forward and backward, divided by its positions in both parts.

    `rank`: of the adapters on `targets`; None when all parameters are trained.
    """
    assert dataset.max_target_length is not None
    source, target = dataset.max_length, dataset.max_target_length
    of_source = of_target = 0
    for name, (inputs, outputs) in shape.matrices.items():
        encoder, decoder = shape.times(name)
        crossing = shape.decoder_layers if name in ("k", "v") else 0
        of_source += (encoder + crossing) * inputs * outputs
        of_target += (decoder - crossing) * inputs * outputs
    of_target += shape.vocabulary * shape.hidden
    each = 6 if rank is None else 4  # a frozen matrix needs no weight gradient
    operations = each * (source * of_source + target * of_target)
    if rank is not None:
        adapters = shape.adapters(targets, rank)
        operations += 6 * (source * adapters[0] + target * adapters[1])
    pairs = shape.encoder_layers * source**2 + shape.decoder_layers * (target**2 + target * source)
    return (operations + 12 * shape.query_width * pairs) / (source + target)

"""The proof: a small random model of a kind is trained, saved, consolidated, merged and loaded, before a large one."""

import contextlib
import io
from pathlib import Path

from hyperpod_ft.checkpoint.formats.model_directory import is_encoder_decoder, read_config
from hyperpod_ft.config.sections.training import Lora
from hyperpod_ft.engines.certificate.alone import alone
from hyperpod_ft.engines.certificate.model import NotBuiltError, save_small
from hyperpod_ft.engines.torch import consolidable
from hyperpod_ft.engines.torch.certificate import packing
from hyperpod_ft.engines.torch.certificate.round_trip import check_round_trip
from hyperpod_ft.errors import UserError
from hyperpod_ft.planning.certificate import Certificate

SMALL = "model"  # the directory of the small model, below `scratch`
_REMEDY = "choose a model of another type"


def certify(source: Path, lora: Lora | None, scratch: Path) -> Certificate:
    """The certificate of the model in `source`, of which config.json and headers are read; `scratch`: an empty place.

    `lora`: None when all parameters are trained. Documents of an encoder-decoder share rows, since the engine computes
    all its attention; no small one is made. Raises UserError when the model cannot be trained, or what is trained
    cannot be consolidated or loaded.
    """
    adapters = consolidable.check(source, lora)
    parameters = adapters.target_parameters if adapters else ()
    if is_encoder_decoder(read_config(source)):
        return Certificate()
    small = scratch / SMALL
    try:
        save_small(source, small)
        documents = alone(small)
    except NotBuiltError as error:
        reason = f"no small model of this type could be tried: {error}"
        return Certificate(reason, reason, parameters)
    not_packed = packing.why_not_packed(small, documents)
    try:
        if not_packed and (different := packing.why_not_unpacked(small, documents)):
            raise UserError(
                f"model.source: engine torch does not compute what transformers does for this type: {different}",
                _REMEDY,
            )
        with contextlib.redirect_stdout(io.StringIO()):  # what training reports of a small model is of no interest
            check_round_trip(small, lora, scratch, packed=not not_packed)
    except UserError:
        raise
    except Exception as error:  # transformers' classes raise errors of any type
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"model.source: a small model of this type cannot be trained: {reason}", _REMEDY) from error
    return Certificate(not_packed, target_parameters=parameters)

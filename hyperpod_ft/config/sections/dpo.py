"""Section `dpo` of a run file: training on preferences."""

from typing import Annotated

from pydantic import Field

from hyperpod_ft.config.fields import PositiveFloat, Section, Share


class Dpo(Section):
    """Direct preference optimization (training.objective dpo)."""

    beta: PositiveFloat = Field(
        0.1, description="Scale of the rewards: the higher, the closer the model stays to its starting point."
    )
    label_smoothing: Annotated[Share, Field(lt=0.5)] = Field(
        0.0, description="Assumed share of pairs whose chosen and rejected completions are swapped (conservative DPO)."
    )

"""The base model: section `model`."""

from pydantic import Field

from hyperpod_ft.config.fields import Revision, Section, Source


class Model(Section):
    """The base model."""

    source: Source = Field(
        description="A Hugging Face Hub id (`meta-llama/Meta-Llama-3-8B`), an `s3://bucket/prefix` URI, a local"
        " directory (absolute, or starting with `.`), or `example:tiny-llama`, which is included."
    )
    revision: Revision | None = Field(
        None, description="Hub commit (recommended), tag or branch; `main` if not set. Only for Hub ids."
    )

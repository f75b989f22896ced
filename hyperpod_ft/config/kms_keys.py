"""The cluster file's section `kms_keys`."""

from typing import Annotated

from pydantic import Field

from hyperpod_ft.config.fields import Section, matches

KmsKey = Annotated[
    str,
    matches(r"arn:aws[a-z\-]*:kms:[a-z0-9\-]+:\d{12}:key/[a-zA-Z0-9\-]+", "the ARN of a KMS key, not of an alias"),
]


class KmsKeys(Section):
    """Your own KMS keys for data at rest, instead of AWS's. The keys of volumes and file system cannot be changed."""

    volumes: KmsKey | None = Field(
        None,
        description="Key of the root volume and the volume at /opt/sagemaker of every node. HyperPod supports it only"
        " with provisioning `api` and `continuous_provisioning`.",
    )
    fsx: KmsKey | None = Field(None, description="Key of the file system. Not with `existing`.")
    bucket: KmsKey | None = Field(None, description="Key of the bucket's objects. Not with `existing`.")

    @property
    def given(self) -> dict[str, str]:
        """ARN of each key that is set, by its key in the cluster file."""
        named = {"volumes": self.volumes, "fsx": self.fsx, "bucket": self.bucket}
        return {f"kms_keys.{name}": arn for name, arn in named.items() if arn}

    def problem(self, region: str, *, existing: bool, continuous: bool) -> str:
        """Why a cluster cannot have these keys; empty if it can."""
        for key, arn in self.given.items():
            if (of := arn.split(":")[3]) != region:
                return f"{key}: the key is in {of}; name one of {region}"
        if existing and (self.fsx or self.bucket):
            return "kms_keys: with `existing` only volumes: file system and bucket have their own; remove the others"
        if self.volumes and not continuous:
            return "kms_keys.volumes: HyperPod needs provisioning api and continuous_provisioning; set both"
        return ""

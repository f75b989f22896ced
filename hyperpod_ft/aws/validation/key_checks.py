"""Checks of the KMS keys that a cluster file names."""

from hyperpod_ft.aws.session import error_code
from hyperpod_ft.aws.validation.check_input import CheckInput
from hyperpod_ft.findings import Finding, error

KEYS = "kms_keys"


def keys(given: CheckInput) -> list[Finding]:
    """The keys exist, are enabled, and encrypt symmetrically, as EBS, FSx and S3 require."""
    kms, findings = given.clients["kms"], []
    for key, arn in given.config.kms_keys.given.items():
        try:
            found = kms.describe_key(KeyId=arn)["KeyMetadata"]
        except kms.exceptions.ClientError as problem:
            if error_code(problem) != "NotFoundException":
                raise
            findings.append(error(key, f"no key {arn}", "correct the ARN: aws kms list-keys"))
            continue
        kind, state = found["KeySpec"], found["KeyState"]
        if kind != "SYMMETRIC_DEFAULT":
            findings.append(error(key, f"{arn} is a key of kind {kind}", "name a symmetric key"))
        elif state != "Enabled":
            findings.append(error(key, f"{arn} is {state}", f"enable it: aws kms enable-key --key-id {arn}"))
    return findings

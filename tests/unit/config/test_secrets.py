"""Texts that are shown or written have no secrets."""

import pytest

from hyperpod_ft.config.secrets import parted, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@index.example/simple", "https://***@index.example/simple"),
        ("mysql://me:p@ss@host/runs", "mysql://***@host/runs"),
        ("a token hf_abcdefghijklmno, a key AKIAIOSFODNN7EXAMPLE", "a token ***, a key ***"),
        ("task-12345678 of scikit-learn", "task-12345678 of scikit-learn"),
        ("denied: very-private-value", "denied: ***"),
        ("very-private-value-and-more", "***"),  # not what the shorter one leaves of it
        ("short ab", "short ab"),
    ],
)
def test_secrets_are_removed(text: str, shown: str) -> None:
    environment = {
        "API_KEY": "very-private-value",
        "LONGER_TOKEN": "very-private-value-and-more",
        "OTHER_KEY": "ab",
        "HOME": "index.example",
    }
    assert without_secrets(text, environment) == shown


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PATH", "/opt/conda/envs/hf_finetune_models_2024/bin:/usr/bin", False),
        ("PYTHONPATH", "/home/ana/hf_finetune/src", False),
        ("HF_HOME", "/fsx/hf_datasets", False),
        ("LD_LIBRARY_PATH", "/opt/sk-learn-proj/lib", False),
        ("WANDB_PROJECT", "hf_finetune_models_2024", False),
        ("NCCL_IB_PKEY", "0", False),
        ("TOKENIZERS_PARALLELISM", "true", False),
        ("SSH_AUTH_SOCK", "/tmp/ssh-1/agent", False),
        ("AWS_SHARED_CREDENTIALS_FILE", "/home/ana/.aws/credentials", False),
        ("HF_TOKEN", "anything", True),
        ("WANDB_API_KEY", "anything", True),
        ("OPENAI_KEY", "anything", True),
        ("AWS_SECRET_ACCESS_KEY", "anything", True),
        ("AWS_ACCESS_KEY_ID", "anything", True),
        ("DATABASE_PASSWORD", "anything", True),
        ("MINE", "hf_abcdefghijklmnop", True),
        ("PIP_INDEX_URL", "https://me:pass@index.example/simple", True),
    ],
)
def test_only_secrets_are_kept_from_slurm(name: str, value: str, expected: bool) -> None:
    assert (name in parted({name: value}).secret) == expected

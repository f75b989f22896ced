"""The database of `accounting: rds`, against the server that stands in for AWS."""

from collections.abc import Callable

import pytest

from hyperpod_ft.findings import Finding
from tests.aws.account_place import check, clients, only
from tests.aws.conftest import REGION, Aws

KEY = "accounting_database"


@pytest.fixture
def findings(aws: Aws) -> Callable[..., list[Finding]]:
    """What validate finds about a database of RDS, with its secret, if these settings say where it is."""
    made = {"DBInstanceIdentifier": "jobs", "DBInstanceClass": "db.t3.micro", "AllocatedStorage": 20}
    login = {"MasterUsername": "slurm", "MasterUserPassword": "not-a-secret"}

    def found(engine: str = "mysql", **settings: object) -> list[Finding]:
        rds, secrets = clients(aws)("rds"), clients(aws)("secretsmanager")
        server = rds.create_db_instance(**made, **login, Engine=engine, Port=3306)["DBInstance"]
        secret = secrets.create_secret(Name="jobs", SecretString="{}")["ARN"]
        database = {"endpoint": server["Endpoint"]["Address"], "secret_arn": secret, **settings}
        checked = check(aws, accounting="rds", accounting_database=database)
        assert "accounting database" in checked.done
        return [finding for finding in checked.findings if finding.name.startswith(KEY)]

    return found


def test_a_database_of_the_account_has_no_findings(findings: Callable[..., list[Finding]]) -> None:
    assert findings() == []


@pytest.mark.parametrize(
    ("settings", "name", "verdict", "said"),
    [
        ({"engine": "postgres"}, "endpoint", "error", "is postgres"),
        ({"port": 3307}, "port", "error", "has port 3306, not 3307"),
        ({"endpoint": f"x.c1.{REGION}.rds.amazonaws.com"}, "endpoint", "warning", "no database of RDS in"),
        (
            {"secret_arn": f"arn:aws:secretsmanager:{REGION}:123456789012:secret:x-AbCdEf"},
            "secret_arn",
            "error",
            "no secret",
        ),
    ],
)
def test_what_slurmdbd_could_not_use_is_found(
    findings: Callable[..., list[Finding]], settings: dict[str, object], name: str, verdict: str, said: str
) -> None:
    finding = only(findings(**settings))
    assert (finding.name, finding.verdict) == (f"{KEY}.{name}", verdict)
    assert said in finding.found


def test_a_secret_that_is_being_deleted(findings: Callable[..., list[Finding]], aws: Aws) -> None:
    secrets = clients(aws)("secretsmanager")
    other = secrets.create_secret(Name="other", SecretString="{}")["ARN"]
    secrets.delete_secret(SecretId=other)
    assert "is being deleted" in only(findings(secret_arn=other)).found

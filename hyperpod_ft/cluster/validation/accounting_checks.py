"""Checks of the database of `accounting: rds`: its secret, and what RDS knows of it."""

from typing import Any

from hyperpod_ft.aws.session import answer_or_none, paged
from hyperpod_ft.cluster.sections import AccountingDatabase
from hyperpod_ft.cluster.validation.check_input import CheckInput
from hyperpod_ft.findings import Finding, error, warning

DATABASE = "accounting_database"
SERVICES = ("secretsmanager", "rds")
_ENGINES = ("mysql", "mariadb", "aurora-mysql")  # slurmdbd's


def database(given: CheckInput) -> list[Finding]:
    wanted = given.config.accounting_database
    assert wanted is not None, "only checked if there is one"
    return [*_secret(given, wanted), *_server(given, wanted)]


def _secret(given: CheckInput, wanted: AccountingDatabase) -> list[Finding]:
    client, key = given.clients["secretsmanager"], f"{DATABASE}.secret_arn"
    found = answer_or_none(client.describe_secret, "ResourceNotFoundException", SecretId=wanted.secret_arn)
    if found is None:
        return [error(key, f"no secret {wanted.secret_arn}", "list them: aws secretsmanager list-secrets")]
    if "DeletedDate" in found:
        restore = f"aws secretsmanager restore-secret --secret-id {wanted.secret_arn}"
        return [error(key, f"{wanted.secret_arn} is being deleted", f"restore it: {restore}")]
    return []


def _server(given: CheckInput, wanted: AccountingDatabase) -> list[Finding]:
    """A database of RDS in this account; of other hosts nothing is known."""
    if not wanted.endpoint.endswith((".rds.amazonaws.com", ".rds.amazonaws.com.cn")):
        return []
    found = _servers(given.clients["rds"]).get(wanted.endpoint.lower())
    key = f"{DATABASE}.endpoint"
    if found is None:
        problem = f"no database of RDS in {given.config.region} has the endpoint {wanted.endpoint}"
        return [warning(key, problem, "see `aws rds describe-db-instances`; right if it is of another account")]
    engine, port, status = found
    if engine not in _ENGINES:
        return [error(key, f"{wanted.endpoint} is {engine}", "name a database of MySQL or MariaDB")]
    findings = []
    if port != wanted.port:
        findings.append(
            error(f"{DATABASE}.port", f"{wanted.endpoint} has port {port}, not {wanted.port}", f"set {port}")
        )
    if status != "available":
        findings.append(warning(key, f"{wanted.endpoint} is {status}", "wait until it is available"))
    return findings


def _servers(client: Any) -> dict[str, tuple[str, int, str]]:
    """Engine, port and status of the databases of RDS, by endpoint."""
    found = {}
    for one in paged(client, "describe_db_instances", "DBInstances"):
        if address := one.get("Endpoint"):  # it has none while it is created
            found[address["Address"].lower()] = (one["Engine"], address["Port"], one["DBInstanceStatus"])
    for one in paged(client, "describe_db_clusters", "DBClusters"):
        if address := one.get("Endpoint"):
            found[address.lower()] = (one["Engine"], one["Port"], one["Status"])
    return found

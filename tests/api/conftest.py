"""The cast of the API's tests: a workspace with its agent, a person, and how they call."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contract import driver as d

if TYPE_CHECKING:
    from django.contrib.auth.models import User
    from django.test import Client

    from rehydrate.models import Workspace


@pytest.fixture
def operations_office(db: None) -> "Workspace":
    from rehydrate.models import Workspace

    return Workspace.objects.create(slug="default", title="Operations")


@pytest.fixture
def alice(operations_office: "Workspace") -> "User":
    """A reviewer."""
    from django.contrib.auth.models import User

    from rehydrate.models import Group, Membership

    user = User.objects.create_user("alice", first_name="Alice")
    group = Group.objects.create(workspace=operations_office, name="legal", roles=["reviewer"])
    Membership.objects.create(group=group, user=user)
    return user


@pytest.fixture
def bot_key(operations_office: "Workspace") -> str:
    from rehydrate import keys

    return keys.issue_agent(workspace=operations_office, name="bot", flows=[])


@pytest.fixture
def alice_key(alice: "User") -> str:
    from rehydrate import keys

    return keys.issue_person(user=alice)


@pytest.fixture
def world(loop_server: str, tmp_path: Path) -> Iterator[d.World]:
    """The contract's cast, over HTTP with the web server in this process. For tests with `transaction=True`."""
    transport = d.HttpTransport(loop_server)
    made = d.World(transport, tmp_path)
    made.apply(d.CAST)
    yield made
    transport.client.close()


@pytest.fixture
def client() -> "Client":
    """As the outside sees it: CSRF enforced, and a fault of ours is a 500."""
    from django.test import Client

    return Client(enforce_csrf_checks=True, raise_request_exception=False)


@pytest.fixture(autouse=True)
def no_limits_from_before() -> None:
    from rehydrate.api import limits

    for limit in (limits.wrong_keys, limits.wrong_hooks, limits.hooks):
        limit.forget()


def bearer(key: str, **headers: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", **headers}

from __future__ import annotations

from typing import Any

import pytest

from app.deployments.ingress.served_names import MOST_GONE, ServedNames
from app.records.adapter import KnownAdapter
from app.text.served_model import ServedModel

INFO: Any = None


def adapter(name: str, digest: str = "11") -> KnownAdapter:
    return KnownAdapter(name, digest * 16, f"/adapters/{digest}")


def names() -> ServedNames:
    found = ServedNames()
    for name, aliases in (("base", ("alias",)), ("other", ())):
        found.serve(ServedModel(name, INFO, INFO, INFO, 100, aliases=aliases))
    return found


def test_adapters_come_behind_the_models_and_go() -> None:
    found = names()
    found.set_adapters("base", frozenset({adapter("b"), adapter("a")}))
    assert list(found) == ["base", "alias", "other", "a", "b"]
    own = found["a"]
    assert (own.name, own.parent, own.engine_name, own.root) == ("a", "base", "base", "/adapters/11")
    assert own.adapter == adapter("a").ask
    assert found["base"].engine_name == "base"
    found.set_adapters("base", frozenset({adapter("b")}))
    assert list(found) == ["base", "alias", "other", "b"]
    assert found.get("a") is None
    assert found["a"] is found.of_request("a") is own, "for requests on their way"
    with pytest.raises(KeyError):
        _ = found["never"]


def test_a_name_means_another_adapter_once_replicas_say_so() -> None:
    found = names()
    found.set_adapters("base", frozenset({adapter("a")}))
    first = found["a"]
    found.set_adapters("base", frozenset({adapter("a"), adapter("c")}))
    assert found["a"] is first, "nothing has changed for it"
    found.set_adapters("base", frozenset({adapter("a", "22")}))
    assert found["a"].adapter == adapter("a", "22").ask


def test_no_adapter_takes_the_name_of_a_model_or_of_anothers_adapter() -> None:
    found = names()
    before = dict(found)
    found.set_adapters("base", frozenset(adapter(name) for name in ("base", "alias", "other")))
    assert dict(found) == before
    found.set_adapters("base", frozenset({adapter("a")}))
    found.set_adapters("other", frozenset({adapter("a", "22"), adapter("b", "22")}))
    assert (found["a"].parent, found["b"].parent) == ("base", "other")


def test_few_names_that_are_gone_are_remembered() -> None:
    found = names()
    for number in range(MOST_GONE + 10):
        found.set_adapters("base", frozenset({adapter(str(number))}))
    assert len(found._gone) == MOST_GONE
    assert found.of_request("0") is None

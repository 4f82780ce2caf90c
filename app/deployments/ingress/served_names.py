"""The names that requests may call: models by name and alias, and the adapters that their replicas serve.

Replicas tell of their adapters in every report, so an ingress knows a new one as soon as a replica has it, and a name
is gone once no replica has it. Requests that were built before name their adapter by its digest.
"""

from __future__ import annotations

from collections.abc import Iterable

from app.records.adapter import KnownAdapter
from app.text.served_model import ServedModel

MOST_GONE = 256  # names that have meant an adapter lately


class ServedNames(dict[str, ServedModel]):
    """The default model comes first."""

    def __init__(self) -> None:
        super().__init__()
        self._bases: dict[str, ServedModel] = {}
        self._heard: dict[str, frozenset[KnownAdapter]] = {}
        self._gone: dict[str, ServedModel] = {}

    def serve(self, model: ServedModel) -> None:
        """A model of the configuration."""
        self._bases[model.name] = model
        for name in (model.name, *model.aliases):
            self[name] = model

    def set_adapters(self, model: str, adapters: frozenset[KnownAdapter]) -> None:
        """Serve these adapters of a model's replicas, and no others."""
        if model not in self._bases or self._heard.get(model) == adapters:
            return
        self._heard[model] = adapters
        wanted = _by_name(adapters, self.values(), model)
        for name in [name for name, served in self.items() if served.parent == model and name not in wanted]:
            self._remember(self.pop(name))
        for name, adapter in wanted.items():
            known = self.get(name)
            if known is None or known.adapter != adapter.ask:
                self[name] = self._bases[model].adapted(adapter.ask, adapter.path)

    def of_request(self, name: str) -> ServedModel | None:
        """Returns what a request was built for, also where its adapter has lost the name since: its engine decides."""
        return self.get(name) or self._gone.get(name)

    def __missing__(self, name: str) -> ServedModel:
        """A request is on its way under a name that has just gone."""
        return self._gone[name]

    def _remember(self, served: ServedModel) -> None:
        self._gone[served.name] = served
        if len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]


def _by_name(adapters: Iterable[KnownAdapter], served: Iterable[ServedModel], model: str) -> dict[str, KnownAdapter]:
    """One adapter for each name, none for the name of a model or of another model's adapter. While replicas change from
    one to another, either may serve."""
    taken = {name for one in served if one.parent != model for name in (one.name, *one.aliases)}
    return {adapter.name: adapter for adapter in sorted(adapters) if adapter.name not in taken}

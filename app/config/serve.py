"""All options of an application, by section."""

from __future__ import annotations

from pydantic import Field, model_validator

from app.config.admin import AdminConfig
from app.config.admission import AdmissionConfig
from app.config.frozen import Frozen
from app.config.ingress import IngressConfig
from app.config.model import ModelConfig
from app.config.router import RouterConfig


class ServeConfig(Frozen):
    """`args:` of the Serve application `app.deployments.app:build`."""

    models: tuple[ModelConfig, ...] = Field(min_length=1, description="The models; the first is the default.")
    ingress: IngressConfig = IngressConfig()
    router: RouterConfig = RouterConfig()
    admission: AdmissionConfig = AdmissionConfig()
    admin: AdminConfig = AdminConfig()

    @property
    def has_admin(self) -> bool:
        """True if something changes all replicas of a model together: an operator, or a request for an adapter."""
        return self.admin.is_open or any(model.adapter_resolver is not None for model in self.models)

    @model_validator(mode="after")
    def _check(self) -> ServeConfig:
        names = [name for model in self.models for name in (model.name, *model.aliases, *model.served_adapters)]
        double = {name for name in names if names.count(name) > 1}
        if double:
            raise ValueError(f"models: the name {sorted(double)[0]!r} is used twice")
        return self

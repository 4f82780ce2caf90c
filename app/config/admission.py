"""Classes of service, tenants, deadlines: the section `admission` of the configuration (docs/admission.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from app.config.frozen import Frozen

ClassName = Literal["interactive", "default", "bulk"]
CLASS_NAMES: tuple[ClassName, ...] = ("interactive", "default", "bulk")  # the best first


class ClassConfig(Frozen):
    """One class of service."""

    share: float = Field(
        gt=0, le=1, description="Share of the engines' work that the class is sure of while others wait too."
    )
    max_wait_s: float | None = Field(
        None, gt=0, description="A request that would wait longer is refused (429 or 503) when it comes; none: never."
    )


class TenantConfig(Frozen):
    """Bounds what the requests of one tenant may ask for; tenants are told apart by their API keys."""

    service_class: ClassName = Field("default", description="Class of requests that ask for none (`service_tier`).")
    best_class: ClassName = Field(
        "interactive", description="The best class that its requests may ask for; those that ask for more get this one."
    )
    max_requests: int | None = Field(
        None, ge=1, description="Requests in flight per ingress replica; more are refused with a 429."
    )

    @model_validator(mode="after")
    def _check(self) -> TenantConfig:
        if CLASS_NAMES.index(self.service_class) < CLASS_NAMES.index(self.best_class):
            raise ValueError(f"service_class={self.service_class} is better than best_class={self.best_class}")
        return self


TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class AdmissionConfig(Frozen):
    """Decides who is served first, who waits and who is refused, when more comes than the engines can do."""

    interactive: ClassConfig = ClassConfig(share=0.6, max_wait_s=60.0)
    default: ClassConfig = ClassConfig(share=0.3, max_wait_s=600.0)
    bulk: ClassConfig = ClassConfig(share=0.1)
    tenants: dict[TenantName, TenantConfig] = Field({}, description="Tenants by name, as the API keys give it.")
    other_tenants: TenantConfig = TenantConfig()
    default_timeout_s: float | None = Field(
        None, gt=0, description="Deadline of requests that bring none; none: they have no deadline."
    )
    max_timeout_s: float = Field(86_400.0, gt=0, description="Longest deadline that a request may bring.")
    retry_share: float = Field(
        0.2, ge=0, le=1, description="Retries that are let in, as a share of the requests that come for the first time."
    )
    min_retries_per_s: float = Field(3.0, ge=0, description="Retries that are let in whatever else comes, a second.")
    breaker_faults: int = Field(
        3, ge=1, description="So many transport faults in a row keep new requests from an engine replica for a while."
    )

    def of_tenant(self, tenant: str) -> TenantConfig:
        """Returns what the requests of a tenant may ask for."""
        return self.tenants.get(tenant, self.other_tenants)

    @property
    def counts_requests(self) -> bool:
        """True if a tenant may only have so many under way in each ingress replica."""
        return any(one.max_requests is not None for one in (self.other_tenants, *self.tenants.values()))

    @model_validator(mode="after")
    def _check(self) -> AdmissionConfig:
        shares = {name: getattr(self, name).share for name in CLASS_NAMES}
        if sum(shares.values()) > 1 + 1e-9:
            raise ValueError(f"the shares of {', '.join(shares)} are {sum(shares.values()):g} together; at most 1")
        if self.default_timeout_s is not None and self.default_timeout_s > self.max_timeout_s:
            raise ValueError(f"default_timeout_s={self.default_timeout_s:g} exceeds max_timeout_s")
        return self
